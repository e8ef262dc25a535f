"""Under autocast q and k are written in the dtype that attention casts them to, and no bit changes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from transformers import DynamicCache
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flash_attention, sdpa_attention
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import fused_norm
from fused_norm.kernels.operator import Operator
from fused_norm.kernels.reference import cast_output
from fused_norm.model_configs import build, tiny_config
from fused_norm.patcher import attention_functions
from fused_norm.patcher.attention_functions import read_dtype
from fused_norm.patcher.fused_block import FusedBlock

from .models import Subclass, Watching, assert_same, slow, tokens
from .test_meta_device import autocast_on

OLD = transformers.__version__.startswith("4.")
TAKEN = inspect.signature(transformers.Qwen3ForCausalLM.forward).parameters
CACHE = "cache" if "cache" in TAKEN else "past_key_values"  # before transformers 5.24
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@contextmanager
def attention_dtypes(*names: str) -> Iterator[list[tuple[torch.dtype, ...]]]:
    """Yield a list of dtypes in the forwards' calls of PyTorch's attention, noted without replacing a function.

    ``names``: the caller's variables whose dtypes are noted.
    """
    dtypes: list[tuple[torch.dtype, ...]] = []

    def noted(frame: Any, event: str, function: Any) -> None:
        is_attention = event == "c_call" and function is nn.functional.scaled_dot_product_attention
        if is_attention and torch._C._current_graph_task_id() == -1:
            dtypes.append(tuple(frame.f_locals[name].dtype for name in names))

    before = sys.getprofile()
    sys.setprofile(noted)
    try:
        yield dtypes
    finally:
        sys.setprofile(before)


@contextmanager
def reading(decide: Callable[..., Any]) -> Iterator[None]:
    """Let ``decide`` choose the dtype inside the ``with``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedBlock, "fused_norm_read_dtype", decide)
        yield


def results(model: Any, ids: Tensor, dtype: torch.dtype = BF16, **kwargs: Any) -> tuple[list[Tensor], Any]:
    """Return logits and the gradients of all hidden states and parameters, and the dtypes of attention's q and k."""
    model.zero_grad()
    # Without a mask transformers 4 creates its own.
    kwargs = {"use_cache": False, "output_hidden_states": True, "attention_mask": torch.ones_like(ids), **kwargs}
    kwargs = {name: value() if isinstance(value, type) else value for name, value in kwargs.items()}
    with attention_dtypes("query", "key") as dtypes:
        with torch.autocast(ids.device.type, dtype):
            output = model(input_ids=ids, labels=ids, **kwargs)
        tensors = [output.logits.detach()]
        if output.loss.requires_grad:
            hidden = [state for state in output.hidden_states if state.requires_grad]
            for state in hidden:
                state.retain_grad()
            output.loss.backward()
            gradients = [tensor.grad for tensor in (*hidden, *model.parameters())]
            assert len(hidden) > 1
            assert all(grad is not None for grad in gradients)
            tensors += gradients
    return tensors, dtypes


def fused(family: str, device: str, *, groups: int = 2, attention: str = "sdpa", **options: Any) -> Any:
    """Return a fused tiny model in float32; ``groups``: heads of queries for each head of keys."""
    heads = tiny_config(family).num_attention_heads
    config = tiny_config(family, num_key_value_heads=heads // groups, attn_implementation=attention)
    model = build(config, seed=0, device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(20)  # otherwise attention's weights are nearly equal
    fused_norm.apply_fused_norm(model, **options)
    return model


PADDED = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[torch.dtype, ...]]] = {
    "plain": ({}, {}, (BF16, BF16)),
    "fp16": ({}, {"dtype": FP16}, (FP16, FP16)),
    "keys of their own": ({"groups": 1}, {}, (BF16, BF16)),
    "recompute": ({"recompute": True}, {}, (BF16, BF16)),
    "padded": ({}, {"attention_mask": PADDED}, (FP32, FP32)),
    "padded, keys of their own": ({"groups": 1}, {"attention_mask": PADDED}, (BF16, BF16)),
    "cache": ({}, {"use_cache": True, CACHE: DynamicCache}, (FP32, FP32)),
    "eager": ({"attention": "eager"}, {}, ()),
}
"""Options of the model, arguments of its call, and the dtypes of q and k that reach PyTorch's attention, by name."""

FEW = {("qwen3", "recompute"), ("llama", "plain"), ("llama", "padded, keys of their own")}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        (family, way) if (family, way) in FEW else slow(family, way)
        for family in ("qwen3", "llama", "gemma3_text")
        for way in WAYS
    ],
)
def test_every_bit_is_that_of_q_and_k_in_their_own_dtype(family: str, way: str, device: str) -> None:
    options, kwargs, dtypes = WAYS[way]
    model, ids = fused(family, device, **options), tokens(device)
    kwargs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    with reading(lambda *_: None):
        expected, before = results(model, ids, **kwargs)
    actual, after = results(model, ids, **kwargs)
    layers = len(model.model.layers) if dtypes else 0
    assert before == [(FP32, FP32)] * layers
    assert after == [dtypes] * layers
    assert_same(actual, expected)


@pytest.mark.parametrize("family", ["qwen3", slow("llama"), slow("gemma3_text")])
@pytest.mark.parametrize("reentrant", [False, slow(True)])
def test_layers_that_run_again_in_the_backward_write_the_same(family: str, reentrant: bool, device: str) -> None:
    model, ids = fused(family, device), tokens(device)
    expected, _ = results(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    decided = []

    def noted(*args: Any) -> Any:
        decided.append(read_dtype(*args))
        return decided[-1]

    with reading(noted):
        actual, _ = results(model, ids)
    assert decided == [BF16] * 2 * len(model.model.layers)
    assert_same(actual, expected)


def test_recomputed_in_the_backward_they_are_of_that_dtype(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, again = fused("qwen3", device, recompute=True), []
    call = Operator.results_of

    def noted(operator: Operator, *arguments: Any) -> Any:
        if operator.name == "qk_norm" and torch._C._current_graph_task_id() != -1:
            again.append(arguments[-1])
        return call(operator, *arguments)

    monkeypatch.setattr(Operator, "results_of", noted)
    results(model, tokens(device))
    assert again == [BF16] * len(model.model.layers)


@pytest.mark.parametrize("family", ["qwen3", slow("llama"), slow("gemma3_text")])
def test_evaluation_has_the_same_logits(family: str, device: str) -> None:
    model, ids = fused(family, device).eval(), tokens(device)
    with torch.no_grad():
        with reading(lambda *_: None):
            (expected,), _ = results(model, ids)
        (actual,), dtypes = results(model, ids)
    assert dtypes == [(BF16, BF16)] * len(model.model.layers)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("wrong", ["early", "another", "repeated"])
def test_a_dtype_that_attention_does_not_read_would_show(wrong: str, device: str) -> None:
    """A rounding to another dtype, or a gradient summed in another dtype, fails the comparison of these tests."""
    model, ids = fused("llama", device), tokens(device)
    kwargs = {"attention_mask": PADDED.to(device)} if wrong == "repeated" else {}
    with reading(lambda *_: None):
        expected, _ = results(model, ids, **kwargs)
    decide = (lambda *_: FP16) if wrong == "another" else (lambda *_: BF16)
    with reading(decide), pytest.MonkeyPatch.context() as patch:
        if wrong == "early":
            rotate = sys.modules[type(model.model.layers[0].self_attn).__module__].apply_rotary_pos_emb
            rope = lambda self, _, q, k, cos, sin, **named: rotate(q, k, cos.to(BF16), sin.to(BF16))  # noqa: E731
            patch.setattr(FusedBlock, "fused_norm_rope", rope)
        actual, _ = results(model, ids, **kwargs)
    assert not all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_stock_code_writes_the_same_where_kernels_do_not_run(device: str) -> None:
    attention = fused("qwen3", device).model.layers[0].self_attn
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    norms = attention.q_norm, attention.k_norm
    width = attention.head_dim
    q, k = (torch.randn(2, heads, 5, width, device=device) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 5, width, device=device)
    ways = [
        lambda: attention.fused_norm_rope(rotate, q, k, cos, sin, dtype=BF16),
        lambda: attention.fused_norm_rotated(*norms, rotate, q, k, cos, sin, dtype=BF16),
    ]
    plain = [rotate(q, k, cos, sin), rotate(norms[0](q), norms[1](k), cos, sin)]
    for way, expected in zip(ways, plain, strict=True):
        with fused_norm.disabled():
            stock = way()
        for mine, theirs, unrounded in zip(way(), stock, expected, strict=True):
            assert torch.equal(mine, theirs)
            assert torch.equal(mine, cast_output(unrounded, BF16))
            assert mine.dtype == BF16


def decision(device: str, **changed: Any) -> torch.dtype | None:
    """Return the decision for PyTorch's attention with two heads of queries for each of keys, after changes."""
    x = torch.randn(1, 2, 5, 16, device=device)
    arguments = {
        "attention": SimpleNamespace(num_key_value_groups=2), "attend": sdpa_attention_forward, "cache": None,
        "mask": None, "key": x, "value": x, "extra": {"position_ids": None},
    } | changed  # fmt: skip
    return read_dtype(**arguments)


def wrapper(*args: Any, **named: Any) -> Any:
    return sdpa_attention_forward(*args, **named)


CHANGES: dict[str, dict[str, Any]] = {
    "a cache": {"cache": object()},
    "a mask, keys repeated": {"mask": torch.ones(1, 1, 5, 5)},
    "values of another width": {"value": torch.randn(1, 2, 5, 8)},
    "wide heads": {"key": torch.randn(1, 2, 5, 260), "value": torch.randn(1, 2, 5, 260)},
    "another function": {"attend": wrapper},
    "no function": {"attend": partial(sdpa_attention_forward)},
    "a subclass": {"value": torch.randn(1, 2, 5, 16).as_subclass(Subclass)},
    "no tensor": {"value": [torch.randn(1, 2, 5, 16)]},
    "flash attention elsewhere than on CUDA": {"attend": flash_attention_forward},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_could_tell_gets_its_own_dtype(name: str) -> None:
    with torch.autocast("cpu", BF16):
        assert decision("cpu") == BF16
        if OLD and name in ("values of another width", "wide heads"):
            assert decision("cpu", **CHANGES[name]) == BF16  # its function does not ask for widths
        else:
            assert decision("cpu", **CHANGES[name]) is None


def test_it_is_asked_under_16_bit_autocast_alone(device: str) -> None:
    assert decision(device) is None
    with torch.autocast(device, FP16):
        assert decision(device) == FP16
        assert decision(device, attention=SimpleNamespace(), mask=torch.ones(1, 1, 5, 5)) == FP16
        with torch.autocast(device, enabled=False):
            assert decision(device) is None
        with fused_norm.disabled():
            assert decision(device) is None
        for mode in (Watching, BaseTorchFunctionMode):
            with mode():
                assert decision(device) is None


def test_a_compiled_layer_is_as_it_was(device: str) -> None:
    attention = nn.Module()
    read = lambda x: read_dtype(attention, sdpa_attention_forward, None, None, x, x, {})  # noqa: E731
    compiled = torch.compile(lambda x: x * (2 if read(x) is None else 3), backend="eager", fullgraph=True)
    x = torch.ones(1, 2, 5, 16, device=device)
    with torch.autocast(device, BF16):
        assert read(x) == BF16
        assert torch.equal(compiled(x), 2 * x)


def replacement(*args: Any, **named: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("place", "name", "change"),
    [
        (nn.functional, "scaled_dot_product_attention", "replaced"),
        (sdpa_attention, "use_gqa_in_sdpa", "replaced"),
        (sdpa_attention, "use_gqa_in_sdpa", "with other code"),
        (sdpa_attention, "sdpa_attention_forward", "with other code"),
        (sdpa_attention, "use_gqa_in_sdpa", "gone, as in another release"),
    ],
)
def test_functions_that_others_change_are_seen(place: Any, name: str, change: str) -> None:
    """At a call that would repeat a decision, at a first one, and no longer after the change is taken back."""
    with torch.autocast("cpu", BF16):
        assert decision("cpu") == BF16
        with pytest.MonkeyPatch.context() as patch:
            if change == "replaced":
                patch.setattr(place, name, replacement)
            elif change == "with other code":
                patch.setattr(getattr(place, name), "__code__", replacement.__code__)
            else:
                patch.delattr(place, name)
            assert change.startswith("gone") or decision("cpu") is None
            attention_functions._reader_of.cache_clear()
            assert decision("cpu") is None
        attention_functions._reader_of.cache_clear()
        assert decision("cpu") == BF16


def on_cuda(dtype: torch.dtype) -> Any:
    return SimpleNamespace(dtype=dtype, is_cuda=True)


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    with autocast_on("cuda"):
        yield


@pytest.mark.usefixtures("cuda_autocast")
def test_flash_attention_is_asked_where_values_are_cast_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_functions, "Tensor", SimpleNamespace)
    ask = partial(decision, "cpu", attend=flash_attention_forward, mask=torch.ones(1, 5))
    assert ask(value=on_cuda(BF16)) == BF16
    assert ask(value=on_cuda(FP32)) is ask(value=on_cuda(FP16)) is None
    assert ask(value=on_cuda(BF16), extra={"output_attentions": False, "cu_seq_lens_q": None}) == BF16
    for name in ("s_aux", "cache"):
        if name in flash_attention_forward.__code__.co_varnames:
            assert ask(value=on_cuda(BF16), extra={name: None}) is None
    for place, name in (
        (flash_attention, "_flash_attention_forward"),
        (flash_utils, "fa_peft_integration_check"),
        (flash_attention, "get_target_dtype"),
    ):
        if hasattr(place, name):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, lambda *_, **__: None)
                assert ask(value=on_cuda(BF16)) is None


@pytest.mark.usefixtures("cuda_autocast")
@pytest.mark.parametrize("masked", [False, True])
def test_flash_attention_gets_the_same_from_either_dtype(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call goes through transformers' function, with recorders in place of flash attention's own functions."""
    calls: list[tuple[Tensor, ...]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: float = 1.0, **_: Any) -> Tensor:
        calls.append((q, k, v))
        return q

    own = [flash_utils._pad_input, flash_utils._unpad_input]
    functions = [noted, noted, *([] if OLD else [None]), *own]
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: functions)
    for name in ("_loaded_implementation", "_flash_fn", "_process_flash_kwargs_fn"):
        if hasattr(flash_utils, name):
            monkeypatch.setattr(flash_utils, name, None)
    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    module = SimpleNamespace(config=config, is_causal=True, layer_idx=0)
    q, k, v = torch.randn(4, 2, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16).to(BF16)
    q = q.view(2, 4, 5, 16)
    with torch.autocast("cpu", BF16):
        for queries, keys in ((q, k), (q.to(BF16), k.to(BF16))):
            flash_attention_forward(module, queries, keys, v, PADDED if masked else None, scaling=0.5)
    assert [tensor.dtype for tensor in calls[0]] == [BF16] * 3
    assert_same(*calls)

"""The head that TRL's trainers put on a model computes what TRL's own code computes, and the report says whose runs."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fused_norm
from fused_norm import apply_fused_norm, remove_fused_norm
from fused_norm.model_configs import build, tiny_config
from fused_norm.patcher import fused_norm_module

from ..conftest import HAS_GPU, slow
from ..kernels.conftest import HEAD
from ..planted.faults import FAULTS
from .models import assert_all_near, logged, tokens

EVERY = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OF_SFT = ("log_probs", "entropy", "is_top1")
WITH_GRADIENT = ("loss", "log_probs", "entropy")
ORDERS = ("patch, head", "head, patch")
DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def trl() -> Any:
    """TRL's module of the function that puts a head on a model."""
    return pytest.importorskip("trl.trainer.utils", reason="needs trl")


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_norm_module, "_warned", {})


def make(trl: Any, order: str | None = None, *, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    """Return a tiny model with TRL's head, and patched in some order; None is stock.

    ``how``: options of TRL's function; ``changed`` takes the model before all else.
    """
    model = build(tiny_config("llama", num_hidden_layers=1), seed=0, dtype=dtype).to(DEVICE)
    how.pop("changed", lambda model: None)(model)
    for act in (order or "head").split(", "):
        apply_fused_norm(model) if act == "patch" else trl.add_fused_lm_head(model, **{"outputs": EVERY} | how)
    return model


def labels_of(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[0, :3] = labels[1, 4] = -100
    return labels


def results(model: Any, incoming: Mapping[str, Any] | None = None, **how: Any) -> dict[str, Tensor]:
    """Return the outputs of TRL's head, and the gradients of all parameters.

    ``incoming``: the outputs to be summed, each by a weight that differs from row to row, or by this number.
    """
    ids = tokens(DEVICE, length=7)
    outputs = model(**{"input_ids": ids, "labels": labels_of(ids), "fused_lm_head": True} | how)
    found = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
    incoming = dict.fromkeys(WITH_GRADIENT) if incoming is None else incoming
    weights = torch.linspace(-1.0, 2.0, found["log_probs"].numel(), device=DEVICE).view_as(found["log_probs"])
    total = sum((found[name] * (weights if by is None else by)).sum() for name, by in incoming.items() if name in found)
    if isinstance(total, Tensor) and total.requires_grad:
        model.zero_grad()
        total.backward()
        found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach() for name, value in found.items()}


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float = 2e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert actual[name].shape == value.shape, name
        assert_all_near([actual[name].float()], [value.float()], bound, 1e-6)


def frozen(model: Any) -> None:
    model.lm_head.weight.requires_grad_(False)


def scaled(model: Any) -> None:
    model.config.final_logit_softcapping, model.config.logit_scale = 3.0, 0.5


def with_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, model.lm_head.out_features, device=DEVICE))


CASES: dict[str, dict[str, Any]] = {
    "all statistics": {},
    "a temperature": {"temperature": 0.7},
    "scale, softcap, temperature": {"temperature": 1.3, "changed": scaled},
    "as SFT asks": {"outputs": OF_SFT},
    "as KTO asks": {"outputs": ("log_probs", "entropy", "mean_logits")},
    "log-probabilities alone": {"outputs": ("log_probs",)},
    "a bias": {"changed": with_bias},
    "frozen": {"changed": frozen, "temperature": 0.7},
}
MOST_USED = ("scale, softcap, temperature", "as SFT asks")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", [*MOST_USED, *slow(*(name for name in CASES if name not in MOST_USED))])
def test_the_head_computes_what_trls_own_computes(name: str, order: str, trl: Any, launches: list[str]) -> None:
    stock, fused = make(trl, **CASES[name]), make(trl, order, **CASES[name])
    for incoming in ({"loss": None}, None, {"log_probs": 0.3}, {"entropy": None}):
        if incoming != {"entropy": None} or "entropy" in CASES[name].get("outputs", EVERY):
            assert_equal(results(fused, incoming), results(stock, incoming))
    assert "linear_log_probs" in launches
    ids = tokens(DEVICE, length=7)
    for more in ({"num_items_in_batch": 5}, {"labels": None, "shift_labels": labels_of(ids)}):
        assert_equal(results(fused, **more), results(stock, **more))
    with torch.no_grad():
        assert_equal(results(fused), results(stock))


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
@pytest.mark.parametrize("cast", [False, *slow(True)])
def test_under_autocast_and_in_16_bits_errors_are_those_of_trls_head(dtype: torch.dtype, cast: bool, trl: Any) -> None:
    """Gradients of float32 weights are sums that nothing rounds to 16 bits."""
    how = {"dtype": dtype, "cast_lm_head_to_fp32": cast, "outputs": OF_SFT}
    stock, fused = make(trl, **how), make(trl, "patch, head", **how)
    for incoming in (None, {"log_probs": 0.3}):
        exact = results(make(trl, dtype=torch.float64, outputs=OF_SFT), incoming)
        with torch.autocast("cpu", torch.bfloat16):
            of_stock, of_fused = results(stock, incoming), results(fused, incoming)
        for name, truth in exact.items():
            assert of_fused[name].dtype == of_stock[name].dtype
            if truth.is_floating_point():
                error, allowed = ((found[name] - truth).norm() / truth.norm() for found in (of_fused, of_stock))
                assert error <= 1.1 * allowed + 1e-6, name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast", [False, *slow(True)])
def test_outputs_and_gradients_of_the_head_alone_are_rounded_where_trls_are(
    dtype: torch.dtype, autocast: bool, cast: bool, trl: Any
) -> None:
    how = {"dtype": dtype, "cast_lm_head_to_fp32": cast, "temperature": 0.7, "changed": scaled}
    stock, fused = make(trl, **how), make(trl, **how)
    others = dict.fromkeys(("norms", "qk", "rope", "residual", "post_norm", "mlp"), False)
    assert loss_row(fused, **others).reason is None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        of_stock, of_fused = results(stock), results(fused)
    for name in ("loss", *EVERY):
        assert_equal({name: of_fused[name]}, {name: of_stock[name]})
    grads = [found["lm_head.weight"] for found in (of_fused, of_stock)]
    assert grads[0].dtype == grads[1].dtype == dtype
    # Neither is in 16 bits what the other is in 32.
    assert len({torch.equal(grad, grad.bfloat16().to(dtype)) for grad in grads}) == 1
    assert (grads[0] - grads[1]).norm() <= 2**-8 * grads[1].norm()


def test_products_are_three_for_sft_two_if_the_head_is_frozen_and_one_without_a_gradient(
    trl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[Any] = []
    multiply = HEAD._multiply
    monkeypatch.setattr(HEAD, "_multiply", lambda *args: [products.append(args), multiply(*args)])

    def count(model: Any, incoming: Any = None, **how: Any) -> int:
        products.clear()
        results(model, incoming, **how)
        return len(products)

    sft, dpo = make(trl, "patch, head", outputs=OF_SFT), make(trl, "patch, head")
    assert count(sft, {"log_probs": -0.3}) == 3
    assert count(dpo, {"log_probs": None}) == count(dpo, {"log_probs": -0.3}) == 4
    assert count(lora := make(trl, "patch, head", changed=frozen), {"log_probs": None}) == 2
    # An entropy bonus costs two products more, once.
    assert [count(lora, {"log_probs": None, "entropy": -0.01}) for _ in range(3)] == [4, 3, 3]
    with torch.no_grad():
        assert count(sft) == count(dpo) == 1
    # A loss as that of ``loss_type="dft"`` costs two products more, once.
    assert [count(sft, {"log_probs": None}) for _ in range(3)] == [6, 4, 4]
    assert count(sft, {"log_probs": -0.3}) == 4
    assert [count(make(trl, "patch, head", outputs=OF_SFT), {"entropy": 0.1}) for _ in range(2)] == [6, 6]


def counted(model: Any) -> None:
    """Plant a fault: a row without a label counts as one with the first."""
    run = model.forward
    model.forward = lambda *args, labels, **how: run(*args, labels=labels.clamp(min=0), **how)


@pytest.mark.parametrize("fault", ["linear_log_probs-temperature", "linear_log_probs-shifted", "counted"])
def test_faults_are_seen(fault: str, trl: Any) -> None:
    how = {"temperature": 0.7}
    expected, fused = results(make(trl, **how)), make(trl, "patch, head", **how)
    assert_equal(results(fused), expected)
    with contextlib.ExitStack() as stack:
        if fault == "counted":
            counted(fused)
        else:
            stack.enter_context(FAULTS[fault].planted(fused))
        with pytest.raises(AssertionError):
            assert_equal(results(fused), expected)


def test_without_any_label_the_loss_is_a_zero_with_a_gradient(trl: Any) -> None:
    how = {"labels": torch.full((2, 7), -100)}
    stock, fused = (results(make(trl, order, outputs=OF_SFT), {"loss": 1.0}, **how) for order in (None, ORDERS[0]))
    assert_equal(fused, stock)
    assert fused["lm_head.weight"].abs().max() == fused["loss"] == 0.0


def loss_row(model: Any, **options: Any) -> Any:
    (row,) = (row for row in apply_fused_norm(model, **options).rows if row.kind == "loss")
    return row


@pytest.mark.parametrize("order", ORDERS)
def test_the_report_says_that_trls_log_probabilities_are_fused(order: str, trl: Any) -> None:
    row = loss_row(model := make(trl, order))
    assert (row.path, row.reason, row.trainer) == ("lm_head", None, "TRL")
    assert "log-probabilities of TRL without logits" in str(apply_fused_norm(model))
    assert loss_row(make(trl, "patch")).trainer is None


def changed_function(model: Any, trl: Any) -> None:
    """Put a head on the model whose code stands nowhere, as that of another release."""
    trl.add_fused_lm_head(model, outputs=EVERY)
    function = function_of(model)
    del model.forward
    code = function.__code__.replace(co_firstlineno=function.__code__.co_firstlineno + 1)
    changed = FunctionType(code, function.__globals__, "forward", None, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    model.forward = MethodType(changed, model)


def zero3(model: Any, trl: Any) -> None:
    trl.add_fused_lm_head(model, outputs=EVERY)
    model.lm_head.weight.ds_id = 1


def with_adapter(model: Any, trl: Any) -> None:
    trl.add_fused_lm_head(model, outputs=EVERY)
    model.lm_head = peft.get_peft_model(
        nn.Sequential(model.lm_head), peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    ).base_model.model[0]


def replaced_function(model: Any, trl: Any) -> None:
    trl.add_fused_lm_head(model, outputs=EVERY)

    theirs = trl._ChunkedLogProbFunction

    class Other(theirs):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            return theirs.forward(ctx, *args)

    trl._ChunkedLogProbFunction = Other


def function_of(model: Any) -> FunctionType:
    """TRL's function on a model, ours around it or not."""
    function = vars(model)["forward"].__func__
    while "original_forward" not in function.__code__.co_freevars:
        function = function.__wrapped__
    return function


REASONS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "changed": (changed_function, "has other code in its head than TRL 1.16, or it was replaced"),
    "replaced": (replaced_function, "has other code in its head than TRL 1.16, or it was replaced"),
    "ZeRO-3": (zero3, "ZeRO-3 takes the weight of its head apart, and TRL's head gathers it"),
    "LoRA on the head": (with_adapter, "its head is a lora.Linear"),
}


@pytest.mark.parametrize("order", ["patched before", "patched after"])
@pytest.mark.parametrize("name", REASONS)
def test_what_is_not_known_runs_as_trl_has_it_and_the_report_says_why(
    name: str,
    order: str,
    trl: Any,
    launches: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change, reason = REASONS[name]
    monkeypatch.setattr(trl, "_ChunkedLogProbFunction", trl._ChunkedLogProbFunction)  # for the way back
    stock, fused = (build(tiny_config("llama", num_hidden_layers=1), seed=0).to(DEVICE) for _ in range(2))
    if order == "patched before":
        apply_fused_norm(fused)
    for model in (stock, fused):
        torch.manual_seed(0)
        change(model, trl)
    if order == "patched after":
        apply_fused_norm(fused)
    expected = results(stock)
    launches.clear()
    assert_equal(results(fused), expected)
    results(fused)
    assert "linear_log_probs" not in launches
    if order == "patched before":
        assert len([line for line in logged(caplog) if "TRL's head: " in line and reason in line]) == 1
    row = loss_row(fused)
    assert row.trainer == "TRL"
    assert row.reason.startswith("TRL's head computes the loss: ")
    assert reason in row.reason


def test_without_the_option_loss_trls_own_runs(trl: Any, launches: list[str]) -> None:
    fused, stock = make(trl), make(trl)
    row = loss_row(fused, loss=False)
    assert row.reason == "TRL's head computes the loss: switched off: loss=False"
    assert_equal(results(fused), results(stock))
    assert "linear_log_probs" not in launches
    assert loss_row(fused).reason is None
    assert_equal(results(fused), results(stock))
    assert "linear_log_probs" in launches


@pytest.mark.parametrize("order", ORDERS)
def test_a_patch_is_undone_and_done_again(order: str, trl: Any, launches: list[str]) -> None:
    fused, stock = make(trl, order), make(trl)
    expected, ids = results(stock), tokens(DEVICE, length=7)
    loss = stock(input_ids=ids, labels=ids).loss
    for is_fused in (True, False, True):
        if is_fused:
            assert loss_row(fused).reason is None
        else:
            remove_fused_norm(fused)
            assert function_of(fused) is vars(fused)["forward"].__func__
        launches.clear()
        assert_equal(results(fused), expected)
        assert ("linear_log_probs" in launches) == is_fused
        launches.clear()
        torch.testing.assert_close(fused(input_ids=ids, labels=ids).loss, loss)
        assert ("linear_cross_entropy" in launches) == is_fused


def test_with_fusing_switched_off_the_bits_are_trls(trl: Any, launches: list[str]) -> None:
    fused, stock = make(trl, "patch, head"), make(trl)
    with fused_norm.disabled():
        of_fused, of_stock = results(fused), results(stock)
    assert all(torch.equal(value, of_stock[name]) for name, value in of_fused.items())
    assert not launches


@pytest.mark.slow
def test_in_a_model_that_is_compiled_as_a_whole_trls_own_runs(trl: Any, launches: list[str]) -> None:
    fused, expected = make(trl, "patch, head"), results(make(trl))
    fused.compile(backend="eager")
    assert_equal(results(fused), expected)
    assert "linear_log_probs" not in launches


def test_copies_have_heads_of_their_own_and_a_pickled_model_none_as_in_stock(trl: Any, launches: list[str]) -> None:
    fused, stock = make(trl, "patch, head"), make(trl)
    twin = copy.deepcopy(fused)
    with torch.no_grad():
        for model in (twin, stock):
            model.lm_head.weight.mul_(1.5)
    launches.clear()
    assert_equal(results(twin), results(stock))
    assert "linear_log_probs" in launches
    assert_equal(results(fused), results(make(trl)))
    remove_fused_norm(twin)
    assert_equal(results(twin), results(stock))
    for model in (fused, stock):
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert "log_probs" not in loaded(input_ids=tokens(DEVICE), labels=tokens(DEVICE), fused_lm_head=True)


def test_two_heads_on_one_model_run_the_last_one(trl: Any, launches: list[str]) -> None:
    """Two trainers, one after the other, put a head on one model."""
    fused, stock = make(trl, "patch, head, head", temperature=0.7), make(trl, "head, head", temperature=0.7)
    expected, ids = results(stock), tokens(DEVICE, length=7)
    assert_equal(results(fused), expected)
    assert "linear_log_probs" in launches
    remove_fused_norm(fused)
    launches.clear()
    assert_equal(results(fused), expected)
    torch.testing.assert_close(fused(input_ids=ids, labels=ids).loss, stock(input_ids=ids, labels=ids).loss)
    assert not launches


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("nccl" if HAS_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wrapper", ["FSDP2", *slow("FSDP2, the head a unit", "DDP")])
def test_wrapped_for_several_devices_the_head_is_trained_as_trls(
    wrapper: str, order: str, trl: Any, launches: list[str]
) -> None:
    """If the head is a unit of its own, TRL gathers its weight."""
    found = []
    for model in (make(trl), make(trl, order)):
        wrapped = model
        if wrapper == "DDP":
            wrapped = DistributedDataParallel(model)
        else:
            if "unit" in wrapper:
                fully_shard(model.lm_head, mesh=init_device_mesh(DEVICE, (1,)))
            fully_shard(model, mesh=init_device_mesh(DEVICE, (1,)))
        found.append({n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in results(wrapped).items()})
    assert_equal(found[1], found[0])
    assert "linear_log_probs" in launches

"""Models sharded over two processes, by layers and sequences, are fused and send nothing that stock does not send."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import fused_norm
from fused_norm.model_configs import build, tiny_config

from .models import logged, relative, sites
from .ranks import called_operators, on_two_ranks

ON_GPUS = torch.cuda.device_count() >= 2
DEVICE = "cuda" if ON_GPUS else "cpu"

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}

IS_4 = transformers.__version__.startswith("4.")

HEADS = {"rms_norm": 4, "qk_norm": 3} if IS_4 else {"rms_norm": 10, "rope": 3}
"""The operators that are called for norms of queries and keys and for norms alone: transformers 5 hooks the former."""

WITHOUT_ADDS = {**sites("llama"), "residual": 0, "loss": 0}
"""The sites of a model whose norms take DTensors from hooks or functions around them, which see no residual; its head
is sharded."""

EACH_BY_ITSELF = {"rms_norm": 5, "rope": 2, "glu": 2}


class Sent(TorchDispatchMode):
    """A mode that counts collectives. PyTorch's ``CommDebugMode`` hooks all modules, which prevents joint calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its collectives come here again
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.counts[func.__name__] += 1
        return func(*args, **kwargs or {})


def step_of(model: nn.Module) -> dict[str, Any]:
    """Return logits, gradients and called operators of a step, and the collectives of another step."""
    ids = torch.randint(0, 256, (2, 10), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    # Positions computed from the hidden states would be too short if sequences are cut.
    positions = torch.arange(10, device=DEVICE)[None]
    mask = torch.ones(10, 10, dtype=torch.bool, device=DEVICE).tril()[None, None]

    def run() -> Tensor:
        output = model(input_ids=ids, labels=ids, position_ids=positions, attention_mask=mask, use_cache=False)
        output.loss.backward()
        return output.logits.detach()

    with called_operators() as called:
        logits = run()
    gradients = {name: whole(parameter.grad).cpu() for name, parameter in model.named_parameters()}
    model.zero_grad()  # the gradients above stay as they are
    with Sent() as sent:
        run()
    return {"values": {"logits": whole(logits).cpu(), **gradients}, "called": Counter(called), "sent": sent.counts}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def by_torch(name: str, mesh: DeviceMesh | None = None) -> nn.Module:
    """Shard by PyTorch's own styles, which cut sequences between the layers."""
    model = AutoModelForCausalLM.from_pretrained(name).to(DEVICE).train()
    mesh = init_device_mesh(DEVICE, (2,)) if mesh is None else mesh
    cut, whole = Shard(1), Replicate()
    layer = {
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), SequenceParallel()),
        **dict.fromkeys([*(f"self_attn.{n}_proj" for n in "qkv"), "mlp.gate_proj", "mlp.up_proj"], ColwiseParallel()),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel(output_layouts=cut)),
        "mlp": PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": cut}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
    }
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=cut),
        **{f"model.layers.*.{name}": style for name, style in layer.items()},
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=cut, output_layouts=whole),
    }
    return parallelize_module(model, mesh, plan)


def by_torch_and_fsdp2(name: str) -> nn.Module:
    meshes = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("data", "tensor"))
    model = by_torch(name, meshes["tensor"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=meshes["data"])
    return fully_shard(model, mesh=meshes["data"])


WAYS: dict[str, tuple[Callable[[str], nn.Module], str, dict[str, int], dict[str, int]]] = {
    "transformers": (
        lambda name: AutoModelForCausalLM.from_pretrained(name, tp_plan="auto").train(),
        "gemma3_text",
        {**sites("gemma3_text"), "loss": 0},
        {**HEADS, "norm_add_norm": 3, "norm_add": 3, "glu": 3},
    ),
    "torch, along sequences": (by_torch, "llama", WITHOUT_ADDS, EACH_BY_ITSELF),
    "torch, along sequences, and FSDP2": (by_torch_and_fsdp2, "llama", WITHOUT_ADDS, EACH_BY_ITSELF),
}
"""The way a model is sharded, its type, the sites that are fused, and the operators that a forward calls."""


def steps_of_every_way(folder: str, rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    os.chdir(folder)
    steps = {}
    for way, (share_out, model_type, *_) in WAYS.items():
        alone = step_of(AutoModelForCausalLM.from_pretrained(model_type).to(DEVICE).train())
        stock, model = step_of(share_out(model_type)), share_out(model_type)
        assert sum(isinstance(parameter, DTensor) for parameter in model.parameters()) > 10
        counts = fused_norm.apply_fused_norm(model, recompute="FSDP2" in way).counts
        steps[way] = {"alone": alone, "stock": stock, "fused": {**step_of(model), "sites": counts}}
    return steps


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Return the steps of all ways on each rank: by a single process, and sharded in stock and fused."""
    folder = tmp_path_factory.mktemp("ranks")
    for model_type in {model_type for _, model_type, *_ in WAYS.values()}:
        build(tiny_config(model_type, **SIZES), seed=0).save_pretrained(folder / model_type)
    run = partial(steps_of_every_way, str(folder))
    return on_two_ranks(run, folder, "nccl" if ON_GPUS else "gloo")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_model_on_two_ranks_is_fused_and_trains_as_on_one(way: str, steps: list[dict[str, dict[str, Any]]]) -> None:
    *_, expected_sites, expected_calls = WAYS[way]
    for rank in steps:
        alone, stock, fused = (rank[way][which] for which in ("alone", "stock", "fused"))
        assert fused["sites"] == expected_sites
        assert (fused["called"], stock["called"]) == (expected_calls, {})
        assert fused["sent"] == stock["sent"]
        assert alone["values"].keys() == fused["values"].keys()
        for name, value in alone["values"].items():
            if way == "transformers" and IS_4 and ("q_norm" in name or "k_norm" in name):
                value = stock["values"][name]  # transformers 4 leaves their gradients with each rank's heads alone
            assert relative(fused["values"][name], value) < 1e-4, name


def step_of_shared_sequences(folder: str, rank: int, ranks: int) -> dict[str, tuple[Tensor, Counter[str]]]:
    """Return gradients and operators of a step: by one process in fp32, and stock and fused with half the tokens."""
    mesh = init_device_mesh("cuda", (ranks,))
    results = {}
    for which, dtype in {"alone": torch.float32, "stock": torch.bfloat16, "fused": torch.bfloat16}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().train()
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(without_mask, with_kwargs=True)
        if which == "fused":
            assert fused_norm.apply_fused_norm(model).counts == sites("qwen3")
        ids = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()
        positions = torch.arange(64, device="cuda")[None].repeat(2, 1)
        with contextlib.ExitStack() as shared:
            called = shared.enter_context(called_operators())
            if which != "alone":
                shared.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
                shared.enter_context(context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]))
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            logits.float().logsumexp(-1).sum().backward()
        gradient = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
        if which != "alone":
            dist.all_reduce(gradient)
        results[which] = gradient.cpu(), Counter(called)
    return results


def without_mask(module: nn.Module, args: Any, named: dict[str, Any]) -> Any:
    """Drop the mask, as accelerate's hook does: attention over several devices is causal and takes no mask."""
    return args, {**named, "attention_mask": None, "is_causal": True}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not ON_GPUS, reason="attention over several devices needs two GPUs")
def test_context_parallel_steps_are_fused_and_as_near_to_one_process(tmp_path: Path) -> None:
    build(tiny_config("qwen3", **SIZES), seed=0).save_pretrained(tmp_path / "model")
    for rank in on_two_ranks(partial(step_of_shared_sequences, str(tmp_path / "model")), tmp_path, "nccl"):
        (alone, _), (stock, by_stock), (fused, by_fused) = (rank[which] for which in ("alone", "stock", "fused"))
        assert by_stock == {}
        assert by_fused == {"add_rms_norm": 2, "rms_norm": 3, "qk_norm": 2, "glu": 2}
        assert relative(stock, alone) < 0.02
        assert relative(fused, alone) < 1.2 * relative(stock, alone)


@pytest.fixture
def mesh(device: str) -> Iterator[DeviceMesh]:
    """Yield a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,))
    finally:
        dist.destroy_process_group()


def test_a_norm_that_tensor_parallelism_wraps_is_fused_and_given_back(mesh: DeviceMesh, device: str) -> None:
    styles = pytest.importorskip("transformers.distributed.tensor_parallel")
    model = build("llama", seed=0, device=device)
    norm = model.model.norm
    styles.ALL_PARALLEL_STYLES["sequence_parallel"].install_forward(norm, mesh)
    wrapper, x = norm.forward, torch.randn(2, 5, 72, device=device)
    expected = norm(x)
    assert fused_norm.apply_fused_norm(model).counts == sites("llama")
    with called_operators() as called:
        assert relative(norm(x), expected) < 1e-6
        assert called == ["rms_norm"]
        fused_norm.remove_fused_norm(model)
        assert torch.equal(norm(x), expected)
    assert called == ["rms_norm"]
    assert norm.forward is wrapper


def fused_norm_of_dtensors(mesh: DeviceMesh, device: str, placement: Shard) -> tuple[nn.Module, DTensor, DTensor]:
    """Return a fused norm whose weight is a DTensor, an input with this placement, and the stock norm of the input."""
    model = build("llama", seed=0, device=device)
    norm = model.model.norm
    norm.__class__ = type("CutRMSNorm", (type(norm),), {})  # a class that nothing has been logged of
    norm.weight = nn.Parameter(DTensor.from_local(norm.weight.detach(), mesh, [Replicate()]))
    x = DTensor.from_local(torch.randn(2, 5, 72, device=device), mesh, [placement])
    expected = norm(x)
    fused_norm.apply_fused_norm(model)
    return norm, x, expected


def test_a_norm_of_cut_rows_runs_its_stock_code_and_says_so(
    mesh: DeviceMesh, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    norm, x, expected = fused_norm_of_dtensors(mesh, device, Shard(2))
    with called_operators() as called:
        y = norm(x)
    assert called == []
    assert y.placements == expected.placements
    assert torch.equal(y.to_local(), expected.to_local())
    assert logged(caplog) == ["CutRMSNorm runs its stock code: the input is placed as Shard(dim=2)"]


def test_a_compiled_norm_of_dtensors_is_one_graph_of_the_formula(mesh: DeviceMesh, device: str) -> None:
    norm, x, expected = fused_norm_of_dtensors(mesh, device, Shard(1))
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    with called_operators() as called:
        y = compiled(x)
    assert called == []
    assert y.placements == expected.placements
    assert relative(y.to_local(), expected.to_local()) < 1e-6

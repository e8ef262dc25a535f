"""The registered operators under PyTorch's own machinery: opcheck, compile, export, fake tensors, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_norm.kernels import add_rms_norm, compiler_policy, rms_norm

from ..conftest import slow
from .calls import CALLS, NORMED, Call, every_call
from .conftest import OPERATORS
from .numerics import BF16, WIDE, Norm, assert_same, run

pytestmark = pytest.mark.usefixtures("large_graphs")

COMPILED = (
    "norm", "add in gemma", "norm and add", "sandwich",
    "heads", "rotation in part", "glu", "gated in groups", "adapter", "conv", "expert gate",
)  # fmt: skip
LLAMA = Norm("llama", x=BF16, w=BF16, r=BF16)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*COMPILED, "heads rotated in part"])
def test_opcheck(case: str, device: str) -> None:
    call = every_call(device, "transposed heads")[case]
    name, tensors, options = call
    declared, semantics = OPERATORS[name], call.semantics
    others = options[declared.takes_spec :]
    forward = getattr(torch.ops.fused_norm, f"{name}_forward")
    for training in (True, False):
        torch.library.opcheck(forward, (*semantics, *tensors, *others, training))
    if name == "norm_add":  # its backward is that of rms_norm
        return
    results = forward(*semantics, *tensors, *others, True)
    results = (results,) if isinstance(results, Tensor) else results
    saved, facts = declared.save((*tensors, *options), results)
    facts = facts[declared.takes_spec :]
    outputs = results[: len(declared.outputs)]
    incoming = [torch.randn_like(output) if output.numel() else None for output in outputs]
    backward = getattr(torch.ops.fused_norm, f"{name}_backward")
    given = [tensor is not None for tensor in tensors[: len(declared.gradients)]]
    torch.library.opcheck(backward, (*semantics, *incoming, *saved, *facts, *given))
    first = [True, *[False] * len(given[1:])]
    torch.library.opcheck(backward, (*semantics, incoming[0], *[None] * len(incoming[1:]), *saved, *facts, *first))


@pytest.mark.parametrize("case", COMPILED)
def test_compiles_as_one_graph_with_equal_results(case: str, device: str) -> None:
    call = every_call(device)[case]
    compiled = torch.compile(OPERATORS[call.name], fullgraph=True, backend="aot_eager")
    for ours, expected in zip(call.results(compiled), call.results(), strict=True):
        assert torch.equal(ours, expected)
        assert ours.stride() == expected.stride()


def noting(uses_operator: list[bool]) -> Callable[..., Callable]:
    """Return a backend that records for each graph whether the norm's operator is in it."""

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        uses_operator.append(any("rms_norm_forward" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    return backend


@pytest.mark.parametrize("dynamic", [False, True])
def test_small_tensors_in_a_graph_are_left_to_the_compiler(
    dynamic: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_policy, "_in_all_graphs", False)
    monkeypatch.setattr(compiler_policy, "min_numel_in_graphs", 4 * 32)
    x, w = torch.randn(5, 32, device=device, dtype=BF16), torch.randn(32, device=device, dtype=BF16)
    uses_operator: list[bool] = []
    compiled = torch.compile(rms_norm, backend=noting(uses_operator), dynamic=dynamic, fullgraph=True)
    for rows in (3, 4, 2, 5):
        assert torch.equal(compiled(x[:rows], w), rms_norm(x[:rows], w))
    assert uses_operator[0] is False
    assert set(uses_operator) == {True, False}
    assert len(uses_operator) == 2 or not dynamic


def test_under_autocast_a_graph_leaves_calls_to_the_compiler(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_policy, "_in_all_graphs", False)
    monkeypatch.setattr(compiler_policy, "min_numel_in_graphs", 1)
    x, w = torch.randn(5, 32, device=device), torch.randn(32, device=device)
    uses_operator: list[bool] = []
    compiled = torch.compile(rms_norm, backend=noting(uses_operator), fullgraph=True)
    for enabled in (True, False):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            assert torch.allclose(compiled(x, w), rms_norm(x, w))
    assert uses_operator == [False, True]


class Block(nn.Module):
    """An add and its norm, with numbers that are attributes as in modelling code."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.scale = 1e-5, 0.22

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x.sin(), x, w, self.eps, scale=self.scale)


def test_numbers_of_a_module_are_no_symbols(device: str) -> None:
    block, x, w = Block(), torch.randn(2, 5, 16, device=device), torch.randn(16, device=device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for block.eps, block.scale in ((1e-5, 0.22), (1e-2, 2.0)):
        assert_same(compiled(x, w), block(x, w))


@pytest.mark.parametrize("case", ["add in gemma", *slow(*(case for case in COMPILED if case != "add in gemma"))])
def test_other_lengths_are_compiled_once_more_at_most(case: str, device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    for rows in (3, 5, 9, 33):
        call = every_call(device, rows=rows)[case]
        compiled = torch.compile(OPERATORS[call.name], fullgraph=True, backend=counter, dynamic=True)
        assert_same(call.results(compiled), call.results())
    assert counter.frame_count <= 2


class Alone(nn.Module):
    """The operator of a call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor | None) -> list[Tensor]:
        return self.call.outputs(tensors)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_exports(case: str, device: str) -> None:
    call = every_call(device)[case]
    program = torch.export.export(Alone(call), tuple(call.tensors))
    assert f"fused_norm.{call.name}_forward.default" in {str(node.target) for node in program.graph.nodes}
    assert_same(program.module()(*call.tensors), call.outputs())


@pytest.mark.parametrize("case", NORMED)
def test_without_eps_dead_rows_of_a_tile_leave_no_trace(case: str, device: str) -> None:
    call = every_call(device, rows=5)[case]
    call = call.with_spec(eps=0.0)
    float64 = call.converted(Tensor.double)
    for ours, expected in zip(call.results(), float64.results(OPERATORS[call.name].reference), strict=True):
        assert (ours.double() - expected).norm() <= 0.05 * expected.norm()


def _described(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]


@pytest.mark.parametrize("layout", ["transposed heads", "columns first", "padded rows"])
@CALLS
def test_meta_and_fake_tensors_tell_shape_dtype_and_strides(case: str, layout: str, device: str) -> None:
    call = every_call(device, layout)[case]
    real = _described(call.results())

    def meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    results = call.converted(meta).results()
    assert all(tensor.is_meta for tensor in results)
    assert _described(results) == real
    with FakeTensorMode() as mode:
        assert _described(call.converted(mode.from_tensor).results()) == real


@CALLS
def test_what_was_made_in_inference_mode_trains_as_by_the_formula(case: str, device: str) -> None:
    """Autograd cannot save such a tensor; if the formula needs it as well, the error is the formula's."""
    call = every_call(device)[case]
    declared = OPERATORS[call.name]
    for place, tensor in enumerate(call.tensors):
        if tensor is None:
            continue
        with torch.inference_mode():
            inference_tensor = tensor.clone()

        def results(
            by: Callable[..., object], place: int = place, inference_tensor: Tensor = inference_tensor
        ) -> list[Tensor] | str:
            leaves = call.leaves()
            leaves[place] = inference_tensor
            inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            try:
                outputs = call.outputs(leaves, by)
                trained = [y.sin().sum() for y in outputs if y.requires_grad]
                return [*outputs, *(torch.autograd.grad(trained, inputs) if inputs else ())]
            except RuntimeError as error:
                return str(error)

        ours, formula = results(declared.checked), results(declared.reference)
        if isinstance(formula, str) and isinstance(ours, str):
            assert ours == formula
            continue
        assert not isinstance(ours, str)
        for a, b in zip(ours, ours if isinstance(formula, str) else formula, strict=True):
            assert (a.float() - b.float()).norm() <= 0.01 * b.float().norm() + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 4096, WIDE[-1]])
def test_cuda_graphs_replay_forward_and_backward(width: int, device: str) -> None:
    inputs = LLAMA.inputs((64, width), device)
    expected = run(LLAMA.fused, inputs)
    torch.use_deterministic_algorithms(False)
    static = inputs.mapped(Tensor.clone)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(LLAMA.fused, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    for tensor in (static.x, static.r, static.dy, static.ds):
        tensor.zero_()
    with torch.cuda.graph(graph):
        captured = run(LLAMA.fused, static)
    for name, tensor in vars(inputs).items():
        getattr(static, name).copy_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(captured, expected)

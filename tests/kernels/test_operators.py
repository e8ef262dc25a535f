"""The registered operators under PyTorch's own machinery: opcheck, compile, export, fake tensors, CUDA graphs."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_norm.kernels
from fused_norm.kernels import add_rms_norm, norm_add, norm_add_norm, qk_norm_rope, rms_norm
from fused_norm.kernels.triton import norm_backward, norm_forward, weight_grad

from .numerics import BF16, FP16, FP32, WIDE, Inputs, Norm, in_layout, make_inputs, run

OPS = torch.ops.fused_norm
LLAMA = Norm("llama", x=BF16, w=BF16, r=BF16)
MIXED = Norm("llama", True, x=BF16, w=FP32, r=FP16)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    """A residual block: a norm, a branch, and the add with the norm after it."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width, device=device))
        self.second = nn.Parameter(torch.randn(width, device=device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        branch = torch.tanh(rms_norm(x, self.first, casting="gemma", zero_centered=True))
        return add_rms_norm(branch, x, self.second, 1e-5)


def _with_gradients(
    block: Block, x: Tensor, call: Callable[[Tensor], tuple[Tensor, Tensor]], dynamic: bool = False
) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    if dynamic:
        torch._dynamo.mark_dynamic(leaf, 0)
    y, s = call(leaf)
    gradients = torch.autograd.grad((y.sin().sum() + s.square().sum()), (leaf, *block.parameters()))
    return [y, s, *gradients]


@pytest.mark.parametrize("layout", ["contiguous", "transposed heads"])
@pytest.mark.parametrize("norm", [LLAMA, MIXED, Norm("none", x=FP16, w=None, r=FP16)], ids=str)
def test_opcheck(norm: Norm, layout: str, device: str) -> None:
    inputs = make_inputs(norm, (2, 3, 2, 40), device)
    if layout != "contiguous":
        inputs.x = in_layout(layout, inputs.x)
    spec = (norm.casting, norm.zero_centered, 1e-6)
    x, r, w = inputs.x, inputs.r, inputs.w
    for training in (True, False):
        torch.library.opcheck(OPS.rms_norm_forward, (*spec, x, w, None, training))
        torch.library.opcheck(OPS.add_rms_norm_forward, (*spec, x, r, w, None, 0.22, training))
        torch.library.opcheck(OPS.norm_add_forward, (*spec, x, r, w, training))
        torch.library.opcheck(OPS.norm_add_norm_forward, (*spec, x, r, w, w, training))
    y, rstd = OPS.rms_norm_forward(*spec, x, w, None, True)
    for need_dw in (w is not None, False):
        torch.library.opcheck(OPS.rms_norm_backward, (*spec, inputs.dy.to(y.dtype), x, w, rstd, True, need_dw))
    _, s, rstd = OPS.add_rms_norm_forward(*spec, x, r, w, None, 1.0, True)
    for scale, ds, needed in ((1.0, inputs.ds, (True, False, w is not None)), (0.22, None, (False, True, False))):
        arguments = (*spec, inputs.dy, ds, s, w, rstd, norm.x, norm.r, scale, *needed)
        torch.library.opcheck(OPS.add_rms_norm_backward, arguments)
    y, s, inner_rstd, rstd = OPS.norm_add_norm_forward(*spec, x, r, w, w, True)
    arguments = (*spec, torch.randn_like(y), inputs.ds.to(s.dtype), s, x, w, w, inner_rstd, rstd, norm.r)
    for weights in (w is not None, False):
        torch.library.opcheck(OPS.norm_add_norm_backward, (*arguments, True, True, weights, weights))


@pytest.mark.parametrize("rotary", [0, 8, 16])
def test_opcheck_of_heads(rotary: int, device: str) -> None:
    q, k = torch.randn(2, 3, 5, 16, device=device), torch.randn(2, 1, 5, 16, device=device)
    weights = torch.randn(16, device=device), torch.randn(16, device=device)
    angles = [torch.randn(1, 5, rotary, device=device) if rotary else None for _ in range(2)]
    spec = ("llama", False, 1e-6)
    torch.library.opcheck(OPS.qk_norm_forward, (*spec, q, k, *weights, *angles, 1, False))
    for needed in ((True, True, True, True), (True, False, False, False)):
        incoming = torch.randn_like(q), torch.randn_like(k) if needed[1] else None
        torch.library.opcheck(OPS.qk_norm_backward, (*spec, *incoming, q, k, *weights, *angles, 1, *needed))


def test_compiles_as_one_graph_with_equal_results(device: str) -> None:
    block, x = Block(40, device), torch.randn(6, 40, device=device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(_with_gradients(block, x, compiled), _with_gradients(block, x, block), strict=True):
        assert torch.equal(ours, expected)
    with torch.no_grad():
        for ours, expected in zip(compiled(x), block(x), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_a_scale_compiles_into_the_graph(scale: float, device: str) -> None:
    inputs = make_inputs(LLAMA, (6, 40), device)
    norm = replace(LLAMA, scale=scale)
    compiled = torch.compile(norm.fused, fullgraph=True, backend="aot_eager")
    expected = run(norm.fused, inputs).present()
    for name, value in run(compiled, inputs).present().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="Inductor needs a C++ compiler on a CPU",
)
def test_inductor_gives_the_same_results(device: str) -> None:
    block, x = Block(40, device), torch.randn(2, 6, 4, 40, device=device).transpose(1, 2)
    compiled = torch.compile(block, fullgraph=True)
    for ours, expected in zip(_with_gradients(block, x, compiled), _with_gradients(block, x, block), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)  # Inductor's tanh, sin and sums are its own


def test_another_number_of_rows_compiles_nothing_again(device: str) -> None:
    block, counter = Block(40, device), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for rows in (5, 9, 64, 65, 2):
        x = torch.randn(rows, 40, device=device)
        results = _with_gradients(block, x, compiled, dynamic=True)
        for ours, expected in zip(results, _with_gradients(block, x, block), strict=True):
            assert torch.equal(ours, expected)
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_another_number_of_rows_compiles_no_kernel_again(device: str) -> None:
    def compiled() -> int:
        kernels = (norm_forward._forward_kernel, norm_backward._backward_kernel, weight_grad._sum_shares_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    run(LLAMA.fused, make_inputs(LLAMA, (64, 96), device))
    before = compiled()
    for rows in (1, 5, 16, 64, 1000, 4096):
        run(LLAMA.fused, make_inputs(LLAMA, (rows, 96), device))
    assert compiled() == before


@pytest.mark.parametrize("trained", [True, False])
def test_exports(trained: bool, device: str) -> None:
    block, x = Block(40, device).requires_grad_(trained), torch.randn(6, 40, device=device)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(block, (x,), dynamic_shapes=({0: rows},))
    called = {str(node.target) for node in program.graph.nodes}
    assert {"fused_norm.rms_norm_forward.default", "fused_norm.add_rms_norm_forward.default"} <= called
    for rows in (6, 11):
        x = torch.randn(rows, 40, device=device)
        for ours, expected in zip(program.module()(x), block(x), strict=True):
            assert torch.equal(ours, expected)


def _described(tensors: dict[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("layout", ["contiguous", "transposed heads", "columns first", "padded rows"])
@pytest.mark.parametrize("norm", [Norm("gemma", x=BF16, w=FP32), MIXED, Norm("none", x=FP16, w=None)], ids=str)
def test_meta_and_fake_tensors_tell_shape_dtype_and_strides(norm: Norm, layout: str, device: str) -> None:
    inputs = make_inputs(norm, (2, 3, 4, 40), device)
    if layout != "contiguous":
        inputs.x = in_layout(layout, inputs.x)
    real = _described(run(norm.fused, inputs).present())

    def convert(to: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(**{name: None if tensor is None else to(tensor) for name, tensor in vars(inputs).items()})

    def meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    results = run(norm.fused, convert(meta)).present()
    assert all(tensor.is_meta for tensor in results.values())
    assert _described(results) == real
    with FakeTensorMode() as mode:
        assert _described(run(norm.fused, convert(mode.from_tensor)).present()) == real


def test_no_operator_runs_without_its_backward_when_a_gradient_is_wanted(device: str) -> None:
    """In grad mode the autograd function is taken for any input that needs it, and for none other."""
    x, w = torch.randn(3, 40, device=device), torch.randn(40, device=device)
    for needs_x, needs_w in ((True, False), (False, True), (False, False)):
        y = rms_norm(x.requires_grad_(needs_x), w.requires_grad_(needs_w))
        assert y.requires_grad == (needs_x or needs_w)
    for wanting in range(4):
        leaves = [x.clone().requires_grad_(wanting == 0), x.clone().requires_grad_(wanting == 1)]
        outputs = add_rms_norm(*leaves, w.detach().clone().requires_grad_(wanting == 2))
        assert all(output.requires_grad == (wanting < 3) for output in outputs)
        with torch.no_grad():
            assert not any(output.requires_grad for output in add_rms_norm(*leaves, w))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 4096, WIDE[-1]])
def test_cuda_graphs_replay_forward_and_backward(width: int, device: str) -> None:
    inputs = make_inputs(LLAMA, (64, width), device)
    expected = run(LLAMA.fused, inputs)
    torch.use_deterministic_algorithms(False)
    static = Inputs(**{name: tensor.clone() for name, tensor in vars(inputs).items()})
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
    for name, value in captured.present().items():
        assert torch.equal(value, getattr(expected, name)), name


class Stack(nn.Module):
    """Every operator in a row, with eps and scale as attributes, as modelling code has them."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, device=device) for _ in range(7))
        self.eps, self.scale = 1e-5, 0.22

    def forward(self, x: Tensor) -> Tensor:
        w = self.weights
        y, s = add_rms_norm(rms_norm(x, w[0], self.eps), x, w[1], self.eps, scale=self.scale)
        y, s = norm_add_norm(y, s, w[2], w[3], self.eps)
        s = norm_add(y, s, w[4], self.eps)
        q, k = qk_norm_rope(s[None, None], s[None, None], w[5], w[6], s[None].cos().detach(), s[None].sin().detach())
        return q[0, 0] + k[0, 0]


@pytest.mark.parametrize("dynamic", [None, True])
def test_modules_compile_with_dynamic_shapes(dynamic: bool | None, device: str) -> None:
    """A float attribute, which dynamic shapes would make a symbol, is a constant of the graph."""
    stack, counter = nn.Sequential(*(Stack(16, device) for _ in range(3))), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(stack, fullgraph=True, dynamic=dynamic, backend=counter)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 16, device=device)
        found, expected = (
            torch.autograd.grad(call(leaf).square().sum(), (leaf, *stack.parameters()))
            for call, leaf in ((compiled, x.clone().requires_grad_()), (stack, x.clone().requires_grad_()))
        )
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2


def test_only_the_package_itself_knows_replay() -> None:
    """Imports run one way: nothing below replay imports it, and kernels import no operator."""
    root = Path(fused_norm.kernels.__file__).parent
    for path in root.rglob("*.py"):
        inside = path.relative_to(root)
        imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {f"{node.module or ''}.{alias.name}" for node in imported if node.level for alias in node.names}
        if inside.parts[0] != "replay" and inside.name != "__init__.py":
            assert not any("replay" in name for name in names), inside
        if inside.parts[0] == "triton":
            above = ("operator", "rms_norm", "norm_add", "qk_norm", "reference", "arguments")
            upwards = [f"{node.module}" for node in imported if node.level == 2]
            assert not any(name in above for name in upwards), inside

"""Operators on DTensors: each device computes its own rows; calls that a device cannot compute alone go to PyTorch.

The process acts as one of two, and no test may need the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fused_norm import kernels
from fused_norm.spec import NormSpec

from ..patcher.ranks import called_operators
from .conftest import ALL

BATCH, TOKENS, HEADS, WIDTH = 2, 5, 4, 16
SHAPES = {"x": (BATCH, TOKENS, WIDTH), "h": (BATCH, HEADS, TOKENS, WIDTH), "w": (WIDTH,), "a": (1, TOKENS, WIDTH)}
WHOLE = "wa"
LLAMA = NormSpec("llama")
RMS_NORM, LORA_ADD, QK_NORM, ROPE = (ALL[name] for name in ("rms_norm", "lora_add", "qk_norm", "rope"))

OPERATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "rms_norm": (kernels.rms_norm, "xw"),
    "add_rms_norm": (kernels.add_rms_norm, "xxw"),
    "norm_add": (kernels.norm_add, "xxw"),
    "norm_add_norm": (kernels.norm_add_norm, "xxww"),
    "gated_rms_norm": (kernels.gated_rms_norm, "xxw"),
    "glu": (kernels.glu, "xx"),
    "glu of halves": (kernels.glu, "x"),
    "qk_norm": (kernels.qk_norm, "hhww"),
    "qk_norm_rope": (kernels.qk_norm_rope, "hhwwaa"),
    "rope": (kernels.rope, "hhaa"),
}
"""Each operator and its tensors: ``x`` is rows, ``h`` heads, ``w`` a weight, ``a`` angles."""

CUTS = [*((name, 1) for name in OPERATORS), ("rms_norm", None), ("qk_norm_rope", None), ("rms_norm", 0), ("glu", 2)]
"""Operators, and the dimension that is sharded; None if all devices have and compute everything."""


@pytest.fixture
def mesh(device: str) -> Iterator[DeviceMesh]:
    """Make a mesh of two devices, of which this process is the second: it has fewer rows if they do not divide."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield init_device_mesh(device, (2,))
    finally:
        dist.destroy_process_group()


def tensors_for(kinds: str, device: str) -> list[Tensor]:
    tensors = [torch.randn(SHAPES[kind], device=device) for kind in kinds]
    return [tensor if kind == "a" else tensor.requires_grad_() for tensor, kind in zip(tensors, kinds, strict=True)]


def part_of(whole: Tensor, placement: Placement) -> Tensor:
    part = whole.tensor_split(2, placement.dim)[1] if isinstance(placement, Shard) else whole
    return part.detach().clone().requires_grad_(whole.requires_grad)


def spread(whole: Tensor, part: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    dtensor = DTensor.from_local(
        part.detach(), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return dtensor.detach().requires_grad_(whole.requires_grad)


@pytest.mark.parametrize(("name", "dim"), CUTS)
def test_a_device_computes_its_rows_and_weights_get_the_gradient_of_these(
    name: str, dim: int | None, mesh: DeviceMesh, device: str
) -> None:
    operator, kinds = OPERATORS[name]
    wholes = tensors_for(kinds, device)
    rows = Replicate() if dim is None else Shard(dim)
    placements = [Replicate() if kind in WHOLE else rows for kind in kinds]
    parts = [part_of(whole, placement) for whole, placement in zip(wholes, placements, strict=True)]
    dtensors = [spread(*pair, mesh, placement) for *pair, placement in zip(wholes, parts, placements, strict=True)]

    expected = operator(*parts)
    with called_operators() as called, CommDebugMode() as communication:
        outputs = operator(*dtensors)
        assert communication.get_total_counts() == 0
    assert len(called) == 1
    everywhere = operator(*wholes)
    if isinstance(outputs, Tensor):
        outputs, expected, everywhere = (outputs,), (expected,), (everywhere,)
    for output, part, whole in zip(outputs, expected, everywhere, strict=True):
        assert torch.equal(output.to_local(), part)
        assert output.placements == (rows,)
        assert (output.shape, output.stride()) == (whole.shape, whole.stride())

    incoming = [torch.randn_like(part) for part in expected]
    sharded = [spread(o.detach(), g, mesh, rows) for o, g in zip(outputs, incoming, strict=True)]
    with CommDebugMode() as communication:
        torch.autograd.backward(outputs, sharded)
    assert communication.get_total_counts() == 0
    torch.autograd.backward(expected, incoming)
    for kind, dtensor, part in zip(kinds, dtensors, parts, strict=True):
        if kind != "a":
            assert torch.equal(dtensor.grad.to_local(), part.grad)
            assert dtensor.grad.placements == ((Partial(),) if kind == "w" and dim is not None else (rows,))


def test_a_device_without_rows_gives_its_weight_no_gradient(mesh: DeviceMesh, device: str) -> None:
    x, weight = torch.randn(2, 1, WIDTH, device=device), torch.randn(WIDTH, device=device)
    x_part = spread(x, x[:, :0], mesh, Shard(1)).requires_grad_()
    weight_part = spread(weight, weight, mesh, Replicate()).requires_grad_()
    y = kernels.rms_norm(x_part, weight_part)
    assert y.to_local().shape == (2, 0, WIDTH)
    y.backward(y.detach())
    assert torch.equal(weight_part.grad.to_local(), torch.zeros_like(weight))
    assert x_part.grad.to_local().shape == (2, 0, WIDTH)


def test_the_gradients_of_leaves_do_not_share_their_memory(mesh: DeviceMesh, device: str) -> None:
    branch, residual, weight = (spread(tensor, tensor, mesh, Replicate()) for tensor in tensors_for("xxw", device))
    y, _ = kernels.add_rms_norm(branch, residual, weight)
    y.backward(y.detach())
    expected = residual.grad.to_local().clone()
    branch.grad.to_local().zero_()
    assert torch.equal(residual.grad.to_local(), expected)
    assert expected.count_nonzero()


def test_the_reason_says_what_no_device_can_compute_alone(mesh: DeviceMesh, device: str) -> None:
    whole, residual = tensors_for("xx", device)
    weight = torch.randn(WIDTH, device=device)
    rows, cut, summed, alike = (
        spread(whole, part_of(whole, placement), mesh, placement)
        for placement in (Shard(1), Shard(2), Partial(), Replicate())
    )
    w, w_cut = (spread(weight, part_of(weight, placement), mesh, placement) for placement in (Replicate(), Shard(0)))
    elsewhere = DTensor.from_local(whole.detach(), init_device_mesh(device, (1, 2)), [Replicate()] * 2, run_check=False)
    for x, norm_weight, reason in (
        (rows, None, None),
        (rows, w, None),
        (whole, weight, None),
        (cut, w, "the input is placed as Shard(dim=2)"),
        (summed, w, "the input is placed as Partial(sum)"),
        (rows, w_cut, "not every device has the weight as a whole"),
        (rows, weight, "DTensors and plain tensors meet in it"),
    ):
        assert RMS_NORM.why_unsupported(x, norm_weight, LLAMA, None) == (reason and (reason, None))
    add = ALL["add_rms_norm"]
    assert add.why_unsupported(whole, residual, weight, LLAMA, None, 1.0) is None
    several = add.why_unsupported(rows, alike, w, LLAMA, None, 1.0)
    assert several == ("its DTensors are placed in several ways", None)
    meshes = add.why_unsupported(alike, elsewhere, w, LLAMA, None, 1.0)
    assert meshes == ("its DTensors are on several meshes", None)
    assert ALL["glu"].why_unsupported(cut, cut, "silu") is None


def test_an_adapter_is_left_to_pytorch(mesh: DeviceMesh, device: str) -> None:
    x, base = (tensor.detach().bfloat16() for tensor in tensors_for("xx", device))
    factor = torch.randn(3, WIDTH, device=device)
    # By batches: PyTorch 2.11 flattens the rows of a linear's input, and not across devices.
    wholes, placements = (base, x, factor, factor.t()), (Shard(0), Shard(0), Replicate(), Replicate())
    parts = [part_of(*pair) for pair in zip(wholes, placements, strict=True)]
    dtensors = [spread(*pair, mesh, placement) for *pair, placement in zip(wholes, parts, placements, strict=True)]
    assert LORA_ADD.why_unsupported(*dtensors, 0.5) == ("it has no form for DTensors", None)
    with called_operators() as called:
        y = kernels.lora_add(*dtensors, 0.5)
    assert not len(called)
    assert torch.equal(y.to_local(), LORA_ADD.reference(*parts, 0.5))


def test_heads_may_be_cut_where_all_devices_have_the_angles_and_tokens_may_not(mesh: DeviceMesh, device: str) -> None:
    q, angles = tensors_for("ha", device)
    whole = spread(angles, angles, mesh, Replicate())
    by_heads, by_tokens = (spread(q, part_of(q, Shard(dim)), mesh, Shard(dim)) for dim in (1, 2))
    part = spread(angles, part_of(angles, Shard(1)), mesh, Shard(1))
    refusal = "not every device has cos and sin for all its tokens", None
    assert QK_NORM.why_unsupported(by_heads, by_heads, None, None, whole, whole, LLAMA, 1, None) is None
    assert QK_NORM.why_unsupported(by_tokens, by_tokens, None, None, whole, whole, LLAMA, 1, None) == refusal
    assert QK_NORM.why_unsupported(by_heads, by_heads, None, None, part, part, LLAMA, 1, None) == refusal
    assert QK_NORM.why_unsupported(by_tokens, by_tokens, None, None, None, None, LLAMA, 1, None) is None


@pytest.mark.parametrize("heads_dim", [1, 2])
def test_angles_of_four_dimensions_tell_the_heads_whatever_unsqueeze_dim_is(
    heads_dim: int, mesh: DeviceMesh, device: str
) -> None:
    """The second device turned its tokens by the angles of the first one's."""
    q, k = (torch.randn(2, 4, 4, WIDTH, device=device) for _ in range(2))
    angles = torch.randn(2, 1, 4, WIDTH, device=device).unbind()
    cos, sin = (angle.unsqueeze(heads_dim) for angle in angles)
    dtensors = [spread(tensor, tensor, mesh, Replicate()) for tensor in (cos, sin)]
    for unsqueeze_dim in (1, 2):
        for dim in (1, 2):
            heads = [spread(tensor, part_of(tensor, Shard(dim)), mesh, Shard(dim)) for tensor in (q, k)]
            by_norm = QK_NORM.why_unsupported(*heads, None, None, *dtensors, LLAMA, unsqueeze_dim, None)
            by_itself = ROPE.why_unsupported(*heads, *dtensors, unsqueeze_dim, False, "half", False, None)
            assert (by_norm is None) == (by_itself is None) == (dim == heads_dim)
            if by_itself is None:
                turned = kernels.rope(*heads, *dtensors, unsqueeze_dim=unsqueeze_dim)
                expected = kernels.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
                for local, whole in zip(turned, expected, strict=True):
                    assert torch.equal(local.to_local(), part_of(whole, Shard(dim)))


def test_the_result_of_a_running_collective_is_waited_for(device: str) -> None:
    x, weight = tensors_for("xw", device)
    awaited = AsyncCollectiveTensor(x.detach()).requires_grad_()
    y = kernels.rms_norm(awaited, weight)
    expected = kernels.rms_norm(x, weight)
    assert torch.equal(y, expected)
    (gradient,) = torch.autograd.grad(y.sum(), awaited)
    assert torch.equal(gradient, torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize("rows", [Replicate(), Shard(0)], ids=str)
def test_log_probabilities_of_dtensors_are_those_of_the_rows_by_pytorch(
    rows: Placement, mesh: DeviceMesh, device: str
) -> None:
    x, weight = torch.randn(2, TOKENS, WIDTH, device=device), torch.randn(30, WIDTH, device=device)
    target = torch.arange(2 * TOKENS, device=device).view(2, TOKENS)
    target[1, 0] = -100
    placements = rows, Replicate(), rows
    parts = [part_of(whole, place) for whole, place in zip((x, weight, target), placements, strict=True)]
    leaves = [spread(*pair, mesh, place) for *pair, place in zip((x, weight, target), parts, placements, strict=True)]
    leaves[0].requires_grad_()
    parts[0].requires_grad_()
    with called_operators() as called:
        outputs = kernels.linear_log_probs(*leaves, entropies=True, are_largest=True)
    assert not called
    expected = kernels.linear_log_probs(*parts, entropies=True, are_largest=True)
    for output, part in zip(outputs[:3], expected[:3], strict=True):
        assert torch.allclose(output.to_local(), part, atol=1e-5)
        assert output.placements == (rows,)
    (outputs.log_probs + outputs.entropies).sum().backward()
    (expected.log_probs + expected.entropies).sum().backward()
    assert torch.allclose(leaves[0].grad.to_local(), parts[0].grad, atol=1e-5)

"""What is measured: operations and shapes, the bytes each must move, inputs, and whether a result is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..kernels import reference
from ..spec import NormSpec

Operation = Literal["norm", "add", "post", "sandwich", "qk", "rope"]
Direction = Literal["forward", "backward"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

Norm = Callable[[Tensor, Tensor], Tensor]
AddNorm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Op = Callable[..., tuple[Tensor, ...]]


class _Facts(NamedTuple):
    """An operation's tensors of the activations' size, and its weights.

    Attributes:
        moved: how many must be read or written at least, forward and backward.
        inputs: how many it takes.
        outputs: how many it returns.
        weights: of as many norms.
    """

    moved: tuple[int, int]
    inputs: int
    outputs: int
    weights: int


# Queries and keys together are one tensor in ``moved``, and two otherwise. The backward of ``post`` hands its residual
# the gradient that it was given, so that is not moved again.
_FACTS: dict[Operation, _Facts] = {
    "norm": _Facts((2, 3), 1, 1, 1),
    "add": _Facts((4, 4), 2, 2, 1),
    "post": _Facts((3, 3), 2, 1, 1),
    "sandwich": _Facts((4, 6), 2, 2, 2),
    "qk": _Facts((2, 3), 2, 2, 2),
    "rope": _Facts((2, 3), 2, 2, 2),
}

LLAMA = NormSpec("llama")
GEMMA = NormSpec("gemma", zero_centered=True)


@dataclass(frozen=True)
class Case:
    """One operation on one shape.

    Attributes:
        operation: ``norm``: y = norm(x). ``add``: s = r + x, y = norm(s). ``post``: y = r + norm(x). ``sandwich``:
            s = r + norm1(x), y = norm2(s). ``qk``: the norms of queries and keys. ``rope``: these, and then the rotary
            embedding; it takes tokens first and returns heads first, as attention does.
        rows: rows of the activations; tokens, for ``qk`` and ``rope``.
        width: length of a row.
        spec: what the norms compute.
        heads: of queries and of keys, for ``qk`` and ``rope`` alone.
        backward: whether the backward is measured too.
    """

    operation: Operation
    rows: int
    width: int
    spec: NormSpec = LLAMA
    heads: tuple[int, int] = (0, 0)
    backward: bool = True

    @property
    def group(self) -> str:
        """The operation, or ``gemma`` for a norm with that spec: the first word of the name."""
        return "gemma" if self.operation == "norm" and self.spec == GEMMA else self.operation

    @property
    def name(self) -> str:
        """Such as ``norm 8192x4096`` or ``qk 16384x(32+8)x128``."""
        heads = f"({self.heads[0]}+{self.heads[1]})x" if any(self.heads) else ""
        return f"{self.group} {self.rows}x{heads}{self.width}"

    def bytes(self, direction: Direction, dtype: torch.dtype) -> int:
        """The least a call must move: every activation once.

        Weights, cos and sin, and what an implementation adds do not count.
        """
        elements = self.rows * self.width * (sum(self.heads) or 1)
        return _FACTS[self.operation].moved[DIRECTIONS.index(direction)] * elements * dtype.itemsize

    def inputs(self, dtype: torch.dtype, device: torch.device, *, seed: int) -> Inputs:
        """Random inputs and gradients of the outputs, the same for the same arguments; weights are not near one."""
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        def weight() -> Tensor:
            values = 0.3 * torch.randn(self.width, generator=generator, device=device)
            return (values if self.spec.zero_centered else 1 + values).to(dtype)

        facts = _FACTS[self.operation]
        shapes: list[tuple[int, ...]] = [(self.rows, self.width)] * facts.inputs
        if any(self.heads):
            shapes = [(1, self.rows, heads, self.width) for heads in self.heads]
        arguments = [*(random(*shape) for shape in shapes), *(weight() for _ in range(facts.weights))]
        gradients = [random(*shape) for shape in shapes[: facts.outputs]]
        angles: tuple[Tensor, ...] = ()
        if self.operation == "rope":
            gradients = [gradient.transpose(1, 2) for gradient in gradients]
            half = 2 * torch.pi * torch.rand(1, self.rows, self.width // 2, generator=generator, device=device)
            whole = torch.cat((half, half), dim=-1)
            angles = (whole.cos().to(dtype), whole.sin().to(dtype))
        return Inputs(tuple(tensor.requires_grad_() for tensor in arguments), tuple(gradients), angles)


@dataclass(frozen=True)
class Inputs:
    """What a call takes.

    Attributes:
        arguments: activations, then weights; all of them require a gradient.
        gradients: of the outputs, with their shapes; those of ``rope`` lie in memory with tokens first.
        angles: cos and sin, [1, rows, width] each, for ``rope`` alone: a call takes them after the arguments.
    """

    arguments: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    angles: tuple[Tensor, ...] = ()

    def attached(self) -> tuple[Tensor, ...]:
        """All that a call takes, for a forward that is differentiated."""
        return (*self.arguments, *self.angles)

    def detached(self) -> tuple[Tensor, ...]:
        """The same without autograd."""
        return tuple(tensor.detach() for tensor in self.attached())


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotary embedding as modelling code spells it, in eager steps that each round.

    Args:
        q: [B, S, H, D].
        k: as q, with heads of its own.
        cos: [B or 1, S, D], both halves alike.
        sin: as cos.

    Returns:
        Both of them rotated, [B, H, S, D].
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    return rotated(q.transpose(1, 2)), rotated(k.transpose(1, 2))


def compose(operation: Operation, norm: Norm, add_norm: AddNorm, rotate: Rotate = rotate) -> Op:
    """An operation made of a norm, an add + norm, which returns ``(y, s)``, and a rotation like ``rotate``."""
    operations: dict[Operation, Op] = {
        "norm": lambda x, w: (norm(x, w),),
        "add": add_norm,
        "post": lambda x, r, w: (r + norm(x, w),),
        "sandwich": lambda x, r, w1, w2: add_norm(norm(x, w1), r, w2),
        "qk": lambda q, k, q_weight, k_weight: (norm(q, q_weight), norm(k, k_weight)),
        "rope": lambda q, k, q_weight, k_weight, *angles: rotate(norm(q, q_weight), norm(k, k_weight), *angles),
    }
    return operations[operation]


def truth(case: Case, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of all arguments, by the formula in float64."""
    spec = case.spec

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return reference.rms_norm(x, w, spec.eps, spec.casting, spec.zero_centered)

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, r, w, spec.eps, spec.casting, spec.zero_centered)

    arguments = [tensor.detach().double().requires_grad_() for tensor in inputs.arguments]
    angles = [tensor.double() for tensor in inputs.angles]
    outputs = compose(case.operation, norm, add_norm)(*arguments, *angles)
    gradients = torch.autograd.grad(outputs, arguments, [gradient.double() for gradient in inputs.gradients])
    return [output.detach() for output in outputs], list(gradients)


def worst_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest relative error: of a row's norm, or for a vector (a weight's gradient) of an element to the rms.

    One row that is wrong shows, among a million that are right. NaN where a result is.
    """
    errors = []
    for result, true in zip(results, exact, strict=True):
        error = result.detach().double() - true
        if true.dim() == 1:
            errors.append(error.abs().max() / true.square().mean().sqrt())
        else:
            errors.append((error.norm(dim=-1) / true.norm(dim=-1)).max())
    return float(torch.stack(errors).max())


def tolerance(dtype: torch.dtype) -> float:
    """What ``worst_error`` may be: several roundings to ``dtype``. A row or column gone wrong is off by about one."""
    return max(4 * torch.finfo(dtype).eps, 1e-4)


# The order of measuring, what matters most first: a run that is cut short has the widths of common models.
TRAINING: tuple[Case, ...] = (
    Case("norm", 8192, 4096),
    Case("add", 8192, 4096),
    Case("qk", 16384, 128, heads=(32, 8)),
    Case("rope", 16384, 128, heads=(32, 8)),
    Case("norm", 8192, 2048),
    Case("add", 8192, 2048),
    Case("norm", 8192, 2560, GEMMA),
    Case("sandwich", 8192, 2560, GEMMA),
    Case("norm", 32768, 1024),
    Case("add", 32768, 1024),
    Case("qk", 16384, 128, heads=(16, 8)),
    Case("rope", 16384, 128, heads=(16, 8)),
    Case("qk", 16384, 256, heads=(8, 4)),
    Case("rope", 16384, 256, heads=(8, 4)),
    Case("norm", 8192, 3840, GEMMA),
    Case("sandwich", 8192, 3840, GEMMA),
    Case("sandwich", 8192, 5376, GEMMA),
    Case("post", 8192, 4096),
    Case("qk", 4096, 64, heads=(32, 8)),
    Case("rope", 4096, 64, heads=(32, 8)),
    Case("norm", 8192, 5120),
    Case("norm", 8192, 8192),
    Case("add", 8192, 8192),
    Case("norm", 4096, 16384),
    Case("add", 4096, 16384),
    Case("norm", 131072, 128),
    Case("norm", 32768, 128),
    Case("norm", 1048576, 128),
    Case("norm", 131072, 256),
    Case("norm", 32768, 4096),
    Case("norm", 4096, 32768),
    Case("norm", 2048, 65536),
    Case("add", 2048, 65536),
)
DECODING: tuple[Case, ...] = tuple(
    Case(operation, rows, width, backward=False)
    for operation in ("norm", "add")
    for width in (4096, 8192)
    for rows in (1, 16, 64)
)
CASES = TRAINING + DECODING

MODES: tuple[Case, ...] = tuple(
    Case("norm", rows, width, backward=False)
    for rows, width in ((8192, 4096), (32768, 1024), (131072, 128), (8192, 8192), (4096, 16384), (2048, 65536))
)
"""Where the modes of the forward are compared."""
QUICK_MODES: tuple[Case, ...] = (Case("norm", 8, 64, backward=False),)

QUICK: tuple[Case, ...] = (
    Case("norm", 8, 64),
    Case("norm", 8, 80, GEMMA),
    Case("add", 8, 64),
    Case("post", 8, 64),
    Case("sandwich", 8, 80, GEMMA),
    Case("qk", 4, 64, heads=(4, 2)),
    Case("rope", 4, 64, heads=(4, 2)),
    Case("norm", 1, 128, backward=False),
)
"""Just large enough to run every operation."""

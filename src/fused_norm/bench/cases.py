"""What is measured: operations and shapes, the bytes each must move, inputs, and whether a result is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels import reference
from ..spec import NormSpec

Operation = Literal["norm", "add", "qk", "sandwich"]
Direction = Literal["forward", "backward"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

Norm = Callable[[Tensor, Tensor], Tensor]
AddNorm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Op = Callable[..., tuple[Tensor, ...]]

_MOVED: dict[Operation, tuple[int, int]] = {"norm": (2, 3), "add": (4, 4), "qk": (2, 3), "sandwich": (4, 6)}
"""How many tensors of the activations' size an operation must read or write at least, forward and backward."""

LLAMA = NormSpec("llama")
GEMMA = NormSpec("gemma", zero_centered=True)


@dataclass(frozen=True)
class Case:
    """One operation on one shape.

    Attributes:
        operation: ``norm``: y = norm(x). ``add``: s = r + x, y = norm(s). ``qk``: the norms of queries and keys.
            ``sandwich``: s = r + norm1(x), y = norm2(s).
        rows: rows of the activations; tokens, for ``qk``.
        width: length of a row.
        spec: what the norms compute.
        heads: of queries and of keys, for ``qk`` alone.
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
        heads = f"({self.heads[0]}+{self.heads[1]})x" if self.operation == "qk" else ""
        return f"{self.group} {self.rows}x{heads}{self.width}"

    def bytes(self, direction: Direction, dtype: torch.dtype) -> int:
        """The least a call must move: every activation once. Weights and what an implementation adds do not count."""
        elements = self.rows * self.width * (sum(self.heads) if self.operation == "qk" else 1)
        return _MOVED[self.operation][DIRECTIONS.index(direction)] * elements * dtype.itemsize

    def inputs(self, dtype: torch.dtype, device: torch.device, *, seed: int) -> Inputs:
        """Random inputs and gradients of the outputs, the same for the same arguments; weights are not near one."""
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        def weight() -> Tensor:
            values = 0.3 * torch.randn(self.width, generator=generator, device=device)
            return (values if self.spec.zero_centered else 1 + values).to(dtype)

        shapes: list[tuple[int, ...]]
        if self.operation == "qk":
            shapes = [(self.rows, heads, self.width) for heads in self.heads]
            arguments = [*(random(*shape) for shape in shapes), weight(), weight()]
        elif self.operation == "norm":
            shapes = [(self.rows, self.width)]
            arguments = [random(*shapes[0]), weight()]
        else:
            shapes = [(self.rows, self.width)] * 2
            weights = [weight() for _ in range(2 if self.operation == "sandwich" else 1)]
            arguments = [*(random(*shape) for shape in shapes), *weights]
        gradients = [random(*shape) for shape in shapes]
        return Inputs(tuple(tensor.requires_grad_() for tensor in arguments), tuple(gradients))


@dataclass(frozen=True)
class Inputs:
    """What a call takes.

    Attributes:
        arguments: activations, then weights; all of them require a gradient.
        gradients: of the outputs.
    """

    arguments: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    def detached(self) -> tuple[Tensor, ...]:
        """The arguments without autograd."""
        return tuple(tensor.detach() for tensor in self.arguments)


def compose(operation: Operation, norm: Norm, add_norm: AddNorm) -> Op:
    """An operation made of a norm and an add + norm, which returns ``(y, s)``."""
    if operation == "norm":
        return lambda x, w: (norm(x, w),)
    if operation == "add":
        return add_norm
    if operation == "qk":
        return lambda q, k, q_weight, k_weight: (norm(q, q_weight), norm(k, k_weight))
    return lambda x, r, w1, w2: add_norm(norm(x, w1), r, w2)


def truth(case: Case, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of all arguments, by the formula in float64."""
    spec = case.spec

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return reference.rms_norm(x, w, spec.eps, spec.casting, spec.zero_centered)

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, r, w, spec.eps, spec.casting, spec.zero_centered)

    arguments = [tensor.detach().double().requires_grad_() for tensor in inputs.arguments]
    outputs = compose(case.operation, norm, add_norm)(*arguments)
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
    Case("norm", 8192, 2048),
    Case("add", 8192, 2048),
    Case("norm", 8192, 2560, GEMMA),
    Case("sandwich", 8192, 2560, GEMMA),
    Case("norm", 32768, 1024),
    Case("add", 32768, 1024),
    Case("qk", 16384, 128, heads=(16, 8)),
    Case("qk", 16384, 256, heads=(8, 4)),
    Case("norm", 8192, 3840, GEMMA),
    Case("sandwich", 8192, 3840, GEMMA),
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
    Case("qk", 4, 64, heads=(4, 2)),
    Case("sandwich", 8, 80, GEMMA),
    Case("norm", 1, 128, backward=False),
)
"""Just large enough to run every operation."""

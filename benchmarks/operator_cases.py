"""The operators and shapes that are measured: least bytes to move, random inputs, and the error against float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fused_norm.kernels import reference
from fused_norm.kernels.fp8 import FORMATS, Quantized, dequantize
from fused_norm.spec import NormSpec

OperatorName = Literal[
    "norm",
    "add",
    "post",
    "sandwich",
    "qk",
    "rope",
    "rotate",
    "swiglu",
    "geglu",
    "gated",
    "gate-first",
    "fp8",
    "fp8-add",
    "fp8-columns",
]
Direction = Literal["forward", "backward"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

NormFunction = Callable[[Tensor, Tensor], Tensor]
AddNormFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
RotaryFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
GateFunction = Callable[[Tensor, Tensor], Tensor]
OperatorFunction = Callable[..., tuple[Any, ...]]
"""From the arguments of a call to its outputs: tensors, or one in FP8 as ``Quantized``."""


class _TensorCounts(NamedTuple):
    """The number of tensors that an operator reads and writes.

    Attributes:
        moved: tensors of the activations' size that must be read or written at least, forward and backward.
        inputs: activations that it takes.
        outputs: activations that it returns.
        weights: norm weights that it takes.
    """

    moved: tuple[int, int]
    inputs: int
    outputs: int
    weights: int


# Queries and keys together are one tensor in ``moved``, and two in the other counts. The residual's gradient of
# ``post`` is the gradient that the backward is given, so it is not written.
_TENSOR_COUNTS: dict[OperatorName, _TensorCounts] = {
    "norm": _TensorCounts((2, 3), 1, 1, 1),
    "add": _TensorCounts((4, 4), 2, 2, 1),
    "post": _TensorCounts((3, 3), 2, 1, 1),
    "sandwich": _TensorCounts((4, 6), 2, 2, 2),
    "qk": _TensorCounts((2, 3), 2, 2, 2),
    "rope": _TensorCounts((2, 3), 2, 2, 2),
    "rotate": _TensorCounts((2, 2), 2, 2, 0),
    "swiglu": _TensorCounts((3, 5), 2, 1, 0),
    "geglu": _TensorCounts((3, 5), 2, 1, 0),
    "gated": _TensorCounts((3, 5), 2, 1, 1),
    "gate-first": _TensorCounts((3, 5), 2, 1, 1),
    # without the codes, which are of one byte
    "fp8": _TensorCounts((1, 2), 1, 1, 1),
    "fp8-add": _TensorCounts((3, 3), 2, 2, 1),
    "fp8-columns": _TensorCounts((1, 0), 1, 1, 1),
}

_EXAMPLES = ("4096x2560", "4096x(32+8)x128")

LLAMA = NormSpec("llama")
GEMMA = NormSpec("gemma", zero_centered=True)


@dataclass(frozen=True)
class OperatorCase:
    """One operator on one shape.

    Attributes:
        operator: ``norm``: y = norm(x). ``add``: s = r + x, y = norm(s). ``post``: y = r + norm(x). ``sandwich``:
            s = r + norm1(x), y = norm2(s). ``qk``: the norms of queries and keys. ``rope``: these, and then the rotary
            embedding, from [1, rows, heads, width] to [1, heads, rows, width], the layout of attention. ``rotate``: the
            rotary embedding alone, in the same layouts. ``swiglu``: y = silu(gate) * up. ``geglu``: y = gelu(gate) *
            up, by tanh. ``gated``: y = norm(x) * silu(gate). ``gate-first``: y = norm(x * silu(gate)).
        rows: rows of the activations; tokens, for ``qk``, ``rope`` and ``rotate``.
        width: length of a row.
        spec: what the norms compute.
        heads: numbers of query and of key heads; (0, 0) for operators other than ``qk``, ``rope`` and ``rotate``.
        backward: measure the backward too.
        recipe: the name of the FP8 format of the last three.
    """

    operator: OperatorName
    rows: int
    width: int
    spec: NormSpec = LLAMA
    heads: tuple[int, int] = (0, 0)
    backward: bool = True
    recipe: str = ""

    @property
    def group(self) -> str:
        """The first word of the name: the operator, or ``gemma`` for a norm with Gemma's spec."""
        return "gemma" if self.operator == "norm" and self.spec == GEMMA else self.operator

    @property
    def name(self) -> str:
        """The name in tables and for ``--rows``: ``norm 8192x4096``, ``qk 16384x(32+8)x128``, ``fp8 8x64 rowwise``."""
        heads = f"({self.heads[0]}+{self.heads[1]})x" if any(self.heads) else ""
        return f"{self.group} {self.rows}x{heads}{self.width} {self.recipe}".rstrip()

    @classmethod
    def named(cls, name: str) -> OperatorCase:
        """The case of a name, of any shape; gemma's norm and a sandwich have Gemma's spec.

        Raises:
            ValueError: it is no such name.
        """
        found = re.fullmatch(r"(\S+) ([1-9]\d*)x(?:\(([1-9]\d*)\+([1-9]\d*)\)x)?([1-9]\d*)(?: (\S+))?", name)
        group, rows, q_heads, k_heads, width, recipe = found.groups(default="") if found else ("",) * 6
        operator = next((one for one in _TENSOR_COUNTS if one == ("norm" if group == "gemma" else group)), None)
        if operator is None:
            known = ", ".join(("gemma", *_TENSOR_COUNTS))
            raise ValueError(f"{name!r} is no operator and shape such as 'add 4096x2560'; operators are {known}")
        if bool(q_heads) != (operator in ("qk", "rope", "rotate")):
            raise ValueError(f"{name!r} is no shape of {operator}, such as '{operator} {_EXAMPLES[bool(not q_heads)]}'")
        recipes = list(FORMATS) if operator.startswith("fp8") else [""]
        if recipe not in recipes:
            raise ValueError(f"{name!r}: behind the shape comes {' or '.join(recipes) or 'nothing'}")
        spec = GEMMA if group in ("gemma", "sandwich") else LLAMA
        heads = (int(q_heads), int(k_heads)) if q_heads else (0, 0)
        return cls(operator, int(rows), int(width), spec, heads, backward=not recipe, recipe=recipe)

    def bytes(self, direction: Direction, dtype: torch.dtype) -> int:
        """The least bytes that a call must read and write: every activation, code and scale once, nothing else."""
        elements = self.rows * self.width * (sum(self.heads) or 1)
        moved = _TENSOR_COUNTS[self.operator].moved[DIRECTIONS.index(direction)] * elements * dtype.itemsize
        if not self.recipe or direction == "backward":
            return moved
        fp8_format = FORMATS[self.recipe]
        lines = self.width if self.operator == "fp8-columns" else self.rows
        scales = elements // fp8_format.group if fp8_format.group else 1 if fp8_format.whole else lines
        return moved + elements + scales * (1 if fp8_format.swizzled else 4)

    def inputs(self, dtype: torch.dtype, device: torch.device, *, seed: int) -> OperatorInputs:
        """Random inputs and gradients of the outputs, drawn from ``seed``; gamma is not near one."""
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        def weight() -> Tensor:
            values = 0.3 * torch.randn(self.width, generator=generator, device=device)
            return (values if self.spec.zero_centered else 1 + values).to(dtype)

        counts = _TENSOR_COUNTS[self.operator]
        shapes: list[tuple[int, ...]] = [(self.rows, self.width)] * counts.inputs
        if any(self.heads):
            shapes = [(1, self.rows, heads, self.width) for heads in self.heads]
        arguments = [*(random(*shape) for shape in shapes), *(weight() for _ in range(counts.weights))]
        gradients = [random(*shape) for shape in shapes[: counts.outputs]]
        angles: tuple[Tensor, ...] = ()
        if self.operator in ("rope", "rotate"):
            gradients = [gradient.transpose(1, 2) for gradient in gradients]
            half = 2 * torch.pi * torch.rand(1, self.rows, self.width // 2, generator=generator, device=device)
            whole = torch.cat((half, half), dim=-1)
            angles = (whole.cos().to(dtype), whole.sin().to(dtype))
        return OperatorInputs(tuple(tensor.requires_grad_() for tensor in arguments), tuple(gradients), angles)


@dataclass(frozen=True)
class OperatorInputs:
    """The arguments of one call, and the gradients that its backward starts from.

    Attributes:
        arguments: activations, then weights; all of them require a gradient.
        gradients: of the outputs, with their shapes; those of ``rope`` and ``rotate`` are transposed views of
            [1, rows, heads, width].
        angles: cos and sin, [1, rows, width] each, the last arguments of ``rope`` and ``rotate``; empty for others.
    """

    arguments: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    angles: tuple[Tensor, ...] = ()

    def attached(self) -> tuple[Tensor, ...]:
        """All arguments, for a forward that is differentiated."""
        return (*self.arguments, *self.angles)

    def detached(self) -> tuple[Tensor, ...]:
        """All arguments, detached from autograd."""
        return tuple(tensor.detach() for tensor in self.attached())


def rotate_eagerly(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding as modelling code does, in eager steps that each round.

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


def gate_eagerly(operator: OperatorName) -> GateFunction:
    """The gate of an MLP as in modelling code: the activation, and then the product."""
    if operator == "geglu":
        return lambda gate, up: functional.gelu(gate, approximate="tanh") * up
    return lambda gate, up: functional.silu(gate) * up


def gate_norm_eagerly(spec: NormSpec, *, norm_first: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A norm under ``llama`` with a gate as in modelling code, in fp32 steps."""

    def run(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rows, act = x.to(wide), functional.silu(gate.to(wide))
        if not norm_first:
            rows = rows * act
        y = w * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + spec.eps)).to(x.dtype)
        return (y * act).to(x.dtype) if norm_first else y

    return run


def compose_operator(
    operator: OperatorName,
    norm: NormFunction,
    add_norm: AddNormFunction,
    rotate: RotaryFunction = rotate_eagerly,
    gate: GateFunction | None = None,
) -> OperatorFunction:
    """Build an operator from a norm, an add + norm that returns ``(y, s)``, a rotary embedding, and a gate."""
    gated = gate or gate_eagerly(operator)
    norm_gate, gate_norm = (gate_norm_eagerly(LLAMA, norm_first=first) for first in (True, False))
    operators: dict[OperatorName, OperatorFunction] = {
        "norm": lambda x, w: (norm(x, w),),
        "add": add_norm,
        "post": lambda x, r, w: (r + norm(x, w),),
        "sandwich": lambda x, r, w1, w2: add_norm(norm(x, w1), r, w2),
        "qk": lambda q, k, q_weight, k_weight: (norm(q, q_weight), norm(k, k_weight)),
        "rope": lambda q, k, q_weight, k_weight, *angles: rotate(norm(q, q_weight), norm(k, k_weight), *angles),
        "rotate": rotate,
        "swiglu": lambda gate, up: (gated(gate, up),),
        "geglu": lambda gate, up: (gated(gate, up),),
        "gated": lambda x, gate, w: (norm_gate(x, gate, w),),
        "gate-first": lambda x, gate, w: (gate_norm(x, gate, w),),
        "fp8": lambda x, w: (norm(x, w),),
        "fp8-add": add_norm,
        "fp8-columns": lambda x, w: (norm(x, w),),
    }
    return operators[operator]


def float64_results(case: OperatorCase, inputs: OperatorInputs) -> tuple[list[Tensor], list[Tensor]]:
    """Compute outputs and gradients of all arguments by the formula in float64."""
    spec = case.spec

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return reference.rms_norm(spec, x, w)

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(spec, x, r, w)

    arguments = [tensor.detach().double().requires_grad_() for tensor in inputs.arguments]
    angles = [tensor.double() for tensor in inputs.angles]
    outputs = compose_operator(case.operator, norm, add_norm)(*arguments, *angles)
    gradients = torch.autograd.grad(outputs, arguments, [gradient.double() for gradient in inputs.gradients])
    return [output.detach() for output in outputs], list(gradients)


def worst_error(results: Sequence[Tensor | Quantized], exact: Sequence[Tensor]) -> float:
    """The largest relative error of any row, so that one wrong row among a million shows; NaN where a result is NaN.

    Codes and scales count as the numbers that they stand for.
    The error of a row is the norm of the difference over the norm of the exact row. In a vector, a weight's gradient,
    it is that of an element over the root mean square of the vector.
    """
    errors = []
    for one, true in zip(results, exact, strict=True):
        result = dequantize(one) if isinstance(one, Quantized) else one
        error = result.detach().double() - true
        if true.dim() == 1:
            errors.append(error.abs().max() / true.square().mean().sqrt())
        else:
            errors.append((error.norm(dim=-1) / true.norm(dim=-1)).max())
    return float(torch.stack(errors).max())


def tolerance(dtype: torch.dtype, case: OperatorCase | None = None) -> float:
    """The largest ``worst_error`` of a right result, four roundings to ``dtype``; that of a wrong row is about one.

    ``case``: one whose result are FP8 codes has at most half a unit of their four bits, and what saturates an eighth.
    """
    if case is not None and case.recipe:
        return 0.125
    return max(4 * torch.finfo(dtype).eps, 1e-4)


# In the order of measuring: a run that is cut short has measured the widths of common models.
TRAINING: tuple[OperatorCase, ...] = (
    OperatorCase("norm", 8192, 4096),
    OperatorCase("add", 8192, 4096),
    OperatorCase("qk", 16384, 128, heads=(32, 8)),
    OperatorCase("rope", 16384, 128, heads=(32, 8)),
    OperatorCase("swiglu", 16384, 8192),
    OperatorCase("gated", 8192, 4096),
    OperatorCase("gate-first", 8192, 4096),
    OperatorCase("gated", 524288, 128),
    OperatorCase("gate-first", 8192, 8192),
    OperatorCase("rotate", 16384, 64, heads=(32, 8)),
    OperatorCase("norm", 8192, 2048),
    OperatorCase("add", 8192, 2048),
    OperatorCase("norm", 8192, 2560, GEMMA),
    OperatorCase("sandwich", 8192, 2560, GEMMA),
    OperatorCase("norm", 32768, 1024),
    OperatorCase("add", 32768, 1024),
    OperatorCase("qk", 16384, 128, heads=(16, 8)),
    OperatorCase("rope", 16384, 128, heads=(16, 8)),
    OperatorCase("qk", 16384, 256, heads=(8, 4)),
    OperatorCase("rope", 16384, 256, heads=(8, 4)),
    OperatorCase("norm", 8192, 3840, GEMMA),
    OperatorCase("sandwich", 8192, 3840, GEMMA),
    OperatorCase("sandwich", 8192, 5376, GEMMA),
    OperatorCase("post", 8192, 4096),
    OperatorCase("qk", 4096, 64, heads=(32, 8)),
    OperatorCase("rope", 4096, 64, heads=(32, 8)),
    OperatorCase("rotate", 16384, 128, heads=(32, 8)),
    OperatorCase("rotate", 16384, 256, heads=(8, 4)),
    OperatorCase("swiglu", 16384, 3072),
    OperatorCase("swiglu", 8192, 14336),
    OperatorCase("geglu", 16384, 6912),
    OperatorCase("norm", 8192, 5120),
    OperatorCase("norm", 8192, 8192),
    OperatorCase("add", 8192, 8192),
    OperatorCase("norm", 4096, 16384),
    OperatorCase("add", 4096, 16384),
    OperatorCase("norm", 131072, 128),
    OperatorCase("norm", 32768, 128),
    OperatorCase("norm", 1048576, 128),
    OperatorCase("norm", 131072, 256),
    OperatorCase("norm", 32768, 4096),
    OperatorCase("norm", 4096, 32768),
    OperatorCase("norm", 2048, 65536),
    OperatorCase("add", 2048, 65536),
)
DECODING: tuple[OperatorCase, ...] = tuple(
    OperatorCase(operator, rows, width, backward=False)
    for operator in ("norm", "add")
    for width in (4096, 8192)
    for rows in (1, 16, 64)
)
_CAST_TO = ("tensorwise", "rowwise", "block128", "mxfp8", "coat")
TO_FP8: tuple[OperatorCase, ...] = (
    *(
        OperatorCase("fp8", 8192, width, backward=False, recipe=recipe)
        for width in (4096, 2048, 8192)
        for recipe in _CAST_TO
    ),
    *(OperatorCase("fp8-add", 8192, 4096, backward=False, recipe=recipe) for recipe in _CAST_TO),
    *(OperatorCase("fp8-columns", 8192, 4096, backward=False, recipe=recipe) for recipe in _CAST_TO[1:4]),
)
"""The backward of these is that of ``norm`` and ``add``."""
CASES = TRAINING + DECODING + TO_FP8

MODES: tuple[OperatorCase, ...] = tuple(
    OperatorCase("norm", rows, width, backward=False)
    for rows, width in ((8192, 4096), (32768, 1024), (131072, 128), (8192, 8192), (4096, 16384), (2048, 65536))
)
"""The cases on which the modes of the forward are compared."""
QUICK_MODES: tuple[OperatorCase, ...] = (OperatorCase("norm", 8, 64, backward=False),)

QUICK: tuple[OperatorCase, ...] = (
    OperatorCase("norm", 8, 64),
    OperatorCase("norm", 8, 80, GEMMA),
    OperatorCase("add", 8, 64),
    OperatorCase("post", 8, 64),
    OperatorCase("sandwich", 8, 80, GEMMA),
    OperatorCase("qk", 4, 64, heads=(4, 2)),
    OperatorCase("rope", 4, 64, heads=(4, 2)),
    OperatorCase("rotate", 4, 64, heads=(4, 2)),
    OperatorCase("swiglu", 8, 64),
    OperatorCase("geglu", 8, 64),
    OperatorCase("gated", 8, 64),
    OperatorCase("gate-first", 8, 64),
    OperatorCase("norm", 1, 128, backward=False),
    *(OperatorCase("fp8", 8, 128, backward=False, recipe=recipe) for recipe in _CAST_TO),
    OperatorCase("fp8-add", 8, 128, backward=False, recipe="rowwise"),
    *(OperatorCase("fp8-columns", 128, 128, backward=False, recipe=recipe) for recipe in _CAST_TO[1:4]),
)
"""Tiny cases of every operator, for ``--quick``."""

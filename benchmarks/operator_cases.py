"""The operators and shapes that are measured: how each is called and made of parts, random inputs, what is right."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fused_norm import kernels
from fused_norm.kernels import fp8, reference
from fused_norm.kernels.norm import ADD_RMS_NORM
from fused_norm.spec import NormSpec

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

OperatorFunction = Callable[..., tuple[Any, ...]]
"""From the arguments of a call to its outputs: tensors, or one in FP8 as ``Quantized``."""

LLAMA = NormSpec("llama")
GEMMA = NormSpec("gemma", zero_centered=True)


@dataclass(frozen=True)
class Parts:
    """What operators are made of if there is no operator for the whole.

    Attributes:
        norm: from x and w to y.
        add_norm: from x, r and w to y and s = r + x.
        rotate: the rotary embedding of q and k, from [B, S, H, D] to [B, H, S, D], by cos and sin [B or 1, S, D].
        gate: from gate and up to their product, the gate activated.
        gated_norm: from x, gate and w to y.
        convolve: from x [B, L, C] and filters [C, taps] to y, the SiLU of the causal convolution.
        expert_gate: from rows with gate and up to their product.
    """

    norm: Callable[[Tensor, Tensor], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gate: Callable[[Tensor, Tensor], Tensor]
    gated_norm: Callable[[Tensor, Tensor, Tensor], Tensor]
    convolve: Callable[[Tensor, Tensor], Tensor]
    expert_gate: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MeasuredOperator:
    """One operator of this project, as the benchmarks know it.

    Attributes:
        moved: tensors of the activations' size that must be read or written at least, forward and backward; of those
            in FP8 without the codes, which are of one byte. Queries and keys together are one tensor here, and two in
            the other counts. The residual's gradient of ``norm_add`` is the gradient that the backward is given.
        inputs: activations that it takes.
        outputs: activations that it returns.
        weights: norm weights that it takes.
        made_of: the operator made of parts, from a case's activations, weights and angles.
        part: the part without which a peer has nothing of its own for it.
        options: the last words that a case's name may have, the default first, each with the arguments that it stands
            for in this project.
    """

    moved: tuple[int, int]
    inputs: int
    outputs: int
    weights: int
    made_of: Callable[[Parts], OperatorFunction]
    part: str = "norm"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}, "gemma": {}})


GPT_OSS_GATE: Mapping[str, Any] = {"interleaved": True, "limit": 7.0, "alpha": 1.702}
"""The options of the gate of gpt-oss' experts."""

_FORMATS = {name: {"fp8_format": name} for name in ("tensorwise", "rowwise", "block128", "mxfp8", "coat")}

OPERATORS: Mapping[str, MeasuredOperator] = {
    "rms_norm": MeasuredOperator((2, 3), 1, 1, 1, lambda p: lambda x, w: (p.norm(x, w),)),
    "add_rms_norm": MeasuredOperator((4, 4), 2, 2, 1, lambda p: p.add_norm),
    "norm_add": MeasuredOperator((3, 3), 2, 1, 1, lambda p: lambda x, r, w: (r + p.norm(x, w),)),
    "norm_add_norm": MeasuredOperator(
        (4, 6), 2, 2, 2, lambda p: lambda x, r, w1, w2: p.add_norm(p.norm(x, w1), r, w2)
    ),
    "qk_norm": MeasuredOperator(
        (2, 3), 2, 2, 2, lambda p: lambda q, k, q_weight, k_weight: (p.norm(q, q_weight), p.norm(k, k_weight))
    ),
    "qk_norm_rope": MeasuredOperator(
        (2, 3), 2, 2, 2,
        lambda p: lambda q, k, q_weight, k_weight, *angles: p.rotate(p.norm(q, q_weight), p.norm(k, k_weight), *angles),
    ),
    "rope": MeasuredOperator((2, 2), 2, 2, 0, lambda p: p.rotate, part="rotate", options={"": {}}),
    "glu": MeasuredOperator(
        (3, 5), 2, 1, 0, lambda p: lambda gate, up: (p.gate(gate, up),), part="gate",
        options={name: {"activation": name} for name in ("silu", "gelu_tanh")},
    ),
    "expert_gate": MeasuredOperator(
        (3, 5), 1, 1, 0, lambda p: lambda x: (p.expert_gate(x),), part="expert_gate",
        options={"silu": {}, "gpt-oss": GPT_OSS_GATE},
    ),
    "gated_rms_norm": MeasuredOperator(
        (3, 5), 2, 1, 1, lambda p: lambda x, gate, w: (p.gated_norm(x, gate, w),), part="gated_norm",
        options={"": {"norm_before_gate": True}, "gate-first": {"norm_before_gate": False}},
    ),
    "causal_conv1d": MeasuredOperator(
        (2, 3), 1, 1, 0, lambda p: lambda x, filters: (p.convolve(x, filters),), part="convolve",
        options={"": {"activation": "silu"}},
    ),
    "rms_norm_fp8": MeasuredOperator(
        (1, 2), 1, 1, 1, lambda p: lambda x, w: (p.norm(x, w),), part="cast", options=_FORMATS
    ),
    "add_rms_norm_fp8": MeasuredOperator((3, 3), 2, 2, 1, lambda p: p.add_norm, part="cast", options=_FORMATS),
}  # fmt: skip
"""By name, in the order of tables. ``docs/measuring.md`` says what each computes."""

_HEADS = ("qk_norm", "qk_norm_rope", "rope")

_TAPS, _LENGTH = 4, 4096
"""Of the filters of convolutions, and of the sequences that rows are cut into where they come out even."""


@dataclass(frozen=True)
class OperatorCase:
    """One operator on one shape.

    Attributes:
        operator: a name of ``OPERATORS``.
        rows: rows of the activations; tokens, if there are heads.
        width: length of a row.
        heads: numbers of query and of key heads; (0, 0) for operators without.
        option: ``gemma`` for norms under Gemma's spec, the activation of ``glu``, an FP8 format, or another option.
        backward: measure the backward too.
    """

    operator: str
    rows: int
    width: int
    heads: tuple[int, int] = (0, 0)
    option: str = ""
    backward: bool = True

    @classmethod
    def named(cls, name: str, *, backward: bool = True) -> OperatorCase:
        """The case of a name: ``rms_norm 8192x4096``, ``qk_norm 16384x(32+8)x128``, ``rms_norm_fp8 8x64 rowwise``.

        Raises:
            ValueError: it is no such name.
        """
        match = re.fullmatch(r"(\w+) ([1-9]\d*)x(?:\(([1-9]\d*)\+([1-9]\d*)\)x)?([1-9]\d*)(?: (\S+))?", name)
        if match is None or match[1] not in OPERATORS:
            known = ", ".join(OPERATORS)
            raise ValueError(f"{name!r} is no operator and shape such as 'rms_norm 4096x2560'; operators are {known}")
        operator, rows, q_heads, k_heads, width, option = match.groups()
        if bool(q_heads) != (operator in _HEADS):
            shape = "4096x(32+8)x128" if operator in _HEADS else "4096x2560"
            raise ValueError(f"{name!r} is no shape of {operator}, such as '{operator} {shape}'")
        options = OPERATORS[operator].options
        option = option or next(iter(options))
        if option not in options:
            raise ValueError(f"{name!r}: after the shape comes {' or '.join(filter(None, options)) or 'nothing'}")
        heads = (int(q_heads), int(k_heads)) if q_heads else (0, 0)
        with_backward = backward and not operator.endswith("_fp8")
        return cls(operator, int(rows), int(width), heads, option, with_backward)

    @property
    def name(self) -> str:
        """The name in tables and for ``--rows``, from which ``named`` makes the case."""
        heads = f"({self.heads[0]}+{self.heads[1]})x" if any(self.heads) else ""
        return f"{self.operator} {self.rows}x{heads}{self.width} {self.option}".rstrip()

    @property
    def spec(self) -> NormSpec:
        """What its norms compute."""
        return GEMMA if self.option == "gemma" else LLAMA

    @property
    def semantics(self) -> dict[str, Any]:
        """The spec as options of the operators."""
        return {"eps": self.spec.eps, "casting": self.spec.casting, "zero_centered": self.spec.zero_centered}

    @property
    def fp8_format(self) -> fp8.FP8Format | None:
        """The format of its codes; None for operators whose results are no codes."""
        return fp8.FORMATS[self.option] if self.operator.endswith("_fp8") else None

    def bytes(self, direction: Direction, dtype: torch.dtype) -> int:
        """The least bytes that a call must read and write: every activation, code and scale once, nothing else."""
        elements = self.rows * self.width * (sum(self.heads) or 1)
        moved = OPERATORS[self.operator].moved[DIRECTIONS.index(direction)] * elements * dtype.itemsize
        if self.fp8_format is None or direction == "backward":
            return moved
        group = self.fp8_format.group
        scales = 1 if group is None else elements // (group or self.width)
        return moved + elements + scales * (1 if self.fp8_format.swizzled else 4)

    def inputs(self, dtype: torch.dtype, device: torch.device, *, seed: int) -> OperatorInputs:
        """Random inputs and gradients of the outputs, drawn from ``seed``; gamma is not near one."""
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        def weight() -> Tensor:
            values = 0.3 * torch.randn(self.width, generator=generator, device=device)
            return (values if self.spec.zero_centered else 1 + values).to(dtype)

        operator = OPERATORS[self.operator]
        shapes: list[tuple[int, ...]] = [(self.rows, self.width)] * operator.inputs
        if any(self.heads):
            shapes = [(1, self.rows, heads, self.width) for heads in self.heads]
        if self.operator == "causal_conv1d":
            length = self.rows if self.rows % _LENGTH else _LENGTH
            shapes = [(self.rows // length, length, self.width)]
        arguments = [*(random(*shape) for shape in shapes), *(weight() for _ in range(operator.weights))]
        if self.operator == "causal_conv1d":
            arguments.append(0.5 * random(self.width, _TAPS))
        gradients = [random(*shape) for shape in shapes[: operator.outputs]]
        if self.operator == "expert_gate":  # a row has the gate and what it multiplies
            arguments = [random(self.rows, 2 * self.width)]
        angles: tuple[Tensor, ...] = ()
        if self.operator in ("qk_norm_rope", "rope"):
            gradients = [gradient.transpose(1, 2) for gradient in gradients]
            half = 2 * torch.pi * torch.rand(1, self.rows, self.width // 2, generator=generator, device=device)
            whole = torch.cat((half, half), dim=-1)
            angles = (whole.cos().to(dtype), whole.sin().to(dtype))
        return OperatorInputs(tuple(tensor.requires_grad_() for tensor in arguments), tuple(gradients), angles)


@dataclass(frozen=True)
class OperatorInputs:
    """The arguments of one call, and the gradients that its backward starts from.

    Attributes:
        arguments: activations, then weights or filters; all of them require a gradient.
        gradients: of the outputs, with their shapes; those of rotated heads are transposed views of
            [1, rows, heads, width].
        angles: cos and sin, [1, rows, width] each, the last arguments of operators that rotate; empty for others.
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


def fused(case: OperatorCase) -> OperatorFunction:
    """The operator of this project that a case is of."""
    operator = OPERATORS[case.operator]
    options = {**(case.semantics if operator.weights else {}), **operator.options[case.option]}
    call = partial(getattr(fp8 if case.fp8_format else kernels, case.operator), **options)
    if case.operator in ("qk_norm_rope", "rope"):
        return lambda q, k, *rest: call(q.transpose(1, 2), k.transpose(1, 2), *rest)
    return call if operator.outputs > 1 else lambda *arguments: (call(*arguments),)


def eager_parts(case: OperatorCase) -> Parts:
    """The parts of a case in eager steps that each round, as modelling code has them."""
    eps, gate_first = case.spec.eps, case.option == "gate-first"

    def root(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        if case.spec == GEMMA:
            return (root(x.float()) * (1.0 + w.float())).type_as(x)
        return w * root(x.to(torch.float32)).to(x.dtype)

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = r + x
        return norm(s, w), s

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

        def rotated(x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

        return rotated(q.transpose(1, 2)), rotated(k.transpose(1, 2))

    def gate(gate: Tensor, up: Tensor) -> Tensor:
        return (functional.silu(gate) if case.option == "silu" else functional.gelu(gate, approximate="tanh")) * up

    def gated_norm(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rows, act = x.to(wide), functional.silu(gate.to(wide))
        y = w * root(rows * act if gate_first else rows).to(x.dtype)
        return y if gate_first else (y * act).to(x.dtype)

    def convolve(x: Tensor, filters: Tensor) -> Tensor:
        length, taps = x.shape[1], filters.shape[1]
        y = functional.conv1d(x.transpose(1, 2), filters.unsqueeze(1), padding=taps - 1, groups=len(filters))
        return functional.silu(y[:, :, :length]).transpose(1, 2)

    def expert_gate(x: Tensor) -> Tensor:
        if case.option == "silu":
            first, second = x.chunk(2, dim=-1)
            return functional.silu(first) * second
        limit, alpha = GPT_OSS_GATE["limit"], GPT_OSS_GATE["alpha"]
        first, second = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(min=-limit, max=limit)
        return (second + 1) * (first * torch.sigmoid(first * alpha))

    return Parts(norm, add_norm, rotate, gate, gated_norm, convolve, expert_gate)


def float64_results(case: OperatorCase, inputs: OperatorInputs) -> tuple[list[Tensor], list[Tensor]]:
    """Compute outputs and gradients of all arguments by the formula in float64."""
    parts: Any = {
        "norm": partial(reference.rms_norm, case.spec),
        "add_norm": lambda x, residual, weight: ADD_RMS_NORM.reference(x, residual, weight, case.spec, None, 1.0),
    }
    arguments = [tensor.detach().double().requires_grad_() for tensor in inputs.arguments]
    angles = [tensor.double() for tensor in inputs.angles]
    function = OPERATORS[case.operator].made_of(replace(eager_parts(case), **parts))
    outputs = function(*arguments, *angles)
    gradients = torch.autograd.grad(outputs, arguments, [gradient.double() for gradient in inputs.gradients])
    return [output.detach() for output in outputs], list(gradients)


def worst_error(results: Sequence[Tensor | fp8.Quantized], exact: Sequence[Tensor]) -> float:
    """The largest relative error of any row, so that one wrong row among a million shows; NaN if a result is NaN.

    Codes and scales count as the numbers that they stand for.
    The error of a row is the norm of the difference over the norm of the exact row. In a vector, a weight's gradient,
    it is that of an element over the root mean square of the vector.
    """
    errors = []
    for result, true in zip(results, exact, strict=True):
        result = fp8.dequantize(result) if isinstance(result, fp8.Quantized) else result
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
    if case is not None and case.fp8_format:
        return 0.125
    return max(4 * torch.finfo(dtype).eps, 1e-4)


def _cases(names: str) -> tuple[OperatorCase, ...]:
    """The cases of names, which are separated by commas."""
    return tuple(OperatorCase.named(" ".join(name.split())) for name in names.split(","))


# In the order of measuring: a run that is cut short has measured the widths of common models.
TRAINING = _cases("""
    rms_norm 8192x4096, add_rms_norm 8192x4096, qk_norm 16384x(32+8)x128, qk_norm_rope 16384x(32+8)x128, glu 16384x8192,
    gated_rms_norm 8192x4096, gated_rms_norm 8192x4096 gate-first, gated_rms_norm 524288x128,
    gated_rms_norm 8192x8192 gate-first, causal_conv1d 16384x6144, causal_conv1d 16384x2048,
    rope 16384x(32+8)x64, rms_norm 8192x2048, add_rms_norm 8192x2048,
    rms_norm 8192x2560 gemma, norm_add_norm 8192x2560 gemma, rms_norm 32768x1024, add_rms_norm 32768x1024,
    qk_norm 16384x(16+8)x128, qk_norm 16384x(8+4)x256, qk_norm_rope 16384x(16+8)x128, qk_norm_rope 16384x(8+4)x256,
    rms_norm 8192x3840 gemma, norm_add_norm 8192x3840 gemma, norm_add_norm 8192x5376 gemma, norm_add 8192x4096,
    qk_norm 4096x(32+8)x64, qk_norm_rope 4096x(32+8)x64, rope 16384x(32+8)x128, rope 16384x(8+4)x256, glu 16384x3072,
    expert_gate 65536x768, expert_gate 32768x2880 gpt-oss,
    glu 8192x14336, glu 16384x6912 gelu_tanh, rms_norm 8192x5120, rms_norm 8192x8192, add_rms_norm 8192x8192,
    rms_norm 4096x16384, add_rms_norm 4096x16384, rms_norm 131072x128, rms_norm 32768x128, rms_norm 1048576x128,
    rms_norm 131072x256, rms_norm 32768x4096, rms_norm 4096x32768, rms_norm 2048x65536, add_rms_norm 2048x65536
""")
_DECODING = [
    OperatorCase.named(f"{operator} {rows}x{width}", backward=False)
    for operator, width, rows in itertools.product(("rms_norm", "add_rms_norm"), (4096, 8192), (1, 16, 64))
]
_TO_FP8 = [
    OperatorCase.named(f"{operator}_fp8 8192x{width} {option}")
    for operator, width in (("rms_norm", 4096), ("rms_norm", 2048), ("rms_norm", 8192), ("add_rms_norm", 4096))
    for option in _FORMATS
]
CASES = (*TRAINING, *_DECODING, *_TO_FP8)
"""The backward of those in FP8 is that of ``rms_norm`` and ``add_rms_norm``, so it is not measured."""

HOST = _cases("""
    rms_norm 16x1024, add_rms_norm 16x1024, norm_add_norm 16x1024 gemma, qk_norm 4x(4+2)x128, qk_norm_rope 4x(4+2)x128,
    glu 16x1024
""")
"""Cases so small that the GPU is done long before the host is."""

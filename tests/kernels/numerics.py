"""The stock code and float64 results that kernels are compared with, and the rule of the comparison.

The rule: for every output and gradient, the distance to the float64 result is at most the stock code's own distance
plus ``floor``. The stock code is what a modelling file says, run by autograd in the working dtype on the same device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import NewGELUActivation

from fused_norm.kernels import add_rms_norm, glu, rms_norm
from fused_norm.spec import NormSpec

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16)

WIDTHS = (1, 2, 3, 7, 64, 80, 123, 128, 130, 256, 409, 513, 1023, 1024, 1025, 2560)
WIDE = (3571, 5120, 5121, 7001, 12288, 12289, 17001, 33385)
"""Widths at, above and below every limit of the launch plans, odd ones too; rows of the last two are read in chunks."""


class Tensors(SimpleNamespace):
    """Tensors by name, read as attributes; the attribute of an absent tensor is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def present(self) -> dict[str, Any]:
        """Return the tensors that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def mapped(self, convert: Callable[[Tensor], Tensor]) -> Tensors:
        """Return a copy with every tensor converted."""
        return Tensors(**{n: convert(var) if isinstance(var, Tensor) else var for n, var in vars(self).items()})

    def but(self, **others: Any) -> Tensors:
        """Return a copy with some tensors replaced."""
        return Tensors(**vars(self) | others)


def assert_same(
    actual: Tensors | Sequence[Tensor | None],
    expected: Tensors | Sequence[Tensor | None],
    *,
    exact: bool = True,
    where: object = "",
) -> None:
    """Assert equal dtypes and bits, or, if not ``exact``, values as close as sums in another order on a GPU.

    If the tensors have names, only the names in ``actual`` are compared. ``where`` is part of the message of a failure.
    """
    if isinstance(actual, Tensors):
        triples = [(name, a, getattr(expected, name)) for name, a in actual.present().items()]
    else:
        triples = [(place, *pair) for place, pair in enumerate(zip(actual, expected, strict=True))]
    for name, a, b in triples:
        assert (a is None) == (b is None), (name, where)
        if a is not None:
            tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
            torch.testing.assert_close(a, b, **tolerance, msg=lambda text, name=name: f"{name} {where}: {text}")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "gelu_new": NewGELUActivation(),
}
"""The activations of gates, as modelling code computes them."""

GLU_ACTIVATIONS: tuple[str, ...] = get_args(get_type_hints(glu)["activation"])
"""Those that ``glu`` takes by its signature."""

Scales = dict[str, Tensor]
"""The units of errors, by the name of a result."""


def drawn(device: str, seed: int = 0, **kinds: tuple[Sequence[int], torch.dtype | None, float]) -> Tensors:
    """Draw normal values by shape, dtype and scale, the same on every device; a tensor without a dtype is None.

    Arguments come first, and then ``dy`` for an output ``y``, in the order of outputs.
    """
    generator = torch.Generator().manual_seed(seed)
    return Tensors(
        **{
            name: (scale * torch.randn(*shape, generator=generator)).to(device, dtype)
            for name, (shape, dtype, scale) in kinds.items()
            if dtype is not None
        }
    )


@dataclass(frozen=True)
class Norm:
    """One norm under test: how it rounds, what its weight means, and the dtypes of its arguments."""

    casting: str = "llama"
    zero_centered: bool = False
    x: torch.dtype = FP32
    w: torch.dtype | None = FP32
    r: torch.dtype | None = None
    """The residual's dtype; None for a norm without a residual."""
    eps: float = 1e-6
    mode: str | None = None
    scale: float = 1.0
    """The factor of the branch, if there is a residual."""

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.x, self.r, self.w) if dtype is not None]
        gamma = "weightless" if self.w is None else "centered" if self.zero_centered else "plain"
        scaled = [] if self.scale == 1.0 else [str(self.scale)]
        return "-".join([self.casting, gamma, *names, *scaled])

    @property
    def spec(self) -> NormSpec:
        return NormSpec(self.casting, self.zero_centered, eps=self.eps)

    @property
    def sum_dtype(self) -> torch.dtype:
        return self.x if self.r is None else torch.promote_types(self.x, self.r)

    @property
    def y_dtype(self) -> torch.dtype:
        if self.w is None or self.casting in ("gemma", "rounded_gamma"):
            return self.sum_dtype
        return self.w if self.casting == "weight_dtype" else torch.promote_types(self.sum_dtype, self.w)

    def inputs(self, shape: Sequence[int], device: str, seed: int = 0) -> Tensors:
        """Draw arguments and incoming gradients; ``ds`` only if there is a residual."""
        r = None if self.r is None else self.sum_dtype
        return drawn(
            device,
            seed,
            x=(shape, self.x, 1.5),
            r=(shape, self.r, 2.0),
            w=(shape[-1:], self.w, 1.5),
            dy=(shape, self.y_dtype, 1.0),
            ds=(shape, r, 1.0),
        )

    def fused(self, x: Tensor, r: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run the kernels and return ``(y, s)``."""
        semantics = {"casting": self.casting, "zero_centered": self.zero_centered, "mode": self.mode}
        if r is None:
            return rms_norm(x, w, self.eps, **semantics), None
        return add_rms_norm(x, r, w, self.eps, **semantics, scale=self.scale)

    def stock(self, x: Tensor, r: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return ``(y, s)`` as modelling code computes them."""
        s = x if r is None else r + x * self.scale
        return STOCK[self.casting](s, w, self.eps, self.zero_centered), None if r is None else s

    def true(self, x: Tensor, r: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return ``(y, s)`` of float64 arguments, by the definition of the norm."""
        s = x if r is None else self.scale * x + r
        y = s / (s.square().mean(-1, keepdim=True) + self.eps).sqrt()
        if w is not None:
            y = y * (1 + w if self.zero_centered else w)
        return y, None if r is None else s

    def assert_right(self, inputs: Tensors, frozen: Sequence[str] = ()) -> Tensors:
        """Run the kernels and the stock code, assert the rule for every result, and return the kernels' results."""
        ours, stock = run(self.fused, inputs, frozen), run(self.stock, inputs, frozen)
        reference = run_true(self, inputs, frozen)
        assert_near(ours, stock, reference, scales(self, inputs, reference))
        rounded = stock.y
        if self.casting == "none":
            total = inputs.x if stock.s is None else stock.s
            rounded = none_rounded_once(total, inputs.w, self.eps, self.zero_centered)
        assert_same_rounding(self, ours.y, rounded)
        if ours.s is not None:
            assert torch.equal(ours.s, stock.s), "a sum is rounded once, so it has one value"
        return ours


def _stock_llama(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    input_dtype = x.dtype
    hidden_states = x.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    hidden_states = hidden_states.to(input_dtype)
    if weight is None:
        return hidden_states
    return (1.0 + weight if zero_centered else weight) * hidden_states


def _stock_gemma(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    output = x.float()
    output = output * torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        output = output * (1.0 + weight.float() if zero_centered else weight.float())
    return output.type_as(x)


def _stock_none(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    hidden_states = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return hidden_states
    return (1.0 + weight if zero_centered else weight) * hidden_states


def _stock_rounded_gamma(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    output = x.float()
    output = output * torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        output = output * (1.0 + weight if zero_centered else weight).float()
    return output.type_as(x)


def _stock_weight_dtype(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = x * torch.rsqrt(variance + eps)
    if weight is None:
        return hidden_states.to(x.dtype)
    if weight.dtype in (torch.float16, torch.bfloat16):
        hidden_states = hidden_states.to(weight.dtype)
    return (1.0 + weight if zero_centered else weight) * hidden_states


def _stock_rounded_rstd(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    hidden_states = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)
    if weight is None:
        return hidden_states
    return (1.0 + weight if zero_centered else weight) * hidden_states


def none_rounded_once(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """Compute ``_stock_none`` with every step rounded once, as torch does on a GPU.

    On a CPU torch rounds a 16-bit rsqrt twice and eps separately, in the last elements of a tensor that fill no vector.
    """

    def rounded(value: Tensor) -> Tensor:
        return value.to(x.dtype).float()

    mean = rounded(rounded(x.float().pow(2)).mean(-1, keepdim=True))
    x_hat = (x.float() * rounded(torch.rsqrt(rounded(mean + eps)))).to(x.dtype)
    if weight is None:
        return x_hat
    return (1.0 + weight if zero_centered else weight) * x_hat


STOCK = {
    "llama": _stock_llama,
    "gemma": _stock_gemma,
    "rounded_gamma": _stock_rounded_gamma,
    "weight_dtype": _stock_weight_dtype,
    "rounded_rstd": _stock_rounded_rstd,
    "none": _stock_none,
}
BASE_CASTINGS = ("llama", "gemma", "none")
"""The castings of tests that take long; the others differ from ``llama`` in a rounding or two."""
ROUND_RSTD = ("rounded_rstd", "none")
"""The castings that round a row's rstd: another order of its sum may change it, and with it the whole row."""


def squares_that_round_up(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Return values near 1.2 whose squares all gain at least a fifth of a unit by rounding, and so does their mean."""
    values = torch.arange(1, 1.41, torch.finfo(dtype).eps).to(dtype)
    exact = values.double().square()
    values = values[exact.to(dtype).double() - exact > 0.2 * torch.finfo(dtype).eps]
    generator = torch.Generator().manual_seed(0)
    return values[torch.randint(len(values), tuple(shape), generator=generator)].to(device)


def run(
    function: Callable[..., Any], inputs: Tensors, frozen: Sequence[str] = (), used: Sequence[str] | None = None
) -> Tensors:
    """Return outputs and gradients by name; an input ``dy`` is the gradient of the output ``y``.

    Arguments in ``frozen`` require no gradient. If ``used`` is given, only those outputs get a gradient. The gradients
    are those the autograd function returns: two may be one tensor, which the ``grad`` of leaves never are.
    """
    leaves = {
        name: tensor.detach().requires_grad_(name not in frozen)
        for name, tensor in inputs.present().items()
        if isinstance(tensor, Tensor) and not name.startswith("d") and name not in ("cos", "sin")
    }
    outputs = called(function, inputs.but(**leaves))
    into = {name: (y, inputs.present()[f"d{name}"]) for name, y in outputs.present().items() if y.requires_grad}
    ys, dys = zip(*(pair for name, pair in into.items() if used is None or name in used), strict=True)
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(ys, tuple(trained.values()), dys, allow_unused=used is not None)
    grads = {f"d{name}": gradient for name, gradient in zip(trained, gradients, strict=True)}
    return Tensors(**{name: y.detach() for name, y in outputs.present().items()}, **grads)


def called(function: Callable[..., Any], inputs: Tensors) -> Tensors:
    """Call a function with the tensors that its parameters name (``inputs`` is all of them); return outputs by name."""
    arguments = inputs.but(inputs=inputs)
    parameters = inspect.signature(function).parameters.values()
    results = function(
        *(getattr(arguments, parameter.name) for parameter in parameters if parameter.default is parameter.empty)
    )
    outputs = [results] if isinstance(results, Tensor) else [result for result in results if result is not None]
    names = [name[1:] for name in inputs.present() if name.startswith("d")]
    return Tensors(**dict(zip(names, outputs, strict=True)))


def run_true(norm: Any, inputs: Tensors, frozen: Sequence[str] = ()) -> Tensors:
    """Return the float64 result of a norm under test, from exactly the values that the kernels see."""
    return run(norm.true, inputs.mapped(Tensor.double), frozen)


def floor(dtype: torch.dtype) -> float:
    """Return the error that rounding alone may add, in units of ``scales``: one rounding to the dtype, eight in fp32.

    The fp32 ones are a sum taken in another order, an approximate rsqrt (2 units) and the products that follow.
    """
    return torch.finfo(dtype).eps / 2 + 8 * torch.finfo(FP32).eps


def scales(norm: Norm, inputs: Tensors, reference: Tensors) -> Scales:
    """Return the units of errors: a row's largest value, or the largest of the terms of a gradient."""
    s = inputs.x.double() if reference.s is None else reference.s
    rstd = (s.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    dy = inputs.dy.double().abs()
    g = dy
    if inputs.w is not None:
        g = dy * (1 + inputs.w.double() if norm.zero_centered else inputs.w.double()).abs()
    terms = (g * rstd).amax(-1, keepdim=True)
    if inputs.ds is not None:
        terms = torch.maximum(terms, inputs.ds.double().abs().amax(-1, keepdim=True))
    rows = tuple(range(dy.dim() - 1))
    return {"dx": terms * abs(norm.scale), "dr": terms, "dw": (dy * (s * rstd).abs()).sum(rows)}


def assert_near(
    ours: Tensors, stock: Tensors, reference: Tensors, scale: Scales, rounded_before: torch.dtype | None = None
) -> None:
    """Assert the rule, in units of ``scale`` or else of a row's largest value, and stock's dtypes and shapes.

    ``rounded_before``: a dtype in which a result may be off by a rounding that comes before the last one.
    """
    assert ours.present().keys() == stock.present().keys()
    for name, value in ours.present().items():
        expected, exact = getattr(stock, name), getattr(reference, name)
        assert value.dtype == expected.dtype, f"{name} is {value.dtype}, stock's is {expected.dtype}"
        assert value.shape == expected.shape, name
        unit = scale.get(name, exact.abs().amax(-1, keepdim=True)).clamp_min(torch.finfo(torch.float64).tiny)
        error, allowed = ((result.double() - exact).abs().div(unit).amax().item() for result in (value, expected))
        allowed += max(floor(value.dtype), floor(rounded_before or value.dtype))
        assert error <= allowed, f"{name}: error {error:.3g}, allowed by the stock code's is {allowed:.3g}"


def assert_same_rounding(norm: Norm, ours: Tensor, stock: Tensor) -> None:
    """Assert that y is rounded at stock's rounding points.

    Another order of the fp32 sum moves one value in thousands across a rounding boundary; a missing or misplaced
    rounding moves one in four. If two roundings follow each other (x_hat, then y), such a value moves by at most two
    units. If rstd is rounded too, a change of rstd moves its whole row.
    """
    ours, stock = ours.double(), stock.double()
    distance = (ours - stock).abs()
    moved = distance > 8 * torch.finfo(FP32).eps * stock.abs()
    share = moved.double().mean().item()
    allowed = 0.01 + 1 / ours.numel()
    grain = max(torch.finfo(dtype).eps for dtype in (norm.sum_dtype, norm.y_dtype)) * stock.abs()
    if norm.casting in ROUND_RSTD:
        allowed += 2 / (ours.numel() // ours.shape[-1])
        grain = 2 * grain
    assert share <= allowed, f"{share:.2%} of the elements were rounded elsewhere than in the stock code"
    assert (distance <= 2 * grain + 8 * torch.finfo(FP32).eps * stock.abs()).all()


def assert_same_row(value: Tensor, expected: Tensor) -> None:
    """Assert equal rows from other strides: bit for bit when interpreted; compiled, sums may have another order."""
    if value.is_cuda:
        unit = torch.finfo(value.dtype).eps * (4 if value.dtype == FP32 else 1)
        torch.testing.assert_close(value, expected, rtol=unit, atol=unit)
    else:
        assert torch.equal(value, expected)


def same_products(value: Tensor, expected: Tensor) -> bool:
    """Return whether sums of products are the same: bit for bit when interpreted; tensor cores may add otherwise."""
    if not value.is_cuda:
        return torch.equal(value, expected)
    return bool((value.double() - expected.double()).norm() <= 4e-3 * expected.double().norm())


def within(dense: Tensor, shape: Sequence[int], view: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``dense`` as a view of a larger tensor that is NaN elsewhere."""
    return view(dense.new_full(shape, float("nan"))).copy_(dense)


def in_layout(layout: str, dense: Tensor) -> Tensor:
    """Return ``dense``, of four dimensions or one, in the named memory layout, with NaN between its elements."""
    *lead, width = dense.shape
    if layout == "padded rows":
        return within(dense, (*lead, width + 3), lambda tensor: tensor[..., 1 : width + 1])
    if layout == "half of a chunk":
        return within(dense, (*lead, 2 * width), lambda tensor: tensor.chunk(2, dim=-1)[1])
    if layout == "every other column":
        return within(dense, (*lead, 2 * width), lambda tensor: tensor[..., ::2])
    if layout == "offset by one":
        return within(dense, (dense.numel() + 1,), lambda tensor: tensor[1:].view(dense.shape))
    batch, heads, tokens = lead
    shape, view = {
        "transposed heads": ((batch, tokens, heads, width), lambda tensor: tensor.transpose(1, 2)),
        "a slice of tokens": ((batch, heads, tokens + 2, width), lambda tensor: tensor[:, :, 1:-1]),
        "columns first": ((batch, heads, width, tokens), lambda tensor: tensor.transpose(2, 3)),
    }[layout]
    return within(dense, shape, view)


ROW_LAYOUTS = (
    "padded rows",
    "half of a chunk",
    "offset by one",
    "transposed heads",
    "a slice of tokens",
    "columns first",
)
WEIGHT_LAYOUTS = ("every other column", "offset by one")

FAR = 2**30
"""The distance between rows, in elements; the third row begins where 32-bit offsets end."""


def far_apart(dense: Tensor) -> Tensor:
    """Return ``dense`` with its rows ``FAR`` apart; on a CPU the memory between them is untouched and costs nothing."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    memory = dense.new_empty((len(dense) - 1) * FAR + dense[0].numel())
    torch.utils.deterministic.fill_uninitialized_memory = filled
    return memory.as_strided(dense.shape, (FAR, *dense[0].contiguous().stride())).copy_(dense)


class Guarded:
    """Makes tensors like others between guard bands, and tells whether the bands were written to."""

    _BYTES = 16384
    """The size of a band."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def __call__(self, like: Tensor | None) -> Any:
        """Return a tensor with the shape, strides and dtype of a dense one, filled with NaN; None for None."""
        if like is None:
            return None
        inside = slice(self._BYTES, -self._BYTES)
        size = like.untyped_storage().nbytes() + 2 * self._BYTES
        buffer = torch.full((size,), 0xA5, dtype=torch.uint8, device=like.device)
        buffer[inside] = 0xFF  # NaN in every floating point dtype
        self._buffers.append(buffer)
        return buffer[inside].view(like.dtype).as_strided(like.shape, like.stride())

    @property
    def count(self) -> int:
        """The number of tensors so far."""
        return len(self._buffers)

    def intact(self) -> bool:
        bands = (band for b in self._buffers for band in (b[: self._BYTES], b[-self._BYTES :]))
        return all((band == 0xA5).all() for band in bands)

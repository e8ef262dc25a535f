"""The survey of norms that float8 linears read: which of them quantise for their readers, and which do not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.fp8 import FP8Recipe, Quantized, quantize
from ..spec import GatedNormSpec, NormSpec
from .class_swap import (
    ClassChange,
    built_upon,
    change_to,
    class_forward_replaced,
    float8_reader_class,
    foreign_forward,
    stock_class,
)
from .float8_linears import Again, Float8Reader, InputCast, NormReaders, product_of_codes, why_not_read
from .forward_source import SourceError
from .fused_norm_module import READERS
from .patch_report import QuantizingNorm, Site
from .quantized_activation import Codes, NormResult, Remake, quantized_activation
from .result_readers import uses_of_argument, uses_of_result

logger = logging.getLogger("fused_norm")


@dataclass(frozen=True)
class ReadersChange:
    """A norm and the float8 linears that it is to quantise for; None for nobody."""

    norm: nn.Module
    readers: NormReaders | None

    def make(self) -> Callable[[], None]:
        """Change the norm, and return a function that changes it back."""
        attributes = vars(self.norm)
        before = attributes.pop(READERS, None)
        if self.readers is not None:
            attributes[READERS] = self.readers

        def undo() -> None:
            attributes.pop(READERS, None)
            if before is not None:
                attributes[READERS] = before

        return undo


def readers_of(norm: nn.Module) -> NormReaders | None:
    """The float8 linears that a norm quantises for."""
    found: NormReaders | None = vars(norm).get(READERS)
    return found


def survey_float8(
    model: nn.Module, sites: list[Site], *, wanted: bool
) -> tuple[list[QuantizingNorm], list[ClassChange], list[ReadersChange]]:
    """The norms that float8 linears read, and the changes that let them quantise; the model is not touched.

    Args:
        model: the model.
        sites: the rows of its survey.
        wanted: norms are to quantise; otherwise those that do are to stop.

    Raises:
        FusedNormError: where a linear is to be torchao's again and other code has built on its class.
    """
    rows: list[QuantizingNorm] = []
    linears: list[ClassChange] = []
    norms: list[ReadersChange] = []
    quantising: set[int] = set()
    reading: set[int] = set()
    if wanted:
        reason = why_no_float8(model)
        if reason is not None:
            logger.warning("fp8: %s", reason)
            rows.append(QuantizingNorm("", type(model).__name__, reason=reason))
        else:
            for row, norm, readers in _norms(model, {site.path: site for site in sites if site.kind == "norm"}):
                rows.append(row)
                if readers is None:
                    continue
                quantising.add(id(norm))
                if not _alike(readers_of(norm), readers):
                    norms.append(ReadersChange(norm, readers))
                for _, _, linear in readers.linears:
                    if id(linear) not in reading:
                        reading.add(id(linear))
                        linears += change_to(linear, _reading(linear, readers.input_cast))
    for module in model.modules():
        if readers_of(module) is not None and id(module) not in quantising:
            norms.append(ReadersChange(module, None))
        if isinstance(module, Float8Reader) and id(module) not in reading:
            linears += change_to(module, stock_class(module))
    return rows, linears, norms


def why_no_float8(model: nn.Module) -> str | None:
    """The reason why no norm of the model can quantise for float8 linears of torchao."""
    try:
        linear = _float8_linear()
        product_of_codes()
    except Exception as error:  # whatever the import of a release that does not go with this PyTorch raises
        if isinstance(error, ModuleNotFoundError) and error.name == "torchao":
            return "torchao is not installed, which has the float8 linears: pip install torchao"
        return f"the installed torchao cannot be used: {type(error).__name__}: {error}"
    if not any(isinstance(module, linear) for module in model.modules()):
        return "the model has no float8 linears: convert it by torchao's convert_to_float8_training first"
    return None


def _reading(linear: nn.Module, cast: InputCast) -> type[nn.Module]:
    origin: Any = stock_class(linear)
    return float8_reader_class(origin, cast)


def _float8_linear() -> Any:
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear


def _alike(one: NormReaders | None, other: NormReaders) -> bool:
    return one is not None and vars(one) == vars(other)


def _norms(model: nn.Module, sites: dict[str, Site]) -> Iterator[tuple[QuantizingNorm, nn.Module, NormReaders | None]]:
    """Every norm that a float8 linear may read, with its row and, if it is to quantise, its readers."""
    modules = dict(model.named_modules())
    paths = {id(module): path for path, module in modules.items()}
    held: dict[int, list[tuple[nn.Module, str]]] = {}
    for holder in modules.values():
        for name, child in holder._modules.items():
            if child is not None and paths[id(child)] in sites:
                held.setdefault(id(child), []).append((holder, name))
    for path, site in sites.items():
        norm = modules[path]
        places = held.get(id(norm), [])
        found = [_Readers(holder, name) for holder, name in places]
        if not any(one.may_be_float8() for one in found):
            continue
        row = QuantizingNorm(path, site.module, tuple(paths[id(one)] for one in found[0].linears()))
        if site.reason is not None:
            reason: str | None = f"the norm is kept: {site.reason}"
        elif len(found) > 1:
            reason = "several modules hold it"
        elif isinstance(site.spec, GatedNormSpec):
            reason = "a norm with a gate writes no codes"
        elif site.spec is not None and site.spec.casting == "none":
            reason = "under casting 'none' a norm is not made again from what it keeps"
        else:
            reason = found[0].why_not() or why_not_read(norm, found[0].named, found[0].holders)
        if reason is not None:
            yield QuantizingNorm(path, site.module, row.readers, reason=reason), norm, None
            continue
        cast = found[0].input_cast()
        yield (
            QuantizingNorm(path, site.module, row.readers, cast.name),
            norm,
            NormReaders(cast, tuple(found[0].named), tuple(found[0].holders)),
        )


class _Readers:
    """Those who read the result of a norm that a module holds."""

    def __init__(self, holder: nn.Module, name: str) -> None:
        self.named: list[tuple[nn.Module, str, nn.Module]] = []
        self.holders: list[nn.Module] = []
        self._reason: str | None = None
        self._taking: list[nn.Module] = []
        try:
            for use in uses_of_result(stock_class(holder), name):
                self._follow(holder, use.attribute, use.argument, depth=0)
        except SourceError as error:
            self._reason = str(error)
        if not self.named and self._reason is None:
            self._reason = "nothing reads it"

    def linears(self) -> list[nn.Module]:
        """The linears among them."""
        return [linear for _, _, linear in self.named]

    def may_be_float8(self) -> bool:
        """Return whether a float8 linear is among them, or inside of a module that takes the result."""
        linear = _float8_linear()
        inside = (module for taking in self._taking for module in taking.modules())
        return any(isinstance(one, linear) for one in (*self.linears(), *inside))

    def why_not(self) -> str | None:
        """The reason why they cannot read codes."""
        if self._reason is not None:
            return self._reason
        linear = _float8_linear()
        casts = set()
        for _, name, module in self.named:
            if not isinstance(module, linear):
                return f"its reader {name} is a {type(module).__name__}, no float8 linear"
            origin: Any = stock_class(module)
            if origin.forward is not linear.forward:
                return class_forward_replaced(origin) or f"{name} is a {origin.__name__} with a forward of its own"
            if owner := foreign_forward(module):
                return f"{name}: {owner}"
            if isinstance(module, Float8Reader) and built_upon(module):
                return f"other code has built on the class of {name} since it was patched"
            cast = input_cast_of(module)
            if isinstance(cast, str):
                return f"{name}: {cast}"
            casts.add(cast)
        if len(casts) > 1:
            return "its readers cast their inputs in several ways"
        if not computes_alike(self.named[0][2].config, *casts):
            return "its float8 linears do not compute the same from codes"
        return None

    def input_cast(self) -> InputCast:
        """How they cast their input."""
        cast = input_cast_of(self.named[0][2])
        assert isinstance(cast, InputCast)
        return cast

    def _follow(self, holder: nn.Module, name: str, argument: int | str, depth: int) -> None:
        """Add what a call ``holder.<name>(...)`` that takes the result leads to."""
        module = getattr(holder, name, None)
        if not isinstance(module, nn.Module):
            raise SourceError(f"{name}, which takes its result, is no module")
        self._taking.append(module)
        if isinstance(module, nn.Linear):
            self.named.append((holder, name, module))
            return
        if depth or not module._modules:
            raise SourceError(f"its reader {name} is a {type(module).__name__}, no float8 linear")
        self.holders.append(module)
        for use in uses_of_argument(stock_class(module), argument):
            self._follow(module, use.attribute, use.argument, depth + 1)


def input_cast_of(linear: Any) -> InputCast | str:
    """How a float8 linear casts its input, by the values of its config; the reason where codes cannot replace it."""
    config = linear.config
    first, again = config.cast_config_input, config.cast_config_input_for_grad_weight
    granularity = {"tensorwise": "tensor", "axiswise": "row"}.get(first.scaling_granularity.value)
    if first.scaling_type.value != "dynamic" or granularity is None:
        return f"its input is cast in an unknown way: {first}"
    recipe = FP8Recipe(
        granularity,  # type: ignore[arg-type]
        dtype=first.target_dtype,
        power_of_2=config.round_scales_to_power_of_2,
    )
    kind: Again
    if again.scaling_type.value == "disabled":
        kind = "exact"
    elif again.scaling_type.value == "dynamic" and again.scaling_granularity is first.scaling_granularity:
        kind = "codes" if granularity == "tensor" else "columns"
    else:
        return f"its input is cast in an unknown way for the gradient of the weight: {again}"
    if config.emulate and not recipe.power_of_2:
        return "it emulates its products, and divides by scales that are no powers of two"
    return InputCast(recipe, kind)


@cache
def computes_alike(config: Any, cast: InputCast) -> bool:
    """Return whether a linear of torchao with this config gives the same bits from codes as from what they are of.

    A small one on the CPU does both, forward and backward.
    """
    config = replace(config, emulate=True)
    generator = torch.Generator().manual_seed(0)
    with (
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        y, weight, bias, incoming = (
            torch.randn(shape, generator=generator).to(torch.bfloat16)
            for shape in ((2, 8, 32), (16, 32), 16, (2, 8, 16))
        )
        y[0, 0, 0] = torch.finfo(cast.recipe.dtype).max  # a tensor's scale is then a power of two, as emulation needs
        origin = _float8_linear()
        linear = origin(32, 16, bias=False, config=config)
        linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
        found = []
        for read in (False, True):
            leaf = y.clone().requires_grad_()
            given = leaf
            if read:
                linear.__class__ = float8_reader_class(origin, cast)
                codes = quantize(leaf, cast.recipe)
                assert codes.carrier is not None
                made = Codes(codes.q, codes.scale.reciprocal(), codes.recipe)
                result = NormResult(_Given(NormSpec("llama")), (y,))
                given = quantized_activation(result, made, codes.carrier)
            output = linear(given)
            gradients = torch.autograd.grad(output, (leaf, linear.weight, linear.bias), incoming)
            found.append((output, *gradients))
        return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class _Given(Remake):
    """A result that is there and need not be made again: all that is kept for it is itself."""

    def y(self, *kept: Any) -> Tensor:
        y: Tensor = kept[0]
        return y

    def columns(self, recipe: FP8Recipe, *kept: Any) -> Quantized:
        return quantize(kept[0], recipe.along_rows())

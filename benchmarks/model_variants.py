"""The variants of a model that are compared: stock, fused, with an option less, those of peers, and compiled ones."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.nn import functional

from fused_norm.options import RecomputeLevel
from fused_norm.patcher import PatchReport, apply_fused_norm, remove_fused_norm
from fused_norm.spec import NormSpec

from .benchmark_run import RefusedError
from .model_steps import BenchmarkedModel, Generation, body_of
from .providers import PROVIDERS

_MAX_AUTOTUNE = "max-autotune-no-cudagraphs"

Forward = Callable[[Tensor], Tensor]
Replacement = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and the value that takes its place."""


@dataclass(frozen=True)
class Patched:
    """A model as a variant has it.

    Attributes:
        model: what a step calls.
        running: makes a context in which its steps run; what is changed for the whole process is changed there alone.
    """

    model: Any
    running: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


Variant = Callable[[BenchmarkedModel], Patched]
"""Changes the model of a step, which is a twin that nobody else calls."""


@contextlib.contextmanager
def in_force(replacements: Sequence[Replacement]) -> Iterator[None]:
    """A context in which attributes have other values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def missing(variant: str, device: torch.device) -> str | None:
    """The reason why a variant cannot be measured on ``device`` with what is installed, or None."""
    if "liger" in variant:
        return PROVIDERS["liger"].missing(device)
    if variant in FLOAT8:
        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return "needs a GPU that multiplies FP8, of compute capability 8.9 or more"
    if variant in COMPILED and not PROVIDERS["compile"].on_cpu and device.type == "cpu":
        return "needs a GPU"
    return None


def replaced_norms(make: Callable[[nn.Module, NormSpec], Forward]) -> Variant:
    """A variant in which every norm has the forward that ``make`` returns for it."""

    def variant(step: BenchmarkedModel) -> Patched:
        for path, spec in step.norms.items():
            module = step.model.get_submodule(path)
            module.forward = make(module, spec)
        return Patched(step.model)

    return variant


def _stock(step: BenchmarkedModel) -> Patched:
    return Patched(step.model)


def _fused(step: BenchmarkedModel, **options: Any) -> Patched:
    apply_fused_norm(step.model, **options)
    return Patched(step.model)


def _fused_recompute(level: RecomputeLevel) -> Variant:
    def variant(step: BenchmarkedModel) -> Patched:
        if isinstance(step, Generation):
            raise RefusedError("nothing is kept for a backward")
        return _fused(step, recompute=level)

    return variant


def _fused_with_stock_loss(step: BenchmarkedModel) -> Patched:
    if not step.has_loss:
        raise RefusedError("the step has no loss")
    return _fused(step, loss=False)


def _without(option: str) -> Variant:
    """A variant with one option off; refused where it cannot be told from ``fused`` or from ``stock``."""

    def variant(step: BenchmarkedModel) -> Patched:
        everything = _fused_sites(apply_fused_norm(step.model, strict=False))
        remove_fused_norm(step.model)
        chosen: dict[str, Any] = {option: False}
        fused = _fused_sites(apply_fused_norm(step.model, strict=False, **chosen))
        if not fused:
            raise RefusedError("nothing is left to fuse")
        if fused == everything:
            raise RefusedError("the model has nothing of the kind")
        return Patched(step.model)

    return variant


def _fused_sites(report: PatchReport) -> set[tuple[str, str]]:
    reading = {(block.path, "readers") for block in report.readers if block.reason is None}
    return reading | {(site.path, site.kind) for site in report.fused}


def _in_float8(eager: Variant, recipe: str) -> Variant:
    """A variant after torchao's ``convert_to_float8_training`` of all linears in layers, by a recipe of its names."""

    def variant(step: BenchmarkedModel) -> Patched:
        if isinstance(step, Generation):
            raise RefusedError("measured for training steps: a generation quantises its weights again for every token")
        if hasattr(step.model, "get_base_model"):
            raise RefusedError("torchao would convert the adapters too")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        emulate = step.tokens.device.type == "cpu"
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        fits = None if emulate else _fits_float8
        convert_to_float8_training(body_of(step.model).layers, config=config, module_filter_fn=fits)
        return eager(step)

    return variant


def _fits_float8(linear: nn.Module, path: str) -> bool:
    """Return whether scaled products take a linear, whose sizes have to be multiples of 16."""
    return isinstance(linear, nn.Linear) and linear.in_features % 16 == 0 and linear.out_features % 16 == 0


def _liger(step: BenchmarkedModel, **options: bool) -> Patched:
    """Liger's own function for the family, with its loss where there is a head; ``options`` are its arguments."""
    from liger_kernel import transformers as liger

    model_type = step.model.config.model_type
    patch = getattr(liger, f"apply_liger_kernel_to_{model_type}", None)
    if patch is None:
        raise RefusedError(f"Liger has no kernels for {model_type}")
    base = step.model.get_base_model() if hasattr(step.model, "get_base_model") else step.model
    takes = inspect.signature(patch).parameters
    loss = {"cross_entropy": False, "fused_linear_cross_entropy": step.has_loss}
    modelling: Any = sys.modules[type(base).__module__]
    before = dict(vars(modelling))
    try:
        patch(model=base, **{name: value for name, value in (loss | options).items() if name in takes})
    finally:
        now = dict(vars(modelling))
        for name in now.keys() - before:  # Of another release of transformers: nobody there calls it.
            delattr(modelling, name)
        changed = [(modelling, name, now[name]) for name, value in before.items() if now[name] is not value]
        for _, name, _ in changed:
            setattr(modelling, name, before[name])
    return Patched(step.model, partial(in_force, changed))


def _liger_and_fused(step: BenchmarkedModel) -> Patched:
    patched = _liger(step, rms_norm=False, rope=False)
    with patched.running():
        apply_fused_norm(step.model, loss=False, strict=False)
    return patched


def _compiled_by_layer(eager: Variant, mode: str | None = None) -> Variant:
    def variant(step: BenchmarkedModel) -> Patched:
        if isinstance(step, Generation):
            raise RefusedError("measured for training steps; transformers itself compiles a generation as a whole")
        patched = eager(step)
        for layer in body_of(step.model).layers:
            layer.compile(dynamic=False, mode=mode)
        return patched

    return variant


def _compiled_in_less_memory(budget: float) -> Variant:
    """A variant with the decoder layers compiled, of what they would keep for their backward this share at most."""

    def variant(step: BenchmarkedModel) -> Patched:
        patched = _compiled_by_layer(_stock)(step)
        return replace(patched, running=partial(functorch_config.patch, activation_memory_budget=budget))

    return variant


def _compiled(eager: Variant) -> Variant:
    def variant(step: BenchmarkedModel) -> Patched:
        patched = eager(step)
        if isinstance(step, Generation):
            if not step.static_cache:
                raise RefusedError("transformers compiles a generation with a static cache alone")
            step.model.generation_config.disable_compile = False
            return patched
        modelling = sys.modules[type(body_of(step.model)).__module__]
        changed = [] if step.inputs.keys() - {"labels"} else [(modelling, "create_causal_mask", _no_mask)]
        return Patched(torch.compile(patched.model, dynamic=False), partial(_both, patched.running, changed))

    return variant


@contextlib.contextmanager
def _both(
    running: Callable[[], contextlib.AbstractContextManager[Any]], replacements: Sequence[Replacement]
) -> Iterator[None]:
    with running(), in_force(replacements):
        yield


def _no_mask(*_: Any, **__: Any) -> None:
    """Return None in place of ``create_causal_mask``, as in eager runs, so that sdpa takes its causal flash kernel.

    The original builds a dense mask while it is traced, and sdpa takes a slower kernel.
    """


def _liger_norm(module: nn.Module, spec: NormSpec) -> Forward:
    operators: Any = importlib.import_module("liger_kernel.ops")
    offset = float(spec.zero_centered)
    in_place = not spec.zero_centered  # As Liger sets it: not in Gemma's layers, where the gradient is needed again.

    def forward(x: Tensor) -> Tensor:
        weight = module.weight
        y: Tensor = operators.LigerRMSNormFunction.apply(x, weight, spec.eps, offset, spec.casting, in_place)
        return y

    return forward


def _torch_norm(module: nn.Module, spec: NormSpec) -> Forward:
    def forward(x: Tensor) -> Tensor:
        weight: Any = module.weight
        return functional.rms_norm(x, weight.shape, 1.0 + weight if spec.zero_centered else weight, spec.eps)

    return forward


_OPTIONS = ("rope", "qk", "residual", "sandwich", "norms", "mlp", "readers", "adapter")
_MEMORY_BUDGETS = (0.7, 0.4, 0.1)
_FLOAT8_RECIPES = ("tensorwise", "rowwise")
_FLOAT8_STEPS: Mapping[str, Variant] = {
    "": _stock,
    "-compile-layers": _compiled_by_layer(_stock),
    "-fused-compile-layers": _compiled_by_layer(_fused),
}

VARIANTS: Mapping[str, Variant] = {
    "stock": _stock,
    "liger": _liger,
    "liger-fused": _liger_and_fused,
    "compile-layers": _compiled_by_layer(_stock),
    "fused": _fused,
    "fused again": _fused,
    "fused-stock-loss": _fused_with_stock_loss,
    **{f"without {option}": _without(option) for option in _OPTIONS},
    "fused-compile-layers": _compiled_by_layer(_fused),
    "fused-recompute": _fused_recompute(True),
    "fused-recompute-mlp": _fused_recompute("mlp"),
    "fused-recompute-attention": _fused_recompute("attention"),
    "compile-layers-max": _compiled_by_layer(_stock, _MAX_AUTOTUNE),
    **{f"compile-layers-budget-{budget}": _compiled_in_less_memory(budget) for budget in _MEMORY_BUDGETS},
    "compile": _compiled(_stock),
    "fused-compile": _compiled(_fused),
    "liger-norms": replaced_norms(_liger_norm),
    "torch": replaced_norms(_torch_norm),
    **{
        f"float8-{recipe}{name}": _in_float8(variant, recipe)
        for recipe in _FLOAT8_RECIPES
        for name, variant in _FLOAT8_STEPS.items()
    },
}
"""What each of them is, is said under *Steps* and *Features* in ``docs/measuring.md``."""

FEATURES = ("fused", "fused again", "fused-stock-loss", *(f"without {option}" for option in _OPTIONS), "stock")
"""The variants that show what each option brings."""

DEFAULT = ("stock", "liger", "compile-layers", "fused", "fused-compile-layers")
"""What is measured where no variants are named."""

OURS = frozenset(name for name in VARIANTS if "fused" in name or name in FEATURES[:-1])
COMPILED = frozenset(name for name in VARIANTS if "compile" in name)
FLOAT8 = frozenset(name for name in VARIANTS if name.startswith("float8-"))


def float8_linears_alone(variant: str) -> str | None:
    """The variant that has this one's float8 linears and nothing else; None for one without such."""
    return next((f"float8-{recipe}" for recipe in _FLOAT8_RECIPES if variant.startswith(f"float8-{recipe}")), None)

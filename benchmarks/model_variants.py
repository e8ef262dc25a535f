"""The variants of a model that are compared: stock, fused, with an option less, those of peers, and compiled ones."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._inductor import compile_fx

from fused_norm.patcher import PatchReport, apply_fused_norm, remove_fused_norm
from fused_norm.spec import NormSpec

from .model_steps import BenchmarkedModel, Generation, body_of
from .providers import PROVIDERS, Norm, liger_norm, torch_norm
from .results import RefusedError


@dataclass(frozen=True)
class Patched:
    """A model as a variant has it.

    Attributes:
        model: what a step calls.
        running: makes a context in which its steps run; what is changed for the whole process is changed there alone.
        report: on layers that are to be replayed as CUDA graphs; None for other variants.
    """

    model: Any
    running: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    report: PatchReport | None = None


Variant = Callable[[BenchmarkedModel], Patched]
"""Changes the model of a step, which is a twin that nobody else calls."""


def missing(variant: str, device: torch.device) -> str | None:
    """The reason why a variant cannot be measured on ``device`` with what is installed, or None."""
    if "liger" in variant:
        return PROVIDERS["liger"].missing(device)
    if variant in FLOAT8:
        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return "needs a GPU that multiplies FP8, of compute capability 8.9 or more"
    if device.type == "cpu" and (variant in GRAPHS or (variant in COMPILED and not PROVIDERS["compile"].on_cpu)):
        return "needs a GPU"
    return None


def replaced_norms(step: BenchmarkedModel, make: Callable[[NormSpec], Norm]) -> Patched:
    """Let every norm of the model be computed by what ``make`` returns for its spec."""
    for path, spec in step.norms.items():
        module, norm = step.model.get_submodule(path), make(spec)
        module.forward = lambda x, module=module, norm=norm: norm(x, module.weight)
    return Patched(step.model)


def _stock(step: BenchmarkedModel) -> Patched:
    return Patched(step.model)


def _fused(step: BenchmarkedModel, **options: Any) -> Patched:
    if "recompute" in options and isinstance(step, Generation):
        raise RefusedError("nothing is kept for a backward")
    if "loss" in options and not step.has_loss:
        raise RefusedError("the step has no loss")
    apply_fused_norm(step.model, **options)
    return Patched(step.model)


_WARM_UP = 4
"""Steps after which layers are replayed: the first runs eager, and two captures may fail."""


def _replayed(step: BenchmarkedModel, *, warms_up: bool = True, **options: Any) -> Patched:
    """Replay the layers as CUDA graphs; refused if none of them is after a warm-up.

    ``warms_up=False``: the caller's steps differ from these, whose captures would be held beside those of its own; it
    asks ``refuse_if_eager`` after its first.
    """
    if isinstance(step, Generation):
        raise RefusedError("measured for training steps: a generation has another length for every token")
    if not step.shares_weights:
        raise RefusedError("FSDP gives its parameters other memory in each step")
    report = apply_fused_norm(step.model, cuda_graphs=True, **options)
    if warms_up:
        for _ in range(_WARM_UP):
            step.step()
        refuse_if_eager(report)
    return Patched(step.model, report=report)


def refuse_if_eager(report: PatchReport | None, since: Any = None) -> None:
    """Raise RefusedError, with the reasons, if layers were to be replayed as CUDA graphs, and none was.

    ``since``: as for ``PatchReport.why_not_replayed``.
    """
    if report is not None and (reason := report.why_not_replayed(since)) is not None:
        raise RefusedError(f"no layer was replayed: {reason}")


def _without(step: BenchmarkedModel, option: str) -> Patched:
    """Turn one option off; refused if that cannot be told from ``fused`` or from ``stock``."""
    fused: list[set[tuple[str, str]]] = []
    choices: tuple[dict[str, Any], ...] = ({}, {option: False})
    for options in choices:
        remove_fused_norm(step.model)
        report = apply_fused_norm(step.model, strict=False, **options)
        blocks = [block for block in report.shared_inputs if block.reason is None]
        fused.append({(site.path, site.kind) for site in (*report.fused, *blocks)})
    everything, others = fused
    if not others:
        raise RefusedError("nothing is left to fuse")
    if others == everything:
        raise RefusedError("the model has nothing of the kind")
    return Patched(step.model)


def _in_float8(step: BenchmarkedModel, eager: Variant, recipe: str) -> Patched:
    """Convert all linears in layers by a recipe of torchao's ``convert_to_float8_training``, before ``eager``."""
    if isinstance(step, Generation):
        raise RefusedError("measured for training steps: a generation quantises its weights again for every token")
    if hasattr(step.model, "get_base_model"):
        raise RefusedError("torchao would convert the adapters too")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(linear: nn.Module, path: str) -> bool:  # the sizes that scaled products take
        return isinstance(linear, nn.Linear) and linear.in_features % 16 == 0 and linear.out_features % 16 == 0

    emulate = step.tokens.device.type == "cpu"
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(body_of(step.model).layers, config=config, module_filter_fn=None if emulate else fits)
    return eager(step)


def _liger(step: BenchmarkedModel, **options: bool) -> Patched:
    """Liger's own function for the family, with its loss if there is a head; ``options`` are its arguments."""
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
    with mock.patch.dict(vars(modelling)):  # What it adds is of another release of transformers: nobody calls it.
        patch(model=base, **{name: value for name, value in (loss | options).items() if name in takes})
        changed = {name: value for name, value in vars(modelling).items() if before.get(name, value) is not value}
    return Patched(step.model, _with_names(modelling, changed))


def _with_names(module: Any, values: Mapping[str, Any]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What makes a context in which names of a module have other values."""
    return partial(mock.patch.multiple, module, **values) if values else contextlib.nullcontext


def _liger_and_fused(step: BenchmarkedModel) -> Patched:
    patched = _liger(step, rms_norm=False, rope=False)
    with patched.running():
        apply_fused_norm(step.model, loss=False, strict=False)
    return patched


def _compiled_by_layer(
    step: BenchmarkedModel, eager: Variant, mode: str | None = None, budget: float | None = None
) -> Patched:
    """Compile the decoder layers; of what they would keep for their backward, ``budget`` is the share at most."""
    if isinstance(step, Generation):
        raise RefusedError("measured for training steps; transformers itself compiles a generation as a whole")
    patched = eager(step)
    # Dynamo reuses the code of another variant, which has another budget, if its backend is the same.
    backend = "inductor" if budget is None else _inductor_within(budget)
    for layer in body_of(step.model).layers:
        layer.compile(dynamic=False, mode=mode, backend=backend)
    return patched


def _inductor_within(budget: float) -> Callable[..., Any]:
    """Inductor as a backend of its own, with a budget for what is kept for the backward."""

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return compile_fx.compile_fx(graph, inputs)

    return backend


def _compiled(step: BenchmarkedModel, eager: Variant) -> Patched:
    patched = eager(step)
    if isinstance(step, Generation):
        if not step.static_cache:
            raise RefusedError("transformers compiles a generation with a static cache alone")
        step.model.generation_config.disable_compile = False
        return patched
    modelling = sys.modules[type(body_of(step.model)).__module__]
    masks = {} if step.inputs.keys() - {"labels"} else {"create_causal_mask": _no_mask}
    return Patched(torch.compile(patched.model, dynamic=False), _with_names(modelling, masks))


def _no_mask(*_: Any, **__: Any) -> None:
    """Return None in place of ``create_causal_mask``, as in eager runs, so that sdpa takes its causal flash kernel.

    The original builds a dense mask while it is traced, and sdpa takes a slower kernel.
    """


_OPTIONS = ("rope", "qk", "residual", "post_norm", "norms", "mlp", "shared_inputs", "linear_4bit", "lora")
_MEMORY_BUDGETS = (0.7, 0.4, 0.1)
_FLOAT8_RECIPES = ("tensorwise", "rowwise")
_COMPILED_STOCK, _COMPILED_FUSED = (partial(_compiled_by_layer, eager=eager) for eager in (_stock, _fused))
_FLOAT8_STEPS: Mapping[str, Variant] = {
    "": _stock,
    "-compile-layers": _COMPILED_STOCK,
    "-fused-compile-layers": _COMPILED_FUSED,
}

VARIANTS: Mapping[str, Variant] = {
    "stock": _stock,
    "liger": _liger,
    "liger-fused": _liger_and_fused,
    "compile-layers": _COMPILED_STOCK,
    "fused": _fused,
    "fused again": _fused,
    "fused-stock-loss": partial(_fused, loss=False),
    **{f"without {option}": partial(_without, option=option) for option in _OPTIONS},
    "fused-compile-layers": _COMPILED_FUSED,
    "fused-recompute": partial(_fused, recompute=True),
    "fused-recompute-mlp": partial(_fused, recompute="mlp"),
    "fused-recompute-attention": partial(_fused, recompute="attention"),
    "fused-graphs": _replayed,
    "fused-graphs-recompute-attention": partial(_replayed, recompute="attention"),
    "compile-layers-max": partial(_COMPILED_STOCK, mode="max-autotune-no-cudagraphs"),
    **{f"compile-layers-budget-{share}": partial(_COMPILED_STOCK, budget=share) for share in _MEMORY_BUDGETS},
    "compile": partial(_compiled, eager=_stock),
    "fused-compile": partial(_compiled, eager=_fused),
    # As Liger sets it: not in place in Gemma's layers, where the gradient is needed again.
    "liger-norms": partial(replaced_norms, make=lambda spec: liger_norm(spec, in_place=not spec.zero_centered)),
    "torch": partial(replaced_norms, make=torch_norm),
    **{
        f"float8-{recipe}{name}": partial(_in_float8, eager=variant, recipe=recipe)
        for recipe in _FLOAT8_RECIPES
        for name, variant in _FLOAT8_STEPS.items()
    },
}
"""What each of them is, is said under *Steps* and *Features* in ``docs/measuring.md``."""

FEATURES = ("fused", "fused again", "fused-stock-loss", *(f"without {option}" for option in _OPTIONS), "stock")
"""The variants that show what each option brings."""

DEFAULT = ("stock", "liger", "compile-layers", "fused", "fused-compile-layers")
"""What is measured if no variants are named."""

OURS = frozenset(name for name in VARIANTS if "fused" in name or name in FEATURES[:-1])
COMPILED = frozenset(name for name in VARIANTS if "compile" in name)
GRAPHS = frozenset(name for name in VARIANTS if "graphs" in name)
FLOAT8 = frozenset(name for name in VARIANTS if name.startswith("float8-"))


def float8_linears_alone(variant: str) -> str | None:
    """The variant that has this one's float8 linears and nothing else; None for one without such."""
    return next((f"float8-{recipe}" for recipe in _FLOAT8_RECIPES if variant.startswith(f"float8-{recipe}")), None)

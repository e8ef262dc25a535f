"""The count of one model type: what it has, by values and by running it, and what the patcher's report says of it."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fused_norm.patcher import PatchReport, apply_fused_norm, remove_fused_norm

from .forward_hashes import forward_hash, name_of
from .head_losses import inputs_with_labels, is_fused
from .inputs import Inputs, inputs_of
from .model_types import MOST_LAYERS, build, default_config, model_class_of, rotates_in_sections, small_configs
from .norm_values import Normalises, normalises
from .rotations import Layout, layouts_of
from .summary import PART
from .sweep import SHOWN, in_a_line
from .traced_sums import TracedSums

_MOST_PARAMETERS = 600_000_000  # Of a small model.
ROTATIONS: dict[str, Layout] = {"rope": "halves", "neighbours": "neighbours", "complex": "complex"}
"""The layout of rotations of each kind that is counted."""

_QK = re.compile(r"(^|_)(q|k|qk|query|key)(_|$)")


class UnbuiltError(Exception):
    """A model type of which no model can be built; the message says why."""


@dataclass
class TypeCount:
    """The counts of one model type: all that it has, and the fused part of it.

    Attributes:
        model: the class of the whole model.
        found: how many of each kind there are; adds and products in a small model, the rest in the whole one.
        fused: how many of these the report has as fused.
        kept: kind, class and reason of the others, and their number.
        unfounded: rows on adds that were not seen to feed the norm, by class: kind, class and number.
        classes: hashes of the forwards of what was counted, by class, each with the kind in front.
        layers: of the small model; 0 if there is none.
        norms_run: of the norms of the small model, how many ran, and how many there are.
        why_not_run: why there is no small model, or norms did not run.
    """

    model: str
    found: dict[str, int] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)
    kept: list[tuple[str, str, str, int]] = field(default_factory=list)
    unfounded: list[tuple[str, str, int]] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)
    layers: int = 0
    norms_run: tuple[int, int] = (0, 0)
    why_not_run: str | None = None


@dataclass
class SmallModel:
    """A small model of a type, and what was seen while it ran."""

    model: nn.Module
    layers: int
    traced: TracedSums
    norms: dict[str, nn.Module]


def count(model_type: str) -> TypeCount:
    """Count one type.

    Raises:
        UnbuiltError: no model of it can be built from its default config.
    """
    whole, config = whole_model(model_type)
    result = TypeCount(type(whole).__name__)
    kinds = judged(whole)
    modules = dict(whole.named_modules())
    norms = {path for path, kind in kinds.items() if kind == "rms"}
    places = {
        "norm": norms,
        "gated": {path for path, kind in kinds.items() if kind == "gated"},
        "qk": {path for path in norms if _QK.search(path.rpartition(".")[2])},
        **{kind: {path for path, module in modules.items() if layout in layouts_of(module)}
           for kind, layout in ROTATIONS.items()},
    }  # fmt: skip
    rotating = set().union(*(places[kind] for kind in ROTATIONS))
    # Norms, attentions that rotate, and what else holds a norm that is not a plain LayerNorm.
    own = {path: module for path, module in modules.items() if not type(module).__module__.startswith("torch.")}
    holders = [path.rpartition(".")[0] for path, kind in kinds.items() if kind in ("rms", "gated")]
    for role, found in (("norm", kinds), ("attention", rotating), ("layer", holders)):
        _add_classes(result, role, (own[path] for path in found if path in own))
    if any(places.values()):
        report = apply_fused_norm(whole, strict=False)
        for kind, paths in places.items():
            _settle(result, kind, paths, report, modules)
        remove_fused_norm(whole)
    else:
        result.found = dict.fromkeys(places, 0)
        result.fused = dict.fromkeys(places, 0)
    if norms or rotating or _has_head(whole):
        small, result.why_not_run = small_model(whole, config)
        if small is not None:
            _count_in_small_model(result, small)
    return result


def _has_head(model: Any) -> bool:
    """Return whether a model takes labels and has a vocabulary head."""
    takes_labels = "labels" in inspect.signature(type(model).forward).parameters
    try:
        return takes_labels and model.get_output_embeddings() is not None
    except (AttributeError, NotImplementedError):
        return False


def whole_model(model_type: str) -> tuple[nn.Module, Any]:
    """The model of a type's default config, on the meta device, and that config.

    Raises:
        UnbuiltError: there is none.
    """
    try:
        config = default_config(model_type)
        model_class = model_class_of(config)
        model = None if model_class is None else build(model_class, config, "meta")
    except Exception as error:  # of whatever kind a foreign model raises
        raise UnbuiltError(in_a_line(error)) from error
    if model is None:
        raise UnbuiltError(PART)
    return model, config


def judged(model: nn.Module) -> dict[str, Normalises]:
    """Return the modules that normalise, by path, with the kind of each."""
    kinds = ((path, normalises(module)) for path, module in model.named_modules())
    return {path: kind for path, kind in kinds if kind is not None}


def parts_of(model: nn.Module) -> set[Any]:
    """Return a model's parts: its classes, and the kinds of places of its norms, by class, holder and attribute."""
    modules = dict(model.named_modules())
    norms = [path for path, kind in judged(model).items() if kind in ("rms", "gated")]
    places = {(type(modules[path]).__name__, _holder(path, modules), _name(path)) for path in norms}
    return places | {type(module).__name__ for module in modules.values()}


def small_model(whole: nn.Module, config: Any) -> tuple[SmallModel | None, str | None]:
    """The smallest model that runs and consists of all that the whole one, on the meta device, consists of.

    If there is none, the model in which most norms ran, or None; and why some did not.
    """
    best: SmallModel | None = None
    why: str | None = "no smaller config builds"
    tried = set()
    model_class, parts, sections = type(whole), parts_of(whole), rotates_in_sections(whole)
    for layers, divisor, smaller in small_configs(config, sections=sections):
        try:
            empty = build(model_class, smaller, "meta")
        except Exception as error:  # of whatever kind a foreign model raises
            why = in_a_line(error) if best is None else why
            continue
        if sum(weight.numel() for weight in empty.parameters()) > _MOST_PARAMETERS:
            why = "it is too large to run" if best is None else why
            continue
        if divisor in tried or (not parts <= parts_of(empty) and layers < MOST_LAYERS):
            continue
        tried.add(divisor)
        try:
            small, failure = _run(with_random_weights(build(model_class, smaller, "cpu")), layers)
        except Exception as error:  # of whatever kind a foreign model raises
            why = in_a_line(error) if best is None else why
            continue
        if best is None or len(small.traced.called) > len(best.traced.called):
            best, why = small, failure
        if 4 * len(best.traced.called) >= 3 * len(best.norms):  # others would hardly do better
            break
    return best, why


def with_random_weights(model: nn.Module) -> nn.Module:
    """The model, its weights of one dimension moved, because ones and zeros hide what they are used for."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.isfinite().all():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
            if weight.dim() == 1 and "norm" in name.lower():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def _run(model: Any, layers: int) -> tuple[SmallModel, str | None]:
    """Run a small model, and those of its parts by themselves of which it leaves norms out."""
    _use_experts(model, "eager")  # the grouped product wants widths of its own
    norms = {path: module for path, module in model.named_modules() if normalises(module) == "rms"}
    traced = TracedSums(model, norms.keys())
    why, ran = None, False
    seen: set[type] = set()
    for path, part in model.named_modules():
        if not isinstance(part, PreTrainedModel) or (path and type(part) in seen):
            continue
        inside = {norm for norm in norms if not path or norm.startswith(f"{path}.")}
        if path and inside <= traced.called:
            continue
        seen.add(type(part))
        for inputs in inputs_of(part):
            before = len(traced.called)
            try:
                traced._calls.clear()
                with torch.no_grad(), traced:
                    part(**inputs)
            except Exception as error:  # of whatever kind a foreign model raises
                why = why or in_a_line(error)
                continue
            ran = ran or not path or len(traced.called) > before
            break
    traced.remove()
    if ran and set(norms) <= traced.called:
        why = None
    return SmallModel(model, layers, traced, norms), why


def _use_experts(model: Any, implementation: str) -> None:
    """Choose among transformers' implementations of experts, if the model has any."""
    if hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation():
        model.set_experts_implementation(implementation)


def _count_in_small_model(result: TypeCount, small: SmallModel) -> None:
    result.layers = small.layers
    result.norms_run = len(small.traced.called), len(small.norms)
    inputs = inputs_with_labels(small.model) if _has_head(small.model) else None
    _use_experts(small.model, "grouped_mm")
    report = apply_fused_norm(small.model, strict=False)
    _use_experts(small.model, "eager")
    if inputs is not None:
        _count_loss(result, small.model, inputs, report)
    remove_fused_norm(small.model)
    modules = dict(small.model.named_modules())
    # Some q and k norms come after the rotation, which adds too, but no residual.
    fed = {path for path in small.traced.fed if not _QK.search(_name(path))}
    # What transformers' decorator of experts sets.
    experts = {path for path, module in modules.items() if {"has_gate", "is_transposed"} <= vars(module).keys()}
    gated = {path for path in small.traced.gated if normalises(modules[path]) is None} - experts
    places = {"residual": fed, "experts": experts, "mlp": gated, "conv": small.traced.convolved}
    for kind, paths in places.items():
        _settle(result, kind, paths, report, modules)
    rows = [site for site in (*report.fused, *report.kept) if site.kind == "residual"]
    extra = Counter(
        ("residual", _holder(site.path, modules))
        for site in rows
        if site.path in small.traced.called and site.path not in small.traced.fed
    )
    result.unfounded = sorted((*what, number) for what, number in extra.items())
    for role in ("mlp", "conv"):
        _add_classes(result, role, (modules[path] for path in places[role]))


def _count_loss(result: TypeCount, model: nn.Module, inputs: Inputs, report: PatchReport) -> None:
    """Count a head whose loss the patched ``model`` computes, and whether it does by the fused operator."""
    result.found["loss"], result.fused["loss"] = 1, int(is_fused(model, inputs))
    if not result.fused["loss"]:
        rows = [site for site in (*report.kept, *report.fused) if site.kind == "loss"]
        reason = "no row" if not rows else rows[0].reason or "its loss takes real logits"
        result.kept.append(("loss", name_of(type(model).__mro__[0]), reason[:SHOWN], 1))


def _settle(result: TypeCount, kind: str, paths: Iterable[str], report: PatchReport, modules: Any) -> None:
    """Count what was found, what of it is fused, and why the rest is not."""
    paths = set(paths)
    kinds = ("norm", "qk") if kind in ("norm", "gated", "qk") else ("rope",) if kind in ROTATIONS else (kind,)
    fused = {site.path for site in report.fused if site.kind in kinds}
    reasons = {site.path: site.reason or "" for site in report.kept if site.kind in kinds}
    result.found[kind], result.fused[kind] = len(paths), len(paths & fused)
    kept: Counter[tuple[str, str, str]] = Counter()
    for path in paths - fused:
        module = modules[path]
        name = name_of(type(module)) if kind != "residual" else f"{_holder(path, modules)} {_name(path)}"
        kept[kind, name, reasons.get(path, "no row")[:SHOWN]] += 1
    result.kept += sorted((*what, number) for what, number in kept.items())


def _name(path: str) -> str:
    """The attribute of a norm, without its number in a list."""
    return re.sub(r"^.*\.(?=[^.\d]+)", "", re.sub(r"(\.\d+)+$", "", path))


def _holder(path: str, modules: Any) -> str:
    return name_of(type(modules[re.sub(r"\.?[^.]+(\.\d+)?$", "", path)]))


def _add_classes(result: TypeCount, role: str, modules: Iterable[nn.Module]) -> None:
    """Add the hashes of the forwards of some modules' classes, each with its role."""
    classes: set[Any] = {type(module) for module in modules}
    for cls in classes:
        result.classes.setdefault(name_of(cls), f"{role} {forward_hash(cls)}")

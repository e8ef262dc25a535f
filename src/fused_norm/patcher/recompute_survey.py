"""The survey of layers under ``recompute``: a row for each, and the changes of class for those that recompute."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeGuard

from torch import nn

from ..options import RecomputeLevel
from .class_swap import (
    ClassChange,
    built_upon,
    change_to,
    foreign_forward,
    fused_class,
    fused_forward_replaced,
)
from .fused_block import FusedBlock
from .fused_classes import fused_block_class
from .norm_recognition import looks_like_norm
from .patch_report import Site
from .recompute import COMPILED
from .rewrite import Rewrite

logger = logging.getLogger("fused_norm")


def survey_layers(
    model: nn.Module, sites: Iterable[Site], changes: list[ClassChange], *, recompute: RecomputeLevel
) -> tuple[list[Site], list[ClassChange]]:
    """The layers in which something is fused, and ``changes`` with those of the layers' own classes.

    Args:
        model: the model, which is not touched.
        sites: the rows of its survey.
        changes: those of that survey.
        recompute: the layers are to recompute outputs; otherwise those that do are to stop.

    Raises:
        FusedNormError: where a layer is to stop and other code has built on its fused class.
    """
    planned = {id(change.module): change for change in changes}
    layers = _layers(model, sites) if recompute else {}
    rows, wholes = [], compiled_modules(model) if layers else []
    compiled = {path for path in layers if any(_is_within(path, whole) for whole in wholes)}
    if compiled:
        numbers = repr(recompute), len(compiled), len(layers)
        logger.warning("recompute=%s does nothing in %s of %s layers: %s", *numbers, COMPILED)
    if parts := [whole for whole in wholes if any(_is_within(whole, path) for path in layers.keys() - compiled)]:
        several = repr(recompute), len(parts), parts[0]
        logger.warning("recompute=%s does nothing in %s parts of layers, %s the first: %s", *several, COMPILED)
    for path, layer in layers.items():
        current = fused_class(layer) if isinstance(layer, FusedBlock) else type(layer)
        reason = foreign_forward(layer)
        if reason is None and not (isinstance(layer, FusedBlock) and built_upon(layer)):
            new = _class_like(planned[id(layer)].new if id(layer) in planned else current, recompute=recompute)
            reason = fused_forward_replaced(new)
            if getattr(layer, "gradient_checkpointing", False):
                reason = "gradient checkpointing is on in this layer, and keeps less"
            if path in compiled:
                reason = COMPILED
            if reason is None:
                planned[id(layer)] = ClassChange(layer, new)
        elif reason is None and not _recomputes(layer):
            reason = "other code has built on its class since it was patched; remove_fused_norm before sharding"
        rows.append(Site(path, "recompute", current.__name__, reason=reason))
    recomputing = {id(layers[row.path]) for row in rows if row.reason is None}
    for module in model.modules():
        if _recomputes(module) and id(module) not in recomputing and id(module) not in planned:
            for change in change_to(module, _class_like(fused_class(module), recompute=False)):
                planned[id(module)] = change
    return rows, [change for change in planned.values() if type(change.module) is not change.new]


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the paths of the modules of a model that ``torch.compile`` has been called on, or on their forward."""
    return [
        path
        for path, one in model.named_modules()
        if one._compiled_call_impl
        or "_orig_mod" in one._modules
        or hasattr(vars(one).get("forward"), "_torchdynamo_orig_callable")
    ]


def _is_within(path: str, whole: str) -> bool:
    """Return whether a module is another one, or a part of it, by their paths."""
    return not whole or path == whole or path.startswith(f"{whole}.")


def _layers(model: nn.Module, sites: Iterable[Site]) -> dict[str, nn.Module]:
    """The modules with something fused inside that stand in a ``ModuleList``, the outermost one, with their paths."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, nn.Module] = {}
    for site in sites:
        names = site.path.split(".") if site.reason is None else []
        for depth in range(1, len(names)):
            if isinstance(modules[".".join(names[:depth])], nn.ModuleList):
                path = ".".join(names[: depth + 1])
                if not looks_like_norm(modules[path]) and modules[path] not in found.values():
                    found[path] = modules[path]
                break
    return found


def _recomputes(module: nn.Module) -> TypeGuard[FusedBlock]:
    return isinstance(module, FusedBlock) and bool(module.fused_norm_recompute)


def _class_like(current: type[nn.Module], *, recompute: RecomputeLevel) -> type[nn.Module]:
    """The class of a layer like one of class ``current`` that recomputes outputs, or one that does not."""
    origin: type[nn.Module] = current
    rewrites: tuple[Rewrite, ...] = ()
    if issubclass(current, FusedBlock):
        origin, rewrites = current.fused_norm_origin, current.fused_norm_rewrites
    return fused_block_class(origin, rewrites, recompute) if rewrites or recompute else origin

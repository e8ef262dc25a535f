"""The survey of layers under ``recompute``: which of them recompute outputs, and a row for each."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from torch import nn

from .block import Block, SurveyedModel
from .patch_report import Site
from .recompute import COMPILED

logger = logging.getLogger("fused_norm")


def decide_recompute(model: SurveyedModel, sites: Iterable[Site]) -> list[Block]:
    """The layers in which something is fused, each with its row on recomputing; none if that option is off.

    Args:
        model: the layers of it that are to recompute outputs are told so.
        sites: the rows of all sites that are decided.
    """
    level = model.options.recompute
    for block in model.blocks.values():
        block.layer = None
    layers = [model.block(path) for path in _layers(model, sites)] if level else []
    wholes = compiled_modules(model.modules[""]) if layers else []
    compiled = [layer.path for layer in layers if any(_is_within(layer.path, whole) for whole in wholes)]
    if compiled:
        numbers = repr(level), len(compiled), len(layers)
        logger.warning("recompute=%s does nothing in %s of %s layers: %s", *numbers, COMPILED)
    others = [layer.path for layer in layers if layer.path not in compiled]
    if parts := [whole for whole in wholes if any(_is_within(whole, path) for path in others)]:
        several = repr(level), len(parts), parts[0]
        logger.warning("recompute=%s does nothing in %s parts of layers, %s the first: %s", *several, COMPILED)
    for layer in layers:
        reason = layer.override_reason
        if reason is None and layer.is_sealed:
            if not layer.module.fused_norm_recompute:
                reason = "other code has built on its class since it was patched; remove_fused_norm before sharding"
        elif reason is None and layer.path in compiled:
            reason = COMPILED
        elif reason is None and getattr(layer.module, "gradient_checkpointing", False):
            reason = "gradient checkpointing is on in this layer, and keeps less"
        layer.layer = Site(layer.path, "recompute", layer.origin.__name__, reason=reason)
    return layers


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the paths of the modules of a model that ``torch.compile`` has been called on, or on their forward."""
    return [
        path
        for path, module in model.named_modules()
        if module._compiled_call_impl
        or "_orig_mod" in module._modules
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    ]


def _is_within(path: str, whole: str) -> bool:
    """Return whether a module is another module, or a part of it, by their paths."""
    return not whole or path == whole or path.startswith(f"{whole}.")


def _layers(model: SurveyedModel, sites: Iterable[Site]) -> Iterator[str]:
    """The paths of modules with something fused inside that stand in a ``ModuleList``, the outermost one."""
    seen = set()
    for site in sites:
        names = site.path.split(".") if site.reason is None else []
        for depth in range(1, len(names)):
            if isinstance(model.modules[".".join(names[:depth])], nn.ModuleList):
                path = ".".join(names[: depth + 1])
                is_linear = path == site.path and site.kind in ("linear", "adapter")
                is_layer = path not in model.norm_sites and not is_linear
                if is_layer and path not in seen:
                    seen.add(path)
                    yield path
                break

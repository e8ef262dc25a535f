"""The survey of a model: a row for every site, and the changes of class that fuse those to be fused."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..options import FuseOptions
from ..spec import FusedNormError, GatedNormSpec, Kind
from .adapters import FusedAdapter, is_lora_layer, is_quantised, is_quantised_lora_layer, name_of, why_unfused
from .block import Block, SurveyedModel, why_left_out
from .class_swap import (
    ClassChange,
    class_override_reason,
    forward_override_reason,
    fused_override_reason,
    has_derived_class,
    stock_class,
)
from .four_bit import FusedLinear4bit, is_linear_4bit, why_linear_is_stock
from .fused_block import FusedBlock
from .fused_classes import fused_block_class, fused_class
from .fused_experts import FusedExperts, is_experts, other_implementation, recognise_experts
from .fused_norm_module import FusedGatedNorm, FusedNorm
from .hooks import are_plain_calls, replaced_forward, replaced_linear
from .loss_survey import language_models, survey_losses
from .norm_recognition import Recognised, looks_like_norm, recognise
from .patch_report import Cause, Site
from .patterns import MATCHES, decide_matches
from .patterns.heads import QK_NAME
from .probe import UnrecognisedError, no_code_changes
from .recompute import COMPILED
from .source import SourceError, WrappedError

logger = logging.getLogger("fused_norm")

_ANY_WIDTH = 64
"""Placeholder width for a weight held entirely by another rank."""


@no_code_changes()
def survey(model: nn.Module, options: FuseOptions) -> tuple[list[Site], list[ClassChange]]:
    """A row for every site, and the changes of class that fuse those to be fused; the model is not touched.

    Each site is judged as if the model were stock, and what is fused already but is not to be gets its own class back.

    Raises:
        FusedNormError: if a pattern of ``options.modules`` selects nothing; if a site is to be stock again and
            other code has built on its fused class.
    """
    everywhere = dict(model.named_modules(remove_duplicate=False))
    modules = dict(model.named_modules())  # by their first paths
    paths = {id(module): path for path, module in modules.items()}
    norms = {path: module for path, module in modules.items() if looks_like_norm(module)}
    experts = {path: module for path, module in modules.items() if is_experts(module)}
    blocks = {
        path: module
        for path, module in modules.items()
        if path not in norms
        and path not in experts
        and not isinstance(module, torch.jit.ScriptModule)
        and _may_have_sites(module)
    }
    adapters = {
        path: module for path, module in modules.items() if is_lora_layer(module) or is_quantised_lora_layer(module)
    }
    inside = {id(layer._modules.get("base_layer")) for layer in adapters.values()}
    linears = {path: module for path, module in modules.items() if is_linear_4bit(module)}
    heads = [(module, head) for module, head in language_models(model) if id(head) in paths]
    selectable = norms | blocks | experts | linears | adapters | {paths[id(head)]: head for _, head in heads}
    count, name = len(norms), type(model).__name__
    for pattern in options.patterns:
        named = replace(options, modules=pattern)
        if not any(named.selects(path, module) for path, module in selectable.items()):
            raise FusedNormError(
                f"modules={pattern!r} selects none of the {count} norms of {name}, and no attention, MLP, LoRA layer or"
                f" head; one of their paths is {next(iter(norms | blocks), None)}"
            )
    for pattern in options.casting or ():
        if not any(replace(options, casting={pattern: "llama"}).casting_at(path) for path in norms):
            raise FusedNormError(
                f"casting={{{pattern!r}: ...}} selects none of the {count} norms of {name};"
                f" one of their paths is {next(iter(norms), None)}"
            )
    surveyed = SurveyedModel(modules, paths, {}, options)
    for path, module in norms.items():
        surveyed.norm_sites[path] = site = _survey_norm(path, module, surveyed)
        gated = isinstance(site.spec, GatedNormSpec)
        if options.casting_at(path) is not None and (gated or site.reason is not None):
            refused = f"casting gives {path} other rounding points, but it stays stock: {site.reason}"
            if gated:
                refused = f"casting gives {path} other rounding points, which a norm with a gate does not take"
            raise FusedNormError(refused)
    holders = _holders(everywhere, surveyed)
    decided = dict.fromkeys([*holders, *blocks])
    for path in decided:
        _decide_block(surveyed.block(path), is_layer=path in holders and path.rpartition(".")[2].isdigit())
    expert_rows = [_survey_experts(path, module, surveyed) for path, module in experts.items()]
    linear_rows = []
    for path, linear in (linears | adapters).items():
        if id(linear) in inside:  # its LoRA layer reads its weight
            surveyed.plan(linear, stock_class(linear))
        else:
            linear_rows.append(_survey_linear(path, linear, surveyed))

    def rows() -> list[Site]:
        in_blocks = [row for path in decided for row in surveyed.block(path).sites]
        return [*surveyed.norm_sites.values(), *in_blocks, *expert_rows, *linear_rows]

    layers = _decide_recompute(surveyed, rows())
    # A forward that cannot be rewritten after all may have had all that is fused in a layer.
    while not all(_plan_block(block, surveyed) for block in surveyed.blocks.values()):
        layers = _decide_recompute(surveyed, rows())
    losses = survey_losses(surveyed, heads)
    about_blocks = [layer.layer for layer in layers] + [block.consumers_row for block in surveyed.blocks.values()]
    return [*rows(), *losses, *(row for row in about_blocks if row is not None)], [*surveyed.changes.values()]


def _survey_norm(path: str, norm: nn.Module, model: SurveyedModel) -> Site:
    """The row of a norm; its class is planned."""
    origin: Any = stock_class(norm)
    names = itertools.takewhile(lambda name: not name.isdigit(), reversed(path.split(".")))  # up to a layer's index
    kind: Kind = "qk" if any(map(QK_NAME.fullmatch, names)) else "norm"
    site = Site(path, kind, origin.__name__)
    override = forward_override_reason(norm)
    if isinstance(norm, FusedNorm) and has_derived_class(norm) and not are_plain_calls(inside=type(norm)):
        reason = (
            override or class_override_reason(origin) or "the forward of its class has changed since it was patched"
        )
        return site.skipped(reason, "overridden")
    try:
        recognised = _recognise(norm, origin)
    except UnrecognisedError as error:
        model.plan(norm, None if override else origin)
        replaced = class_override_reason(origin)
        return site.skipped(replaced, "overridden") if replaced else site.skipped(str(error))
    stock = recognised.spec.casting
    casting = model.options.casting_at(path) or stock
    spec = replace(recognised.spec, casting=casting)
    site = replace(site, spec=spec, replaced=None if casting == stock else stock)
    if override:  # it may call the forward that it found: the class stays
        return site.skipped(override, "overridden")
    if unwanted := why_left_out(kind, path, norm, model.options):
        model.plan(norm, origin)
        return site.skipped(unwanted, "option")
    if isinstance(norm, FusedNorm) and replace(norm.fused_norm_spec, eps=spec.eps) == spec:
        spec = norm.fused_norm_spec  # eps is read at each call
    fused = fused_class(
        FusedGatedNorm if isinstance(spec, GatedNormSpec) else FusedNorm,
        origin,
        fused_norm_spec=spec,
        fused_norm_replaced=site.replaced,
        fused_norm_eps_name=recognised.eps_name,
    )
    if override := fused_override_reason(fused):
        return site.skipped(override, "overridden")
    model.plan(norm, fused)
    return site


def _survey_experts(path: str, experts: nn.Module, model: SurveyedModel) -> Site:
    """The row of a module of experts; its class is planned."""
    origin = stock_class(experts)
    row = Site(path, "experts", origin.__name__)
    if override := forward_override_reason(experts) or class_override_reason(origin):
        return row.skipped(override, "overridden")
    if unwanted := why_left_out("experts", path, experts, model.options):
        model.plan(experts, origin)
        return row.skipped(unwanted, "option")
    if other := other_implementation(experts, origin):
        model.plan(experts, origin)
        return row.skipped(other, "overridden")
    try:
        gate = recognise_experts(experts, origin)
    except UnrecognisedError as error:
        model.plan(experts, origin)
        return row.skipped(str(error))
    fused = fused_class(FusedExperts, origin, fused_norm_gate=gate)
    if override := fused_override_reason(fused):
        return row.skipped(override, "overridden")
    model.plan(experts, fused)
    return replace(row, activation=str(gate))


def _survey_linear(path: str, linear: nn.Module, model: SurveyedModel) -> Site:
    """The row of a 4-bit linear or a LoRA layer, which asks at each call what kernels take; its class is planned."""
    origin, is_adapter = stock_class(linear), not is_linear_4bit(linear)
    kind: Kind = "adapter" if is_adapter else "linear"
    row = Site(path, kind, name_of(origin))
    if override := forward_override_reason(linear) or replaced_forward(origin) or replaced_linear():
        return row.skipped(override, "overridden")
    if unwanted := why_left_out(kind, path, linear, model.options):
        row = row.skipped(unwanted, "option")
    elif reason := why_unfused(linear) if is_adapter else why_linear_is_stock(linear):
        row = row.skipped(reason)
    new = origin
    if row.reason is None:
        base = FusedAdapter if is_adapter else FusedLinear4bit
        new = fused_class(base, origin, fused_norm_is_quantised=is_quantised(linear))
    model.plan(linear, new)
    return row


def _recognise(norm: nn.Module, origin: Any) -> Recognised:
    """The meaning of a norm as the stock model has it now."""
    if isinstance(norm, FusedNorm):
        stock: nn.Module = object.__new__(origin)
        attributes = dict(vars(norm))
        weight = attributes.pop("weight", norm._parameters.get("weight"))  # FSDP1 puts a view there as an attribute
        if isinstance(weight, Tensor):
            whole = weight if weight.numel() or hasattr(weight, "ds_shape") else torch.empty(_ANY_WIDTH, device="meta")
            attributes["_parameters"] = {**norm._parameters, "weight": whole}
        vars(stock).update(attributes)
        norm = stock
    return recognise(norm)


def _holders(modules: Mapping[str, nn.Module], surveyed: SurveyedModel) -> dict[str, None]:
    """The paths of modules that hold a norm, recognised or others' by now, directly or in up to two wrappers.

    ``modules``: those of the model by all of their paths. A norm with a gate does not count: no add is fused with it.
    """
    holders: dict[str, None] = {}
    for path, module in modules.items():
        site = surveyed.norm_sites.get(surveyed.paths[id(module)])
        if site is None or (site.spec is None and site.cause != "overridden") or isinstance(site.spec, GatedNormSpec):
            continue
        for _ in range(3 if site.kind == "norm" else 1):
            if not path:
                break
            path = path.rpartition(".")[0]
            holders[surveyed.paths[id(modules[path])]] = None
    return holders


def _decide_block(block: Block, *, is_layer: bool) -> None:
    """Find the sites of a module; those to be fused are among its rewrites, and those of blocks it hands norms to."""
    problem: SourceError | None = None
    try:
        block.sites += decide_matches(block)
    except SourceError as error:
        problem = error
    block.sites += _without_patterns(block, block.sites, is_layer=is_layer, error=problem)


def _plan_block(block: Block, model: SurveyedModel) -> bool:
    """Plan the class of a module whose rewrites and recomputing are decided.

    Returns:
        False if its forward cannot be rewritten. Its rows say why, and other modules may have to be planned again.

    Raises:
        FusedNormError: if its class is to change and other code has built on the fused one.
    """
    module, rewrites, recompute = block.module, tuple(block.rewrites), block.recompute
    new = None
    if block.override_reason is not None or block.is_sealed:
        if isinstance(module, FusedBlock) and module.fused_norm_recompute and not recompute:
            rewrites = module.fused_norm_rewrites
            new = fused_block_class(block.origin, rewrites) if rewrites else block.origin
    elif rewrites or recompute:
        try:
            new = fused_block_class(block.origin, rewrites, recompute)
        except SourceError as error:
            block.keep(str(error), "unrecognised")
            return False
        if override := fused_override_reason(new):
            if block.layer is None or not recompute:
                block.keep(override, "overridden")
                return False
            block.layer = block.layer.skipped(override, None)
            return _plan_block(block, model)
    elif isinstance(module, FusedBlock):  # another class is not from here
        new = block.origin
    model.plan(module, new)
    return True


def _without_patterns(block: Block, rows: Sequence[Site], *, is_layer: bool, error: SourceError | None) -> list[Site]:
    """A row for each kind of site that cannot be seen, if the forward was replaced or its source cannot be read.

    The sites are inferred from what the module holds, what was fused in it, and the names in its forward.

    ``error``: the one that its source gave, None if it can be read.
    """
    replaced = isinstance(error, WrappedError)  # which is another's doing
    reason = None if error is None else str(error)
    override = block.override_reason or class_override_reason(block.origin) or (reason if replaced else None)
    if override is None and reason is None:
        return []
    module = block.module
    rewrites = module.fused_norm_rewrites if override and isinstance(module, FusedBlock) else ()
    fused = {rewrite.pattern for rewrite in rewrites}
    heads = override and any(block.holds_norm(name) for name in module._modules if QK_NAME.fullmatch(name))
    kinds: dict[Kind, object] = {"residual": is_layer, "rope": heads or "heads" in fused}
    for match in MATCHES:
        if match.kind is not None:
            # The names in a forward that another has replaced tell nothing.
            told = (replaced or (match.is_named and not override)) and match.may_be_in(module)
            kinds[match.kind] = kinds.get(match.kind) or match.pattern in fused or told
    kinds_in_rows = {row.kind for row in rows}
    row = partial(Site, block.path, module=block.origin.__name__, reason=override or reason)
    cause: Cause = "overridden" if override else "unrecognised"
    return [
        row(kind=kind, cause=cause) for kind, is_present in kinds.items() if is_present and kind not in kinds_in_rows
    ]


def _may_have_sites(module: nn.Module) -> bool:
    """Return whether a module may have a site of its own, without a norm; most are told apart by the names they use."""
    return isinstance(module, FusedBlock) or any(match.may_be_in(module) for match in MATCHES)


def _decide_recompute(model: SurveyedModel, sites: Iterable[Site]) -> list[Block]:
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

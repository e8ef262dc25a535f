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

from ..kernels.sharded import is_sharded
from ..options import FuseOptions
from ..spec import FusedNormError, GatedNormSpec, Kind
from .adapters import ADAPTERS
from .adapters_on_experts import ADAPTERS_ON_EXPERTS
from .block import Block, Surveyed, SurveyedModel, why_left_out
from .class_swap import (
    ClassChange,
    has_derived_class,
    stock_class,
    why_class_overridden,
    why_fused_overridden,
    why_instance_overridden,
)
from .four_bit import LINEARS_4BIT
from .fused_block import FusedBlock
from .fused_classes import fused_block_class, fused_class
from .fused_experts import EXPERTS
from .fused_norm_module import FusedGatedNorm, FusedNorm
from .graph_capture import why_no_graphs
from .hooks import Fused, are_plain_calls, name_of
from .loss_survey import head_of, survey_loss
from .module_features import ModuleFeature, OverriddenError
from .norm_recognition import Recognised, looks_like_norm, recognise
from .patch_report import Cause, Site
from .patterns import MATCHES, decide_matches, fused_sites
from .patterns.heads import QK_NAME
from .probe import UnrecognisedError, no_code_changes
from .recompute import COMPILED
from .source import SourceError, WrappedError

logger = logging.getLogger("fused_norm")

MODULE_FEATURES: tuple[ModuleFeature, ...] = (EXPERTS, LINEARS_4BIT, ADAPTERS, ADAPTERS_ON_EXPERTS)
"""The features that fuse one module each, in the order of their rows."""

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
    surveyed = SurveyedModel.of(model, options)
    modules = surveyed.modules
    norms = {path: module for path, module in modules.items() if looks_like_norm(module)}
    found = [
        (feature, {path: module for path, module in modules.items() if feature.is_site(module)})
        for feature in MODULE_FEATURES
    ]
    alone = {path: module for _, sites in found for path, module in sites.items()}
    inside = {id(read) for feature, sites in found for module in sites.values() for read in feature.reads(module)}
    blocks = {
        path: module
        for path, module in modules.items()
        if path not in norms
        and path not in alone
        and not isinstance(module, torch.jit.ScriptModule)
        and (isinstance(module, FusedBlock) or any(match.may_be_in(module) for match in MATCHES))
    }
    heads = {path: head for path, module in modules.items() if (head := head_of(module, surveyed)) is not None}
    head_paths = {surveyed.paths[id(head)]: head for head in heads.values()}
    selectable = norms | blocks | alone | head_paths
    _check_patterns(surveyed, norms, selectable, next(iter(norms | blocks), None))

    for path, norm in norms.items():
        surveyed.norm_sites[path] = surveyed.planned(norm, _survey_norm(path, norm, surveyed))
    _check_castings(surveyed)
    holders = _holders(surveyed)
    decided = dict.fromkeys([*holders, *blocks])
    for path in decided:
        _decide_block(surveyed.block(path), is_layer=path in holders and path.rpartition(".")[2].isdigit())
    for block in surveyed.blocks.values():  # some have no site of their own, and read a norm that is passed to them
        _compile(block, surveyed)
    rows = [*surveyed.norm_sites.values(), *(row for path in decided for row in surveyed.block(path).sites)]
    for feature, sites in found:
        for path, module in sites.items():
            if id(module) not in inside:
                rows.append(surveyed.planned(module, _survey_module(path, module, feature, surveyed)))
    recomputed = [*_decide_recompute(surveyed, rows), *_decide_graphs(surveyed)]
    for path in heads:
        row = survey_loss(path, modules[path], surveyed)
        surveyed.loss_sites[row.path] = row
    rows += surveyed.loss_sites.values()
    surveyed.plan_the_others()
    consumers = [block.consumers_row for block in surveyed.blocks.values() if block.consumers_row is not None]
    return [*rows, *recomputed, *consumers], [*surveyed.changes.values()]


def _check_patterns(
    model: SurveyedModel, norms: Mapping[str, nn.Module], selectable: Mapping[str, nn.Module], example: str | None
) -> None:
    """Raise FusedNormError if a pattern of the options ``modules`` or ``norm_rounding`` selects nothing."""
    options, count, name = model.options, len(norms), type(model.modules[""]).__name__
    for pattern in options.patterns:
        named = replace(options, modules=pattern)
        if not any(named.selects(path, module) for path, module in selectable.items()):
            raise FusedNormError(
                f"modules={pattern!r} selects none of the {count} norms of {name}, and no attention, MLP, LoRA layer or"
                f" head; one of their paths is {example}"
            )
    for pattern in options.norm_rounding or ():
        if not any(replace(options, norm_rounding={pattern: "llama"}).norm_rounding_at(path) for path in norms):
            raise FusedNormError(
                f"norm_rounding={{{pattern!r}: ...}} selects none of the {count} norms of {name};"
                f" one of their paths is {next(iter(norms), None)}"
            )


def _check_castings(model: SurveyedModel) -> None:
    """Raise FusedNormError if the option ``norm_rounding`` names a norm that stays stock, or one with a gate."""
    for path, site in model.norm_sites.items():
        gated = isinstance(site.spec, GatedNormSpec)
        if model.options.norm_rounding_at(path) is not None and (gated or site.reason is not None):
            refused = f"norm_rounding gives {path} other rounding points, but it stays stock: {site.reason}"
            if gated:
                refused = f"norm_rounding gives {path} other rounding points, which a norm with a gate does not take"
            raise FusedNormError(refused)


def _survey_norm(path: str, norm: nn.Module, model: SurveyedModel) -> Surveyed:
    """The row of a norm, and its class."""
    origin: Any = stock_class(norm)
    names = itertools.takewhile(lambda name: not name.isdigit(), reversed(path.split(".")))  # up to a layer's index
    kind: Kind = "qk" if any(map(QK_NAME.fullmatch, names)) else "norm"
    site = Site(path, kind, origin.__name__)
    override = why_instance_overridden(norm)
    if isinstance(norm, FusedNorm) and has_derived_class(norm) and not are_plain_calls(inside=type(norm)):
        reason = override or why_class_overridden(origin) or "the forward of its class has changed since it was patched"
        return site.skipped(reason, "overridden"), None
    try:
        recognised = _recognise(norm, origin)
    except UnrecognisedError as error:
        replaced = why_class_overridden(origin)
        site = site.skipped(replaced, "overridden") if replaced else site.skipped(str(error))
        return site, None if override else origin
    stock = recognised.spec.casting
    casting = model.options.norm_rounding_at(path) or stock
    spec = replace(recognised.spec, casting=casting)
    site = replace(site, spec=spec, replaced=None if casting == stock else stock)
    if override:  # it may call the forward that it found: the class stays
        return site.skipped(override, "overridden"), None
    if unwanted := why_left_out(kind, path, norm, model.options):
        return site.skipped(unwanted, "option"), origin
    if isinstance(norm, FusedNorm) and replace(norm.fused_norm_spec, eps=spec.eps) == spec:
        spec = norm.fused_norm_spec  # eps is read at each call
    fused = fused_class(
        FusedGatedNorm if isinstance(spec, GatedNormSpec) else FusedNorm,
        origin,
        fused_norm_spec=spec,
        fused_norm_replaced=site.replaced,
        fused_norm_eps_name=recognised.eps_name,
    )
    if override := why_fused_overridden(fused):
        return site.skipped(override, "overridden"), None
    return site, fused


def _survey_module(path: str, module: nn.Module, feature: ModuleFeature, model: SurveyedModel) -> Surveyed:
    """The row of a module that a feature fuses, and its class."""
    origin = stock_class(module)
    row = Site(path, feature.kind, name_of(origin))
    if override := why_instance_overridden(module) or feature.why_overridden(origin):
        return row.skipped(override, "overridden"), None
    if unwanted := why_left_out(feature.kind, path, module, model.options):
        return row.skipped(unwanted, "option"), origin
    try:
        base, members, activation = feature.fused(module, origin)
    except UnrecognisedError as error:
        return row.skipped(str(error), "overridden" if isinstance(error, OverriddenError) else "unrecognised"), origin
    fused = fused_class(base, origin, **members)
    if override := why_fused_overridden(fused):
        return row.skipped(override, "overridden"), None
    return replace(row, activation=activation), fused


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


def _holders(surveyed: SurveyedModel) -> dict[str, None]:
    """The paths of modules that hold a norm, recognised or others' by now, directly or in up to two wrappers.

    A norm with a gate does not count: no add is fused with it.
    """
    modules = dict(surveyed.modules[""].named_modules(remove_duplicate=False))
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
        module = block.module
        if block.is_sealed and isinstance(module, FusedBlock) and are_plain_calls(inside=type(module)):
            block.sealed_sites = fused_sites(block.origin, module.fused_norm_rewrites)
        block.sites += decide_matches(block)
    except SourceError as error:
        problem = error
    block.sites += _without_patterns(block, block.sites, is_layer=is_layer, error=problem)


def _compile(block: Block, model: SurveyedModel) -> None:
    """Compile the forward of a module with its rewrites and plan its class; its rows say why it cannot be."""
    module: Any = block.module
    stays, new = block.why_overridden is not None or block.is_sealed, None
    if not stays and isinstance(module, FusedBlock):  # another fused class is not from here
        new = block.origin
    if not stays and block.rewrites:
        try:
            fused = fused_block_class(block.origin, tuple(block.rewrites))
        except SourceError as error:
            block.keep(str(error), "unrecognised")
        else:
            if override := why_fused_overridden(fused):
                block.keep(override, "overridden")
            else:
                new = fused
    if new is not None or isinstance(module, FusedBlock):
        model.plan(module, new)


def _without_patterns(block: Block, rows: Sequence[Site], *, is_layer: bool, error: SourceError | None) -> list[Site]:
    """A row for each kind of site that cannot be seen, if the forward was replaced or its source cannot be read.

    The sites are inferred from what the module holds, what was fused in it, and the names in its forward.

    ``error``: the one that its source gave, None if it can be read.
    """
    replaced = isinstance(error, WrappedError)  # which is another's doing
    reason = None if error is None else str(error)
    override = block.why_overridden or why_class_overridden(block.origin) or (reason if replaced else None)
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


def _decide_recompute(model: SurveyedModel, sites: Iterable[Site]) -> list[Site]:
    """The rows of the layers in which something is fused, none if the option is off; their classes are planned anew.

    ``sites``: the rows of all that is in layers, as they are reported.

    Raises:
        FusedNormError: if a layer is to recompute no more and other code has built on its fused class.
    """
    level = model.options.recompute
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
        layer.recompute_row = _survey_recompute(layer, model, is_compiled=layer.path in compiled)
    for block in model.blocks.values():
        module: Any = block.module
        stays = block.why_overridden is not None or block.is_sealed
        if stays and isinstance(module, FusedBlock) and module.fused_norm_recompute and not block.recomputes:
            rewrites = module.fused_norm_rewrites
            model.plan(module, fused_block_class(block.origin, rewrites) if rewrites else block.origin)
    return [layer.recompute_row for layer in layers if layer.recompute_row is not None]


def _survey_recompute(layer: Block, model: SurveyedModel, *, is_compiled: bool) -> Site:
    """The row on recomputing in a layer with something fused in it; its class is planned."""
    row = Site(layer.path, "recompute", layer.origin.__name__, reason=layer.why_overridden)
    if row.reason is not None:
        return row
    if layer.is_sealed:
        reason = "other code has built on its class since it was patched; remove_fused_norm before sharding"
        return row if layer.module.fused_norm_recompute else row.skipped(reason, None)
    if is_compiled:
        return row.skipped(COMPILED, None)
    if getattr(layer.module, "gradient_checkpointing", False):
        return row.skipped("gradient checkpointing is on in this layer, and keeps less", None)
    new = fused_block_class(layer.origin, tuple(layer.rewrites), model.options.recompute)
    if override := why_fused_overridden(new):
        return row.skipped(override, None)
    model.plan(layer.module, new)
    return row


def _decide_graphs(model: SurveyedModel) -> list[Site]:
    """The rows of the layers to be replayed as CUDA graphs, none if the option is off; their classes are planned."""
    if not model.options.cuda_graphs:
        return []
    whole = model.modules[""]
    no_graphs = why_no_graphs([parameter.device for parameter in whole.parameters()])
    compiled = compiled_modules(whole)
    rows = []
    for path in _replayable(model):
        layer = model.block(path)
        row = Site(path, "graphs", layer.origin.__name__, reason=layer.why_overridden or no_graphs)
        if layer.is_sealed or any(map(is_sharded, layer.module.parameters())):
            row = row.skipped("FSDP gives its parameters other memory in each step", None)
        elif any(_is_within(path, part) or _is_within(part, path) for part in compiled):
            row = row.skipped("it is compiled; torch.compile has graphs of its own, mode='reduce-overhead'", None)
        elif getattr(layer.module, "gradient_checkpointing", False):
            row = row.skipped("gradient checkpointing is on in this layer; recompute takes its place", None)
        if row.reason is None:
            level = model.options.recompute if layer.recomputes else False
            new = fused_block_class(layer.origin, tuple(layer.rewrites), level, cuda_graphs=True)
            row = row.skipped(override, None) if (override := why_fused_overridden(new)) else row
        if row.reason is None:
            model.plan(layer.module, new)
        rows.append(row)
    if reasons := {row.reason for row in rows if row.reason is not None}:
        logger.warning("cuda_graphs does nothing in some of %s layers: %s", len(rows), "; ".join(sorted(reasons)))
    return rows


def _replayable(model: SurveyedModel) -> Iterator[str]:
    """The paths of the modules to be replayed: the outermost ones of ``ModuleList``s that hold others."""
    for path, module in model.modules.items():
        outside, _, _ = path.rpartition(".")
        is_outermost = not any(isinstance(model.modules[part], nn.ModuleList) for part in _above(outside))
        if (
            outside
            and isinstance(model.modules[outside], nn.ModuleList)
            and is_outermost
            and path not in model.norm_sites
            and any(True for _ in module.children())
            and any(True for _ in module.parameters())
            and not isinstance(module, (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule))
            and not _is_fused_alone(model.changes.get(id(module), (None, type(module)))[1])
        ):
            yield path


def _is_fused_alone(cls: type[nn.Module]) -> bool:
    """Return whether modules of this class are fused by themselves, and have no forward that is rewritten."""
    return issubclass(cls, Fused) and not issubclass(cls, FusedBlock)


def _above(path: str) -> Iterator[str]:
    """The paths of the modules that hold the one at this path."""
    while path:
        path = path.rpartition(".")[0]
        yield path


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
                is_linear = path == site.path and site.kind in ("linear_4bit", "lora")
                is_layer = path not in model.norm_sites and not is_linear
                if is_layer and path not in seen:
                    seen.add(path)
                    yield path
                break

"""The survey of a model: a row for every site, and the changes of class that fuse those to be fused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..options import FuseOptions
from ..spec import FusedNormError, GatedNormSpec, Kind
from .adapters import is_lora_layer, is_quantised_lora_layer, name_of, why_unfused
from .block import SurveyedModel, why_left_out
from .block_survey import decide_block, may_rotate_or_gate, plan_block
from .class_swap import (
    ClassChange,
    class_override_reason,
    forward_override_reason,
    fused_override_reason,
    has_derived_class,
    stock_class,
)
from .four_bit import is_linear_4bit
from .fused_classes import fused_adapter_class, fused_experts_class, fused_linear_4bit_class, fused_norm_class
from .fused_experts import is_experts, other_implementation, recognise_experts
from .fused_linear_4bit import why_linear_is_stock
from .fused_norm_module import FusedNorm
from .hooks import are_plain_calls, replaced_forward, replaced_linear
from .loss_survey import language_models, survey_losses
from .norm_recognition import Recognised, looks_like_norm, recognise
from .patch_report import Site
from .patterns.heads import QK_NAME
from .probe import UnrecognisedError
from .recompute_survey import decide_recompute

_ANY_WIDTH = 64
"""Of a weight that another device has all of."""


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
        and may_rotate_or_gate(module)
    }
    adapters = {
        path: module for path, module in modules.items() if is_lora_layer(module) or is_quantised_lora_layer(module)
    }
    inside = {id(layer._modules.get("base_layer")) for layer in adapters.values()}
    linears = {path: module for path, module in modules.items() if is_linear_4bit(module)}
    heads = {paths[id(head)]: head for _, head in language_models(model) if id(head) in paths}
    count, name = len(norms), type(model).__name__
    for pattern in options.patterns:
        named = replace(options, modules=pattern)
        if not any(
            named.selects(path, module)
            for path, module in (norms | blocks | experts | linears | adapters | heads).items()
        ):
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
        decide_block(surveyed.block(path), is_layer=path in holders and path.rpartition(".")[2].isdigit())
    expert_rows = [_survey_experts(path, module, surveyed) for path, module in experts.items()]
    linear_rows = []
    for path, linear in linears.items():
        if id(linear) in inside:  # its LoRA layer reads its weight
            surveyed.plan(linear, stock_class(linear))
        else:
            row = _survey_linear(path, linear, surveyed, "linear", why_linear_is_stock, fused_linear_4bit_class)
            linear_rows.append(row)
    linear_rows += [
        _survey_linear(path, layer, surveyed, "adapter", why_unfused, fused_adapter_class)
        for path, layer in adapters.items()
    ]

    def rows() -> list[Site]:
        in_blocks = [row for path in decided for row in surveyed.block(path).sites]
        return [*surveyed.norm_sites.values(), *in_blocks, *expert_rows, *linear_rows]

    layers = decide_recompute(surveyed, rows())
    # A forward that cannot be rewritten after all may have had all that is fused in a layer.
    while not all(plan_block(block, surveyed) for block in surveyed.blocks.values()):
        layers = decide_recompute(surveyed, rows())
    losses = survey_losses(surveyed)
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
    fused = fused_norm_class(origin, spec, recognised.eps_name, site.replaced)
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
    fused = fused_experts_class(origin, gate)
    if override := fused_override_reason(fused):
        return row.skipped(override, "overridden")
    model.plan(experts, fused)
    return replace(row, activation=str(gate))


def _survey_linear(
    path: str,
    linear: nn.Module,
    model: SurveyedModel,
    kind: Kind,
    why_stock: Callable[[Any], str | None],
    fused_class: Callable[[Any], type[nn.Module]],
) -> Site:
    """The row of a 4-bit linear or a LoRA layer, which asks at each call what kernels take; its class is planned."""
    origin = stock_class(linear)
    row = Site(path, kind, name_of(origin))
    if override := forward_override_reason(linear) or replaced_forward(origin) or replaced_linear():
        return row.skipped(override, "overridden")
    if unwanted := why_left_out(kind, path, linear, model.options):
        row = row.skipped(unwanted, "option")
    elif reason := why_stock(linear):
        row = row.skipped(reason)
    model.plan(linear, fused_class(origin) if row.reason is None else origin)
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

"""``apply_fused_norm`` and ``remove_fused_norm``: survey, check, then change, so that a failure changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from ..model_configs import FAMILIES, Family
from ..options import FuseOptions, ModuleFilter, RecomputeLevel
from ..spec import Casting, FusedNormError, Kind
from .class_swap import ClassChange, Fused, change_class, class_forward_replaced, origin_of, stock_class
from .loss_survey import survey_losses
from .patch_report import PatchReport, Site
from .reached_code import no_code_changes
from .recompute_survey import survey_layers
from .survey import survey

logger = logging.getLogger("fused_norm")

_LISTED = 5


def apply_fused_norm(
    model: nn.Module,
    *,
    norms: bool | None = None,
    qk: bool | None = None,
    rope: bool | None = None,
    residual: bool | None = None,
    sandwich: bool | None = None,
    mlp: bool | None = None,
    adapter: bool | None = None,
    loss: bool | None = None,
    modules: ModuleFilter | None = None,
    casting: Mapping[str, Casting] | None = None,
    readers: bool = True,
    recompute: RecomputeLevel = False,
    strict: bool = True,
) -> PatchReport:
    """Make the RMSNorms, residual adds, rotary embeddings, MLP gates and LoRA layers of ``model`` run fused, in place.

    They are recognised by what they compute; what is not recognised, or belongs to other code by now, keeps its stock
    code and is reported with the reason. Parameters, state-dict keys, hooks and class names stay as they are.

    Applied again it makes of the model what it would make of the stock one: the options are those of the last call, the
    report is on the model as it is now, and where neither has changed nothing does. What other code has replaced
    between two calls, a function or a flag that a site reaches, is seen by the second one.

    Args:
        model: a transformers model, or any module that holds one; on any device, meta included.
        norms: fuse the RMSNorms that are not q or k norms; None is on.
        qk: fuse the norms of queries and keys; None is on.
        rope: fuse the rotary embedding, with the q and k norms where they come before it; None follows ``qk``.
        residual: fuse a residual add with the norm after it in the layer; None follows ``norms``.
        sandwich: fuse the norm of a branch with the add of that branch; None follows ``residual``.
        mlp: fuse the activation of a gated MLP with the product after it; None is on.
        adapter: fuse what PEFT's LoRA layers add to their linear, the adapter's products, scale and sum; None is on.
        loss: fuse the vocabulary head of a language model with its loss. Logits are then not held: ``outputs.logits``
            computes them when it is read, and raises if weights have been written to since. None is on.
        modules: which sites may be fused: patterns for their paths, or a function; see ``FuseOptions``.
        casting: ``{"*.q_norm": "gemma"}``: norms at paths of that pattern round as that casting does, not as their own
            code; under ``disabled()`` they round as their own code does. What an inference engine computes is a reason,
            see ``FuseOptions``; None is what stock code computes, everywhere.
        readers: give each linear that reads a fused norm an output of its own, all of them one tensor in memory: the
            norm's backward adds up their gradients, as autograd would, and under autocast the norm is written in the
            dtype that the linears cast it to. Numbers stay the same to the bit, but for the order in which a GPU adds
            up some rows, and for gradients where a loss reads hidden states too.
        recompute: norm outputs, rotated q and k and products of gates, which linears and attention keep for their
            backward, are recomputed there from what is kept anyway; with ``"mlp"`` and ``"attention"`` outputs of
            linears too, see ``FuseOptions``. Gradients stay the same to the bit, unless such a
            tensor is written into in a way that autograd does not count, as ``.data`` and NumPy do. It saves nothing
            in a layer under gradient checkpointing, offloading or torch.compile, which decide by themselves what is
            kept.
        strict: raise when nothing is fused, or when a known family lacks a site it should have.

    Returns:
        A row for every site, fused or kept; under ``recompute`` a row for every layer too, and under ``readers`` one
        for every block that reads a fused norm.

    Raises:
        FusedNormError: where ``strict`` and nothing was fused, or a known family lacks a site it should have; where
            ``modules`` has a pattern that selects nothing; where ``casting`` has one that selects no norm, or a norm
            that stays stock; where a fused site is to be stock again, and other code has built on its class, as FSDP
            does when it shards. The model is as it was.
        TypeError, ValueError: for a model that is no module, and for options as in ``FuseOptions``.
    """
    options = FuseOptions(
        norms=norms,
        qk=qk,
        rope=rope,
        residual=residual,
        sandwich=sandwich,
        mlp=mlp,
        adapter=adapter,
        loss=loss,
        modules=modules,
        casting=casting,
        readers=readers,
        recompute=recompute,
        strict=strict,
    )
    _check_is_module(model)
    with no_code_changes():
        sites, changes, reading = survey(model, options)
        layers, changes = survey_layers(model, sites, changes, recompute=recompute)
        losses, changes = survey_losses(model, changes, options)
    expected = list(_expected_sites(model))
    others = list(_sites_of_others(model, sites, expected))
    places = {(site.kind, site.path) for site in others}
    sites = [site for site in sites if (site.kind, site.path) not in places] + [*losses, *others]
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    report = PatchReport(type(model).__name__, model_type, (*sites, *layers, *reading), recompute)
    if options.strict:
        _check(model, report, expected)
    _change(changes)
    logger.info("%s", report.summary())
    return report


def remove_fused_norm(model: nn.Module) -> int:
    """Give every module of ``model`` that ``apply_fused_norm`` changed its own class back.

    Returns:
        The number of modules restored: 0 for a model that was never patched.

    Raises:
        FusedNormError: where other code has built on a fused class (FSDP does, when it shards); nothing was restored.
        TypeError: for a model that is no module.
    """
    _check_is_module(model)
    fused = [module for module in model.modules() if isinstance(module, Fused)]
    _change([ClassChange(module, origin_of(module)) for module in fused])
    return len(fused)


def _check_is_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")


def _check(model: nn.Module, report: PatchReport, expected: Sequence[_Expected]) -> None:
    """Raise FusedNormError where nothing is fused, or a known family lacks a site."""
    if not report.fused:
        raise FusedNormError(f"nothing to fuse in {type(model).__name__}; pass strict=False to go on\n{report}")
    missing = [
        f"{place} ({kind}): {problem}"
        for place, path, kind, family, _ in expected
        if (problem := _problem(path, kind, family, report)) is not None
    ]
    if missing:
        more = f"\n  and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise FusedNormError(
            f"{type(model).__name__} lacks sites that its family is known to have; "
            "pass strict=False to fuse the others\n  " + "\n  ".join(missing[:_LISTED]) + more
        )


def _sites_of_others(model: nn.Module, sites: Sequence[Site], expected: Sequence[_Expected]) -> Iterator[Site]:
    """A row for every attention and MLP of a known family whose code others have replaced, so that nothing is fused."""
    known = [site for site in sites if not site.in_helper]
    found = {(site.kind, path) for site in known for path in accumulate(site.path.split("."), "{}.{}".format)}
    for _, path, kind, _, layers in expected:
        if kind not in ("rope", "mlp") or path is None or (kind, path) in found:
            continue
        found.add((kind, path))
        origin = stock_class(model.get_submodule(path))
        reason = class_forward_replaced(origin)
        if reason is None and origin.__module__ != stock_class(layers[0]).__module__:
            reason = f"its class was replaced, by {origin.__module__}.{origin.__qualname__}"
        if reason is not None:
            yield Site(path, kind, origin.__name__, reason=reason, cause="overridden")


_Expected = tuple[str, str | None, Kind, Family, nn.ModuleList]


def _expected_sites(model: nn.Module) -> Iterator[_Expected]:
    """Every site that the decoders of known families in ``model`` should have: its place, path, kind, family, layers.

    A module that is shared is reported at the first of its places, which is the path; it is None where no module is.
    """
    modules = dict(model.named_modules())
    paths = {id(module): path for path, module in modules.items()}
    for prefix, decoder in modules.items():
        family = FAMILIES.get(getattr(getattr(decoder, "config", None), "model_type", ""))
        layers = None if family is None else getattr(decoder, family.layers, None)
        if family is None or not isinstance(layers, nn.ModuleList):
            continue
        numbered = [f"{family.layers}.{index}" for index in range(len(layers))]
        sites = [(f"{layer}.{name}", kind) for layer in numbered for name, kind in family.layer_sites]
        for name, kind in (*sites, (family.final_norm, "norm")):
            try:
                path = paths[id(decoder.get_submodule(name))]
            except AttributeError:
                path = None
            yield f"{prefix}.{name}" if prefix else name, path, kind, family, layers


def _problem(path: str | None, kind: Kind, family: Family, report: PatchReport) -> str | None:
    """The problem with a site that a family has at this path, which is absent or computes something else; or None."""
    if path is None:
        return "not found"
    rows = {site.path: site for site in (*report.fused, *report.kept) if site.kind == kind}
    inside_wrapper = (row for row in rows.values() if row.path.startswith(f"{path}."))
    site = rows.get(path) or next(inside_wrapper, None)
    if site is None and kind in ("residual", "sandwich"):  # kept for its layer's sake, it has the layer's row
        site = next((row for row in report.kept if row.path == path.rpartition(".")[0]), None)
    if site is None:
        return "not found"
    if site.cause == "unrecognised":
        return site.reason
    spec = family.spec
    if site.spec and (site.replaced or site.spec.casting, site.spec.zero_centered) != (
        spec.casting,
        spec.zero_centered,
    ):
        return f"computes {site.spec}, not what {family.model_type} does"
    return None


def _change(changes: list[ClassChange]) -> None:
    """Make all changes, or none."""
    undone: list[Callable[[], None]] = []
    try:
        for change in changes:
            undone.append(change_class(change.module, change.new))
    except Exception:
        for undo in reversed(undone):
            undo()
        raise

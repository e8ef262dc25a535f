"""``apply_fused_norm`` and ``remove_fused_norm``: survey, check, then change, so that a failure changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import nn

from ..model_configs import FAMILIES, Family
from ..options import FuseOptions, ModuleFilter, RecomputeLevel
from ..spec import Casting, FusedNormError, Kind
from .class_swap import ClassChange, Fused, change_class, class_override_reason, original_class, stock_class
from .patch_report import PatchReport, RowKind, Site
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
    conv: bool | None = None,
    experts: bool | None = None,
    linear: bool | None = None,
    adapter: bool | None = None,
    loss: bool | None = None,
    modules: ModuleFilter | None = None,
    casting: Mapping[str, Casting] | None = None,
    consumers: bool = True,
    recompute: RecomputeLevel = False,
    strict: bool = True,
    readers: bool | None = None,
) -> PatchReport:
    """Make norms, residual adds, rotary embeddings, gates, LoRA layers, the loss and more of ``model`` fused.

    They are recognised by what they compute; what is not recognised, or belongs to other code by now, keeps its stock
    code and is reported with the reason. The model is changed in place: parameters, state-dict keys, hooks and class
    names stay as they are.

    Calling it again gives the same result as calling it on the unpatched model, and sees what other code has replaced
    meanwhile, a function or a flag that a site reaches: the options are those of the last call, the report is on the
    model as it is now. If neither has changed it is a no-op.

    ``model`` is a transformers model, or any module that holds one, on any device, meta included. All other arguments
    are the fields of ``FuseOptions``, which describes each; ``readers`` is the old name of ``consumers``.

    Returns:
        A row for every site, fused or kept; under ``recompute`` a row for every layer too, and under ``consumers`` one
        for every block that reads a fused norm.

    Raises:
        FusedNormError: if ``strict`` and nothing was fused, or a known family lacks a site it should have; if
            ``modules`` has a pattern that selects nothing; if ``casting`` has one that selects no norm, or a norm that
            stays stock; if a fused site is to be stock again, and other code has built on its class, as FSDP does when
            it shards. The model is as it was.
        TypeError, ValueError: for a model that is no module, and for options as in ``FuseOptions``.
    """
    kinds = norms, qk, rope, residual, sandwich, mlp, conv, experts, linear, adapter, loss  # in the order of the fields
    options = FuseOptions(*kinds, modules, casting, consumers, recompute, strict, readers)
    _check_is_module(model)
    rows, changes = survey(model, options)
    expected = list(_expected_sites(model))
    others = list(_sites_of_others(model, rows, expected))
    places = {(site.kind, site.path) for site in others}
    rows = [row for row in rows if (row.kind, row.path) not in places]
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    report = PatchReport(type(model).__name__, model_type, (*rows, *others), recompute)
    if options.strict:
        _check(model, report, expected)
    _change(changes)
    logger.info("%s", report.summary())
    return report


def remove_fused_norm(model: nn.Module) -> int:
    """Give every module of ``model`` that ``apply_fused_norm`` changed its own class back.

    A module that was taken out of the model before keeps its fused class; a head computes what it does in stock.

    Returns:
        The number of modules restored: 0 for a model that was never patched.

    Raises:
        FusedNormError: if other code has built on a fused class (FSDP does, when it shards); nothing was restored.
        TypeError: for a model that is no module.
    """
    _check_is_module(model)
    fused = [module for module in model.modules() if isinstance(module, Fused)]
    _change([(module, original_class(module)) for module in fused])
    return len(fused)


def _check_is_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")


def _check(model: nn.Module, report: PatchReport, expected: Sequence[_Expected]) -> None:
    """Raise FusedNormError if nothing is fused, or a known family lacks a site."""
    if not report.fused:
        raise FusedNormError(f"nothing to fuse in {type(model).__name__}; pass strict=False to go on\n{report}")
    rows = {(site.kind, site.path): site for site in (*report.fused, *report.kept)}
    missing = [
        f"{place} ({kind}): {problem}"
        for place, path, kind, family, _ in expected
        if (problem := _problem(path, kind, family, rows)) is not None
    ]
    if missing:
        more = f"\n  and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise FusedNormError(
            f"{type(model).__name__} lacks sites that its family is known to have; "
            "pass strict=False to fuse the others\n  " + "\n  ".join(missing[:_LISTED]) + more
        )


def _sites_of_others(model: nn.Module, sites: Sequence[Site], expected: Sequence[_Expected]) -> Iterator[Site]:
    """A row for every attention and MLP of a known family whose code others have replaced, so that nothing is fused."""
    seen = {(site.kind, path) for site in sites for path in accumulate(site.path.split("."), "{}.{}".format)}
    for _, path, kind, _, layers in expected:
        if kind not in ("rope", "mlp") or path is None or (kind, path) in seen:
            continue
        seen.add((kind, path))
        origin = stock_class(model.get_submodule(path))
        reason = class_override_reason(origin)
        if reason is None and origin.__module__ != stock_class(layers[0]).__module__:
            reason = f"its class was replaced, by {origin.__module__}.{origin.__qualname__}"
        if reason is not None:
            yield Site(path, kind, origin.__name__, reason=reason, cause="overridden")


_Expected = tuple[str, str | None, Kind, Family, nn.ModuleList]


def _expected_sites(model: nn.Module) -> Iterator[_Expected]:
    """Every site that the decoders of known families in ``model`` should have: its place, path, kind, family, layers.

    A module that is shared is reported at the first of its places, which is the path; it is None if no module is.
    """
    modules = dict(model.named_modules())
    paths = {id(module): path for path, module in modules.items()}
    for prefix, decoder in modules.items():
        family = FAMILIES.get(getattr(getattr(decoder, "config", None), "model_type", ""))
        layers = None if family is None else getattr(decoder, family.layers, None)
        if family is None or not isinstance(layers, nn.ModuleList) or not family.describes(decoder.config):
            continue
        sites: list[tuple[str, Kind, Family]] = []
        for index in range(len(layers)):
            layer = family.layer(index, decoder.config)
            for name, kind in layer.layer_sites:
                place = f"{family.layers}.{index}.{name}".removesuffix(".")
                sites.append((place, kind, replace(layer, spec=layer.spec_of(name))))
        sites += [(name, "norm", family) for name in (*family.decoder_norms, family.final_norm)]
        for name, kind, layer in sites:
            try:
                path = paths[id(decoder.get_submodule(name))]
            except AttributeError:
                path = None
            yield f"{prefix}.{name}" if prefix else name, path, kind, layer, layers


def _problem(path: str | None, kind: Kind, family: Family, rows: Mapping[tuple[RowKind, str], Site]) -> str | None:
    """The problem with a site that a family has at this path, which is absent or computes something else; or None."""
    if path is None:
        return "not found"
    kinds: tuple[Kind, ...] = (kind, "experts") if kind == "mlp" else (kind,)
    site = next((rows[other, path] for other in kinds if (other, path) in rows), None)
    if site is None:
        inside_wrapper = (row for row in rows.values() if row.kind in kinds and row.path.startswith(f"{path}."))
        site = next(inside_wrapper, None)
    if site is None and kind in ("residual", "sandwich"):  # kept for its layer's sake, it has the layer's row
        kept = (row for row in rows.values() if row.reason is not None)
        site = next((row for row in kept if row.path == path.rpartition(".")[0]), None)
    if site is None:
        return "not found"
    if site.cause == "unrecognised":
        return site.reason
    spec = family.spec
    if site.spec and (
        type(site.spec),
        site.replaced or site.spec.casting,
        site.spec.zero_centered,
        site.spec.weighted,
    ) != (type(spec), spec.casting, spec.zero_centered, spec.weighted):
        return f"computes {site.spec}, not what {family.model_type} does"
    return None


def _change(changes: list[ClassChange]) -> None:
    """Make all changes, or none."""
    undone: list[Callable[[], None]] = []
    try:
        for module, new in changes:
            undone.append(change_class(module, new))
    except Exception:
        for undo in reversed(undone):
            undo()
        raise

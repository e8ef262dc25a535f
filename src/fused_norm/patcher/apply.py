"""``apply_fused_norm`` and ``remove_fused_norm``: survey, check, then change, so that a failure changes nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ..spec import FusedNormError, Kind
from .adapters import Adapter, stacks
from .classes import built_upon, change_class, foreign_forward, fused_block_class, fused_norm_class, origin_of
from .options import FuseOptions, ModuleFilter
from .probe import UnrecognisedError, looks_like_norm, recognise
from .report import PatchReport, Site
from .rewrite import SourceError, norms_after_adds
from .runtime import FusedBlock, FusedNorm

logger = logging.getLogger("fused_norm")

_QK_NAME = re.compile(r"(q|k|qk|query|key)_?(layer_?)?norm")
_LISTED = 5

_Changes = list[tuple[nn.Module, type[nn.Module]]]


def apply_fused_norm(
    model: nn.Module,
    *,
    norms: bool | None = None,
    qk: bool | None = None,
    residual: bool | None = None,
    modules: ModuleFilter | None = None,
    strict: bool = True,
) -> PatchReport:
    """Make the RMSNorms, q/k norms and residual-add+norm blocks of ``model`` run as fused kernels, in place.

    Norms are recognised by what they compute; what is not recognised, or belongs to other code by now, keeps its stock
    code and is reported with the reason. Parameters, state-dict keys, hooks and class names stay as they are. Applied
    again it changes nothing and reports the same.

    Args:
        model: a transformers model, or any module that holds one; on any device, meta included.
        norms: fuse the RMSNorms that are not q or k norms; None is on.
        qk: fuse the norms of queries and keys; None is on.
        residual: fuse a residual add with the norm after it; None follows ``norms``.
        modules: which sites may be fused: patterns for their paths, or a function; see ``FuseOptions``.
        strict: raise when nothing is fused, or when a known family lacks a site it should have.

    Returns:
        A row for every site, fused or kept.

    Raises:
        FusedNormError: where ``strict`` and nothing was fused, or a known family lacks a site it should have; where
            ``modules`` has a pattern that selects nothing. The model is as it was.
        TypeError, ValueError: for a model that is no module, and for options as in ``FuseOptions``.
    """
    options = FuseOptions(norms=norms, qk=qk, residual=residual, modules=modules, strict=strict)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    sites, changes = _survey(model, options)
    report = PatchReport(
        model=type(model).__name__,
        model_type=getattr(getattr(model, "config", None), "model_type", None),
        fused=tuple(site for site in sites if site.reason is None),
        kept=tuple(site for site in sites if site.reason is not None),
    )
    if options.strict:
        _check(model, report)
    _change(changes)
    logger.info("%s", report.summary())
    return report


def remove_fused_norm(model: nn.Module) -> int:
    """Give every module of ``model`` that ``apply_fused_norm`` changed its own class back.

    Returns:
        How many modules were restored: 0 for a model that was never patched.

    Raises:
        FusedNormError: where other code has built on a fused class (FSDP does, when it shards); nothing was restored.
    """
    fused = [module for module in model.modules() if isinstance(module, (FusedNorm, FusedBlock))]
    _change([(module, origin_of(module)) for module in fused])
    return len(fused)


def _survey(model: nn.Module, options: FuseOptions) -> tuple[list[Site], _Changes]:
    """A row for every site, and the changes of class that fuse those to be fused; the model is not touched."""
    modules = dict(model.named_modules())
    norms = {path: module for path, module in modules.items() if looks_like_norm(module)}
    for pattern in options.patterns:
        if not any(replace(options, modules=pattern).selects(path, module) for path, module in norms.items()):
            raise FusedNormError(
                f"modules={pattern!r} selects none of the {len(norms)} norms of {type(model).__name__}"
            )
    changes: _Changes = []
    norm_sites = {}
    for path, module in norms.items():
        norm_sites[path], change = _survey_norm(path, module, options)
        changes += change
    sites = list(norm_sites.values())
    for path in _holders(norm_sites):
        rows, change = _survey_block(path, modules[path], norm_sites, options)
        sites += rows
        changes += change
    return sites, changes


def _survey_norm(path: str, norm: nn.Module, options: FuseOptions) -> tuple[Site, _Changes]:
    origin: Any = type(norm)
    site = Site(path, _kind_of(path), origin.__name__)
    if isinstance(norm, FusedNorm):
        return replace(site, spec=norm.fused_norm_spec), []
    try:
        known = recognise(norm)
    except UnrecognisedError as error:
        return replace(site, reason=str(error), cause="formula"), []
    site = replace(site, spec=known.spec)
    if owner := foreign_forward(norm):
        return replace(site, reason=owner, cause="owner"), []
    if choice := _deselected(site.kind, path, norm, options):
        return replace(site, reason=choice, cause="option"), []
    return site, [(norm, fused_norm_class(origin, known.spec, known.eps_name))]


def _survey_block(
    path: str, block: nn.Module, norm_sites: dict[str, Site], options: FuseOptions
) -> tuple[list[Site], _Changes]:
    """Rows for the adds in front of norms in one module's forward; none where it is no layer that adds."""
    is_layer = path.rpartition(".")[2].isdigit()
    already = block.fused_norm_names if isinstance(block, FusedBlock) else ()
    origin: Any = block.fused_norm_origin if isinstance(block, FusedBlock) else type(block)
    site = Site(path, "residual", type(block).__name__)
    try:
        names = norms_after_adds(origin)
    except SourceError as error:
        return [replace(site, reason=str(error), cause="formula")] if is_layer else [], []
    if not names and is_layer:
        return [replace(site, reason="no norm in its forward takes the sum of an add", cause="formula")], []
    rows = []
    for name in names:
        row = replace(site, path=f"{path}.{name}" if path else name)
        norm = getattr(block, name, None)
        if isinstance(norm, nn.Module) and _is_norm(norm):
            rows.append(row if name in already else _survey_add(row, block, norm, norm_sites, options))
    rows = [replace(row, spec=norm_sites[row.path].spec) if row.path in norm_sites else row for row in rows]
    fused = tuple(row.path.rpartition(".")[2] for row in rows if row.reason is None)
    if fused == already:
        return rows, []
    try:
        return rows, [(block, fused_block_class(origin, fused))]
    except SourceError as error:
        return [replace(row, reason=str(error), cause="formula") for row in rows], []


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, or a wrapper (PEFT's) with nothing but norms inside."""
    return all(looks_like_norm(leaf) for leaf in module.modules() if not leaf._modules)


def _survey_add(
    row: Site, block: nn.Module, norm: nn.Module, norm_sites: dict[str, Site], options: FuseOptions
) -> Site:
    site = norm_sites.get(row.path)
    if site is None:
        reason = f"its norm is wrapped in a {type(norm).__name__}, which is called as it is"
        return replace(row, reason=reason, cause="owner")
    if site.reason is not None:
        return replace(row, reason=f"its norm is kept: {site.reason}", cause=site.cause)
    if isinstance(block, FusedBlock) and built_upon(block):
        reason = "other code has built on its layer since that was patched; remove_fused_norm before sharding"
        return replace(row, reason=reason, cause="owner")
    if owner := foreign_forward(block):
        return replace(row, reason=owner, cause="owner")
    if choice := _deselected("residual", row.path, norm, options):
        return replace(row, reason=choice, cause="option")
    return row


def _deselected(kind: Kind, path: str, norm: nn.Module, options: FuseOptions) -> str | None:
    """Why the options leave a site out, if they do."""
    if not options.wants(kind):
        return f"switched off: {'norms' if kind == 'norm' else kind}=False"
    return None if options.selects(path, norm) else "not selected by modules"


def _kind_of(path: str) -> Kind:
    """q and k norms go by their name, which may have a wrapper's below it; the layer's own index ends the search."""
    for name in reversed(path.split(".")):
        if name.isdigit():
            break
        if _QK_NAME.fullmatch(name):
            return "qk"
    return "norm"


def _holders(norm_sites: dict[str, Site]) -> list[str]:
    """The paths of modules that hold a recognised norm, directly or in a wrapper of up to two levels."""
    paths: dict[str, None] = {}
    for site in norm_sites.values():
        if site.kind == "norm" and site.spec is not None:
            path = site.path
            for _ in range(3):
                if not path:
                    break
                path = path.rpartition(".")[0]
                paths[path] = None
    return list(paths)


def _check(model: nn.Module, report: PatchReport) -> None:
    """Raises FusedNormError where nothing is fused, or a family's adapter misses something."""
    if not report.fused:
        raise FusedNormError(f"nothing to fuse in {type(model).__name__}; pass strict=False to go on\n{report}")
    missing = [line for path, stack, adapter in stacks(model) for line in _missing(path, stack, adapter, report)]
    if missing:
        more = f"\n  and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise FusedNormError(
            f"{type(model).__name__} lacks sites that its family is known to have; "
            "pass strict=False to fuse the others\n  " + "\n  ".join(missing[:_LISTED]) + more
        )


def _missing(path: str, stack: nn.Module, adapter: Adapter, report: PatchReport) -> Iterator[str]:
    rows = {(site.path, site.kind): site for site in (*report.fused, *report.kept)}
    for expected, kind in adapter.sites(path, stack):
        inside_wrapper = (row for row in rows.values() if row.kind == kind and row.path.startswith(f"{expected}."))
        site = rows.get((expected, kind)) or next(inside_wrapper, None)
        if site is None:
            layer = rows.get((expected.rpartition(".")[0], kind))
            yield f"{expected} ({kind}): {layer.reason if layer else 'not found'}"
        elif site.cause == "formula":
            yield f"{expected} ({kind}): {site.reason}"
        elif site.spec and (site.spec.casting, site.spec.zero_centered) != (adapter.casting, adapter.zero_centered):
            yield f"{expected} ({kind}): computes {site.spec}, not what the {adapter.family} family does"


def _change(changes: _Changes) -> None:
    """Changes all classes, or none."""
    undone: list[Callable[[], None]] = []
    try:
        for module, new in changes:
            undone.append(change_class(module, new))
    except Exception:
        for undo in reversed(undone):
            undo()
        raise

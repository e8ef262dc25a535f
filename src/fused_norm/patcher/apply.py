"""``apply_fused_norm`` and ``remove_fused_norm``: survey, check, then change, so that a failure changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from torch import nn

from ..spec import FusedNormError
from .adapters import Adapter, stacks
from .blocks import FusedBlock
from .classes import change_class, origin_of
from .options import FuseOptions, ModuleFilter
from .report import PatchReport
from .runtime import FusedNorm
from .survey import Change, survey

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
    across: bool | None = None,
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
        rope: make the q and k norms together with the rotary embedding after them; None follows ``qk``.
        residual: fuse a residual add with the norm after it in the layer; None follows ``norms``.
        sandwich: fuse the norm of a branch with the add of that branch; None follows ``residual``.
        across: fuse the add that ends a layer with the norm that begins the next; None follows ``residual``.
        modules: which sites may be fused: patterns for their paths, or a function; see ``FuseOptions``.
        strict: raise when nothing is fused, or when a known family lacks a site it should have.

    Returns:
        A row for every site, fused or kept.

    Raises:
        FusedNormError: where ``strict`` and nothing was fused, or a known family lacks a site it should have; where
            ``modules`` has a pattern that selects nothing. The model is as it was.
        TypeError, ValueError: for a model that is no module, and for options as in ``FuseOptions``.
    """
    options = FuseOptions(
        norms=norms,
        qk=qk,
        rope=rope,
        residual=residual,
        sandwich=sandwich,
        across=across,
        modules=modules,
        strict=strict,
    )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    sites, changes = survey(model, options)
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
    _change([Change(module, origin_of(module)) for module in fused])
    return len(fused)


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


def _change(changes: list[Change]) -> None:
    """Changes all classes, or none."""
    undone: list[Callable[[], None]] = []
    try:
        for change in changes:
            undone.append(change_class(change.module, change.new, change.successor))
    except Exception:
        for undo in reversed(undone):
            undo()
        raise

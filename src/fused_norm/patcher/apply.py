"""``apply_fused_norm`` and ``remove_fused_norm``: survey, check, then change, so that a failure changes nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from ..model_configs import FAMILIES
from ..old_names import takes_old_names
from ..options import FuseOptions, ModuleFilter, RecomputeLevel
from ..spec import Casting, FusedNormError, Kind
from .class_swap import ClassChange, Fused, change_class, original_class, stock_class, why_class_overridden
from .cuda_graphs import attach_graphs
from .fused_block import FusedBlock
from .patch_report import PatchReport, Site
from .survey import survey

logger = logging.getLogger("fused_norm")

_LISTED = 5
_ATTENTION = re.compile("attn|attention")
_MLP = re.compile("mlp|expert|feed_forward")
"""The last names of modules of known families that rotate queries and keys, or hold a gate."""


@takes_old_names
def apply_fused_norm(
    model: nn.Module,
    *,
    norms: bool | None = None,
    qk: bool | None = None,
    rope: bool | None = None,
    residual: bool | None = None,
    post_norm: bool | None = None,
    mlp: bool | None = None,
    conv: bool | None = None,
    experts: bool | None = None,
    linear_4bit: bool | None = None,
    lora: bool | None = None,
    loss: bool | None = None,
    modules: ModuleFilter | None = None,
    norm_rounding: Mapping[str, Casting] | None = None,
    shared_inputs: bool = True,
    recompute: RecomputeLevel = False,
    strict: bool = True,
    cuda_graphs: bool = False,
) -> PatchReport:
    """Make norms, residual adds, rotary embeddings, gates, LoRA layers, the loss and more of ``model`` fused.

    They are recognised by what they compute; what is not recognised, or belongs to other code by now, keeps its stock
    code and is reported with the reason. The model is changed in place: parameters, state-dict keys, hooks and class
    names stay as they are.

    Calling it again gives the same result as calling it on the unpatched model, and sees what other code has replaced
    meanwhile, a function or a flag that a site reaches: the options are those of the last call, the report is on the
    model as it is now. If neither has changed it is a no-op.

    ``model`` is a transformers model, or any module that holds one, on any device, meta included. All other arguments
    are the fields of ``FuseOptions``, which describes each. Their old names are taken too, with a FutureWarning:
    ``consumers`` for ``shared_inputs``, ``sandwich`` for ``post_norm``, ``linear`` for ``linear_4bit``, ``casting`` for
    ``norm_rounding``, ``adapter`` for ``lora``.

    Returns:
        A row for every site, fused or kept; under ``recompute`` and ``cuda_graphs`` a row for every layer too, and
        under ``shared_inputs`` one for every block that reads a fused norm.

    Raises:
        FusedNormError: if ``strict`` and nothing was fused, or a known family lacks a site it should have; if
            ``modules`` has a pattern that selects nothing; if ``norm_rounding`` has one that selects no norm, or a norm
            that stays stock; if a fused site is to be stock again, and other code has built on its class, as FSDP does
            when it shards. The model is as it was.
        TypeError, ValueError: for a model that is no module, and for options as in ``FuseOptions``.
    """
    kinds = norms, qk, rope, residual, post_norm, mlp, conv, experts, linear_4bit, lora, loss  # as the fields are
    options = FuseOptions(*kinds, modules, norm_rounding, shared_inputs, recompute, strict, cuda_graphs)
    _check_is_module(model)
    rows, changes = survey(model, options)
    parts = list(_known_parts(model, rows))
    others = [row for part in parts for row in _replaced_in(part)]
    places = {(site.kind, site.path) for site in others}
    rows = [*(row for row in rows if (row.kind, row.path) not in places), *others]
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    report = PatchReport(type(model).__name__, model_type, tuple(rows), recompute, cuda_graphs)
    if options.strict:
        _check(report, [lack for part in parts for lack in _lacking(part)])
    _change(changes)
    logger.info("%s", report.summary())
    layers = [module for module in model.modules() if isinstance(module, FusedBlock) and module.fused_norm_cuda_graphs]
    return replace(report, replays=attach_graphs(model, layers)) if layers else report


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


def _check(report: PatchReport, lacking: list[str]) -> None:
    """Raise FusedNormError if nothing is fused, or a known family lacks a site."""
    if not report.fused:
        raise FusedNormError(f"nothing to fuse in {report.model}; pass strict=False to go on\n{report}")
    if lacking:
        more = f"\n  and {len(lacking) - _LISTED} more" if len(lacking) > _LISTED else ""
        raise FusedNormError(
            f"{report.model} lacks sites that its family is known to have; "
            "pass strict=False to fuse the others\n  " + "\n  ".join(lacking[:_LISTED]) + more
        )


class _ModelPart(NamedTuple):
    """A layer of a decoder of a known family, or the decoder without its layers.

    Attributes:
        path: its own.
        modules: all in it, by their first paths.
        rows: those of its modules.
        counts: of the sites that it should have.
    """

    path: str
    modules: dict[str, nn.Module]
    rows: list[Site]
    counts: Mapping[Kind, int]

    def rows_of(self, kind: Kind) -> list[Site]:
        """Its rows of a kind; where an MLP is counted, experts are one."""
        return [row for row in self.rows if row.kind == kind or (kind == "mlp" and row.kind == "experts")]


def _known_parts(model: nn.Module, rows: Sequence[Site]) -> Iterator[_ModelPart]:
    """The parts of the decoders of known families in ``model``."""
    paths = {module: path for path, module in model.named_modules()}
    rows_at: dict[str, list[Site]] = {}
    for row in rows:
        rows_at.setdefault(row.path, []).append(row)

    def part(path: str, modules: dict[str, nn.Module], counts: Mapping[Kind, int]) -> _ModelPart:
        return _ModelPart(path, modules, [row for inside in modules for row in rows_at.get(inside, ())], counts)

    for decoder in paths:
        family = FAMILIES.get(getattr(getattr(decoder, "config", None), "model_type", ""))
        layers = getattr(decoder, "layers", None)
        if family is None or not isinstance(layers, nn.ModuleList) or not family.describes(decoder.config):
            continue
        outside = {paths[module]: module for module in decoder.modules()}
        for index, layer in enumerate(layers):
            inside = {paths[module]: module for module in layer.modules()}
            for path in inside:
                outside.pop(path, None)
            yield part(paths[layer], inside, family.layer(index, decoder.config).layer_sites)
        yield part(paths[decoder], outside, {"norm": family.decoder_norms})


def _replaced_in(part: _ModelPart) -> Iterator[Site]:
    """A row for an attention or MLP of a layer whose code others have replaced, so that nothing is fused in it."""
    file = stock_class(part.modules[part.path]).__module__
    names: Mapping[Kind, re.Pattern[str]] = {"rope": _ATTENTION, "mlp": _MLP}
    for kind, name in names.items():
        sites = part.rows_of(kind)
        for path, module in part.modules.items():
            if len(sites) >= part.counts.get(kind, 0):
                break
            if not name.search(path.rpartition(".")[2]) or any(f"{row.path}.".startswith(f"{path}.") for row in sites):
                continue
            origin = stock_class(module)
            reason = why_class_overridden(origin)
            if reason is None and origin.__module__ != file:
                reason = f"its class was replaced, by {origin.__module__}.{origin.__qualname__}"
            if reason is not None:
                row = Site(path, kind, origin.__name__, reason=reason, cause="overridden")
                sites.append(row)
                part.rows.append(row)
                yield row


def _lacking(part: _ModelPart) -> Iterator[str]:
    """Yield a message for each kind of site of which a part of a model has fewer than its family."""
    for kind, count in part.counts.items():
        sites = part.rows_of(kind)
        if kind in ("residual", "post_norm"):  # kept for their layer's sake, all have the row of the layer
            sites = [row for row in part.rows_of("residual") if row.path == part.path] * count or sites
        unrecognised = [row for row in sites if row.cause == "unrecognised"]
        if len(sites) - len(unrecognised) < count:
            yield from dict.fromkeys(f"{row.path} ({kind}): {row.reason}" for row in unrecognised)
            if len(sites) < count:
                yield f"{part.path} ({kind}): {len(sites)} of {count} found"


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

"""The survey of vocabulary heads and their losses: a row for each head, and the classes that fuse them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.sharded import is_plain, is_sharded
from ..options import FuseOptions
from .block import SurveyedModel, why_left_out
from .class_swap import (
    stock_class,
    why_class_overridden,
    why_fused_overridden,
    why_instance_overridden,
)
from .fused_classes import fused_class, fused_loss_class
from .hooks import name_of, name_of_function
from .lazy_logits import CrossEntropy, LazyLogits, LazySum, Projection
from .loss_trial import trial_of
from .losses import FusedHead, FusedLoss, why_compiled_loss, why_functions_replaced, why_read, why_seen
from .patch_report import Cause, PatchReport, Site
from .probe import UnrecognisedError, plain_pytorch
from .source import names_in, parameters_of
from .trl_head import trl_head, why_taken_apart, why_trl_runs, why_unknown

_CROSS_ENTROPIES = frozenset({"CrossEntropyLoss", "cross_entropy"})
"""Names by which forwards compute a loss of their own."""

_OF_TRL = "TRL's head computes the loss"


def survey_loss(path: str, module: Any, model: SurveyedModel) -> Site:
    """The row of the head of the language model at ``path``; the classes that fuse both are planned.

    A head that several models share has one row, that of the outermost one.

    Raises:
        FusedNormError: if a head is to be stock again and other code has built on its fused class.
    """
    head = head_of(module, model)
    head_path, origin, block = model.paths[id(head)], stock_class(module), model.blocks.get(path)
    row = model.loss_sites.get(head_path)
    if row is None:
        row = Site(head_path, "loss", origin.__name__)
        for reason, cause in _reasons(head_path, head, module, model.options):
            if reason is not None:  # the first one counts, and others may ask what is not there
                row = row.skipped(reason, cause)
                break
    if row.reason is None and block is not None and (block.rewrites or block.recomputes):
        row = row.skipped("its model recomputes as a whole, or is rewritten for other sites")
    if row.reason is None:
        model.plan(module, fused_loss_class(origin))
        model.plan(head, fused_class(FusedHead, stock_class(head)))
    return row if trl_head(module) is None else _of_trl(row)


def _of_trl(row: Site) -> Site:
    """The row of a loss in whose place TRL's log-probabilities are computed."""
    reason = row.reason
    if reason is not None and not reason.startswith(_OF_TRL):
        reason = f"{_OF_TRL}: {reason}"
    return replace(row, trainer="TRL", reason=reason)


def with_heads_of_trl(report: PatchReport, model: nn.Module) -> PatchReport:
    """The report on a model as it is now: a trainer may have put a head of its own on it since it was patched."""
    paths, rows = {id(module): path for path, module in model.named_modules()}, [*report.rows]
    for module in model.modules():
        language_model: Any = module
        function, reason = trl_head(module), None
        if function is not None:
            reason = why_trl_runs(module, function)
        elif isinstance(module, FusedLoss):
            reason = why_instance_overridden(module, under_autocast=True)
        if function is not None or reason is not None:
            path = paths.get(id(language_model.get_output_embeddings()))
            for at, row in enumerate(rows):
                if row.kind == "loss" and row.path == path:
                    new = row if reason is None else row.skipped(reason, "overridden")
                    rows[at] = new if function is None else _of_trl(new)
    return replace(report, rows=tuple(rows))


def head_of(module: Any, model: SurveyedModel) -> Any:
    """The head of a language model: a module whose forward takes labels, or passes on what may be labels; or None."""
    origin: Any = stock_class(module)
    if not hasattr(origin, "get_output_embeddings"):
        return None
    if not any(_takes_labels(base) for base in origin.__mro__ if "forward" in vars(base)):
        return None
    try:
        head = module.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) and id(head) in model.paths else None


def _takes_labels(origin: Any) -> bool:
    return any(parameter.name == "labels" for parameter in parameters_of(origin))


def _reasons(path: str, head: Any, module: Any, options: FuseOptions) -> Iterator[tuple[str | None, Cause]]:
    """Why a head and the language model that computes a loss of its logits stay stock, each None if it is no reason."""
    origin, linear = stock_class(module), stock_class(head)
    yield why_instance_overridden(module) or why_class_overridden(origin), "overridden"
    if (function := trl_head(module)) is not None:
        yield why_unknown(function), "overridden"
        yield why_taken_apart(*head._parameters.values()), "overridden"
    yield why_left_out("loss", path, head, options), "option"
    if not _takes_labels(origin):
        yield "its forward has no argument of the name labels", "unrecognised"
    if linear is not nn.Linear:
        yield f"its head is a {name_of(linear)}, no plain linear", "unrecognised"
    override = why_instance_overridden(head) or why_class_overridden(linear)
    yield override and f"its head: {override}", "overridden"
    yield why_seen(head), "overridden"  # such as the forward of transformers' tensor parallelism
    if not is_plain(head.weight) and not is_sharded(head.weight):  # FSDP2 makes it plain for a call
        yield f"its head has a {type(head.weight).__name__} for a weight", "unrecognised"
    if head.weight.dtype == torch.float64:
        yield f"its head computes in {head.weight.dtype}", "unrecognised"
    yield why_functions_replaced(), "overridden"
    for fused in (fused_loss_class(origin), fused_class(FusedHead, linear)):
        yield why_fused_overridden(fused), "overridden"
    yield why_compiled_loss(module), "overridden"
    yield _why_other_loss(module, origin, head), "unrecognised"


def _why_other_loss(module: Any, origin: Any, head: Any) -> str | None:
    """The reason why a model's loss is no cross entropy of its logits; None if it is one, as far as is surveyed.

    The end of the forward and a loss function of the model are run on a few lazy logits. If the forward cannot be, the
    names in it tell.
    """
    names = names_in(origin)
    dtype, trial = head.weight.dtype, None
    try:
        trial = trial_of(module, head)
    except UnrecognisedError as error:
        if "loss_function" not in names and not names & _CROSS_ENTROPIES:
            return f"its forward names no cross entropy, and cannot be tried: {error}"
    function = getattr(module, "loss_function", None) if "loss_function" in names else None
    if function is not None and (reason := _why_other_function(function)) is not None:
        return reason
    if function is None and dtype != torch.float32 and "float" not in names and names & _CROSS_ENTROPIES:
        return f"its forward computes its loss in {dtype}"
    if trial is None or trial.has_loss:
        return None
    if trial.reader is not None:
        return why_read(trial.reader)
    return "its forward computes no cross entropy" if trial.is_called else "its forward does not call its head"


def _why_other_function(function: Any) -> str | None:
    """The reason why a loss function is no cross entropy of its logits alone, by a call with a few lazy ones."""
    losses: list[CrossEntropy] = []

    def loss(x: Tensor, how: CrossEntropy) -> Tensor:
        losses.append(how)
        return x.new_zeros(())

    readers: list[str] = []
    with plain_pytorch():
        x, weight = torch.ones(2, 3, 4), torch.ones(7, 4)
        logits = LazyLogits.from_projection(Projection(x, weight, None, None, loss, readers.append))
        try:
            result = function(logits=logits, labels=torch.zeros(2, 3, dtype=torch.int64), vocab_size=7)
            _ = result.read("the model") if isinstance(result, LazySum) else result
        except Exception as error:  # a function of anybody's may raise anything
            return f"its loss, {name_of_function(function)}, cannot be tried: {type(error).__name__}: {error}"
    if readers or len(losses) != 1:
        return f"its loss, {name_of_function(function)}, is no cross entropy of its logits alone"
    return None

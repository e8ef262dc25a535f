"""The survey of language models under ``loss``: a row for each, and the changes of class for those that get one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..options import Loss
from .class_swap import (
    ClassChange,
    change_to,
    class_forward_replaced,
    foreign_forward,
    fused_forward_replaced,
    stock_class,
)
from .fused_classes import fused_loss_class
from .losses import FusedLoss, liger_forward, why_own_loss
from .patch_report import ModelLoss


def survey_losses(
    model: nn.Module, changes: list[ClassChange], loss: Loss | None
) -> tuple[list[ModelLoss], list[ClassChange]]:
    """The language models in ``model``, itself where it has none, and ``changes`` with those of their classes.

    The model is not touched.

    Raises:
        FusedNormError: without the package that ``loss`` needs; where a model is to compute its own loss again and
            other code has built on its fused class.
    """
    rows, changes = [], list(changes)
    for path, module in model.named_modules():
        if loss is not None and "lm_head" in module._modules:
            row, new = _survey(path, module, loss)
            rows.append(row)
            changes += [] if new is None else change_to(module, new)
        elif isinstance(module, FusedLoss):
            changes += change_to(module, stock_class(module))
    if loss is not None and not rows:
        rows.append(ModelLoss("", type(model).__name__, loss, "it has no lm_head", "unrecognised"))
    return rows, changes


def _survey(path: str, module: Any, loss: Loss) -> tuple[ModelLoss, type[nn.Module] | None]:
    """The row of a language model, and its class with that loss; None where its class stays, whose calls ask again."""
    origin: Any = stock_class(module)
    row = ModelLoss(path, origin.__name__, loss)
    if owner := foreign_forward(module) or class_forward_replaced(origin):
        return replace(row, reason=owner, cause="overridden"), None
    with_loss = liger_forward(origin)
    if with_loss is None:
        return replace(row, reason=f"{loss} has no loss for it", cause="unrecognised"), None
    fused = fused_loss_class(origin, with_loss)
    if reason := why_own_loss(module) or fused_forward_replaced(fused):
        return replace(row, reason=reason, cause="overridden"), None
    return row, fused

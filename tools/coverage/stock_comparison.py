"""A step of a model type's small model, fused against stock, with inputs of any kind: the rule is that of ``check``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fused_norm.check.against_float64 import UncheckableError, check_step

from .inputs import Inputs
from .sweep import in_a_line
from .type_count import UnbuiltError, small_model, whole_model

_WORST = 3
_MOST_PARAMETERS = 100_000_000


class WithInputs(nn.Module):
    """A model that is given the same inputs at every call, and whose loss is a sum of squares of its outputs.

    So the check of a step, which is of language models, can be made of any model.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
        dtype = next(one.dtype for one in self.model.parameters() if one.is_floating_point())
        outputs = list(_tensors(self.model(**_cast(self.inputs, dtype))))
        generator = torch.Generator().manual_seed(3)
        loss = torch.zeros((), dtype=torch.float64)  # so that its own rounding does not count
        for one in outputs:
            weights = _cast(torch.rand(one.shape, generator=generator), one.dtype)
            loss = loss + (one * weights).double().square().mean()  # a sum in which nothing cancels out
        return SimpleNamespace(logits=torch.cat([one.flatten().float() for one in outputs]), loss=loss)


def compare(model_type: str, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> dict[str, Any]:
    """Run a small model of a type, and parts of it that need other inputs, in these dtypes, stock and fused.

    Returns:
        By part and dtype either ``ok``, or the worst results with their stock error, fused error and budget, or why it
        was not compared.

    Raises:
        UnbuiltError: no model of the type can be built from its default config.
    """
    whole, config = whole_model(model_type)
    found, why = small_model(whole, config, most=_MOST_PARAMETERS, divisors=(8, 4, 2, 1))
    if found is None or not found.runs:
        raise UnbuiltError(f"does not run: {why}")
    results: dict[str, Any] = {}
    for path, given in found.runs:
        for dtype in dtypes:
            part = found.model.get_submodule(path).to(dtype)
            results[f"{path or type(part).__name__} {str(dtype).removeprefix('torch.')}"] = _compared(part, given)
    return results


def _compared(part: nn.Module, given: Inputs) -> Any:
    for one in part.parameters():
        one.requires_grad_(one.is_floating_point())
    tokens = torch.zeros(2, 12, dtype=torch.long)
    try:
        check = check_step(WithInputs(part, given), tokens, options={"strict": False})
    except UncheckableError as error:
        return f"not compared: {error}"
    except Exception as error:  # of whatever kind a foreign model raises
        return f"not compared: {in_a_line(error)}"
    if check.ok:
        return "ok" if check.report.fused else "nothing fused"
    over = sorted((one for one in check.deviations if not one.ok), key=lambda one: -one.share)
    return {
        "over budget": len(over),
        "of": len(check.deviations),
        "worst": [[one.name, one.stock, one.fused, one.budget] for one in over[:_WORST]],
    }


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Numbers that are the same in every dtype."""
    if isinstance(value, Tensor):
        return value.bfloat16().to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(one, dtype) for name, one in value.items()}
    return tuple(_cast(one, dtype) for one in value) if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors with a gradient in an output, however deep."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.requires_grad:
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)

"""The check of batch invariance: operators give a row the same bits whatever rows are beside it.

It is made with the tensors that a model calls its operators with, once with all rows and once with some of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.operator import Operator, calls
from ..options import FuseOptions
from ..patcher import apply_fused_norm, remove_fused_norm
from .against_float64 import UncheckableError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class RowsOfOperator:
    """One operator as a model calls it, and whether rows depend on the rows beside them.

    Attributes:
        operator: its name.
        width: elements of a row.
        dtype: of the first tensor.
        parts: calls of some of the rows, or tokens, by themselves.
        differing: those of them that gave a row other bits than it has in the whole batch.
    """

    operator: str
    width: int
    dtype: str
    parts: int
    differing: int

    @property
    def ok(self) -> bool:
        """No part differs."""
        return self.differing == 0

    def __str__(self) -> str:
        return f"{self.operator} of {self.width} columns in {self.dtype}"


@dataclass(frozen=True)
class BatchInvariance:
    """All operators that a model runs, one for each dtype and width."""

    operators: tuple[RowsOfOperator, ...]

    @property
    def ok(self) -> bool:
        """No row of any operator depends on the rows beside it."""
        return all(one.ok for one in self.operators)

    def to_dict(self) -> dict[str, Any]:
        """The verdict and the operators, for JSON."""
        return {"ok": self.ok, "operators": [asdict(one) for one in self.operators]}

    def __str__(self) -> str:
        if not self.operators:
            return "batch invariance: no fused operator returns rows"
        faults = [str(one) for one in self.operators if not one.ok]
        if faults:
            return f"batch invariance: a row's bits depend on the rows beside it in {', '.join(faults)}"
        return f"batch invariance: rows have the same bits in any batch, in all {len(self.operators)} operators run"


class _Calls:
    """Keeps the first call of each operator with its dtypes and widths, and makes all of them."""

    def __init__(self) -> None:
        self.found: dict[Any, tuple[Operator, Any, tuple[Any, ...]]] = {}

    def called(self, operator: Operator, spec: Any, arguments: tuple[Any, ...]) -> Any:
        described = [(one.dtype, one.shape[-1]) if isinstance(one, Tensor) else one for one in arguments]
        key = operator.name, spec, *described
        if key not in self.found and not operator.not_differentiable:
            kept = tuple(one.clone() if isinstance(one, Tensor) else one for one in arguments)
            self.found[key] = operator, spec, kept
        return operator.results_of(spec, *arguments)


def check_rows(
    model: nn.Module, input_ids: Tensor, options: FuseOptions | Mapping[str, Any] | None = None
) -> BatchInvariance:
    """Run a model's forward, and every operator that it calls again, for some of the rows by themselves.

    The first row alone, the last one and some in the middle must have, bit for bit, the results that they have among
    all rows of the batch. Norms that give FP8 are left out: one scale for a tensor depends on all of it.

    Args:
        model: a causal language model. Afterwards it is stock, in the mode that it was in.
        input_ids: [batch, sequence] of token ids, on the model's device.
        options: of ``apply_fused_norm``.

    Raises:
        FusedNormError: as ``apply_fused_norm``.
        UncheckableError: if the model calls no operator, although more than its loss is fused.
    """
    options = options if isinstance(options, FuseOptions) else FuseOptions(**(options or {}))
    seen, training = _Calls(), model.training
    model.eval()
    try:
        report = apply_fused_norm(model, **vars(options))
        with torch.no_grad(), calls.by(seen):
            model(input_ids=input_ids, use_cache=False)
        if not seen.found and any(site.kind != "loss" for site in report.fused):
            raise UncheckableError(f"{type(model).__name__} calls no fused operator on {input_ids.device}")
        with torch.no_grad():
            return BatchInvariance(tuple(_compare(*call) for call in seen.found.values()))
    finally:
        remove_fused_norm(model)
        model.train(training)


def _compare(operator: Operator, spec: Any, arguments: tuple[Any, ...]) -> RowsOfOperator:
    lead = arguments[0]
    pick = _Tokens(arguments[operator.tensor_count]) if _angles(operator, arguments) else _Rows()
    whole = _as_tuple(operator.results_of(spec, *arguments))
    count = pick.count(arguments)
    parts = {(0, 1), (count - 1, 1), (count // 3, min(3, count - count // 3))}
    differing = 0
    for start, some in sorted(parts):
        found = _as_tuple(operator.results_of(spec, *pick.of(arguments, start, some)))
        expected = pick.of(whole, start, some)
        differing += not all(_same_bits(one, other) for one, other in zip(found, expected, strict=True))
    dtype = str(lead.dtype).removeprefix("torch.")
    return RowsOfOperator(operator.plain_name or operator.name, lead.shape[-1], dtype, len(parts), differing)


class _Rows:
    """Picks rows of tensors of at least two dimensions, each with all of its leading dimensions as one."""

    def count(self, arguments: Iterable[Any]) -> int:
        """The rows of the tensor that has the fewest."""
        return min(one.numel() // one.shape[-1] for one in arguments if _has_rows(one))

    def of(self, arguments: Iterable[Any], start: int, some: int) -> tuple[Any, ...]:
        """The arguments with ``some`` rows from ``start`` on."""
        return tuple(one.flatten(0, -2)[start : start + some] if _has_rows(one) else one for one in arguments)


class _Tokens:
    """Picks tokens of q, k and their angles, of four dimensions or, angles, less."""

    def __init__(self, heads_dim: int) -> None:
        self._dim = 3 - heads_dim

    def count(self, arguments: Iterable[Any]) -> int:
        """The tokens of a sequence."""
        return next(iter(arguments)).shape[self._dim]

    def of(self, arguments: Iterable[Any], start: int, some: int) -> tuple[Any, ...]:
        """The arguments with ``some`` tokens from ``start`` on."""
        return tuple(self._picked(one, start, some) if _has_rows(one) else one for one in arguments)

    def _picked(self, tensor: Tensor, start: int, some: int) -> Tensor:
        dim = self._dim if tensor.dim() == 4 else tensor.dim() - 2
        return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, start, some)


def _angles(operator: Operator, arguments: tuple[Any, ...]) -> bool:
    """Return whether a call has cos and sin, which belong to tokens."""
    names = [one.split()[-1] for one in operator.tensors.split(",")]
    return "cos" in names and arguments[names.index("cos")] is not None


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    integers = _INTEGERS[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(integers), other.contiguous().view(integers))

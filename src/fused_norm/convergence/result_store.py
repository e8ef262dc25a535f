"""Results of comparisons, kept on disk: each is found again as long as settings and code are the same."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .call_checks import CallRecord
from .comparison import Comparison
from .run_record import RunRecord
from .verdict import Verdict, judge


@dataclass(frozen=True)
class ComparisonResult:
    """One comparison after its runs.

    Attributes:
        comparison: what was compared.
        stock, controls, fused: the runs as numbers; None and empty if they were not made.
        calls: how far the fused calls are from the stock modules.
        error: why the comparison could not be made.
    """

    comparison: Comparison
    stock: RunRecord | None = None
    controls: tuple[RunRecord, ...] = ()
    fused: RunRecord | None = None
    calls: CallRecord | None = None
    error: str | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the fused run and its calls."""
        if self.stock is None or (self.fused is None and self.calls is None):
            return Verdict("invalid", (self.error or "not run",), ())
        precision, execution = self.comparison.precision, self.comparison.execution
        return judge(precision, self.stock, self.controls, self.fused, self.calls, execution=execution)


class ResultStore:
    """A folder of results.

    Args:
        folder: made if it is not there.
        fresh: ignore the results of earlier runs.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self._fresh, self._files = fresh, folder / "comparisons"
        self._files.mkdir(parents=True, exist_ok=True)

    def load(self, comparison: Comparison, key: str) -> ComparisonResult | None:
        """Return the result that was saved under this key, or None if there is none that can be read."""
        try:
            path = self._files / f"{comparison.name}.json"
            kept = {} if self._fresh else json.loads(path.read_text(encoding="utf-8"))
            if kept["key"] != key:
                return None
            runs = {name: _record(RunRecord, kept[name]) for name in ("stock", "fused")}
            controls = tuple(_record(RunRecord, run) for run in kept["controls"])
            return ComparisonResult(comparison, **runs, controls=controls, calls=_record(CallRecord, kept["calls"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, result: ComparisonResult, key: str) -> None:
        """Write a result; a reader never sees half of it."""
        path = self._files / f"{result.comparison.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(result) | {"key": key}), encoding="utf-8")
        os.replace(partial, path)


def _record(kind: type[Any], kept: Mapping[str, Any] | None) -> Any:
    """The record with these fields, in which JSON has lists for tuples."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in (kept or {}).items()}
    return None if kept is None else kind(**values)

"""Results of comparisons, kept on disk: each is found again as long as settings and code are the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from .call_probe import CallRecord
from .comparison import Comparison
from .run_record import RunRecord
from .verdict import Verdict, judge

Record = TypeVar("Record", RunRecord, CallRecord)


@dataclass(frozen=True)
class ComparisonResult:
    """One comparison after its runs.

    Attributes:
        comparison: the one that was made.
        stock, controls, fused: the runs as numbers; None and empty where they were not made.
        calls: how far the fused calls are from the stock modules.
        trouble: what kept the comparison from being made.
    """

    comparison: Comparison
    stock: RunRecord | None = None
    controls: tuple[RunRecord, ...] = ()
    fused: RunRecord | None = None
    calls: CallRecord | None = None
    trouble: str | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the fused run and its calls."""
        if self.stock is None or (self.fused is None and self.calls is None):
            return Verdict("invalid", (self.trouble or "not run",), ())
        precision, execution = self.comparison.precision, self.comparison.execution
        return judge(precision, self.stock, self.controls, self.fused, self.calls, execution=execution)


class ResultStore:
    """A folder of results.

    Args:
        folder: made if it is not there.
        fresh: nothing that was kept before is found again.

    Raises:
        OSError: it cannot be written to.
    """

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self._fresh = fresh
        self._files = folder / "comparisons"
        self._files.mkdir(parents=True, exist_ok=True)
        probe = self._files / ".writable"
        probe.write_text("")
        probe.unlink()

    def load(self, comparison: Comparison, settings_key: str) -> ComparisonResult | None:
        """The result of a comparison that ran under these settings; None where there is none that can be read."""
        try:
            kept = {} if self._fresh else json.loads(self._path(comparison).read_text(encoding="utf-8"))
            return _result(comparison, kept["result"]) if kept["settings"] == settings_key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, result: ComparisonResult, settings_key: str) -> None:
        """Keep a result; a reader never sees half of it."""
        path = self._path(result.comparison)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"settings": settings_key, "result": asdict(result)}), encoding="utf-8")
        os.replace(partial, path)

    def _path(self, comparison: Comparison) -> Path:
        return self._files / f"{comparison.name}.json"


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A short name for settings: equal for equal facts, which must be plain values, and for equal code of this package.

    A result of yesterday's kernels says nothing about today's.
    """
    code = code_digest(Path(__file__).parents[1])
    return hashlib.sha256(json.dumps([facts, code], sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def code_digest(folder: Path) -> str:
    """A hash of the names and contents of all Python files below ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}".encode() + path.read_bytes())
    return digest.hexdigest()


def _result(comparison: Comparison, kept: Mapping[str, Any]) -> ComparisonResult:
    return ComparisonResult(
        comparison,
        stock=_record(RunRecord, kept["stock"]),
        controls=tuple(filter(None, (_record(RunRecord, control) for control in kept["controls"]))),
        fused=_record(RunRecord, kept["fused"]),
        calls=_record(CallRecord, kept["calls"]),
        trouble=kept["trouble"],
    )


def _record(kind: type[Record], kept: Mapping[str, Any] | None) -> Record | None:
    """A record from its fields, in which JSON has lists for tuples."""
    if kept is None:
        return None
    values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in kept.items()}
    return kind(**values)

"""Results of comparisons, kept on disk: each is found again as long as settings and code are the same."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from .call_probe import CallRecord
from .comparison import Comparison
from .mutations import SOUND
from .run_record import RunRecord
from .verdict import Verdict, judge

Outcome = Literal["green", "red", "invalid", "caught", "missed", "hidden"]
FAILED: tuple[Outcome, ...] = ("red", "missed")
"""Outcomes for which the command's exit code is 1."""


@dataclass(frozen=True)
class ComparisonResult:
    """One comparison after its runs.

    Attributes:
        comparison: the one that was made.
        stock, controls, fused: the runs as numbers; None and empty where they were not made.
        calls: how far the fused calls are from the stock modules.
        hidden: why the planted fault changes no number here; None where it does.
        trouble: what kept the comparison from being made.
    """

    comparison: Comparison
    stock: RunRecord | None = None
    controls: tuple[RunRecord, ...] = ()
    fused: RunRecord | None = None
    calls: CallRecord | None = None
    hidden: str | None = None
    trouble: str | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict on the fused run, whether that has a fault or not."""
        if self.stock is None or (self.fused is None and self.calls is None):
            return Verdict("invalid", (self.trouble or self.hidden or "not run",), ())
        trains_norms = self.comparison.execution != "lora-alone"
        return judge(
            self.comparison.precision,
            self.stock,
            self.controls,
            self.fused,
            self.calls,
            trains_norms=trains_norms,
        )

    @property
    def outcome(self) -> Outcome:
        """For a fused twin its verdict, for a planted fault whether the verdict saw it."""
        status = self.verdict.status
        if self.comparison.mutation in (None, SOUND):
            return status
        if self.hidden:
            return "hidden"
        if status == "red" or (self.trouble is None and self.calls is not None and self.calls.not_seen):
            return "caught"
        return "missed" if status == "green" else "invalid"


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
            return _result(comparison, kept) if kept["settings"] == settings_key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, result: ComparisonResult, settings_key: str) -> None:
        """Keep a result; a reader never sees half of it."""
        path = self._path(result.comparison)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"settings": settings_key, **to_json(result)}), encoding="utf-8")
        os.replace(partial, path)

    def _path(self, comparison: Comparison) -> Path:
        return self._files / f"{comparison.name}.json"


def to_json(result: ComparisonResult) -> dict[str, Any]:
    """A result as JSON has it; numbers that are not finite are strings."""
    return {name: plain(value) for name, value in asdict(result).items()}


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A short name for settings: equal for equal facts, which must be plain values, and for equal code of this package.

    A result of yesterday's kernels says nothing about today's.
    """
    code = code_digest(Path(__file__).parents[1])
    return hashlib.sha256(json.dumps([facts, code], sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def code_digest(folder: Path) -> str:
    """A hash of the names and contents of all Python and C++ files below ``folder``."""
    digest = hashlib.sha256()
    for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.cpp"))):
        digest.update(f"{path.relative_to(folder)}".encode() + path.read_bytes())
    return digest.hexdigest()


def _result(comparison: Comparison, kept: Mapping[str, Any]) -> ComparisonResult:
    return ComparisonResult(
        comparison,
        stock=_run_record(kept["stock"]),
        controls=tuple(control for control in map(_run_record, kept["controls"]) if control),
        fused=_run_record(kept["fused"]),
        calls=_call_record(kept["calls"]),
        hidden=kept["hidden"],
        trouble=kept["trouble"],
    )


def _run_record(kept: Mapping[str, Any] | None) -> RunRecord | None:
    if kept is None:
        return None
    values = {field.name: _numbers(kept[field.name]) for field in fields(RunRecord)}
    return RunRecord(**values | {name: tuple(values[name]) for name in ("losses", "gradient_norms", "constant")})


def _call_record(kept: Mapping[str, Any] | None) -> CallRecord | None:
    if kept is None:
        return None
    values = {field.name: _numbers(kept[field.name]) for field in fields(CallRecord)}
    return CallRecord(**values | {"not_seen": tuple(values["not_seen"])})


def plain(value: Any) -> Any:
    """A value as JSON has it: a number that is not finite becomes a string."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return float(value) if value in ("nan", "inf", "-inf") else value

"""Results on disk, one file a case: what was finished stays, and is found again under the same settings."""

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

from .mutations import SOUND
from .plan import Case
from .recording import Recording
from .verdict import Verdict, judge

Outcome = Literal["green", "red", "invalid", "caught", "missed", "hidden"]
FAILED: tuple[Outcome, ...] = ("red", "missed")
"""Outcomes for which the command's exit code is 1."""


@dataclass(frozen=True)
class Result:
    """One case after its runs.

    Attributes:
        case: what was compared.
        stock, controls, fused: the runs as numbers; None and empty where ``trouble`` kept them from being made.
        planted: the norm that had the fault, and how often that took effect.
        hidden: why no norm can show the fault; None where one does.
        trouble: what kept the comparison from being made.
    """

    case: Case
    stock: Recording | None = None
    controls: tuple[Recording, ...] = ()
    fused: Recording | None = None
    planted: tuple[str, int] | None = None
    hidden: str | None = None
    trouble: str | None = None

    @property
    def verdict(self) -> Verdict:
        """What the comparison says of the fused run, whether that has a fault or not."""
        if self.stock is None or self.fused is None:
            return Verdict("invalid", (self.trouble or self.hidden or "not run",), ())
        if self.planted and not self.planted[1]:
            return Verdict("invalid", (f"the fault at {self.planted[0]} was never run",), ())
        return judge(self.case.precision, self.stock, self.controls, self.fused)

    @property
    def outcome(self) -> Outcome:
        """What the result means: for a fused twin its verdict, for a planted fault whether the verdict saw it."""
        status = self.verdict.status
        if self.case.mutation in (None, SOUND):
            return status
        if self.hidden:
            return "hidden"
        return "caught" if status == "red" else "missed" if status == "green" else "invalid"


class Store:
    """A folder of results.

    Args:
        folder: made if it is not there.
        fresh: nothing that was kept before is found again.

    Raises:
        OSError: it cannot be written to.
    """

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self._fresh = fresh
        self._cases = folder / "cases"
        self._cases.mkdir(parents=True, exist_ok=True)
        probe = self._cases / ".writable"
        probe.write_text("")
        probe.unlink()

    def load(self, case: Case, settings: str) -> Result | None:
        """The result of a case that ran under these settings; None where there is none that can be read."""
        try:
            kept = {} if self._fresh else json.loads(self._path(case).read_text(encoding="utf-8"))
            return _result(case, kept) if kept["settings"] == settings else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, result: Result, settings: str) -> None:
        """Keeps a result; a reader never sees half of it."""
        path = self._path(result.case)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"settings": settings, **to_json(result)}), encoding="utf-8")
        os.replace(partial, path)

    def _path(self, case: Case) -> Path:
        return self._cases / f"{case.name}.json"


def to_json(result: Result) -> dict[str, Any]:
    """A result as JSON has it; numbers that are not finite are strings."""
    return {name: plain(value) for name, value in asdict(result).items()}


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A short name for settings: equal for equal facts, which must be plain values, and for equal code of this package.

    A result of yesterday's kernels says nothing about today's.
    """
    return hashlib.sha256(json.dumps([facts, _code()], sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def _code() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}".encode() + path.read_bytes())
    return digest.hexdigest()


def _result(case: Case, kept: Mapping[str, Any]) -> Result:
    return Result(
        case,
        stock=_recording(kept["stock"]),
        controls=tuple(control for control in map(_recording, kept["controls"]) if control),
        fused=_recording(kept["fused"]),
        planted=tuple(kept["planted"]) if kept["planted"] else None,
        hidden=kept["hidden"],
        trouble=kept["trouble"],
    )


def _recording(kept: Mapping[str, Any] | None) -> Recording | None:
    if kept is None:
        return None
    values = {field.name: _numbers(kept[field.name]) for field in fields(Recording)}
    return Recording(
        **values | {name: tuple(values[name]) for name in ("losses", "gradient_norms", "flat", "unchanged")}
    )


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

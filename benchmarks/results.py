"""The results of a run as values, and as a JSON file from which tables and charts can be made again."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fused_norm.old_names import OLD_NAMES

from .samples import PairedRatio, Timing

Part = Literal["kernels", "losses", "host", "models", "features", "trainers", "copy"]
Verdict = Literal["ok", "wrong", "refused", "failed"]
"""``wrong``: the result is further from the right one than allowed, so no time was taken. ``refused``: the
implementation does not take this case. ``failed``: it raised any other error."""

_VALUES: dict[str, Any] = {"timing": Timing, "host": Timing, "ratio": PairedRatio}


class RefusedError(Exception):
    """An implementation does not take a case, or a variant does not exist for a model or a step."""


@dataclass(frozen=True)
class Result:
    """One thing that was measured: a cell of a table.

    Attributes:
        part: ``kernels``: operators beside peers. ``losses``: a vocabulary head with its loss, beside peers.
            ``host``: the host's time for a call. ``models``: steps of whole models. ``features``: the same, and ratios
            to everything on. ``trainers``: steps of TRL's trainers. ``copy``: a copy from device to device, whose
            bandwidth is the limit of every operator's.
        row: the case: an operator and its shape, or a model and its step; for a copy its size.
        by: the provider or the variant.
        kind: of operators ``forward``, which is without autograd, or ``backward``, all gradients; of host times
            ``forward``, or ``training``, which is both; of losses ``training``.
        dtype: of activations and weights.
        verdict: see ``Verdict``.
        detail: what is wrong, or was raised, or why there is no such variant.
        error: the largest relative error: of any row to float64, or of a model's outputs and gradients to stock's;
            None if it is not finite.
        errors: of a loss, the relative errors of ``loss``, ``dX`` and ``dW`` to float64, of whole tensors.
        timing: of a call, a step, or a token of a generation; None unless the verdict is ``ok``.
        host: the part of a step's time until the host has launched everything.
        ratio: of the times of a step to those of the base, each to that of the same round.
        bytes: the least that a call must move.
        cold: the sets of inputs together are too large for the L2 cache.
        extra_bytes: the peak of memory during a call beyond inputs and outputs; of a backward, what its forward has
            kept for it counts, and all gradients are outputs. Of losses the gradients count.
        peak_bytes: of allocated GPU memory during a step, weights included.
        reserved_bytes: the same of the memory that PyTorch's allocator held.
    """

    part: Part
    row: str
    by: str
    kind: str = ""
    dtype: str = ""
    verdict: Verdict = "ok"
    detail: str | None = None
    error: float | None = None
    errors: dict[str, float | None] | None = None
    timing: Timing | None = None
    host: Timing | None = None
    ratio: PairedRatio | None = None
    bytes: int | None = None
    cold: bool | None = None
    extra_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def seconds(self) -> float | None:
        """The median of the time."""
        return self.timing.median if self.timing else None

    @property
    def bandwidth(self) -> float | None:
        """The least bytes over the time, in bytes per second."""
        return self.bytes / self.timing.median if self.bytes and self.timing else None

    @property
    def bad(self) -> bool:
        """Return whether something was computed wrongly, or raised what it should not."""
        return self.verdict in ("wrong", "failed")

    def checked(self, error: float, allowed: float, errors: str | None = None) -> Result:
        """Return the result with its error, ``wrong`` if that is above ``allowed`` or NaN; ``errors`` is its text."""
        result = replace(self, error=error if math.isfinite(error) else None)
        if error <= allowed:
            return result
        detail = f"{errors or f'relative error {error:.1e}'}, and {allowed:.2g} is allowed"
        return replace(result, verdict="wrong", detail=detail)


@dataclass
class Results:
    """All results of one run.

    Attributes:
        environment: versions, device and options.
        meaningless: the times only show that the code runs: made on a CPU, or by ``--quick``.
        rows: in the order of measuring.
        left_out: what was not measured, and why.
    """

    environment: dict[str, str]
    meaningless: bool = False
    rows: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def of(self, *parts: Part) -> list[Result]:
        """The results of some parts of the benchmarks."""
        return [row for row in self.rows if row.part in parts]

    @property
    def copy_bandwidth(self) -> float | None:
        """Bytes per second of the fastest copy of the run, of which fractions are; None before one was measured."""
        return max((copy.bandwidth for copy in self.of("copy") if copy.bandwidth), default=None)

    def save(self, path: Path) -> None:
        """Write the results as JSON, a line each; a file that was there is replaced at once, not left half written."""
        rows = ({name: value for name, value in asdict(row).items() if value not in (None, "")} for row in self.rows)
        lines = (
            f'{{"environment": {json.dumps(self.environment, indent=1)}',
            f'"meaningless": {json.dumps(self.meaningless)}',
            f'"left_out": {json.dumps(self.left_out, indent=1)}',
            '"rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n",
        )
        draft = path.with_name(f"{path.name}.part")
        draft.write_text(",\n".join(lines), encoding="utf-8")
        os.replace(draft, path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file that ``save`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such file.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(rows=list(map(_result, data.pop("rows"))), **data)
        except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no results of the benchmarks: {error!r}") from error


def _result(row: dict[str, Any]) -> Result:
    """The result of a line; what only former runs have measured is left out, and old names of options are new ones."""
    before, without, option = row.get("by", "").rpartition("without ")
    row = row | {"by": before + without + OLD_NAMES.get(option, option)} if without else row
    known = {name: value for name, value in row.items() if name in Result.__dataclass_fields__}
    return Result(**{name: _VALUES[name](**value) if name in _VALUES else value for name, value in known.items()})

"""What was measured, as values, and as the JSON file that pictures and tables can be made from again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .cases import Direction
from .timing import Timing

Verdict = Literal["ok", "wrong", "refused", "failed"]
"""``wrong``: the result is not the float64 one within the tolerance, so no time was taken. ``refused``: the
implementation says that it does not do this. ``failed``: anything else that it raised."""

Part = Literal["kernels", "modes"]


@dataclass(frozen=True)
class CopyResult:
    """A device-to-device copy, the ceiling of everything here.

    Attributes:
        bytes: read plus written.
        timing: of one copy.
    """

    bytes: int
    timing: Timing

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bytes / self.timing.median


@dataclass(frozen=True)
class KernelResult:
    """One operation by one provider, in one direction.

    Attributes:
        part: ``kernels``, side by side with peers, or ``modes``, those of the fused forward.
        case: the case's name.
        group: the first word of it.
        rows: of the activations; tokens, for ``qk`` and ``rope``.
        width: of a row.
        dtype: of activations and weights.
        provider: who computes.
        direction: ``forward`` is without autograd; ``backward`` is all gradients, weights' included.
        bytes: the least that must be moved.
        cold: whether the sets of inputs together are beyond the L2 cache.
        verdict: see ``Verdict``.
        detail: what is wrong, or was raised.
        error: the largest relative error, see ``cases.worst_error``; None where there is none or it is not finite.
        timing: None unless the verdict is ``ok``.
        profiled: seconds by torch.profiler, where it was asked for.
    """

    part: Part
    case: str
    group: str
    rows: int
    width: int
    dtype: str
    provider: str
    direction: Direction
    bytes: int
    cold: bool
    verdict: Verdict
    detail: str | None = None
    error: float | None = None
    timing: Timing | None = None
    profiled: float | None = None


@dataclass(frozen=True)
class HostResult:
    """Host time of one call on a tiny tensor.

    Attributes:
        operation: of the case.
        provider: who computes.
        chain: calls in a row, each on the result of the one before; 1 is a call by itself.
        forward: without autograd.
        training: forward and backward.
    """

    operation: str
    provider: str
    chain: int
    forward: Timing
    training: Timing


@dataclass(frozen=True)
class StepResult:
    """Training steps of a whole model.

    Attributes:
        row: model, batch and length.
        variant: what its norms are.
        verdict: see ``Verdict``.
        detail: what is wrong, or was raised.
        error: relative, of the last hidden state and of the norm weights' gradients to the stock model's.
        timing: of a step; None unless the verdict is ``ok``.
        peak_bytes: of GPU memory during a step, weights included; None on a CPU.
    """

    row: str
    variant: str
    verdict: Verdict
    detail: str | None = None
    error: float | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None


@dataclass
class Results:
    """All of one run.

    Attributes:
        environment: versions, device, options: what it takes to read the numbers.
        meaningless: the times only show that the code runs: made on a CPU, or by ``--quick``.
        copies: the first and the last are of the same size, taken before and after everything else.
        kernels: see ``KernelResult``.
        host: see ``HostResult``.
        steps: see ``StepResult``.
        left_out: what was not measured, and why.
    """

    environment: dict[str, str]
    meaningless: bool = False
    copies: list[CopyResult] = field(default_factory=list)
    kernels: list[KernelResult] = field(default_factory=list)
    host: list[HostResult] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def copy_bandwidth(self) -> float | None:
        """Of the fastest copy of the run, in bytes per second: what fractions are of. None before one was measured."""
        return max((copy.bandwidth for copy in self.copies), default=None)

    def copy_of(self, moved_bytes: int) -> CopyResult | None:
        """The copy that moves so much."""
        return next((copy for copy in self.copies if copy.bytes == moved_bytes), None)

    def save(self, path: Path) -> None:
        """Write JSON, in one move: what was there stays whole if the process is killed."""
        draft = path.with_name(f"{path.name}.part")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(draft, path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """What ``save`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such file.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                environment=data["environment"],
                meaningless=data["meaningless"],
                copies=[CopyResult(**_timed(row)) for row in data["copies"]],
                kernels=[KernelResult(**_timed(row)) for row in data["kernels"]],
                host=[HostResult(**_timed(row)) for row in data["host"]],
                steps=[StepResult(**_timed(row)) for row in data["steps"]],
                left_out=data["left_out"],
            )
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no results of fused-norm bench: {error!r}") from error


def _timed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: Timing(**value) if isinstance(value, dict) else value for key, value in row.items()}

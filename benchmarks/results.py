"""The results of a run as values, and as a JSON file from which tables and charts can be made again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .operator_cases import Direction
from .paired_ratio import PairedRatio
from .timing import Timing

Verdict = Literal["ok", "wrong", "refused", "failed"]
"""``wrong``: the result is further from the right one than allowed, so no time was taken. ``refused``: the
implementation does not take this case. ``failed``: it raised any other error."""

Part = Literal["kernels", "modes"]


@dataclass(frozen=True)
class CopyResult:
    """A device-to-device copy, whose bandwidth is the upper limit of every operator's.

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
    """One operator by one provider, in one direction.

    Attributes:
        part: ``kernels``: beside peers. ``modes``: the modes of the fused forward beside each other.
        case: the case's name.
        group: the first word of it.
        rows: of the activations; tokens, for ``qk`` and ``rope``.
        width: of a row.
        dtype: of activations and weights.
        provider: who computes.
        direction: ``forward`` is without autograd; ``backward`` is all gradients, weights' included.
        bytes: the least that must be moved.
        cold: the sets of inputs together are too large for the L2 cache.
        verdict: see ``Verdict``.
        detail: what is wrong, or was raised.
        error: the largest relative error, see ``operator_cases.worst_error``; None where it is not finite.
        timing: None unless the verdict is ``ok``.
        profiled: seconds by torch.profiler, where it was asked for.
        extra_bytes: the peak of memory during the call beyond inputs and outputs; of a backward, what its forward has
            kept for it counts, and all gradients are outputs. None where it was not measured.
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
    extra_bytes: int | None = None


@dataclass(frozen=True)
class HostResult:
    """Host time of one call on a tiny tensor.

    Attributes:
        operator: of the case.
        provider: who computes.
        chain: calls in a row, each on the result of the one before; 1 is a call by itself.
        forward: without autograd.
        training: forward and backward.
    """

    operator: str
    provider: str
    chain: int
    forward: Timing
    training: Timing


@dataclass(frozen=True)
class StepResult:
    """Steps of a whole model.

    Attributes:
        row: model, kind of step, batch and length.
        variant: see ``model_variants.VARIANTS``.
        verdict: see ``Verdict``.
        detail: what is wrong, or was raised, or why there is no such variant.
        error: relative, of the output and of gradients to the stock model's.
        timing: of a step, or of a token of a generation; None unless the verdict is ``ok``.
        host: the part of it until the host has launched everything.
        peak_bytes: of allocated GPU memory during a step, weights included; None on a CPU.
        reserved_bytes: the same of the memory that PyTorch's allocator held.
    """

    row: str
    variant: str
    verdict: Verdict
    detail: str | None = None
    error: float | None = None
    timing: Timing | None = None
    host: Timing | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True)
class FeatureResult:
    """One variant of a model's features, measured in turns with the others.

    Attributes:
        row: model and workload.
        variant: see ``features.VARIANTS``.
        verdict: see ``Verdict``.
        detail: what is wrong, or was raised.
        error: relative, of outputs and of the norm weights' gradients to the stock model's.
        timing: of a step or a generation, over all rounds; None unless the verdict is ``ok``.
        peak_bytes: of GPU memory during a call, weights included; None on a CPU.
        ratio: of the time to that of ``all`` in the same round; None unless both verdicts are ``ok``.
    """

    row: str
    variant: str
    verdict: Verdict
    detail: str | None = None
    error: float | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None
    ratio: PairedRatio | None = None


@dataclass
class Results:
    """All results of one run.

    Attributes:
        environment: versions, device and options.
        meaningless: the times only show that the code runs: made on a CPU, or by ``--quick``.
        copies: the first and the last are of the same size, taken before and after everything else.
        kernels: see ``KernelResult``.
        host: see ``HostResult``.
        steps: see ``StepResult``.
        features: see ``FeatureResult``.
        left_out: what was not measured, and why.
    """

    environment: dict[str, str]
    meaningless: bool = False
    copies: list[CopyResult] = field(default_factory=list)
    kernels: list[KernelResult] = field(default_factory=list)
    host: list[HostResult] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    features: list[FeatureResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def copy_bandwidth(self) -> float | None:
        """Bytes per second of the fastest copy of the run, of which fractions are; None before one was measured."""
        return max((copy.bandwidth for copy in self.copies), default=None)

    def copy_of(self, moved_bytes: int) -> CopyResult | None:
        """The copy that moves ``moved_bytes``, or None if none was measured."""
        return next((copy for copy in self.copies if copy.bytes == moved_bytes), None)

    def save(self, path: Path) -> None:
        """Write the results as JSON; a file that was there is replaced at once, never left half written."""
        draft = path.with_name(f"{path.name}.part")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
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
            return cls(
                environment=data["environment"],
                meaningless=data["meaningless"],
                copies=[CopyResult(**_timed(row)) for row in data["copies"]],
                kernels=[KernelResult(**_timed(row)) for row in data["kernels"]],
                host=[HostResult(**_timed(row)) for row in data["host"]],
                steps=[StepResult(**_timed(row)) for row in data["steps"]],
                features=[FeatureResult(**_timed(row)) for row in data["features"]],
                left_out=data["left_out"],
            )
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no results of the benchmarks: {error!r}") from error


def _timed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a result, with its times and its ratio as values again."""
    types = {key: PairedRatio if key == "ratio" else Timing for key, value in row.items() if isinstance(value, dict)}
    return {key: types[key](**value) if key in types else value for key, value in row.items()}

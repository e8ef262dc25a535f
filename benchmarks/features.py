"""``python -m benchmarks features``: the time that each option of ``apply_fused_norm`` saves, on whole models.

The times of one run drift by more than most features bring, so the variants of a model take turns: each round measures
every variant once, in a freshly shuffled order, and a variant is compared with ``all`` of the same round.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_norm.patcher import apply_fused_norm, remove_fused_norm

from .benchmark_run import BenchmarkRun, in_a_line
from .model_cases import GEMMA_1B, LLAMA_1B, QWEN3_06B, ModelCase
from .model_steps import ALLOWED_ERROR, BenchmarkedModel, error_detail, prepare, relative_error, release_memory
from .paired_ratio import PairedRatio
from .results import FeatureResult
from .timing import Timing, peak_memory, synchronized_time

BASE = "all"
"""The variant that the others are compared with."""

CASE_SECONDS = 60.0
"""For the rounds of one case; the fewest rounds are always finished."""

_ROUNDS = (8, 100)
_QUICK_ROUNDS = (2, 2)
_SAMPLE_SECONDS = 0.15  # Of one sample, by several calls where they are short.
_MOST_CALLS = 8

VARIANTS: Mapping[str, Mapping[str, Any] | None] = {
    BASE: {},
    "all again": {},
    "without rope": {"rope": False},
    "without qk": {"qk": False},
    "without residual": {"residual": False},
    "without sandwich": {"sandwich": False},
    "without norms": {"norms": False},
    "without mlp": {"mlp": False},
    "stock": None,
}
"""Options of ``apply_fused_norm`` by variant; None leaves the model as transformers has it.

``all again`` is a control: it is the same as ``all``, so its ratio shows the noise of the comparison. An option also
switches off those that follow it: ``without qk`` is without rope too, ``without residual`` without sandwich, and
``without norms`` leaves the norms of queries and keys, rotations and MLPs."""

_ANCHORS = (QWEN3_06B, GEMMA_1B, LLAMA_1B)
CASES: tuple[ModelCase, ...] = (
    *(ModelCase(*anchor, 4, 4096) for anchor in _ANCHORS),
    *(ModelCase(*anchor, 1, 512) for anchor in _ANCHORS),
    ModelCase(*QWEN3_06B, 1, 32, step="generate"),
)
QUICK: tuple[ModelCase, ...] = (
    ModelCase("gemma3_text", None, 1, 8),
    ModelCase("qwen3", None, 1, 2, step="generate"),
)


def measure(run: BenchmarkRun, cases: Sequence[ModelCase], variants: Sequence[str], dtype: torch.dtype) -> None:
    """Compare the variants on every case, as far as time allows.

    Args:
        run: gives the device and the time left, and takes the results.
        cases: training steps and generations.
        variants: of ``VARIANTS``; ``all`` is always measured, and those that change nothing in a model are left out.
        dtype: of the weights.
    """
    names = [name for name in VARIANTS if name == BASE or name in variants]
    for case in cases:
        if run.out_of_time(f"features of {case.name}"):
            continue
        step = prepare(case, dtype, run.device)
        results = _measure_case(run, case, step, names)
        run.results.features += results
        run.save()
        run.say(f"features of {case.name}: {'; '.join(map(_in_words, results))}")
        del step
        release_memory(run.device)


def _measure_case(
    run: BenchmarkRun, case: ModelCase, step: BenchmarkedModel, names: Sequence[str]
) -> list[FeatureResult]:
    stock = step.outputs_and_gradients()
    results: dict[str, FeatureResult] = {}
    for name in names:
        result = _check(run, case, step, name, stock)
        if result is not None:
            results[name] = result
    seconds = _take_turns(run, step, results)
    for name, samples in seconds.items():
        if results[name].verdict == "ok":
            timing = Timing.of(samples, "wall")
            ratio = PairedRatio.of(samples, seconds[BASE]) if results[BASE].verdict == "ok" else None
            results[name] = replace(results[name], timing=timing, ratio=ratio)
    return list(results.values())


@contextlib.contextmanager
def _switched_to(options: Mapping[str, Any] | None, model: Any) -> Iterator[None]:
    """A context in which ``model`` runs with these options."""
    try:
        if options is not None:
            apply_fused_norm(model, strict=False, **options)
        yield
    finally:
        remove_fused_norm(model)


def _why_left_out(model: Any, options: Mapping[str, Any] | None) -> str | None:
    """The reason why a variant cannot be told from ``all`` or from ``stock`` on this model, or None."""
    if not options:
        return None
    fused = _fused_sites(model, options)
    if not fused:
        return "nothing is left to fuse"
    return "the model has nothing of the kind" if fused == _fused_sites(model, {}) else None


def _fused_sites(model: Any, options: Mapping[str, Any]) -> set[tuple[str, str]]:
    try:
        return {(site.path, site.kind) for site in apply_fused_norm(model, strict=False, **options).fused}
    finally:
        remove_fused_norm(model)


def _check(
    run: BenchmarkRun, case: ModelCase, step: BenchmarkedModel, name: str, stock: Sequence[Tensor]
) -> FeatureResult | None:
    """Hold a variant against stock and measure its peak of memory; None where there is nothing to compare."""
    try:
        why = _why_left_out(step.model, VARIANTS[name])
        if why is not None:
            run.leave_out(f"features of {case.name}, {name}", why)
            return None
        with _switched_to(VARIANTS[name], step.model):
            error = relative_error(step.outputs_and_gradients(), stock)
            wrong = error_detail(error, ALLOWED_ERROR)
            if wrong is not None:
                return FeatureResult(case.name, name, "wrong", wrong, error if math.isfinite(error) else None)
            peak = peak_memory(step.step, run.device)
            return FeatureResult(case.name, name, "ok", error=error, peak_bytes=peak.allocated if peak else None)
    except Exception as failure:  # Of whatever kind: the others are measured all the same.
        return FeatureResult(case.name, name, "failed", in_a_line(failure))


def _take_turns(run: BenchmarkRun, step: BenchmarkedModel, results: dict[str, FeatureResult]) -> dict[str, list[float]]:
    """Measure every right variant once a round; one that raises is marked in ``results`` and measured no more.

    Returns:
        Seconds of a call, one sample for each round, by variant.
    """
    order = [name for name, result in results.items() if result.verdict == "ok"]
    seconds: dict[str, list[float]] = {name: [] for name in order}
    fewest, most = _QUICK_ROUNDS if run.quick else _ROUNDS
    shuffle = random.Random(0).shuffle
    calls = _calls_in_a_sample(run, step) if order else 1
    until = time.perf_counter() + min(CASE_SECONDS, run.remaining())
    for done in range(most):
        if done >= fewest and time.perf_counter() >= until:
            break
        shuffle(order)
        for name in list(order):
            try:
                with _switched_to(VARIANTS[name], step.model):
                    synchronized_time(step.step, calls, run.device)  # Warm-up after the switch.
                    seconds[name].append(synchronized_time(step.step, calls, run.device))
            except Exception as failure:  # Of whatever kind: the others are measured all the same.
                results[name] = replace(results[name], verdict="failed", detail=in_a_line(failure))
                order.remove(name)
    return seconds


def _calls_in_a_sample(run: BenchmarkRun, step: BenchmarkedModel) -> int:
    if run.quick:
        return 1
    synchronized_time(step.step, 1, run.device)
    once = synchronized_time(step.step, 1, run.device)
    return min(max(int(_SAMPLE_SECONDS / once), 1), _MOST_CALLS)


def _in_words(result: FeatureResult) -> str:
    if result.ratio is None:
        return f"{result.variant} {result.verdict}"
    return f"{result.variant} {result.ratio.median:.3f} {result.ratio.verdict}"

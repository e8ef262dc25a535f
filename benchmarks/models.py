"""Steps of whole models of published shapes, beside peers and beside themselves with an option less, in turns.

All variants of a row live at once, as twins of one model that share its weights. Each is held against stock, then its
peak of memory is taken, and then all take turns: a round visits each of them once, in shuffled order. With float8
linears a model is far from stock; what is done to it beside them may take it hardly farther.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .benchmark_run import BenchmarkRun, attempt, in_a_line
from .model_cases import ModelCase
from .model_steps import ALLOWED_ERROR, BenchmarkedModel, prepare, relative_error, release_memory, why_not_here
from .model_variants import COMPILED, VARIANTS, Patched, float8_linears_alone, missing
from .results import Part, Result
from .samples import PairedRatio, Timing
from .timing import Call, host_and_step_time, memory_now, peak_memory

BASE = "fused"
"""The variant that those of ``features`` are compared with, each in the same round."""

ROUNDS: dict[Part, tuple[int, int]] = {"models": (4, 15), "features": (8, 100)}
CASE_SECONDS: dict[Part, float] = {"models": 8.0, "features": 60.0}
"""After which no round is begun beyond the fewest."""

_SAMPLE_SECONDS = 0.15  # Of one sample, by several steps if they are short.
_MOST_CALLS = 8
_FARTHER = 1.25
"""Times the error of float8 linears alone, or of other numbers of dropout, of which no two are the same."""
_MOST_GRAPHS = 256  # Of one frame: the variants of a row share code, which Dynamo compiles for each of them.


@dataclass
class _Row:
    """The variants of a row, and what they are compared with.

    Attributes:
        step: the stock model and its inputs.
        weights: bytes of its parameters and inputs.
        stock: outputs and gradients of stock.
        errors: to stock, of float8 linears alone, by variant.
        results: what is known of each variant so far.
        ready: the variants that are right, as models, and the call that is timed.
    """

    step: BenchmarkedModel
    weights: int
    stock: list[Tensor]
    errors: dict[str, float] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    ready: dict[str, tuple[Patched, Call]] = field(default_factory=dict)


def measure(
    run: BenchmarkRun, cases: Sequence[ModelCase], variants: Sequence[str], dtype: torch.dtype, part: Part = "models"
) -> None:
    """Measure every case, all its variants in turns, as far as time allows.

    ``dtype``: of the weights. ``part``: ``models``, or ``features`` for ratios to ``BASE`` over more rounds.
    """
    for case in cases if variants else ():
        if run.passes_over(f"{part}: {case.name} {', '.join(variants)}", why_not_here(case)):
            continue
        try:
            _measure_case(run, case, variants, dtype, part)
        except Exception as failure:  # Of the stock model, such as too little memory: there is nothing to compare.
            run.passes_over(case.name, in_a_line(failure))
        run.save()


def _measure_case(run: BenchmarkRun, case: ModelCase, variants: Sequence[str], dtype: torch.dtype, part: Part) -> None:
    """Measure one case in this process, which for a sharded model is one of several that do the same."""
    before, _ = memory_now(run.device)
    step = prepare(case, dtype, run.device)
    weights = memory_now(run.device)[0] - before
    row: _Row | None = None
    try:
        with many_graphs():
            row = _Row(step, weights, _stock(step))
            for variant in variants:
                what = f"{case.name} {variant}"
                if not run.passes_over(what, missing(variant, run.device)):
                    result = attempt(Result(part, case.name, variant), partial(_checked, run, row))
                    step.drop_gradients()
                    row.results[variant] = result
                    run.say(f"{what}: {result.verdict}")
            _take_turns(run, row, part)
    finally:
        results = row.results.values() if row else ()
        run.results.rows += results
        for result in results:
            run.say(_in_words(result))
        del step, row
        if any(variant in COMPILED for variant in variants):
            torch.compiler.reset()
        release_memory(run.device)


def many_graphs() -> contextlib.AbstractContextManager[Any]:
    """A context in which Dynamo compiles the same code for many variants, and raises if it would run it eagerly."""
    limits = {"recompile_limit": _MOST_GRAPHS, "accumulated_recompile_limit": 4 * _MOST_GRAPHS}
    context: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(
        {**limits, "fail_on_recompile_limit_hit": True}
    )
    return context


def _stock(step: BenchmarkedModel, seed: int = 0) -> list[Tensor]:
    """Outputs and gradients of stock, with the numbers that dropout draws from a seed."""
    twin = step.twin()
    twin.place()
    return twin.outputs_and_gradients(seed=seed)


def _checked(run: BenchmarkRun, row: _Row, result: Result) -> Result:
    """Make a variant, hold it against stock and measure its peak of memory; one that is right is ready then."""
    release_memory(run.device)
    # Twins leave next to nothing behind, but for graphs, and for sharded ones, which have weights of their own.
    shared = row.weights if row.step.shares_weights else 0
    of_others, reserved_for_others = (held - shared for held in memory_now(run.device))
    twin, patched = _made(result.by, row.step)
    with patched.running():
        error = relative_error(twin.outputs_and_gradients(patched.model), row.stock)
        allowed = _allowed(result.by, error, row)
        result = result.checked(error, allowed, f"relative error {error:.1e} to stock")
        if result.bad:
            return result
        call = partial(twin.step, patched.model)
        peak = peak_memory(call, run.device)
    row.ready[result.by] = patched, call
    if peak is None:
        return result
    allocated, reserved = peak
    return replace(result, peak_bytes=allocated - of_others, reserved_bytes=reserved - reserved_for_others)


def _made(variant: str, step: BenchmarkedModel) -> tuple[BenchmarkedModel, Patched]:
    twin = step.twin()
    patched = VARIANTS[variant](twin)
    twin.place()
    return twin, patched


def _allowed(variant: str, error: float, row: _Row) -> float:
    """The error to stock that a variant may have, one with float8 linears by what these alone have.

    Compiled layers draw numbers of their own for dropout, and may be as far as other numbers take stock.
    """
    linears = float8_linears_alone(variant)
    if linears is None:
        draws = variant in COMPILED and error > ALLOWED_ERROR
        redrawn = relative_error(_stock(row.step, seed=1), row.stock) if draws else 0.0
        return max(ALLOWED_ERROR, _FARTHER * redrawn)
    if linears == variant:
        row.errors[linears] = error
    elif linears not in row.errors:
        twin, patched = _made(linears, row.step)
        with patched.running():
            row.errors[linears] = relative_error(twin.outputs_and_gradients(patched.model), row.stock)
    return _FARTHER * row.errors[linears]


def _take_turns(run: BenchmarkRun, row: _Row, part: Part) -> None:
    """Time every right variant once a round, and write the times into their results."""
    if not row.ready:
        return
    device, step = run.device, row.step
    calls = 1

    def sample(patched: Patched, call: Call) -> tuple[float, float]:
        step.drop_gradients()  # Of one that raised.
        with patched.running():
            call()  # Caches are warm and memory has its shape, whatever ran before.
            return host_and_step_time(call, calls, device)

    fewest, most = ROUNDS[part]
    if step.shares_weights and not run.quick:
        _, once = sample(*next(iter(row.ready.values())))
        calls = min(max(int(_SAMPLE_SECONDS / once), 1), _MOST_CALLS)
    elif not step.shares_weights:  # Processes that share a model have to agree.
        most = fewest
    takes = {variant: partial(sample, *one) for variant, one in row.ready.items()}
    samples = run.take_turns(row.results, takes, (fewest, most), CASE_SECONDS[part])
    times = {name: list(zip(*pairs, strict=True)) for name, pairs in samples.items()}
    for variant, (host, whole) in times.items():
        timing, of_host = (Timing.of([seconds / step.parts for seconds in column], "wall") for column in (whole, host))
        ratio = PairedRatio.of(whole, times[BASE][1]) if part == "features" and BASE in times else None
        row.results[variant] = replace(row.results[variant], timing=timing, host=of_host, ratio=ratio)


def _in_words(result: Result) -> str:
    time = f"{1e3 * result.seconds:.1f} ms" if result.seconds else f"{result.verdict}, {result.detail}"
    memory = f", {result.peak_bytes / 2**30:.1f} GiB" if result.peak_bytes else ""
    ratio = f", {result.ratio.median:.3f} {result.ratio.verdict}" if result.ratio else ""
    return f"{result.row} {result.by}: {time}{memory}{ratio}"

"""``python -m benchmarks models``: steps of whole models of published shapes, beside peers, in interleaved rounds.

All variants of a row live at once, as twins of one model that share its weights. Each is held against stock, then its
peak of memory is taken, and then all take turns: a round visits each of them once, in shuffled order. With float8
linears a model is far from stock; what is done to it beside them may take it hardly farther.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from . import child_processes
from .benchmark_run import BenchmarkRun, in_a_line
from .model_cases import ModelCase
from .model_steps import ALLOWED_ERROR, BenchmarkedModel, error_detail, prepare, relative_error, release_memory
from .model_variants import COMPILED, UNLIKE_STOCK, VARIANTS, Patched, RefusedError, float8_linears_alone, missing
from .results import StepResult
from .timing import Call, Timing, host_and_step_time, peak_memory

ROUNDS = 15
_QUICK_ROUNDS = 2
_SAMPLE_SECONDS = 0.15  # Of one sample, by several steps where they are short.
_MOST_CALLS = 8
_MORE_THAN_FLOAT8 = 1.25  # Times the error of float8 linears alone, which no two orders of sums have the same.
_MOST_GRAPHS = 256  # Of one frame: the variants of a row share code, which Dynamo compiles for each of them.


@dataclass(frozen=True)
class _Candidate:
    """A variant that is right, and what is known of it so far."""

    patched: Patched
    call: Call
    result: StepResult


@dataclass(frozen=True)
class _Known:
    """Results and errors that the variants of a row are compared with.

    Attributes:
        stock: outputs and gradients of stock.
        errors: to stock, of float8 linears alone, by variant.
    """

    stock: list[Tensor]
    errors: dict[str, float] = field(default_factory=dict)


def measure(run: BenchmarkRun, cases: Sequence[ModelCase], variants: Sequence[str], dtype: torch.dtype) -> None:
    """Measure every case, all its variants in turns, as far as time allows.

    Args:
        run: gives the device and the time left, and takes the results.
        cases: models, steps and batches.
        variants: of ``VARIANTS``.
        dtype: of the weights.
    """
    for case in cases if variants else ():
        if run.out_of_time(f"{case.name} {', '.join(variants)}"):
            continue
        if case.in_processes_of_its_own:
            child_processes.measure(run, case, variants, dtype)
        else:
            try:
                measure_here(run, case, variants, dtype)
            except Exception as failure:  # Of the stock model, such as too little memory: there is nothing to compare.
                run.leave_out(case.name, in_a_line(failure))
        run.save()


def measure_here(run: BenchmarkRun, case: ModelCase, variants: Sequence[str], dtype: torch.dtype) -> None:
    """Measure one case in this process, which for a sharded model is one of several that do the same."""
    before = _allocated(run.device)
    step = prepare(case, dtype, run.device)
    weights = _allocated(run.device) - before
    candidates: dict[str, _Candidate] = {}
    try:
        with _room_for_graphs():
            known = _Known(step.outputs_and_gradients())
            for variant in variants:
                what = f"{case.name} {variant}"
                if not run.passes_over(what, missing(variant, run.device)):
                    candidates[variant] = _checked(run, case, variant, step, known, weights)
                    run.say(f"{what}: {candidates[variant].result.verdict}")
            _take_turns(run, step, candidates)
    finally:
        run.results.steps += [candidate.result for candidate in candidates.values()]
        for candidate in candidates.values():
            run.say(_in_words(candidate.result))
        candidates.clear()
        del step
        if any(variant in COMPILED for variant in variants):
            torch.compiler.reset()
        release_memory(run.device)


@contextlib.contextmanager
def _room_for_graphs() -> Iterator[None]:
    """A context in which Dynamo compiles the same code for many variants, and raises where it would run it eagerly."""
    config = torch._dynamo.config
    limits = {"recompile_limit": _MOST_GRAPHS, "accumulated_recompile_limit": 4 * _MOST_GRAPHS}
    with config.patch({**limits, "fail_on_recompile_limit_hit": True}):
        yield


def _checked(
    run: BenchmarkRun,
    case: ModelCase,
    variant: str,
    step: BenchmarkedModel,
    known: _Known,
    weights: int,
) -> _Candidate:
    """Make a variant, hold it against stock and measure its peak of memory."""
    result = StepResult(case.name, variant, "ok")
    nothing = _Candidate(Patched(None), lambda: None, result)
    release_memory(run.device)
    # Twins leave next to nothing behind, but for sharded ones, which have weights of their own.
    of_others = _allocated(run.device) - (weights if step.shares_weights else 0)
    try:
        twin = step.twin()
        patched = VARIANTS[variant](twin)
        twin.place()
        with patched.running():
            if variant not in UNLIKE_STOCK:
                error = relative_error(twin.outputs_and_gradients(patched.model), known.stock)
                result = replace(result, error=error if math.isfinite(error) else None)
                wrong = error_detail(error, _allowed(variant, error, step, known))
                if wrong is not None:
                    return replace(nothing, result=replace(result, verdict="wrong", detail=wrong))
            call = partial(twin.step, patched.model)
            peak = peak_memory(call, run.device)
    except RefusedError as refusal:
        return replace(nothing, result=replace(result, verdict="refused", detail=str(refusal)))
    except Exception as failure:  # Of whatever kind: the others are measured all the same.
        step.drop_gradients()
        return replace(nothing, result=replace(result, verdict="failed", detail=in_a_line(failure)))
    if peak is not None:
        allocated, reserved = (total - of_others for total in peak)
        result = replace(result, peak_bytes=allocated, reserved_bytes=reserved)
    return _Candidate(patched, call, result)


def _allowed(variant: str, error: float, step: BenchmarkedModel, known: _Known) -> float:
    """The error to stock that a variant may have, one with float8 linears by what these alone have."""
    linears = float8_linears_alone(variant)
    if linears is None:
        return ALLOWED_ERROR
    if linears not in known.errors:
        known.errors[linears] = error if linears == variant else _error_of(linears, step, known.stock)
    return _MORE_THAN_FLOAT8 * known.errors[linears]


def _error_of(variant: str, step: BenchmarkedModel, stock: list[Tensor]) -> float:
    twin = step.twin()
    patched = VARIANTS[variant](twin)
    twin.place()
    with patched.running():
        return relative_error(twin.outputs_and_gradients(patched.model), stock)


def _take_turns(run: BenchmarkRun, step: BenchmarkedModel, candidates: dict[str, _Candidate]) -> None:
    """Time every right variant once a round, and write the times into their results.

    One that raises is marked there and timed no more.
    """
    order = [name for name, candidate in candidates.items() if candidate.result.verdict == "ok"]
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in order}
    calls = _calls_in_a_sample(run, step, candidates[order[0]]) if order else 1
    shuffle = random.Random(0).shuffle
    for _ in range(_QUICK_ROUNDS if run.quick else ROUNDS):
        shuffle(order)
        for name in list(order):
            candidate = candidates[name]
            try:
                with candidate.patched.running():
                    candidate.call()  # Caches are warm and memory has its shape, whatever ran before.
                    samples[name].append(host_and_step_time(candidate.call, calls, run.device))
            except Exception as failure:  # Of whatever kind: the others are measured all the same.
                step.drop_gradients()
                result = replace(candidate.result, verdict="failed", detail=in_a_line(failure))
                candidates[name] = replace(candidate, result=result)
                order.remove(name)
    for name in order:
        host, whole = ([seconds / step.parts for seconds in column] for column in zip(*samples[name], strict=True))
        timed = replace(candidates[name].result, timing=Timing.of(whole, "wall"), host=Timing.of(host, "wall"))
        candidates[name] = replace(candidates[name], result=timed)


def _calls_in_a_sample(run: BenchmarkRun, step: BenchmarkedModel, candidate: _Candidate) -> int:
    if run.quick or not step.shares_weights:  # Processes that share a model have to agree.
        return 1
    with candidate.patched.running():
        candidate.call()
        _, once = host_and_step_time(candidate.call, 1, run.device)
    return min(max(int(_SAMPLE_SECONDS / once), 1), _MOST_CALLS)


def _allocated(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.memory_allocated(device)


def _in_words(result: StepResult) -> str:
    time = f"{1e3 * result.timing.median:.1f} ms" if result.timing else f"{result.verdict}, {result.detail}"
    memory = f", {result.peak_bytes / 2**30:.1f} GiB" if result.peak_bytes else ""
    return f"{result.row} {result.variant}: {time}{memory}"

"""``fused-norm bench --tune``: find the fastest launch plans on this device.

Every candidate runs the kernels of norm and add + norm with its plan instead of the shipped one. The result is printed
as rows for the table in ``kernels/plans.py``; nothing is changed by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels import MODES
from ..kernels.plans import BackwardPlan, Device, ForwardPlan, backward_plan, forward_plan, next_power_of_2
from ..kernels.triton.devices import facts_of
from ..kernels.triton.norm_backward import launch_norm_backward
from ..kernels.triton.norm_forward import empty_norm, launch_norm_forward
from . import operator_cases, tables
from .benchmark_run import BenchmarkRun, in_a_line
from .operator_cases import OperatorCase, float64_results, tolerance, worst_error
from .timing import gpu_time, input_sets, own_stream

Plan = TypeVar("Plan", ForwardPlan, BackwardPlan)

_ELEMENTS = 2**25  # Of the input at each width: enough to fill the device.
_TILE = 16384  # The most elements that one program holds.
_LANE = (8, 64)  # The fewest and the most elements of a lane: below, loads are narrow; above, registers spill.

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_WARPS = (2, 4, 8, 16, 32)

WIDTHS = tuple(sorted({case.width for case in operator_cases.TRAINING if "glu" not in case.operator}))


@dataclass(frozen=True)
class Tuned:
    """The best plan for one width, next to the one that ships.

    Attributes:
        operator: ``norm`` or ``add``.
        direction: ``forward`` or ``backward``.
        width: of a row.
        best: the fastest plan.
        seconds: the time of one call with it.
        shipped: the plan in use now.
        shipped_seconds: the time of one call with that; None where it failed.
        tried: the number of candidates that ran and were right.
        failed: the number of those that were wrong or did not fit the device.
    """

    operator: str
    direction: str
    width: int
    best: ForwardPlan | BackwardPlan
    seconds: float
    shipped: ForwardPlan | BackwardPlan
    shipped_seconds: float | None
    tried: int
    failed: int


def candidates(plan: Plan, grid: Mapping[str, Iterable[Any]]) -> list[Plan]:
    """``plan`` and all its variations over ``grid``, values by field; fields that the plan lacks are passed over."""
    names = [name for name in grid if name in {field.name for field in fields(plan)}]
    found = dict.fromkeys([plan])
    for values in itertools.product(*(grid[name] for name in names)):
        found[replace(plan, **dict(zip(names, values, strict=True)))] = None
    return list(found)


def forward_candidates(width: int, device: Device) -> list[ForwardPlan]:
    """The shipped plan for ``width``, then plans that might be faster, in every mode that takes the width."""
    found: dict[ForwardPlan, None] = {forward_plan(width, device): None}
    for mode in MODES:
        try:
            plan = forward_plan(width, device, mode)
        except ValueError:  # This mode does not hold such a row.
            continue
        chunked = mode == "multi_wave_reload"
        grid: dict[str, Iterable[Any]] = {"warps": [*map(device.warps, _WARPS)], "stages": (1, 2, 3)}
        if chunked:
            grid["block"] = [block for block in (2048, 4096, 8192, 16384) if block <= next_power_of_2(width)]
        else:
            grid["rows"] = _ROWS
        if mode == "static_persistent":
            grid["programs"] = [share * device.processors for share in (2, 4, 8, 16)]
        found |= dict.fromkeys(plan for plan in candidates(plan, grid) if chunked or _fits(plan, device))
    return list(found)


def backward_candidates(width: int, column_bytes: int, device: Device, *, summed: bool) -> list[BackwardPlan]:
    """The shipped plan for ``width``, then plans that might be faster; see ``backward_plan`` for the arguments."""
    shipped = backward_plan(width, column_bytes, device, summed=summed)
    grid: dict[str, Iterable[Any]] = {
        "warps": [*map(device.warps, _WARPS)],
        "stages": (1, 2, 3),
        "programs": [share * device.processors for share in (1, 2, 4)],
        "reload": (False, True),
    }
    if shipped.chunked:
        grid |= {"rows": (2, 4, 8), "block": (1024, 2048, 4096)}
    else:
        grid["rows"] = _ROWS
    return [plan for plan in candidates(shipped, grid) if plan == shipped or _fits(plan, device)]


def _fits(plan: ForwardPlan | BackwardPlan, device: Device) -> bool:
    lanes = plan.warps * device.warp_size
    least, most = _LANE
    return plan.rows * plan.block <= _TILE and least <= plan.rows * plan.block / lanes <= most


def tune(run: BenchmarkRun, widths: Sequence[int] | None = None) -> list[Tuned]:
    """Measure the candidates for norm and add + norm, forward and backward, at each width, as far as time allows.

    Args:
        run: gives the device and the time left; its results file is not written.
        widths: row lengths. None means ``WIDTHS``.
    """
    if widths is None:
        widths = (64,) if run.quick else WIDTHS
    found = []
    dtype = torch.bfloat16
    with own_stream(run.device):
        for width, operator in itertools.product(widths, ("norm", "add")):
            rows = 4 if run.quick else max(_ELEMENTS // width, 1)
            case = OperatorCase("add" if operator == "add" else "norm", rows, width)
            if run.out_of_time(case.name):
                continue
            for tuned in tune_case(run, case, dtype):
                if tuned is not None:
                    found.append(tuned)
                    run.say(f"{case.name} {tuned.direction}: {_verdict(tuned)}, {tuned.tried} plans, {tuned.best}")
    return found


def tune_case(run: BenchmarkRun, case: OperatorCase, dtype: torch.dtype) -> list[Tuned | None]:
    """Find the best plans of one case, forward and backward; None where no plan was right."""
    device, facts = run.device, facts_of(run.device)
    spec = case.spec
    count = input_sets(case.bytes("forward", dtype), device)
    sets = [case.inputs(dtype, device, seed=seed) for seed in range(count)]
    outputs, gradients = float64_results(case, sets[0])
    summed = case.operator == "add"
    gradients = [gradients[0], gradients[-1]]  # The residual's gradient is the branch's.

    def forward(plan: ForwardPlan) -> list[Callable[[], tuple[Tensor, ...]]]:
        def call(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, ...]:
            outputs = empty_norm(spec, x, residual, weight, False)
            launch_norm_forward(spec, x, residual, weight, outputs, plan=plan)
            return outputs[:2] if summed else outputs[:1]

        return [partial(call, x, residual, weight) for x, residual, weight in arguments]

    def backward(plan: BackwardPlan) -> list[Callable[[], tuple[Tensor, ...]]]:
        def call(dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
            dx, dw = torch.empty_like(s), torch.empty_like(weight)
            launch_norm_backward(spec, dy, ds, s, weight, rstd, dx, None, dw, plan=plan)
            return dx, dw

        return [partial(call, *values) for values in saved]

    arguments, saved = [], []
    for inputs in sets:
        detached = inputs.detached()
        x, weight = detached[0], detached[-1]
        residual = detached[1] if summed else None
        arguments.append((x, residual, weight))
        _, s, rstd = normed = empty_norm(spec, x, residual, weight, True)
        launch_norm_forward(spec, x, residual, weight, normed)
        assert rstd is not None
        saved.append((inputs.gradients[0], inputs.gradients[1] if summed else None, s, weight, rstd))
    column_bytes = dtype.itemsize * (4 if summed else 3)
    backwards = backward_candidates(case.width, column_bytes, facts, summed=summed)
    return [
        fastest_plan(run, case, "forward", forward, forward_candidates(case.width, facts), outputs, dtype),
        fastest_plan(run, case, "backward", backward, backwards, gradients, dtype),
    ]


def fastest_plan(
    run: BenchmarkRun,
    case: OperatorCase,
    direction: str,
    calls: Callable[[Any], list[Callable[[], tuple[Tensor, ...]]]],
    plans: Sequence[Any],
    exact: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tuned | None:
    """Measure ``plans``, the shipped one first, and return the fastest; None where none was right."""
    times: dict[Any, float] = {}
    failed = 0
    for plan in plans[:3] if run.quick else plans:
        if run.remaining() <= 0:
            run.leave_out(f"{case.name} {direction}", f"{len(plans) - len(times) - failed} plans, out of time")
            break
        try:
            timed_calls = calls(plan)
            if not worst_error(timed_calls[0](), exact) <= tolerance(dtype):
                raise ValueError("wrong result")
            times[plan] = gpu_time(timed_calls, run.device, seconds=run.seconds(0.02)).median
        except Exception as error:  # Too many registers, too much shared memory: the next one may do.
            failed += 1
            run.say(f"{case.name} {direction} {plan}: {in_a_line(error)}")
    if not times:
        return None
    best = min(times, key=lambda plan: times[plan])
    return Tuned(
        case.operator, direction, case.width, best, times[best], plans[0], times.get(plans[0]), len(times), failed
    )


def table(found: Sequence[Tuned]) -> str:
    """A table of the best plans, each of which can be pasted into ``kernels/plans.py``."""
    rows = [("", "direction", "width", "us", "shipped us", "gain", "plan")]
    for tuned in found:
        shipped = tuned.shipped_seconds
        rows.append(
            (
                tuned.operator,
                tuned.direction,
                str(tuned.width),
                f"{1e6 * tuned.seconds:.1f}",
                f"{1e6 * shipped:.1f}" if shipped else "failed",
                f"{shipped / tuned.seconds:.3f}" if shipped else "",
                repr(tuned.best),
            )
        )
    return tables.table(rows)


def _verdict(tuned: Tuned) -> str:
    if tuned.shipped_seconds is None:
        return f"{1e6 * tuned.seconds:.1f} us, and the shipped plan fails"
    return f"{1e6 * tuned.seconds:.1f} us, {tuned.shipped_seconds / tuned.seconds:.2f} times as fast as shipped"

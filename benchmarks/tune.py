"""``python -m benchmarks --tune``: find the fastest launch plans on this device, and write them as a plan file.

Every candidate runs whole operators, captured in CUDA graphs, with its row before the rules of ``kernels/plans.py``. A
row is kept where it is faster than the rules in a second measurement, in turns with them. Nothing is changed by itself:
``kernels/plan_files.py`` says where a file takes effect.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from fused_norm.kernels import plan_files, plans
from fused_norm.kernels.plans import BackwardPlan, Device, ForwardPlan, GluSize, PlanTable, Provenance, Section
from fused_norm.kernels.triton.devices import facts_of, name_of, planned_by

from . import operator_cases, tables
from .benchmark_run import BenchmarkRun, in_a_line
from .operator_cases import DIRECTIONS, GEMMA, LLAMA, Direction, OperatorCase, float64_results, tolerance, worst_error
from .operator_timings import OperatorCall, operator_calls
from .precompile import compile_in_processes
from .providers import FUSED
from .timing import gpu_time, input_sets, own_stream, sampler

_ELEMENTS = 2**25  # Of the input at each width: enough to fill the device.
_LANE = (8, 40)  # The fewest and the most elements of a lane: below, loads are narrow; above, registers spill.
_WIDEST_HEAD = 256
_HEADS, _FEW_HEADS = (32, 8), (2, 1)
_GATE_WIDTH = 8192
_DTYPE = torch.bfloat16
_FEW_ROWS = 64  # For compiling, and for a look at fp32.

_TILES = (1, 2, 4, 8, 16, 32, 64)
_WARPS = (2, 4, 8, 16, 32)
_SHARES = (1, 2, 3, 4)
"""Programs on each processor."""
_STAGES = (1, 2, 3, 4)

FASTER = 1.02
"""A row is kept from here on: how many times as fast as the rules it is."""
_TURNS = 15
_RESERVED = 0.2
"""The share of a time budget that is kept for this comparison."""

WIDTHS = tuple(sorted({case.width for case in operator_cases.TRAINING if "glu" not in case.operator}))


@dataclass(frozen=True)
class Task:
    """One row of a plan table that is to be found.

    Attributes:
        section: of the table.
        width: of a row; None for a gate.
        cases: the operators that would take the row; what counts is the sum of their times.
    """

    section: Section
    width: int | None
    cases: tuple[OperatorCase, ...]

    @property
    def name(self) -> str:
        """For tables and progress."""
        return f"{self.section} {'' if self.width is None else self.width}".rstrip()

    @property
    def direction(self) -> Direction:
        """The direction of the operators that is measured."""
        return DIRECTIONS[self.section.endswith("_backward")]


@dataclass(frozen=True)
class Tuned:
    """The fastest plan found for one row, its time, and the time by the rules.

    Attributes:
        task: the row.
        plan: the fastest of the candidates.
        rules: the row that says what the rules say; see ``rules_plan``.
        seconds: the time of the operators with it.
        rules_seconds: the same by the rules.
        tried: the number of candidates that ran and were right.
        failed: the number of those that were wrong or did not fit the device.
    """

    task: Task
    plan: Any
    rules: Any
    seconds: float
    rules_seconds: float
    tried: int
    failed: int

    @property
    def gain(self) -> float:
        """The time by the rules over the time with the plan: 1.1 is a tenth faster."""
        return self.rules_seconds / self.seconds

    @property
    def kept(self) -> bool:
        """Return whether the row goes into the file: it is faster than the rules and says something else.

        A row of ``forward`` always does, because by the rules the forwards of a width need not share one row.
        """
        return self.gain >= FASTER and (self.plan != self.rules or self.task.section == "forward")


def tasks_for(widths: Iterable[int], *, quick: bool = False) -> list[Task]:
    """The rows for hidden states of ``widths``; for heads too where a head may be as wide, and once for gates."""

    def case(operator: Any, width: int, heads: tuple[int, int] = (0, 0)) -> OperatorCase:
        rows = 4 if quick else max(_ELEMENTS // (width * (sum(heads) or 1)), 1)
        return OperatorCase(operator, rows, width, GEMMA if operator == "sandwich" else LLAMA, heads)

    found = []
    heads = _FEW_HEADS if quick else _HEADS
    for width in widths:
        norm, add, post, sandwich = (case(operator, width) for operator in ("norm", "add", "post", "sandwich"))
        found += [Task("norm_backward", width, (norm,)), Task("add_backward", width, (add,))]
        if width <= plans.WIDEST_SANDWICH_BACKWARD:
            found.append(Task("sandwich_backward", width, (sandwich,)))
        if width <= plans.WIDEST_SANDWICH_FORWARD:
            found.append(Task("forward", width, (norm, add, post, sandwich)))
        if width <= _WIDEST_HEAD and width % 2 == 0:
            qk, rope, rotate = (case(operator, width, heads) for operator in ("qk", "rope", "rotate"))
            found += [
                Task("heads_forward", width, (qk, rope)),
                Task("qk_backward", width, (qk,)),
                Task("qk_rope_backward", width, (rope,)),
                Task("rope", width, (rotate,)),
            ]
    gate = case("swiglu", 64 if quick else _GATE_WIDTH)
    return [*found, Task("glu_forward", None, (gate,)), Task("glu_backward", None, (gate,))]


def rules_plan(task: Task, device: Device) -> Any:
    """The row that says what the rules say, for the first operator of a task in bf16."""
    device = replace(device, table=plans.BUILT_IN)
    width = task.width or 0
    size = _DTYPE.itemsize
    by_section: dict[Section, Callable[[], Any]] = {
        "forward": lambda: plans.forward_plan(width, device),
        "norm_backward": lambda: plans.backward_plan(width, 3 * size, device),
        "add_backward": lambda: plans.backward_plan(width, 4 * size, device, summed=True),
        "sandwich_backward": lambda: plans.sandwich_backward_plan(width, 6 * size, device),
        "heads_forward": lambda: plans.heads_forward_size(width, 0, device, normed=True),
        "qk_backward": lambda: plans.heads_backward_size(width, 0, device),
        "qk_rope_backward": lambda: plans.heads_backward_size(width, width, device),
        "rope": lambda: plans.heads_forward_size(width, width, device, normed=False),
        "glu_forward": lambda: plans.glu_size(False, device),
        "glu_backward": lambda: plans.glu_size(True, device),
    }
    return by_section[task.section]()


def variations(plan: Any, grid: Mapping[str, Iterable[Any]]) -> list[Any]:
    """``plan`` with every combination of the values of ``grid``, by field; fields that it lacks are passed over."""
    names = [name for name in grid if name in {field.name for field in fields(plan)}]
    combinations = itertools.product(*(grid[name] for name in names))
    return [replace(plan, **dict(zip(names, values, strict=True))) for values in combinations]


def tiles(task: Task, device: Device) -> list[Any]:
    """The first round of candidates: the rules' row, then tiles of other sizes in other numbers of warps."""
    rules = rules_plan(task, device)
    grid: dict[str, Iterable[Any]] = {
        "rows": _TILES,
        "warps": [device.warps(warps) for warps in _WARPS],
        "elements": (1024, 2048, 4096, 8192),
        "reload": (False, True),
    }
    found = [rules]
    bases = [rules]
    if isinstance(rules, BackwardPlan) and rules.chunked:
        grid |= {"block": (1024, 2048, 4096), "reload": (False,)}
    elif isinstance(rules, BackwardPlan) and rules.tail:
        bases.append(replace(rules, block=plans.next_power_of_2(task.width or 0), tail=0))
    for base in bases:
        for plan in variations(base, grid):
            if isinstance(plan, BackwardPlan) and not plan.chunked:
                # As many programs as make eight warps on a processor; the next round tries others.
                lanes = plan.warps * device.warp_size
                plan = replace(plan, programs=max(1, 256 // lanes) * device.processors)
            found.append(plan)
    return _possible(task, found, device)


def launches(task: Task, plan: Any, device: Device) -> list[Any]:
    """The second round: ``plan``, then other numbers of programs and of tiles in flight for the same tile."""
    found = [plan]
    shares = [share * device.processors for share in _SHARES]
    if isinstance(plan, ForwardPlan):
        found += [replace(plan, mode="static_persistent", programs=4 * share) for share in shares]
    elif not isinstance(plan, GluSize) and task.direction == "backward":
        found += variations(plan, {"stages": _STAGES, "programs": shares})
    return _possible(task, found, device)


def _possible(task: Task, found: Iterable[Any], device: Device) -> list[Any]:
    """Those that kernels can take and that give each lane enough, and not too much; always the first."""

    def fits(plan: Any) -> bool:
        if any(plan_files.problems(task.section, task.width, plan, device)):
            return False
        elements = plan.elements if hasattr(plan, "elements") else plan.rows * getattr(plan, "columns", plan.block)
        return _LANE[0] <= elements / (plan.warps * device.warp_size) <= _LANE[1]

    first, *others = dict.fromkeys(found)
    return [first, *filter(fits, others)]


def table_with(device: torch.device, rows: Mapping[tuple[Section, int | None], Any]) -> PlanTable:
    """A table of ``rows``, measured here and now."""
    import time

    import triton

    from fused_norm import __version__

    name, capability = name_of(device)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    by_section: dict[Section, dict[int | None, Any]] = {}
    for (section, width), plan in rows.items():
        by_section.setdefault(section, {})[width] = plan
    versions = __version__, torch.__version__, triton.__version__
    return PlanTable(Provenance(name, capability, *versions, date), by_section)


class Prepared:
    """The operators of a task with inputs and exact results, ready to run by any plan."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype = _DTYPE, rows: int | None = None) -> None:
        self.task, self.device, self.dtype = task, device, dtype
        self._prepared = []
        for case in task.cases:
            case = case if rows is None else replace(case, rows=min(rows, case.rows))
            count = 1 if rows is not None else input_sets(case.bytes("forward", dtype), device)
            sets = [case.inputs(dtype, device, seed=seed) for seed in range(count)]
            exact = float64_results(case, sets[0])[DIRECTIONS.index(task.direction)]
            self._prepared.append((FUSED.build(case), sets, exact))

    def table(self, plan: Any) -> PlanTable:
        """The table with this one row, or without any for None."""
        return table_with(self.device, {} if plan is None else {(self.task.section, self.task.width): plan})

    def with_calls(self, plan: Any, use: Callable[[list[OperatorCall]], Any]) -> list[Any]:
        """Hand the calls of each operator to ``use`` while devices plan by ``plan``, and return what it returns.

        ``plan``: None for the rules.

        Raises:
            ValueError: a result is wrong.
        """
        found = []
        backward = self.task.direction == "backward"
        with planned_by(self.table(plan)), torch.set_grad_enabled(backward):
            for function, sets, exact in self._prepared:
                calls = operator_calls(function, self.task.direction, sets)
                if not worst_error(calls[0](), exact) <= tolerance(self.dtype):
                    raise ValueError("wrong result")
                found.append(use(calls))
        return found

    def seconds(self, plan: Any, at_least: float) -> float:
        """The time of all operators together; each is measured for so many seconds."""
        return sum(self.with_calls(plan, lambda calls: gpu_time(calls, self.device, seconds=at_least).median))

    def in_turns(self, plan: Any, turns: int) -> tuple[float, float]:
        """The times by the rules and by ``plan``, medians of samples that were taken in turns."""
        both = [self.with_calls(one, lambda calls: sampler(calls, self.device)) for one in (None, plan)]
        samples = [[sum(take() for take in one) for one in both] for _ in range(turns)]
        by_rules, by_plan = (statistics.median(times) for times in zip(*samples, strict=True))
        return by_rules, by_plan


def tune(run: BenchmarkRun, widths: Sequence[int] | None = None, jobs: int = 0) -> list[Tuned]:
    """Find the best row for each operator and width, as far as time allows.

    Args:
        run: gives the device and the time left; its results file is not written.
        widths: row lengths. None means ``WIDTHS``.
        jobs: processes that compile the candidates before they are measured.
    """
    if widths is None:
        widths = (64,) if run.quick else WIDTHS
    tasks = tasks_for(widths, quick=run.quick)
    pool = multiprocessing.get_context("spawn").Pool(jobs) if jobs else contextlib.nullcontext()
    with own_stream(run.device), planned_by(plans.BUILT_IN), pool as processes:
        return _tune(run, tasks, processes)


def _tune(run: BenchmarkRun, tasks: Sequence[Task], processes: Any) -> list[Tuned]:
    device = facts_of(run.device)
    best: dict[Task, Any] = dict.fromkeys(tasks)
    tried: dict[Task, list[int]] = {task: [0, 0] for task in tasks}
    rounds: list[Callable[[Task], list[Any]]] = [
        partial(tiles, device=device),
        lambda task: [] if best[task] is None else launches(task, best[task], device),
    ]
    for number, candidates in enumerate(rounds, 1):
        found = {task: candidates(task)[: 2 if run.quick else None] for task in tasks}
        if processes is not None:
            kernels_of = {(task, compiled_part(plan)): plan for task, several in found.items() for plan in several}
            every = [(task, plan, str(run.device)) for (task, _), plan in kernels_of.items()]
            compile_in_processes(processes, run, compile_candidate, every, f"plans of round {number}")
        for task, several in found.items():
            if len(several) > 1 and not _late(run, f"round {number} of {task.name}"):
                best[task] = _fastest(run, task, several, tried[task]) or best[task]
    tuned = []
    for task in tasks:
        if best[task] is None or run.out_of_time(f"the comparison of {task.name} with the rules"):
            continue
        with _reported(run, f"{task.name} {best[task]}"):
            Prepared(task, run.device, torch.float32, _FEW_ROWS).with_calls(best[task], len)  # raises where it fails
            times = Prepared(task, run.device).in_turns(best[task], 1 if run.quick else _TURNS)
            one = Tuned(task, best[task], rules_plan(task, device), times[1], times[0], *tried[task])
            tuned.append(one)
            run.say(f"{task.name}: {one.gain:.3f} times as fast as by the rules, {one.tried} plans, {one.plan}")
    return tuned


def _late(run: BenchmarkRun, what: str) -> bool:
    """Return whether what is left of a time budget is kept for the comparison; if so, note ``what`` as left out."""
    if run.budget is None or run.remaining() > _RESERVED * run.budget:
        return False
    run.leave_out(what, f"after {1 - _RESERVED:g} of {run.budget:g} s")
    return True


def _fastest(run: BenchmarkRun, task: Task, candidates: Sequence[Any], tried: list[int]) -> Any:
    """The fastest of the candidates, None where none was right; ``tried`` counts those that were and were not."""
    prepared = Prepared(task, run.device)
    times: dict[Any, float] = {}
    for plan in candidates:
        if _late(run, f"{task.name} from {plan} on"):
            break
        with _reported(run, f"{task.name} {plan}"):
            times[plan] = prepared.seconds(plan, run.seconds(0.01))
    tried[0] += len(times)
    tried[1] += len(candidates) - len(times)
    return min(times, key=lambda plan: times[plan]) if times else None


@contextlib.contextmanager
def _reported(run: BenchmarkRun, what: str) -> Any:
    """A context that ends at an error, which is said: too many registers, too much shared memory; the next may do."""
    try:
        yield
    except Exception as error:
        run.say(f"{what}: {in_a_line(error)}")


def compiled_part(plan: Any) -> Any:
    """Return a plan without its number of programs: plans that are then equal share their compiled kernels."""
    return replace(plan, programs=0) if hasattr(plan, "programs") else plan


def compile_candidate(arguments: tuple[Task, Any, str]) -> str | None:
    """Compile what a candidate runs, and return the error as text, or None."""
    task, plan, name = arguments
    device = torch.device(name)
    try:
        with own_stream(device):
            Prepared(task, device, rows=_FEW_ROWS).with_calls(plan, len)
    except Exception as error:  # The measurement meets it again and reports it.
        return f"{task.name}: {type(error).__name__}"
    return None


def plan_file(found: Sequence[Tuned], device: torch.device) -> str:
    """The text of the file with the rows that are faster than the rules."""
    kept = {(one.task.section, one.task.width): one for one in found if one.kept}
    reasons = {}
    for key, one in kept.items():
        cases = ", ".join(case.name for case in one.task.cases)
        reasons[key] = (
            f"{1e6 * one.seconds:.1f} us, by the rules {1e6 * one.rules_seconds:.1f}: {cases} {_name(_DTYPE)}"
        )
    return plan_files.as_text(table_with(device, {key: one.plan for key, one in kept.items()}), reasons)


def table(found: Sequence[Tuned]) -> str:
    """Return the tuned rows as a table in text, a line for each."""
    lines = [("", "us", "by the rules", "times as fast", "kept", "plan")]
    for one in found:
        times = f"{1e6 * one.seconds:.1f}", f"{1e6 * one.rules_seconds:.1f}", f"{one.gain:.3f}"
        lines.append((one.task.name, *times, "yes" if one.kept else "no", str(one.plan)))
    return tables.table(lines)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

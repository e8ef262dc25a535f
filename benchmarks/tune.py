"""``python -m benchmarks tune``: find the fastest launch plans on this device, as rows for ``plans.TABLES``.

Every candidate runs whole operators in bf16, captured in CUDA graphs, after their results were held against float64. A
row is printed if it is faster than what the device plans by today in a second measurement, in turns with that. Paste
the rows into ``fused_norm/kernels/plans.py``.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from fused_norm import __version__
from fused_norm.kernels import norm_kernels, plans
from fused_norm.kernels.plans import Rule
from fused_norm.kernels.triton.devices import device_props, name_of, use_plans

from . import operator_cases
from .benchmark_run import in_a_line
from .kernels import operator_calls
from .operator_cases import DIRECTIONS, Direction, OperatorCase, float64_results, tolerance, worst_error
from .providers import FUSED
from .samples import in_turns
from .timing import input_sets, own_stream, sampler

_ELEMENTS = 2**25
"""Of the input at each width: enough to fill the device."""
_LANE = (8, 40)
"""The fewest and the most elements of a lane: below, loads are narrow; above, registers spill."""
_TILES = (1, 2, 4, 8, 16, 32, 64)
_WARPS = (2, 4, 8, 16, 32)
_STAGES = (1, 2, 3, 4)
_PROGRAMS = (1, 2, 3, 4)
_FASTER = 1.02
"""A row is printed from here on: how many times as fast it is."""
_TURNS = 15

WIDTHS = tuple(
    sorted({case.width for case in operator_cases.TRAINING if case.operator not in ("glu", "causal_conv1d")})
)


@dataclass(frozen=True)
class Task:
    """One row of a plan table that is to be found.

    Attributes:
        section: of the table.
        width: of a row; 0 for a gate.
        cases: the operators that would take the row; what counts is the sum of their times.
    """

    section: str
    width: int
    cases: tuple[OperatorCase, ...]

    @property
    def direction(self) -> Direction:
        """The direction of the operators that is measured."""
        return DIRECTIONS[self.section.endswith("_backward")]


def tasks_for(widths: Iterable[int]) -> list[Task]:
    """The rows for hidden states of ``widths``; for heads too if a head may be as wide, and once for gates."""

    def case(operator: str, width: int, heads: tuple[int, int] = (0, 0), option: str = "") -> OperatorCase:
        rows = max(_ELEMENTS // (width * (sum(heads) or 1)), 1)
        return OperatorCase(operator, rows, width, heads, option)

    tasks = []
    for width in widths:
        norm, add, norm_add = (case(operator, width) for operator in ("rms_norm", "add_rms_norm", "norm_add"))
        sandwich = case("norm_add_norm", width, option="gemma")
        tasks += [Task("norm_backward", width, (norm,)), Task("add_backward", width, (add,))]
        if width <= norm_kernels.WIDEST_SANDWICH_BACKWARD:
            tasks.append(Task("sandwich_backward", width, (sandwich,)))
        if width <= norm_kernels.WIDEST_SANDWICH_FORWARD:
            tasks.append(Task("forward", width, (norm, add, norm_add, sandwich)))
        if width <= 256 and width % 2 == 0:
            qk, rope = (case(operator, width, (32, 8)) for operator in ("qk_norm", "qk_norm_rope"))
            tasks.append(Task("heads_forward", width, (qk, rope)))
            tasks += [Task("qk_backward", width, (qk,)), Task("qk_rope_backward", width, (rope,))]
    gate = case("glu", 8192, option="silu")
    return [*tasks, Task("glu_forward", 0, (gate,)), Task("glu_backward", 0, (gate,))]


def tiles(task: Task, warp_size: int) -> list[Rule]:
    """The first candidates: tiles of all sizes, and as many programs as make eight warps on a processor."""
    padded = plans.next_power_of_2(task.width)
    sizes = [rows * padded for rows in _TILES] if task.width else [1024, 2048, 4096, 8192]
    rules = []
    for elements, warps in itertools.product(sizes, _WARPS):
        if elements <= norm_kernels.WIDEST_FORWARD and _LANE[0] <= elements / (32 * warps) <= _LANE[1]:
            rules.append(Rule(task.width, elements, warps, max(1, 8 // warps)))
    if task.section in ("norm_backward", "add_backward", "sandwich_backward"):
        rules += [replace(rule, reload=True) for rule in rules]
    return [rule for rule in rules if rule.warps * min(32, warp_size) <= 1024]


class Prepared:
    """The operators of a task with inputs and exact results, ready to run by any rule."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.task, self.device, self.dtype = task, device, dtype
        self._prepared = []
        for case in task.cases:
            count = input_sets(case.bytes("forward", dtype), device)
            sets = [case.inputs(dtype, device, seed=seed) for seed in range(count)]
            exact = float64_results(case, sets[0])[DIRECTIONS.index(task.direction)]
            self._prepared.append((FUSED.build(case), sets, exact))

    def sampler(self, rule: Rule | None) -> Callable[[], float]:
        """What takes a sample of the time of all operators together, in seconds, by ``rule`` or by those of today.

        Raises:
            ValueError: a result is wrong.
        """
        table = device_props(self.device).table
        if rule is not None:
            table = replace(table, rows={self.task.section: (rule,)})
        samplers = []
        with use_plans(table), torch.set_grad_enabled(self.task.direction == "backward"):
            for function, sets, exact in self._prepared:
                calls = operator_calls(function, self.task.direction, sets)
                if not worst_error(calls[0](), exact) <= tolerance(self.dtype):
                    raise ValueError("wrong result")
                samplers.append(sampler(calls, self.device))
        return lambda: sum(sampler.take() for sampler in samplers)

    def fastest(self, candidates: Iterable[Rule]) -> Rule | None:
        """The fastest candidate; None if none can be launched."""
        times = {}
        for rule in candidates:
            try:
                sample = self.sampler(rule)
                times[rule] = min(sample() for _ in range(5))
            except Exception as error:  # too many registers, too much shared memory; the next may do
                sys.stderr.write(f"{self.task.section} {rule}: {in_a_line(error)}\n")
        return min(times, key=lambda rule: times[rule]) if times else None


def tune(task: Task, device: torch.device) -> str | None:
    """The row to paste for a task; None if nothing is faster than today."""
    prepared = Prepared(task, device)
    best = prepared.fastest(tiles(task, device_props(device).warp_size))
    if best is None:
        return None
    candidates = [best]
    if task.direction == "backward" and not task.section.startswith("glu"):
        # Other numbers of programs and of tiles in flight for the same tile.
        candidates += [replace(best, stages=s, programs=p) for s, p in itertools.product(_STAGES, _PROGRAMS)]
    best = prepared.fastest(candidates) or best
    Prepared(task, device, torch.float32).sampler(best)  # raises if it is wrong
    takes = {"today": prepared.sampler(None), "rule": prepared.sampler(best)}
    samples = in_turns(takes, rounds=(_TURNS, _TURNS), seconds=0)
    today, by_row = statistics.median(samples["today"]), statistics.median(samples["rule"])
    if today / by_row < _FASTER:
        return None
    return repr(replace(best, why=f"{1e6 * by_row:.1f}, by the rules {1e6 * today:.1f}"))


def print_rows(device: torch.device, widths: Sequence[int] | None) -> None:
    """Tune rows of these lengths, those of common models for None, and print a table of what is faster."""
    import triton

    rows: dict[str, list[str]] = {}
    with own_stream(device):
        for task in tasks_for(widths or WIDTHS):
            row = tune(task, device)
            sys.stderr.write(f"{task.section} {task.width}: {row or 'as fast as any'}\n")
            if row:
                rows.setdefault(task.section, []).append(row)
    versions = f"fused_norm {__version__}, torch {torch.__version__}, triton {triton.__version__}"
    lines = [f"    {section!r}: ({', '.join(of_section)},),\n" for section, of_section in rows.items()]
    name, capability = name_of(device)
    sys.stdout.write(f"PlanTable({name!r}, {capability!r}, {versions!r}, {{\n{''.join(lines)}}})\n")

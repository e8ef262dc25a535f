"""Tuning tries plans that kernels take, and what it writes is what a device that loads it plans by."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from benchmarks import tune
from benchmarks.operator_cases import OperatorCase
from benchmarks.tune import Prepared, Task, Tuned
from fused_norm.kernels import plan_files, plans
from fused_norm.kernels.plans import SECTIONS, BackwardPlan, Device, ForwardPlan
from fused_norm.kernels.triton.devices import facts_of, planned_by

WIDTHS = (1, 128, 1000, 4096, 5120, 16384, 40000)
DEVICES = pytest.mark.parametrize(
    "device",
    [Device(), Device(46, 32, 101_376), Device(304, 64, 65_536)],
    ids=["H200", "small", "wide warps"],
)
CPU = torch.device("cpu")
NORM = Task("norm_backward", 24, (OperatorCase("norm", 5, 24),))


@dataclass(frozen=True)
class Plan:
    rows: int
    warps: int


def test_variations_are_all_combinations() -> None:
    found = tune.variations(Plan(1, 4), {"rows": (1, 2), "warps": (4, 8), "no_such_field": (1, 2, 3)})
    assert found == [Plan(1, 4), Plan(1, 8), Plan(2, 4), Plan(2, 8)]


def test_every_operator_in_both_directions_has_a_row() -> None:
    tasks = tune.tasks_for([128])
    assert {task.section for task in tasks} == set(SECTIONS)
    measured = {(case.operator, task.direction) for task in tasks for case in task.cases}
    names = ("norm", "add", "sandwich", "qk", "rope", "swiglu")
    both = {(name, direction) for name in names for direction in ("forward", "backward")}
    # The backward of post is the norm's, and that of a rotation its forward the other way.
    assert measured == both | {("post", "forward"), ("rotate", "forward")}
    wide = {task.section for task in tune.tasks_for([40000])}
    assert wide == {"norm_backward", "add_backward", "glu_forward", "glu_backward"}


@DEVICES
def test_candidates_differ_are_possible_and_begin_with_the_rules(device: Device) -> None:
    for task in tune.tasks_for(WIDTHS):
        for found in (tiles := tune.tiles(task, device), tune.launches(task, tiles[-1], device)):
            assert len(set(found)) == len(found)
            for plan in found[1:]:
                assert not list(plan_files.problems(task.section, task.width, plan, device))
        assert tiles[0] == tune.rules_plan(task, device)


@DEVICES
def test_a_file_of_what_the_rules_say_changes_no_plan(device: Device) -> None:
    """The first candidate is what it is called, and a row means to a device what it meant when it was measured."""

    def planned(device: Device) -> Iterable[Any]:
        for width in WIDTHS:
            yield plans.forward_plan(width, device)
            yield plans.backward_plan(width, 6, device)
            yield plans.backward_plan(width, 8, device, summed=True)
            if width <= plans.WIDEST_SANDWICH_BACKWARD:
                yield plans.sandwich_backward_plan(width, 12, device)
        yield plans.heads_forward_plan(32, 8, 128, 0, device)
        yield plans.heads_forward_plan(32, 8, 128, 128, device)
        yield plans.heads_backward_plan(32, 8, 128, 0, 4, 0, device)
        yield plans.heads_backward_plan(32, 8, 128, 128, 4, 4, device)
        yield plans.heads_forward_plan(32, 8, 128, 128, device, normed=False)
        yield plans.glu_plan(None, False, device)
        yield plans.glu_plan(None, True, device)

    rows: dict[Any, dict[Any, Any]] = {}
    for task in tune.tasks_for(WIDTHS):
        rows.setdefault(task.section, {})[task.width] = tune.rules_plan(task, device)
    table = plans.PlanTable(plans.BUILT_IN.provenance, rows)
    assert list(planned(replace(device, table=table))) == list(planned(device))


@pytest.fixture
def everything_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuned, "kept", True)


@pytest.mark.usefixtures("everything_kept")
def test_what_is_written_is_loaded_and_planned_by(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tune, "tasks_for", lambda widths, quick: [NORM])
    (found,) = tune.tune(run, [24])
    assert (found.task, found.failed) == (NORM, 0)
    path = tmp_path / "plans.toml"
    path.write_text(tune.plan_file([found], CPU))
    loaded = plan_files.load(path, facts_of(CPU))
    assert loaded.rows == {"norm_backward": {24: found.plan}}
    assert (loaded.provenance.device, loaded.provenance.torch) == ("cpu", torch.__version__)
    with planned_by(loaded):
        assert plans.backward_plan(24, 6, facts_of(CPU)) == found.plan
    assert "by the rules" in path.read_text()
    assert str(found.plan) in tune.table([found])


@pytest.mark.parametrize(
    "task",
    [NORM, *(pytest.param(task, marks=pytest.mark.slow) for task in tune.tasks_for([24], quick=True)[1:])],
    ids=lambda task: task.name,
)
def test_every_candidate_is_right(run, task) -> None:
    """An operator with a wrong result raises, in bf16 and in fp32."""
    device = facts_of(run.device)
    found = tune.tiles(task, device)
    found = [*found, *tune.launches(task, found[0], device)][:: 6 if task is NORM else 4]
    for dtype in (torch.bfloat16, torch.float32):
        prepared = Prepared(task, run.device, dtype)
        for plan in found:
            assert prepared.with_calls(plan, len) == [1] * len(task.cases)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(plan_files.SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_rows_of_shipped_files_give_right_results(run, path) -> None:
    table = plan_files.load(path, Device())
    widths = {width for rows in table.rows.values() for width in rows if width is not None}
    tasks = {(task.section, task.width): task for task in tune.tasks_for(sorted(widths))}
    for section, rows in table.rows.items():
        for width, plan in rows.items():
            task = tasks[section, width]
            assert Prepared(task, run.device, rows=7).with_calls(plan, len) == [1] * len(task.cases)


def test_operators_run_by_the_plan_that_is_measured(run, monkeypatch) -> None:
    """Also where the same shape was planned before."""
    seen = []
    monkeypatch.setattr(plans, "_fitting", lambda plan, *_: seen.append(plan) or plan)
    prepared = Prepared(NORM, run.device)
    for plan in (None, BackwardPlan(2, 32, 1, 1, 3), BackwardPlan(1, 32, 2, 2, 5), None):
        prepared.with_calls(plan, len)
    rules = tune.rules_plan(NORM, Device(processors=4))
    assert [plan.rows for plan in seen[:3]] == [rules.rows, 2, 1]


def test_a_plan_that_fails_is_counted_and_the_next_one_tried(run, monkeypatch) -> None:
    good, bad, said = BackwardPlan(1, 32, 1, 1, 3), BackwardPlan(2, 32, 1, 1, 3), []
    run.say = said.append

    def seconds(self: Prepared, plan: Any, at_least: float) -> float:
        if plan == bad:
            raise RuntimeError("out of resources")
        return 1.0

    monkeypatch.setattr(Prepared, "seconds", seconds)
    tried = [0, 0]
    assert tune._fastest(run, NORM, [bad, good], tried) == good
    assert tried == [1, 1]
    assert said == [f"norm_backward 24 {bad}: RuntimeError: out of resources"]
    assert tune._fastest(run, NORM, [bad], tried) is None


def test_a_wrong_result_is_no_time(run, monkeypatch) -> None:
    prepared = Prepared(Task("forward", 24, (OperatorCase("norm", 5, 24),)), run.device)
    ((function, sets, exact),) = prepared._prepared
    prepared._prepared = [(lambda *given: [1.1 * y for y in function(*given)], sets, exact)]
    with pytest.raises(ValueError, match="wrong result"):
        prepared.seconds(None, 0.0)


def test_only_rows_that_are_other_than_the_rules_and_clearly_faster_are_written() -> None:
    plan, other = ForwardPlan("multi_wave_cached", 1, 32, 1), ForwardPlan("multi_wave_cached", 2, 32, 1)
    rows = (("forward", plan, 1.01), ("forward", plan, 1.03), ("rope", plan, 1.03), ("rope", other, 1.03))
    found = [
        Tuned(Task(section, width, ()), one, plan, 1.0, gain, 3, 0)
        for width, (section, one, gain) in enumerate(rows, 24)
    ]
    written = re.findall(r"width = (\d+)", tune.plan_file(found, CPU))
    assert written == ["25", "27"], "a row of all forwards may be what the rules say for one of them"


def test_candidates_that_share_their_kernels_are_compiled_once() -> None:
    task = Task("qk_backward", 128, ())
    found = tune.launches(task, tune.rules_plan(task, Device()), Device())
    assert {tune.compiled_part(plan).stages for plan in found} == {1, 2, 3, 4}
    assert len({tune.compiled_part(plan) for plan in found}) == 4 < len(found)


def test_what_time_does_not_allow_is_left_out_in_words(run) -> None:
    run.budget = 0.0
    assert tune.tune(run, [24]) == []
    assert "round 1 of norm_backward 24: after 0.8 of 0 s" in run.results.left_out

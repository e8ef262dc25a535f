"""Pages show the stored run: each of their tables is what ``python -m benchmarks.pages`` would write."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.first_screen import cells_of
from benchmarks.pages import (
    ROOT,
    STEPS,
    TABLES,
    first_table,
    less_memory,
    losses,
    options,
    stored_run,
    with_tables,
)
from benchmarks.results import Result, Results


@pytest.fixture(scope="module")
def run() -> Results:
    return stored_run()


@pytest.mark.parametrize("page", TABLES)
def test_a_page_has_the_tables_of_the_stored_run(page: str, run: Results) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == with_tables(page, text, run), "python -m benchmarks.pages writes them"


def test_another_run_changes_its_table_and_nothing_else(run: Results) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    timed = [row for row in run.of("models") if row.timing]
    doubled = [replace(row, timing=replace(row.timing, median=2 * row.timing.median)) for row in timed]
    changed = with_tables("README.md", text, replace(run, rows=doubled))
    cells, before = cells_of(changed.partition("<!-- steps")[2]), cells_of(text.partition("<!-- steps")[2])
    times = {place: float(cell.strip("*")) for place, cell in before.items() if place[1].endswith("ms")}
    assert {place: float(cells[place].strip("*")) for place in times} == pytest.approx(
        {place: 2 * time for place, time in times.items()}, abs=0.11
    )
    table = re.compile(r"(?<=-->\n).*(?=<!-- end of steps)", re.DOTALL)
    assert table.sub("", changed) == table.sub("", text)


def test_a_page_without_its_marks_is_an_error(run: Results) -> None:
    with pytest.raises(ValueError, match=r"README\.md has no place for steps"):
        with_tables("README.md", "no marks", run)


def test_the_first_table_has_every_step_of_4x4096_tokens_with_a_loss(run: Results) -> None:
    measured = {row.row for row in run.of("models") if row.row.endswith(" 4x4096") and " loss " in row.row}
    (without,) = {*STEPS.values()} - measured
    assert "qlora" in without
    assert [row for row, _ in cells_of(first_table(run))][:: len(cells_of(first_table(run))) // len(STEPS)] == [*STEPS]


def test_a_step_that_is_missing_is_an_error(run: Results) -> None:
    rows = [row for row in run.rows if row.row != "Qwen3-0.6B loss 4x4096"]
    with pytest.raises(KeyError, match=re.escape("Qwen3-0.6B loss 4x4096")):
        first_table(replace(run, rows=rows))


def test_options_are_those_of_the_first_step(run: Results) -> None:
    (other, *_) = run.of("features")
    again = replace(run, rows=[*run.rows, replace(other, row="Qwen3-0.6B 1x512", by="of another step")])
    assert options(again) == options(run)


def test_heads_with_their_loss_have_a_table(run: Results) -> None:
    timing = run.of("models")[0].timing
    assert timing is not None
    made = Result("losses", "linear_cross_entropy 8x4x9", "fused", "training", timing=replace(timing, median=0.0281))
    rows = [
        replace(made, extra_bytes=3 * 2**29, errors={"loss": 1e-4, "dX": 2e-3, "dW": 1.69e-3}),
        replace(made, by="frozen", extra_bytes=2**30, errors={"loss": 1e-4, "dX": 2e-3}),
        replace(made, by="products", extra_bytes=2**32),
        replace(made, by="torch", timing=None, verdict="refused"),
        replace(made, by="liger", timing=None, verdict="wrong", error=1.0),
    ]
    assert losses(replace(run, rows=rows)).splitlines()[-1] == (
        "| linear_cross_entropy 8x4x9 | 28.1, 1.5, 1.69e-03 | 28.1, 1.0, 2.00e-03 | 28.1, 4.0 | - | wrong |"
    )
    assert losses(replace(run, rows=[])) == ""


def test_what_was_not_measured_is_an_empty_cell(run: Results) -> None:
    cells = cells_of(less_memory(run))
    assert cells["compiled, budget 0.7", "its LoRA"] == ""
    assert cells["`recompute=True`", "Qwen3-0.6B"] == "149.9, 13.9"

"""Pages show the stored run: their tables are what ``python -m benchmarks.pages`` would write, and so is a chart."""

import re
from dataclasses import replace

import pytest

from benchmarks.first_screen import cells_of
from benchmarks.markdown import page_with
from benchmarks.pages import ROOT, STEPS, TABLES, first_table, stored_run, with_tables
from benchmarks.time_and_memory import LINES, MODELS, draw


@pytest.fixture(scope="module")
def run():
    return stored_run()


@pytest.mark.parametrize("page", TABLES)
def test_a_page_has_the_tables_of_the_stored_run(page, run):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == with_tables(page, text, run), "python -m benchmarks.pages writes them"


def test_a_table_replaces_what_stands_between_its_marks_and_a_page_without_them_is_an_error():
    page = "before <!-- steps: from a run -->\nold\n<!-- end of steps --> <!-- losses --><!-- end of losses -->"
    after = " <!-- losses --><!-- end of losses -->"
    expected = f"before <!-- steps: from a run -->\n\n| 1 |\n\n<!-- end of steps -->{after}"
    assert page_with(page, "steps", "| 1 |") == page_with(expected, "steps", "| 1 |") == expected
    with pytest.raises(ValueError, match="0 places for options"):
        page_with(page, "options", "| 1 |")


def test_another_run_changes_the_times_of_its_table(run):
    timed = [row for row in run.of("models") if row.timing]
    doubled = [replace(row, timing=replace(row.timing, median=2 * row.timing.median)) for row in timed]
    cells, before = cells_of(first_table(replace(run, rows=doubled))), cells_of(first_table(run))
    times = {place: float(cell.strip("*")) for place, cell in before.items() if place[1].endswith("ms")}
    twice = {place: 2 * time for place, time in times.items()}
    assert {place: float(cells[place].strip("*")) for place in times} == pytest.approx(twice, abs=0.11)


def test_the_first_table_has_every_step_that_the_readme_names_with_its_loss(run):
    assert {*STEPS.values()} <= {row.row for row in run.of("models") if " loss " in row.row}
    assert list(dict.fromkeys(row for row, _ in cells_of(first_table(run)))) == [*STEPS]
    rows = [row for row in run.rows if row.row != "Qwen3-0.6B loss 4x4096"]
    with pytest.raises(KeyError, match=re.escape("Qwen3-0.6B loss 4x4096")):
        first_table(replace(run, rows=rows))


def test_the_chart_of_time_and_memory_is_drawn_from_the_run(run):
    picture = (ROOT / "docs" / "time_and_memory.svg").read_text(encoding="utf-8")
    assert {*MODELS, *LINES} <= set(re.findall(r"<text [^>]*>([^<]+)</text>", picture))
    curves = re.compile(r'<path d="(M [^"]+)" clip-path')
    assert curves.findall(picture) == curves.findall(draw(run))
    assert len(curves.findall(picture)) == len(MODELS) * len(LINES)

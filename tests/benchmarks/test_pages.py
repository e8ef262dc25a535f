"""Pages show the stored run: their tables are what ``python -m benchmarks.pages`` would write, and so is a chart."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks.cards import LIMITS, MOST
from benchmarks.first_screen import cells_of
from benchmarks.pages import CARDS, KINDS, ROOT, STEPS, TABLES, first_table, stored_run, with_tables
from benchmarks.time_and_memory import LINES, MODELS, draw


@pytest.fixture(scope="module")
def run():
    return stored_run()


@pytest.mark.parametrize("page", TABLES)
def test_a_page_has_the_tables_of_the_stored_run(page, run):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == with_tables(page, text, run), "python -m benchmarks.pages writes them"


def test_the_first_table_has_every_step_that_the_readme_names_with_its_loss(run):
    assert {*STEPS.values()} <= {
        row.row for row in run.of("models", "trainers") if row.part == "trainers" or " loss " in row.row
    }
    assert [line.split(" | ")[0].removeprefix("| ") for line in first_table(run).splitlines()[2:]] == [*STEPS]
    rows = [row for row in run.rows if row.row != "SFT Qwen3-0.6B 4x4096"]
    with pytest.raises(KeyError, match=re.escape("SFT Qwen3-0.6B 4x4096")):
        first_table(replace(run, rows=rows))


def test_every_stored_step_is_in_one_table(run):
    tables = [TABLES["docs/numbers.md"][kind](run) for kind in ("trainers", *KINDS)]
    rows = [row for table in tables for row in dict.fromkeys(row for row, _ in cells_of(table))]
    assert sorted(rows) == sorted({row.row for row in run.of("models", "trainers")})


@pytest.mark.parametrize(
    ("mark", "recipe"),
    [("qlora", "Qwen3-8B, QLoRA"), ("lora", "Qwen3-8B, LoRA"), ("full", "Qwen3-1.7B, full")],
)
def test_a_card_has_the_tokens_and_the_speed_that_were_measured(mark, recipe):
    levels = json.loads(CARDS.read_text(encoding="utf-8"))["recipes"][recipe]
    cells = cells_of(TABLES["docs/settings.md"][f"cards-{mark}"](None))
    assert len(cells) == len(levels) * (len(LIMITS) + 1)
    for level, found in levels.items():
        for cell in found:
            shown = cells[level, f"{cell['card']} GB"].replace(",", "")
            assert shown == f"{cell['tokens']}{'+' if cell['tokens'] == MOST else ''}"
        (largest,) = (cell for cell in found if cell["card"] == 80)
        shown = float(cells[level, "tokens a second"].replace(",", ""))
        assert shown == pytest.approx(largest["tokens"] / largest["seconds"], abs=0.5)


def test_the_chart_of_time_and_memory_is_drawn_from_the_run(run):
    picture = (ROOT / "docs" / "time_and_memory.svg").read_text(encoding="utf-8")
    assert {*MODELS, *LINES} <= set(re.findall(r"<text [^>]*>([^<]+)</text>", picture))
    curves = re.compile(r'<path d="(M [^"]+)" clip-path')
    assert curves.findall(picture) == curves.findall(draw(run))
    assert len(curves.findall(picture)) == len(MODELS) * len(LINES)

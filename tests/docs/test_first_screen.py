"""What a newcomer sees first is short, and its figures, in table and picture, are those that were measured."""

from __future__ import annotations

import re

import pytest

from benchmarks.first_screen import COLOURS, DRAWN, cells_of, draw, steps_of_the_readme
from benchmarks.results import Results
from benchmarks.tables import steps_in_markdown

from .markdown_pages import ROOT, blocks_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBERS = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
PICTURE = (ROOT / "docs" / "first_screen.svg").read_text(encoding="utf-8")

WORDS = {
    "full fine-tuning": "train ",
    "bf16 autocast": "autocast ",
    "autocast, checkpointing": "autocast checkpointing ",
    "checkpointing": "checkpointing ",
    "LoRA": "lora ",
    "LoRA, checkpointing": "lora checkpointing ",
    "QLoRA, checkpointing": "qlora checkpointing ",
    "bf16": "",
}
"""The README's names for steps, and the words for them on the page of numbers."""

VARIANTS = {"stock": "stock", "Liger": "liger", "compiled": "compile-layers", "ours": "fused"}
"""The README's columns, and the variants that they are."""

SHOWN = cells_of(steps_of_the_readme())


def table_of(mark: str) -> str:
    """The table between two marks of the page of numbers."""
    return NUMBERS.partition(f"<!-- {mark}:")[2].partition(f"<!-- end of {mark}")[0]


def measured(run: str) -> dict[tuple[str, str], str]:
    """The cells of all steps of a stored run."""
    return cells_of(steps_in_markdown(Results.load(ROOT / "benchmarks" / "results" / run / "results.json")) or "")


def test_the_table_of_steps_is_that_of_the_measured_run() -> None:
    assert cells_of(table_of("steps")) == measured("h200-steps")


def test_other_kinds_of_step_are_those_of_the_measured_runs() -> None:
    cells = cells_of(table_of("kinds"))
    for (row, column), cell in list(cells.items()):
        if column == "else":
            for variant, milliseconds, gibibytes in re.findall(r"`(\S+)` ([\d.*]+), ([\d.]+)", cell):
                cells |= {(row, f"{variant} ms"): milliseconds, (row, f"{variant} GiB"): gibibytes}
            del cells[row, column]
    of_run = measured("h200-kinds-of-step")
    assert {place: cell for place, cell in cells.items() if cell} == {
        place: cell for place, cell in of_run.items() if cell not in ("", "-") and " lora " not in place[0]
    }


def test_steps_that_people_run_are_those_of_the_measured_runs() -> None:
    assert cells_of(table_of("trained")) == measured("h200-trained-steps")


def test_the_first_table_has_the_newest_numbers_of_each_step() -> None:
    known: dict[tuple[str, str], str] = {}
    for table in map(table_of, ("steps", "kinds", "trained")):
        known |= {place: cell for place, cell in cells_of(table).items() if cell}
    for (row, column), cell in SHOWN.items():
        step, _, model = row.rpartition(", ")
        variant, unit = column.split()
        assert cell == known.get((f"{model} {WORDS[step]}4x4096", f"{VARIANTS[variant]} {unit}"), ""), (row, column)
    assert {row.rpartition(", ")[0] for row, _ in SHOWN} == {*WORDS}


def ahead_of_ours(other: str, unit: str) -> dict[str, float]:
    """The steps in which another column is below ours, with its share of ours."""
    numbers = {place: float(cell.strip("*")) for place, cell in SHOWN.items() if cell}
    shares = {
        row: numbers[row, f"{other} {unit}"] / numbers[row, f"ours {unit}"]
        for row, column in numbers
        if column == f"{other} {unit}"
    }
    return {row: share for row, share in shares.items() if share < 1}


def test_where_others_are_ahead_is_said() -> None:
    said = " ".join(README.split())
    compiled = {row: round(100 * (1 / share - 1)) for row, share in ahead_of_ours("compiled", "ms").items()}
    gemma, quantised = compiled["LoRA, gemma-3-1b-pt"], compiled["QLoRA, checkpointing, Qwen3-0.6B"]
    assert len(compiled) == 2
    assert f"they take {gemma} and {quantised} % longer than compiled layers" in said
    liger = ahead_of_ours("Liger", "GiB")
    halves = [share for row, share in liger.items() if row.startswith("full fine-tuning")]
    assert halves == pytest.approx([0.5] * 3, abs=0.1)
    assert [*ahead_of_ours("Liger", "ms")] == ["full fine-tuning, Llama-3.2-1B"]
    assert "it takes about half of our memory, and less time in Llama." in said


def test_the_picture_shows_the_cells_of_the_table() -> None:
    drawn = {cell.strip("*") for (row, _), cell in SHOWN.items() if row in DRAWN and cell}
    written = re.findall(r"<text [^>]*>([^<]+)</text>", PICTURE)
    assert {text for text in written if re.fullmatch(r"\d+\.\d", text)} >= drawn
    assert {*COLOURS, *DRAWN.values()} <= {*written}


def test_a_drawing_has_a_bar_for_every_number_and_none_for_an_empty_cell() -> None:
    cells = {(row, f"{name} {unit}"): "" for row in DRAWN for name in COLOURS for unit in ("ms", "GiB")}
    full = [place for place in cells if place[0] != "LoRA, Qwen3-0.6B" or place[1].startswith("ours")]
    cells |= {place: f"{number}.5" for number, place in enumerate(full, 100)}
    svg = draw({"stock": [3.0, 2.0], "fused": [3.0, 2.0]}, cells)
    assert sorted(re.findall(r">(1\d\d\.5)</text>", svg)) == [f"{number}.5" for number in range(100, 126)]
    assert "prefers-color-scheme: dark" in svg


def test_the_readme_comes_to_the_point() -> None:
    before_code = README.partition("```python")[0]
    prose = re.sub(r"<!--[^>]*-->|!\[[^\]]*\]\([^)]*\)|^[|#`].*$", "", before_code, flags=re.MULTILINE)
    assert 5 < len(re.findall(r"[.!?]\s", prose)) <= 12
    report = next(block.printed for block in blocks_of(README) if block.language == "python")
    assert max(map(len, report.splitlines())) <= 80

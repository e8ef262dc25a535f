"""The table and the chart of time beside memory, on the page of options, show the stored run."""

from __future__ import annotations

import re

from benchmarks.time_and_memory import LINES, MODELS, draw, stored_rows

from .markdown_pages import ROOT

PAGE = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
TABLE = PAGE.partition(f"| | {' | '.join(MODELS)} |\n")[2].partition("\n\n")[0]


def test_the_table_has_every_row_of_the_run_and_no_other() -> None:
    found = {}
    for line in TABLE.splitlines()[1:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = "recompute" if name == "`recompute=True`" else re.sub(r'`recompute="(\w+)"`', r"\1", name)
        for model, cell in zip(MODELS, cells, strict=True):
            if cell:
                found[f"{model} {name}"] = [float(number) for number in cell.split(", ")]
    assert found == {name: list(row) for name, row in stored_rows().items()}


def test_the_chart_is_drawn_from_the_run() -> None:
    picture = (ROOT / "docs" / "time_and_memory.svg").read_text(encoding="utf-8")
    written = set(re.findall(r"<text [^>]*>([^<]+)</text>", picture))
    assert {*MODELS, *LINES} <= written
    curves = re.compile(r'<path d="(M [^"]+)" clip-path')
    assert curves.findall(picture) == curves.findall(draw(stored_rows()))
    assert len(curves.findall(picture)) == len(MODELS) * len(LINES)

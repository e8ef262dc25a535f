"""The top of the README is short, and the figures in its table and picture were measured."""

import re

from benchmarks.first_screen import COLOURS, DRAWN, cells_of
from benchmarks.pages import first_table, step_of, stored_run

from .markdown_pages import ROOT, blocks_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURE = (ROOT / "docs" / "first_screen.svg").read_text(encoding="utf-8")

SHOWN = cells_of(first_table(stored_run()))


def ahead_of_ours(competitor, unit):
    """Return the steps in which a competitor is below ours, with the ratio."""
    cells = {row: cell for (row, column), cell in SHOWN.items() if column == f"{competitor} {unit}" and cell}
    shares = {row: float(cell.strip("*")) / float(SHOWN[row, f"ours {unit}"].strip("*")) for row, cell in cells.items()}
    return {row: share for row, share in shares.items() if share < 1}


def test_where_others_are_ahead_is_said():
    text = " ".join(README.split())
    run = stored_run()
    assert not ahead_of_ours("compiled", "ms")
    short = [step_of(run, "Qwen3-0.6B 1x512", variant) for variant in ("compile-layers", "fused")]
    assert short[0].seconds < short[1].seconds
    assert "Compiled layers may be ahead if a step waits for the host, as in bf16 at [1x512 tokens]" in text
    shares = []
    for row in {row.row for row in run.rows if " dropout " in row.row and " loss " in row.row}:
        compiled, ours = (step_of(run, row, by) for by in ("compile-layers", "fused"))
        shares.append(ours.seconds / compiled.seconds)
    least, most = (f"{share:.2f}".removeprefix("0") for share in (min(shares), max(shares)))
    assert f"without dropout ([with it](docs/numbers.md#steps): {least} to {most} of compiled)" in text
    assert not ahead_of_ours("Liger", "ms")
    assert min(ahead_of_ours("Liger", "GiB").values()) > 0.94


def test_the_picture_shows_the_cells_of_the_table():
    drawn = {cell.strip("*") for (row, _), cell in SHOWN.items() if row in DRAWN and cell}
    written = re.findall(r"<text [^>]*>([^<]+)</text>", PICTURE)
    assert {text for text in written if re.fullmatch(r"\d+\.\d", text)} >= drawn
    assert {*COLOURS, *DRAWN.values()} <= {*written}


def test_the_readme_comes_to_the_point():
    before_code = README.partition("```python")[0]
    prose = re.sub(r"<!--[^>]*-->|!\[[^\]]*\]\([^)]*\)|^[|#`].*$", "", before_code, flags=re.MULTILINE)
    assert 2 <= len(re.findall(r"[.!?]\s", prose)) <= 6
    assert "apply_fused_norm(model)" in "".join(README.splitlines()[:36])
    report = next(block.printed for block in blocks_of(README) if block.language == "python")
    assert max(map(len, report.splitlines())) <= 80

"""The top of the README is short, and the figures in its table and picture were measured."""

import re

from benchmarks.first_screen import COLOURS, DRAWN, cells_of
from benchmarks.pages import first_table, step_of, stored_run

from .markdown_pages import ROOT, blocks_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURE = (ROOT / "docs" / "first_screen.svg").read_text(encoding="utf-8")

SHOWN = cells_of(first_table(stored_run()))


def share_of(other, unit):
    """Return ours over another column, by rows that have both."""
    cells = {row: cell for (row, column), cell in SHOWN.items() if column == f"{other} {unit}" and cell}
    return {row: float(SHOWN[row, f"ours {unit}"].strip("*")) / float(cell.strip("*")) for row, cell in cells.items()}


def test_the_first_sentences_say_what_was_measured():
    run, text = stored_run(), " ".join(README.split())
    long, short = "SFT Qwen3-0.6B lora 4x4096", "SFT Qwen3-0.6B lora 1x512"
    stock, ours = (step_of(run, long, variant) for variant in ("stock", "fused"))
    assert stock.seconds / ours.seconds > 2
    assert 0.63 < ours.peak_bytes / stock.peak_bytes < 0.69
    time, memory = (
        [f"{value:.{digits}f}" for value in pair]
        for pair, digits in (
            ((1e3 * ours.seconds, 1e3 * stock.seconds), 0),
            ((ours.peak_bytes / 2**30, stock.peak_bytes / 2**30), 1),
        )
    )
    assert "becomes twice as fast, in two thirds of the memory" in text
    assert f"takes {time[0]} ms instead of {time[1]} on an H200, and {memory[0]} GiB instead of {memory[1]}." in text
    times = [f"{1e3 * step_of(run, short, variant).seconds:.0f}" for variant in ("fused", "stock", "fused-graphs")]
    assert "A short step of 512 tokens takes {} ms instead of {}, and {} with CUDA graphs on.".format(*times) in text


def test_where_others_are_ahead_is_said():
    text = " ".join(README.split())
    run = stored_run()
    assert {row for row, share in share_of("compiled", "ms").items() if share > 1} == {"DPO, LoRA, 2x512"}
    assert "without graphs compiled layers are ahead there" in text
    assert share_of("ours, graphs", "ms")["DPO, LoRA, 2x512"] > 1.1
    shares = []
    for row in {row.row for row in run.rows if " dropout " in row.row and " loss " in row.row}:
        compiled, ours = (step_of(run, row, by) for by in ("compile-layers", "fused"))
        shares.append(ours.seconds / compiled.seconds)
    least, most = (f"{share:.2f}".removeprefix("0") for share in (min(shares), max(shares)))
    assert f"With dropout of .05, steps of LoRA and QLoRA take {least} to {most} of the time of compiled layers" in text
    assert max(share_of("Liger", "ms").values()) < 1
    assert max(share_of("Liger", "GiB").values()) < 1.06


def test_the_picture_shows_the_cells_of_the_table():
    drawn = {cell.strip("*") for (row, _), cell in SHOWN.items() if row in DRAWN and cell}
    written = re.findall(r"<text [^>]*>([^<]+)</text>", PICTURE)
    assert {text for text in written if re.fullmatch(r"\d+\.\d", text)} >= drawn
    assert {*COLOURS, *DRAWN.values()} <= {*written}


def test_the_readme_comes_to_the_point():
    before_code = README.partition("```python")[0]
    prose = re.sub(r"<!--[^>]*-->|!\[[^\]]*\]\([^)]*\)|^[|#`].*$", "", before_code, flags=re.MULTILINE)
    assert 2 <= len(re.findall(r"[.!?]\s", prose)) <= 6
    assert "apply_fused_norm(model)" in "".join(README.splitlines()[:32])
    report = next(block.printed for block in blocks_of(README) if block.language == "python")
    assert max(map(len, report.splitlines())) <= 80

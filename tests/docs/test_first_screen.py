"""The top of the README is short, and the figures in its table and picture were measured."""

import re

from benchmarks.first_screen import COLOURS, DRAWN, cells_of
from benchmarks.pages import STEPS, first_table, step_of, stored_run

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
    steps = {
        (length, variant): step_of(run, f"SFT Qwen3-0.6B lora {length}", variant)
        for length in ("4x4096", "1x512")
        for variant in ("stock", "fused", "fused-graphs")
    }
    stock, graphs = (steps["4x4096", variant] for variant in ("stock", "fused-graphs"))
    assert stock.seconds / graphs.seconds > 2
    assert 0.63 < graphs.peak_bytes / stock.peak_bytes < 0.69
    assert "becomes twice as fast, in two thirds of the memory" in text
    long, short = ([f"{1e3 * steps[length, by].seconds:.0f}" for by in ("fused-graphs", "stock", "fused")]
                   for length in ("4x4096", "1x512"))  # fmt: skip
    memory = [f"{step.peak_bytes / 2**30:.1f}" for step in (graphs, stock)]
    assert "takes {} ms instead of {} on an H200, and {} GiB instead of {};".format(*long[:2], *memory) in text
    assert "; a short step of 512 tokens takes {} ms instead of {}.".format(*short) in text
    assert f"Without graphs they take {long[2]} and {short[2]}." in text


def test_where_others_are_ahead_is_said():
    text = " ".join(README.split())
    run = stored_run()
    behind = {row for row, share in share_of("compiled", "ms").items() if share > 1}
    assert behind == {"SFT, LoRA, 4x4096", "DPO, LoRA, 2x512"}
    assert "Without them, LoRA and DPO are level with compiled layers here" in text
    for row in behind:
        ours, compiled = (step_of(run, STEPS[row], by).timing for by in ("fused", "compile-layers"))
        assert ours.low < compiled.high
        assert step_of(run, STEPS[row], "fused-graphs").seconds < compiled.median
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

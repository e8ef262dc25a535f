"""Results survive a file, and tables and charts show them."""

import re
from dataclasses import replace

import pytest
import torch

from benchmarks import plots, tables
from benchmarks.operator_cases import DIRECTIONS, OperatorCase
from benchmarks.results import Result, Results
from benchmarks.samples import PairedRatio, Timing

COPY = 4e12
CASES = [
    OperatorCase.named(name)
    for name in ("rms_norm 8192x2048", "add_rms_norm 8192x4096", "rms_norm 8192x4096", "qk_norm_rope 16384x(32+8)x128",
                 "norm_add 8192x4096", "rms_norm 1x4096")
]  # fmt: skip
FRACTIONS = {"stock": 0.1, "quack": 0.8, "fused": 0.9}
ROW = "Qwen3-0.6B 4x4096"


def seconds(value):
    return Timing(value, 0.99 * value, 1.01 * value, 9, "graph")


def kernel(case, provider, direction):
    moved = case.bytes(direction, torch.bfloat16)
    time = moved / COPY / FRACTIONS[provider]
    return Result("kernels", case.name, provider, direction, "bfloat16", timing=seconds(time), bytes=moved)


def copy(moved, time):
    return Result("copy", str(moved), "copy", bytes=moved, timing=seconds(time))


STEPS = [
    Result(
        "models", ROW, "stock", timing=seconds(0.2956), host=seconds(0.02), peak_bytes=2**35, reserved_bytes=33 * 2**30
    ),
    Result("models", ROW, "fused", timing=seconds(0.2), peak_bytes=20 * 2**30),
    Result("models", ROW, "liger", verdict="refused", detail="no such patch"),
    Result("models", "Qwen3-0.6B generate 1x32", "stock", verdict="wrong", detail="relative error 1"),
]
FEATURES = [
    Result("features", ROW, "fused", timing=seconds(0.02), ratio=PairedRatio(1.0, 1.0, 1.0, 30)),
    Result("features", ROW, "without rope", timing=seconds(0.021), ratio=PairedRatio(1.05, 1.01, 1.08, 30)),
]


@pytest.fixture
def results():
    rows = [copy(2**31, 2**31 / COPY)]
    rows += [kernel(case, provider, direction) for case in CASES for provider in FRACTIONS for direction in DIRECTIONS]
    rows += [
        Result("host", f"rms_norm 16x1024{chain}", "torch", kind, timing=seconds(time))
        for chain in ("", " in a chain of 32")
        for kind, time in (("forward", 9e-6), ("training", 42e-6))
    ]
    return Results({"GPU 0": "a GPU"}, rows=[*rows, *STEPS, *FEATURES], left_out=["liger: is not installed"])


def cells(text, start, nth=0):
    """Return the cells of the nth line with this beginning."""
    lines = [line for line in text.splitlines() if re.match(rf"{re.escape(start)}\s", line)]
    return re.split(r"\s{2,}", lines[nth])


def test_results_survive_a_file_and_what_only_former_runs_have_measured_is_left_out(results, tmp_path):
    path = tmp_path / "results.json"
    results.save(path)
    assert Results.load(path) == results
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    path.write_text(path.read_text().replace('"part": "kernels"', '"profiled": 1e-5, "part": "kernels"'))
    assert Results.load(path) == results


@pytest.mark.parametrize("text", ["", "[]", '{"environment": {}}', '{"rows": 3}', '{"rows": [{"colour": 1}]}'])
def test_a_file_of_something_else_is_named(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json holds no results"):
        Results.load(path)


def test_operators_stand_together_beside_their_peers_and_a_copy_of_the_same_bytes(results):
    results.rows.append(copy(2 * 8192 * 4096 * 2, 2 * 8192 * 4096 * 2 / COPY * 2))
    text = tables.describe(results)
    assert cells(text, "rms_norm 8192x4096") == [
        "rms_norm 8192x4096", ".10 / .10", ".80 / .80", "*.90 / *.90", ".50", "1.12 / 1.12",
    ]  # fmt: skip
    listed = re.findall(r"^(\w+ \d+x\S+) ", text, re.MULTILINE)[: len(CASES)]
    assert listed[:3] == ["rms_norm 8192x2048", "rms_norm 8192x4096", "rms_norm 1x4096"]
    small = cells(text, "rms_norm 1x4096")[3]
    assert small.startswith(f"*{1e6 * 2 * 8192 / COPY / 0.9:.1f} us"), "launches bound it"


@pytest.mark.parametrize("place", [0, 1])
def test_fractions_are_of_the_fastest_copy_of_the_run(results, place):
    results.rows.insert(place, copy(2**31, 2**31 / COPY / 2))
    results.rows.append(copy(2**20, 2**20))
    assert results.copy_bandwidth == pytest.approx(2 * COPY), "a slow small one does not count"
    assert cells(tables.describe(results), "rms_norm 8192x4096")[3] == "*.45 / *.45"


def test_the_fastest_is_marked_whoever_it_is(results):
    results.rows = [replace(row, timing=seconds(row.seconds / 2)) if row.by == "quack" else row for row in results.rows]
    row = cells(tables.describe(results), "add_rms_norm 8192x4096")
    assert (row[2], row[-1]) == ("*1.60 / *1.60", "0.56 / 0.56")


def test_what_was_not_timed_is_listed_with_its_reason(results):
    bad = replace(results.rows[1], verdict="wrong", detail="relative error 1", timing=None)
    events = replace(results.rows[2], timing=replace(results.rows[2].timing, method="events"))
    results.rows[1:3] = bad, events
    text = tables.describe(results)
    assert f"stock, {bad.row} bfloat16 forward: wrong, relative error 1" in text
    assert f"liger, {ROW}: refused, no such patch" in text
    assert cells(text, bad.row)[1] == "wrong / .10"
    assert "liger: is not installed" in text
    assert f"host time may be in it: stock {events.row} backward" in text


def test_beside_modes_the_table_says_whether_the_default_is_the_fastest(results):
    fused = replace(results.rows[1], by="fused")
    cached = replace(fused, by="multi_wave_cached", timing=seconds(fused.seconds / 2))
    refused = replace(fused, by="static_persistent", verdict="refused", timing=None)
    results.rows = [results.rows[0], fused, cached, refused]
    assert cells(tables.describe(results), "rms_norm 8192x2048")[1:] == [".10", "*.20", "-", "0.50"]


def test_memory_has_a_table_where_it_was_measured(results):
    assert "Memory" not in tables.describe(results)
    row = results.rows[1]
    results.rows[1:3] = replace(row, extra_bytes=3 * 2**19), replace(row, kind="backward", extra_bytes=2**21)
    text = tables.describe(results)
    assert cells(text[text.index("Memory, bfloat16: MiB at the peak") :], row.row)[1] == "1.5 / 2.0"


LOSS = Result("losses", "linear_cross_entropy 8x4x9", "fused", "training", timing=seconds(0.0281),
              extra_bytes=3 * 2**29, errors={"loss": 1e-4, "dX": 2e-3, "dW": None})  # fmt: skip


def losses(*measured):
    floor = replace(LOSS, by="products", timing=seconds(0.02), errors=None)
    refused = replace(LOSS, by="torch", verdict="refused", detail="it has no softcap", timing=None, errors=None)
    return [*measured, floor, refused]


def test_losses_have_a_table_of_times_memory_and_errors(results):
    row = LOSS.row
    results.rows += losses(replace(LOSS, by="stock", timing=replace(seconds(0.05), method="events")), LOSS)
    text = tables.describe(results)
    assert cells(text, row) == [row, "stock", "50.0", "49.5 to 50.5", "1.5", "1.00e-04", "2.00e-03", "not finite", "9"]
    assert re.search(r"^ +fused +\*28.1 +27.8 to 28.4 +1.5 ", text, re.MULTILINE), "the floor is no implementation"
    assert re.search(r"^ +products +20.0 ", text, re.MULTILINE)
    assert f"torch, {row} training: refused, it has no softcap" in text
    assert "Not capturable" not in text


def test_steps_options_and_host_time_have_their_tables(results):
    text = tables.describe(results)
    assert cells(text, ROW, 1) == [ROW, "stock", "295.6", "292.6 to 298.6", "20.0", "19.8 to 20.2", "32.0", "33.0", "9"]
    assert re.search(r"^ +fused +\*200.0 +198.0 to 202.0", text, re.MULTILINE)
    assert cells(text, "rms_norm 16x1024 in a chain of 32") == ["rms_norm 16x1024 in a chain of 32", "9.0 / 42.0"]
    without = re.search(r"^ +(without rope .*)$", text, re.MULTILINE)[1]
    assert re.split(r"\s{2,}", without)[-3:] == ["1.050", "1.010 to 1.080", "slower"]


def test_the_fastest_step_is_marked_where_its_quartiles_are_apart_from_all_others():
    def marked(**steps):
        rows = [Result("models", "row", name, timing=timing) for name, timing in steps.items()]
        page, text = tables.steps_in_markdown(Results({}, rows=rows)), tables.describe(Results({}, rows=rows))
        numbers = re.findall(r"\*\*([\d.]+)\*\*", page), re.findall(r"\s\*([\d.]+)", text)
        assert numbers[1] == 2 * numbers[0], "beside the others and in its own line"
        return numbers[0]

    fused, slower = Timing(0.1, 0.09, 0.11, 15, "wall"), Timing(0.13, 0.12, 0.14, 15, "wall")
    near, faster = Timing(0.13, 0.105, 0.14, 15, "wall"), Timing(0.08, 0.07, 0.085, 15, "wall")
    assert marked(fused=fused, stock=slower) == ["100.0"]
    assert marked(fused=fused, stock=near) == []
    assert marked(fused=fused, stock=faster) == ["80.0"], "whoever it is"
    assert marked(fused=fused, stock=slower, liger=near) == [], "also from one that is third"
    assert marked(fused=Timing.of([0.1], "wall"), stock=Timing.of([0.2], "wall")) == [], "a sample has no quartiles"
    assert marked(fused=fused) == [], "alone it is not faster than any"


def test_steps_and_losses_have_a_line_each_on_pages_and_variants_a_column_of_time_and_one_of_memory(results):
    assert tables.steps_in_markdown(results).splitlines() == [
        "| step | stock ms | GiB | fused ms | GiB | liger ms | GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| Qwen3-0.6B 4x4096 | 295.6 | 32.0 | **200.0** | 20.0 | - |  |",
        "| Qwen3-0.6B generate 1x32 | wrong |  |  |  |  |  |",
    ]
    assert cells(tables.describe(results), ROW) == [ROW, "295.6", "32.0", "*200.0", "20.0", "-"]
    assert tables.steps_in_markdown(Results({})) is None
    results.rows += losses(replace(LOSS, by="frozen", errors={"loss": 1e-4, "dX": 2e-3}), replace(LOSS, by="dW"))
    assert tables.losses_in_markdown(results).splitlines()[-1] == (
        "| linear_cross_entropy 8x4x9 | 28.1, 1.5, 2.00e-03 | 28.1, 1.5, not finite | 20.0, 1.5 | - |"
    )


def test_a_known_gpu_has_its_data_sheet_and_meaningless_times_are_called_so(results):
    text = tables.describe(results)
    assert "data sheet" not in text
    assert "MEAN NOTHING" not in text
    results.environment["GPU 0"], results.meaningless = "NVIDIA H200, capability 9.0, 140 GiB", True
    text = tables.describe(results)
    assert "data sheet, TB/s: 4.80; fractions of the copy's bandwidth times .83 are" in text
    assert text.startswith("THESE TIMES MEAN NOTHING")
    assert tables.describe(Results({"GPU 0": "a GPU"})) == "GPU 0: a GPU", "nothing measured is no error"


@pytest.mark.slow
def test_charts_are_drawn_of_what_was_measured(results, tmp_path):
    pytest.importorskip("matplotlib")
    written = plots.draw(results, tmp_path)
    assert [path.name for path in written] == ["bandwidth.png", "blocks.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert plots.draw(Results({}), tmp_path) == []

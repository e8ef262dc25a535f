"""Results survive a file, and tables and charts say what is in them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from benchmarks import plots, tables
from benchmarks.model_variants import VARIANTS
from benchmarks.operator_cases import DIRECTIONS, OperatorCase
from benchmarks.paired_ratio import PairedRatio
from benchmarks.results import CopyResult, FeatureResult, HostResult, KernelResult, Results, StepResult
from benchmarks.timing import Timing

COPY = 4e12
CASES = (
    OperatorCase("norm", 8192, 2048),
    OperatorCase("norm", 8192, 4096),
    OperatorCase("add", 8192, 4096),
    OperatorCase("rope", 16384, 128, heads=(32, 8)),
    OperatorCase("post", 8192, 4096),
    OperatorCase("norm", 1, 4096),
)
FRACTIONS = {"stock": 0.1, "quack": 0.8, "fused": 0.9}


def seconds(value):
    return Timing(value, 0.99 * value, 1.01 * value, 9, "graph")


def kernel(case, provider, direction, fraction):
    moved = case.bytes(direction, torch.bfloat16)
    time = moved / COPY / fraction
    return KernelResult(
        part="kernels",
        case=case.name,
        group=case.group,
        rows=case.rows,
        width=case.width,
        dtype="bfloat16",
        provider=provider,
        direction=direction,
        bytes=moved,
        cold=True,
        verdict="ok",
        error=0.003,
        timing=seconds(time),
        profiled=time / 2,
    )


def feature(variant, time, ratio):
    return FeatureResult("Qwen3-0.6B 1x512", variant, "ok", None, 0.01, seconds(time), 2**31, ratio)


@pytest.fixture
def results():
    return Results(
        {"GPU 0": "a GPU"},
        copies=[CopyResult(2**31, seconds(2**31 / COPY))],
        kernels=[
            kernel(case, provider, direction, fraction)
            for case in CASES
            for provider, fraction in FRACTIONS.items()
            for direction in DIRECTIONS
        ],
        host=[HostResult("norm", "torch", chain, seconds(9e-6), seconds(42e-6)) for chain in (1, 32)],
        steps=[
            StepResult(
                "Qwen3-0.6B 4x4096",
                "stock",
                "ok",
                timing=seconds(0.2956),
                host=seconds(0.02),
                peak_bytes=32 * 2**30,
                reserved_bytes=33 * 2**30,
            ),
            StepResult("Qwen3-0.6B 4x4096", "fused", "ok", timing=seconds(0.2), peak_bytes=20 * 2**30),
            StepResult("Qwen3-0.6B 4x4096", "liger", "refused", "no such patch"),
            *(StepResult("Qwen3-4B 2x4096", variant, "ok", timing=seconds(0.5)) for variant in VARIANTS),
        ],
        features=[
            feature("all", 0.02, PairedRatio(1.0, 1.0, 1.0, 30)),
            feature("without rope", 0.021, PairedRatio(1.05, 1.01, 1.08, 30)),
            FeatureResult("Qwen3-0.6B 1x512", "stock", "wrong", "relative error 1", 1.0),
        ],
        left_out=["liger: liger_kernel is not installed"],
    )


def line(text, start, nth=0):
    return [line for line in text.splitlines() if re.match(rf"({start}|{re.escape(start)})\s", line)][nth]


def test_results_survive_a_file(results, tmp_path):
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == results
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"environment": {}}', '{"kernels": 3}'])
def test_a_file_of_something_else_is_named(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json holds no results"):
        Results.load(path)


def test_a_slow_small_copy_does_not_count(results):
    results.copies.append(CopyResult(2**20, seconds(2**20)))
    assert results.copy_bandwidth == pytest.approx(COPY)
    assert re.split(r"\s{2,}", line(tables.describe(results), "norm 8192x4096")) == [
        "norm 8192x4096", ".10 / .10", ".80 / .80", "*.90 / *.90", "1.12 / 1.12",
    ]  # fmt: skip


@pytest.mark.parametrize("place", [0, 1])
def test_fractions_are_of_the_fastest_copy_of_the_run(results, place):
    results.copies.insert(place, CopyResult(2**31, seconds(2**31 / COPY / 2)))
    assert results.copy_bandwidth == pytest.approx(2 * COPY)
    assert ".45 / *.45" in line(tables.describe(results), "norm 8192x4096")


def test_blocks_have_their_rows_in_order(results):
    lines = tables.describe(results).splitlines()
    large = [line.partition("  ")[0] for line in lines if re.match(r"(norm|add|post|rope) \d", line)]
    cases = ["norm 8192x2048", "norm 8192x4096", "add 8192x4096", "post 8192x4096", "rope 16384x(32+8)x128"]
    assert large[: len(cases)] == cases
    assert ".80 / .80" in line(tables.describe(results), "rope 16384x(32+8)x128")


def test_the_profilers_times_have_a_table_of_their_own(results):
    assert "*1.80 / *1.80" in line(tables.describe(results), "norm 8192x4096", 1)


def test_small_cases_are_in_microseconds(results):
    moved = 2 * 4096 * 2
    assert f"*{1e6 * moved / COPY / 0.9:.1f}" in line(tables.describe(results), "norm 1x4096")


def test_the_fastest_is_marked_whoever_it_is(results):
    results.kernels = [
        replace(row, timing=seconds(row.timing.median / 2)) if row.provider == "quack" else row
        for row in results.kernels
    ]
    row = line(tables.describe(results), "add 8192x4096")
    assert "*1.60 / *1.60" in row
    assert row.endswith("0.56 / 0.56")


def test_what_was_not_timed_is_listed_with_its_reason(results):
    bad = replace(results.kernels[0], verdict="wrong", detail="relative error 1", timing=None, profiled=None)
    results.kernels[0] = bad
    text = tables.describe(results)
    assert f"stock, {bad.case} bfloat16 forward: relative error 1" in text
    assert "wrong / .10" in line(text, bad.case)
    assert "liger: liger_kernel is not installed" in text


def test_times_by_events_are_marked(results):
    timing = replace(results.kernels[0].timing, method="events")
    results.kernels[0] = replace(results.kernels[0], timing=timing)
    assert f"host time may be in it: stock {results.kernels[0].case} forward" in tables.describe(results)


def test_modes_have_a_table_where_a_refusal_is_a_dash(results):
    results.kernels = [
        replace(results.kernels[0], part="modes", provider="fused"),
        replace(results.kernels[0], part="modes", provider="multi_wave_cached", verdict="refused", timing=None),
    ]
    cells = re.split(r"\s{2,}", line(tables.describe(results), "norm 8192x2048"))
    assert cells == ["norm 8192x2048", "*.10", "-"]


def test_modes_say_by_graph_and_by_profiler_whether_the_default_is_the_fastest(results):
    fused, other = (replace(results.kernels[0], part="modes", provider=name) for name in ("fused", "multi_wave_cached"))
    results.kernels = [fused, replace(other, timing=seconds(fused.timing.median / 2), profiled=2 * fused.profiled)]
    text = tables.describe(results)
    assert "bfloat16, by CUDA graph; fused: as it chooses" in text
    found = [re.split(r"\s{2,}", line(text, "norm 8192x2048", nth)) for nth in (0, 1)]
    assert found == [["norm 8192x2048", ".10", "*.20", "0.50"], ["norm 8192x2048", "*.20", ".10", "2.00"]]


def test_memory_has_a_table_of_those_that_were_measured(results):
    assert "Memory" not in tables.describe(results)
    results.kernels = [
        replace(row, extra_bytes=3 * 2**19 if row.direction == "forward" else 2**21)
        if (row.case, row.provider) == ("norm 8192x2048", "fused")
        else row
        for row in results.kernels
    ]
    text = tables.describe(results)
    memory = text[text.index("Memory, bfloat16: MiB at the peak") :]
    assert re.split(r"\s{2,}", line(memory, "norm 8192x2048")) == ["norm 8192x2048", "1.5 / 2.0"]
    assert "norm 8192x4096" not in memory


def test_steps_and_host_time_have_their_tables(results):
    text = tables.describe(results)
    assert re.split(r"\s{2,}", line(text, "Qwen3-0.6B 4x4096")) == [
        "Qwen3-0.6B 4x4096", "stock", "295.6", "292.6 to 298.6", "20.0", "19.8 to 20.2", "32.0", "33.0", "9",
    ]  # fmt: skip
    assert re.split(r"\s{2,}", line(text, r"  +fused").strip())[:3] == ["fused", "*200.0", "198.0 to 202.0"]
    assert line(text, "torch").split("  ")[1].strip() == "9.0 / 42.0"
    assert "Qwen3-0.6B 4x4096 liger: refused, no such patch" in text


def test_the_fastest_step_is_marked_where_its_quartiles_are_apart_from_all_others(results):
    results.kernels = []

    def marked(fused, *others):
        results.steps = [StepResult("row", "fused", "ok", timing=fused)]
        results.steps += [StepResult("row", name, "ok", timing=timing) for name, timing in others]
        page, text = tables.steps_in_markdown(results), tables.describe(results)
        found = re.findall(r"\*\*([\d.]+)\*\*", page), re.findall(r"\s\*([\d.]+)", text)
        assert found[0] == found[1]
        return found[0]

    fused = Timing(0.1, 0.09, 0.11, 15, "wall")
    assert marked(fused, ("stock", Timing(0.13, 0.12, 0.14, 15, "wall"))) == ["100.0"]
    assert marked(fused, ("stock", Timing(0.13, 0.105, 0.14, 15, "wall"))) == []
    assert marked(fused, ("stock", Timing(0.08, 0.07, 0.085, 15, "wall"))) == ["80.0"], "whoever it is"
    apart, near = Timing(0.12, 0.115, 0.13, 15, "wall"), Timing(0.13, 0.105, 0.14, 15, "wall")
    assert marked(fused, ("stock", apart), ("liger", near)) == [], "also from one that is third"
    assert marked(fused, ("stock", apart), ("identity", Timing(0.08, 0.07, 0.085, 15, "wall"))) == ["100.0"]
    assert marked(Timing.of([0.1], "wall"), ("stock", Timing.of([0.2], "wall"))) == [], "one sample has no quartiles"
    assert marked(fused) == [], "alone it is not faster than any"


def test_the_page_has_a_line_for_each_row_and_a_column_for_each_variant(results):
    results.steps = [row for row in results.steps if row.row == "Qwen3-0.6B 4x4096"]
    results.steps.append(StepResult("Qwen3-0.6B generate 1x32", "stock", "wrong"))
    assert tables.steps_in_markdown(results).splitlines() == [
        "| | stock | fused | liger |",
        "|---|---|---|---|",
        "| Qwen3-0.6B 4x4096 | 295.6, 32.0 | **200.0**, 20.0 | - |",
        "| Qwen3-0.6B generate 1x32 | wrong |  |  |",
    ]
    assert tables.steps_in_markdown(Results({})) is None


def test_the_copy_is_held_against_the_data_sheet_of_a_gpu_that_is_known(results):
    assert "data sheet" not in tables.describe(results)
    results.environment["GPU 0"] = "NVIDIA H200, capability 9.0, 140 GiB"
    assert "data sheet, TB/s: 4.80; fractions of the copy's bandwidth times .83 are" in tables.describe(results)


def test_features_have_a_table_with_interval_and_verdict(results):
    text = tables.describe(results)
    every, without = line(text, "Qwen3-0.6B 1x512"), line(text, r"  +without rope")
    stock = line(text, r"  +stock", nth=-1)
    assert every.split() == ["Qwen3-0.6B", "1x512", "all", "20.0", "1", "2.00", "30"]
    assert re.split(r"\s{2,}", without.strip()) == [
        "without rope", "21.0", "1.050", "1.010 to 1.080", "slower", "2.00", "30",
    ]  # fmt: skip
    assert stock.split() == ["stock", "wrong"]
    assert "Qwen3-0.6B 1x512, stock: wrong, relative error 1" in text


def test_meaningless_times_are_called_so(results):
    assert "MEAN NOTHING" not in tables.describe(results)
    results.meaningless = True
    assert tables.describe(results).startswith("THESE TIMES MEAN NOTHING")


def test_nothing_measured_is_no_error():
    assert tables.describe(Results({"GPU 0": "a GPU"})) == "GPU 0: a GPU"


def test_charts_are_drawn_for_light_and_dark(results, tmp_path):
    pytest.importorskip("matplotlib")
    written = plots.draw(results, tmp_path)
    charts = ("bandwidth", "blocks", "step-time", "memory")
    assert {path.name for path in written} == {f"{name}-{theme}.png" for name in charts for theme in ("light", "dark")}
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_there_are_no_charts_of_what_was_not_measured(tmp_path):
    pytest.importorskip("matplotlib")
    assert plots.draw(Results({}), tmp_path) == []

"""Results as text: a table for each part of the benchmarks, of cases by providers or variants."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import get_args

from fused_norm.kernels import MODES

from .features import BASE
from .model_variants import UNLIKE_STOCK
from .operator_cases import DIRECTIONS, Direction, OperatorName
from .providers import FUSED, PROVIDERS
from .results import FeatureResult, KernelResult, Results, StepResult
from .timing import Timing

_GROUPS = ("norm", "gemma", *get_args(OperatorName)[1:])
_DATA_SHEETS = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA A100-SXM4-80GB": 2.039e12}
"""Bytes per second of the memory of a GPU, as its maker gives them."""

_SMALL = 3e-6  # Cases whose bytes a copy moves in less time are in microseconds: they are bound by launches.


def describe(results: Results) -> str:
    """Describe a run: its environment, every table that there are results for, and what was left out."""
    parts = []
    if results.meaningless:
        parts.append("THESE TIMES MEAN NOTHING: a quick run shows that the code works.")
    parts.append("\n".join(f"{key}: {value}" for key, value in results.environment.items()))
    copy = results.copy_bandwidth
    if copy:
        parts.append(
            f"copy bandwidth, TB/s: {copy / 1e12:.2f}, of the fastest of {len(results.copies)} copies in the run"
            f"{_beside_data_sheet(results, copy)}"
        )
        for dtype in dict.fromkeys(row.dtype for row in results.kernels):
            rows = [row for row in results.kernels if row.dtype == dtype]
            parts += _kernel_tables([row for row in rows if row.part == "kernels"], copy, results, dtype)
            parts += _mode_tables([row for row in rows if row.part == "modes"], copy, dtype)
            parts += _memory_table([row for row in rows if row.part == "kernels"], dtype)
    parts += filter(None, (_host_table(results), _step_table(results), _feature_table(results)))
    bad = [row for row in results.kernels if row.verdict in ("wrong", "failed")]
    if bad:
        parts.append(
            "Not timed:\n" + "\n".join(f"  {r.provider}, {r.case} {r.dtype} {r.direction}: {r.detail}" for r in bad)
        )
    spreads = [(row.timing.high - row.timing.low) / row.timing.median for row in results.kernels if row.timing]
    if spreads:
        middle, most = statistics.median(spreads), max(spreads)
        parts.append(f"Spread of kernel times, quartile to quartile: {middle:.1%} in the middle, {most:.1%} at most")
    by_events = [row for row in results.kernels if row.timing and row.timing.method == "events"]
    if by_events:
        names = ", ".join(f"{row.provider} {row.case} {row.direction}" for row in by_events)
        parts.append(f"Not capturable in a CUDA graph, so host time may be in it: {names}")
    if results.left_out:
        parts.append("Left out:\n" + "\n".join(f"  {line}" for line in results.left_out))
    return "\n\n".join(parts)


def _beside_data_sheet(results: Results, copy: float) -> str:
    sheet = _DATA_SHEETS.get(results.environment.get("GPU 0", "").partition(",")[0])
    if sheet is None:
        return ""
    share = _fraction(copy / sheet)
    return (
        f"\ndata sheet, TB/s: {sheet / 1e12:.2f}; fractions of the copy's bandwidth times {share} are fractions of it"
    )


def _kernel_tables(rows: Sequence[KernelResult], copy: float, results: Results, dtype: str) -> list[str]:
    names = [name for name in PROVIDERS if any(row.provider == name for row in rows)]
    cases = _cases(rows)
    large = [case for case in cases if not _is_small(rows, case, copy)]
    small = [case for case in cases if case not in large]
    parts = []
    for title, profiled in (("CUDA graph", False), ("torch.profiler", True)):
        if large and any(_seconds(row, profiled) for row in rows):
            header = ["", *names, "copy", "fused/best peer"]
            body = [
                [
                    case,
                    *_cells(rows, case, names, profiled, copy),
                    _pair(_copy_fraction(rows, case, direction, results, copy) for direction in DIRECTIONS),
                    _pair(_lead(rows, case, direction, profiled) for direction in DIRECTIONS),
                ]
                for case in large
            ]
            parts.append(
                f"Fraction of the fastest copy's bandwidth, forward / backward, {dtype}, by {title}; * is the fastest; "
                f"copy: of the same bytes, by CUDA graph; last: how many times as fast\n{table([header, *body])}"
            )
        if small and any(_seconds(row, profiled) for row in rows):
            header = ["", *names, "fused/best peer"]
            body = [
                [
                    case,
                    *_cells(rows, case, names, profiled, None),
                    _pair(_lead(rows, case, direction, profiled) for direction in DIRECTIONS),
                ]
                for case in small
            ]
            parts.append(f"Small: microseconds, forward / backward, {dtype}, by {title}\n{table([header, *body])}")
    return parts


def _mode_tables(rows: Sequence[KernelResult], copy: float, dtype: str) -> list[str]:
    names = [FUSED.name, *MODES]
    parts = []
    for title, profiled in (("CUDA graph", False), ("torch.profiler", True)):
        if not any(_seconds(row, profiled) for row in rows):
            continue
        body = []
        for case in _cases(rows):
            times = [_seconds(_find(rows, case, name, "forward"), profiled) for name in names]
            best = min((time for time in times[1:] if time), default=None)
            lead = f"{best / times[0]:.2f}" if best and times[0] else ""
            body.append([case, *_cells(rows, case, names, profiled, copy, DIRECTIONS[:1]), lead])
        parts.append(
            f"Modes of the fused forward, fraction of the fastest copy's bandwidth, {dtype}, by {title}; fused: as it "
            "chooses by itself; -: the mode does not take the shape; last: the fastest mode's time over that of fused\n"
            f"{table([['', *names, 'best mode/fused'], *body])}"
        )
    return parts


def _memory_table(rows: Sequence[KernelResult], dtype: str) -> list[str]:
    names = [name for name in PROVIDERS if any(row.provider == name for row in rows)]
    measured = [row for row in rows if row.extra_bytes is not None]
    body = []
    for case in _cases(measured):
        cells = []
        for name in names:
            found = [_find(measured, case, name, direction) for direction in DIRECTIONS]
            cells.append(_pair(_mebibytes(row.extra_bytes) for row in found if row and row.extra_bytes is not None))
        body.append([case, *cells])
    if not body:
        return []
    return [
        f"Memory, {dtype}: MiB at the peak of a forward without gradients / of a forward with its backward, beyond "
        f"inputs, outputs and gradients\n{table([['', *names], *body])}"
    ]


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _host_table(results: Results) -> str | None:
    if not results.host:
        return None
    columns = list(dict.fromkeys((row.operator, row.chain) for row in results.host))
    found = {(row.provider, row.operator, row.chain): row for row in results.host}
    header = ["", *(f"{operator}{f' x{chain}' if chain > 1 else ''}" for operator, chain in columns)]
    body = []
    for provider in dict.fromkeys(row.provider for row in results.host):
        cells = [found.get((provider, *column)) for column in columns]
        body.append(
            [
                provider,
                *(f"{1e6 * r.forward.median:.1f} / {1e6 * r.training.median:.1f}" if r else "" for r in cells),
            ]
        )
    return f"Host time, microseconds a call, forward without grad / forward and backward\n{table([header, *body])}"


def _step_table(results: Results) -> str | None:
    if not results.steps:
        return None
    rows = [("", "", "ms", "quartiles", "host, ms", "quartiles", "GiB", "reserved", "samples")]
    for row_name in dict.fromkeys(row.row for row in results.steps):
        steps = [row for row in results.steps if row.row == row_name]
        best = _clearly_best(steps)
        for index, step in enumerate(steps):
            mark = "*" if step is best else ""
            rows.append(
                (
                    "" if index else row_name,
                    step.variant,
                    f"{mark}{1e3 * step.timing.median:.1f}" if step.timing else step.verdict,
                    _quartiles(step.timing),
                    f"{1e3 * step.host.median:.1f}" if step.host else "",
                    _quartiles(step.host),
                    _gibibytes(step.peak_bytes),
                    _gibibytes(step.reserved_bytes),
                    str(step.timing.samples) if step.timing else "",
                )
            )
    return (
        "Steps, and tokens of generations: time, the part of it until the host has launched everything, peak memory; "
        f"* is the fastest where its quartiles are apart from all others'\n{table(rows)}{_step_notes(results)}"
    )


def steps_in_markdown(results: Results) -> str | None:
    """The table of steps for a page: a line for each row, a column for each variant; None without steps."""
    if not results.steps:
        return None
    names = dict.fromkeys(row.variant for row in results.steps)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for row_name in dict.fromkeys(row.row for row in results.steps):
        steps = {row.variant: row for row in results.steps if row.row == row_name}
        best = _clearly_best(list(steps.values()))
        cells: list[str] = []
        for name in names:
            step = steps.get(name)
            if step is None or step.timing is None:
                cells.append("" if step is None else "-" if step.verdict == "refused" else step.verdict)
                continue
            time = f"{1e3 * step.timing.median:.1f}"
            memory = f", {_gibibytes(step.peak_bytes)}" if step.peak_bytes else ""
            cells.append(f"**{time}**{memory}" if step is best else f"{time}{memory}")
        lines.append(f"| {row_name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _clearly_best(steps: Sequence[StepResult]) -> StepResult | None:
    """The fastest of the steps of a row, if its quartiles are apart from those of every other; bounds do not count."""
    timed = [step for step in steps if step.timing and step.timing.samples > 1 and step.variant not in UNLIKE_STOCK]
    timed.sort(key=lambda step: step.timing.median if step.timing else 0.0)
    if len(timed) < 2 or timed[0].timing is None:
        return None
    high = timed[0].timing.high
    return timed[0] if all(step.timing and high < step.timing.low for step in timed[1:]) else None


def _step_notes(results: Results) -> str:
    bad = [row for row in results.steps if row.detail]
    return "".join(f"\n  {row.row} {row.variant}: {row.verdict}, {row.detail}" for row in bad)


def _quartiles(timing: Timing | None) -> str:
    return f"{1e3 * timing.low:.1f} to {1e3 * timing.high:.1f}" if timing and timing.samples > 1 else ""


def _gibibytes(count: int | None) -> str:
    return f"{count / 2**30:.1f}" if count else ""


def _feature_table(results: Results) -> str | None:
    if not results.features:
        return None
    rows = [("", "", "ms", "to all", "95 % interval", "verdict", "GiB", "rounds")]
    for index, row in enumerate(results.features):
        name = "" if index and results.features[index - 1].row == row.row else row.row
        time = f"{1e3 * row.timing.median:.1f}" if row.timing else ""
        memory = f"{row.peak_bytes / 2**30:.2f}" if row.peak_bytes else ""
        rows.append((name, row.variant, time, *_ratio_cells(row), memory, str(row.ratio.rounds) if row.ratio else ""))
    bad = [row for row in results.features if row.detail]
    notes = "".join(f"\n  {row.row}, {row.variant}: {row.verdict}, {row.detail}" for row in bad)
    return (
        "Features: the time of a training step or a generation, and its ratio to that of all features in the same "
        f"round; above 1, the feature that is left out saves time\n{table(rows)}{notes}"
    )


def _ratio_cells(row: FeatureResult) -> tuple[str, str, str]:
    """The cells of ratio, interval and verdict."""
    ratio = row.ratio
    if ratio is None:
        return "", "", row.verdict
    if row.variant == BASE:
        return "1", "", ""
    interval = "" if ratio.low is None or ratio.high is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
    return f"{ratio.median:.3f}", interval, ratio.verdict


def _cases(rows: Sequence[KernelResult]) -> list[str]:
    """The names of the cases, sorted by operator and size."""
    sizes: dict[str, tuple[int, ...]] = {}
    for row in rows:
        sizes.setdefault(row.case, (_GROUPS.index(row.group), row.width, row.rows, row.bytes))
    return sorted(sizes, key=lambda case: sizes[case])


def _is_small(rows: Sequence[KernelResult], case: str, copy: float) -> bool:
    return all(row.bytes / copy < _SMALL for row in rows if row.case == case)


def _find(rows: Sequence[KernelResult], case: str, provider: str, direction: Direction) -> KernelResult | None:
    return next(
        (row for row in rows if (row.case, row.provider, row.direction) == (case, provider, direction)),
        None,
    )


def _seconds(row: KernelResult | None, profiled: bool) -> float | None:
    if row is None or row.timing is None:
        return None
    return row.profiled if profiled else row.timing.median


def _cells(
    rows: Sequence[KernelResult],
    case: str,
    names: Sequence[str],
    profiled: bool,
    copy: float | None,
    directions: Sequence[Direction] = DIRECTIONS,
) -> list[str]:
    """One cell for each provider: fractions of the bandwidth ``copy``, or microseconds where it is None."""
    texts: dict[str, list[str]] = {name: [] for name in names}
    for direction in directions:
        found = {name: _find(rows, case, name, direction) for name in names}
        times = {name: _seconds(row, profiled) for name, row in found.items()}
        best = min((time for time in times.values() if time), default=None)
        for name, row in found.items():
            time = times[name]
            if time is None or row is None:
                texts[name].append("" if row is None else "-" if row.verdict in ("ok", "refused") else row.verdict)
                continue
            mark = "*" if time == best else ""
            texts[name].append(f"{mark}{_fraction(row.bytes / time / copy) if copy else f'{1e6 * time:.1f}'}")
    return [_pair(parts) for parts in texts.values()]


def _lead(rows: Sequence[KernelResult], case: str, direction: Direction, profiled: bool) -> str:
    ours = _seconds(_find(rows, case, FUSED.name, direction), profiled)
    peers = [_seconds(_find(rows, case, name, direction), profiled) for name in PROVIDERS if name != FUSED.name]
    measured = [time for time in peers if time]
    return f"{min(measured) / ours:.2f}" if ours and measured else ""


def _copy_fraction(rows: Sequence[KernelResult], case: str, direction: Direction, results: Results, copy: float) -> str:
    row = next((row for row in rows if (row.case, row.direction) == (case, direction)), None)
    same = results.copy_of(row.bytes) if row else None
    return _fraction(same.bandwidth / copy) if same else ""


def _fraction(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if value < 1 else f"{value:.2f}"


def _pair(parts: Iterable[str]) -> str:
    return " / ".join(part for part in parts if part)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first being the header, as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])

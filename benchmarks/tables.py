"""Results as text: a table for each part of the benchmarks, of cases by providers or variants."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from .loss_providers import FLOORS
from .markdown import in_markdown
from .providers import FUSED
from .results import Result, Results
from .samples import Timing
from .trainers import TrainerCase

_DATA_SHEETS = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA A100-SXM4-80GB": 2.039e12}
"""Bytes per second of the memory of a GPU, as its maker gives them."""

_SMALL = 3e-6  # Cases whose bytes a copy moves in less time are in microseconds: they are bound by launches.

_WITH_REASONS = ("losses", "models", "features", "trainers")
"""Parts of which a report says why something was refused."""

Text = Callable[[Result, Sequence[Result]], str]
"""What a cell says of a result, beside all of its row and kind."""


def describe(results: Results) -> str:
    """Describe a run: its environment, every table that there are results for, and what was left out."""
    parts = ["THESE TIMES MEAN NOTHING: a quick run shows that the code works."] if results.meaningless else []
    parts.append("\n".join(f"{key}: {value}" for key, value in results.environment.items()))
    if results.copy_bandwidth:
        parts += _operator_tables(results, results.copy_bandwidth)
    if losses := results.of("losses"):
        parts.append(_loss_table(losses))
    if host := results.of("host"):
        table = pivot(host, lambda result, _: f"{1e6 * result.seconds:.1f}" if result.seconds else result.verdict)
        parts.append(f"Host time, microseconds a call, forward without grad / forward and backward\n{aligned(table)}")
    if steps := results.of("models"):
        parts.append(f"Steps, time and peak memory; * as below\n{aligned(_ways(steps, '*{}'))}")
    parts += [_step_table(rows) for rows in (steps, results.of("features"), results.of("trainers")) if rows]
    if bad := [row for row in results.rows if row.bad or (row.detail and row.part in _WITH_REASONS)]:
        lines = (f"  {r.by}, {' '.join(filter(None, (r.row, r.dtype, r.kind)))}: {r.verdict}, {r.detail}" for r in bad)
        parts.append("Not timed:\n" + "\n".join(lines))
    timed = [(row, row.timing) for row in results.of("kernels") if row.timing]
    if spreads := [(timing.high - timing.low) / timing.median for _, timing in timed]:
        middle, most = statistics.median(spreads), max(spreads)
        parts.append(f"Spread of kernel times, quartile to quartile: {middle:.1%} in the middle, {most:.1%} at most")
    if by_events := [f"{row.by} {row.row} {row.kind}" for row, timing in timed if timing.method == "events"]:
        parts.append(f"Not capturable in a CUDA graph, so host time may be in it: {', '.join(by_events)}")
    if results.left_out:
        parts.append("Left out:\n" + "\n".join(f"  {line}" for line in results.left_out))
    return "\n\n".join(parts)


def pivot(rows: Sequence[Result], text: Text, columns: Mapping[str, Text] | None = None) -> list[list[str]]:
    """The cells of a line for each case, with a column for each provider; forward and backward share a cell.

    Cases stand in the order of ``rows``, those of an operator together. ``columns``: further ones, by name: what they
    say of a case, asked with any of its results.
    """
    columns = columns or {}
    names, cases = dict.fromkeys(row.by for row in rows), dict.fromkeys(row.row for row in rows)
    words = list(dict.fromkeys(case.partition(" ")[0] for case in cases))
    lines = [["", *names, *columns]]
    for case in sorted(cases, key=lambda case: words.index(case.partition(" ")[0])):
        kinds: dict[str, list[Result]] = {}
        for row in rows:
            if row.row == case:
                kinds.setdefault(row.kind, []).append(row)
        cells = [[text(row, rivals) for rivals in kinds.values() for row in rivals if row.by == name] for name in names]
        cells += [[column(rivals[0], rivals) for rivals in kinds.values()] for column in columns.values()]
        lines.append([case, *(" / ".join(filter(None, texts)) for texts in cells)])
    return lines


def _operator_tables(results: Results, copy: float) -> Iterator[str]:
    """The bandwidth of the fastest ``copy``, and the tables of operators in each dtype: time and memory."""
    line = f"copy bandwidth, TB/s: {copy / 1e12:.2f}, of the fastest of {len(results.of('copy'))} copies in the run"
    if sheet := _DATA_SHEETS.get(results.environment.get("GPU 0", "").partition(",")[0]):
        share = f"fractions of the copy's bandwidth times {_fraction(copy / sheet)} are fractions of it"
        line += f"\ndata sheet, TB/s: {sheet / 1e12:.2f}; {share}"
    yield line
    copies = {copy.bytes: copy.bandwidth for copy in results.of("copy")}

    def of_copy(result: Result, _: Sequence[Result]) -> str:
        bandwidth = copies.get(result.bytes)
        return _fraction(bandwidth / copy) if bandwidth else ""

    for dtype in dict.fromkeys(row.dtype for row in results.of("kernels")):
        kernels = [row for row in results.of("kernels") if row.dtype == dtype]
        table = aligned(pivot(kernels, speed(copy), {"copy": of_copy, "fused/best peer": _lead}))
        yield (
            f"Fraction of the fastest copy's bandwidth, forward / backward, {dtype}; microseconds where a copy takes "
            f"less than three; * is the fastest; copy: of the same bytes; last: how many times as fast\n{table}"
        )
        if any(row.extra_bytes is not None for row in kernels):
            extra = pivot(kernels, lambda row, _: "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}")
            yield (
                f"Memory, {dtype}: MiB at the peak of a forward without gradients / of a forward with its backward, "
                f"beyond inputs, outputs and gradients\n{aligned(extra)}"
            )


def speed(copy: float) -> Text:
    """The share of a copy's bandwidth that a result has, or its microseconds if it is small."""

    def text(result: Result, rivals: Sequence[Result]) -> str:
        if result.seconds is None or result.bytes is None:
            return result.verdict if result.bad else "-"
        mark = "*" if result.seconds == min(row.seconds for row in rivals if row.seconds) else ""
        small = result.bytes / copy < _SMALL
        return f"{mark}{f'{1e6 * result.seconds:.1f} us' if small else _fraction(result.bytes / result.seconds / copy)}"

    return text


def _lead(_: Result, rivals: Sequence[Result]) -> str:
    """The time of the fastest of the others over that of fused."""
    ours = [row.seconds for row in rivals if row.by == FUSED.name]
    others = [row.seconds for row in rivals if row.by != FUSED.name and row.seconds]
    return f"{min(others) / ours[0]:.2f}" if others and ours and ours[0] else ""


def _table(rows: Sequence[Result], columns: Mapping[str, Callable[[Result], str]], floors: Sequence[str] = ()) -> str:
    """A line for every result, sorted by case, with its time and these columns; ``floors`` are not marked."""
    lines = [["", "", "ms", "quartiles", *columns]]
    for case in dict.fromkeys(row.row for row in rows):
        of_case = [row for row in rows if row.row == case]
        best = _clearly_best([row for row in of_case if row.by not in floors])
        for row in of_case:
            time = f"{'*' if row is best else ''}{1e3 * row.seconds:.1f}" if row.seconds else row.verdict
            name = case if row is of_case[0] else ""
            lines.append([name, row.by, time, _quartiles(row.timing), *(text(row) for text in columns.values())])
    return aligned(lines)


def _loss_table(losses: Sequence[Result]) -> str:
    columns: dict[str, Callable[[Result], str]] = {
        "GiB": lambda row: _gibibytes(row.extra_bytes),
        **{f"error of {name}": partial(_error, name=name) for name in ("loss", "dX", "dW")},
        "rounds": _rounds,
    }
    return (
        "Head and loss, forward and backward: time, peak of memory beyond the inputs, relative errors to float64; * is "
        "the fastest where its quartiles are apart from all others'; products: those of matrices alone, which no "
        "implementation can do without; cross-entropy: the fused one in place of a loss of log-probabilities\n"
        f"{_table(losses, columns, FLOORS)}"
    )


def losses_in_markdown(results: Results) -> str:
    """Tables of heads with their loss for a page: milliseconds, GiB, and the error of dW, or of dX if it is frozen."""
    cells: Mapping[str, Callable[[Result], str]] = {
        "Milliseconds": lambda result: f"{1e3 * (result.seconds or 0):.1f}",
        "GiB beyond the inputs": lambda result: _gibibytes(result.extra_bytes),
        "Relative error to float64 of the weight's gradient; if the head is frozen, of the input's": lambda result: (
            _error(result, "dW") or _error(result, "dX")
        ),
    }

    def text(result: Result, _: Sequence[Result], cell: Callable[[Result], str]) -> str:
        if result.seconds is None:
            return "-" if result.verdict == "refused" else result.verdict
        return cell(result)

    losses = results.of("losses")
    tables = (f"{name}:\n\n{in_markdown(pivot(losses, partial(text, cell=cell)))}" for name, cell in cells.items())
    return "\n\n".join(tables) if losses else ""


def _error(result: Result, name: str) -> str:
    errors = result.errors or {}
    if name not in errors:
        return ""
    value = errors[name]
    return "not finite" if value is None else f"{value:.2e}"


def _step_table(steps: Sequence[Result]) -> str:
    columns: dict[str, Callable[[Result], str]] = {
        "host, ms": lambda row: f"{1e3 * row.host.median:.1f}" if row.host else "",
        "quartiles": lambda row: _quartiles(row.host),
        "GiB": lambda row: _gibibytes(row.peak_bytes),
        "reserved": lambda row: _gibibytes(row.reserved_bytes),
        "rounds": _rounds,
    }
    if steps[0].part == "trainers":
        columns["tokens a second"] = lambda row: (
            f"{TrainerCase.named(row.row).tokens / row.seconds:.0f}" if row.seconds else ""
        )
    if any(step.ratio for step in steps):
        columns |= {
            "to fused": lambda row: f"{row.ratio.median:.3f}" if row.ratio else "",
            "95 %": lambda row: row.ratio.interval if row.ratio else "",
            "verdict": lambda row: row.ratio.verdict if row.ratio else "",
        }
    return (
        "Steps, and tokens of generations: time, the part of it until the host has launched everything, peak memory; "
        "* is the fastest where its quartiles are apart from all others'; ratios are to fused in the same round: above "
        f"1, the option that is left out saves time\n{_table(steps, columns)}"
    )


def steps_in_markdown(steps: Sequence[Result], names: Mapping[str, str] | None = None) -> str:
    """The table of steps for a page.

    ``names``: of the variants that have columns, in their order, among which the fastest is marked; None for all of
    them, by their own names.
    """
    if names is not None:
        steps = [step for step in steps if step.by in names]
        rows = dict.fromkeys(step.row for step in steps)
        steps = [replace(step, by=name) for variant, name in names.items() for step in steps if step.by == variant]
        return in_markdown(_ways(steps, "**{}**", rows))
    return in_markdown(_ways(steps, "**{}**"))


def _ways(steps: Sequence[Result], fastest: str, rows: Iterable[str] = ()) -> list[list[str]]:
    """A line for each step, and for each variant a column of milliseconds and one of GiB, if memory was measured.

    ``rows``: the steps that come first, in their order; all others come as they are in ``steps``.
    """
    names = dict.fromkeys(step.by for step in steps)
    with_memory = {step.by for step in steps if step.peak_bytes}
    lines = [["step", *(title for name in names for title in (f"{name} ms", "GiB")[: 1 + (name in with_memory)])]]
    for row_name in dict.fromkeys([*rows, *(step.row for step in steps)]):
        of_row = {step.by: step for step in steps if step.row == row_name}
        best = _clearly_best(list(of_row.values()))
        lines.append([row_name])
        for name in names:
            step = of_row.get(name)
            if step is None or step.seconds is None:
                cells = ["" if step is None else "-" if step.verdict == "refused" else step.verdict, ""]
            else:
                time = (fastest if step is best else "{}").format(f"{1e3 * step.seconds:.1f}")
                cells = [time, _gibibytes(step.peak_bytes)]
            lines[-1] += cells[: 1 + (name in with_memory)]
    return lines


def _clearly_best(steps: Sequence[Result]) -> Result | None:
    """The fastest of the steps of a row, if its quartiles are apart from those of every other."""
    timed = [(step.timing, step) for step in steps if step.timing and step.timing.samples > 1]
    timed.sort(key=lambda pair: pair[0].median)
    if len(timed) < 2:
        return None
    (first, best), *others = timed
    return best if all(first.high < timing.low for timing, _ in others) else None


def _quartiles(timing: Timing | None) -> str:
    return f"{1e3 * timing.low:.1f} to {1e3 * timing.high:.1f}" if timing and timing.samples > 1 else ""


def _rounds(result: Result) -> str:
    return str(result.timing.samples) if result.timing else ""


def _gibibytes(count: int | None) -> str:
    return f"{count / 2**30:.1f}" if count else ""


def _fraction(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if value < 1 else f"{value:.2f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first being the header, as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])

"""The report as one HTML page that needs nothing else: charts inline, light or dark as the reader has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from . import svg
from .mutations import MUTATIONS, SOUND
from .report import HEADS, exit_code, summary
from .store import Result
from .verdict import (
    BITS_BAR,
    FIRST_STEPS,
    FIRST_STEPS_BAR,
    MEASURES,
    MULTIPLE,
    Check,
    loss_band,
    relative_gaps,
    what_is,
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #66707a; --paper: #fcfcfb; --card: #fff; --rule: #e2e5e8;
  --stock: #3b7dd8; --fused: #e07b1a; --noise: #8b949e; --green: #1a7f4b; --red: #c62f2f; --gray: #7a828a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #98a2ac; --paper: #14171a; --card: #1b1f23;
  --rule: #2d333a; --stock: #6aa6f5; --fused: #f59e4c; --noise: #7d868f; --green: #4cc38a; --red: #ff6b6b;
  --gray: #98a2ac; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1180px; padding: 2rem 1.2rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif }
h1 { font-size: 1.7rem; margin: 0 0 .3rem } h2 { font-size: 1.15rem; margin: 2.4rem 0 .5rem } p { max-width: 46rem }
.headline { font-size: 1.1rem; font-weight: 600 } .green, .caught { color: var(--green) }
.red, .missed { color: var(--red) } .invalid, .hidden { color: var(--gray) } .soft { color: var(--soft) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .86rem }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap }
th { font-weight: 500; color: var(--soft) } th:first-child, td:first-child, td.words { text-align: left }
td.words { white-space: normal } td.share { background: color-mix(in srgb, var(--tone) var(--fill), transparent) }
code { font-size: .92em }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 1rem }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .8rem }
.card h3 { margin: 0 0 .4rem; font-size: .9rem } svg { display: block; width: 100%; height: auto }
.tick, .label { font: 9.5px system-ui, sans-serif; fill: var(--soft) } .grid { stroke: var(--rule); stroke-width: 1 }
polyline { fill: none } .stock { stroke: var(--stock); stroke-width: 5; opacity: .4 }
.fused { stroke: var(--fused); stroke-width: 1.6 } .noise { stroke: var(--noise); stroke-width: 1.2 }
.band { fill: var(--noise); opacity: .22 } .bound { stroke: var(--red); stroke-width: 1; stroke-dasharray: 4 3 }
.ok { fill: var(--fused); opacity: .65 } .over { fill: var(--red) }
.key { font-size: .8rem; color: var(--soft); margin: .2rem 0 } .key b { font-weight: 600 }
.key .s { color: var(--stock) } .key .f { color: var(--fused) } .key .n { color: var(--noise) }
.key .b { color: var(--red) }
details summary { cursor: pointer; color: var(--soft) }
"""


def render(results: Sequence[Result], facts: Mapping[str, Any]) -> str:
    """The page.

    Args:
        results: of all comparisons, those with planted faults among them.
        facts: versions, device, data, settings.
    """
    parts = ["<h1>Does training come out the same?</h1>", _headline(results, facts), _introduction()]
    sound = [result for result in results if result.case.mutation is None]
    faults = [result for result in results if result.case.mutation is not None]
    parts += [_troubles(results), _shares(sound), _faults(faults)]
    drawn = [result for result in sound if result.stock and result.fused and result.controls]
    if drawn:
        parts.append("<h2>Curves</h2>" + _KEY + '<div class="cards">')
        parts += [_card(result) for result in drawn]
        parts.append("</div>")
    parts += [_bounds(), _facts(facts)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"<title>fused_norm convergence: {escape(summary(results))}</title>"
    head = f"<head>{head}{title}<style>{_STYLE}</style></head>"
    return f'<!doctype html><html lang="en">{head}<body>{"".join(parts)}</body></html>'


def _headline(results: Sequence[Result], facts: Mapping[str, Any]) -> str:
    colour = {0: "green", 1: "red", 2: "invalid"}[exit_code(results)]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "transformers") if name in facts)
    where = f"{facts.get('kernels run in', 'kernels of unknown kind')}; {versions}"
    return f'<p class="headline {colour}">{escape(summary(results))}</p><p class="soft">{escape(where)}</p>'


def _introduction() -> str:
    return (
        "<p>Each comparison trains a stock model, the same model with fused kernels, and a few <em>controls</em>: the "
        "stock model once more, with its sums in another order, its roundings up or down at random, its batches split "
        "differently. All start from the same weights and see the same text in the same order. Two correct runs never "
        "agree to the last bit; the controls say by how much they may differ. A fused run is green when it leaves the "
        "stock run by no more than a small multiple of that, in everything that is measured.</p>"
    )


def _troubles(results: Iterable[Result]) -> str:
    items = []
    for result in results:
        if result.outcome in ("red", "missed", "invalid"):
            verdict = result.verdict
            first = f" It diverges first in <code>{escape(verdict.divergence)}</code>." if verdict.divergence else ""
            reasons = "; ".join(map(escape, verdict.reasons)) or "the planted fault was not seen"
            outcome = f'<b class="{result.outcome}">{result.outcome}</b>'
            items.append(f"<li>{outcome} {escape(result.case.name)}: {reasons}.{first}</li>")
    return f"<h2>What went wrong</h2><ul>{''.join(items)}</ul>" if items else ""


def _shares(sound: Sequence[Result]) -> str:
    if not sound:
        return ""
    heads = "".join(f'<th title="{escape(what_is(name))}">{head}</th>' for name, head in HEADS.items())
    rows = []
    for result in sound:
        verdict = result.verdict
        cells = "".join(_share(verdict.worst(name)) for name in HEADS)
        outcome = f'<td class="{result.outcome}">{result.outcome}</td>'
        rows.append(f"<tr><td>{escape(result.case.name)}</td>{outcome}{cells}</tr>")
    return (
        "<h2>Comparisons</h2><p>How much of its bound the fused run takes, in the worst place: 1 is all of it. The "
        "heads and the cells say more when pointed at.</p>"
        f'<div class="scroll"><table><tr><th>case</th><th></th>{heads}</tr>{"".join(rows)}</table></div>'
    )


def _share(check: Check | None) -> str:
    if check is None:
        return '<td class="soft">-</td>'
    text = f"{check.where or 'whole run'}: {check.value:.1e}, noise {check.noise:.1e}, bound {check.bound:.1e}"
    tone = "var(--green)" if check.ok else "var(--red)"
    fill = min(100.0, 6 + 40 * check.share)
    number = f"{check.share:.2f}" if check.share < 100 else "&gt;99"
    return f'<td class="share" style="--tone:{tone};--fill:{fill:.0f}%" title="{escape(text)}">{number}</td>'


def _faults(faults: Sequence[Result]) -> str:
    if not faults:
        return ""
    found = {(result.case.twins.name, result.case.mutation): result for result in faults}
    heads = "".join(
        f'<th title="{escape(MUTATIONS[name].what) if name in MUTATIONS else "no fault"}">{name}</th>'
        for name in (SOUND, *MUTATIONS)
    )
    rows = []
    for name in dict.fromkeys(result.case.twins.name for result in faults):
        cells = "".join(_fault(found.get((name, column))) for column in (SOUND, *MUTATIONS))
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    return (
        "<h2>Planted faults</h2><p>A suite that cannot fail proves nothing. Each fault sits in one single norm of the "
        "fused model, and must turn the verdict red; without a fault it must be green. Point at a cell for where it "
        "was planted and what saw it.</p>"
        f'<div class="scroll"><table><tr><th>case</th>{heads}</tr>{"".join(rows)}</table></div>'
    )


def _fault(result: Result | None) -> str:
    if result is None:
        return "<td>-</td>"
    verdict = result.verdict
    words = [f"planted in {result.planted[0]}"] if result.planted else []
    words += [result.hidden] if result.hidden else []
    words += [f"diverges first in {verdict.divergence}"] if verdict.divergence else []
    words += [*verdict.reasons] if not result.hidden else []
    return f'<td class="{result.outcome}" title="{escape("; ".join(words))}">{result.outcome}</td>'


_KEY = (
    '<p class="key"><b class="s">stock</b> and <b class="f">fused</b> losses over the steps; below, how far the fused '
    'loss is from the stock loss, with the <b class="n">band of the controls</b>; last, every number compared, '
    'one dot each, its distance over the noise there, with the <b class="b">bound</b> of a number that is granted no '
    "rounding.</p>"
)


def _card(result: Result) -> str:
    charts = "".join(chart.render() for chart in _charts(result))
    outcome = f'<span class="{result.outcome}">{result.outcome}</span>'
    return f'<div class="card"><h3>{escape(result.case.name)} {outcome}</h3>{charts}</div>'


def _charts(result: Result) -> Iterator[svg.Chart]:
    assert result.stock
    assert result.fused
    stock, fused = result.stock.losses, result.fused.losses
    steps = (0.0, max(1.0, len(stock) - 1.0))
    losses = svg.Chart("losses", steps, svg.linear_range([*stock, *fused]), x_label="step", y_label="nats per token")
    losses.line(enumerate(stock), "stock")
    losses.line(enumerate(fused), "fused")
    yield losses
    gaps, band = relative_gaps(fused, stock), loss_band(result.stock, result.controls)
    low, high = svg.log_range([*gaps, *band])
    apart = svg.Chart("gaps", steps, (low, high), log_y=True, x_label="step", y_label="relative gap", height=130)
    apart.area(list(enumerate(band)), "band")
    apart.line(enumerate(band), "noise")
    apart.line(enumerate(gaps), "fused")
    yield apart
    yield _scatter(result.verdict.checks)


def _scatter(checks: Sequence[Check]) -> svg.Chart:
    shown = [check for check in checks if check.value and check.measure != "bits"]
    bounds = svg.log_range([number for check in shown for number in (check.value, check.noise)], least=1e-10)
    chart = svg.Chart("all checks", bounds, bounds, log_x=True, log_y=True, x_label="noise", y_label="distance, fused")
    chart.line([(x, MULTIPLE * x) for x in bounds], "bound")
    for kind, ok in (("ok", True), ("over", False)):
        chart.dots(
            [
                (check.noise, check.value, f"{check.measure} {check.where}: {check.value:.1e}, noise {check.noise:.1e}")
                for check in shown
                if check.ok is ok
            ],
            kind,
        )
    return chart


def _bounds() -> str:
    rows = "".join(
        f'<tr><td>{HEADS[measure.name]}</td><td class="words">{escape(measure.what)}</td>'
        f"<td>{measure.multiple:g} x noise</td><td>{_granted(measure.name, measure.floor)}</td>"
        f'<td class="words">{escape(measure.why)}</td></tr>'
        for measure in MEASURES
    )
    return (
        "<h2>Bounds</h2><p>The noise is what the worst control does in that place, or in the median place where that "
        "is more. A rounding is half an eps of bf16, or of fp32 where all is fp32. Beside these, an fp32 run may "
        f"differ by {FIRST_STEPS_BAR:g} of the loss in its first {FIRST_STEPS} steps, whatever the controls do.</p>"
        '<div class="scroll"><table><tr><th>measure</th><th>what</th><th>bound</th><th>granted besides</th>'
        f"<th></th></tr>{rows}</table></div>"
    )


def _granted(name: str, floor: float) -> str:
    return f"{BITS_BAR:.0%} of the outputs" if name == "bits" else f"{floor:g} roundings" if floor else "nothing"


def _facts(facts: Mapping[str, Any]) -> str:
    pairs = ((escape(str(name)), escape(str(value))) for name, value in facts.items())
    rows = "".join(f'<tr><td>{name}</td><td class="words">{value}</td></tr>' for name, value in pairs)
    return f"<h2>Settings and versions</h2><details><summary>show</summary><table>{rows}</table></details>"

"""The report as one HTML page that needs nothing else: charts inline, light or dark as the reader has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from .curve_charts import BOUND, FUSED, NOISE, STOCK, curves_svg, has_curves
from .mutations import MUTATIONS, SOUND
from .result_store import ComparisonResult
from .suite_report import HEADS, exit_code, fault_columns, fault_rows, summary
from .verdict import CALL_BARS, FIRST_STEPS, FIRST_STEPS_BAR, MEASURES, Verdict, describe_measure


def render_page(results: Sequence[ComparisonResult], facts: Mapping[str, Any]) -> str:
    """The page as text.

    Args:
        results: of all comparisons, those with planted faults among them.
        facts: versions, device, data, settings.
    """
    environment = Environment(
        loader=PackageLoader(__package__, ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    sound = [result for result in results if result.comparison.mutation is None]
    faults = [result for result in results if result.comparison.mutation is not None]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "transformers") if name in facts)
    return environment.get_template("report_page.html.jinja").render(
        summary=summary(results),
        status={0: "green", 1: "red", 2: "invalid"}[exit_code(results)],
        where=f"{facts.get('kernels run in', 'kernels of unknown kind')}; {versions}",
        failed=[result for result in results if result.outcome in ("red", "missed", "invalid")],
        sound=[(result, _worst_checks(result.verdict)) for result in sound],
        faults=fault_rows(faults),
        fault_columns=fault_columns(faults),
        mutations={SOUND: "no fault"} | {name: mutation.what for name, mutation in MUTATIONS.items()},
        charts=[(result, curves_svg(result)) for result in sound if has_curves(result)],
        heads={name: (head, describe_measure(name)) for name, head in HEADS.items()},
        measures=MEASURES,
        call_bars=CALL_BARS,
        first_steps=FIRST_STEPS,
        first_steps_bar=FIRST_STEPS_BAR,
        colors={"stock": STOCK, "fused": FUSED, "noise": NOISE, "bound": BOUND},
        facts=facts,
    )


def _worst_checks(verdict: Verdict) -> list[Any]:
    return [verdict.worst(name) for name in HEADS]

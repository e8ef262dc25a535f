"""The chart of time beside memory, on the page of options, shows the stored run."""

import re

from benchmarks.pages import stored_run
from benchmarks.time_and_memory import LINES, MODELS, draw

from .markdown_pages import ROOT


def test_the_chart_is_drawn_from_the_run():
    picture = (ROOT / "docs" / "time_and_memory.svg").read_text(encoding="utf-8")
    written = set(re.findall(r"<text [^>]*>([^<]+)</text>", picture))
    assert {*MODELS, *LINES} <= written
    curves = re.compile(r'<path d="(M [^"]+)" clip-path')
    assert curves.findall(picture) == curves.findall(draw(stored_run()))
    assert len(curves.findall(picture)) == len(MODELS) * len(LINES)

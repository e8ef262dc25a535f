"""The picture of the long run is that of the stored one, and the command that made it trains what it says."""

import json
import re

import pytest

from benchmarks.long_run import RUNS, SIZES, draw, train
from benchmarks.pages import LONG_RUN, ROOT

CURVES = re.compile(r'<path d="(M [^"]+)" clip-path')


def test_the_picture_is_that_of_the_stored_run():
    picture = (ROOT / "docs" / "long_run.svg").read_text(encoding="utf-8")
    stored = json.loads(LONG_RUN.read_text(encoding="utf-8"))
    assert CURVES.findall(picture) == CURVES.findall(draw(stored))
    assert len(CURVES.findall(picture)) == 5
    assert {*RUNS} <= {*re.findall(r"<text [^>]*>([^<]+)</text>", picture)}


def test_the_stored_runs_are_whole_and_end_within_two_thousandths_of_each_other():
    stored = json.loads(LONG_RUN.read_text(encoding="utf-8"))
    stock, ours, other = (sum(stored[name]["losses"][-50:]) / 50 for name in RUNS)
    assert {len(stored[name]["losses"]) for name in RUNS} == {800}
    assert abs(ours - stock) < 0.002
    assert abs(other - stock) < 0.002


@pytest.mark.slow
def test_three_models_are_trained_on_the_same_text():
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    results = train(SIZES | tiny | {"num_attention_heads": 2, "num_key_value_heads": 2}, length=32, batch=2, steps=3)
    first = [results[name]["losses"][0] for name in RUNS]
    assert first[1] == pytest.approx(first[0], abs=1e-3)
    assert first[2] == pytest.approx(first[0], abs=1e-3)
    assert first[2] != first[0]
    assert "fused 3 norm, 2 qk" in results["report"]

"""Runs of the command on models of one layer, with a planted fault or none."""

import contextlib
import json
from unittest import mock

from fused_norm.cli import main
from fused_norm.convergence.suite import fused_for, run_baseline
from fused_norm.model_configs import tiny_config

from ..planted.faults import FAULTS


def results_in(folder):
    """Return the rows of a report by their names."""
    return {row["name"]: row for row in json.loads((folder / "report.json").read_text())["results"]}


def config_of(folder, family="llama", **changes):
    """Write the config of a tiny model of one layer, whose dropout the suite has to turn off; return its path."""
    tiny_config(family, **{"num_hidden_layers": 1, "attention_dropout": 0.5} | changes).save_pretrained(folder / family)
    return str(folder / family)


@contextlib.contextmanager
def one_baseline():
    """Train the stock run and its controls once for all commands inside, which are to make one comparison."""
    baselines = []

    def once(*arguments):
        baselines[:] = baselines or [run_baseline(*arguments)]
        return baselines[0]

    with mock.patch("fused_norm.convergence.suite.run_baseline", once):
        yield


def converge(folder, *line, fault=None):
    """Run one comparison anew; return its row, and in how many calls the planted fault had a part."""
    planted = []

    def faulty(feature):
        @contextlib.contextmanager
        def fused(model):
            with fused_for(feature)(model) as sites, FAULTS[fault].planted(model) as state:
                yield sites
            planted.append(state.calls)

        return fused

    change = mock.patch("fused_norm.convergence.suite.fused_for", faulty) if fault else contextlib.nullcontext()
    with change:
        code = main(["converge", *line, "--again", "--out", str(folder / "out")])
    (row,) = results_in(folder / "out").values()
    assert code == {"green": 0, "red": 1, "invalid": 2}[row["outcome"]]
    return row, sum(planted)

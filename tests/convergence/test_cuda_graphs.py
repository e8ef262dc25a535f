"""Training whose layers are replayed as CUDA graphs has the bits of training whose layers are not, or is not green."""

import contextlib
import itertools

import pytest

from fused_norm.convergence.suite import fused_for
from fused_norm.patcher import cuda_graphs

from ..conftest import HAS_GPU
from ..patcher.graph_stand_in import StandIn
from .runs import config_of, converge

pytestmark = pytest.mark.usefixtures("replays_anywhere")


def converged(folder, *line):
    """Train a Llama of two layers with layers that are replayed; return its row of the report."""
    model = ["--config", config_of(folder, num_hidden_layers=2)]
    line = (*model, "--axis", "graphs", "--feature", "norms", "--dtype", "bf16", "--steps", "3", *line)
    return converge(folder, *line)[0]


def test_replayed_training_has_the_bits_of_eager_training_and_is_compared_with_stock(tmp_path):
    row = converged(tmp_path)
    assert (row["outcome"], row["reasons"]) == ("green", [])
    bits = row["calls"]["bits"]
    assert {"losses", "gradient_norms", "evaluation_loss"} < bits.keys()
    trained = {name for name in bits if name.startswith(("model.", "lm_head."))}
    assert {name.removesuffix(".grad") for name in trained} == trained - {name for name in trained if ".grad" in name}
    assert len(trained) > 2 * 2 * 9
    assert set(bits.values()) == {0.0}
    assert len(row["fused"]["losses"]) == 3


@pytest.mark.usefixtures("replays_hand_out_their_memory")
def test_replays_that_hand_out_their_own_memory_are_red(tmp_path):
    row = converged(tmp_path)
    assert row["outcome"] == "red"
    assert any(row["calls"]["bits"].values())


@pytest.mark.skipif(HAS_GPU, reason="the stand-in fails on demand")
def test_layers_that_ran_eager_all_the_time_prove_nothing(tmp_path, monkeypatch):
    def failing(device):
        device = StandIn(device)
        device.fails = True
        return device

    monkeypatch.setattr(cuda_graphs, "make_device", failing)
    row = converged(tmp_path)
    assert row["outcome"] == "invalid"
    (reason,) = row["reasons"]
    assert reason.startswith("model.layers.0 and 1 other places: not replayed as CUDA graphs: ")
    assert "its capture failed" in reason
    assert not any(row["calls"]["bits"].values())


def test_training_that_differs_from_run_to_run_proves_nothing(tmp_path, monkeypatch):
    draws = itertools.count(1)

    def of_feature(feature):
        @contextlib.contextmanager
        def noisy(model):
            with fused_for(feature)(model) as sites:
                model.lm_head.weight.register_hook(lambda grad: grad * (1 + 2**-7 * next(draws)))
                yield sites

        return noisy

    monkeypatch.setattr("fused_norm.convergence.suite.fused_for", of_feature)
    row = converged(tmp_path)
    assert row["outcome"] == "invalid"
    assert row["reasons"] == ["training: two runs without CUDA graphs differ, so that their bits prove nothing"]

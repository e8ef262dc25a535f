"""Calls of a fused model are held to stock code one by one; compiled code needs an operator for every site."""

from types import SimpleNamespace

import pytest

from fused_norm.check.fused_calls import sites_not_compiled, sites_not_seen
from fused_norm.patcher import Site

from ..patcher.models import EXPERTS_ARE_MLPS
from .runs import config_of, converge

WAYS = ("", ", norms frozen", ", no gradients", ", its beginning", ", packed", ", one NaN")


@pytest.mark.parametrize(
    ("precision", "fault"),
    [
        ("mixed", None),
        ("mixed", "add_rms_norm_for_consumers-dropped"),
        pytest.param("mixed", "adapter-fallback", marks=pytest.mark.slow),
        # Adapters that multiply in float32 are left to PyTorch.
        pytest.param("fp32", None, marks=pytest.mark.slow),
    ],
)
def test_layers_with_adapters_and_their_norms_are_held_to_stock(precision, fault, tmp_path):
    line = ("--config", config_of(tmp_path), "--dtype", precision, "--axis", "lora-alone", "--steps", "1")
    row, planted = converge(tmp_path, *line, fault=fault)
    calls = row["calls"]
    assert bool(planted) == bool(fault)
    if fault == "adapter-fallback":
        assert len([site for site in calls["not_seen"] if site.endswith("(lora)")]) == 7
    elif fault:
        wrong = [check for check in row["checks"] if not check["ok"] and check["measure"] == "call_gradients"]
        assert row["outcome"] == "red"
        assert max(check["value"] for check in wrong) > 10
        assert max(calls["outputs"].values()) < 0.01
    else:
        assert (row["outcome"], calls["not_seen"]) == ("green", [])
        assert len({name for name in calls["outputs"] if name.endswith("_proj")}) == 7
        down = "model.layers.0.mlp.down_proj"
        places = "x", *(f"{down}.lora_{factor}.default.weight" for factor in "AB")
        assert {f"{down}: gradient of {place}" for place in places} < calls["gradients"].keys()


def test_a_head_and_its_loss_are_held_to_the_stock_formula(tmp_path):
    line = ("--dtype", "bf16", "--feature", "norms+loss", "--steps", "2")
    row, _ = converge(tmp_path, "--config", config_of(tmp_path), *line)
    assert row["outcome"] == "green", row["reasons"]
    head = "lm_head.fused_norm_cross_entropy"
    assert row["calls"]["losses"].keys() == {f"{head}{way}" for way in WAYS}
    assert {f"{head}: gradient of x", f"{head}: gradient of lm_head.weight"} < row["calls"]["turned"].keys()
    assert not [name for name in row["calls"]["outputs"] if name.startswith(head)]


@pytest.mark.skipif(EXPERTS_ARE_MLPS, reason="each expert is a module of its own")
def test_the_beginning_of_a_sequence_of_experts_has_as_many_positions_as_that_of_others(tmp_path):
    # Of one position the slope was 2.2: its few large numbers do not average their roundings out.
    config = config_of(tmp_path, "gpt_oss", hidden_size=104)
    row, _ = converge(tmp_path, "--config", config, "--dtype", "bf16", "--steps", "1")
    assert row["outcome"] == "green", row["reasons"]
    experts = "model.layers.0.mlp.experts"
    assert {f"{experts}{way}" for way in WAYS} < row["calls"]["outputs"].keys()
    assert row["calls"]["slopes"][f"{experts}, its beginning: gradient of {experts}.gate_up_proj"] < 1


def test_a_site_without_a_call_is_seen_only_where_it_may_be_idle_and_another_of_its_kind_is_not():
    first, second, gate = (Site(*names, "Module") for names in (("a", "norm"), ("b", "norm"), ("c", "mlp")))
    fused, stock = (
        SimpleNamespace(path=at, weighted=[at], operators=[by]) for at, by in (("a", "rms_norm"), ("b", ""))
    )
    assert sites_not_seen([first, second], [fused]) == ("b (norm)",)
    assert sites_not_seen([first, second], [fused], may_be_idle=True) == ()
    assert sites_not_seen([first, second], [fused, stock], may_be_idle=True) == ("b (norm)",)
    assert sites_not_seen([first, gate], [fused], may_be_idle=True) == ("c (mlp)",)


ADD, NORM, ROPE, SANDWICH, HEADS = (
    f"fused_norm.{name}_forward.default" for name in ("add_rms_norm", "rms_norm", "rope", "norm_add_norm", "qk_norm")
)


@pytest.mark.parametrize(
    ("kinds", "graphs", "not_seen"),
    [
        ("norm norm norm residual rope", [[NORM, ADD, NORM, ROPE]], ()),
        ("norm norm norm residual rope", [[NORM, NORM, NORM]], ("d (residual)", "e (rope)")),
        ("norm norm norm", [[SANDWICH, SANDWICH]], ()),
        ("qk qk rope", [[HEADS]], ()),
        # One of several graphs may run for many layers.
        ("norm norm norm rope", [[NORM], []], ("d (rope)",)),
    ],
)
def test_compiled_code_needs_a_call_for_every_site(kinds, graphs, not_seen):
    sites = [Site(path, kind, "Module") for path, kind in zip("abcde", kinds.split(), strict=False)]
    assert sites_not_compiled(sites, graphs) == not_seen

"""The command trains adapters, and what is frozen has the dtypes of people's own recipes."""

import json

import pytest
import torch

from fused_norm import FusedNormError
from fused_norm.cli import main

from ..conftest import slow_rows
from .runs import converge


@pytest.mark.parametrize(
    ("execution", "precision", "adapters", "norms", "dropout"),
    [
        ("lora", "fp32", 14, 5, 0),
        ("lora-dropout", "mixed", 14, 0, 0.05),
        *slow_rows(("qlora", "mixed", 14, 0, 0), ("qlora-qv", "mixed", 4, 0, 0)),
    ],
)
def test_adapters_are_trained_and_what_is_frozen_has_a_dtype_of_its_own(
    execution, precision, adapters, norms, dropout, tmp_path, monkeypatch
):
    models = []

    def seen(model):
        models.append(model)
        raise FusedNormError("seen")

    monkeypatch.setattr("fused_norm.convergence.suite.fused_for", lambda feature: seen)
    line = ["llama", "--steps", "1", "--dtype", precision, "--axis", execution, "--out", str(tmp_path)]
    assert main(["converge", *line]) == 2
    layers = [module for module in models[0].modules() if hasattr(module, "lora_A")]
    assert len(layers) == adapters
    trained = {name: parameter for name, parameter in models[0].named_parameters() if parameter.requires_grad}
    assert sum("lora_" in name for name in trained) == 2 * adapters
    assert sum("lora_" not in name for name in trained) == norms
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    frozen = {parameter.dtype for parameter in models[0].parameters() if not parameter.requires_grad}
    if execution.startswith("qlora"):
        assert frozen == {torch.float32, torch.uint8}
        states = [layer.base_layer.weight.quant_state for layer in layers]
        assert all(s.nested and s.quant_type == "nf4" and s.shape[1] % s.blocksize == 0 for s in states)
    else:
        assert frozen == {torch.float32 if precision == "fp32" else torch.bfloat16}
    assert not [name for name, parameter in trained.items() if not parameter.any()]
    for layer in layers:
        assert layer.scaling["default"] != 1
        assert getattr(layer.lora_dropout["default"], "p", 0) == dropout


@pytest.mark.slow
def test_no_two_controls_of_adapters_with_dropout_come_out_the_same(tmp_path):
    # Norms in fp32 alone hardly change what their readers cast to bf16.
    row, _ = converge(tmp_path, "qwen3", "--dtype", "mixed", "--axis", "qlora-dropout", "--steps", "2")
    assert row["outcome"] == "green", row["reasons"]
    (file,) = (tmp_path / "out" / "comparisons").iterdir()
    controls = json.loads(file.read_text())["controls"]
    assert len({str(control["drifts"]) for control in controls}) == len(controls) == 4

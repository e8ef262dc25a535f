"""axolotl's plugin manager loads the plugin, which patches a model with the options of the config."""

import pytest

pytest.importorskip("axolotl.integrations.base", reason="needs axolotl")

from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault
from pydantic import ValidationError

from fused_norm.integrations.axolotl import FusedNormArgs
from fused_norm.model_configs import build

from ..patcher.models import is_fused

NAME = "fused_norm.integrations.axolotl.FusedNormPlugin"


@pytest.fixture
def manager(monkeypatch):
    """Return the plugins of a process that has loaded only this plugin."""
    monkeypatch.setattr(PluginManager, "_instance", None)
    manager = PluginManager.get_instance()
    manager.register(NAME)
    return manager


@pytest.mark.parametrize("options", [None, {"mlp": False, "shared_inputs": False}])
def test_a_loaded_model_is_patched_with_the_options_of_the_config(options, manager):
    assert manager.get_input_args() == ["fused_norm.integrations.axolotl.FusedNormArgs"]
    model = build("qwen3", seed=0)
    manager.post_model_load(DictDefault(fused_norm=options), model)
    assert is_fused(model.model.norm)
    assert is_fused(model.model.layers[0].mlp) == (options is None)


def test_layers_are_to_be_replayed_if_the_config_says_so(manager, caplog):
    with caplog.at_level("INFO", "fused_norm"):
        manager.post_model_load(DictDefault(fused_norm={"cuda_graphs": True}), build("qwen3", seed=0))
    assert "; CUDA graphs in " in caplog.text


def test_misspelt_options_are_errors_of_the_config():
    assert FusedNormArgs(fused_norm={"recompute": True}).fused_norm == {"recompute": True}
    assert FusedNormArgs().fused_norm is None
    with pytest.raises(ValidationError, match="recomputes"):
        FusedNormArgs(fused_norm={"recomputes": True})
    with pytest.raises(ValidationError, match="cuda_graphs must be True or False, not 'yes'"):
        FusedNormArgs(fused_norm={"cuda_graphs": "yes"})
    with pytest.raises(ValidationError, match="contradicts"):
        FusedNormArgs(fused_norm={"norms": False, "residual": True})

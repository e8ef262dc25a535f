"""The examples' configs for axolotl and LLaMA-Factory name existing options, and load if these are installed."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from .checkpoints import save_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"


def recipe(name):
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def test_the_recipe_for_axolotl_names_the_plugin():
    (path,) = recipe("axolotl.yaml")["plugins"]
    module, _, name = path.rpartition(".")
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    assert f"\nclass {name}(BasePlugin):" in source


def test_axolotl_takes_its_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    config = pytest.importorskip("axolotl.cli.config", reason="needs axolotl")
    here = {"base_model": str(save_checkpoint("qwen3", tmp_path)), "bf16": False}
    settings = recipe("axolotl.yaml") | here
    loaded = config.load_cfg(str(EXAMPLES / "axolotl.yaml"), **here)
    del settings["datasets"]  # axolotl fills these with its defaults
    assert {name: loaded[name] for name in settings} == settings


def test_llama_factory_takes_its_recipe(tmp_path):
    hparams = pytest.importorskip("llamafactory.hparams", reason="needs LLaMA-Factory")
    here = {"model_name_or_path": str(save_checkpoint("qwen3", tmp_path)), "bf16": False, "use_cpu": True}
    settings = recipe("llama_factory.yaml")
    arguments = {name: value for part in hparams.get_train_args(settings | here) for name, value in vars(part).items()}
    assert arguments["dataset"] == [settings.pop("dataset")]
    assert arguments["lora_rank"] == settings["lora_rank"]
    assert arguments["enable_liger_kernel"] is settings["enable_liger_kernel"]

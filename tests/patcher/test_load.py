"""The hook at load: the models that it covers or leaves alone, its blocks, and its removal without a trace."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import inspect
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

import fused_norm
from fused_norm.model_configs import FAMILIES, build, tiny_config

from .models import sites, tokens

HOOKED = ("from_pretrained", "_from_config")
SITES = sites("qwen3")
LORA = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def descriptors() -> list[object]:
    return [*(vars(PreTrainedModel)[name] for name in HOOKED), vars(BaseTuner)["inject_adapter"]]


def adapters(reports: list[fused_norm.PatchReport]) -> list[int]:
    return [report.counts.get("lora", 0) for report in reports]


fused_sites = fused_norm.remove_fused_norm
"""Returns the number of patched modules; the model is stock afterwards."""


@pytest.fixture(autouse=True)
def _hook_is_gone_afterwards():
    before = descriptors()
    yield
    assert all(now is then for now, then in zip(descriptors(), before, strict=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Qwen3 in several shards."""
    path = tmp_path_factory.mktemp("qwen3")
    build("qwen3", seed=0).save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a LoRA adapter of ``checkpoint`` that changes the results."""
    path = tmp_path_factory.mktemp("adapter")
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    torch.manual_seed(0)
    peft.get_peft_model(base, LORA).save_pretrained(path)
    return path


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=tokens(length=9)).logits


class Recorder:
    """A class with a ``from_pretrained`` that records its arguments."""

    def __init__(self, result: object) -> None:
        self.result = result
        self.calls: list[tuple[tuple, dict]] = []

    def from_pretrained(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.result


def test_from_pretrained_patches_the_model_it_loads(checkpoint):
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    model, info = fused_norm.from_pretrained(AutoModelForCausalLM, checkpoint, output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-5, atol=1e-5)
    assert fused_sites(stock) == 0
    assert fused_sites(model) > 0


def test_from_pretrained_passes_every_argument_on_untouched():
    recorder = Recorder(build("llama", seed=0))
    kwargs = {"revision": "x", "dtype": torch.bfloat16, "norms": 1, "modules": object(), "strict": "theirs"}
    model = fused_norm.from_pretrained(recorder, "name", 7, fused_norm={"qk": False}, **kwargs)
    assert recorder.calls == [(("name", 7), kwargs)]
    assert model is recorder.result


@pytest.mark.parametrize(
    ("options", "error"),
    [({"nroms": True}, TypeError), ({"norms": False, "residual": True}, ValueError), (["norms"], TypeError)],
)
def test_bad_options_raise_before_anything_is_loaded_or_hooked(options, error):
    recorder = Recorder(None)
    with pytest.raises(error):
        fused_norm.from_pretrained(recorder, "name", fused_norm=options)
    assert recorder.calls == []
    if isinstance(options, dict):
        with pytest.raises(error), fused_norm.on_load(**options):
            pytest.fail("the block was entered")


def test_from_pretrained_raises_for_a_model_without_norms():
    bert = AutoModel.from_config(tiny_bert())
    with pytest.raises(fused_norm.FusedNormError):
        fused_norm.from_pretrained(Recorder(bert), "name")
    assert fused_norm.from_pretrained(Recorder(bert), "name", fused_norm={"strict": False}) is bert


def tiny_bert() -> BertConfig:
    return BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)


@pytest.mark.parametrize(
    "load",
    [
        lambda path: AutoModelForCausalLM.from_pretrained(path),
        lambda path: Qwen3ForCausalLM.from_pretrained(path),
        lambda path: Qwen3ForCausalLM.from_pretrained(path, output_loading_info=True)[0],
        lambda path: AutoModelForCausalLM.from_config(tiny_config("qwen3")),
        lambda path: Qwen3ForCausalLM._from_config(tiny_config("qwen3")),
        lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16),
    ],
    ids=["auto", "class", "loading info", "auto from config", "class from config", "dtype"],
)
def test_on_load_patches_every_way_of_building_a_model(checkpoint, load):
    with fused_norm.on_load() as reports:
        model = load(checkpoint)
    assert [report.counts for report in reports] == [SITES]
    assert fused_sites(model) > 0
    assert fused_sites(load(checkpoint)) == 0


def test_on_load_covers_a_model_on_the_meta_device():
    with fused_norm.on_load() as reports, torch.device("meta"):
        # A new eps, so that no norm was recognised before.
        AutoModelForCausalLM.from_config(tiny_config("qwen3", rms_norm_eps=3e-6))
    assert reports[0].counts == SITES


def test_on_load_covers_offload_to_disk(checkpoint, tmp_path):
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk", "lm_head": "cpu"}
    places |= {f"model.layers.{index}": "disk" for index in range(stock.config.num_hidden_layers)}
    with fused_norm.on_load() as reports:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map=places, offload_folder=tmp_path)
    assert model.model.norm.weight.is_meta
    assert reports[0].counts["norm"] == SITES["norm"]
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-5, atol=1e-5)


def test_on_load_covers_the_base_of_an_adapter(checkpoint, adapter):
    stock = AutoModelForCausalLM.from_pretrained(adapter)
    with fused_norm.on_load() as reports:
        named_by_the_adapter = AutoModelForCausalLM.from_pretrained(adapter)
        auto_peft = peft.AutoPeftModelForCausalLM.from_pretrained(adapter)
        around_a_base = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), adapter)
    assert [report.counts | {"lora": 0} for report in reports] == [SITES] * 5
    assert adapters(reports) == [4, 0, 4, 0, 4], "in a load, and twice behind one"
    for model in (named_by_the_adapter, auto_peft, around_a_base):
        torch.testing.assert_close(logits(model), logits(stock), rtol=1e-5, atol=1e-5)
        assert fused_sites(model) > 0


def add_adapter(model: nn.Module) -> None:
    try:
        model.add_adapter(LORA)
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(str(error))  # that of transformers 5.24 comes before the PEFT that it asks for


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(lambda model: peft.get_peft_model(model, LORA), id="get_peft_model"),
        pytest.param(lambda model: peft.inject_adapter_in_model(LORA, model), id="inject_adapter_in_model"),
        pytest.param(add_adapter, id="add_adapter"),
    ],
)
def test_adapters_that_come_inside_on_load_are_fused(checkpoint, put):
    with fused_norm.on_load(qk=False) as reports:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        put(model)
    assert adapters(reports) == [0, 4]
    assert [report.counts["qk"] for report in reports] == [0, 0], "with the same options"


def test_a_second_adapter_inside_on_load_leaves_layers_with_one_active(checkpoint):
    with fused_norm.on_load() as reports:
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), LORA)
        model.add_adapter("second", LORA)
    assert adapters(reports) == [0, 4, 4]


def test_adapters_of_models_that_a_block_has_not_patched_stay_pefts(checkpoint):
    with fused_norm.on_load() as reports:
        AutoModelForCausalLM.from_pretrained(checkpoint)
        del reports[:]
        model = peft.get_peft_model(Qwen3ForCausalLM(tiny_config("qwen3")), LORA)
    assert not reports
    assert fused_sites(model) == 0


def test_adapters_belong_to_the_block_that_has_loaded_the_model(checkpoint):
    with fused_norm.on_load() as outer:
        with fused_norm.on_load(mlp=False) as reports:
            model = AutoModelForCausalLM.from_pretrained(checkpoint)
            with fused_norm.on_load(qk=False) as inner:
                peft.inject_adapter_in_model(LORA, model)
            late = AutoModelForCausalLM.from_pretrained(checkpoint)
        peft.inject_adapter_in_model(LORA, late)
    assert adapters(reports) == adapters(outer) == [0, 4, 0]
    assert [report.counts["mlp"] for report in reports] == [0, 0, 0]
    assert all(report.counts["rope"] for report in reports)
    assert inner == []


def test_adapters_that_come_while_another_model_is_built_wait_for_it(checkpoint, monkeypatch):
    with fused_norm.on_load() as reports:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        put = staticmethod(lambda: peft.inject_adapter_in_model(LORA, model))
        monkeypatch.setattr(Pair, "while_built", put)
        Pair._from_config(PairConfig())
    assert [report.model for report in reports] == ["Qwen3ForCausalLM", "Pair"]


def test_a_model_is_patched_while_another_thread_is_building_one(checkpoint, monkeypatch):
    is_built, may_end = threading.Event(), threading.Event()

    def wait():
        is_built.set()
        may_end.wait(20)

    monkeypatch.setattr(Pair, "while_built", staticmethod(wait))
    with fused_norm.on_load(everywhere=True) as reports, ThreadPoolExecutor(1) as thread:
        thread.submit(Pair._from_config, PairConfig())
        assert is_built.wait(20)
        AutoModelForCausalLM.from_pretrained(checkpoint)
        assert [report.model for report in reports] == ["Qwen3ForCausalLM"]
        may_end.set()
    assert [report.model for report in reports] == ["Qwen3ForCausalLM", "Pair"]


def test_a_model_that_was_loaded_in_a_block_is_freed_inside_it(checkpoint):
    with fused_norm.on_load():
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        fused_norm.apply_fused_norm(model, recompute=True)
        model(input_ids=tokens()).logits.sum().backward()
        held = weakref.ref(model)
        del model
        gc.collect()
        assert held() is None


class PairConfig(PretrainedConfig):
    model_type = "pair"


class Pair(PreTrainedModel):
    """A model that builds two others when it is built, and then calls ``while_built``."""

    config_class = PairConfig
    while_built = staticmethod(lambda: None)

    def __init__(self, config: PairConfig) -> None:
        super().__init__(config)
        self.left = AutoModel.from_config(tiny_config("llama"))
        self.right = LlamaForCausalLM._from_config(tiny_config("llama"))
        type(self).while_built()
        self.post_init()


def test_a_model_that_builds_others_is_patched_once_and_whole(tmp_path):
    Pair(PairConfig()).save_pretrained(tmp_path)
    with fused_norm.on_load() as reports:
        Pair.from_pretrained(tmp_path)
        Pair._from_config(PairConfig())
    assert [report.model for report in reports] == ["Pair", "Pair"]
    assert [report.counts["norm"] for report in reports] == [2 * FAMILIES["llama"].sites()["norm"]] * 2


def test_on_load_raises_for_a_model_without_norms_unless_told():
    with fused_norm.on_load() as reports, pytest.raises(fused_norm.FusedNormError):
        AutoModel.from_config(tiny_bert())
    assert reports == []
    with fused_norm.on_load(strict=False) as reports:
        AutoModel.from_config(tiny_bert())
    assert [len(report.fused) for report in reports] == [0]


def test_a_failed_load_leaves_the_hook_working_and_an_error_in_the_block_leaves_none(checkpoint, tmp_path):
    with pytest.raises(KeyError), fused_norm.on_load() as reports:  # noqa: PT012
        with pytest.raises(OSError, match="safetensors"):
            Qwen3ForCausalLM.from_pretrained(tmp_path, config=tiny_config("qwen3"))
        AutoModelForCausalLM.from_pretrained(checkpoint)
        raise KeyError
    assert [report.counts for report in reports] == [SITES]


def test_the_hook_keeps_signature_and_docstring():
    plain = [(inspect.signature(getattr(Qwen3ForCausalLM, name)), getattr(Qwen3ForCausalLM, name)) for name in HOOKED]
    with fused_norm.on_load():
        for name, (signature, method) in zip(HOOKED, plain, strict=True):
            hooked = getattr(Qwen3ForCausalLM, name)
            assert inspect.signature(hooked) == signature
            assert hooked.__doc__ == method.__doc__
            assert hooked.__self__ is Qwen3ForCausalLM


@pytest.mark.parametrize("options", [fused_norm.FuseOptions(qk=False), {"qk": False}])
def test_options_of_from_pretrained_win_inside_on_load(checkpoint, options):
    with fused_norm.on_load() as reports:
        fused_norm.from_pretrained(AutoModelForCausalLM, checkpoint, fused_norm=options)
    assert [report.counts.get("qk", 0) for report in reports] == [0]


def in_thread(function) -> object:
    """Return the result of ``function`` in a thread that starts with an empty context."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.Context().run, function).result()


def build_one() -> nn.Module:
    return AutoModelForCausalLM.from_config(tiny_config("qwen3"))


def test_everywhere_covers_other_threads_and_their_own_block_wins():
    def with_own_block():
        with fused_norm.on_load(qk=False) as own:
            build_one()
        return own

    with fused_norm.on_load():
        assert fused_sites(in_thread(build_one)) == 0, "not everywhere"
    with fused_norm.on_load(everywhere=True) as reports:
        assert fused_sites(in_thread(build_one)) > 0
        own = in_thread(with_own_block)
    assert [report.counts.get("qk", 0) for report in own] == [0]
    assert [report.counts.get("qk", 0) for report in reports] == [SITES["qk"], 0]
    assert fused_sites(in_thread(build_one)) == 0


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_innermost_options_hold_and_outer_lists_hear_of_it(everywhere):
    make = partial(in_thread, build_one) if everywhere else build_one
    with fused_norm.on_load(everywhere=everywhere) as outer:
        with fused_norm.on_load(everywhere=everywhere, qk=False) as inner:
            make()
        make()
    assert [report.counts["qk"] for report in inner] == [0]
    assert [report.counts["qk"] for report in outer] == [0, SITES["qk"]]


def test_a_block_that_has_ended_gets_no_report_of_one_that_was_opened_in_it(checkpoint):
    told = []
    with contextlib.ExitStack() as inner_block:
        with fused_norm.on_load(notify=told.append) as outer:
            # This task was started in the block and outlives it.
            task = contextvars.copy_context()
            inner = task.run(inner_block.enter_context, fused_norm.on_load())
            inner_block.callback(task.run, inner_block.pop_all().close)
        task.run(build_one)
        task.run(fused_norm.from_pretrained, AutoModelForCausalLM, checkpoint)
    assert [report.counts for report in inner] == [SITES, SITES]
    assert outer == told == []


def test_a_context_that_outlives_its_block_is_stock():
    with fused_norm.on_load():
        kept = contextvars.copy_context()
    with fused_norm.on_load() as reports:
        assert fused_sites(kept.run(build_one)) == 0
    assert reports == []


def test_somebody_elses_replacement_is_left_with_a_warning(caplog):
    original = vars(PreTrainedModel)["_from_config"]
    with fused_norm.on_load():
        below = vars(PreTrainedModel)["_from_config"]

        @classmethod
        def theirs(cls, *args, **kwargs):
            return below.__get__(None, cls)(*args, **kwargs)

        PreTrainedModel._from_config = theirs
    try:
        assert vars(PreTrainedModel)["_from_config"] is theirs
        assert "PreTrainedModel._from_config was replaced" in caplog.text
        assert fused_sites(build_one()) == 0
        with fused_norm.on_load() as reports:
            build_one()
        assert len(reports) == 1
        assert vars(PreTrainedModel)["_from_config"] is theirs
    finally:
        PreTrainedModel._from_config = original


def test_each_model_is_logged_in_one_line_and_told(caplog):
    told = []
    with caplog.at_level(logging.INFO, "fused_norm"), fused_norm.on_load(notify=told.append) as reports:
        build_one()
    lines = [record.getMessage() for record in caplog.records if record.name == "fused_norm"]
    (line,) = [line for line in lines if line.startswith("Qwen3ForCausalLM")]
    assert f"{SITES['norm']} norm" in line
    assert "\n" not in line
    assert told == reports

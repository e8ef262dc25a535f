"""Models with replayed layers: copied, saved, loaded, patched again, put back; and layers that say why they are not."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import fused_norm
from fused_norm.check.against_float64 import check_step
from fused_norm.patcher import cuda_graphs, survey

from .graph_cases import DEVICE, HAS_GPU, LAYERS, VOCABULARY, base_model, patched
from .graph_stand_in import StandIn
from .models import assert_same_bits, step

PATHS = [f"model.layers.{number}" for number in range(LAYERS)]
NO_DEVICE = "there is no CUDA device"


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay by a stand-in if there is no GPU."""
    if not HAS_GPU:
        monkeypatch.setattr(cuda_graphs, "make_device", StandIn)
        monkeypatch.setattr(survey, "why_no_graphs", lambda devices: None)


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def replayed(model: Any | None = None, steps: int = 3) -> tuple[Any, Any]:
    """Patch a model, take steps; return the model and the counts of its replays."""
    model = base_model() if model is None else model
    replays = patched(model, cuda_graphs=True).replays
    for _ in range(steps):
        step(model, ids())
    assert replays.forwards == replays.backwards == LAYERS * max(0, steps - 1), replays
    return model, replays


def holders(model: Any) -> list[str]:
    """Return the paths of the modules that have graphs."""
    return [path for path, module in model.named_modules() if "_fused_norm_graphs" in vars(module)]


def saved(model: Any) -> Any:
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "torch.save": saved}


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_has_the_option_and_captures_graphs_of_its_own(way: str) -> None:
    model, replays = replayed()
    expected, counts = step(model, ids(1)), copy.deepcopy(replays)
    twin = COPIES[way](model)
    assert holders(twin) == PATHS
    for _ in range(3):
        assert_same_bits(step(twin, ids(1)), expected)
    assert replays == counts, "steps of the copy are no steps of the original"
    of_twin = patched(twin, cuda_graphs=True).replays
    assert (of_twin.captures, of_twin.forwards, of_twin.backwards) == (LAYERS, 2 * LAYERS, 2 * LAYERS)
    assert_same_bits(step(model, ids(1)), expected)
    assert replays.forwards == counts.forwards + LAYERS


@pytest.mark.usefixtures("replaying")
def test_patched_again_a_model_keeps_its_graphs_and_without_the_option_it_has_none() -> None:
    model, replays = replayed()
    expected = step(model, ids(1))
    assert patched(model, cuda_graphs=True).replays is replays
    assert_same_bits(step(model, ids(1)), expected)
    assert replays.captures == LAYERS
    report = patched(model)
    assert (report.graphs, report.replays) == (None, None)
    assert holders(model) == []
    assert_same_bits(step(model, ids(1)), expected)
    _, again = replayed(model)
    assert again is not replays
    assert again.captures == LAYERS
    assert holders(model) == PATHS


@pytest.mark.usefixtures("replaying")
def test_a_model_that_is_put_back_has_no_graphs_left() -> None:
    stock = base_model()
    before = [(type(module), dict(vars(module))) for module in stock.modules()]
    expected = step(stock, ids())
    model, replays = replayed(stock)
    assert fused_norm.remove_fused_norm(model) > LAYERS
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before
    counts = copy.deepcopy(replays)
    assert_same_bits(step(model, ids()), expected)
    assert replays == counts


@pytest.mark.usefixtures("replaying")
def test_a_printed_model_and_its_report_say_which_layers_are_replayed() -> None:
    model = base_model()
    assert "graphs" not in str(model)
    report = patched(model, cuda_graphs=True)
    assert re.findall(r"fused: .*graphs", str(model))
    assert report.summary().endswith(f"; CUDA graphs in {LAYERS} layers")
    assert [row.path for row in report.graphs] == PATHS
    assert [row["path"] for row in json.loads(report.to_json())["graphs"]] == PATHS


@pytest.mark.usefixtures("replaying")
def test_two_models_in_turns_have_graphs_and_counts_of_their_own() -> None:
    models = [replayed(steps=0), replayed(steps=0)]
    patched(eager := base_model())
    for seed in range(3):
        expected = step(eager, ids(seed))
        for model, _ in models:
            assert_same_bits(step(model, ids(seed)), expected)
    for _, replays in models:
        assert (replays.captures, replays.forwards, replays.backwards) == (LAYERS, 2 * LAYERS, 2 * LAYERS)


@pytest.mark.usefixtures("replaying")
def test_models_are_loaded_with_the_option(tmp_path: Any) -> None:
    base_model().save_pretrained(tmp_path)
    options = {"cuda_graphs": True, "modules": "model.norm"}
    model = fused_norm.from_pretrained(AutoModelForCausalLM, tmp_path, fused_norm=options)
    assert holders(model) == PATHS
    with fused_norm.on_load(**options) as reports:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert holders(model) == PATHS
    assert [row.reason for report in reports for row in report.graphs] == [None] * LAYERS


@pytest.mark.usefixtures("replaying")
def test_a_check_of_a_step_compares_a_replayed_one() -> None:
    options = {"cuda_graphs": True, "modules": "model.norm"}
    tokens = torch.randint(0, VOCABULARY, (2, 20), device=DEVICE)
    result = check_step(base_model(), tokens, truth=torch.float64, options=options)
    replays = result.report.replays
    assert result.ok
    assert replays.forwards == replays.backwards >= LAYERS
    assert (result.replay.why_not, result.replay.differing) == (None, ())


def reasons(model: Any) -> list[str | None]:
    """Patch a model; return the reasons of the rows of its layers. Layers without a reason have graphs, no others."""
    report = patched(model, cuda_graphs=True)
    assert [row.path for row in report.graphs] == PATHS
    assert holders(model) == [row.path for row in report.graphs if row.reason is None]
    assert (report.replays is None) == (not holders(model))
    return [row.reason for row in report.graphs]


def checkpoint(model: Any) -> None:
    model.gradient_checkpointing_enable()
    model.model.layers[0].gradient_checkpointing = False


def compile_one(model: Any) -> None:
    model.model.layers[1].compile(backend="eager")


def replace_a_forward(model: Any) -> None:
    forward = model.model.layers[1].forward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.model.layers[1].forward = theirs


SOME_LAYERS: dict[str, tuple[Callable[[Any], None], list[str | None]]] = {
    "gradient checkpointing": (
        checkpoint,
        [None, *["gradient checkpointing is on in this layer; recompute takes its place"] * (LAYERS - 1)],
    ),
    "a compiled layer": (
        compile_one,
        [None, "it is compiled; torch.compile has graphs of its own, mode='reduce-overhead'", *[None] * (LAYERS - 2)],
    ),
    "a replaced forward": (
        replace_a_forward,
        [
            None,
            f"its forward was replaced on the instance, by {__name__}.replace_a_forward.<locals>.theirs",
            *[None] * (LAYERS - 2),
        ],
    ),
}


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("what", SOME_LAYERS)
def test_a_layer_that_cannot_be_replayed_says_why_and_others_are(what: str, caplog: pytest.LogCaptureFixture) -> None:
    change, expected = SOME_LAYERS[what]
    change(model := base_model())
    assert reasons(model) == expected
    (reason,) = {*expected} - {None}
    (warning,) = [message for message in caplog.messages if message.startswith("cuda_graphs")]
    assert warning == f"cuda_graphs does nothing in some of {LAYERS} layers: {reason}"


@pytest.mark.usefixtures("replaying")
def test_in_a_compiled_model_no_layer_is_replayed() -> None:
    (model := base_model()).compile(backend="eager")
    assert {*reasons(model)} == {SOME_LAYERS["a compiled layer"][1][1]}


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("order", ["shard, patch", "patch, shard, patch"])
def test_layers_that_fsdp2_shards_are_not_replayed(order: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = base_model().cpu()
        if order.startswith("patch"):
            fused_norm.apply_fused_norm(model)
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        report = fused_norm.apply_fused_norm(model, cuda_graphs=True)
        assert [row.path for row in report.graphs] == PATHS
        assert {row.reason for row in report.graphs} == {"FSDP gives its parameters other memory in each step"}
        assert holders(model) == []
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("replaying")
def test_replayed_layers_that_are_sharded_afterwards_run_eager() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, eager = base_model().cpu(), base_model().cpu()
        patched(eager)
        replays = patched(model, cuda_graphs=True).replays
        mesh = init_device_mesh("cpu", (1,))
        for sharded in (model, eager):
            for layer in sharded.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(sharded, mesh=mesh)
        for seed in range(5):
            losses = [run(input_ids=ids(seed).cpu(), labels=ids(seed).cpu()).loss for run in (model, eager)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
        assert (replays.forwards, sum(replays.eager.values())) == (0, 5 * LAYERS), replays
    finally:
        dist.destroy_process_group()


def as_under_zero3(model: Any) -> Any:
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    return nullcontext()


EAGER_STEPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "ZeRO-3": (as_under_zero3, "DeepSpeed's ZeRO-3 gives parameters other memory in each step"),
    "activation offloading": (
        lambda model: torch.autograd.graph.save_on_cpu(),
        "saved-tensor hooks are active, as under gradient checkpointing or offloading",
    ),
}


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("what", EAGER_STEPS)
def test_a_step_that_cannot_be_replayed_runs_eager_and_is_counted_with_its_reason(what: str) -> None:
    patched(eager := base_model())
    expected = step(eager, ids())
    replays = patched(model := base_model(), cuda_graphs=True).replays
    context, reason = EAGER_STEPS[what]
    with context(model):
        for _ in range(3):
            assert_same_bits(step(model, ids()), expected)
    assert (replays.forwards, replays.eager) == (0, {reason: 3 * LAYERS})


@pytest.mark.usefixtures("replaying")
def test_while_a_layer_runs_calls_of_another_thread_run_eager() -> None:
    first, started, go_on = threading.current_thread(), threading.Event(), threading.Event()

    class Activation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is not first:
                started.set()
                assert go_on.wait(60)
            return nn.functional.silu(x)

    model = base_model()
    model.model.layers[0].mlp.act_fn = Activation()
    replays = patched(model, cuda_graphs=True, mlp=False).replays  # which calls the activation
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(model(input_ids=ids()).logits))
    thread.start()
    try:
        assert started.wait(60)
        logits = model(input_ids=ids()).logits
        assert replays.eager == {"another thread runs a layer of this model": LAYERS}
    finally:
        go_on.set()
        thread.join()
    assert torch.equal(results[0], logits)
    for _ in range(2):
        assert torch.equal(model(input_ids=ids()).logits, logits)
    assert replays.forwards >= LAYERS


def test_without_a_gpu_no_layer_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reasons(base_model().cpu()) == [NO_DEVICE] * LAYERS


def test_on_rocm_no_layer_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert reasons(base_model()) == ["CUDA graphs on ROCm have not been tried"] * LAYERS


def test_a_model_on_several_devices_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = base_model().cpu()
    model.model.layers[1].to("meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reasons(model) == ["its model is spread over 2 devices"] * LAYERS

"""Each rule of the graphs is needed: left out, a case differs from eager, or a backward finds its activations gone."""

from __future__ import annotations

import inspect
import random
import textwrap
import weakref
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fused_norm
from fused_norm.patcher import cuda_graphs, graph_guards

from .graph_cases import CASES, DEVICE, HAS_GPU, ONE, TWO, Run
from .graph_stand_in import StandIn
from .test_cuda_graphs import differences, stand_in  # noqa: F401

PAIR, GRAPHS = "GraphPair", "LayerGraphs"

RULES = {
    "gradients are copied": ("", "copies_of", "= list(tensors)", "= tensors\n    return tensors", "gradients_kept"),
    "small gradients are copied": ("FlatGrads", "copies", "self.grads.clone()", "self.grads", "gradients_kept"),
    "nobody holds the output": (PAIR, "why_not_now", "!= self._owners", "is None", "hidden_states_kept"),
    "shared arguments wait": (PAIR, "why_not_now", "not shared.is_free()", "False", "positions_in_flight"),
    "flights fit": (GRAPHS, "fits", "return ", "return True or ", "two_shapes_in_flight"),
    "uses have their own gradients": ("Uses", "__init__", "range(count - 1)", "()", "hidden_states_returned"),
    "streams take turns": (PAIR, "__call__", "self._device.take_turn(self._call.stream)", "pass", "streams_in_turns"),
    "streams take turns in backwards": (
        PAIR, "_replayed_grads", "self._device.take_turn(self._call.stream)", "pass", "streams_in_turns",
    ),
    "random numbers are those of the forward": (
        PAIR, "_recomputed_grads", "device.set_random_state(flight.random_state)", "pass", "backward_from_within",
    ),
    "random numbers go on after it": (
        PAIR, "_recomputed_grads", "device.set_random_state(after)", "pass", "backward_from_within",
    ),
}  # fmt: skip
"""The class and the method that has a rule, its text, that without it, and the case that needs it."""

KEYS = {
    "attributes": (
        "Snapshot",
        "_read",
        "*chain.from_iterable([read(attributes)",
        "*chain.from_iterable([() and (attributes)",
        "attributes_written",
    ),
    "contents of dictionaries": (
        "Snapshot",
        "_read",
        "*chain.from_iterable(map(_values_of, self._mappings)),",
        "",
        "adapters_scaled_and_switched",
    ),
    "classes": (
        "Snapshot",
        "_read",
        "*chain.from_iterable([read(cls)",
        "*chain.from_iterable([() and (cls)",
        "classes_patched",
    ),
    "memory": ("", "_memory_test", '(" and ".join(tests) or "True")', '"True"', "parameters_moved"),
    "flags": ("", "flags", "switch.depth == 0,", "", "fusing_disabled_between"),
    "hooks": ("Snapshot", "is_now", "RemovableHandle.next_id != self._handles", "False", "hooks_and_forwards_inside"),
}
"""The same of what is asked before a replay; the stand-in asks the module itself, so a GPU alone tells."""


def module_of(name: str) -> Any:
    """Return the module in which a rule's function is called, or its class is."""
    pairs = inspect.getmodule(getattr(cuda_graphs, PAIR))
    gradients = inspect.getmodule(pairs.Uses)
    return next(module for module in (pairs, gradients, cuda_graphs) if hasattr(module, name))


def plant(monkeypatch: pytest.MonkeyPatch, module: Any, cls: str, name: str, old: str, new: str) -> None:
    """Replace a part of the text of a function."""
    owner = getattr(module, cls) if cls else module
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source
    namespace: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<{name} with a fault>", "exec"), function.__globals__, namespace)
    monkeypatch.setattr(owner, name, namespace[name])


def is_caught(name: str, mode: str, *, all_fused: bool = False) -> bool:
    """Return whether a case is red."""
    few = {"modules": None if all_fused else "model.norm"}  # stock layers use their input several times
    eager, replayed = Run(mode, graphs=False, **few), Run(mode, graphs=True, **few)
    CASES[name](eager)
    try:
        CASES[name](replayed)
    except (AssertionError, RuntimeError):
        return True
    return differences(replayed, eager) != []


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_left_out_is_seen(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *fault, case = RULES[rule]
    if HAS_GPU and case == "streams_in_turns":
        pytest.skip("whether streams overlap is up to the GPU")
    plant(monkeypatch, module_of(fault[0] or fault[1]), *fault)
    if fault[1] == "copies_of":
        monkeypatch.setattr(module_of("_FLAT"), "_FLAT", 0)
    assert is_caught(case, "lora" if "random" in rule or "small" in rule else "full")


@pytest.mark.gpu
@pytest.mark.parametrize("key", KEYS)
def test_a_key_left_out_is_seen(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *fault, case = KEYS[key]
    plant(monkeypatch, cuda_graphs if key == "flags" else graph_guards, *fault)
    assert is_caught(case, "lora" if "dictionaries" in key else "full", all_fused=key == "flags")


@pytest.mark.gpu
@pytest.mark.parametrize("is_asked", [True, False])
def test_the_value_of_an_argument_is_asked(is_asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_asked:
        plant(monkeypatch, graph_guards, "LatestArguments", "read", "number = self._numbers.get(spec)", "number = 0")
    torch.manual_seed(0)
    model = Model("adds a number").to(DEVICE)
    fused_norm.apply_fused_norm(model, strict=False, cuda_graphs=True)
    x = torch.ones(3, 8, device=DEVICE)
    outputs = [model(x, number).detach().clone() for _ in range(3) for number in (1.0, 5.0)]
    assert torch.equal(outputs[-1], outputs[-2]) is not is_asked


def test_a_parameter_written_before_the_backward_is_an_error() -> None:
    run = Run("full", graphs=True)
    run.warm_up(3)
    loss = run.loss(ONE, 3)
    with torch.no_grad():
        next(run.layers[1].parameters()).add_(1)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()


def test_a_second_backward_without_retain_graph_is_an_error() -> None:
    run = Run("full", graphs=True)
    run.warm_up(3)
    loss = run.loss(ONE, 3)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"second time|second backward"):
        loss.backward()


def test_create_graph_computes_the_layer_again() -> None:
    runs = {graphs: Run("full", graphs=graphs, attention="eager") for graphs in (True, False)}
    for run in runs.values():
        run.warm_up(3)
        grads = torch.autograd.grad(run.loss(ONE, 3), run.trained, create_graph=True, allow_unused=True)
        sum(grad.float().square().sum() for grad in grads if grad is not None).backward()
        run.gradients()
    for one, other in zip(runs[True].results, runs[False].results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one - other).float().norm() <= 0.05 * other.float().norm()
    assert runs[True].replays.recomputed["create_graph=True"] == len(runs[True].layers)


class Layer(nn.Module):
    """A layer that does one more thing than a linear, as ``what`` says."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.what, self.calls = what, 0
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, *others: Any, num_items_in_batch: Any = None) -> Any:
        y: Tensor = self.linear(x)
        if self.what == "counts":
            self.calls += 1
        elif self.what == "writes a buffer":
            self.seen.add_(1)
        elif self.what == "writes its input":
            others[0].add_(1)
        elif self.what == "returns its input":
            return y, x
        elif self.what == "returns a view":
            return y, y[:1]
        elif self.what == "returns a dictionary":
            return {"y": y}
        elif self.what == "returns an object":
            return y, self
        elif self.what == "adds a number":
            y = y + others[0]
        elif self.what == "draws as Python does":
            y = y * random.random()
        elif self.what == "draws as NumPy does":
            y = y * np.random.random()
        elif self.what == "draws as PyTorch does on a CPU":
            y = y * float(torch.rand(()))
        elif self.what == "reads the count":
            y = y * (num_items_in_batch or 1)
        elif self.what == "returns more":
            return y, None, 3
        return y


class Model(nn.Module):
    """A list of such layers, one norm for something to fuse."""

    def __init__(self, what: str, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.layers = nn.ModuleList([Layer(what) for _ in range(2)])
        self.norm = nn.RMSNorm(8, eps=1e-6)

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        for layer in self.layers:
            out = layer(x, *others, **named)
            x = out if isinstance(out, Tensor) else out["y"] if isinstance(out, dict) else out[0]
            x = x if self.scale == 1 else x * self.scale
        y: Tensor = self.norm(x)
        return y


def tried(what: str, *others: Any, steps: int = 4, **named: Any) -> tuple[Any, list[Tensor]]:
    """Return the counts of replays of such a model, and outputs and gradients of its steps."""
    torch.manual_seed(0)
    model = Model(what).to(DEVICE)
    report = fused_norm.apply_fused_norm(model, strict=False, cuda_graphs=True)
    results = []
    for step in range(steps):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE).requires_grad_()
        y = model(x.clone(), *others, **named)
        y.sum().backward()
        results += [y.detach().clone(), x.grad.clone()]
    return report.replays, results


@pytest.mark.parametrize(
    "what",
    [
        "counts", "writes a buffer", "writes its input", "returns its input", "returns a view",
        "returns a dictionary", "returns an object", "draws as Python does", "draws as NumPy does",
        pytest.param("draws as PyTorch does on a CPU", marks=pytest.mark.gpu),
    ],
)  # fmt: skip
def test_a_layer_that_does_more_than_return_tensors_runs_eager(what: str) -> None:
    replays, _ = tried(what, torch.ones(2, device=DEVICE))
    assert replays.forwards == 0
    reasons = {
        "counts": "its forward changes its modules' attributes",
        "writes a buffer": "it writes into an argument, a parameter or a buffer",
        "writes its input": "it writes into an argument, a parameter or a buffer",
        "returns its input": "an output is, or is a view of, an argument or another output",
        "returns a view": "an output is, or is a view of, an argument or another output",
        "returns a dictionary": "it returns a dict",
        "returns an object": "it returns more than tensors",
        "draws as Python does": "it draws random numbers on the host",
        "draws as NumPy does": "it draws random numbers on the host",
        "draws as PyTorch does on a CPU": "it draws random numbers on the host",
    }
    assert replays.eager[reasons[what]] > 0


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_pair_whose_last_flight_is_not_over_is_not_replayed(is_frozen, is_asked, monkeypatch) -> None:
    """Two forwards before their backwards, with layers whose outputs nobody holds."""
    if not is_asked:
        plant(monkeypatch, module_of(PAIR), PAIR, "why_not_now", "not flight.is_done", "False")
    torch.manual_seed(0)
    models = [Model("", scale=0.5).to(DEVICE) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, graphs in zip(models, (True, False), strict=True):
        model.layers[0].requires_grad_(not is_frozen)
        fused_norm.apply_fused_norm(model, strict=False, cuda_graphs=graphs)
    for step in range(6):
        x, z = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        for model in models:
            first, second = model(x), model(z)
            first.square().sum().backward()
            second.square().sum().backward()
    replayed, eager = ([layer.linear.weight.grad for layer in model.layers[is_frozen:]] for model in models)
    assert all(map(torch.equal, replayed, eager)) is is_asked, models[0].layers[0]._fused_norm_graphs.graphs.replays


def test_a_layer_that_returns_numbers_beside_tensors_is_replayed() -> None:
    replays, _ = tried("returns more")
    assert replays.forwards == replays.backwards == 6


def test_a_layer_that_reads_the_count_of_items_runs_eager() -> None:
    replays, _ = tried("reads the count", num_items_in_batch=5, steps=8)
    assert replays.forwards == 0
    assert "it cannot be captured: it reads num_items_in_batch" in replays.eager, replays


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, torch.nn.Parameter(torch.ones(1))], ids=["object", "dict", "parameter"]
)
def test_an_argument_that_is_no_tensor_and_no_number_runs_eager(value: Any) -> None:
    replays, _ = tried("", value)
    assert replays.forwards == 0
    assert replays.eager[f"an argument is a {type(value).__name__}"] == 8


def test_a_model_that_hardly_replays_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tried("", object(), steps=60)
    told = [record.getMessage() for record in caplog.records if "less than half" in record.getMessage()]
    assert told == [
        "cuda_graphs: less than half of the calls of layers were replayed in 50 forwards; 100 calls because an argument"
        " is a object"
    ]


def test_an_attribute_that_nobody_compares_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    class Box:
        pass

    create = Layer.__init__

    def with_box(layer: Layer, what: str) -> None:
        create(layer, what)
        layer.box = Box()

    monkeypatch.setattr(Layer, "__init__", with_box)
    replays, _ = tried("")
    assert replays.eager["nobody compares box of Layer, a Box"] == 8


@pytest.mark.parametrize(
    ("where", "name", "value", "default"),
    [
        (torch.backends, "fp32_precision", "tf32", "none"),  # as TrainingArguments(tf32=True) sets it
        (torch.backends.cuda.matmul, "fp32_precision", "tf32", "none"),
        (torch.backends.cuda.matmul, "allow_fp16_accumulation", True, False),
    ],
)
def test_precisions_of_products_are_asked_wherever_they_are_set(
    where: Any, name: str, value: Any, default: Any
) -> None:
    run = Run("full", graphs=True)
    run.warm_up(3)
    captures = run.replays.captures
    try:
        setattr(where, name, value)
        run.warm_up(3)
        assert run.replays.captures == 2 * captures > 0
    finally:
        setattr(where, name, default)
    run.warm_up(1)
    assert run.replays.captures == 2 * captures


def test_numbers_in_arguments_are_told_apart() -> None:
    for one, other in ((1, True), (0.0, -0.0), (1, 1.0)):
        latest = graph_guards.LatestArguments()
        x = torch.ones(2)
        assert latest.read((x, one), {}).number != latest.read((x, other), {}).number
        assert latest.read((x, one), {}).number == latest.read((x, one), {}).number


@pytest.mark.skipif(not HAS_GPU, reason="the stand-in has no streams")
def test_a_capture_leaves_the_random_numbers_of_replays_alone() -> None:
    run = Run("full", graphs=True)
    run.warm_up(2)
    device = run.layers[0]._fused_norm_graphs.graphs.device
    drawn = [torch.zeros(1000, device="cuda") for _ in range(3)]
    expected = [torch.zeros(1000, device="cuda") for _ in drawn]

    def draw(into: Tensor) -> None:
        torch.cuda._sleep(50_000_000)  # so long that the next capture begins before it draws
        into.uniform_()

    torch.manual_seed(3)
    for tensor in expected:
        tensor.uniform_()
    torch.manual_seed(3)
    graphs = []
    for tensor in drawn:
        replay, graph = device.capture(lambda tensor=tensor: draw(tensor))
        graphs.append(graph)
        replay()
    assert all(map(torch.equal, drawn, expected))


@pytest.mark.skipif(HAS_GPU, reason="the stand-in fails on demand")
def test_a_capture_that_fails_three_times_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Run("full", graphs=False)
    run = Run("full", graphs=True)
    for each in (run, eager):
        each.step()
    run.layers[0]._fused_norm_graphs.graphs.device.fails = True
    for each in (run, eager):
        each.warm_up(5)
    assert differences(run, eager) == []
    assert run.replays.captures == 0
    assert run.replays.eager["its capture failed"] == 3 * len(run.layers)
    assert run.replays.eager["it cannot be captured: no capture today"] == 2 * len(run.layers)


@pytest.mark.skipif(HAS_GPU, reason="the stand-in fails on demand")
def test_a_device_without_graphs_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no pool of memory")

    monkeypatch.setattr(StandIn, "__init__", fail)
    eager, run = Run("full", graphs=False), Run("full", graphs=True)
    for each in (run, eager):
        each.warm_up(2)
    assert differences(run, eager) == []
    assert run.replays.eager == {"no CUDA graph can be captured: no pool of memory": 2 * len(run.layers)}


@pytest.mark.skipif(HAS_GPU, reason="the stand-in fails on demand")
def test_a_capture_that_fails_drops_the_graphs_of_all_models() -> None:
    """They would draw random numbers from the state that the generator had before."""
    eager, other, run = Run("lora", graphs=False), Run("lora", graphs=True), Run("full", graphs=True)
    run.step()
    for each in (other, eager):
        each.warm_up(3)
    captures = other.replays.captures
    run.layers[0]._fused_norm_graphs.graphs.device.fails = True
    waiting = [each.loss(ONE, 7) for each in (other, eager)]
    run.step()
    for loss in waiting:
        loss.backward()
    for each in (other, eager):
        each.gradients()
        each.warm_up(3)
    assert differences(other, eager) == []
    assert other.replays.captures == 2 * captures > 0


@pytest.mark.skipif(HAS_GPU, reason="the stand-in loses memory on demand")
@pytest.mark.parametrize("when", ["freed", "kept"])
def test_memory_of_the_pool_that_others_free_or_keep_is_an_end_of_graphs(when: str) -> None:
    eager, run = Run("full", graphs=False), Run("full", graphs=True)
    for each in (run, eager):
        each.warm_up(3)
    device = run.layers[0]._fused_norm_graphs.graphs.device
    waiting = [each.loss(ONE, 7) for each in (run, eager)]
    device.blocks = set() if when == "freed" else {0, 1}
    if when == "kept":
        for loss in waiting:
            loss.backward()
    for each in (run, eager):
        each.warm_up(3, TWO)
    if when == "freed":
        for loss in waiting:
            loss.backward()
    for each in (run, eager):
        each.gradients()
        each.warm_up(3)
    assert differences(run, eager) == []
    if when == "freed":
        assert run.replays.eager["other code has freed memory of the graphs"] == 1
        assert run.replays.recomputed["the graphs were dropped before the backward"] == len(run.layers)
    else:
        assert run.replays.eager["kernels keep 1 blocks of the graphs' memory"] > len(run.layers)


@pytest.mark.skipif(HAS_GPU, reason="the stand-in counts it")
def test_what_eager_steps_have_reserved_is_given_back_before_a_shape_is_captured() -> None:
    run = Run("full", graphs=True)
    run.step()
    device = run.layers[0]._fused_norm_graphs.graphs.device
    assert device.released == 0
    run.warm_up(3)
    assert device.released == 1
    run.warm_up(3, TWO)
    assert device.released == 2


@pytest.mark.slow
def test_lengths_that_vary_stop_captures() -> None:
    run = Run("full", graphs=True)
    for seed in range(16):
        for _ in range(3):
            run.step((1, 2 + seed), seed)
    (reason,) = [reason for reason in run.replays.eager if reason.startswith("its shapes vary, ")]
    assert "pad_to_multiple_of" in reason
    assert run.replays.captures < 12 * len(run.layers)
    captures = run.replays.captures
    run.warm_up(3, (1, 2))
    assert run.replays.captures == captures, "captured once more"


@pytest.mark.slow
def test_more_shapes_than_are_kept_are_dropped_and_seen_again() -> None:
    run = Run("full", graphs=True)
    for seed in range(12):
        for _ in range(4):
            run.step((1, 2 + seed), seed)
    families = {
        pair.family for layer in run.layers for pairs in layer._fused_norm_graphs.pairs.values() for pair in pairs
    }
    assert len(families) <= 8


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_any_order_of_forwards_backwards_and_drops_gives_the_bits_of_eager(mode: str) -> None:
    steps = 400 if HAS_GPU else 25
    runs = {graphs: Run(mode, graphs=graphs) for graphs in (True, False)}
    for run in runs.values():
        numbers = random.Random(3)
        waiting: list[Tensor] = []
        optimizer = torch.optim.SGD(run.trained, 1e-3)
        for step in range(steps):
            action = numbers.choice("fffbbbdkensoc")
            shape = ONE if numbers.random() < 0.7 else TWO
            if action == "f" and len(waiting) < 3:
                waiting.append(run.loss(shape, step))
            elif action == "b" and waiting:
                loss = waiting.pop(numbers.randrange(len(waiting)))
                loss.backward()
                run.note(loss)
            elif action == "d" and waiting:
                waiting.pop()
            elif action == "k" and waiting:
                waiting[-1].backward(retain_graph=True)
            elif action == "e":
                run.model.eval()
                with torch.no_grad():
                    run.note(run.loss(shape, step))
                run.model.train()
            elif action == "n":
                with torch.no_grad():
                    run.note(run.loss(shape, step))
            elif action == "s":
                with fused_norm.disabled():
                    run.step(shape, step)
            elif action == "o" and not waiting:
                run.gradients()
                run.step(shape, step)
                run.loss(shape, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            elif action == "c":
                run.gradients()
    assert differences(runs[True], runs[False]) == []
    assert runs[True].replays.backwards > 0


@pytest.mark.parametrize("is_held", [True, False])
def test_a_layer_that_is_dropped_in_flight_is_computed_again_from_its_own_input(is_held, monkeypatch) -> None:
    """Behind a frozen layer the input is that layer's buffer, which the next forward would write."""
    if not is_held:
        plant(monkeypatch, module_of(PAIR), PAIR, "__call__", "for place in self._chained]", "for place in ()]")
    torch.manual_seed(0)
    models = [Model("").to(DEVICE) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, graphs in zip(models, (True, False), strict=True):
        model.layers[0].requires_grad_(False)
        fused_norm.apply_fused_norm(model, strict=False, cuda_graphs=graphs)
    for step in range(3):
        x, z = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        for model in models:
            model(x).square().sum().backward()
    for model in models:
        weight = model.layers[1].linear.weight
        first = model(x)
        old = weight.data
        weight.data = old.clone()  # other memory: the layer's graphs are dropped by the next forward
        for _ in range(2):
            model(z)  # the second one finds nothing in flight that the first layer must wait for
        weight.data = old
        weight.grad = None
        first.square().sum().backward()
    replayed, eager = (model.layers[1].linear.weight.grad for model in models)
    assert torch.equal(replayed, eager) is is_held


def test_arguments_that_hold_a_graph_are_not_kept() -> None:
    latest = graph_guards.LatestArguments()
    shared = UserDict({"states": torch.ones(2, requires_grad=True) * 2})
    tensor = weakref.ref(shared["states"])
    latest.read((torch.ones(2),), {"shared": shared})
    del shared
    assert tensor() is None

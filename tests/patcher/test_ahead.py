"""A norm left ahead is taken by that norm, for that very tensor, unmodified; nothing is left over or kept alive."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_norm
from fused_norm.model_configs import build
from fused_norm.patcher import ahead, blocks
from fused_norm.patcher.ahead import Successor, leave, take
from fused_norm.patcher.runtime import FusedNorm

from .models import relative, sites, step, tokens, twins


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()


class Stack(nn.Module):
    """Layers that know their successors."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.final = nn.Identity()
        for index, layer in enumerate(self.layers):
            layer.successor = Successor(self, "layers", index, "norm", "final")

    def found(self) -> list[object]:
        return [layer.successor.of(layer) for layer in self.layers]

    def expected(self) -> list[object]:
        return [(layer, layer.norm) for layer in self.layers[1:]] + [(None, self.final)]


def test_a_successor_is_looked_up_where_the_layer_is_now() -> None:
    stack = Stack()
    first, second, third = stack.layers
    assert stack.found() == stack.expected()
    second.norm = nn.Identity()
    assert stack.found() == stack.expected()
    replacement = Layer()
    stack.layers[1] = replacement
    assert first.successor.of(first) == (replacement, replacement.norm)
    assert second.successor.of(second) is None
    stack.layers[1] = nn.Linear(2, 2)  # it has no norm by that name
    assert first.successor.of(first) == (stack.layers[1], None)
    stack.layers = stack.layers[:1]
    assert first.successor.of(first) == (None, stack.final)
    assert third.successor.of(third) is None
    stack.layers = None
    assert first.successor.of(first) is None
    del stack.layers
    assert first.successor.of(first) is None


def test_a_layer_without_a_norm_after_it_has_no_successor() -> None:
    stack = Stack(2)
    first, last = stack.layers
    assert Successor(stack, "layers", 0, None, "final").of(first) is None
    assert Successor(stack, "layers", 1, "norm", None).of(last) == (None, None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_successors_of_its_own(copied) -> None:
    stack = Stack()
    twin = copied(nn.Sequential(stack))[0]
    assert twin.found() == twin.expected()
    assert stack.found() == stack.expected()
    assert twin.found() != stack.found()


def test_a_copy_of_a_layer_alone_has_none_and_keeps_no_model_alive() -> None:
    stack = Stack()
    one = copy.deepcopy(stack.layers[0])
    assert one.successor.of(one) is None
    shallow = copy.copy(stack.layers[0])
    assert shallow.successor.of(shallow) is None
    layer, gone = stack.layers[0], weakref.ref(stack)
    del stack
    assert gone() is None
    assert layer.successor.of(layer) is None
    assert copy.deepcopy(layer).successor.of(layer) is None


def test_only_that_norm_takes_it_for_that_tensor_and_once() -> None:
    norm, total, y = nn.Identity(), torch.ones(2), torch.zeros(2)
    leave(norm, total, y)
    assert take(norm, total) is y
    assert take(norm, total) is None
    leave(norm, total, y)
    assert take(nn.Identity(), total) is None
    assert take(norm, total) is None  # what was left for another is dropped
    for other in (total.clone(), total.view(2), total.detach(), None):
        leave(norm, total, y)
        assert take(norm, other) is None


@pytest.mark.parametrize(
    "edit", [lambda x: x.mul_(2), lambda x: x.view(2).add_(1), lambda x: x[0].zero_(), lambda x: x.__setitem__(1, 3.0)]
)
def test_a_modified_tensor_is_another_one(edit) -> None:
    norm, total = nn.Identity(), torch.ones(2)
    leave(norm, total, torch.zeros(2))
    edit(total)
    assert take(norm, total) is None


def test_it_is_taken_in_the_mode_that_it_was_left_in() -> None:
    norm, total, y = nn.Identity(), torch.ones(2), torch.zeros(2)
    with torch.no_grad():
        leave(norm, total, y)
    assert take(norm, total) is None
    leave(norm, total, y)
    with torch.no_grad():
        assert take(norm, total) is None
    leave(norm, total, y)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert take(norm, total) is None
    with torch.no_grad():
        leave(norm, total, y)
        assert take(norm, total) is y


def test_threads_leave_nothing_for_each_other() -> None:
    norm, total, y = nn.Identity(), torch.ones(2), torch.zeros(2)
    leave(norm, total, y)
    results = []
    thread = threading.Thread(target=lambda: results.append(take(norm, total)))
    thread.start()
    thread.join()
    assert results == [None]
    assert take(norm, total) is y


def test_it_dies_with_the_sum_and_is_not_kept_once_taken() -> None:
    norm, total, y = nn.Identity(), torch.ones(2), torch.zeros(2)
    alive = weakref.ref(y)
    leave(norm, total, y)
    del y
    assert alive() is not None
    del total
    assert alive() is None
    total, y = torch.ones(2), torch.zeros(2)
    alive = weakref.ref(y)
    leave(norm, total, y)
    del y
    assert take(norm, total) is not None
    assert alive() is None


def test_every_norm_that_begins_a_layer_or_ends_the_stack_is_there_when_it_is_called(device: str, taken) -> None:
    _, fused = twins("llama", device)
    fused(tokens(device), use_cache=False)
    assert taken == [False, True, True]  # the first takes the embeddings
    assert ahead._left.entry is None


def test_nothing_is_left_over_or_kept_alive_after_a_forward(device: str) -> None:
    _, fused = twins("llama", device)
    alive = []

    def spy(norm, total, y):
        alive.extend([weakref.ref(total), weakref.ref(y)])
        leave(norm, total, y)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(blocks, "leave", spy)
        fused(tokens(device), use_cache=False)
    assert len(alive) == 4
    assert [reference() for reference in alive] == [None] * 4


def test_a_shorter_run_drops_what_was_left_for_a_layer_that_does_not_run(device: str, taken) -> None:
    stock, fused = twins("llama", device)
    ids = tokens(device)
    for model in (stock, fused):
        model.config.num_hidden_layers = 1
    assert relative(fused(ids, use_cache=False).logits, stock(ids, use_cache=False).logits) < 1e-6
    assert taken == [False, False]
    assert ahead._left.entry is None


def test_a_layer_that_is_run_by_hand_is_run_as_in_stock(device: str, taken) -> None:
    """Gradients of a norm are those of where it is called, not of where its result was left."""
    stock, fused = twins("llama", device)
    x = torch.randn(2, 5, 72, device=device)
    results = []
    for model in (stock, fused):
        angles = model.model.rotary_emb(x, torch.arange(5, device=device)[None])
        with torch.no_grad():
            h = model.model.layers[0](x, position_embeddings=angles)
        y = model.model.layers[1].input_layernorm(h)
        y.square().sum().backward()
        results.append((y.detach(), model.model.layers[1].input_layernorm.weight.grad))
    assert taken == [False, False]
    for mine, theirs in zip(*reversed(results), strict=True):
        assert relative(mine, theirs) < 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("checkpointed", [0, 1])
def test_checkpointing_one_layer_by_hand_trains_as_stock(
    reentrant: bool, checkpointed: int, device: str, taken
) -> None:
    _, fused = twins("llama", device)
    x = torch.randn(2, 5, 72, device=device, requires_grad=True)
    angles = fused.model.rotary_emb(x, torch.arange(5, device=device)[None])

    def train(checkpoints: bool) -> list[torch.Tensor]:
        fused.zero_grad()
        h = x
        for index, layer in enumerate(fused.model.layers):
            if checkpoints and index == checkpointed:
                h = (
                    checkpoint(layer, h, position_embeddings=angles, use_reentrant=False)
                    if not reentrant
                    else (
                        checkpoint(lambda h, layer=layer: layer(h, position_embeddings=angles), h, use_reentrant=True)
                    )
                )
            else:
                h = layer(h, position_embeddings=angles)
        fused.model.norm(h).square().sum().backward()
        return [parameter.grad.clone() for parameter in fused.model.layers.parameters()]

    expected = train(checkpoints=False)
    assert taken == [False, True, True]
    taken.clear()
    for mine, theirs in zip(train(checkpoints=True), expected, strict=True):
        assert relative(mine, theirs) < 1e-6
    assert True not in taken[1:2]  # the boundary beside the checkpoint


def test_inference_mode_runs_them_apart(device: str, taken) -> None:
    stock, fused = twins("llama", device)
    ids = tokens(device)
    branch = torch.randn(2, 19, 72, device=device)
    for model in (stock, fused):
        model.model.layers[0].mlp.forward = lambda x: branch  # no inference tensor
    with torch.inference_mode():
        assert relative(fused(ids, use_cache=False).logits, stock(ids, use_cache=False).logits) < 1e-6
    assert True not in taken


def test_layers_copied_or_moved_find_their_place_when_patched_again(device: str, taken) -> None:
    stock = build("llama", seed=0, device=device)
    fused = copy.deepcopy(stock)
    fused_norm.apply_fused_norm(fused)
    for model in (stock, fused):
        model.model.layers.insert(0, copy.deepcopy(model.model.layers[1]))
        model.config.num_hidden_layers = 3
    ids = tokens(device)
    assert relative(fused(ids, use_cache=False).logits, stock(ids, use_cache=False).logits) < 1e-6
    assert True not in taken
    assert fused_norm.apply_fused_norm(fused).counts == sites("llama", 3)
    taken.clear()
    assert relative(step(fused, ids)[0], step(stock, ids)[0]) < 1e-6
    assert taken == [False, True, True, True]
    layer = fused.model.layers[0]
    fused_norm.apply_fused_norm(layer)  # knows nothing of what comes after it, and takes nothing back
    taken.clear()
    fused(ids, use_cache=False)
    assert taken == [False, True, True, True]


def test_a_replaced_layer_is_run_as_in_stock(device: str, taken) -> None:
    stock, fused = twins("llama", device)

    class Stage(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states: torch.Tensor, **named: object) -> torch.Tensor:
            return self.layer(hidden_states * 0.5, **named)

    for model in (stock, fused):
        model.model.layers[1] = Stage(model.model.layers[1])
    ids = tokens(device)
    (expected, gradients), (logits, fused_gradients) = step(stock, ids), step(fused, ids)
    assert relative(logits, expected) < 1e-6
    assert all(relative(fused_gradients[name], value) < 1e-5 for name, value in gradients.items())
    assert True not in taken
    assert isinstance(fused.model.norm, FusedNorm)

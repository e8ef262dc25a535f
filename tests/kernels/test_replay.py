"""Native replay: bit for bit what Python computes, and only where nobody could tell the difference."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from fused_norm.kernels import add_rms_norm, glu, norm_add_norm, qk_norm_rope, reference, replay, rms_norm, rope
from fused_norm.kernels.operator import norm_spec, set_executor
from fused_norm.kernels.replay import recorder
from fused_norm.kernels.replay.build import load
from fused_norm.kernels.replay.executor import ReplayExecutor
from fused_norm.kernels.replay.recorder import NotRecordableError, Recorder

from . import fuzz_replay, replay_on_cpu, sandwich, test_gated_rms_norm, test_glu, test_qk_norm, test_rope
from .conftest import OPERATORS, Halves, replayed_natively
from .numerics import BF16, FP16, FP32, Norm, make_inputs, run

Results = dict[str, Tensor]
RMS_NORM = OPERATORS["rms_norm"]
SPEC = norm_spec("llama", False, 1e-6)


def in_python(compute: Callable[[], Any]) -> Any:
    """Run something without native replay."""
    replay.switch(False)
    try:
        return compute()
    finally:
        replay.switch(True)


def _norm(norm: Norm, shape: tuple[int, ...] = (3, 5, 40), frozen: str = "") -> Callable[[str], Results]:
    return lambda device: run(norm.fused, make_inputs(norm, shape, device), frozen).present()


def _sandwich(case: sandwich.Sandwich, **options: Any) -> Callable[[str], Results]:
    return lambda device: sandwich.run(case.fused, sandwich.make_inputs(case, (3, 5, 40), device), **options)


def _heads(heads: test_qk_norm.Heads, frozen: tuple[str, ...] = ()) -> Callable[[str], Results]:
    return lambda device: test_qk_norm.run(heads.fused, test_qk_norm.make_inputs(heads, 16, device), frozen)


def _turned(heads: test_rope.Heads, used: str = "qk") -> Callable[[str], Results]:
    return lambda device: test_rope.run(heads.fused, test_qk_norm.make_inputs(heads, 16, device), used)


def _turned_alone(device: str) -> Results:
    inputs = test_qk_norm.make_inputs(test_rope.Heads(8), 16, device)
    q = inputs.q.requires_grad_()
    y, nothing = rope(q, None, inputs.cos, inputs.sin)
    assert nothing is None
    return {"y": y.detach(), "dq": torch.autograd.grad(y, q, inputs.dq)[0]}


def _gate(activation: str, up: torch.dtype | None = BF16, gate: torch.dtype = BF16) -> Callable[[str], Results]:
    def results(device: str) -> Results:
        torch.manual_seed(0)
        given = test_glu.inputs(device, 3, 5, 40, gate=gate, up=up)
        return dict(zip(("y", "dgate", "dup"), test_glu.run(glu, *given, activation), strict=False))

    return results


def _gated(norm: test_gated_rms_norm.Gated, frozen: str = "") -> Callable[[str], Results]:
    def results(device: str) -> Results:
        torch.manual_seed(0)
        given = test_gated_rms_norm.make_inputs(norm, device, 3, 5, 40)
        return test_gated_rms_norm.run(norm.fused, given, frozen)

    return results


GEMMA_SANDWICH = sandwich.Sandwich("gemma", True, BF16, BF16, BF16, BF16)
QK = Norm("llama", x=BF16, w=BF16)

CASES = {
    "rms_norm": [
        _norm(Norm("llama", x=BF16, w=BF16)),
        _norm(Norm("llama", x=BF16, w=FP32)),
        _norm(Norm("gemma", True, x=BF16, w=FP32)),
        _norm(Norm("none", x=FP16, w=None)),
        _norm(Norm("llama", x=BF16, w=BF16), frozen="w"),
        _norm(Norm("llama", x=BF16, w=BF16), frozen="x"),
        _norm(Norm("llama", x=BF16, w=BF16, mode="multi_wave_reload")),
        _norm(Norm("llama", x=BF16, w=BF16, mode="static_persistent")),
    ],
    "add_rms_norm": [
        _norm(Norm("llama", x=BF16, w=BF16, r=BF16)),
        _norm(Norm("llama", x=BF16, w=FP32, r=FP32)),
        _norm(Norm("gemma", True, x=BF16, w=BF16, r=BF16, scale=0.22)),
        _norm(Norm("none", x=FP16, w=FP16, r=FP16), frozen="r"),
        _norm(Norm("llama", x=BF16, w=BF16, r=BF16), frozen="xw"),
    ],
    "norm_add": [
        _sandwich(GEMMA_SANDWICH.opened),
        _sandwich(sandwich.Sandwich("llama", False, BF16, FP32, BF16).opened),
        _sandwich(GEMMA_SANDWICH.opened, frozen=("x", "inner")),
    ],
    "norm_add_norm": [
        _sandwich(GEMMA_SANDWICH),
        _sandwich(sandwich.Sandwich("none", False, BF16, FP32, None, FP16)),
        _sandwich(GEMMA_SANDWICH, used="y"),
        _sandwich(GEMMA_SANDWICH, frozen=("r", "w")),
    ],
    "qk_norm": [
        _heads(test_qk_norm.Heads(QK)),
        _heads(test_qk_norm.Heads(QK), ("q", "k_weight")),
        _heads(test_qk_norm.Heads(QK, 16, BF16)),
        _heads(test_qk_norm.Heads(Norm("gemma", True, x=BF16, w=BF16), 8, FP32)),
    ],
    "rope": [
        _turned(test_rope.Heads()),
        _turned(test_rope.Heads(8, BF16, FP32), "k"),
        _turned(test_rope.RoundedOnce(16, BF16, FP32)),
        _turned_alone,
    ],
    "glu": [
        _gate("silu"),
        _gate("gelu", FP32),
        _gate("gelu_tanh", None),
    ],
    "gated_rms_norm": [
        _gated(test_gated_rms_norm.QWEN),
        _gated(test_gated_rms_norm.MAMBA),
        _gated(test_gated_rms_norm.MAMBA, "wx"),
    ],
}


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(n, case, id=f"{n}-{i}") for n in CASES for i, case in enumerate(CASES[n])]
)
def test_what_is_replayed_is_bitwise_what_python_computes(
    name: str, case: Callable[[str], Results], device: str, native: Halves
) -> None:
    expected = in_python(lambda: case(device))
    assert native[name].replayed() == (0, 0)
    for repeat in (1, 2):
        found = case(device)
        assert native[name].replayed() == (repeat, repeat)
        assert found.keys() == expected.keys()
        for result, value in expected.items():
            assert torch.equal(found[result], value), result
            assert found[result].stride() == value.stride(), result


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 50), marks=pytest.mark.slow)], ids=repr)
def test_random_programs_see_no_difference(seeds: range, device: str) -> None:
    """Over aliases, views, frozen and expanded tensors, graphs kept and walked twice, with few recordings at a time."""
    seen = raised = 0
    with replayed_natively(device, fuzz_replay.FEW_RECORDINGS) as halves:
        for seed in seeds:
            counts = fuzz_replay.check(seed, device)
            seen, raised = seen + counts[0], raised + counts[1]
        forwards, backwards = fuzz_replay.replays(halves)
    assert min(forwards, backwards) >= len(seeds), "programs must be replayed to be worth anything"
    assert raised < 0.1 * seen


@pytest.mark.usefixtures("in_chunks")
def test_rows_in_chunks_are_replayed(device: str, native: Halves) -> None:
    case = CASES["add_rms_norm"][0]
    expected = in_python(lambda: case(device))
    replay.switch(True)
    assert all(torch.equal(value, expected[name]) for name, value in case(device).items())
    assert native["add_rms_norm"].replayed() == (1, 1)
    native["add_rms_norm"].forget()


def _arguments(device: str, rows: int = 6, width: int = 40, dtype: torch.dtype = FP32) -> list[Tensor]:
    return [
        torch.randn(shape, device=device, dtype=dtype).requires_grad_()
        for shape in ((rows, width), (rows, width), (width,))
    ]


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(first: Callable[[], Any], device: str, native: Halves) -> None:
    x, r, w = _arguments(device)
    for context in (first, torch.no_grad, torch.inference_mode):
        with context():
            expected = in_python(lambda: add_rms_norm(x, r, w))
            for _ in range(2):
                for ours, theirs in zip(add_rms_norm(x, r, w), expected, strict=True):
                    assert torch.equal(ours, theirs)
                    assert ours.grad_fn is None
                    assert not ours.requires_grad
                    assert ours.is_inference() == theirs.is_inference()
    assert native["add_rms_norm"].replayed() == (6, 0)


def test_what_differs_is_recorded_anew(device: str, native: Halves) -> None:
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, w: rms_norm(x, w),
        lambda x, w: rms_norm(x, w, 0.5),
        lambda x, w: rms_norm(x, w, casting="gemma"),
        lambda x, w: rms_norm(x, w, zero_centered=True),
        lambda x, w: rms_norm(x, None),
        lambda x, w: rms_norm(x[:2], w),
        lambda x, w: rms_norm(x[::2], w),
        lambda x, w: rms_norm(x.t().contiguous().t(), w),
        lambda x, w: rms_norm(x.bfloat16(), w),
        lambda x, w: rms_norm(x, w.half()),
        lambda x, w: rms_norm(x[:, :20], w[:20]),
        lambda x, w: rms_norm(x.reshape(2, 3, 40), w),
        lambda x, w: rms_norm(x, x[0]),
    ]
    x, _, w = (tensor.detach() for tensor in _arguments(device))
    with torch.no_grad():
        for _ in range(2):
            for call in calls:
                assert torch.equal(call(x, w), in_python(lambda call=call: call(x, w)))
        before = native["rms_norm"].replayed()[0]
        native["rms_norm"].forget()
        rms_norm(x, w)
        assert native["rms_norm"].replayed()[0] == before + 1


@pytest.mark.parametrize("which", ["both", "dy", "ds"])
def test_tensors_that_are_one(which: str, device: str, native: Halves) -> None:
    """A recording of tensors that share their memory does not serve those that do not, nor the other way round."""
    x, r, w = _arguments(device)
    dy, ds = torch.randn_like(x), torch.randn_like(x)
    flows = {"both": (dy, ds), "dy": (dy, dy), "ds": (ds, ds)}[which]

    def gradients(one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        y, s = add_rms_norm(one, other, w)
        return y, s, *torch.autograd.grad((y, s), (x, w), flows)

    for arguments in ((x, x), (x, r), (x, x), (x, r)):
        expected = in_python(lambda arguments=arguments: gradients(*arguments))
        assert all(map(torch.equal, gradients(*arguments), expected))


def test_unaligned_tensors_stay_with_python(device: str, native: Halves) -> None:
    memory = torch.randn(6 * 40 + 1, device=device)
    w = torch.randn(40, device=device)
    for offset in (1, 0, 1):
        x = memory[offset : offset + 240].view(6, 40).requires_grad_()
        dy = memory[1 - offset : 241 - offset].view(6, 40)
        found = rms_norm(x, w)
        expected = in_python(lambda x=x: rms_norm(x, w))
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found, x, dy)[0], torch.autograd.grad(expected, x, dy)[0])
    assert native["rms_norm"].replayed() == (1, 0)


def test_gradients_that_cannot_be_read_in_place_stay_with_python(device: str, native: Halves) -> None:
    x, _, w = _arguments(device)
    for dy in (torch.ones((), device=device).expand(6, 40), torch.randn(40, 6, device=device).t()):
        expected = in_python(lambda dy=dy: torch.autograd.grad(rms_norm(x, w), (x, w), dy))
        assert all(map(torch.equal, torch.autograd.grad(rms_norm(x, w), (x, w), dy), expected))
    assert native["rms_norm"].replayed() == (2, 0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    "number", [1e300, -1e300, 3.4028235677973366e38, 1e-300, -1e-60, float("inf"), float("nan"), -1.0]
)
def test_numbers_beyond_float32_are_what_they_are_in_python(
    number: float, device: str, native: Halves, caplog: pytest.LogCaptureFixture
) -> None:
    x, r, w = _arguments(device)

    def results() -> tuple[Tensor, ...]:
        y, s = add_rms_norm(x, r, w, scale=number)
        z = rms_norm(x, w, number)
        return y, s, z, *torch.autograd.grad((y, s, z), (x, r, w), (torch.ones_like(y),) * 3)

    expected = in_python(results)
    for repeat in (1, 2):
        for ours, theirs in zip(results(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert native["rms_norm"].replayed() == (repeat, repeat)
        assert native["add_rms_norm"].replayed() == (repeat, repeat)
    assert not caplog.records


def test_empty_tensors_stay_with_python(device: str, native: Halves) -> None:
    x, _, w = _arguments(device, rows=0)
    dx, dw = torch.autograd.grad(rms_norm(x, w).sum(), (x, w))
    assert dx.shape == (0, 40)
    assert torch.equal(dw, torch.zeros(40, device=device))
    assert native["rms_norm"].replayed() == (0, 0)


class _Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


def test_whoever_watches_the_dispatcher_sees_the_operators(device: str, native: Halves) -> None:
    x, _, w = _arguments(device)
    y = rms_norm(x, w)
    torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    for forward_too in (True, False):
        with _Watching() as mode:
            if forward_too:
                torch.autograd.grad(rms_norm(x, w), x, torch.ones_like(y))
                assert "fused_norm.rms_norm_forward.default" in mode.seen
            else:
                torch.autograd.grad(y, x, torch.ones_like(y))
        assert "fused_norm.rms_norm_backward.default" in mode.seen
    assert native["rms_norm"].replayed() == (1, 1)
    mapped = torch.func.vmap(lambda row: row.square().sum())(x.detach())  # A transform by itself does not disturb.
    assert mapped.shape == (6,)
    torch.testing.assert_close(torch.func.vmap(lambda row: rms_norm(row, w))(x), y)
    rms_norm(x.detach().as_subclass(_Subclass), w)
    assert native["rms_norm"].replayed() == (1, 1)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_recording_is_not_disturbed_by_a_function_mode(device: str, native: Halves) -> None:
    x, _, w = _arguments(device)
    with _Functions():
        first = rms_norm(x, w)
    assert torch.equal(first, rms_norm(x, w))


def _nothing(*_: object) -> None:
    """A hook on launches."""


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("replaced", ["no", "chain", "callable"])
def test_whoever_watches_launches_sees_them(
    replaced: str, which: str, device: str, native: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _, w = _arguments(device)
    y = rms_norm(x, w)
    chain = getattr(knobs.runtime, which)
    with monkeypatch.context() as patch:
        if replaced == "callable":
            patch.setattr(knobs.runtime, which, _nothing)
        else:
            if replaced == "chain":
                patch.setattr(knobs.runtime, which, type(chain)())
            getattr(knobs.runtime, which).add(_nothing)
        rms_norm(x, w)
        torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        assert native["rms_norm"].replayed() == (1, 0)
    chain.remove(_nothing)
    for nobody in (chain, type(chain)(), None):
        monkeypatch.setattr(knobs.runtime, which, nobody)
        before = native["rms_norm"].replayed()
        rms_norm(x, w)
        torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        assert native["rms_norm"].replayed() == (before[0] + 1, before[1] + 1)


def test_a_gradient_can_be_differentiated_again(device: str, native: Halves) -> None:
    x, _, w = _arguments(device)
    dy = torch.ones_like(x)
    torch.autograd.grad(rms_norm(x, w), x, dy)

    def second(y: Tensor, gradient: Tensor) -> Tensor:
        (dx,) = torch.autograd.grad(y, x, gradient, create_graph=True)
        return torch.autograd.grad(dx.sin().sum(), x)[0]

    for gradient in (dy, dy.detach().requires_grad_(), dy):
        expected = second(reference.rms_norm(SPEC, x, w), gradient)
        torch.testing.assert_close(second(rms_norm(x, w), gradient), expected, rtol=1e-3, atol=1e-4)
    assert native["rms_norm"].replayed()[1] == 1


def test_the_graph_lives_as_long_as_it_is_told_to(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)
    y, s = add_rms_norm(x, r, w)
    first = torch.autograd.grad(y.sum() + s.sum(), (x, r, w), retain_graph=True)
    second = torch.autograd.grad(y.sum() + s.sum(), (x, r, w))
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.sum(), (x, r, w))
    assert str(y.grad_fn.name()) == "AddRMSNormBackward"
    assert [edge.variable is leaf for (edge, _), leaf in zip(y.grad_fn.next_functions, (x, r, w), strict=True)]


@pytest.mark.parametrize("changed", ["x", "w", "s"])
def test_a_saved_tensor_that_was_changed_is_noticed(changed: str, device: str, native: Halves) -> None:
    x, r, w = _arguments(device)
    for _ in range(2):
        y, s = (rms_norm(x, w), None) if changed == "x" else add_rms_norm(x, r, w)
        with torch.no_grad():
            {"x": x, "w": w, "s": s}[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_hooks_on_saved_tensors_see_what_python_saves(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)

    def offloaded() -> tuple[list[tuple[int, ...]], tuple[Tensor, ...]]:
        packed: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tuple(tensor.shape))
            return tensor.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
            y, s = add_rms_norm(x, r, w)
        return packed, torch.autograd.grad((y * s).sum(), (x, r, w))

    shapes, expected = in_python(offloaded)
    for _ in range(2):
        packed, found = offloaded()
        assert packed == shapes
        assert all(map(torch.equal, found, expected))
    assert native["add_rms_norm"].replayed() == (2, 2)


def test_hooks_on_gradients_may_replace_them(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)

    def gradients() -> tuple[Tensor, ...]:
        y, s = add_rms_norm(x, r, w)
        y.register_hook(lambda dy: 2 * dy)
        s.retain_grad()
        handle = x.register_hook(lambda dx: dx + 1)
        found = torch.autograd.grad((y * s).sum(), (x, r, w))
        handle.remove()
        return found

    expected = in_python(gradients)
    assert all(map(torch.equal, gradients(), expected))


def test_only_the_sum_is_used(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)

    def add_only() -> Tensor:
        return add_rms_norm(x, r, w)[1]

    for function in (add_only, lambda: norm_add_norm(x, r, w, w)[1]):
        for _ in range(2):
            *found, dw = torch.autograd.grad(function().square().sum(), (x, r, w), allow_unused=True)
            assert (dw is None) == (function is add_only)
            expected = in_python(lambda function=function: torch.autograd.grad(function().square().sum(), (x, r)))
            assert all(map(torch.equal, found, expected))


def test_one_graph_is_asked_for_one_gradient_and_then_another(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)

    def gradients(*wanted: Tensor) -> tuple[Tensor, ...]:
        y, s = add_rms_norm(x, r, w)
        return torch.autograd.grad((y, s), wanted, (torch.ones_like(y), torch.ones_like(s)))

    for wanted in ((w,), (x,), (r, w), (x, r), (x, r, w), (w,)):
        expected = in_python(lambda wanted=wanted: gradients(*wanted))
        assert all(map(torch.equal, gradients(*wanted), expected))
    assert native["add_rms_norm"].replayed() == (6, 6)


def test_the_grads_of_leaves_share_no_memory(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)
    for _ in range(2):
        x.grad = r.grad = None
        y, s = add_rms_norm(x, r, w)
        dx, dr = torch.autograd.grad((y, s), (x, r), (torch.ones_like(y), torch.ones_like(s)), retain_graph=True)
        assert dx is dr, "as PyTorch's add"
        (y.sum() + s.sum()).backward()
        assert torch.equal(x.grad, dx)
        x.grad.zero_()
        assert torch.equal(r.grad, dx)


def test_recordings_keep_no_tensor_alive(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)
    y, s = add_rms_norm(x, r, w)
    gradients = torch.autograd.grad(y.sum() + s.sum(), (x, r, w))
    alive = [weakref.ref(tensor) for tensor in (x, r, w, y, s, *gradients)]
    del x, r, w, y, s, gradients
    gc.collect()
    assert [ref() for ref in alive] == [None] * 8


def test_what_is_saved_is_freed_with_the_graph_and_by_a_backward(device: str, native: Halves) -> None:
    x, _, w = _arguments(device)
    rms_norm(x, w)
    for backward in (False, True):
        branch = x * 2
        alive = weakref.ref(branch)
        y = rms_norm(branch, w)
        del branch
        gc.collect()
        assert alive() is not None
        if backward:
            y.backward(torch.ones_like(y))
        else:
            del y
        gc.collect()
        assert alive() is None


def test_what_is_saved_of_the_outputs_keeps_no_graph_alive(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)
    for _ in range(2):
        y, s = add_rms_norm(x, r, w)
        held = _Held()
        y.grad_fn.metadata["held"] = held
        alive = weakref.ref(held)
        del held, y
        assert alive() is not None
        del s
        gc.collect()
        assert alive() is None


class _Held:
    """Something that a node of autograd holds."""


def test_beyond_a_limit_recordings_start_anew_and_graphs_live_on(device: str) -> None:
    with replayed_natively(device, limit=2) as halves:
        half, (x, _, w) = halves["rms_norm"], _arguments(device)
        expected = in_python(lambda: torch.autograd.grad(rms_norm(x, w), (x, w), torch.ones_like(x)))
        y = rms_norm(x, w)
        assert half.known(SPEC, x, w, None) is not NotImplemented
        for rows in (2, 3):
            rms_norm(x[:rows], w)
        assert half.known(SPEC, x, w, None) is NotImplemented
        found = torch.autograd.grad(y, (x, w), torch.ones_like(x), retain_graph=True)
        for wanted in (x, w, (x, w)):
            torch.autograd.grad(y, wanted, torch.ones_like(x), retain_graph=True)
        assert all(map(torch.equal, found, expected))
        assert half.replayed() == (4, 4)


def test_a_long_chain_is_taken_down_without_recursion(device: str, native: Halves) -> None:
    x = torch.randn(1, 4, device=device).requires_grad_()
    y = rms_norm(x, None)
    half = native["rms_norm"]
    for _ in range(100 if device == "cpu" else 100_000):
        y = half(SPEC, y, None, None)
    del y
    gc.collect()


def test_threads_record_and_replay_at_once(device: str, native: Halves) -> None:
    inputs = [_arguments(device, rows) for rows in (3, 4, 5, 6)]

    def gradients(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y, s = add_rms_norm(x, r, w)
        return y, s, *torch.autograd.grad((y * s).sum(), (x, r, w))

    expected = [in_python(lambda one=one: gradients(*one)) for one in inputs]
    wrong: list[object] = []

    def work(index: int) -> None:
        try:
            for turn in range(12):
                which = (index + turn) % len(inputs)
                if not all(map(torch.equal, gradients(*inputs[which]), expected[which])):
                    wrong.append(which)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert native["add_rms_norm"].replayed() == (48, 48)


@pytest.mark.parametrize("error", [KeyError, MemoryError, RuntimeError, AssertionError])
def test_an_error_of_a_recording_leaves_the_call_to_python_and_is_logged(
    error: type[Exception],
    device: str,
    native: Halves,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, _, w = _arguments(device)

    def fail(*_: object) -> None:
        raise error("a surprise")

    def gradients() -> tuple[Tensor, ...]:
        y = rms_norm(x, w)
        return y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))

    expected = in_python(gradients)
    with monkeypatch.context() as patch:
        patch.setattr(recorder.Recorder, "program", fail)
        assert all(map(torch.equal, gradients(), expected))
    assert "some calls of rms_norm stay with Python" in caplog.text
    assert "a surprise" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING
    caplog.clear()
    assert all(map(torch.equal, gradients(), expected))
    assert native["rms_norm"].replayed() == (0, 0)
    native["rms_norm"].forget()
    y = rms_norm(x, w)
    with monkeypatch.context() as patch:
        patch.setattr(recorder.Recorder, "program", fail)
        found = torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
    assert all(map(torch.equal, found, expected[1:]))
    assert "a surprise" in caplog.text
    assert all(map(torch.equal, torch.autograd.grad(y, (x, w), torch.ones_like(y)), expected[1:]))
    assert native["rms_norm"].replayed() == (1, 0)


def test_memory_that_runs_out_in_a_recording_is_raised_and_no_verdict(
    device: str, native: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _, w = _arguments(device)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("not enough")

    with monkeypatch.context() as patch:
        patch.setattr(RMS_NORM, "forward", fail)
        with pytest.raises(torch.OutOfMemoryError, match="not enough"):
            rms_norm(x, w)
    y = rms_norm(x, w)
    with monkeypatch.context() as patch:
        patch.setattr(RMS_NORM, "backward", fail)
        with pytest.raises(torch.OutOfMemoryError, match="not enough"):
            torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    torch.autograd.grad(y, x, torch.ones_like(y))
    assert native["rms_norm"].replayed() == (1, 1)


def test_another_write_or_another_tensor_ends_a_recording(
    device: str, native: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be lost in a replay, an operator of PyTorch among the launches, keeps a call with Python."""
    x, _, w = _arguments(device)
    forward, constant = RMS_NORM.forward, torch.randn(6, 40, device=device)

    def doubled(spec: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        y, rstd = forward(spec, x, *rest, **options)
        return y.mul_(2), rstd

    def copied(spec: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return forward(spec, x * 2, *rest, **options)

    def viewed(spec: Any, *rest: Any, **options: Any) -> Any:
        y, rstd = forward(spec, *rest, **options)
        return y[:3], rstd

    def written(spec: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return torch.full_like(x, 7.0), None

    def foreign(spec: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return constant, None

    def read(spec: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return forward(spec, x, *rest, **options) if x[0, 0].item() < 100 else None

    for wrapped in (doubled, copied, viewed, written, foreign, read):
        native["rms_norm"].forget()
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(RMS_NORM, "forward", wrapped)
            expected = in_python(lambda: rms_norm(x, w))
            assert torch.equal(rms_norm(x, w), expected), wrapped
            assert torch.equal(rms_norm(x, w), expected), wrapped
    assert native["rms_norm"].replayed() == (0, 0)


def test_a_view_of_another_layout_ends_a_recording() -> None:
    given = torch.randn(8, 8)
    with Recorder([given]) as recorder:
        made = torch.empty(8, 8)
    for slot, tensor in enumerate((given, made)):
        assert recorder.program([made, tensor.detach()])[2] == [1, slot]
        for view in (tensor.t(), tensor.view(4, 16), tensor.view(torch.int32)):
            with pytest.raises(NotRecordableError, match="a view of another"):
                recorder.program([made, view])
            with pytest.raises(NotRecordableError, match="a view of another"):
                recorder.program([made], [view])


def test_known_answers_only_what_was_recorded(device: str, native: Halves) -> None:
    x, _, w = _arguments(device)
    half, arguments = native["rms_norm"], (SPEC, x, w, None)
    assert half.known(*arguments) is NotImplemented
    assert half(*arguments) is not NotImplemented
    assert half.known(*arguments) is not NotImplemented
    assert half.known(norm_spec("gemma", False, 1e-6), x, w, None) is NotImplemented
    assert half.known(SPEC, x, w) is NotImplemented
    assert half(SPEC, x, w, mode=None) is NotImplemented
    assert half(SPEC, x, w, [1]) is NotImplemented
    assert half(SPEC, x, 1.0, None) is NotImplemented
    assert half(SPEC, None, w, None) is NotImplemented


def test_it_is_switched_off_and_on_at_run_time_and_recordings_survive(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)

    def gradients() -> tuple[Tensor, ...]:
        y, s = add_rms_norm(x, r, w)
        return y, s, *torch.autograd.grad((y * s).sum(), (x, r, w))

    half = native["add_rms_norm"]
    expected = gradients()
    assert half.replayed() == (1, 1)
    y, s = add_rms_norm(x, r, w)
    replay.switch(False)
    assert all(operator.executor is None for operator in OPERATORS.values())
    assert replay.state().startswith(("switched off", "not used"))
    assert all(map(torch.equal, gradients(), expected))
    assert half.replayed() == (2, 1)
    found = torch.autograd.grad((y * s).sum(), (x, r, w))  # a graph is walked as it was made
    assert all(map(torch.equal, found, expected[2:]))
    replay.switch(True)
    assert half.known(SPEC, x, r, w, None, 1.0) is not NotImplemented, "what was recorded is known"
    for _ in range(2):
        replay.switch(True)
        assert all(map(torch.equal, gradients(), expected))
    assert half.replayed() == (5, 4)


def test_an_executor_that_declines_leaves_calls_to_python(device: str) -> None:
    """The hook that native replay uses is anybody's."""
    seen: list[str] = []

    class Declining:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, *_: Any) -> Any:
            seen.append(f"{self.name}.run")
            return NotImplemented

        def run_known(self, *_: Any) -> Any:
            seen.append(f"{self.name}.run_known")
            return NotImplemented

    x, _, w = _arguments(device)
    expected = in_python(lambda: rms_norm(x, w))
    set_executor(lambda operator: Declining(operator.name))
    try:
        assert torch.equal(rms_norm(x, w), expected)
    finally:
        replay.switch(True)
    assert seen == ["rms_norm.run_known", "rms_norm.run"]
    assert all(isinstance(operator.executor, ReplayExecutor) for operator in OPERATORS.values())


def test_what_a_call_was_refused_for_is_refused_after_a_recording(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)
    rms_norm(x, w)
    add_rms_norm(x, r, w)
    with pytest.raises(ValueError, match="casting must be"):
        rms_norm(x, w, casting="qwen")
    with pytest.raises(ValueError, match="weight must have shape"):
        rms_norm(x, w[:20])
    with pytest.raises(TypeError, match="scale must be"):
        add_rms_norm(x, r, w, scale=True)
    with pytest.raises(ValueError, match="residual must have"):
        add_rms_norm(x, r[:3], w)


def test_learned_angles_get_their_gradient_after_a_recording(device: str, native: Halves) -> None:
    q, k = (torch.randn(2, 3, 5, 16, device=device).requires_grad_() for _ in range(2))
    cos, sin = (torch.randn(1, 5, 16, device=device) for _ in range(2))
    qk_norm_rope(q, k, None, None, cos, sin)
    cos.requires_grad_()
    y, _ = qk_norm_rope(q, k, None, None, cos, sin)
    assert torch.autograd.grad(y.sum(), cos)[0].abs().sum() > 0


def test_heads_and_tokens_of_one_number_are_told_apart(device: str, native: Halves) -> None:
    q, k = (torch.randn(2, 4, 4, 16, device=device) for _ in range(2))
    cos, sin = (torch.randn(2, 4, 16, device=device) for _ in range(2))
    for dim in (1, 2, 1):
        expected = in_python(lambda dim=dim: qk_norm_rope(q, k, None, None, cos, sin, unsqueeze_dim=dim))
        assert all(map(torch.equal, qk_norm_rope(q, k, None, None, cos, sin, unsqueeze_dim=dim), expected))
    assert native["qk_norm"].replayed() == (3, 0)


def test_profiles_name_the_operators(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)
    add_rms_norm(x, r, w)
    with torch.profiler.profile() as profile:
        y, s = add_rms_norm(x, r, w)
        (y.sum() + s.sum()).backward()
    names = {event.key for event in profile.key_averages()}
    assert "AddRMSNorm" in names
    assert any("AddRMSNormBackward" in name for name in names)


def test_anomaly_mode_points_at_the_call(device: str, native: Halves) -> None:
    x, _, w = _arguments(device)
    rms_norm(x, w)
    with torch.autograd.detect_anomaly(check_nan=True):
        y = rms_norm(x, w)
        y.register_hook(lambda dy: dy * float("nan"))
        total = y.sum()
        with pytest.warns(UserWarning, match="RMSNormBackward"), pytest.raises(RuntimeError, match="nan"):
            total.backward()


def test_deterministic_mode_fills_what_is_allocated(
    device: str, native: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that leaves an element out shows, replayed as well as launched by Python."""
    x, _, w = _arguments(device)
    monkeypatch.setattr(RMS_NORM, "forward", lambda spec, x, *_, **__: (torch.empty_like(x), None))
    with torch.no_grad():
        assert rms_norm(x, w).isnan().all()
    assert native["rms_norm"].replayed() == (1, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the allocator of a GPU cannot be replaced any more")
def test_an_allocator_that_was_replaced_is_asked_through_the_dispatcher(device: str, native: Halves) -> None:
    x, r, w = _arguments(device)
    expected = in_python(lambda: add_rms_norm(x, r, w))
    with replay_on_cpu.connected(load(), own_allocator=False), torch.profiler.profile() as profile:
        for _ in range(2):
            assert all(map(torch.equal, add_rms_norm(x, r, w), expected))
    assert native["add_rms_norm"].replayed() == (2, 0)
    assert "aten::empty_strided" in {event.key for event in profile.key_averages()}


@pytest.mark.gpu
def test_replays_are_captured_in_a_cuda_graph(device: str, native: Halves) -> None:
    x, r, w = _arguments(device, dtype=BF16)
    dy, ds = torch.randn_like(x), torch.randn_like(x)

    def step() -> tuple[Tensor, ...]:
        y, s = add_rms_norm(x, r, w)
        return y, s, *torch.autograd.grad((y, s), (x, r, w), (dy, ds))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(map(torch.equal, captured, step()))
    assert native["add_rms_norm"].replayed()[0] >= 3


@pytest.mark.gpu(2)
def test_each_device_has_its_own_recordings(native: Halves) -> None:
    results = []
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        torch.manual_seed(0)
        x, r, w = (t.detach().to(device).requires_grad_() for t in _arguments("cpu"))
        y, s = add_rms_norm(x, r, w)
        gradients = torch.autograd.grad((y * s).sum(), (x, r, w))
        assert all(t.device == torch.device(device) for t in (y, s, *gradients))
        results.append([t.cpu() for t in (y, s, *gradients)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert native["add_rms_norm"].replayed() == (4, 4)

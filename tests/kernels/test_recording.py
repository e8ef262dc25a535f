"""Recordings repeat what the general path does, bit for bit, and only for calls like the one that was recorded."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from fused_norm.kernels import add_rms_norm, codegen, recording, rms_norm
from fused_norm.kernels.backward import BackwardArguments
from fused_norm.kernels.operator import Operator, calls
from fused_norm.kernels.plans import TABLES
from fused_norm.kernels.triton.call import Call
from fused_norm.kernels.triton.devices import use_plans
from fused_norm.kernels.triton.launch import Launch
from fused_norm.spec import NormSpec

from .calls import NAMES, every_call
from .conftest import OPERATORS
from .numerics import BF16, FP32

RMS_NORM, ADD_RMS_NORM = OPERATORS["rms_norm"], OPERATORS["add_rms_norm"]
LLAMA, GEMMA = NormSpec("llama"), NormSpec("gemma", True, eps=1e-5)


def rows(device: str, dtype: torch.dtype = FP32, layout: str = "dense") -> Tensor:
    """Return rows of shape [2, 3, 16] in a layout."""
    if layout == "transposed":
        return torch.randn(3, 2, 16, device=device).to(dtype).transpose(0, 1)
    if layout == "columns":
        return torch.randn(2, 16, 3, device=device).to(dtype).transpose(1, 2)
    return torch.randn(2, 3, 16, device=device).to(dtype)


def weight(device: str, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(16, device=device).to(dtype)


def from_recording(*arguments: Any, replaces: Any = None) -> Any:
    """Return the norm of a call that is recorded for this stock code; None for any other call, which is not made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RMS_NORM, "_try_new", lambda *_: (None, "it is new"))
        return RMS_NORM.try_fused(*arguments, replaces=replaces)[0]


CASES = (*NAMES, "norm transposed heads", "norm padded rows")
"""The calls that are recorded: every operator, and norms of rows in other layouts."""


def case_of(case: str, device: str) -> tuple[Any, tuple[Any, ...], int]:
    """Return an operator, the arguments of a call, and how many leading arguments may require a gradient."""
    layout = next((layout for layout in ("transposed heads", "padded rows") if case.endswith(layout)), "contiguous")
    dtype = FP32 if case == "norm and add" else None  # otherwise its backward casts the residual's gradient
    call = every_call(device, layout, dtype=dtype)[case.removesuffix(f" {layout}")]
    return OPERATORS[call.name], (*call.tensors, *call.options), call.differentiated


def fresh(arguments: tuple[Any, ...], requires_grad: tuple[bool, ...]) -> tuple[Any, ...]:
    """Return copies in the same layouts at other addresses, with ``requires_grad`` set on the leading ones."""

    def copied(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        copy = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device)
        return copy.copy_(argument)

    copies = tuple(map(copied, arguments))
    for copy, want in zip(copies, requires_grad, strict=False):
        if isinstance(copy, Tensor):
            copy.requires_grad_(want)
    return copies


def step(call: Callable[..., Any], arguments: tuple[Any, ...], used: tuple[bool, ...]) -> list[Tensor | None]:
    """Return outputs and gradients; only outputs that are ``used`` get a gradient."""
    result = call(*arguments)
    outputs = [output for output in (result if isinstance(result, tuple) else (result,)) if output is not None]
    leaves = [argument for argument in arguments if isinstance(argument, Tensor) and argument.requires_grad]
    torch.manual_seed(3)
    incoming = [torch.randn_like(output) for output in outputs]
    pairs = [
        pair
        for pair, use in zip(zip(outputs, incoming, strict=True), used, strict=False)
        if use and pair[0].requires_grad
    ]
    if not leaves or not pairs or not torch.is_grad_enabled():
        return [*outputs]
    ends, grads = zip(*pairs, strict=True)
    return [*outputs, *torch.autograd.grad(ends, leaves, grads, allow_unused=True)]


def assert_same(actual: list[Tensor | None], expected: list[Tensor | None], is_exact: bool = True) -> None:
    """Assert equal bits, except for multiply-adds that a kernel compiled without gradients may fuse differently."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            assert torch.equal(a, b) or (not is_exact and (a.double() - b.double()).norm() < 1e-6 * b.double().norm())


def recordings(name: str) -> list[Any]:
    return [entry for entries in OPERATORS[name].recordings.values() for entry in entries]


def straight(entry: Any) -> bool:
    """Return whether it runs generated code, and not Triton's own launches."""
    return "stream_of" in vars(entry).get("forward", entry.call).__globals__


@pytest.mark.parametrize("case", CASES)
def test_a_program_does_what_the_general_path_does(case: str, device: str) -> None:
    operator, arguments, differentiable = case_of(case, device)
    everything, outputs = (True,) * differentiable, (True, True)
    patterns = [(everything, outputs), ((False,) * differentiable, outputs), (everything, (True, False))]
    patterns.append((tuple(index % 2 == 0 for index in range(differentiable)), outputs))
    for requires_grad, used in patterns:
        expected = step(operator._launched, fresh(arguments, requires_grad), used)
        for _ in range(2):
            assert_same(step(operator, fresh(arguments, requires_grad), used), expected)
        with torch.no_grad():
            results = operator(*fresh(arguments, requires_grad))
        results = [result for result in (results if isinstance(results, tuple) else (results,)) if result is not None]
        assert_same(results, expected[: len(results)], is_exact=device == "cpu")
    assert all(straight(entry) for entry in recordings(operator.name))
    backwards = [backward for forward in recordings(operator.name) for backward in forward.backwards]
    assert backwards
    assert all(map(straight, backwards))


class OnlyAllocations(TorchDispatchMode):
    """Refuses whatever is done to memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ in ("new_empty", "empty_strided", "promote_types"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", NAMES)
def test_what_is_computed_goes_through_the_call(case: str, device: str) -> None:
    """A recording would leave out anything else, and a launch that comes later would not see it."""
    for layout in ("contiguous", "columns first", "transposed heads"):
        call = every_call(device, layout)[case]
        operator, arguments = OPERATORS[call.name], (*call.tensors, *call.options)
        forward, backward = Call(), Call()
        with OnlyAllocations():
            results = operator.forward(forward, *arguments, training=True)
            steps = forward.steps()
        assert steps
        assert all(any(result is one for one in (*forward.allocated, *arguments, None)) for result in results)
        saved, scalars = operator.save(arguments, results)
        incoming = [None if y is None else torch.ones_like(y) for y in results[: len(operator.outputs)]]
        needed = [tensor is not None for tensor in call.tensors[: call.differentiated]]
        if type(operator).backward is not Operator.backward:
            given = BackwardArguments(incoming, saved, scalars, needed)
            with OnlyAllocations():
                grads = operator.backward(backward, given)
                steps = backward.steps()
            assert steps
            assert all(any(grad is one for one in (*backward.allocated, *incoming, None)) for grad in grads)


@pytest.mark.parametrize("change", ["spec", "mode", "weight", "dtype", "shape", "layout", "gradient", "kind"])
def test_a_call_that_differs_in_one_fact_gets_another_recording(change: str, device: str) -> None:
    x, w = rows(device), weight(device)
    for _ in range(2):
        RMS_NORM(x, w, LLAMA, None)
    spec, mode = (GEMMA, None) if change == "spec" else (LLAMA, "multi_wave_reload" if change == "mode" else None)
    x = {
        "dtype": x.to(BF16),
        "shape": x[:1].clone(),
        "layout": rows(device, layout="transposed"),
        "gradient": x.clone().requires_grad_(),
    }.get(change, x)
    w = None if change == "weight" else torch.nn.Parameter(w, requires_grad=False) if change == "kind" else w
    assert from_recording(x, w, spec, mode) is None
    actual = RMS_NORM(x, w, spec, mode)
    assert len(recordings("rms_norm")) == 2
    assert torch.equal(actual, RMS_NORM._launched(x, w, spec, mode))


class Subclass(Tensor):
    pass


@pytest.fixture
def recorded(device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Arguments of a norm that is recorded in every grad mode, as on a machine with several GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    x, w = rows(device), weight(device)
    for _ in range(2):
        rms_norm(x, w)
        with torch.no_grad():
            rms_norm(x, w)
        with torch.inference_mode():
            rms_norm(x, w)
    assert from_recording(x, w, LLAMA, None) is not None
    return x, w


def test_transforms_and_modes_do_not_meet_a_recording(recorded: tuple[Tensor, Tensor]) -> None:
    x, w = recorded
    expected = rms_norm(x, w)
    torch.testing.assert_close(torch.vmap(rms_norm, in_dims=(0, None))(x, w), expected)
    torch.testing.assert_close(torch.func.grad(lambda x: rms_norm(x, w).sum())(x).shape, x.shape)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(rms_norm(forward_ad.make_dual(x, torch.ones_like(x)), w)).tangent
        assert tangent is not None
    graph = make_fx(lambda x, w: rms_norm(x, w))(x, w)
    assert "rms_norm_forward" in graph.code
    with FakeTensorMode() as mode:
        fake = rms_norm(mode.from_tensor(x), mode.from_tensor(w))
    assert type(fake) is not Tensor
    assert torch.equal(rms_norm(x, w), expected)


def test_unusual_tensors_do_not_meet_a_recording(recorded: tuple[Tensor, Tensor], device: str) -> None:
    x, w = recorded
    negative = torch._neg_view(x)
    assert from_recording(negative, w, LLAMA, None) is None
    assert torch.equal(rms_norm(negative, w), -rms_norm(x, w))
    assert from_recording(x.as_subclass(Subclass), w, LLAMA, None) is None
    assert from_recording(x.tolist(), w, LLAMA, None) is None
    assert from_recording(x, None, LLAMA, None) is None
    with torch.inference_mode():
        inside = rms_norm(x, w)
        assert inside.is_inference()
        assert from_recording(inside, w, LLAMA, None) is None
    with torch.autocast(device, dtype=BF16):
        assert torch.equal(rms_norm(x, w), rms_norm(x, w))


def test_what_changes_an_argument_without_a_tensor_is_seen(device: str) -> None:
    """A scale of True is an error though True equals 1, and 0.0 is not -0.0."""
    x, r, w = rows(device).requires_grad_(), rows(device), weight(device)
    for scale in (1.0, 0.0, -0.0, 2, 2.0):
        for _ in range(2):
            actual = add_rms_norm(x, r, w, scale=scale)
            expected = ADD_RMS_NORM._launched(x, r, w, LLAMA, None, scale)
            assert_same([*actual], [*expected])
            dx, expected_dx = (torch.autograd.grad(s, x, torch.ones_like(s))[0] for _, s in (actual, expected))
            assert torch.equal(dx.signbit(), expected_dx.signbit())
    with pytest.raises(TypeError, match="scale must be"):
        add_rms_norm(x, r, w, scale=True)


def test_one_tensor_as_two_arguments(device: str) -> None:
    x, r = rows(device).requires_grad_(), rows(device).requires_grad_()

    def sum_and_gradients(a: Tensor, b: Tensor, operator: Callable[..., Any], *options: Any) -> list[Tensor | None]:
        total = operator(a, b, *options)
        return [total, *torch.autograd.grad(total, (a, b), torch.ones_like(total))]

    for a, b in ((x, x), (x, r), (x, x), (r, x)):
        for operator, options in ((OPERATORS["glu"], ("silu",)), (OPERATORS["norm_add"], (None, LLAMA))):
            for _ in range(2):
                assert_same(
                    sum_and_gradients(a, b, operator, *options), sum_and_gradients(a, b, operator._launched, *options)
                )


MODES = {"trained": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("order", [*itertools.permutations(MODES, 2)], ids=" then ".join)
def test_what_was_recorded_in_one_mode_is_not_repeated_in_another(order: tuple[str, str], device: str) -> None:
    for layout in ("dense", "columns"):  # the latter is copied
        recording.forget_all()
        x, w, dy = rows(device, layout=layout).requires_grad_(), weight(device), rows(device)
        y = RMS_NORM._launched(x, w, LLAMA, None)
        (dx,) = torch.autograd.grad(y, x, dy)
        for name in (*order, *order):
            with MODES[name]():
                actual = rms_norm(x, w)
            assert (actual.requires_grad, actual.is_inference()) == (name == "trained", name == "inference")
            assert torch.equal(actual, y)
            if name == "trained":
                assert torch.equal(torch.autograd.grad(actual, x, dy)[0], dx)
        with torch.inference_mode():
            inside = x.detach().clone()
        for tensor in (inside, x.detach(), inside):
            with torch.no_grad():
                assert torch.equal(rms_norm(tensor, w), y)
        assert all(map(straight, recordings("rms_norm"))), "a copy is repeated too"


def at_an_odd_address(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides that is not 16-byte aligned."""
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(1 + extent, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        copy = memory.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)
    return copy.requires_grad_(tensor.requires_grad)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Collect the name of a watched recording each time it falls back to Triton's launches."""
    names: list[str] = []

    def watch(**watched: Callable[..., Any]) -> list[str]:
        for name, function in watched.items():
            namespace = function.__globals__  # type: ignore[attr-defined]
            repeat = namespace["repeat"]
            monkeypatch.setitem(namespace, "repeat", lambda *a, n=name, r=repeat: (names.append(n), r(*a))[1])
        return names

    return watch


@pytest.mark.parametrize("case", CASES)
def test_kernels_compiled_for_aligned_tensors_get_none_at_an_odd_address(
    case: str, repeated: Callable[..., list[str]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor at a time: in a call that repeats a recording, and in a call that would be recorded."""
    operator, call_args, differentiable = case_of(case, device)
    requires_grad = (True,) * differentiable
    if device == "cpu":
        monkeypatch.setattr(Launch, "run", lambda launch: None)  # only the path matters, and not the result

    def step_at(odd: int | None, odd_gradient: int | None) -> list[str]:
        """Return the directions that read a tensor at an odd address."""
        arguments = [*fresh(call_args, requires_grad)]
        if odd is not None:
            arguments[odd] = at_an_odd_address(arguments[odd])
        result = operator(*arguments)
        outputs = [output for output in (result if isinstance(result, tuple) else (result,)) if output is not None]
        incoming = [torch.randn_like(output) for output in outputs]
        if odd_gradient is not None:
            incoming[odd_gradient] = at_an_odd_address(incoming[odd_gradient])
        read: list[Tensor | None] = [*incoming, *outputs[0].grad_fn.saved_tensors]
        torch.autograd.grad(
            outputs, [argument for argument in arguments[:differentiable] if argument is not None], incoming
        )
        is_odd = odd is not None, any(tensor is not None and tensor.data_ptr() % 16 for tensor in read)
        return [direction for direction, odd in zip(("forward", "backward"), is_odd, strict=True) if odd]

    step_at(None, None)
    (forward,) = recordings(operator.name)
    (backward,) = forward.backwards
    fallbacks = repeated(forward=forward.forward, backward=backward.call)
    outputs = operator(*fresh(call_args, requires_grad))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [place for place, output in enumerate(outputs) if output is not None]
    tensors = [place for place, argument in enumerate(call_args) if isinstance(argument, Tensor)]
    ways = [(None, None), *((place, None) for place in tensors), *((None, place) for place in gradients)]
    for way in ways:
        fallbacks.clear()
        assert step_at(*way) == fallbacks, way
    for way in ways:
        recording.forget_all()
        odd = step_at(*way)
        assert len(recordings(operator.name)) == ("forward" not in odd), way
        assert all(len(entry.backwards) == ("backward" not in odd) for entry in recordings(operator.name)), way


def test_a_call_replaces_only_the_stock_code_that_it_was_checked_against(recorded: tuple[Tensor, Tensor]) -> None:
    """A rotation, for example, may have other rounding points than the public function called with the same tensors."""
    x, w = recorded
    rotation, gate = object(), object()
    before = len(recordings("rms_norm"))
    assert from_recording(x, w, LLAMA, None, replaces=rotation) is None
    outputs, reason = RMS_NORM.try_fused(x, w, LLAMA, None, replaces=rotation)
    assert reason is None
    assert len(recordings("rms_norm")) == before, "one recording serves both"
    assert torch.equal(from_recording(x, w, LLAMA, None, replaces=rotation), outputs)
    assert from_recording(x, w, LLAMA, None, replaces=gate) is None
    assert from_recording(x, w, GEMMA, None, replaces=rotation) is None
    assert from_recording(x.clone().requires_grad_(), w, LLAMA, None, replaces=rotation) is None
    with calls.by(noting := Noting()):
        assert from_recording(x, w, LLAMA, None, replaces=gate) is None
        assert from_recording(x, w, LLAMA, None, replaces=rotation) is not None
    assert noting.seen == ["rms_norm"]
    recording.forget_all()
    assert from_recording(x, w, LLAMA, None, replaces=rotation) is None


def test_observers_see_every_call(recorded: tuple[Tensor, Tensor]) -> None:
    x, w = recorded
    with calls.by(noting := Noting()):
        assert torch.equal(rms_norm(x, w), rms_norm(x, w))
    assert noting.seen == ["rms_norm", "rms_norm"]


@pytest.mark.parametrize("change", ["another", "a function added", "a function added and taken away"])
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_who_hooks_into_tritons_launches_later_gets_them(
    hook: str, change: str, repeated: Callable[..., list[str]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, dy = rows(device).requires_grad_(), weight(device), rows(device)
    torch.autograd.grad(rms_norm(x, w), x, dy)
    (forward,) = recordings("rms_norm")
    (backward,) = forward.backwards
    fallbacks = repeated(forward=forward.forward, backward=backward.call)
    before = getattr(knobs.runtime, hook)
    if change == "another":
        monkeypatch.setattr(knobs.runtime, hook, type(before)())
    else:
        monkeypatch.setattr(before, "calls", [*before.calls, lambda metadata: None])
    if change == "a function added and taken away":
        before.calls.pop()
    torch.autograd.grad(rms_norm(x, w), x, dy)
    assert fallbacks == ([] if change == "a function added and taken away" else ["forward", "backward"])


def test_plans_that_come_into_use_are_those_of_all_calls(device: str) -> None:
    """This includes calls that a patched module has checked; the same holds when plans go out of use."""
    x, w, own = rows(device).requires_grad_(), weight(device), object()

    def warps() -> list[Any]:
        num_warps: list[Any] = []
        run = Launch.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Launch, "run", lambda launch: (num_warps.append(launch.options["num_warps"]), run(launch))[1])
            torch.autograd.grad(rms_norm(x, w).sum(), x)
        return num_warps

    def is_known() -> bool:
        return from_recording(x, w, LLAMA, None, replaces=own) is not None

    usual = warps()
    RMS_NORM.try_fused(x, w, LLAMA, None, replaces=own)
    assert is_known()
    measured = next(table for table in TABLES if table.rows)
    (rule, *_) = measured.rows["norm_backward"]
    rule = replace(rule, widest=16, elements=64, warps=1, stages=1)
    with use_plans(replace(measured, rows=dict.fromkeys(("forward", "norm_backward"), (rule,)))):
        assert not is_known()
        assert warps() == [1, 1]
        again = warps()  # on a GPU a repeated call launches in another way
        assert again == [1, 1] or (device == "cuda" and {*again} <= {1})
        RMS_NORM.try_fused(x, w, LLAMA, None, replaces=own)
    assert not is_known()
    again = warps()
    assert again == usual or (device == "cuda" and {*again} <= {*usual})
    assert 1 not in usual


class Noting:
    """Records the calls that it observes."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def called(self, operator: Any, arguments: tuple[Any, ...]) -> Any:
        self.seen.append(operator.name)
        return operator.results_of(*arguments)


@pytest.mark.parametrize("is_known", [True, False])
def test_an_observer_is_told_of_its_own_thread_alone(is_known: bool, device: str) -> None:
    x, w = rows(device), weight(device)
    expected = rms_norm(x, w)
    if not is_known:
        recording.forget_all()
    results: list[Tensor] = []
    noting = Noting()
    with calls.by(noting):
        thread = threading.Thread(target=lambda: results.append(rms_norm(x, w)))
        thread.start()
        thread.join()
        assert noting.seen == []
        rms_norm(x, w)
    assert noting.seen == ["rms_norm"]
    assert torch.equal(results[0], expected)


def test_recordings_are_bounded_and_hold_no_tensor(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "KEYS", 3)
    monkeypatch.setattr(recording, "EACH", 2)
    w = weight(device)
    for length in range(1, 9):
        for dtype in (FP32, BF16, torch.float16):
            x = torch.randn(length, 16, device=device).to(dtype).requires_grad_()
            y = rms_norm(x, w)
            y.backward(torch.ones_like(y))
            for stride in (1, 2, 3):
                y = rms_norm(x, w)
                y.backward(torch.ones(length, 16 * stride, device=device, dtype=y.dtype)[:, :16])
    assert len(RMS_NORM.recordings) <= 3
    assert all(len(entry.backwards) <= 2 for entry in recordings("rms_norm"))
    assert len(recordings("rms_norm")) <= 6
    reference = weakref.ref(x)
    del x, y
    gc.collect()
    assert reference() is None


@pytest.fixture
def _threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_share_recordings_and_compute_what_one_thread_does(device: str) -> None:
    inputs = [torch.randn(length, 24, device=device).requires_grad_() for length in (3, 70, 130, 260)]
    w = torch.randn(24, device=device).requires_grad_()

    def results(x: Tensor) -> list[Tensor | None]:
        y = rms_norm(x, w)
        return [y, *torch.autograd.grad(y.square().sum(), (x, w))]

    expected = [results(x) for x in inputs]
    recording.forget_all()
    wrong: list[object] = []

    def work() -> None:
        try:
            for x, right in list(zip(inputs, expected, strict=True)) * 2:
                assert_same(results(x), right)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("without", [(recording, "TensorGuards"), (codegen, "_empty_strided_cuda")])
def test_without_parts_of_pytorch_that_are_not_public(
    without: tuple[Any, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*without, None)
    x, w = rows(device).requires_grad_(), weight(device)
    expected = step(RMS_NORM._launched, (x, w, LLAMA, None), (True,))
    for _ in range(3):
        assert_same(step(RMS_NORM, (x, w, LLAMA, None), (True,)), expected)
    is_recorded = from_recording(x, w, LLAMA, None) is not None
    assert is_recorded == (without[0] is codegen), "without guards nothing is recorded"
    assert from_recording(x.detach(), w, LLAMA, None) is None


class Compiled:
    """A compiled kernel as in one release of Triton, which records its launches."""

    def __init__(self, signature: dict[str, str], release: str) -> None:
        self.src = type("Source", (), {"signature": signature})()
        self.function, self.packed_metadata = 77, (4, 1, 0)
        self.launched: list[tuple[Any, ...]] = []
        self.run: Any = lambda *arguments: self.launched.append(arguments)
        if release != "unknown":
            self.run.launch = lambda *arguments: self.launched.append(("direct", *arguments))
            self.run.global_scratch_size = self.run.profile_scratch_size = 0
            self.run.launch_cooperative_grid, self.run.launch_pdl = False, True
        if release == "3.7":
            self.run.arg_annotations = [f"annotation of {name}" for name in signature]
            self.run.kernel_signature = b"signature"


@pytest.mark.parametrize("release", ["3.6", "3.7", "unknown"])
def test_a_compiled_kernel_gets_its_arguments_as_its_triton_wants_them(
    release: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    names = ["x_ptr", "r_ptr", "y_ptr", "M", "stride", "scale", "N", "SPEC"]
    kinds = ["*fp32", "constexpr", "*fp32", "i32", "constexpr", "constexpr", "constexpr", "constexpr"]
    kernel = type("Kernel", (), {"arg_names": names, "__name__": "kernel"})()
    x = rows(device)
    launch = Launch(kernel, (3, 1), (x, None, x), (6, 1, None), {"SPEC": LLAMA, "N": 16}, {})
    compiled = Compiled(dict(zip(names, kinds, strict=True)), release)
    entry = codegen.Cuda.entry(launch, compiled)
    addresses = [None if at is None else 16 * at for at in entry.tensors]
    arguments = (*addresses, *entry.numbers)
    entry.call(3, 1, 1, "stream", *entry.head, *([arguments] if entry.packed else arguments))
    everything = (0, None, 32, 6, 1, None, 16, LLAMA)
    expected: dict[str, tuple[Any, ...]] = {
        "unknown": (3, 1, 1, "stream", 77, (4, 1, 0), None, None, None, *everything),
        "3.6": ("direct", 3, 1, 1, "stream", 77, False, True, None, None, (4, 1, 0), None, None, None, *everything),
        "3.7": (
            "direct", 3, 1, 1, "stream", 77, False, True, (4, 1, 0), None, None, None, None, None,
            [f"annotation of {name}" for name in ("x_ptr", "y_ptr", "M")], b"signature", (0, 32, 6),
        ),
    }  # fmt: skip
    assert compiled.launched == [expected[release]]


@pytest.mark.parametrize(("number", "is_recorded"), [(2**31 - 1, True), (2**31, False), (2.0**31, True)])
def test_a_kernel_that_counts_in_64_bits_is_launched_by_triton(number: float, is_recorded: bool, device: str) -> None:
    kernel = type("Kernel", (), {"arg_names": ["x_ptr", "stride"], "__name__": "kernel"})()
    launch = Launch(kernel, (3, 1), (rows(device),), (number,), {}, {})
    entry = codegen.Cuda.entry(launch, Compiled({"x_ptr": "*fp32", "stride": "i32"}, "unknown"))
    if is_recorded:
        assert codegen._launch_line(0, launch, entry, ["px"])[1]["n0_0"] == number
        return
    with pytest.raises(Exception, match="compiled anew"):
        codegen._launch_line(0, launch, entry, ["px"])


def test_a_nested_tensor_is_no_argument_like_those_of_a_recording(device: str) -> None:
    """PyTorch's tensor guard would abort the process."""
    x, residual, w = rows(device), rows(device), weight(device)
    for _ in range(2):
        add_rms_norm(x, residual, w)
    nested = torch.nested.nested_tensor([residual[0], residual[1]])
    with pytest.raises(TypeError, match="must be a dense tensor, not nested"):
        add_rms_norm(x, nested, w)

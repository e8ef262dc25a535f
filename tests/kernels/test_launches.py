"""A launch is prepared once for tensors of certain dtypes, None among them, and must be given no others."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from fused_norm.kernels import add_rms_norm, glu, norm_add, norm_add_norm, qk_norm, qk_norm_rope, rms_norm, rope

from .conftest import Launched
from .numerics import BF16, FP32


@pytest.mark.slow
def test_a_launch_gets_tensors_of_the_same_dtypes_every_time(launches: list[Launched], device: str) -> None:
    """Norms, sandwiches and heads of one width sum their weights' gradients by the same kernel."""
    width = 64
    for x_dtype, w_dtype in ((BF16, BF16), (BF16, FP32), (FP32, FP32)):
        x, r = (torch.randn(2, 5, 3, width, device=device).to(x_dtype).requires_grad_() for _ in range(2))
        angles = torch.randn(1, 3, width, device=device, dtype=x_dtype)
        for needed in itertools.product((True, False), repeat=2):
            a, b = (torch.randn(width, device=device).to(w_dtype).requires_grad_(need) for need in needed)
            calls = (
                (rms_norm(x, a),),
                add_rms_norm(x, r, b),
                norm_add_norm(x, r, a, b),
                qk_norm(x, r, a, b),
                qk_norm_rope(x, r, a, b, angles, angles),
                rope(x, r, angles, angles),
                (glu(x, r), glu(r, None, "gelu")),
            )
            for outputs in calls:
                torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
    given: dict[int, set[tuple[torch.dtype | None, ...]]] = {}
    for one in launches:
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in one.tensors)
        given.setdefault(id(one.launch), set()).add(dtypes)
    assert len(given) > 20
    assert all(len(dtypes) == 1 for dtypes in given.values())


@pytest.mark.parametrize("grad", [False, True])
def test_a_norm_and_an_add_is_another_launch_than_a_sandwich(grad: bool, launches: list[Launched], device: str) -> None:
    """Without a weight of the second norm the two differ in what they write alone."""
    x, r, w = (torch.randn(shape, device=device).requires_grad_(grad) for shape in ((5, 48), (5, 48), (48,)))
    for _ in range(2):
        s = norm_add(x, r, w)
        y, total = norm_add_norm(x, r, w, None)
        assert torch.equal(s, total)
        torch.testing.assert_close(y, rms_norm(s, None))
    added, sandwiched = launches[0].launch, launches[1].launch
    assert added is not sandwiched
    assert [one.launch for one in launches[::3]] == [added, added]
    assert [one.launch for one in launches[1::3]] == [sandwiched, sandwiched]


@pytest.fixture
def _threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_compute_what_one_thread_does(device: str) -> None:
    inputs = [torch.randn(rows, 24, device=device).requires_grad_() for rows in (3, 70, 130, 260)]
    w = torch.randn(24, device=device)

    def results(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = rms_norm(x, w)
        return y, *torch.autograd.grad(y.square().sum(), x)

    expected = [results(x) for x in inputs]
    wrong: list[object] = []

    def work(index: int) -> None:
        try:
            for _ in range(6):
                if not all(map(torch.equal, results(inputs[index]), expected[index])):
                    wrong.append(index)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

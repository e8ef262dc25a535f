"""Host time of a call: what bounds small batches, where the GPU waits for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .cases import GEMMA, Case, Op, compose
from .kernels import differentiable_again
from .providers import Provider
from .results import HostResult
from .session import Session, in_a_line
from .timing import Timing, host_time

CHAIN = 32
"""Calls in a row: what a model is."""

_ALONE = 20
"""Calls by themselves between two looks at the clock."""

CASES: tuple[Case, ...] = (
    Case("norm", 16, 1024),
    Case("add", 16, 1024),
    Case("sandwich", 16, 1024, GEMMA),
    Case("qk", 4, 128, heads=(4, 2)),
    Case("rope", 4, 128, heads=(4, 2)),
)
"""So small that the GPU is done long before the host is."""


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _identity(case: Case) -> Op:
    return compose(case.operation, lambda x, w: _Identity.apply(x), lambda x, r, w: (_Identity.apply(x), r))


IDENTITY = Provider("identity", _identity)
"""A Python autograd function that does nothing: the least that one can cost."""


def measure(session: Session, providers: Sequence[Provider]) -> None:
    """Add a result to the session for every case, provider and length of chain, as far as time allows."""
    with differentiable_again():
        for case in CASES:
            for provider in (*providers, *((IDENTITY,) if case.operation == "norm" else ())):
                what = f"host time of {case.operation} by {provider.name}"
                why = provider.missing(session.device)
                if why is not None:
                    session.leave_out(what, why)
                elif not session.out_of_time(what):
                    _measure(session, case, provider, what)
            session.save()


def _measure(session: Session, case: Case, provider: Provider, what: str) -> None:
    try:
        op = provider.build(case)
        lengths = ((1, _ALONE), (CHAIN, 1)) if not session.quick else ((1, 1), (2, 1))
        found = [_time(session, case, provider, op, chain, repeats) for chain, repeats in lengths]
    except Exception as error:  # Of whatever kind: the others are measured all the same.
        session.leave_out(what, in_a_line(error))
        return
    session.results.host += found
    times = ", ".join(f"{1e6 * r.forward.median:.1f}/{1e6 * r.training.median:.1f} in {r.chain}" for r in found)
    session.say(f"{what}, us a call: {times}")


def _time(session: Session, case: Case, provider: Provider, op: Op, chain: int, repeats: int) -> HostResult:
    device = session.device
    inputs = case.inputs(torch.bfloat16 if device.type != "cpu" else torch.float32, device, seed=0)
    # There are as many outputs as activations, and a call takes the results of the one before.
    state = tuple(gradient.detach().clone().requires_grad_() for gradient in inputs.gradients)
    weights = inputs.arguments[len(state) :]
    layers = [tuple(w.detach().clone().requires_grad_() for w in weights) for _ in range(chain)]
    leaves = (*state, *(weight for layer in layers for weight in layer))

    def forward() -> tuple[Tensor, ...]:
        values = state
        for layer in layers:
            if case.operation == "rope":  # A call takes tokens first: two views more in everyone's time.
                values = tuple(value.transpose(1, 2) for value in values)
            values = op(*values, *layer, *inputs.angles)
        return values

    def train() -> None:
        torch.autograd.grad(forward(), leaves, inputs.gradients, allow_unused=True)

    def seconds_of(run: Callable[[], object]) -> Timing:
        def repeated() -> None:
            for _ in range(repeats):
                run()

        return host_time(repeated, chain * repeats, device, seconds=session.seconds(0.1))

    training = seconds_of(train)
    with torch.no_grad():
        return HostResult(case.operation, provider.name, chain, seconds_of(forward), training)

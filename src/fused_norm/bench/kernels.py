"""Operations side by side: each result is held against float64 first, and only what is right is timed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from .cases import DIRECTIONS, Case, Direction, Inputs, Op, tolerance, truth, worst_error
from .providers import Provider
from .results import KernelResult, Part
from .session import Session, in_a_line
from .timing import gpu_time, input_sets, leaves_cache, own_stream, profiled_time

logger = logging.getLogger(__name__)

Computation = Callable[[], Sequence[Tensor]]


def measure(
    session: Session,
    part: Part,
    cases: Sequence[Case],
    dtypes: Sequence[torch.dtype],
    providers: Sequence[Provider],
    *,
    profile: bool = True,
) -> None:
    """Add a result to the session for every case, dtype, provider and direction, as far as time allows.

    Args:
        session: where, for how long, and where results go.
        part: what the results are filed under.
        cases: in the order of measuring.
        dtypes: of activations and weights.
        providers: those that cannot be measured here are noted as left out.
        profile: whether to take torch.profiler's time as well.
    """
    present = []
    for provider in providers:
        why = provider.missing(session.device)
        if why is None:
            present.append(provider)
        else:
            session.leave_out(provider.name, why)
    with own_stream(session.device), differentiable_again():
        for dtype in dtypes:
            for case in cases:
                if not session.out_of_time(f"{case.name} {_name(dtype)}"):
                    _measure_case(session, part, case, dtype, present, profile)
                    session.save()


def differentiable_again() -> AbstractContextManager[None]:
    """Inside, torch.compile makes backwards that may run more than once on one forward."""
    return functorch_config.patch(donated_buffer=False)


def calls(op: Op, direction: Direction, sets: Sequence[Inputs], *, copy_gradients: bool = False) -> list[Computation]:
    """The call to be timed, once for each set of inputs; for a backward the forward runs here.

    Args:
        op: of a provider.
        direction: a forward's call is made for ``torch.no_grad``.
        sets: inputs.
        copy_gradients: give the backward its own copies of the gradients.
    """
    if direction == "forward":
        return [partial(op, *inputs.detached()) for inputs in sets]
    backwards: list[Computation] = []
    for inputs in sets:
        gradients = [gradient.clone() for gradient in inputs.gradients] if copy_gradients else inputs.gradients
        outputs = op(*inputs.attached())
        backwards.append(partial(torch.autograd.grad, outputs, inputs.arguments, gradients, retain_graph=True))
    return backwards


def _measure_case(
    session: Session, part: Part, case: Case, dtype: torch.dtype, providers: Sequence[Provider], profile: bool
) -> None:
    device = session.device
    directions = DIRECTIONS if case.backward else DIRECTIONS[:1]
    for direction in directions:
        session.measure_copy(case.bytes(direction, dtype))
    count = input_sets(case.bytes("forward", dtype), device)
    sets = [case.inputs(dtype, device, seed=seed) for seed in range(count)]
    exact = dict(zip(DIRECTIONS, truth(case, sets[0]), strict=True))
    said = []
    for provider in providers:
        if session.out_of_time(f"{case.name} {_name(dtype)} {provider.name}"):
            continue
        found = [
            _measure(session, part, case, direction, dtype, provider, sets, exact[direction], profile)
            for direction in directions
        ]
        session.results.kernels += found
        times = "/".join(f"{1e6 * r.timing.median:.1f}" if r.timing else r.verdict for r in found)
        said.append(f"{provider.name} {times}")
    session.say(f"{case.name} {_name(dtype)}, us: {', '.join(said)}")


def _measure(
    session: Session,
    part: Part,
    case: Case,
    direction: Direction,
    dtype: torch.dtype,
    provider: Provider,
    sets: Sequence[Inputs],
    exact: Sequence[Tensor],
    profile: bool,
) -> KernelResult:
    device, moved = session.device, case.bytes(direction, dtype)
    result = KernelResult(
        part=part,
        case=case.name,
        group=case.group,
        rows=case.rows,
        width=case.width,
        dtype=_name(dtype),
        provider=provider.name,
        direction=direction,
        bytes=moved,
        cold=leaves_cache(moved * len(sets), device),
        verdict="ok",
    )
    try:
        with torch.set_grad_enabled(direction == "backward"):
            todo = calls(provider.build(case), direction, sets, copy_gradients=provider.overwrites_gradients)
            _poison(exact, device)
            error = worst_error(todo[0](), exact)
            if not error <= tolerance(dtype):
                detail = f"relative error {error:.1e}, and {tolerance(dtype):.1e} is allowed"
                return replace(result, verdict="wrong", detail=detail, error=error if math.isfinite(error) else None)
            result = replace(result, error=error, timing=gpu_time(todo, device, seconds=session.seconds(0.1)))
            return replace(result, profiled=_profiled(todo, device)) if profile else result
    except provider.refuses as refusal:
        return replace(result, verdict="refused", detail=in_a_line(refusal))
    except Exception as failure:  # Of whatever kind: the others are measured all the same.
        logger.warning("%s %s %s: %s", provider.name, case.name, direction, in_a_line(failure))
        return replace(result, verdict="failed", detail=in_a_line(failure), timing=None)


def _profiled(todo: Sequence[Computation], device: torch.device) -> float | None:
    try:
        return profiled_time(todo, device)
    except RuntimeError as error:
        logger.warning("no time from torch.profiler: %s", in_a_line(error))
        return None


def _poison(exact: Sequence[Tensor], device: torch.device) -> None:
    """Leave NaN in the memory that is handed out next, results' and temporaries': what is not written shows."""
    if device.type != "cpu":
        torch.cuda.empty_cache()  # Else blocks that hold the results of others would be taken first.
    held = torch.full((8 * sum(true.numel() for true in exact),), float("nan"), device=device)
    del held


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Runs a plan: each group of cases once stock, a few times perturbed, then every fused twin, and keeps each result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..spec import FusedNormError
from .mutations import MUTATIONS, SOUND
from .plan import PRECISIONS, Case, Settings, groups
from .recording import record
from .runs import Bench, InvisibleError
from .store import Result, Store, fingerprint
from .subject import Subject
from .training import TrainingOptions


class Progress(Protocol):
    """Is told what happens while a plan runs."""

    def run(self, name: str, steps: int) -> Callable[[int, float], object]:
        """A training run begins; what is returned is called after each step with its index and loss."""

    def done(self, result: Result, *, kept: bool) -> object:
        """A case has its result: from this run, or ``kept`` from an earlier one."""


@dataclass(frozen=True)
class Plan:
    """Cases and what they need to run.

    Attributes:
        cases: in order.
        subjects: the models, by name.
        settings: of every run.
        mutation_steps: optimizer steps of the runs with planted faults.
        sequences: token ids in training order for a case, (sequences, length), int64.
        facts: about versions, device and processes: a result is used again only where they are equal.
        cpu: stay on the CPU.
    """

    cases: tuple[Case, ...]
    subjects: Mapping[str, Subject]
    settings: Settings
    mutation_steps: int
    sequences: Callable[[Case], Tensor]
    facts: Mapping[str, Any]
    cpu: bool = False

    def options(self, case: Case) -> TrainingOptions:
        """How the case trains."""
        options = self.settings.options
        return replace(
            options,
            steps=options.steps if case.mutation is None else min(self.mutation_steps, options.steps),
            learning_rate=options.learning_rate * PRECISIONS[case.precision].rate,
        )

    def settings_of(self, case: Case) -> str:
        """What a kept result must have been made with."""
        subject = self.subjects[case.model]
        return fingerprint(
            {
                **self.facts,
                "settings": {**asdict(self.settings), "options": asdict(self.options(case))},
                "config": subject.config.to_dict(),
                "weights": subject.weights,
                "tokens": hashlib.sha256(self.sequences(case).numpy().tobytes()).hexdigest(),
            }
        )


def with_mutations(cases: Iterable[Case]) -> list[Case]:
    """For each group of cases: the sound twin in a short run, and one twin with each fault."""
    return [
        replace(group, mutation=mutation)
        for group in groups(case for case in cases if case.execution == "eager")
        for mutation in (SOUND, *MUTATIONS)
    ]


def run(plan: Plan, store: Store | None, progress: Progress) -> Iterator[Result]:
    """The results of a plan as they come; those that ``store`` has are not run again.

    A model that fails in one case leaves the others as they are: its result says what happened.

    Args:
        plan: what to run.
        store: where results are kept; None in all but the first of several processes.
        progress: is told.
    """
    sound = groups(case for case in plan.cases if case.mutation is None)
    faulty = groups(case for case in plan.cases if case.mutation is not None)
    for group, cases in (*sound.items(), *faulty.items()):
        # What is missing all processes have to run, so the first one decides.
        found = broadcast_object_list([store.load(case, plan.settings_of(case)) if store else None for case in cases])
        for kept in filter(None, found):
            progress.done(kept, kept=True)
            yield kept
        missing = [case for case, kept in zip(cases, found, strict=True) if kept is None]
        for result in _run_group(plan, group, missing, progress) if missing else ():
            if store and not result.trouble:  # what went wrong is tried again
                store.save(result, plan.settings_of(result.case))
            progress.done(result, kept=False)
            yield result


def _run_group(plan: Plan, group: Case, cases: list[Case], progress: Progress) -> Iterator[Result]:
    options = plan.options(cases[0])
    bench = Bench(plan.subjects[group.model], group, plan.settings, options, plan.sequences(group), plan.cpu)
    try:
        sites = bench.survey()
        stock = bench.stock(sites, on_step=progress.run("stock", options.steps))
        base = record(stock, stock)
        controls = []
        for index in range(plan.settings.controls if base.finite else 0):
            trace = bench.control(index, sites, stock, on_step=progress.run(f"control {index}", options.steps))
            controls.append(record(trace, stock))
    except Exception as error:
        yield from (Result(case, trouble=_in_words(error)) for case in cases)
        return
    for case in cases:
        if not base.finite:
            yield Result(case, stock=base, fused=base)
            continue
        try:
            name = f"fused {case.mutation or case.feature}"
            trace, fault = bench.fused(case, stock, on_step=progress.run(name, options.steps))
        except InvisibleError as error:
            yield Result(case, hidden=str(error))
        except Exception as error:
            yield Result(case, trouble=_in_words(error))
        else:
            fused = record(trace, stock)
            yield Result(case, base, tuple(controls), fused, (fault.path, fault.runs) if fault else None)


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, FusedNormError) else f"{type(error).__name__}: {text}"

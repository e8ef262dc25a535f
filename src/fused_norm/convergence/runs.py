"""One training run of one twin, from weights to trace: the stock model, a control, or the fused model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..patcher import Site, apply_fused_norm
from ..spec import KINDS, FusedNormError
from . import controls
from .mutations import MUTATIONS, SOUND, Planted, Seen, planted, site_for
from .plan import FEATURES, NORM_KINDS, PRECISIONS, Case, Settings
from .probe import probe, replay
from .recording import Trace, snapshot, trained_parameters
from .subject import Subject, prepare
from .training import TrainingOptions, accelerator_for, train

OnStep = Callable[[int, float], object]
Twist = Callable[[nn.Module], AbstractContextManager[Sequence[Site]]]
"""Makes a stock model into a twin, inside the ``with``, and says which sites it changed."""


class InvisibleError(FusedNormError):
    """A fault that no norm of the model can show."""


@dataclass(frozen=True)
class Bench:
    """What twins have in common: weights, text, settings.

    Attributes:
        subject: the model.
        case: says precision, execution and seed.
        settings: of the plan.
        options: how long and how to train.
        sequences: token ids in training order, (sequences, length), int64.
        cpu: stay on the CPU.
    """

    subject: Subject
    case: Case
    settings: Settings
    options: TrainingOptions
    sequences: Tensor
    cpu: bool = False

    def survey(self) -> tuple[Site, ...]:
        """The sites that can be fused in this model.

        Raises:
            FusedNormError: there is none.
        """
        model = self.subject.build(seed=self.case.seed, dtype=torch.float32, device=torch.device("cpu"))
        report = apply_fused_norm(model, strict=False)
        if not report.fused:
            raise FusedNormError(f"{report.model} has no norm that can be fused; fused-norm inspect says why")
        return report.fused

    def stock(self, sites: Sequence[Site], *, on_step: OnStep | None = None) -> Trace:
        """The run that all others are compared with.

        Args:
            sites: all that can be fused, whose norms are listened to.
            on_step: called after each step with its index and loss.
        """
        listened = [site.path for site in sites if site.kind in NORM_KINDS]
        return self._run(_as_it_is, self.sequences, self.options, listened, None, on_step)

    def control(self, index: int, sites: Sequence[Site], stock: Trace, *, on_step: OnStep | None = None) -> Trace:
        """The stock model once more, harmlessly perturbed; another ``index`` is another perturbation."""
        seed = 1 + index + 1000 * self.case.seed
        processes = accelerator_for(cpu=self.cpu).num_processes
        sequences, options = controls.regroup(self.sequences, self.options, processes=processes, seed=seed)

        @contextlib.contextmanager
        def perturbed(model: nn.Module) -> Iterator[Sequence[Site]]:
            controls.reorder_norms(model, sites, seed=seed)
            yield sites

        return self._run(perturbed, sequences, options, (), stock, on_step, seed)

    def fused(self, case: Case, stock: Trace, *, on_step: OnStep | None = None) -> tuple[Trace, Planted | None]:
        """The fused model, with the case's feature and, if it has one, its fault.

        Raises:
            FusedNormError: as ``apply_fused_norm``.
            InvisibleError: no norm can show the fault.
        """
        faults: list[Planted] = []

        @contextlib.contextmanager
        def fused(model: nn.Module) -> Iterator[Sequence[Site]]:
            report = apply_fused_norm(model, **FEATURES[case.feature])
            if case.mutation in (None, SOUND):
                yield report.fused
                return
            mutation = MUTATIONS[case.mutation]
            path = site_for(mutation, report.fused, _seen(stock, report.fused))
            if path is None:
                raise InvisibleError(mutation.hidden or "nothing of the kind is fused here")
            with planted(mutation, model, path) as fault:
                faults.append(fault)
                yield report.fused

        trace = self._run(fused, self.sequences, self.options, (), stock, on_step)
        return trace, faults[0] if faults else None

    def _run(
        self,
        twist: Twist,
        sequences: Tensor,
        options: TrainingOptions,
        listened: Sequence[str],
        stock: Trace | None,
        on_step: OnStep | None,
        seed: int = 0,
    ) -> Trace:
        precision = PRECISIONS[self.case.precision]
        accelerator = accelerator_for(mixed=precision.mixed, accumulation=options.accumulation, cpu=self.cpu)
        device = accelerator.device
        torch.manual_seed(seed)  # For the control's roundings: nothing else draws numbers.
        model = self.subject.build(seed=self.case.seed, dtype=precision.weights, device=device)
        # The control takes its sequences in another order, but is probed on the same.
        tokens = self.sequences[: self.options.batch_size // self.options.accumulation].to(device)
        with twist(model) as changed:
            seen = probe(model, tokens, listened, mixed=precision.mixed)
            paths = listened if stock is None else [site.path for site in changed if site.kind in NORM_KINDS]
            heard = _heard(stock, paths, device) if stock else seen.norms
            replays = dict(replay(model, heard, mixed=precision.mixed))
            model = prepare(model, self.case, self.settings.compile_backend)
            initial = _snapshots(model)
            gradients: dict[str, Tensor] = {}
            final: dict[str, Tensor] = {}

            def keep_gradients(step: int, trained: nn.Module) -> None:
                if step == 0:
                    for name, parameter in trained_parameters(trained):
                        if parameter.grad is not None:
                            gradients[name] = snapshot(parameter.grad)

            result = train(
                model,
                sequences,
                options,
                accelerator=accelerator,
                on_step=on_step,
                on_gradients=keep_gradients,
                on_end=lambda trained: final.update(_snapshots(trained)),
            )
        norms = tuple(name for name in final if any(name.endswith(f"{path}.weight") for path in listened))
        return Trace(
            losses=result.losses,
            gradient_norms=result.gradient_norms,
            seconds_per_step=result.seconds_per_step,
            memory_bytes=result.memory_bytes,
            outputs=seen.outputs,
            output_gradients=seen.output_gradients,
            replays=replays,
            gradients=gradients,
            initial=initial,
            final=final,
            rounding=torch.finfo(precision.weights).eps / 2,
            norm_weights=stock.norm_weights if stock else norms,
            sites={kind: sum(site.kind == kind for site in changed) for kind in KINDS},
        )


@contextlib.contextmanager
def _as_it_is(model: nn.Module) -> Iterator[Sequence[Site]]:
    yield ()


def _heard(stock: Trace, paths: Sequence[str], device: torch.device) -> Mapping[str, tuple[Tensor, Tensor]]:
    return {path: (stock.replays[path].x.to(device), stock.replays[path].dy.to(device)) for path in paths}


def _seen(stock: Trace, sites: Sequence[Site]) -> dict[str, Seen]:
    return {
        site.path: Seen(
            dtype=stock.replays[site.path].x.dtype,
            mean_square=stock.replays[site.path].x.float().square().mean(-1).median().item(),
            eps=site.spec.eps,
        )
        for site in sites
        if site.spec is not None and site.kind in NORM_KINDS
    }


def _snapshots(model: nn.Module) -> dict[str, Tensor]:
    return {name: snapshot(parameter) for name, parameter in trained_parameters(model)}

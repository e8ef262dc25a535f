"""Training of one twin from its initial weights: the stock model, a control, or the fused model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..kernels.operator import in_all_graphs
from ..patcher import Site, apply_fused_norm
from ..spec import KINDS, FusedNormError
from .call_probe import CallRecord, probe_calls
from .comparison import NORM_KINDS, PRECISIONS, Comparison, options_for_feature
from .control_perturbations import regroup, reordered_norms
from .fused_calls import FusedCall, sites_not_compiled
from .model_source import ModelSource, set_up_execution
from .run_record import RunTensors, snapshot, trained_parameters
from .step_probe import probe_step
from .tiers import Settings, TrainingOptions
from .training import accelerator_for, train

OnStep = Callable[[int, float], object]
MakeTwin = Callable[[nn.Module], AbstractContextManager[Sequence[Site]]]
"""Changes a stock model into a twin for the length of a ``with``, and returns the sites it changed."""


PROBED = 2
"""Sequences of the micro-batch that every twin is probed with."""


@dataclass(frozen=True)
class TwinTrainer:
    """Trains twins that have their weights, text and settings in common.

    Attributes:
        source: of the model.
        comparison: says precision, execution and seed.
        settings: of the plan.
        options: how long and how to train.
        sequences: token ids in training order, (sequences, length), int64.
        cpu: stay on the CPU.
    """

    source: ModelSource
    comparison: Comparison
    settings: Settings
    options: TrainingOptions
    sequences: Tensor
    cpu: bool = False

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The sites that can be fused in this model.

        Raises:
            FusedNormError: there is none.
        """
        model = self.source.build(seed=self.comparison.seed, dtype=torch.float32, device=torch.device("cpu"))
        report = apply_fused_norm(model, strict=False)
        if not report.fused:
            raise FusedNormError(f"{report.model} has no norm that can be fused; fused-norm inspect says why")
        return report.fused

    def train_stock(self, *, on_step: OnStep | None = None) -> RunTensors:
        """Train the stock model: the run that all others are compared with; ``on_step`` as in ``train``."""
        return self._train(lambda model: contextlib.nullcontext(()), on_step)

    def train_control(self, index: int, *, on_step: OnStep | None = None) -> RunTensors:
        """Train the stock model once more, harmlessly perturbed; another ``index`` is another perturbation."""
        seed = 1 + index + 1000 * self.comparison.seed
        processes = accelerator_for(cpu=self.cpu).num_processes
        sequences, options = regroup(self.sequences, self.options, processes=processes, seed=seed)

        @contextlib.contextmanager
        def perturbed(model: nn.Module) -> Iterator[Sequence[Site]]:
            with reordered_norms(model, self.sites, seed=seed):
                yield self.sites

        return self._train(perturbed, on_step, (sequences, options), seed)

    def probe_calls(
        self,
        fused: MakeTwin,
        *,
        in_half: bool = False,
        calls_wanted: Callable[[Sequence[FusedCall]], Sequence[FusedCall]] = lambda calls: calls,
    ) -> CallRecord:
        """Hold the calls of a fused model to the stock modules.

        Args:
            fused: makes it.
            in_half: a model in bf16 is probed in fp16 as well, in which it is not trained.
            calls_wanted: picks those that are compared, from all.
        """
        precision = PRECISIONS[self.comparison.precision]
        device = accelerator_for(mixed=precision.mixed, cpu=self.cpu).device
        tokens = self.sequences[:PROBED].to(device)
        model = self._build(device)
        with fused(model) as sites:
            record = probe_calls(model, sites, tokens, mixed=precision.mixed, calls_wanted=calls_wanted)
            if in_half and precision.weights == "bfloat16":
                record = record.joined(probe_calls(model.half(), sites, tokens), "fp16")
            return record

    def train_fused(self, fused: MakeTwin, *, on_step: OnStep | None = None) -> RunTensors:
        """Train the fused model that ``fused`` makes.

        Raises:
            FusedNormError: as ``apply_fused_norm``.
        """
        return self._train(fused, on_step)

    def _build(self, device: torch.device) -> nn.Module:
        """The stock model in the dtype of the comparison."""
        dtype = getattr(torch, PRECISIONS[self.comparison.precision].weights)
        return self.source.build(seed=self.comparison.seed, dtype=dtype, device=device)

    def _train(
        self,
        make_twin: MakeTwin,
        on_step: OnStep | None,
        regrouped: tuple[Tensor, TrainingOptions] | None = None,
        seed: int = 0,
    ) -> RunTensors:
        norms = tuple(f"{site.path}.weight" for site in self.sites if site.kind in NORM_KINDS)
        sequences, options = regrouped or (self.sequences, self.options)
        precision = PRECISIONS[self.comparison.precision]
        accelerator = accelerator_for(mixed=precision.mixed, accumulation=options.accumulation, cpu=self.cpu)
        torch.manual_seed(seed)  # For the control's roundings: nothing else draws numbers.
        model = self._build(accelerator.device)
        # A control takes its sequences in another order, but is probed on the same.
        tokens = self.sequences[:PROBED].to(accelerator.device)
        with make_twin(model) as changed, in_all_graphs():
            outputs, output_gradients = probe_step(model, tokens, mixed=precision.mixed)
            called: list[str] = []
            model = set_up_execution(model, self.comparison, self.settings.compile_backend, called)
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
                cut_last=self.comparison.execution != "compile",  # it would be compiled twice
                on_step=on_step,
                on_gradients=keep_gradients,
                on_end=lambda trained: final.update(_snapshots(trained)),
            )
        return RunTensors(
            **vars(result),
            outputs=outputs,
            output_gradients=output_gradients,
            gradients=gradients,
            initial=initial,
            final=final,
            rounding=torch.finfo(getattr(torch, precision.weights)).eps / 2,
            norm_weights=tuple(name for name in final if name.endswith(norms)),
            sites={kind: sum(site.kind == kind for site in changed) for kind in KINDS},
            not_compiled=sites_not_compiled(changed, called) if self.comparison.execution == "compile" else (),
        )


def fused_for(feature: str) -> MakeTwin:
    """Fuse the kinds of sites in a feature, a key of ``FEATURES``, in a model that is stock.

    Raises:
        FusedNormError: as ``apply_fused_norm``.
    """

    @contextlib.contextmanager
    def fused(model: nn.Module) -> Iterator[Sequence[Site]]:
        yield apply_fused_norm(model, **options_for_feature(feature)).fused

    return fused


def _snapshots(model: nn.Module) -> dict[str, Tensor]:
    return {name: snapshot(parameter) for name, parameter in trained_parameters(model)}

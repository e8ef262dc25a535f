"""Training of one twin from its initial weights: the stock model, a control, or the fused model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..patcher import Site, apply_fused_norm
from ..spec import KINDS, FusedNormError
from .comparison import NORM_KINDS, PRECISIONS, Comparison, options_for_feature
from .control_perturbations import regroup, reorder_norms
from .model_recipe import ModelRecipe, set_up_execution
from .mutations import MUTATIONS, SOUND, NormInput, PlantedFault, path_for_fault, planted_fault
from .run_record import RunTensors, snapshot, trained_parameters
from .step_probe import probe_step, rerun_norms
from .tiers import Settings, TrainingOptions
from .training import accelerator_for, train

OnStep = Callable[[int, float], object]
MakeTwin = Callable[[nn.Module], AbstractContextManager[Sequence[Site]]]
"""Changes a stock model into a twin for the length of a ``with``, and returns the sites it changed."""


class InvisibleFaultError(FusedNormError):
    """The fault cannot show in any norm of the model."""


@dataclass(frozen=True)
class TwinTrainer:
    """Trains twins that have their weights, text and settings in common.

    Attributes:
        recipe: of the model.
        comparison: says precision, execution and seed.
        settings: of the plan.
        options: how long and how to train.
        sequences: token ids in training order, (sequences, length), int64.
        cpu: stay on the CPU.
    """

    recipe: ModelRecipe
    comparison: Comparison
    settings: Settings
    options: TrainingOptions
    sequences: Tensor
    cpu: bool = False

    def fusible_sites(self) -> tuple[Site, ...]:
        """The sites that can be fused in this model.

        Raises:
            FusedNormError: there is none.
        """
        model = self.recipe.build(seed=self.comparison.seed, dtype=torch.float32, device=torch.device("cpu"))
        report = apply_fused_norm(model, strict=False)
        if not report.fused:
            raise FusedNormError(f"{report.model} has no norm that can be fused; fused-norm inspect says why")
        return report.fused

    def train_stock(self, sites: Sequence[Site], *, on_step: OnStep | None = None) -> RunTensors:
        """Train the stock model: the run that all others are compared with.

        Args:
            sites: all that can be fused; inputs and gradients of their norms are kept.
            on_step: called after each step with its index and loss.
        """

        @contextlib.contextmanager
        def unchanged(model: nn.Module) -> Iterator[Sequence[Site]]:
            yield ()

        norms = [site.path for site in sites if site.kind in NORM_KINDS]
        return self._train(unchanged, self.sequences, self.options, norms, None, on_step)

    def train_control(
        self, index: int, sites: Sequence[Site], stock: RunTensors, *, on_step: OnStep | None = None
    ) -> RunTensors:
        """Train the stock model once more, harmlessly perturbed; another ``index`` is another perturbation."""
        seed = 1 + index + 1000 * self.comparison.seed
        processes = accelerator_for(cpu=self.cpu).num_processes
        sequences, options = regroup(self.sequences, self.options, processes=processes, seed=seed)

        @contextlib.contextmanager
        def perturbed(model: nn.Module) -> Iterator[Sequence[Site]]:
            reorder_norms(model, sites, seed=seed)
            yield sites

        return self._train(perturbed, sequences, options, (), stock, on_step, seed)

    def train_fused(
        self, comparison: Comparison, stock: RunTensors, *, on_step: OnStep | None = None
    ) -> tuple[RunTensors, PlantedFault | None]:
        """Train the fused model, with the comparison's feature and, if it has one, its fault.

        Raises:
            FusedNormError: as ``apply_fused_norm``.
            InvisibleFaultError: no norm can show the fault.
        """
        faults: list[PlantedFault] = []

        @contextlib.contextmanager
        def fused(model: nn.Module) -> Iterator[Sequence[Site]]:
            report = apply_fused_norm(model, **options_for_feature(comparison.feature))
            if comparison.mutation in (None, SOUND):
                yield report.fused
                return
            mutation = MUTATIONS[comparison.mutation]
            path = path_for_fault(mutation, report.fused, _norm_inputs(stock, report.fused))
            if path is None:
                raise InvisibleFaultError(mutation.hidden or "nothing of the kind is fused here")
            with planted_fault(mutation, model, path) as fault:
                faults.append(fault)
                yield report.fused

        tensors = self._train(fused, self.sequences, self.options, (), stock, on_step)
        return tensors, faults[0] if faults else None

    def _train(
        self,
        make_twin: MakeTwin,
        sequences: Tensor,
        options: TrainingOptions,
        norms: Sequence[str],
        stock: RunTensors | None,
        on_step: OnStep | None,
        seed: int = 0,
    ) -> RunTensors:
        precision = PRECISIONS[self.comparison.precision]
        dtype = getattr(torch, precision.weights)
        accelerator = accelerator_for(mixed=precision.mixed, accumulation=options.accumulation, cpu=self.cpu)
        device = accelerator.device
        torch.manual_seed(seed)  # For the control's roundings: nothing else draws numbers.
        model = self.recipe.build(seed=self.comparison.seed, dtype=dtype, device=device)
        # The control takes its sequences in another order, but is probed on the same.
        tokens = self.sequences[: self.options.batch_size // self.options.accumulation].to(device)
        with make_twin(model) as changed:
            probe = probe_step(model, tokens, norms, mixed=precision.mixed)
            paths = norms if stock is None else [site.path for site in changed if site.kind in NORM_KINDS]
            inputs = _rerun_inputs(stock, paths, device) if stock else probe.norms
            reruns = dict(rerun_norms(model, inputs, mixed=precision.mixed))
            model = set_up_execution(model, self.comparison, self.settings.compile_backend)
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
        norm_weights = tuple(name for name in final if any(name.endswith(f"{path}.weight") for path in norms))
        return RunTensors(
            losses=result.losses,
            gradient_norms=result.gradient_norms,
            seconds_per_step=result.seconds_per_step,
            memory_bytes=result.memory_bytes,
            outputs=probe.outputs,
            output_gradients=probe.output_gradients,
            reruns=reruns,
            gradients=gradients,
            initial=initial,
            final=final,
            rounding=torch.finfo(dtype).eps / 2,
            norm_weights=stock.norm_weights if stock else norm_weights,
            sites={kind: sum(site.kind == kind for site in changed) for kind in KINDS},
        )


def _rerun_inputs(stock: RunTensors, paths: Sequence[str], device: torch.device) -> Mapping[str, tuple[Tensor, Tensor]]:
    return {path: (stock.reruns[path].x.to(device), stock.reruns[path].dy.to(device)) for path in paths}


def _norm_inputs(stock: RunTensors, sites: Sequence[Site]) -> dict[str, NormInput]:
    return {
        site.path: NormInput(
            dtype=stock.reruns[site.path].x.dtype,
            mean_square=stock.reruns[site.path].x.float().square().mean(-1).median().item(),
            eps=site.spec.eps,
        )
        for site in sites
        if site.spec is not None and site.kind in NORM_KINDS
    }


def _snapshots(model: nn.Module) -> dict[str, Tensor]:
    return {name: snapshot(parameter) for name, parameter in trained_parameters(model)}

"""Training of one twin from its initial weights: the stock model, a control, or the fused model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from ..check.reordered_norms import reordered_norms
from ..kernels.operator import in_all_graphs
from ..kernels.triton.devices import use_plans
from ..options import RecomputeLevel
from ..patcher import Site, apply_fused_norm
from ..patcher.patch_report import PatchReport, ReadingBlock
from ..spec import KINDS, NORM_KINDS, FusedNormError
from .call_probe import CallRecord, calls_of_step, compare
from .comparison import LORA, PRECISIONS, RECOMPUTE, SECOND_RUNS, Comparison, options_for_feature
from .control_perturbations import regroup
from .fused_calls import AnySite, FusedCall, observed, sites_not_compiled, sites_not_seen
from .model_source import ModelSource, add_adapters, layers_of, set_up_execution
from .report_claims import claims_not_kept
from .run_record import RunTensors, snapshot, trained_parameters
from .step_probe import loss_of_read_logits, probe_bits, probe_levels, probe_step, same_plans
from .tiers import Settings, TrainingOptions
from .training import accelerator_for, masked_labels, takes_number_of_labels, train

OnStep = Callable[[int, float], object]
MakeTwin = Callable[[nn.Module], AbstractContextManager[Sequence[AnySite]]]
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
            FusedNormError: there is no norm among them, which controls perturb.
        """
        model = self.source.build(seed=self.comparison.seed, dtype=torch.float32, device=torch.device("cpu"))
        report = apply_fused_norm(model, strict=False)
        if not any(site.kind in NORM_KINDS for site in report.fused):
            raise FusedNormError(f"{report.model} has no norm that can be fused; fused-norm inspect says why")
        return report.fused

    def train_control(self, index: int, *, on_step: OnStep | None = None) -> RunTensors:
        """Train the stock model once more, harmlessly perturbed; another ``index`` is another perturbation."""
        seed = 1 + index + 1000 * self.comparison.seed
        processes = accelerator_for(cpu=self.cpu).num_processes
        regrouped = None
        if self.comparison.execution != "lora-dropout":  # what is dropped goes by places in a micro-batch
            regrouped = regroup(self.sequences, self.options, processes=processes, seed=seed)

        @contextlib.contextmanager
        def perturbed(model: nn.Module) -> Iterator[Sequence[AnySite]]:
            with reordered_norms(model, self.sites, seed=seed):
                yield self.sites

        return self.train(perturbed, on_step=on_step, regrouped=regrouped)

    def probe(self, fused: MakeTwin, *, in_half: bool = False) -> CallRecord | None:
        """Hold what a fused model computes in one step to what is known to be right.

        Run eagerly, also with adapters, its calls are held to the stock modules, and the step to one whose linears read
        one output of a norm; with masked labels, a step that reads logits is held to one whose head returns them. Where
        an execution computes values a second time, the step is held to one that keeps them; with ``recompute`` at each
        level, which has to hold fewer bytes than the one below. None for compiled code, which has no calls.

        Args:
            fused: makes the model.
            in_half: a model in bf16 is probed in fp16 as well, in which it is not trained.
        """
        model, tokens, mixed = self.probed_model()
        not_done: dict[str, list[str]] = {}
        if self.comparison.execution in SECOND_RUNS:
            calls: list[FusedCall] = []
            with fused(model) as sites:
                if self.comparison.execution in RECOMPUTE:
                    bits, not_done = probe_levels(model, tokens[:1], self._recompute, calls=calls, mixed=mixed)
                else:
                    set_up = partial(set_up_execution, comparison=self.comparison, compile_backend="")
                    bits = probe_bits(model, tokens[:1], set_up, mixed=mixed, calls=calls)
            return CallRecord(bits=bits, not_seen=sites_not_seen(sites, calls, may_be_idle=True), not_done=not_done)
        if self.comparison.execution == "compile":
            return None
        bits = self.probe_readers(fused)
        if self.comparison.execution == "loss":
            bits |= self.probe_logits(fused)
        record, not_seen = CallRecord(bits=bits), list[str]()
        in_half &= self.comparison.execution == "eager" and PRECISIONS[self.comparison.precision].weights == "bfloat16"
        with fused(model) as sites:
            for where in ("", " (fp16)") if in_half else ("",):
                calls = calls_of_step(model.half() if where else model, tokens, mixed=mixed)
                compare(record, model, calls, mixed=mixed, where=where)
                not_seen += sites_not_seen(sites, calls)
                not_done |= claims_not_kept(model, sites, calls, tokens, mixed=mixed)
        return replace(record, not_seen=tuple(dict.fromkeys(not_seen)), not_done=not_done)

    def _recompute(self, model: nn.Module, level: RecomputeLevel) -> PatchReport:
        """Have a model recompute at a level, and return the report."""
        return apply_fused_norm(model, recompute=level, **options_for_feature(self.comparison.feature))

    def probe_readers(self, fused: MakeTwin) -> dict[str, float]:
        """Hold a step in which linears read a norm by outputs of their own to one in which they read the same output.

        Empty on a GPU, where kernels that read other dtypes add up a row in another order.
        """
        model, tokens, mixed = self.probed_model()
        if tokens.is_cuda:
            return {}
        apply_fused_norm(model, readers=False, **options_for_feature(self.comparison.feature))
        with contextlib.ExitStack() as twin, use_plans(same_plans(model)):
            return probe_bits(model, tokens[:1], lambda model: twin.enter_context(fused(model)), mixed=mixed)

    def probe_logits(self, fused: MakeTwin) -> dict[str, float]:
        """Hold a step that reads logits to one whose head returns them.

        Empty on a GPU, where products may add up in another order.
        """
        model, tokens, mixed = self.probed_model()
        if tokens.is_cuda:
            return {}
        apply_fused_norm(model, **options_for_feature(self.comparison.feature) | {"loss": False})
        with contextlib.ExitStack() as twin:
            bits = probe_bits(
                model,
                tokens[:1],
                lambda model: twin.enter_context(fused(model)),
                mixed=mixed,
                loss_of=loss_of_read_logits,
            )
        return {f"{name}, of logits that are read": share for name, share in bits.items()}

    def probed_model(self) -> tuple[nn.Module, Tensor, bool]:
        """The stock model at its initial weights, the tokens that it is probed with, and whether under autocast."""
        mixed = PRECISIONS[self.comparison.precision].mixed
        device = accelerator_for(mixed=mixed, cpu=self.cpu).device
        return self._build(device), self.sequences[:PROBED].to(device), mixed

    def _build(self, device: torch.device) -> nn.Module:
        """The stock model in the dtype of the comparison, with adapters where it has them."""
        dtype = getattr(torch, PRECISIONS[self.comparison.precision].weights)
        model = self.source.build(seed=self.comparison.seed, dtype=dtype, device=device)
        if self.comparison.execution in LORA:
            add_adapters(model, self.comparison)
        return model

    def train(
        self,
        make_twin: MakeTwin = lambda model: contextlib.nullcontext(()),
        *,
        on_step: OnStep | None = None,
        regrouped: tuple[Tensor, TrainingOptions] | None = None,
    ) -> RunTensors:
        """Train a twin: unless another is made, the stock model, which all others are compared with.

        Args:
            make_twin: makes it of the stock model, for the length of a ``with``.
            on_step: as in ``training.train``.
            regrouped: sequences and options in place of those that twins have in common.

        Raises:
            FusedNormError: as ``apply_fused_norm``.
        """
        norms = tuple(f"{site.path}.weight" for site in self.sites if site.kind in NORM_KINDS)
        sequences, options = regrouped or (self.sequences, self.options)
        precision = PRECISIONS[self.comparison.precision]
        accelerator = accelerator_for(mixed=precision.mixed, accumulation=options.accumulation, cpu=self.cpu)
        model = self._build(accelerator.device)
        # A control takes its sequences in another order, but is probed on the same.
        tokens = self.sequences[:PROBED].to(accelerator.device)
        is_compiled = self.comparison.execution == "compile"
        with contextlib.ExitStack() as stack:
            changed = stack.enter_context(make_twin(model))
            stack.enter_context(in_all_graphs())

            def noted_gradients(step: int, trained: nn.Module) -> None:
                if not step:
                    # What is compiled later, for another shape or without gradients, calls all sites once more.
                    seen.graphs.extend(graphs)
                    gradients.update(_gradients(trained))

            torch.manual_seed(self.comparison.seed)  # of dropout: nothing else draws from this generator
            outputs, output_gradients = probe_step(model, tokens, mixed=precision.mixed)
            seen, graphs = stack.enter_context(observed(model, is_compiled=is_compiled)), list[list[str]]()
            model = set_up_execution(model, self.comparison, self.settings.compile_backend, graphs)
            initial = _snapshots(model)
            gradients, final = dict[str, Tensor](), dict[str, Tensor]()
            labels, leaves_out_many = None, self.comparison.execution == "loss"
            # Means over unequal numbers of labels would depend on how a step is split into micro-batches.
            if leaves_out_many or takes_number_of_labels(model):
                step_size = options.batch_size * accelerator.num_processes
                labels = masked_labels(sequences, step_size, few=not leaves_out_many)
            result = train(
                model,
                sequences,
                options,
                labels=labels,
                accelerator=accelerator,
                cut_last=not is_compiled,  # it would be compiled twice
                on_step=on_step,
                on_gradients=noted_gradients,
                on_end=lambda trained: final.update(_snapshots(trained)),
            )
        if is_compiled:  # linears read what a stock norm returns, and the head is stock
            changed = [site for site in changed if site.kind not in (ReadingBlock.kind, "loss")]
            not_seen = sites_not_compiled(changed, seen.graphs)
        else:
            not_seen = sites_not_seen(changed, seen.calls, may_be_idle=True)
        if changed and self.comparison.execution in RECOMPUTE and not seen.recomputed:
            not_seen += tuple(f"{path} (recompute)" for path in layers_of(model))
        return RunTensors(
            **vars(result),
            outputs=outputs,
            output_gradients=output_gradients,
            gradients=gradients,
            initial=initial,
            final=final,
            rounding=torch.finfo(getattr(torch, precision.weights)).eps / 2,
            norm_weights=tuple(name for name in final if name.endswith(norms)),
            sites={kind: sum(site.kind == kind for site in changed) for kind in (*KINDS, ReadingBlock.kind)},
            not_seen=not_seen,
        )


def fused_for(feature: str) -> MakeTwin:
    """Fuse the kinds of sites in a feature, a key of ``FEATURES``, in a model that is stock.

    Raises:
        FusedNormError: as ``apply_fused_norm``.
    """

    @contextlib.contextmanager
    def fused(model: nn.Module) -> Iterator[Sequence[AnySite]]:
        report = apply_fused_norm(model, **options_for_feature(feature))
        yield *report.fused, *(row for row in report.readers if row.reason is None)

    return fused


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: snapshot(one.grad) for name, one in trained_parameters(model) if one.grad is not None}


def _snapshots(model: nn.Module) -> dict[str, Tensor]:
    return {name: snapshot(parameter) for name, parameter in trained_parameters(model)}

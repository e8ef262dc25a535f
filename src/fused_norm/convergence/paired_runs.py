"""Runs of one model from the same weights: stock, fused, and controls, by which the others are judged.

A fused norm may differ from the stock one in the order of its sums and in what it rounds on the way back. A control
does both to a stock model without any kernel, by ``reordered_sums.py``, and takes the sequences of each step in another
order and in micro-batches of another size: the mathematics is the same, and how far it gets off is the noise floor.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..check.against_stock import CallRecord, check_calls
from ..check.distances import share_different
from ..check.fused_calls import FusedCall, observed, sites_not_compiled, sites_not_seen
from ..check.layer_tensors import layer_tensors, snapshot
from ..check.log_prob_losses import log_prob_outputs
from ..check.reordered_sums import reordered_adapters, reordered_norms
from ..check.same_bits import changed_bits, loss_of_read_logits, same_plans
from ..kernels.compiler_policy import force_fused_in_graphs
from ..kernels.triton.devices import use_plans
from ..model_configs.layers import layers_of
from ..patcher import PatchReport, Site, apply_fused_norm
from ..spec import KINDS, NORM_KINDS, FusedNormError
from .comparison import (
    GRAPHS,
    LOG_PROBS,
    LORA,
    PRECISIONS,
    QLORA,
    RECOMPUTE,
    SECOND_RUNS,
    WITH_DROPOUT,
    Comparison,
    options_for_feature,
)
from .model_source import ModelSource, add_adapters, set_up_execution
from .plan import Plan
from .tiers import TrainingOptions
from .training import (
    LossOf,
    RunTensors,
    accelerator_for,
    masked_labels,
    own_loss,
    takes_number_of_labels,
    train,
    trained_parameters,
)

OnStep = Callable[[int, float], object]
ModelChange = Callable[[nn.Module], AbstractContextManager[Sequence[Site]]]
"""Changes a stock model for the length of a ``with``, and returns the sites that it changed."""

CHECKED = 2
"""Sequences of the micro-batch with which steps are compared."""


@dataclass(frozen=True)
class PairedRuns:
    """Trains stock, fused and perturbed models that have their weights, text and settings in common.

    Attributes:
        plan: has the model, the text and the settings.
        comparison: says precision, execution and seed.
    """

    plan: Plan
    comparison: Comparison

    @property
    def source(self) -> ModelSource:
        """The model."""
        return self.plan.sources[self.comparison.model]

    @cached_property
    def sequences(self) -> Tensor:
        """The token ids in training order, (sequences, length), int64."""
        return self.plan.sequences(self.comparison)

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
        regrouped = None
        # What is dropped goes by places in a micro-batch. Norms alone hardly differ if the stream is in fp32: of twelve
        # controls ten came out the same.
        drops = self.comparison.execution in WITH_DROPOUT
        if not drops:
            options = self.plan.options(self.comparison)
            regrouped = regroup(self.sequences, options, processes=self.plan.processes, seed=seed)

        @contextlib.contextmanager
        def perturbed(model: nn.Module) -> Iterator[Sequence[Site]]:
            adapters = reordered_adapters(model, seed=seed) if drops else contextlib.nullcontext()
            with reordered_norms(model, self.sites, seed=seed), adapters:
                yield self.sites

        return self.train(perturbed, on_step=on_step, regrouped=regrouped)

    def check(self, fused: ModelChange, *, in_half: bool = False) -> CallRecord | None:
        """Hold what a fused model computes in one step to what is known to be right.

        Run eagerly, also with adapters, its calls are held to the stock modules, and the step to one whose linears read
        one output of a norm; with masked labels, a step that reads logits is held to one whose head returns them. If
        an execution computes values a second time, the step is held to one that keeps them; with ``recompute`` at each
        level. Training whose layers are replayed as CUDA graphs is held to the same training whose layers are not. None
        for compiled code, which has no calls, and for losses of log-probabilities, whose calls are those of ``eager``.

        ``in_half``: a model in bf16 is checked in fp16 as well, in which it is not trained.
        """
        if self.comparison.execution == GRAPHS:
            return self.check_replays(fused)
        model, tokens, mixed = self.checked_model()
        if self.comparison.execution in SECOND_RUNS:
            calls: list[FusedCall] = []
            changes: dict[str, Callable[[nn.Module], object]]
            changes = {"": partial(set_up_execution, comparison=self.comparison, compile_backend="")}
            if self.comparison.execution in RECOMPUTE:
                options = options_for_feature(self.comparison.feature)
                changes = {
                    f", recompute={level!r}": partial(apply_fused_norm, recompute=level, **options)
                    for level in (True, "mlp", "attention")
                }
            with fused(model) as sites:
                bits = changed_bits(model, tokens[:1], changes, loss_of=own_loss, mixed=mixed, calls=calls)
            return CallRecord(bits=bits, not_seen=sites_not_seen(sites, calls, may_be_idle=True))
        if self.comparison.execution in ("compile", LOG_PROBS):
            return None
        bits = self.check_bits(fused, shared_inputs=False)  # all linears that read a norm read one output
        if self.comparison.execution == "loss":
            shares = self.check_bits(fused, loss_of_read_logits, loss=False)  # the head returns logits
            bits |= {f"{name}, of logits that are read": share for name, share in shares.items()}
        in_half &= self.comparison.execution == "eager" and PRECISIONS[self.comparison.precision].weights == "bfloat16"
        with fused(model) as sites:
            return replace(check_calls(model, tokens, sites, mixed=mixed, in_half=in_half), bits=bits)

    def check_replays(self, fused: ModelChange) -> CallRecord:
        """Hold losses, first gradients and final weights of replayed training to the bits of eager training.

        Attention is transformers' own, whose backward sums in a fixed order. What two eager runs do not have in common
        proves nothing, and neither do layers that ran eager.
        """
        trainer = replace(self, comparison=self.comparison.baseline)
        reports: list[PatchReport] = []

        @contextlib.contextmanager
        def changed(model: Any, *, cuda_graphs: bool) -> Iterator[Sequence[Site]]:
            model.set_attn_implementation("eager")
            with fused(model) as sites:
                options = options_for_feature(self.comparison.feature)
                reports.append(apply_fused_norm(model, cuda_graphs=cuda_graphs, **options))
                yield sites

        replayed, eager = (trainer.train(partial(changed, cuda_graphs=is_on)) for is_on in (True, False))
        bits, not_done = other_numbers(replayed, eager), dict[str, list[str]]()
        if (reason := reports[0].why_not_replayed()) is not None:
            not_done[f"not replayed as CUDA graphs: {reason}"] = [row.path for row in reports[0].graphs or ()]
        elif any(bits.values()) and any(
            other_numbers(trainer.train(partial(changed, cuda_graphs=False)), eager).values()
        ):
            not_done["two runs without CUDA graphs differ, so that their bits prove nothing"] = ["training"]
        return CallRecord(bits=bits, not_done=not_done)

    def check_bits(
        self, fused: ModelChange, loss_of: Callable[[Any, Tensor], Tensor] = own_loss, **without: bool
    ) -> dict[str, float]:
        """Hold a fused step to the bits of one with other options, by the share of each gradient that differs.

        Empty on a GPU, where kernels that read other dtypes, and products, add up in another order. ``without``: the
        options of ``apply_fused_norm`` in the step that is right.
        """
        model, tokens, mixed = self.checked_model()
        if tokens.is_cuda:
            return {}
        apply_fused_norm(model, **options_for_feature(self.comparison.feature) | without)
        with contextlib.ExitStack() as stack, use_plans(same_plans(model)):
            changes = {"": lambda model: stack.enter_context(fused(model))}
            return changed_bits(model, tokens[:1], changes, loss_of=loss_of, mixed=mixed)

    def checked_model(self) -> tuple[nn.Module, Tensor, bool]:
        """The stock model at its initial weights, the tokens of its steps, and whether they run under autocast."""
        mixed = PRECISIONS[self.comparison.precision].mixed
        device = accelerator_for(mixed=mixed, cpu=self.plan.cpu).device
        return self._build(device), self.sequences[:CHECKED].to(device), mixed

    def _build(self, device: torch.device) -> nn.Module:
        """The stock model in the dtype of the comparison, with adapters if it has them."""
        dtype = getattr(torch, PRECISIONS[self.comparison.precision].weights)
        source = self.source.in_whole_blocks() if self.comparison.execution in QLORA else self.source
        model = source.build(seed=self.comparison.seed, dtype=dtype, device=device)
        if self.comparison.execution in LORA:
            add_adapters(model, self.comparison)
        return model

    def _loss_of_log_probs(self, model: nn.Module) -> LossOf:
        """A loss of log-probabilities, whose reference is a frozen copy of the model."""
        reference = copy.deepcopy(model).requires_grad_(False)

        def loss_of(*batch: Any) -> Tensor:
            return log_prob_outputs(*batch, reference=reference)["loss"]

        return loss_of

    def train(
        self,
        change: ModelChange = lambda model: contextlib.nullcontext(()),
        *,
        on_step: OnStep | None = None,
        regrouped: tuple[Tensor, TrainingOptions] | None = None,
    ) -> RunTensors:
        """Train the stock model, or what ``change`` makes of it, which is compared with that.

        Args:
            change: fuses or perturbs the model.
            on_step: as in ``training.train``.
            regrouped: other sequences and options than those of the stock run.

        Raises:
            FusedNormError: as ``apply_fused_norm``.
        """
        norms = tuple(f"{site.path}.weight" for site in self.sites if site.kind in NORM_KINDS)
        sequences, options = regrouped or (self.sequences, self.plan.options(self.comparison))
        precision = PRECISIONS[self.comparison.precision]
        accelerator = accelerator_for(mixed=precision.mixed, accumulation=options.accumulation, cpu=self.plan.cpu)
        model = self._build(accelerator.device)
        # A control is trained on its sequences in another order, but this step has the same.
        tokens = self.sequences[:CHECKED].to(accelerator.device)
        is_compiled = self.comparison.execution == "compile"
        with contextlib.ExitStack() as stack:
            changed = stack.enter_context(change(model))
            stack.enter_context(force_fused_in_graphs())

            def noted_gradients(step: int, trained: nn.Module) -> None:
                if not step:
                    # What is compiled later, for another shape or without gradients, calls all sites once more.
                    first_graphs.extend(graphs)
                    grads = {name: parameter.grad for name, parameter in trained_parameters(trained)}
                    gradients.update({name: snapshot(grad) for name, grad in grads.items() if grad is not None})

            torch.manual_seed(self.comparison.seed)  # of dropout: nothing else draws from this generator
            loss_of = self._loss_of_log_probs(model) if self.comparison.execution == LOG_PROBS else None
            outputs, output_gradients = layer_tensors(model, tokens, mixed=precision.mixed, loss_of=loss_of)
            calls, recomputed = stack.enter_context(observed(model, is_compiled=is_compiled))
            graphs, first_graphs = list[list[str]](), list[list[str]]()
            model = set_up_execution(model, self.comparison, self.plan.settings.compile_backend, graphs)
            initial = {name: snapshot(parameter) for name, parameter in trained_parameters(model)}
            gradients, final = dict[str, Tensor](), dict[str, Tensor]()
            labels, leaves_out_many = None, self.comparison.execution in ("loss", LOG_PROBS)
            # Means over unequal numbers of labels would depend on how a step is split into micro-batches.
            if leaves_out_many or takes_number_of_labels(model):
                step_size = options.batch_size * accelerator.num_processes
                labels = masked_labels(sequences, step_size, few=not leaves_out_many)
            result = train(
                model,
                sequences,
                options,
                labels=labels,
                loss_of=loss_of or own_loss,
                accelerator=accelerator,
                cut_last=not is_compiled,  # it would be compiled twice
                on_step=on_step,
                on_gradients=noted_gradients,
                on_end=lambda trained: final.update(
                    (name, snapshot(each)) for name, each in trained_parameters(trained)
                ),
            )
        if is_compiled or loss_of is not None:  # the head is stock, or its operator is called after the forward
            changed = [site for site in changed if site.kind != "loss"]
        if is_compiled:  # linears read what a stock norm returns
            changed = [site for site in changed if site.kind != "shared_inputs"]
            not_seen = sites_not_compiled(changed, first_graphs)
        else:
            not_seen = sites_not_seen(changed, calls, may_be_idle=True)
        if changed and self.comparison.execution in RECOMPUTE and not recomputed:
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
            sites={kind: sum(site.kind == kind for site in changed) for kind in (*KINDS, "shared_inputs")},
            not_seen=not_seen,
        )


def other_numbers(run: RunTensors, right: RunTensors) -> dict[str, float]:
    """The share of the numbers that differ in each first gradient and final weight, and in the losses."""
    lists = {name: (getattr(run, name), getattr(right, name)) for name in ("losses", "gradient_norms")}
    lists["evaluation_loss"] = (run.evaluation_loss,), (right.evaluation_loss,)
    return {
        **{f"{name}.grad": share_different(run.gradients[name], value) for name, value in right.gradients.items()},
        **{name: share_different(run.final[name], value) for name, value in right.final.items()},
        **{name: float(numbers != others) for name, (numbers, others) in lists.items()},
    }


def regroup(
    sequences: Tensor, options: TrainingOptions, *, processes: int, seed: int
) -> tuple[Tensor, TrainingOptions]:
    """Put the same sequences in each step, in another order and in twice or half as many micro-batches.

    Args:
        sequences: (steps * batch_size * processes or more, length), in training order.
        options: of the stock run.
        processes: that share a step.
        seed: of the order within a step.

    Returns:
        The sequences and the options of the control run.
    """
    step = options.batch_size * processes
    generator = torch.Generator().manual_seed(seed)
    orders = [start + torch.randperm(step, generator=generator) for start in range(0, options.steps * step, step)]
    finer, coarser = 2 * options.accumulation, max(1, options.accumulation // 2)
    accumulation = coarser if options.batch_size % finer else finer
    return sequences[torch.cat(orders)], replace(options, accumulation=accumulation)


def fused_for(feature: str) -> ModelChange:
    """Fuse the kinds of sites in a feature, a key of ``FEATURES``, in a model that is stock.

    Raises:
        FusedNormError: as ``apply_fused_norm``.
    """

    @contextlib.contextmanager
    def fused(model: nn.Module) -> Iterator[Sequence[Site]]:
        report = apply_fused_norm(model, **options_for_feature(feature))
        yield *report.fused, *(row for row in report.shared_inputs if row.reason is None)

    return fused

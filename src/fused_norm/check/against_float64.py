"""One training step, stock and fused, both compared with the same step computed in float64.

The two need not agree to the last bit: on a GPU a sum is taken in another order. So the question is not whether they
differ, but whether the fused step is further from the truth than the stock step is.

In 16 bits a cast in another place, a gradient that is cut off or an output that is .3 % too large is no further from
it. ``against_stock`` sees these: it compares each call with the stock modules, bit by bit.
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from ..kernels.vocabulary_head import IGNORED
from ..patcher import FuseOptions, PatchReport, apply_fused_norm, remove_fused_norm
from ..patcher.survey import survey
from ..spec import FusedNormError
from .distances import distance, distances, ratio
from .log_prob_losses import log_prob_outputs
from .model_copies import deep_copy
from .reordered_sums import reordered_norms
from .same_bits import other_bits

SLACK = 0.25
"""The share by which the fused error may exceed the stock error, in a result with very many independent errors."""

STOCK_STEPS = 5
"""Steps of the stock code that its error is taken from: one as it is, the others with the sums of their norms in
another order, which is equally right. One step alone can be lucky: of 22 models of 28 layers, each with eight more
stock steps held to the budget as if they were fused, 8 were over one made from one step, by up to 44 %, and none was
over one made from five, of which they took 90 % at most."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OutputsOf = Callable[[nn.Module], Mapping[str, torch.Tensor]]
"""Runs a forward pass of a model, and returns its loss as ``loss``, and other outputs."""

MIN_PREDICTIONS = 4
"""Predicted tokens below which a step cannot be judged: the ratio of two single errors can be anything."""


WARM_UP = 3
"""Steps before one that replays layers as CUDA graphs: the first runs eager, and two captures may fail."""


class UncheckableError(ValueError):
    """The model or the tokens are such that the check would say nothing."""


def budget(stock: Sequence[float], numbers: int, predictions: int, dtype: torch.dtype) -> float:
    """Return what the fused error of a result may be: the rms of the stock errors, and a share of it more.

    Two steps that are equally right make errors of the same size that are independent of each other. The norm of ``n``
    such errors scatters by ``1 / sqrt(2 * n)`` of itself, so two of them differ by ``1 / sqrt(n)``. Four times that is
    granted, since a model has hundreds of results. ``SLACK`` comes on top, for errors that a whole gradient has in
    common because they were made upstream of it, and the ``eps`` of ``dtype``: a value between two numbers of the dtype
    may be rounded to either by steps that are equally right, even if the stock step happened to hit the truth.

    If the stock errors scatter by more than ``numbers`` and ``predictions`` explain, ``n`` is what their scatter
    says: gradients that pass through a layer's attention may hang on a few large terms.

    Args:
        stock: errors of two stock steps or more.
        numbers: in the result.
        predictions: tokens predicted in the step. A gradient is a sum of one term for each, so its numbers are no more
            independent than these: with one prediction, all attention gradients are right or wrong together.
        dtype: of the model.
    """
    rms = _rms(stock)
    scatter = statistics.stdev(stock) / rms if rms and math.isfinite(rms) else 0.0
    independent = 1 / max(1 / min(numbers, predictions), 2 * scatter**2)
    return rms * (1 + SLACK + 4 / math.sqrt(independent)) + torch.finfo(dtype).eps


def _rms(errors: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(error * error for error in errors))


@dataclass(frozen=True)
class Deviation:
    """The relative error of one result: the norm of the difference from the truth over the norm of the truth.

    Attributes:
        name: of an output, such as ``logits``; ``loss``; or the parameter's name with ``.grad``.
        stock: rms of the errors of ``STOCK_STEPS`` stock steps.
        fused: error of the fused step.
        budget: what the fused error may be.
    """

    name: str
    stock: float
    fused: float
    budget: float

    @property
    def share(self) -> float:
        """The fused error over its budget: 1 is all of it. Infinite when the error is not finite."""
        return self.fused / self.budget if math.isfinite(self.fused) else math.inf

    @property
    def ok(self) -> bool:
        return self.share <= 1


@dataclass(frozen=True)
class ReplayCheck:
    """The comparison of a step that is replayed as CUDA graphs with the same step run eager, bit by bit.

    Attributes:
        why_not: why the step replayed no layer, so that it proves nothing; None if it did.
        compared: results that were compared: those that two eager steps have in common, bit by bit.
        differing: names of those that came out otherwise.
    """

    why_not: str | None
    compared: int
    differing: tuple[str, ...]

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"not replayed: {self.why_not}"
        if not self.differing:
            return f"replayed, equal to eager to the bit in {self.compared} tensors"
        return f"replayed, differs from eager in {len(self.differing)} of {self.compared} tensors: {self.differing[0]}"


@dataclass(frozen=True)
class StepCheck:
    """The errors of stock steps and the fused step, and whether the fused ones are within their budgets.

    Attributes:
        report: what was fused.
        dtype: of the model.
        truth: dtype of the truth.
        device: where all steps ran.
        deviations: of the outputs, the loss and every gradient.
        replay: under ``cuda_graphs`` the comparison of the replayed step with the eager one; None without it.
    """

    report: PatchReport
    dtype: torch.dtype
    truth: torch.dtype
    device: torch.device
    deviations: tuple[Deviation, ...]
    replay: ReplayCheck | None = None

    @property
    def ok(self) -> bool:
        """Every result is within its budget, and a replayed step has the bits of the eager one."""
        is_same = self.replay is None or not self.replay.differing
        return is_same and all(deviation.ok for deviation in self.deviations)

    def worst(self, count: int) -> list[Deviation]:
        """The ``count`` gradients that take the largest share of their budgets, worst first."""
        gradients = [deviation for deviation in self.deviations if deviation.name.endswith(".grad")]
        return sorted(gradients, key=lambda deviation: -deviation.share)[:count]

    def __str__(self) -> str:
        outputs = [deviation for deviation in self.deviations if not deviation.name.endswith(".grad")]
        worst = self.worst(8)
        rows = [*outputs, *worst]
        width = max(len(row.name) for row in rows)
        lines = [
            f"{self.report.model}, {_name(self.dtype)} on {self.device}, truth in {_name(self.truth)}",
            "",
            f"{'relative error':<{width}}  {'stock':>7}  {'fused':>7}  {'budget':>7}",
        ]
        lines += [
            f"{row.name:<{width}}  {row.stock:7.1e}  {row.fused:7.1e}  {row.budget:7.1e}{'' if row.ok else '  over'}"
            for row in rows
        ]
        gradients = len(self.deviations) - len(outputs)
        over = sum(not deviation.ok for deviation in self.deviations)
        lines += [
            "",
            f"shown: the {len(worst)} of {gradients} gradients that are nearest to their budgets",
            f"stock: rms of {STOCK_STEPS} steps, all but one with the sums of norms in another order",
            f"budget: stock error * ({1 + SLACK:g} + 4 / sqrt(independent errors)) + {torch.finfo(self.dtype).eps:.1e}",
            *([] if self.replay is None else [f"CUDA graphs: {self.replay}"]),
            f"verdict: {over} of {len(self.deviations)} results are over budget"
            if over
            else "verdict: within budget in one step",
        ]
        if self.replay is not None and self.replay.differing:
            lines[-1] += ", and CUDA graphs compute something else"
        return "\n".join(lines)

    def to_json(self) -> str:
        """The check as a JSON object, with every gradient. An error that is not finite is null."""
        return json.dumps(
            {
                "ok": self.ok,
                "dtype": _name(self.dtype),
                "truth": _name(self.truth),
                "device": str(self.device),
                "deviations": [
                    {key: value if not isinstance(value, float) or math.isfinite(value) else None for key, value in row}
                    for row in (asdict(deviation).items() for deviation in self.deviations)
                ],
                "replay": None if self.replay is None else asdict(self.replay),
                "report": json.loads(self.report.to_json()),
            },
            indent=2,
        )


def check_step(
    model: nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    loss_of: Literal["labels", "log-probs"] = "labels",
    truth: torch.dtype | None = None,
    options: FuseOptions | Mapping[str, Any] | None = None,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> StepCheck:
    """Run one forward and backward pass of a model: the truth, stock (``STOCK_STEPS`` times), fused.

    The truth is the stock code on a float64 copy of the same weights, with float64 wherever the code asks for float32:
    norms, softmax, rotary tables and the loss upcast by name, and a model that is merely cast to float64 would compute
    them in float32 all the same. Dropout is off. Under ``cuda_graphs`` the fused step is one that replays layers, if
    they can be, and it is compared with the eager step as well.

    Args:
        model: a causal language model, on one device, with parameters in ``DTYPES``; if in several of them, the
            budget is that of the coarsest. If it is patched, the patch is removed first. Afterwards it is
            stock, in the mode (training or not) that it was in, without gradients.
        input_ids: [batch, sequence] of token ids, on the model's device.
        labels: [batch, sequence] of token ids, -100 for none. None means ``input_ids``.
        loss_of: ``labels``: the loss that the model computes. ``log-probs``: a preference loss and a policy gradient,
            of logits that the model returns without labels; log-probs and entropies are compared in place of logits.
        truth: float64 or float32. None means float64 if it fits into the free memory, else float32.
        options: of ``apply_fused_norm``.
        progress: wraps the names of the three kinds of steps, to show a progress bar.

    Returns:
        The errors and the verdict.

    Raises:
        FusedNormError: as ``apply_fused_norm``, or the truth is not finite.
        UncheckableError: parameters of other dtypes, fewer than ``MIN_PREDICTIONS`` tokens to predict, or a float32
            truth for a float32 model, which would be the stock step itself.
    """
    labels = input_ids if labels is None else labels
    options = options if isinstance(options, FuseOptions) else FuseOptions(**(options or {}))
    predictions = int((labels[:, 1:] != IGNORED).sum())
    way: dict[str, Any] = {"predictions": predictions, "truth": truth, "options": options, "progress": progress}
    if loss_of == "log-probs":
        with training_without_dropout(model):
            return compare_steps(model, lambda model: log_prob_outputs(model, input_ids, labels), **way)
    training = model.training
    model.eval()
    try:
        return compare_steps(model, lambda model: _outputs_of_labels(model, input_ids, labels), **way)
    finally:
        model.train(training)


def dropouts_of(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that drop something, with the attribute that says how much; attentions keep a number."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            yield module, "p"
        if isinstance(getattr(module, "attention_dropout", None), float):
            yield module, "attention_dropout"


@contextmanager
def training_without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model in training mode, and switch every dropout off, for the length of a ``with``."""
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        for module, name in dropouts_of(model.train()):
            stack.enter_context(mock.patch.object(module, name, 0.0))
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _outputs_of_labels(model: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    output = model(input_ids=input_ids, labels=labels, use_cache=False)
    return {"logits": output.logits, "loss": output.loss}


def compare_steps(
    model: nn.Module,
    outputs_of: OutputsOf,
    *,
    predictions: int,
    options: FuseOptions,
    truth: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    least_loss: float = 0.0,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> StepCheck:
    """Compare the truth, stock steps and the fused step of any loss.

    Args:
        model: on one device; a patch of it is removed. Afterwards it is stock, without gradients.
        outputs_of: runs a forward pass of this model or of its copy in the dtype of the truth, with the same random
            numbers in each call, and returns what is compared; ``loss`` is differentiated.
        predictions: tokens predicted in the step.
        options: of ``apply_fused_norm``.
        truth: as in ``check_step``.
        autocast: dtype that the step computes in, if not the parameters'.
        least_loss: the size that the loss counts as at least: that of a policy gradient is all but zero.
        progress: as in ``check_step``.

    Raises:
        FusedNormError, UncheckableError: as ``check_step``; the latter also if no gradient differs from zero.
    """
    truth = truth or (torch.float64 if _float64_fits(model) else torch.float32)
    dtype, device = _checkable_dtype(model, truth, predictions, autocast), next(model.parameters()).device
    remove_fused_norm(model)
    replay = None
    try:
        for step in progress(("truth", "stock", "fused")):
            if step == "truth":
                exact = _truth(model, truth, outputs_of)
            elif step == "stock":
                errors_of = partial(relative_errors, exact=exact, least_loss=least_loss)
                errors_of_stock = _stock_errors(model, outputs_of, errors_of)
            else:
                report = apply_fused_norm(model, **vars(options))
                for _ in range(WARM_UP if options.cuda_graphs else 0):
                    _step(model, outputs_of)
                errors_of_fused = errors_of(_step(model, outputs_of))
                if options.cuda_graphs:
                    replay = _check_replay(model, outputs_of, options)
    finally:
        remove_fused_norm(model)
        model.zero_grad(set_to_none=True)
    deviations = []
    for name, stock in errors_of_stock.items():
        allowed = budget(stock, exact[name].numel(), predictions, dtype)
        deviations.append(Deviation(name, _rms(stock), errors_of_fused[name], allowed))
    return StepCheck(report, dtype, truth, device, tuple(deviations), replay)


def _check_replay(model: nn.Module, outputs_of: OutputsOf, options: FuseOptions) -> ReplayCheck:
    """Compare a step that replays layers with two eager ones."""
    with sdpa_kernel(SDPBackend.MATH):  # the backwards of other kernels for attention sum in any order on a GPU
        apply_fused_norm(model, **vars(replace(options, cuda_graphs=False)))
        eager, again = (_step(model, outputs_of) for _ in range(2))
        report = apply_fused_norm(model, **vars(options))
        for _ in range(WARM_UP):
            _step(model, outputs_of)
        before = copy.deepcopy(report.replays)
        replayed = _step(model, outputs_of)
    shares = other_bits(replayed, eager, again)
    differing = tuple(name for name, share in shares.items() if share)
    return ReplayCheck(why_not=report.why_not_replayed(before), compared=len(shares), differing=differing)


def _checkable_dtype(
    model: nn.Module, truth: torch.dtype, predictions: int, autocast: torch.dtype | None
) -> torch.dtype:
    """The coarsest dtype of a step; raises ``UncheckableError`` if a check would say nothing."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if not dtypes or not dtypes <= set(DTYPES):
        names = ", ".join(sorted(map(_name, dtypes))) or "none"
        raise UncheckableError(f"parameters must be float32, bfloat16 or float16, and these are {names}")
    dtype = max(dtypes | ({autocast} if autocast else set()), key=lambda dtype: torch.finfo(dtype).eps)
    if predictions < MIN_PREDICTIONS:
        raise UncheckableError(
            f"the step has {predictions} predictions, and at least {MIN_PREDICTIONS} are needed: take longer or more "
            "sequences"
        )
    if truth not in (torch.float64, torch.float32):
        raise UncheckableError(f"the truth must be float64 or float32, not {_name(truth)}")
    if truth == dtype:
        raise UncheckableError(
            f"a {_name(dtype)} model needs a float64 truth, which takes {_float64_bytes(model) / 2**30:.1f} GiB; "
            "take fewer layers, or a 16-bit dtype"
        )
    return dtype


class _Float64ForFloat32(TorchFunctionMode):
    """A context in which code that asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _truth(model: nn.Module, dtype: torch.dtype, outputs_of: OutputsOf) -> dict[str, torch.Tensor]:
    wide = deep_copy(model).to(dtype)
    # The grouped matrix product of transformers 5 has no float64.
    if hasattr(wide, "set_experts_implementation") and wide._can_set_experts_implementation():
        wide.set_experts_implementation("eager")
    with _Float64ForFloat32() if dtype == torch.float64 else nullcontext():
        exact = _step(wide, outputs_of)
    if not any(value.any() for name, value in exact.items() if name.endswith(".grad")):
        raise UncheckableError("every gradient of the stock step is zero, so there is nothing to compare")
    for name, value in exact.items():
        if not value.isfinite().all():
            raise FusedNormError(f"{name} of the stock model is not finite in {_name(dtype)}: there is no truth")
    return exact


def _step(model: nn.Module, outputs_of: OutputsOf) -> dict[str, torch.Tensor]:
    """Outputs, loss and the gradient of every trainable parameter; the model keeps no gradients."""
    model.zero_grad(set_to_none=True)
    outputs = outputs_of(model)
    outputs["loss"].backward()
    # If head and loss are fused, logits are computed by this copy, and no earlier.
    results = {name: output.detach().clone() for name, output in outputs.items()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # An expert that saw no token has no gradient, or zeros, depending on the release of transformers.
            results[f"{name}.grad"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.zero_grad(set_to_none=True)
    return results


def _stock_errors(
    model: nn.Module, outputs_of: OutputsOf, errors_of: Callable[[dict[str, torch.Tensor]], dict[str, float]]
) -> dict[str, list[float]]:
    """The relative errors of ``STOCK_STEPS`` stock steps."""
    norms = [site for site in survey(model, FuseOptions(strict=False))[0] if site.reason is None]
    errors: dict[str, list[float]] = {}
    devices = [device] if (device := next(model.parameters()).device).type == "cuda" else []
    with torch.random.fork_rng(devices):
        for order in range(STOCK_STEPS):
            torch.manual_seed(order)
            with reordered_norms(model, norms if order else (), seed=order):
                step_errors = errors_of(_step(model, outputs_of))
            for name, error in step_errors.items():
                errors.setdefault(name, []).append(error)
    return errors


def relative_errors(
    results: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], *, least_loss: float = 0.0
) -> dict[str, float]:
    """The relative distance of each result from the exact one.

    A loss counts as at least ``least_loss``; gradients near zero count as in ``distances``.
    """
    gradients = {name: value for name, value in exact.items() if name.endswith(".grad")}
    others = {name: distance(results[name], value) for name, value in exact.items() if name not in gradients}
    if exact["loss"].abs().item() < least_loss:
        others["loss"] = ratio((results["loss"].double() - exact["loss"]).abs().item(), least_loss)
    return others | distances(results, gradients)


def _float64_bytes(model: nn.Module) -> int:
    """Bytes of a float64 copy with its gradients, and half as much again for activations."""
    return sum(parameter.numel() for parameter in model.parameters()) * 8 * 2 * 3 // 2


def _float64_fits(model: nn.Module) -> bool:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return _float64_bytes(model) <= torch.cuda.mem_get_info(device)[0]
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return _float64_bytes(model) <= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Training steps of whole models of published shapes, with random weights, under different norms."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..model_configs import FAMILIES, tiny_config
from ..patcher import apply_fused_norm, remove_fused_norm
from ..spec import NormSpec
from .benchmark_run import BenchmarkRun, in_a_line
from .providers import PROVIDERS
from .results import StepResult
from .timing import peak_memory, step_time

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ALLOWED_ERROR = 0.2
"""Relative error to stock that a variant may have in its outputs and in the gradients of the norms' weights. In bf16
over dozens of layers two correct implementations differ by 0.02 to 0.06, and one that is wrong by about one."""

_SMALLER = 2.0**-10  # A power of two: dividing by it restores every weight exactly.

Forward = Callable[[Tensor], Tensor]
Rotation = Callable[..., tuple[Tensor, Tensor]]
Variant = Callable[["BenchmarkedModel"], contextlib.AbstractContextManager[Any]]
"""A context in which a model has other norms; it yields the model to call."""


@dataclass(frozen=True)
class ModelCase:
    """One model and one size of batch.

    Attributes:
        model_type: the family.
        shape: name of one of the family's published models; None for its tiny model.
        batch: sequences.
        length: tokens in each.
    """

    model_type: str
    shape: str | None
    batch: int
    length: int

    @property
    def name(self) -> str:
        """The name in tables and for ``--rows``, such as ``Qwen3-0.6B 4x4096``."""
        return f"{self.model_name} {self.batch}x{self.length}"

    @property
    def model_name(self) -> str:
        """The name of the model alone, such as ``Qwen3-0.6B`` or ``tiny-qwen3``."""
        return self.shape.partition("/")[2] if self.shape else f"tiny-{self.model_type}"

    def config(self) -> PreTrainedConfig:
        """The config of the model.

        Raises:
            ValueError: the family has no such shape.
        """
        if self.shape is None:
            return tiny_config(self.model_type)
        from transformers import AutoConfig

        shapes = {shape.name: shape for shape in FAMILIES[self.model_type].shapes}
        if self.shape not in shapes:
            raise ValueError(f"no shape {self.shape!r} of {self.model_type}; there are {', '.join(shapes)}")
        sizes = {key: value for key, value in asdict(shapes[self.shape]).items() if key != "name"}
        return AutoConfig.for_model(self.model_type, **sizes)


CASES: tuple[ModelCase, ...] = (
    ModelCase("qwen3", "Qwen/Qwen3-0.6B", 4, 4096),
    ModelCase("qwen3", "Qwen/Qwen3-0.6B", 1, 512),
    ModelCase("gemma3_text", "google/gemma-3-1b-pt", 4, 4096),
    ModelCase("gemma3_text", "google/gemma-3-1b-pt", 1, 512),
    ModelCase("llama", "meta-llama/Llama-3.2-1B", 4, 4096),
    ModelCase("qwen3", "Qwen/Qwen3-4B", 2, 4096),
)
QUICK: tuple[ModelCase, ...] = (ModelCase("qwen3", None, 1, 16), ModelCase("gemma3_text", None, 1, 16))

COMPILED = ("compile", "fused-compile")
"""Variants under torch.compile, which take longest to start."""

_UNLIKE_STOCK = ("identity", "identity-no-rope")


@dataclass(frozen=True)
class BenchmarkedModel:
    """A model and the inputs of its training step.

    Attributes:
        model: without a head, in training mode.
        tokens: [batch, length].
        gradient: of the last hidden state, [batch, length, hidden size]: the backward starts from it.
        norms: the paths of all norms, with what they compute.
    """

    model: Any
    tokens: Tensor
    gradient: Tensor
    norms: Mapping[str, NormSpec]

    def forward_backward(self, model: Any = None) -> Tensor:
        """Run forward and backward, without vocabulary or loss, and return the last hidden state.

        Args:
            model: what to call instead of the model itself, such as its compiled form.
        """
        hidden = (self.model if model is None else model)(input_ids=self.tokens, use_cache=False).last_hidden_state
        hidden.backward(self.gradient.clone())  # Liger's norms write into the gradient that they are given.
        return hidden

    def drop_gradients(self) -> None:
        """Set the gradients of all parameters to None."""
        self.model.zero_grad(set_to_none=True)

    def step(self, model: Any = None) -> None:
        """Run one step as it is timed."""
        self.forward_backward(model)
        self.drop_gradients()

    def outputs_and_gradients(self, model: Any = None) -> list[Tensor]:
        """The last hidden state and the gradients of all norm weights, a vector each, to be compared with stock's."""
        hidden = self.forward_backward(model).detach().flatten()
        weights = [self.model.get_submodule(path).weight for path in self.norms]
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        self.drop_gradients()
        return [hidden.float().cpu(), torch.cat([gradient.flatten() for gradient in gradients]).float().cpu()]


def measure(run: BenchmarkRun, cases: Sequence[ModelCase], variants: Sequence[str], dtype: torch.dtype) -> None:
    """Measure every case and variant, as far as time allows.

    Args:
        run: gives the device and the time left, and takes the results.
        cases: models and batches.
        variants: of ``VARIANTS``.
        dtype: of the weights.
    """
    for case in cases if variants else ():
        if not run.out_of_time(f"{case.name} {', '.join(variants)}"):
            _measure_case(run, case, variants, dtype)


def build(case: ModelCase, dtype: torch.dtype, device: torch.device, auto_class: Any = None) -> Any:
    """The model of a case with random weights, drawn on ``device``; ``auto_class`` is ``AutoModel`` by default."""
    from transformers import AutoModel

    on_device = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_device), device:
        torch.manual_seed(0)
        model = (auto_class or AutoModel).from_config(case.config(), dtype=dtype, attn_implementation="sdpa")
    return model.train()


def randomize_norm_weights(model: nn.Module, generator: torch.Generator) -> dict[str, NormSpec]:
    """Add noise to the weight of every norm, because an error in gamma does not show where gamma is one.

    Returns:
        The paths of all norms, with what they compute.
    """
    report = apply_fused_norm(model, rope=False, residual=False)
    norms = {site.path: site.spec for site in report.fused if site.kind in ("norm", "qk") and site.spec is not None}
    remove_fused_norm(model)
    with torch.no_grad():
        for path in norms:
            weight: Any = model.get_submodule(path).weight
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator, device=weight.device))
    return norms


def prepare(case: ModelCase, dtype: torch.dtype, device: torch.device) -> BenchmarkedModel:
    """Build the model of a case, with random norm weights, and the inputs of its step."""
    model = build(case, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    config = model.config
    tokens = torch.randint(config.vocab_size, (case.batch, case.length), generator=generator, device=device)
    gradient = torch.randn((case.batch, case.length, config.hidden_size), generator=generator, device=device).to(dtype)
    return BenchmarkedModel(model, tokens, gradient, randomize_norm_weights(model, generator))


def relative_error(results: Sequence[Tensor], stock: Sequence[Tensor]) -> float:
    """The largest relative error, by the norm of each of several vectors; NaN where a result is NaN."""
    errors = [(result - true).norm() / true.norm() for result, true in zip(results, stock, strict=True)]
    return float(torch.stack(errors).max())


def error_detail(error: float) -> str | None:
    """Say how far a result is from stock's, or None if it is within ``ALLOWED_ERROR``."""
    if error <= ALLOWED_ERROR:
        return None
    return f"relative error {error:.1e} to stock, and {ALLOWED_ERROR:g} is allowed"


def release_memory(device: torch.device) -> None:
    """Give the memory of deleted models back to the device."""
    gc.collect()
    if device.type != "cpu":
        torch.cuda.empty_cache()


def _measure_case(run: BenchmarkRun, case: ModelCase, variants: Sequence[str], dtype: torch.dtype) -> None:
    device = run.device
    benchmarked = prepare(case, dtype, device)
    stock = benchmarked.outputs_and_gradients()
    for variant in variants:
        what = f"{case.name} {variant}"
        why = _missing(variant, device)
        if why is not None:
            run.leave_out(what, why)
        elif not run.out_of_time(what):
            result = _measure_variant(run, case, variant, benchmarked, stock)
            run.results.steps.append(result)
            run.save()
            time = f"{1e3 * result.timing.median:.1f} ms" if result.timing else f"{result.verdict}, {result.detail}"
            memory = f", {result.peak_bytes / 2**30:.1f} GiB" if result.peak_bytes else ""
            run.say(f"{what}: {time}{memory}")
        release_memory(device)
    del benchmarked
    release_memory(device)


def _measure_variant(
    run: BenchmarkRun, case: ModelCase, variant: str, benchmarked: BenchmarkedModel, stock: Sequence[Tensor]
) -> StepResult:
    error = None
    try:
        with VARIANTS[variant](benchmarked) as model:
            if variant not in _UNLIKE_STOCK:
                error = relative_error(benchmarked.outputs_and_gradients(model), stock)
                wrong = error_detail(error)
                if wrong is not None:
                    return StepResult(case.name, variant, "wrong", wrong, error if math.isfinite(error) else None)
            step = partial(benchmarked.step, model)
            peak = peak_memory(step, run.device)
            timing = step_time(step, run.device, seconds=run.seconds(1.5))
            return StepResult(case.name, variant, "ok", error=error, timing=timing, peak_bytes=peak)
    except Exception as failure:  # Of whatever kind: the others are measured all the same.
        benchmarked.drop_gradients()
        return StepResult(case.name, variant, "failed", in_a_line(failure))


def _missing(variant: str, device: torch.device) -> str | None:
    provider = PROVIDERS.get({"fused-compile": "compile", "liger-rope": "liger"}.get(variant, variant))
    return provider.missing(device) if provider else None


@contextlib.contextmanager
def _stock(benchmarked: BenchmarkedModel) -> Iterator[Any]:
    yield benchmarked.model


@contextlib.contextmanager
def _fused(benchmarked: BenchmarkedModel) -> Iterator[Any]:
    apply_fused_norm(benchmarked.model)
    try:
        yield benchmarked.model
    finally:
        remove_fused_norm(benchmarked.model)


def _compiled(eager: Variant) -> Variant:
    @contextlib.contextmanager
    def variant(benchmarked: BenchmarkedModel) -> Iterator[Any]:
        torch.compiler.reset()  # What other variants left behind would count as recompilations.
        try:
            with eager(benchmarked) as model:
                yield torch.compile(model, dynamic=False)
        finally:
            torch.compiler.reset()

    return variant


def replaced_norms(make: Callable[[nn.Module, NormSpec], Forward]) -> Variant:
    """A variant in which every norm has the forward that ``make`` returns for it."""

    @contextlib.contextmanager
    def variant(benchmarked: BenchmarkedModel) -> Iterator[Any]:
        modules = {path: benchmarked.model.get_submodule(path) for path in benchmarked.norms}
        try:
            for path, module in modules.items():
                module.forward = make(module, benchmarked.norms[path])
            yield benchmarked.model
        finally:
            for module in modules.values():
                module.__dict__.pop("forward", None)

    return variant


@contextlib.contextmanager
def _identity(benchmarked: BenchmarkedModel) -> Iterator[Any]:
    # Without norms Gemma's activations overflow, and matrix products of NaN take another time than those of numbers.
    embedding = benchmarked.model.get_input_embeddings().weight
    with torch.no_grad(), replaced_norms(lambda module, spec: lambda x: x)(benchmarked) as model:
        embedding.mul_(_SMALLER)
        try:
            with torch.enable_grad():
                yield model
        finally:
            embedding.div_(_SMALLER)


def _rotated(rotation: Rotation, norms: Variant) -> Variant:
    """A variant with the norms of ``norms`` and another rotary embedding."""

    @contextlib.contextmanager
    def variant(benchmarked: BenchmarkedModel) -> Iterator[Any]:
        modelling: Any = sys.modules[type(benchmarked.model).__module__]
        stock = modelling.apply_rotary_pos_emb
        modelling.apply_rotary_pos_emb = rotation
        try:
            with norms(benchmarked) as model:
                yield model
        finally:
            modelling.apply_rotary_pos_emb = stock

    return variant


def _unrotated(q: Tensor, k: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return q, k


def _liger_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)


def _liger_norm(module: nn.Module, spec: NormSpec) -> Forward:
    from liger_kernel.ops import LigerRMSNormFunction

    offset = float(spec.zero_centered)
    in_place = not spec.zero_centered  # As Liger sets it: not in Gemma's layers, where the gradient is needed again.

    def forward(x: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, module.weight, spec.eps, offset, spec.casting, in_place)

    return forward


def _torch_norm(module: nn.Module, spec: NormSpec) -> Forward:
    def forward(x: Tensor) -> Tensor:
        weight: Any = module.weight
        return functional.rms_norm(x, weight.shape, 1.0 + weight if spec.zero_centered else weight, spec.eps)

    return forward


VARIANTS: Mapping[str, Variant] = {
    "stock": _stock,
    "fused": _fused,
    "liger": replaced_norms(_liger_norm),
    "liger-rope": _rotated(_liger_rotation, replaced_norms(_liger_norm)),
    "torch": replaced_norms(_torch_norm),
    "identity": _identity,
    "identity-no-rope": _rotated(_unrotated, _identity),
    "compile": _compiled(_stock),
    "fused-compile": _compiled(_fused),
}
"""``stock``: as transformers has it. ``fused``: after ``apply_fused_norm``. ``liger`` and ``torch``: every norm is
Liger's or ``F.rms_norm``; ``liger-rope``: the rotary embedding is Liger's too. ``identity``: norms left out, adds
kept, the least that a step can take; ``identity-no-rope``: without the rotary embedding too. ``compile`` and
``fused-compile``: ``stock`` and ``fused`` under torch.compile."""

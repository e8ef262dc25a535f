"""Training steps of whole models of published shapes, with random weights, under different norms."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..model_configs import FAMILIES, tiny_config
from ..patcher import apply_fused_norm, remove_fused_norm
from ..spec import NormSpec
from .results import StepResult
from .session import Session, in_a_line
from .timing import step_time

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ALLOWED_ERROR = 0.2
"""Relative, of the last hidden state and of the norm weights' gradients; in bf16 over dozens of layers two correct
implementations differ by 0.02 to 0.06, and one that is wrong by about one."""

_SMALLER = 2.0**-10  # A power of two: what is multiplied by it comes back exactly.

Forward = Callable[[Tensor], Tensor]
Rotation = Callable[..., tuple[Tensor, Tensor]]
Variant = Callable[["_Bench"], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Row:
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
        """Such as ``Qwen3-0.6B 4x4096``."""
        model = self.shape.partition("/")[2] if self.shape else f"tiny-{self.model_type}"
        return f"{model} {self.batch}x{self.length}"

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


ROWS: tuple[Row, ...] = (
    Row("qwen3", "Qwen/Qwen3-0.6B", 4, 4096),
    Row("qwen3", "Qwen/Qwen3-0.6B", 1, 512),
    Row("gemma3_text", "google/gemma-3-1b-pt", 4, 4096),
    Row("gemma3_text", "google/gemma-3-1b-pt", 1, 512),
    Row("llama", "meta-llama/Llama-3.2-1B", 4, 4096),
    Row("qwen3", "Qwen/Qwen3-4B", 2, 4096),
)
QUICK: tuple[Row, ...] = (Row("qwen3", None, 1, 16), Row("gemma3_text", None, 1, 16))

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "fused-norms": {"qk": False, "residual": False},
    "fused-qk": {"rope": False, "residual": False},
    "fused-rope": {"residual": False},
    "fused-residual": {"sandwich": False},
    "fused": {},
}
"""The options of ``apply_fused_norm`` for each of our variants: every one fuses more than the one before."""

COMPILED = ("compile", "fused-compile")
"""Variants under torch.compile, which take longest to start."""

VARIANTS = ("stock", *FEATURES, "liger", "liger-rope", "torch", "identity", "identity-no-rope", *COMPILED)
"""``stock``: as transformers has it. ``fused``: after ``apply_fused_norm``; the others of ``FEATURES``: after part of
it. ``liger`` and ``torch``: every norm becomes Liger's or ``F.rms_norm``; ``liger-rope``: the rotary embedding Liger's
too. ``identity``: every norm left out and the adds kept, the floor of work on norms alone; ``identity-no-rope``: the
rotary embedding left out too. ``compile`` and ``fused-compile``: ``stock`` and ``fused`` under torch.compile."""

_UNLIKE_STOCK = ("identity", "identity-no-rope")

_BACKEND = "inductor"


@dataclass(frozen=True)
class _Bench:
    """A model and what a step takes."""

    model: Any
    tokens: Tensor
    gradient: Tensor
    norms: Mapping[str, NormSpec]

    def step(self, model: Any = None) -> Tensor:
        """Forward and backward from a fixed gradient of the last hidden state: no vocabulary work, no loss."""
        hidden = (self.model if model is None else model)(input_ids=self.tokens, use_cache=False).last_hidden_state
        hidden.backward(self.gradient.clone())  # Liger's norms write into the gradient that they are given.
        return hidden

    def forget(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad(set_to_none=True)

    def evidence(self, model: Any = None) -> list[Tensor]:
        """The last hidden state and the gradients of the norms' weights: all of the model had a part in them."""
        hidden = self.step(model)
        results = [hidden.detach().float().cpu()]
        for path in self.norms:
            weight = self.model.get_submodule(path).weight
            results.append((torch.zeros_like(weight) if weight.grad is None else weight.grad).float().cpu())
        self.forget()
        return results


def measure(session: Session, rows: Sequence[Row], variants: Sequence[str], dtype: torch.dtype) -> None:
    """Add a result to the session for every row and variant, as far as time allows.

    Args:
        session: where, for how long, and where results go.
        rows: models and batches.
        variants: of ``VARIANTS``.
        dtype: of the weights.
    """
    for row in rows if variants else ():
        if not session.out_of_time(f"{row.name} {', '.join(variants)}"):
            _measure_row(session, row, variants, dtype)


def build(row: Row, dtype: torch.dtype, device: torch.device) -> Any:
    """The row's model without a head, with random weights, drawn on ``device``."""
    from transformers import AutoModel

    on_device = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_device), device:
        torch.manual_seed(0)
        model = AutoModel.from_config(row.config(), dtype=dtype, attn_implementation="sdpa")
    return model.train()


def _measure_row(session: Session, row: Row, variants: Sequence[str], dtype: torch.dtype) -> None:
    device = session.device
    bench = _prepare(row, dtype, device)
    stock = bench.evidence()
    for variant in variants:
        what = f"{row.name} {variant}"
        why = _missing(variant, device)
        if why is not None:
            session.leave_out(what, why)
        elif not session.out_of_time(what):
            result = _measure_variant(session, row, variant, bench, stock)
            session.results.steps.append(result)
            session.save()
            time = f"{1e3 * result.timing.median:.1f} ms" if result.timing else f"{result.verdict}, {result.detail}"
            memory = f", {result.peak_bytes / 2**30:.1f} GiB" if result.peak_bytes else ""
            session.say(f"{what}: {time}{memory}")
        _release(device)
    del bench
    _release(device)


def _prepare(row: Row, dtype: torch.dtype, device: torch.device) -> _Bench:
    model = build(row, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    config = model.config
    tokens = torch.randint(config.vocab_size, (row.batch, row.length), generator=generator, device=device)
    gradient = torch.randn((row.batch, row.length, config.hidden_size), generator=generator, device=device).to(dtype)
    report = apply_fused_norm(model, rope=False, residual=False)
    norms = {site.path: site.spec for site in report.fused if site.kind in ("norm", "qk") and site.spec is not None}
    remove_fused_norm(model)
    with torch.no_grad():  # A gamma that is forgotten does not show where it is one.
        for path in norms:
            weight = model.get_submodule(path).weight
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator, device=device))
    return _Bench(model, tokens, gradient, norms)


def _measure_variant(session: Session, row: Row, variant: str, bench: _Bench, stock: Sequence[Tensor]) -> StepResult:
    device = session.device
    result = StepResult(row.name, variant, "ok")
    try:
        with _VARIANTS[variant](bench) as model:
            if variant not in _UNLIKE_STOCK:
                error = _relative(bench.evidence(model), stock)
                if not error <= ALLOWED_ERROR:
                    detail = f"relative error {error:.1e} to stock, and {ALLOWED_ERROR:g} is allowed"
                    return StepResult(row.name, variant, "wrong", detail, error if math.isfinite(error) else None)
                result = StepResult(row.name, variant, "ok", error=error)

            def step() -> None:
                bench.step(model)
                bench.forget()

            step()
            if device.type != "cpu":
                torch.cuda.reset_peak_memory_stats(device)
            timing = step_time(step, device, seconds=session.seconds(1.5))
            peak = None if device.type == "cpu" else torch.cuda.max_memory_allocated(device)
            return StepResult(row.name, variant, "ok", error=result.error, timing=timing, peak_bytes=peak)
    except Exception as failure:  # Of whatever kind: the others are measured all the same.
        bench.forget()
        return StepResult(row.name, variant, "failed", in_a_line(failure))


def _relative(results: Sequence[Tensor], stock: Sequence[Tensor]) -> float:
    """The larger of two errors: of the hidden state, and of all gradients together."""
    errors = []
    for part in (slice(1), slice(1, None)):
        result, true = (torch.cat([tensor.flatten() for tensor in side[part]]) for side in (results, stock))
        errors.append((result - true).norm() / true.norm())
    return float(torch.stack(errors).max())


def _missing(variant: str, device: torch.device) -> str | None:
    from .providers import PROVIDERS

    provider = PROVIDERS.get({"fused-compile": "compile", "liger-rope": "liger"}.get(variant, variant))
    return provider.missing(device) if provider else None


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _stock(bench: _Bench) -> Iterator[Any]:
    yield bench.model


def _fused(feature: str) -> Variant:
    @contextlib.contextmanager
    def variant(bench: _Bench) -> Iterator[Any]:
        apply_fused_norm(bench.model, **FEATURES[feature])
        try:
            yield bench.model
        finally:
            remove_fused_norm(bench.model)

    return variant


def _compiled(eager: Variant) -> Variant:
    @contextlib.contextmanager
    def variant(bench: _Bench) -> Iterator[Any]:
        torch.compiler.reset()  # What other variants left behind would count as recompilations.
        try:
            with eager(bench) as model:
                yield torch.compile(model, dynamic=False, backend=_BACKEND)
        finally:
            torch.compiler.reset()

    return variant


def _replaced(make: Callable[[nn.Module, NormSpec], Forward]) -> Variant:
    """A variant in which the forward of every norm is the one that ``make`` returns."""

    @contextlib.contextmanager
    def variant(bench: _Bench) -> Iterator[Any]:
        modules = {path: bench.model.get_submodule(path) for path in bench.norms}
        try:
            for path, module in modules.items():
                module.forward = make(module, bench.norms[path])
            yield bench.model
        finally:
            for module in modules.values():
                module.__dict__.pop("forward", None)

    return variant


@contextlib.contextmanager
def _identity(bench: _Bench) -> Iterator[Any]:
    # Without norms Gemma's activations overflow, and matrix products of NaN take another time than those of numbers.
    embedding = bench.model.get_input_embeddings().weight
    with torch.no_grad(), _replaced(lambda module, spec: lambda x: x)(bench) as model:
        embedding.mul_(_SMALLER)
        try:
            with torch.enable_grad():
                yield model
        finally:
            embedding.div_(_SMALLER)


def _rotated(rotation: Rotation, norms: Variant) -> Variant:
    """``norms``, with the rotary embedding of q and k replaced as well."""

    @contextlib.contextmanager
    def variant(bench: _Bench) -> Iterator[Any]:
        modelling: Any = sys.modules[type(bench.model).__module__]
        stock = modelling.apply_rotary_pos_emb
        modelling.apply_rotary_pos_emb = rotation
        try:
            with norms(bench) as model:
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


_VARIANTS: Mapping[str, Variant] = {
    "stock": _stock,
    **{feature: _fused(feature) for feature in FEATURES},
    "liger": _replaced(_liger_norm),
    "liger-rope": _rotated(_liger_rotation, _replaced(_liger_norm)),
    "torch": _replaced(_torch_norm),
    "identity": _identity,
    "identity-no-rope": _rotated(_unrotated, _identity),
    "compile": _compiled(_stock),
    "fused-compile": _compiled(_fused("fused")),
}

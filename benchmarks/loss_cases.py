"""The shapes of a vocabulary head that are measured, with its loss or a loss of log-probabilities: random inputs, what
is right, and errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fused_norm.check.distances import distance
from fused_norm.kernels.vocabulary_head import IGNORED

CROSS_ENTROPY, LOG_PROBS = "linear_cross_entropy", "linear_log_probs"

_OF_LOG_PROBS = ("weighted", "uniform")
WORDS = ("masked", "frozen", "softcap", *_OF_LOG_PROBS)
"""What may follow a shape, in this order: half of the labels are ``IGNORED``, the head is not trained, logits are
capped. Of log-probabilities one of the last two does: each row has a weight in the loss, or all have the same."""

SOFTCAP = 30.0
_SEQUENCES = 4
_DEVIATION = 3.0  # of logits, about that of a trained model
_ROWS_AT_ONCE = 512  # whose logits are held in float64


@dataclass(frozen=True)
class LossCase:
    """A head and its loss on one shape; the loss is a mean over labels.

    Attributes:
        rows: tokens.
        width: of the hidden states, H.
        vocabulary: V.
        words: some of ``WORDS``, in their order.
    """

    rows: int
    width: int
    vocabulary: int
    words: tuple[str, ...] = ()

    @classmethod
    def named(cls, name: str) -> LossCase:
        """The case of a name, such as ``linear_cross_entropy 16384x1024x151936 masked``: rows, H, V and words.

        Raises:
            ValueError: it is no such name.
        """
        size = r"([1-9]\d*)"
        operators = f"{CROSS_ENTROPY}|{LOG_PROBS}"
        match = re.fullmatch(rf"({operators}) {size}x{size}x{size}((?: (?:{'|'.join(WORDS)}))*)", name)
        case = None
        if match is not None:
            operator, rows, width, vocabulary, text = match.groups()
            words = tuple(word for word in WORDS if word in text.split())
            case = cls(int(rows), int(width), int(vocabulary), words)
        if case is None or case.operator != operator or words[-2:] == _OF_LOG_PROBS:
            raise ValueError(
                f"{name!r} is no shape of a head with its loss such as '{CROSS_ENTROPY} 16384x1024x151936' or"
                f" '{LOG_PROBS} 16384x1024x151936 weighted'"
            )
        return case

    @property
    def operator(self) -> str:
        """What computes the loss."""
        return LOG_PROBS if set(self.words) & {*_OF_LOG_PROBS} else CROSS_ENTROPY

    @property
    def name(self) -> str:
        """The name in tables and for ``--rows``, from which ``named`` makes the case."""
        return " ".join((f"{self.operator} {self.rows}x{self.width}x{self.vocabulary}", *self.words))

    @property
    def softcap(self) -> float | None:
        """What logits are capped at; None for not at all."""
        return SOFTCAP if "softcap" in self.words else None

    def inputs(self, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> LossInputs:
        """Random hidden states, weight and labels, drawn from ``seed``.

        Rows are those of four sequences. ``masked`` takes the labels of the first half of each, as a prompt has none.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        x = random(self.rows, self.width).to(dtype)
        weight = (random(self.vocabulary, self.width) * (_DEVIATION / self.width**0.5)).to(dtype)
        target = torch.randint(self.vocabulary, (self.rows,), generator=generator, device=device)
        length = -(-self.rows // _SEQUENCES)
        has_label = torch.ones(self.rows, dtype=torch.bool)
        if "masked" in self.words:
            has_label = torch.arange(self.rows) % length >= length // 2
        on_device = has_label.to(device)
        target.masked_fill_(~on_device, IGNORED)
        labelled = x[on_device] if "masked" in self.words else x
        trained = "frozen" not in self.words
        # Around 1, so that the loss is no difference of large numbers.
        weights = torch.rand(self.rows, generator=generator, device=device) + 0.5 if "weighted" in self.words else None
        x, weight = x.requires_grad_(), weight.requires_grad_(trained)
        return LossInputs(x, weight, target, int(has_label.sum()), labelled.detach(), weights)


@dataclass(frozen=True)
class LossInputs:
    """The arguments of one call.

    Attributes:
        x: hidden states, [rows, H].
        weight: of the head, [V, H]; it requires a gradient unless the head is frozen.
        target: labels, [rows], int64.
        labels: the number of rows with a label.
        labelled: the hidden states of these rows, without autograd.
        weights: of the rows in the loss, [rows], float32; None if all have the same.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    labels: int
    labelled: Tensor
    weights: Tensor | None = None

    def loss_of(self, log_probs: Tensor) -> Tensor:
        """The loss from log-probabilities, [rows], which are 0 for rows without a label."""
        weighted = log_probs if self.weights is None else log_probs * self.weights
        return -weighted.sum() / self.labels

    def trained(self) -> tuple[Tensor, ...]:
        """The tensors that get a gradient: x, and weight unless the head is frozen."""
        return (self.x, self.weight) if self.weight.requires_grad else (self.x,)


def float64_results(case: LossCase, inputs: LossInputs) -> list[Tensor]:
    """The exact loss and the gradients of what is trained, computed in chunks of rows, since logits are large."""
    weight = inputs.weight.detach().double().requires_grad_(inputs.weight.requires_grad)
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    dx = torch.empty_like(inputs.x, dtype=torch.float64, requires_grad=False)
    starts = range(0, case.rows, _ROWS_AT_ONCE)
    for part in (slice(start, start + _ROWS_AT_ONCE) for start in starts):
        x = inputs.x[part].detach().double().requires_grad_()
        logits = capped(functional.linear(x, weight), case.softcap)
        losses = functional.cross_entropy(logits, inputs.target[part], ignore_index=IGNORED, reduction="none")
        total = replace(inputs, weights=None if inputs.weights is None else inputs.weights[part]).loss_of(-losses)
        total.backward()
        loss += total.detach()
        assert x.grad is not None
        dx[part] = x.grad
    return [loss, dx] if weight.grad is None else [loss, dx, weight.grad]


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits as modelling code caps them: three operators, each of which rounds."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def relative_errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """The relative distances of loss, dX and dW, infinite if a result is not finite."""
    names = ("loss", "dX", "dW")[: len(exact)]
    return {name: distance(*pair) for name, *pair in zip(names, results, exact, strict=True)}


_SHAPES = ("16384x1024x151936", "16384x2048x128256", "16384x1152x262144", "16384x2560x151936")

CASES = tuple(
    LossCase.named(row)
    for row in (
        *(f"{CROSS_ENTROPY} {shape}" for shape in _SHAPES),
        f"{CROSS_ENTROPY} 16384x1152x262144 softcap",
        *(f"{CROSS_ENTROPY} {shape} {word}" for word in ("masked", "frozen") for shape in _SHAPES),
        *(f"{LOG_PROBS} {shape} {words}" for words in ("weighted", "frozen weighted", "uniform") for shape in _SHAPES),
    )
)
"""Qwen3-0.6B, Llama-3.2-1B, Gemma-3-1B and Qwen3-4B, in the order of measuring."""

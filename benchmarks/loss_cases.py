"""The shapes of a vocabulary head with its loss that are measured: random inputs, what is right, and errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fused_norm.check.distances import distance
from fused_norm.kernels.vocabulary_head import IGNORED

OPERATOR = "linear_cross_entropy"

WORDS = ("masked", "frozen", "softcap")
"""What may follow a shape, in this order: half of the labels are ``IGNORED``, the head is not trained, logits are
capped."""

SOFTCAP = 30.0
_SEQUENCES = 4
_DEVIATION = 3.0  # of logits, about that of a trained model
_ROWS_AT_ONCE = 512  # whose logits are held in float64


@dataclass(frozen=True)
class LossCase:
    """A head and its loss on one shape.

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
        match = re.fullmatch(rf"{OPERATOR} {size}x{size}x{size}((?: (?:{'|'.join(WORDS)}))*)", name)
        if match is None:
            raise ValueError(f"{name!r} is no shape of a head with its loss such as '{OPERATOR} 16384x1024x151936'")
        rows, width, vocabulary, words = match.groups()
        return cls(int(rows), int(width), int(vocabulary), tuple(word for word in WORDS if word in words.split()))

    @property
    def name(self) -> str:
        """The name in tables and for ``--rows``, from which ``named`` makes the case."""
        return " ".join((f"{OPERATOR} {self.rows}x{self.width}x{self.vocabulary}", *self.words))

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
        return LossInputs(
            x.requires_grad_(), weight.requires_grad_(trained), target, int(has_label.sum()), labelled.detach()
        )


@dataclass(frozen=True)
class LossInputs:
    """The arguments of one call.

    Attributes:
        x: hidden states, [rows, H].
        weight: of the head, [V, H]; it requires a gradient unless the head is frozen.
        target: labels, [rows], int64.
        labels: the number of rows with a label.
        labelled: the hidden states of these rows, without autograd.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    labels: int
    labelled: Tensor

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
        total = functional.cross_entropy(logits, inputs.target[part], ignore_index=IGNORED, reduction="sum")
        (total / inputs.labels).backward()
        loss += total.detach() / inputs.labels
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
    LossCase.named(f"{OPERATOR} {row}")
    for row in (
        *_SHAPES,
        "16384x1152x262144 softcap",
        *(f"{shape} masked" for shape in _SHAPES),
        *(f"{shape} frozen" for shape in _SHAPES),
    )
)
"""Qwen3-0.6B, Llama-3.2-1B, Gemma-3-1B and Qwen3-4B, in the order of measuring."""

"""The rows of models: a model of a published shape, a kind of step and a size of batch, written as a name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_norm.model_configs import FAMILIES, tiny_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WORDS = (
    "image", "lora", "qlora", "qv", "dropout", "autocast", "checkpointing", "packed", "fsdp2", "loss", "masked",
    "generate", "static",
)  # fmt: skip
"""What a step can be called, in this order. What each word means is said under *Steps* in ``docs/measuring.md``."""


@dataclass(frozen=True)
class ModelCase:
    """One model, one kind of step and one size of batch.

    Attributes:
        model_type: the family.
        shape: name of one of the family's published models, or a key of ``OTHERS``; None for the family's tiny model.
        batch: sequences.
        length: tokens in each; generated ones for a generation.
        step: some of ``WORDS``, in their order; without any it is forward and backward of the model without its head.
        layers: of the published ones only so many, for a model whose whole does not fit; None for all of them.
    """

    model_type: str
    shape: str | None
    batch: int
    length: int
    step: tuple[str, ...] = ()
    layers: int | None = None

    @classmethod
    def named(cls, name: str) -> ModelCase:
        """The case of a name, such as ``Qwen3-0.6B lora loss 4x4096`` or ``tiny-llama packed 1x8``.

        Raises:
            ValueError: it is no such name.
        """
        match = re.fullmatch(rf"(.+?)(?: \((\d+) layers\))?((?: (?:{'|'.join(WORDS)}))*) (\d+)x(\d+)", name)
        if match is None:
            raise ValueError(f"{name!r} is no model, step and size such as 'Qwen3-0.6B loss 4x4096'")
        model, layers, batch, length = match[1], match[2], int(match[4]), int(match[5])
        words = {*match[3].split()}
        if "masked" in words:  # labels belong to a loss
            words.add("loss")
        step = tuple(word for word in WORDS if word in words)
        if model.removeprefix("tiny-") in FAMILIES:
            return cls(model.removeprefix("tiny-"), None, batch, length, step)
        whole = f"{model} ({layers} layers)"
        if whole in _MODELS:
            return cls(*_MODELS[whole], batch, length, step)
        if model not in _MODELS:
            raise ValueError(f"no model {model!r}; there are {', '.join(_MODELS)}, and tiny-FAMILY")
        return cls(*_MODELS[model], batch, length, step, None if layers is None else int(layers))

    @property
    def name(self) -> str:
        """The name in tables and for ``--rows``, from which ``named`` makes the case."""
        model = self.shape.partition("/")[2] if self.shape else f"tiny-{self.model_type}"
        layers = "" if self.layers is None else f" ({self.layers} layers)"
        return " ".join((f"{model}{layers}", *self.step, f"{self.batch}x{self.length}"))

    @property
    def generates(self) -> bool:
        """Return whether the step generates tokens; others train."""
        return "generate" in self.step

    def config(self) -> PreTrainedConfig:
        """The config of the model."""
        if self.shape is None:
            return tiny_config(self.model_type)
        from transformers import AutoConfig

        if self.shape in OTHERS:
            return AutoConfig.for_model(**OTHERS[self.shape])
        (shape,) = (shape for shape in FAMILIES[self.model_type].shapes if shape.name == self.shape)
        sizes = {key: value for key, value in asdict(shape).items() if key != "name"}
        if self.layers is not None:
            sizes["num_hidden_layers"] = self.layers
        return AutoConfig.for_model(self.model_type, **sizes)


OTHERS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("further_models.json").read_text(encoding="utf-8")
)
"""Config arguments of models of further families, some cut to a few layers; the rest is their config's default."""

_MODELS: Mapping[str, tuple[str, str]] = {
    name.partition("/")[2]: (family, name)
    for family, name in (
        *((family, shape.name) for family, model in FAMILIES.items() for shape in model.shapes),
        *((model["model_type"], name) for name, model in OTHERS.items()),
    )
}
"""Family and full name of every published model, by its name without the organisation."""

_SMALL = ("Qwen3-0.6B", "Llama-3.2-1B", "gemma-3-1b-pt")

_OF_2026 = ("Qwen3-30B-A3B (6 layers)", "Olmo-3-7B (8 layers)", "Ministral-3-8B (8 layers)", "GLM-4-9B (8 layers)")

_WITHOUT_LOSS = ("gpt-oss-20b (4 layers)", "Qwen3.5-0.8B", "gemma-4-E2B")
"""With a loss and random weights none of the variants is near stock in bf16, or the first step tunes for minutes."""


def _cases(models: Sequence[str], steps: str) -> list[ModelCase]:
    """The cases of each of these steps, which are separated by commas, for all models."""
    return [ModelCase.named(f"{model} {step.strip()}") for step in steps.split(",") for model in models]


_TRAINED = """
    loss 4x4096, lora loss 4x4096, lora checkpointing loss 4x4096, autocast loss 4x4096, checkpointing loss 4x4096,
    autocast checkpointing loss 4x4096, loss masked 4x4096, lora loss masked 4x4096,
    lora dropout checkpointing loss 4x4096, qlora checkpointing loss 4x4096, qlora dropout checkpointing loss 4x4096,
    qlora qv checkpointing loss 4x4096, packed loss 1x16384, fsdp2 loss 4x4096,
    lora checkpointing 4x4096, lora dropout checkpointing 4x4096, lora 4x4096, autocast checkpointing 4x4096,
    autocast 4x4096, qlora checkpointing 4x4096, qlora dropout checkpointing 4x4096, packed 1x16384, fsdp2 4x4096
"""
"""The steps that people run, which end in the loss, and then the layers of such steps alone."""

_BOUND_BY_THE_HOST = tuple(
    f"{step} {size}".strip()
    for step in ("", "lora", "lora dropout loss", "qlora loss")
    for size in ("1x512", "2x1024", "4x1024", "4x4096")
)
"""Steps from those that wait for the host to those that do not, in which CUDA graphs are compared."""

DEFAULT = tuple(_cases(_SMALL[:1], _TRAINED))
"""The rows that are measured if none are named."""

CASES = tuple(
    dict.fromkeys(
        (
            *DEFAULT,
            *_cases(_SMALL[1:], _TRAINED),
            *_cases((*_SMALL, "Qwen3-4B"), "4x4096, 1x512, 1x16384"),
            *_cases(("Qwen3-8B (8 layers)", "Llama-3.1-8B (8 layers)"), "4x4096"),
            *_cases(_SMALL[:1], "generate 1x32, generate 32x32, generate static 1x32, generate static 32x32"),
            *_cases(("Qwen2.5-VL-3B (8 and 8 layers)", "GLM-4.1V-9B (4 and 8 layers)"), "image 1x4096"),
            *_cases(("Qwen3-Next (4 layers, 16 experts)", "Qwen3.5-9B (4 layers)"), "2x2048"),
            *_cases(("Qwen3-4B", "Qwen3-8B"), "qlora checkpointing loss 1x4096, qlora qv checkpointing loss 1x4096"),
            *_cases(_SMALL[:1], ",".join(_BOUND_BY_THE_HOST)),
            *_cases(["Qwen3-4B"], "qlora loss 1x4096"),
            *_cases((*_OF_2026, *_WITHOUT_LOSS), "2x4096"),
            *_cases(["Qwen3.5-0.8B"], "4x4096"),
            *_cases(_OF_2026, "loss 2x4096, lora loss 2x4096"),
            *_cases(["LFM2-1.2B"], "4x4096"),
            *_cases(("Mamba-Codestral-7B (8 layers)", "Bamba-9B (4 layers)"), "1x512"),
            *_cases(["flan-t5-large"], "8x512"),
        )
    )
)

FEATURES = (*_cases(_SMALL, "loss 4x4096, 4x4096, 1x512"), ModelCase.named("Qwen3-0.6B generate 1x32"))
"""The rows on which options are compared."""

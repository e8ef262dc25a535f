"""Steps of TRL's SFT, DPO and GRPO trainers as these run them: collator, metrics, optimizer and all, variants in turns.

A sample is a whole ``trainer.train()``, of whose steps the last ones count. The learning rate is 0, so that every round
takes the same steps with the same weights. Models have random weights, and the tokenizer is made here. Completions of
GRPO are drawn here and not generated, so that its steps are its training alone.
"""

from __future__ import annotations

import copy
import importlib.util
import random
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .benchmark_run import BenchmarkRun, attempt, in_a_line
from .model_cases import ModelCase
from .model_steps import ALLOWED_ERROR, BenchmarkedModel, prepare, relative_error, release_memory, why_not_here
from .model_variants import COMPILED, GRAPHS, VARIANTS, missing, refuse_if_eager
from .models import many_graphs
from .results import Result
from .samples import Timing
from .timing import memory_now, peak_memory, synchronize

DEFAULT = ("stock", "liger", "compile-layers", "fused", "fused-graphs")
"""The variants that are measured if none are named."""

_ROUNDS = (4, 8)
_SECONDS = 40.0  # After which no round is begun beyond the fewest.
_STEPS, _QUICK = (3, 5), (2, 1)
"""Steps of a sample: those before the clock starts, and those that are timed."""

_PAD_TO = 8
"""Padded batches have a length of so many eighths of the whole, which makes a few shapes of many lengths."""

_WORDS = 256


@dataclass(frozen=True)
class TrainerCase:
    """A trainer, a model, and a batch.

    Attributes:
        trainer: ``SFT``, ``DPO``, of whose batches each row has a chosen and a rejected sequence, or ``GRPO``, of which
            a batch is one prompt with several completions.
        model: the model, the adapters, and the size of the batch.
        is_padded: rows have a half to the whole of the length, and are padded; otherwise all have the whole.
    """

    trainer: str
    model: ModelCase
    is_padded: bool = False

    @classmethod
    def named(cls, name: str) -> TrainerCase:
        """The case of a name, such as ``SFT Qwen3-0.6B lora 4x1024`` or ``DPO tiny-llama lora padded 2x16``.

        Raises:
            ValueError: it is no such name.
        """
        match = re.fullmatch(r"(SFT|DPO|GRPO) (.+?)( padded)? (\d+x\d+)", name)
        if match is None:
            raise ValueError(f"{name!r} is no trainer, model and size such as 'SFT Qwen3-0.6B lora 4x1024'")
        return cls(match[1], ModelCase.named(f"{match[2]} loss {match[4]}"), match[3] is not None)

    @property
    def name(self) -> str:
        """The name in tables and for ``--rows``, from which ``named`` makes the case."""
        model, _, size = self.model.name.rpartition(" ")
        return " ".join((self.trainer, model.removesuffix(" loss"), *(["padded"] if self.is_padded else []), size))

    @property
    def tokens(self) -> int:
        """Tokens of a step, as many as without padding."""
        return (2 if self.trainer == "DPO" else 1) * self.model.batch * self.model.length


CASES = tuple(
    TrainerCase.named(f"{trainer} {step}")
    for trainer, steps in {
        "SFT Qwen3-0.6B": "4x4096, lora 4x4096, lora checkpointing 4x4096, lora 4x1024, lora padded 4x1024, 1x512, "
        "lora 1x512",
        "SFT Qwen3-8B": "qlora checkpointing 1x4096",
        "DPO Qwen3-0.6B": "lora 2x512, lora padded 2x512, lora 4x2048",
        "GRPO Qwen3-0.6B": "8x1024, lora 8x1024",
    }.items()
    for step in steps.split(", ")
)


@dataclass
class _Row:
    """The variants of a row.

    Attributes:
        step: the stock model.
        weights: bytes of its parameters.
        stock: the loss and the norm of the gradients of stock, once it has run.
        results: what is known of each variant so far.
        ready: what takes a sample of a variant that is right.
    """

    step: BenchmarkedModel
    weights: int
    stock: list[Tensor] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    ready: dict[str, Callable[[], tuple[float, float]]] = field(default_factory=dict)


def measure(run: BenchmarkRun, cases: Sequence[TrainerCase], variants: Sequence[str], dtype: torch.dtype) -> None:
    """Measure every case, all its variants in turns, as far as time allows; ``dtype``: of the weights."""
    for case in cases if variants else ():
        no_trl = None if importlib.util.find_spec("trl") else "trl is not installed"
        if run.passes_over(f"trainers: {case.name}", no_trl or why_not_here(case.model)):
            continue
        try:
            _measure_case(run, case, variants, dtype)
        except Exception as failure:  # Of the stock model: there is nothing to compare.
            run.passes_over(case.name, in_a_line(failure))
        run.save()


def _measure_case(run: BenchmarkRun, case: TrainerCase, variants: Sequence[str], dtype: torch.dtype) -> None:
    before, _ = memory_now(run.device)
    step = prepare(case.model, dtype, run.device, in_fp32=False)
    row = _Row(step, memory_now(run.device)[0] - before)
    try:
        with tempfile.TemporaryDirectory() as folder, many_graphs():
            # Stock comes first, measured or not, because the others are held against it.
            for variant in dict.fromkeys(("stock", *variants)):
                if not run.passes_over(f"{case.name} {variant}", missing(variant, run.device)):
                    result = Result("trainers", case.name, variant)
                    row.results[variant] = attempt(result, partial(_checked, run, case, row, Path(folder)))
                if not row.stock:
                    raise RuntimeError(f"stock failed: {row.results['stock'].detail}")
            if "stock" not in variants:
                del row.results["stock"], row.ready["stock"]
            samples = run.take_turns(row.results, row.ready, _ROUNDS, _SECONDS)
        for variant, pairs in samples.items():
            host, whole = (Timing.of(column, "wall") for column in zip(*pairs, strict=True))
            row.results[variant] = replace(row.results[variant], timing=whole, host=host)
    finally:
        run.results.rows += row.results.values()
        for variant, result in row.results.items():
            run.say(f"{case.name} {variant}: {f'{1e3 * result.seconds:.1f} ms' if result.seconds else result.verdict}")
        del step, row
        if any(variant in COMPILED for variant in variants):
            torch.compiler.reset()
        release_memory(run.device)


def _checked(run: BenchmarkRun, case: TrainerCase, row: _Row, folder: Path, result: Result) -> Result:
    """Make a trainer whose model is a variant, train once, and hold it against stock; one that is right is ready."""
    release_memory(run.device)
    of_others, reserved_for_others = (held - row.weights for held in memory_now(run.device))
    twin = row.step.twin()
    steps = _QUICK if run.quick else _STEPS
    trainer, clock = _trainer(case, twin.model, run.device, folder, *steps)
    # After the trainer is made, which adds adapters and replaces the forward of the head.
    options: dict[str, Any] = {}
    if result.by == "liger":  # TRL's head in place of Liger's loss, as TRL has it with ``use_liger_kernel``.
        options["fused_linear_cross_entropy"] = False
    if result.by in GRAPHS:  # The trainer's steps run under autocast, and are captured in its first ones.
        options["warms_up"] = False
    patched = VARIANTS[result.by](replace(twin, model=trainer.model), **options)

    def sample() -> tuple[float, float]:
        with patched.running():
            trainer.train()
        return clock.host, clock.whole

    before = copy.deepcopy(patched.report and patched.report.replays)
    sample()
    refuse_if_eager(patched.report, before)
    logged = next(log for log in reversed(trainer.state.log_history) if "grad_norm" in log)
    numbers = [torch.tensor(float(logged[name])) for name in ("loss", "grad_norm")]
    row.stock = row.stock or numbers
    error = relative_error(numbers, row.stock)
    result = result.checked(error, ALLOWED_ERROR, f"relative error of loss and gradients {error:.1e} to stock")
    if result.bad:
        return result
    peak = peak_memory(sample, run.device)
    row.ready[result.by] = sample
    if peak is None:
        return result
    allocated, reserved = peak
    return replace(result, peak_bytes=allocated - of_others, reserved_bytes=reserved - reserved_for_others)


def _trainer(
    case: TrainerCase, model: Any, device: torch.device, folder: Path, untimed: int, timed: int
) -> tuple[Any, Any]:
    """A trainer with its data, and the clock of those of its steps that are ``timed``."""
    from datasets import Dataset, disable_progress_bars
    from transformers import PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    disable_progress_bars()
    steps, batch, length = untimed + timed, case.model.batch, case.model.length

    class Clock(TrainerCallback):
        """The time of the last steps, from an idle device: the host's, and until the device is idle again."""

        host = whole = began = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == untimed:
                synchronize(device)
                self.began = time.perf_counter()
            elif state.global_step == steps:
                self.host = (time.perf_counter() - self.began) / timed
                synchronize(device)
                self.whole = (time.perf_counter() - self.began) / timed

    clock = Clock()
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "learning_rate": 0.0,
        "weight_decay": 0.0,
        "bf16": device.type != "cpu",
        "use_cpu": device.type == "cpu",
        "gradient_checkpointing": "checkpointing" in case.model.step,  # TRL's default, under which nothing is replayed
        "logging_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    padding = max(length // _PAD_TO, 1) if case.is_padded else None
    rows = make_texts(batch * steps, length, is_padded=case.is_padded)
    shared: dict[str, Any] = {"model": model, "processing_class": make_tokenizer(), "callbacks": [clock]}
    config: Any
    trainer: Any
    if case.trainer == "SFT":
        config = SFTConfig(**options, max_length=length, pad_to_multiple_of=padding)
        data = Dataset.from_list([{"text": " ".join(text)} for text in rows])
        trainer = SFTTrainer(**shared, args=config, train_dataset=data)
    elif case.trainer == "DPO":
        config = DPOConfig(**options, max_length=length, pad_to_multiple_of=padding)
        halves = [(" ".join(text[: len(text) // 2]), text[len(text) // 2 :]) for text in rows]
        data = Dataset.from_list(
            [
                {"prompt": prompt, "chosen": " ".join(["", *text]), "rejected": " ".join(["", *reversed(text)])}
                for prompt, text in halves
            ]
        )
        reference = None if {"lora", "qlora"} & {*case.model.step} else copy.deepcopy(model)
        trainer = DPOTrainer(**shared, ref_model=reference, args=config, train_dataset=data)
    else:
        config = GRPOConfig(
            **options, num_generations=batch, max_completion_length=length - length // 2, pad_to_multiple_of=padding
        )
        data = Dataset.from_list([{"prompt": " ".join(text[: length // 2])} for text in rows[:steps]])
        draw = partial(_completions, rows=rows, length=length, vocabulary=make_tokenizer())
        trainer = GRPOTrainer(
            **shared, args=config, train_dataset=data, rollout_func=draw, reward_funcs=_share_of_low_words
        )
    trainer.remove_callback(PrinterCallback)
    return trainer, clock


def _completions(prompts: list[str], _: Any, *, rows: list[list[str]], length: int, vocabulary: Any) -> dict[str, Any]:
    """What GRPO's trainer asks of a rollout: tokens of prompts and of completions, as long as rows leave room for."""
    prompt_ids = [vocabulary(prompt)["input_ids"] for prompt in prompts]
    texts = [rows[place % len(rows)][length // 2 :] or rows[0][:1] for place in range(len(prompts))]
    completion_ids = [vocabulary(" ".join(text))["input_ids"] for text in texts]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def _share_of_low_words(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    """A reward that differs from completion to completion."""
    return [sum(token < _WORDS // 2 for token in ids) / len(ids) for ids in completion_ids]


def make_texts(count: int, length: int, *, is_padded: bool) -> list[list[str]]:
    """The words of rows, which are as many tokens; the trainers add the last."""
    draw = random.Random(0)
    lengths = [draw.randint(max(length // 2, 2), length) if is_padded else length for _ in range(count)]
    return [[f"w{draw.randrange(_WORDS)}" for _ in range(size - 1)] for size in lengths]


def make_tokenizer() -> Any:
    """A tokenizer of a few words, each of which is a token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    names: Mapping[str, str] = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[EOS]"}
    vocabulary = {word: place for place, word in enumerate([*names.values(), *(f"w{i}" for i in range(_WORDS))])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=names["unk_token"]))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)

"""A warm call costs few Python frames of this package: the host waits for them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from triton.runtime.interpreter import InterpretedFunction

import fused_norm
from fused_norm.kernels import rms_norm
from fused_norm.kernels.recording import forget_all
from fused_norm.model_configs import build

from .models import tokens

_PACKAGE = str(Path(fused_norm.__file__).parent)
_ONLY_INTERPRETED = ("check/fast_interpreter.py", "kernels/codegen.py", "kernels/triton/")  # and of a first call


_RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
_FOR_DECORATORS = 0 if _RELEASE == (5, 17) else 9 if _RELEASE < (5, 24) else 11
"""Frames for decorators that other releases of transformers have on forwards."""


def frames_of(module: nn.Module, run: Callable[[], Any]) -> Counter[str]:
    """The frames of this package in the last call of a module that ``run`` makes, by file and name."""
    forget_all()  # a comparison with the program of another test costs a frame
    run()
    run()
    frames: Counter[str] = Counter()
    depth: list[Any] = []

    def noted(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            depth.append(frame)
            frames.clear()
        elif event == "return" and depth and frame is depth[-1]:
            depth.pop()
        elif event == "call" and depth:
            name = code.co_filename.removeprefix(_PACKAGE + "/")
            is_own = name != code.co_filename or name.startswith(("<fused_norm", "<program of fused_norm"))
            is_kernel = isinstance(frame.f_globals.get(code.co_name), InterpretedFunction)
            if is_own and not is_kernel and not name.startswith(_ONLY_INTERPRETED):
                frames[f"{name.partition('#')[0]}: {code.co_name}"] += 1

    sys.setprofile(noted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return frames


def explained(frames: Counter[str]) -> str:
    return "\n".join([f"{frames.total()} frames", *(f"{number} {frame}" for frame, number in frames.most_common())])


@pytest.mark.parametrize(
    ("model_type", "recompute", "most"),
    [("qwen3", False, 46), ("llama", False, 46), ("gemma3_text", False, 54), ("qwen3", True, 176)],
)
def test_a_layer_that_has_run_before_takes_few_frames(model_type: str, recompute: bool, most: int, device: str) -> None:
    most += _FOR_DECORATORS
    model = build(model_type, seed=0, device=device)
    fused_norm.apply_fused_norm(model, recompute=recompute)
    ids = tokens(device, batch=1, length=2)
    model(ids, use_cache=False).logits.sum().backward()
    frames = frames_of(model.model.layers[1], lambda: model(ids, use_cache=False))
    assert 10 < frames.total() <= most, explained(frames)


@pytest.mark.parametrize(("place", "most"), [("self_attn.q_proj", 7), ("", 109)])
def test_a_lora_layer_that_has_run_before_takes_few_frames(place: str, most: int, device: str) -> None:
    """The bound of a whole decoder layer is for all of its linears with adapters."""
    model = build("qwen3", seed=0, dtype=torch.bfloat16, device=device)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules="all-linear"), model)
    fused_norm.apply_fused_norm(model)
    ids = tokens(device, batch=1, length=2)

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            model(ids, use_cache=False)

    run()
    frames = frames_of(model.model.layers[1].get_submodule(place), run)
    assert 5 < frames.total() <= most + _FOR_DECORATORS, explained(frames)


def test_a_norm_that_has_run_before_takes_few_frames(device: str) -> None:
    class Norm(nn.Module):
        def forward(self) -> torch.Tensor:
            return rms_norm(x, weight)

    x, weight, norm = torch.randn(3, 8, device=device), torch.ones(8, device=device), Norm()
    norm()
    frames = frames_of(norm, norm)
    assert 1 < frames.total() <= 9, explained(frames)


def test_a_patched_model_is_patched_again_in_few_frames() -> None:
    """PyTorch is set up once for each norm, rotation or activation that is tried, and not for each formula."""
    model = build("qwen3", seed=0)
    fused_norm.apply_fused_norm(model)
    frames: Counter[str] = Counter()

    def noted(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            frames[f"{frame.f_code.co_filename}: {frame.f_code.co_name}"] += 1

    sys.setprofile(noted)
    try:
        fused_norm.apply_fused_norm(model)
    finally:
        sys.setprofile(None)
    assert 1000 < frames.total() <= 17_000, explained(frames)

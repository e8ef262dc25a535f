"""Tokens a second and peak memory of training, by stock code and then fused: what the examples that train print."""

import contextlib
import os
import time

import torch
from transformers import TrainerCallback

import fused_norm

RUNS_KERNELS = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
FUSED = "fused" if RUNS_KERNELS else "patched, stock code all the same (no GPU)"


class BeforeAndAfter(TrainerCallback):
    """Takes the first half of the steps by the stock code, and prints which code runs, its speed and its peak memory.

    The first step of each half is not counted. The losses are those of a run that is fused from its start, but for
    roundings.
    """

    def __init__(self, steps, tokens):
        self.half, self.steps, self.tokens = steps // 2, steps, tokens  # tokens of a step
        self.step, self.stock = 0, contextlib.ExitStack()

    def on_step_begin(self, *args, **kwargs):
        if self.step == 0 < self.half:
            self.stock.enter_context(fused_norm.disabled())
            print(f"steps 1 to {self.half}: stock code, inside fused_norm.disabled(), to compare with")
        elif self.step == self.half:
            self.stock.close()
            print(f"steps {self.half + 1} to {self.steps}: {FUSED}")
        if self.step in (1, self.half + 1):
            self.started = self.now()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *args, **kwargs):
        self.step += 1
        last = {self.half: ("stock", self.half), self.steps: (FUSED, self.steps - self.half)}
        name, steps = last.get(self.step, ("", 0))
        if steps > 1:
            speed = (steps - 1) * self.tokens / (self.now() - self.started)
            peak = (
                f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if torch.cuda.is_available() else "not on a CPU"
            )
            print(f"{name}: {speed:.0f} tokens a second; peak memory: {peak}")

    def now(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

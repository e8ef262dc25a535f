"""Random programs of the operators, each run by Python alone and with native replay, which must not differ by a bit.

A program makes tensors that share memory, lie anywhere in it, are repeated or frozen; calls operators on them and on
what they return; and asks for gradients, some of them twice, with hooks, in place of others. Whatever it sees on the
way is in its trace: results, gradients, which of them are one tensor, and what was raised. What nobody may write to,
the tensors and the gradients that were handed in, is compared with what it was after every step.

``python -m tests.kernels.fuzz_replay --seconds 120`` runs as many as fit; ``--first 17 --count 1`` runs one again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from ..conftest import HAS_GPU

# isort: split
# Triton is told whether to interpret kernels by now.
import torch
from torch import Tensor

from fused_norm.kernels import (
    MODES,
    add_rms_norm,
    glu,
    norm_add,
    norm_add_norm,
    qk_norm,
    qk_norm_rope,
    replay,
    rms_norm,
    rope,
)
from fused_norm.kernels.arguments import ACTIVATIONS

from .conftest import Halves, replayed_natively

FEW_RECORDINGS = 6
"""A limit on recordings that most programs go through."""

_STEPS = 14
_MEANINGS: tuple[dict[str, Any], ...] = (
    {"casting": "llama"},
    {"casting": "gemma", "zero_centered": True, "eps": 1e-5},
    {"casting": "rounded_gamma", "zero_centered": True},
    {"casting": "weight_dtype"},
    {"casting": "rounded_rstd"},
    {"casting": "none"},
)
_SHAPES = ((4, 8), (2, 2, 8), (1, 2, 4, 8), (1, 4, 2, 8), (1, 2, 4, 8))
_IN_PLACE = ("dense",) * 8 + ("offset", "half", "padded", "leading")
_COPIED = ("columns", "row", "one", "every other")
"""Layouts that kernels do not read in place: a call with one of these stays with Python."""
_CONTEXTS: tuple[Callable[[], Any], ...] = (nullcontext,) * 8 + (
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
)

Trace = list[tuple[str, Any]]
Call = tuple[Callable[..., Any], list[Tensor | None], dict[str, Any]]


class Program:
    """A random program; equal seeds make equal ones, whoever runs them."""

    def __init__(self, seed: int, device: str) -> None:
        self._random = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)
        self._device = device
        self._dtypes = [self._random.choice((torch.float32, torch.bfloat16, torch.float16))] * 3 + [torch.float32]
        self._meaning = self._random.choice(_MEANINGS)
        self._tensors: list[Tensor] = []
        self._memory: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._guarded: list[tuple[str, Tensor, Tensor]] = []
        self._hooks: list[Any] = []
        self._label = ""
        self._last: Any = None
        self.trace: Trace = []

    def run(self) -> Trace:
        """Run it; the trace holds what was seen at each step."""
        for shape in self._random.sample(_SHAPES, 2):
            for _ in range(3):
                self._add(self._leaf(shape))
        for _ in range(3):
            self._add(self._leaf((8,)))
        steps: list[Callable[[], None]] = [self._call] * 8 + [self._differentiate] * 6
        steps += [self._make, self._alias, self._freeze, self._drop, self._write, self._watch, self._clear]
        for number in range(_STEPS):
            step = self._random.choice(steps)
            self._label = f"{number} {step.__name__}"
            try:
                step()
            except (RuntimeError, ValueError) as error:
                self._see("raised", type(error).__name__)
            for name, tensor, before in self._guarded:
                if not _equal(tensor, before):
                    self._see("written to", name)
        for tensor in self._tensors:
            self._see("grad", tensor.grad if tensor.is_leaf or tensor.retains_grad else None)
        for hook in self._hooks:
            hook.remove()
        return self.trace

    # ---- tensors ----

    def _filled(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory = torch.randn(shape, generator=self._numbers).to(self._device, dtype)
        self._memory.append(memory)
        return memory

    def _laid_out(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        *lead, width = shape
        layout = self._random.choice(_COPIED if self._random.random() < 0.12 else _IN_PLACE)
        if layout == "offset":
            count = 1
            for size in shape:
                count *= size
            start = self._random.choice((1, 8, 16))
            return self._filled((count + 16,), dtype)[start : start + count].view(*shape)
        if layout == "half":
            return self._filled((*lead, 2 * width), dtype).chunk(2, dim=-1)[self._random.randrange(2)]
        if layout == "padded":
            return self._filled((*lead, width + 8), dtype)[..., :width]
        if layout == "leading" and len(lead) > 1:
            return self._filled((*lead[:-2], lead[-1], lead[-2], width), dtype).transpose(-2, -3)
        if layout == "columns" and lead:
            return self._filled((*lead[:-1], width, lead[-1]), dtype).transpose(-1, -2)
        if layout == "row":
            return self._filled((width,), dtype).expand(shape)
        if layout == "one":
            return self._filled((), dtype).expand(shape)
        if layout == "every other":
            return self._filled((*lead, 2 * width), dtype)[..., ::2]
        return self._filled(shape, dtype)

    def _leaf(self, shape: Sequence[int]) -> Tensor:
        tensor = self._laid_out(shape, self._random.choice(self._dtypes))
        return tensor.requires_grad_(self._random.random() < 0.8)

    def _add(self, tensor: Tensor) -> None:
        self._tensors.append(tensor)
        self._guard("a tensor", tensor)

    def _guard(self, name: str, tensor: Tensor) -> None:
        """Watch all of the memory that the tensor is a part of."""
        whole = tensor.detach()
        size = whole.untyped_storage().nbytes() // whole.element_size()
        whole = whole.as_strided((size,), (1,), 0)
        self._guarded.append((f"{name} of step {self._label}", whole, whole.clone()))

    def _guard_anew(self) -> None:
        self._guarded = [(name, tensor, tensor.clone()) for name, tensor, _ in self._guarded]

    def _pick(self, fits: Callable[[Tensor], bool] = lambda _: True) -> Tensor:
        found = [tensor for tensor in self._tensors if fits(tensor)]
        # What was made last is likely to be used next, as in a model.
        return self._random.choice(found[-4:] if self._random.random() < 0.5 else found)

    # ---- what is seen ----

    def _see(self, name: str, value: Any) -> None:
        self.trace.append((f"{self._label}: {name}", _described(value) if isinstance(value, Tensor) else value))

    def _see_all(self, name: str, found: Sequence[Tensor | None]) -> None:
        self._see(f"{name}s that are one", [next(i for i, b in enumerate(found) if b is a) for a in found])
        for one in found:
            self._see(name, one)

    # ---- steps ----

    def _make(self) -> None:
        self._add(self._leaf(self._random.choice((*_SHAPES, (8,)))))

    def _alias(self) -> None:
        """One more tensor on the memory of another, in the same layout or from its start."""
        other = self._pick().detach()
        if self._random.random() < 0.3 and other.dim() > 1:
            other = other.transpose(0, -2)
        if self._random.random() < 0.3:
            other = other[..., :1, :] if other.dim() > 1 else other[:1].expand(8)
        self._add(other.requires_grad_(self._random.random() < 0.7))

    def _freeze(self) -> None:
        leaf = self._pick(lambda tensor: tensor.is_leaf)
        leaf.requires_grad_(not leaf.requires_grad)

    def _drop(self) -> None:
        """Give up half of the tensors, so that others get their memory, and graphs live on in what is left."""
        self._tensors = self._random.sample(self._tensors, max(6, len(self._tensors) // 2))
        self._memory.clear()
        self._gradients.clear()
        self._guarded.clear()
        for tensor in self._tensors:
            self._guard("a tensor", tensor)
        for shape in (self._tensors[0].shape, (8,)):
            self._add(self._leaf(shape))

    def _write(self) -> None:
        """As an optimizer does; who saved it for a backward must notice."""
        tensor = self._pick()
        with torch.no_grad():
            if self._random.random() < 0.5:
                tensor.mul_(0.5)
            else:
                tensor.data.add_(0.25)
        self._guard_anew()

    def _watch(self) -> None:
        tensor = self._pick(lambda tensor: tensor.requires_grad)
        if self._random.random() < 0.5 and not tensor.is_leaf:
            tensor.retain_grad()
        elif self._random.random() < 0.5:
            self._hooks.append(tensor.register_hook(lambda gradient: None if gradient is None else gradient * 2))
        else:
            self._hooks.append(tensor.register_hook(lambda gradient: self._see("gradient at a hook", gradient)))

    def _clear(self) -> None:
        for tensor in self._tensors:
            if tensor.is_leaf and tensor.grad is not None:
                if self._random.random() < 0.5:
                    tensor.grad.zero_()
                else:
                    tensor.grad = None

    def _arguments(self) -> Call:
        """A call of an operator."""
        pick = self._random.choice
        x = self._pick(lambda tensor: tensor.dim() > 1)
        like_x = [tensor for tensor in self._tensors if tensor.shape == x.shape]
        r = x if self._random.random() < 0.2 else pick(like_x)
        weights: list[Tensor | None] = [tensor for tensor in self._tensors if tensor.shape == (8,)]
        a = pick(weights) if weights else None
        b = a if self._random.random() < 0.3 or a is None else pick(weights)
        meaning = dict(self._meaning)
        if self._random.random() < 0.15:
            meaning["eps"] = pick((0.5, 1e-3))
        if self._random.random() < 0.15 and not meaning.get("zero_centered"):
            a = b = None
        heads = (qk_norm, qk_norm_rope, rope) if x.dim() == 4 else (qk_norm,)
        operator: Callable[..., Any] = pick((rms_norm, add_rms_norm, norm_add, norm_add_norm, glu, pick(heads)))
        arguments = (
            [x, a] if operator is rms_norm else [x, r, a] if operator in (add_rms_norm, norm_add) else [x, r, a, b]
        )
        if operator in (glu, rope):
            arguments, meaning = [x, None if operator is rope and pick((True, False)) else r], {}
        meaning |= self._options(operator)
        if operator in (qk_norm_rope, rope):
            shape, dtype = (1, x.shape[3 - meaning["unsqueeze_dim"]], pick((4, 8))), pick(self._dtypes)
            arguments += [self._laid_out(shape, dtype) for _ in "cs"]
        return operator, arguments, meaning

    def _options(self, operator: Callable[..., Any]) -> dict[str, Any]:
        pick = self._random.choice
        if operator is rms_norm:
            return {"mode": pick((None, None, *MODES))}
        if operator is add_rms_norm:
            return {"scale": pick((1.0, 1.0, 0.5, 2))}
        if operator is glu:
            return {"activation": pick(ACTIVATIONS)}
        if operator is rope:
            return {"unsqueeze_dim": pick((1, 1, 2)), "once": pick((False, False, True))}
        return {"unsqueeze_dim": pick((1, 1, 2))} if operator is qk_norm_rope else {}

    def _like_the_last(self) -> Call:
        """The last call with other tensors of the same kind, one of them in the place of another, or another option."""
        operator, arguments, meaning = self._last
        if self._random.random() < 0.3:
            meaning = meaning | (self._options(operator) or {"eps": self._random.choice((1e-6, 0.5))})
        swapped = list(arguments)
        for index, one in enumerate(arguments):
            chance = self._random.random()
            if one is None or chance < 0.4:
                continue
            if chance < 0.7:
                swapped[index] = other = one.detach().neg().requires_grad_(one.requires_grad)
                if one.shape[-1] == 8 and index < (2 if operator is rope else 4):
                    self._add(other)
            else:
                swapped[index] = self._random.choice([o for o in arguments if o is not None and o.shape == one.shape])
        return operator, swapped, meaning

    def _call(self) -> None:
        pick = self._random.choice
        again = self._last is not None and self._random.random() < 0.5
        operator, arguments, meaning = self._last = self._like_the_last() if again else self._arguments()
        context = pick(_CONTEXTS)
        self._label += f" {operator.__name__}"
        for argument in arguments:
            if argument is not None:
                self._guard("an argument", argument)
        with context():
            outputs = operator(*arguments, **meaning)
        outputs = [outputs] if isinstance(outputs, Tensor) else [output for output in outputs if output is not None]
        self._see_all("output", outputs)
        if context is not torch.inference_mode:
            for output in outputs:
                self._add(output)

    def _incoming(self, output: Tensor, others: Sequence[Tensor]) -> Tensor:
        """A gradient for an output: one that another got too, memory that something else has, or one of its own."""

        def fits(tensor: Tensor) -> bool:
            return tensor.shape == output.shape and tensor.dtype == output.dtype

        for chance, known in ((0.3, others), (0.2, self._gradients), (0.15, self._tensors)):
            if self._random.random() < chance and (found := [tensor.detach() for tensor in known if fits(tensor)]):
                one = self._random.choice(found)
                return next((other for other in others if other.data_ptr() == one.data_ptr()), one)
        return self._laid_out(output.shape, output.dtype)

    def _differentiate(self) -> None:
        with_graph = [tensor for tensor in self._tensors if tensor.grad_fn is not None]
        if not with_graph:
            return self._call()
        # Both outputs of a call stand side by side.
        start = self._random.randrange(len(with_graph))
        outputs = with_graph[start : start + self._random.choice((1, 2, 2, 3))]
        incoming: list[Tensor] = []
        for output in outputs:
            incoming.append(self._incoming(output, incoming))
            self._guard("a gradient", incoming[-1])
        self._gradients = [*self._gradients, *incoming][-8:]
        retain = self._random.random() < 0.6
        wanted = [tensor for tensor in self._tensors if tensor.requires_grad]
        wanted = self._random.sample(wanted, min(len(wanted), self._random.choice((1, 2, 4, 8))))
        into_leaves, again = self._random.random() < 0.4, retain and self._random.random() < 0.4
        create = self._random.random() < 0.05
        for _ in range(1 + again):
            if into_leaves:
                torch.autograd.backward(outputs, incoming, retain_graph=retain)
                for tensor in self._tensors:
                    if tensor.is_leaf or tensor.retains_grad:
                        self._see("grad", tensor.grad)
                continue
            found = torch.autograd.grad(
                outputs, wanted, incoming, retain_graph=retain, create_graph=create, allow_unused=True
            )
            self._see_all("gradient", found)
            kept = [gradient.detach() for gradient in found if gradient is not None]
            self._gradients = [*self._gradients, *kept][-8:]
        return None


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _described(tensor: Tensor) -> tuple[Any, ...]:
    """All that can be seen of a tensor; a dimension of one element has no stride worth the name.

    It changes where the engine sums gradients in place, which it does where nobody, Python neither, holds them.
    """
    strides = tuple(step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(tensor.shape), strides, tensor.dtype, tensor.requires_grad, tensor.is_inference(), _bits(tensor)


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or _bits(one) == _bits(other)


def check(seed: int, device: str) -> tuple[int, int]:
    """Run a program by Python alone and twice natively; how much it saw, and how often something was raised.

    Raises:
        AssertionError: where they differ, or something was written to.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(seed % 2 == 0)  # natively, memory comes from elsewhere then
    try:
        replay.switch(False)
        expected = Program(seed, device).run()
        replay.switch(True)
        traces = [Program(seed, device).run() for _ in range(2)]
    finally:
        replay.switch(True)
        torch.use_deterministic_algorithms(before)
    written = [label for label, _ in expected if "written to" in label]
    assert not written, f"program {seed} writes to what is not its own at step {written[0]}"
    for trace in traces:
        for ours, theirs in zip(trace, expected, strict=False):
            assert ours == theirs, f"program {seed} differs at step {ours[0]}, in Python {theirs[0]}"
        assert len(trace) == len(expected), f"program {seed} ends elsewhere than in Python"
    return len(expected), sum("raised" in label for label, _ in expected)


def replays(halves: Halves) -> tuple[int, int]:
    """The forwards and backwards that were replayed, of all operators."""
    counts = [half.replayed() for half in halves.values()]
    return sum(forward for forward, _ in counts), sum(backward for _, backward in counts)


def main() -> None:
    """Run programs until time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="of programs, at most")
    parser.add_argument("--limit", type=int, default=FEW_RECORDINGS, help="recordings of an operator, at most")
    options = parser.parse_args()
    torch.utils.deterministic.fill_uninitialized_memory = True
    end = time.monotonic() + options.seconds
    seed = options.first
    with replayed_natively("cuda" if HAS_GPU else "cpu", options.limit) as halves:
        while time.monotonic() < end and seed < options.first + options.count:
            check(seed, "cuda" if HAS_GPU else "cpu")
            seed += 1
        forwards, backwards = replays(halves)
    done = f"{seed - options.first} programs from {options.first} on show no difference"
    sys.stdout.write(f"{done}; {forwards} forwards and {backwards} backwards were replayed\n")


if __name__ == "__main__":
    main()

"""A call of an operator under construction: what it allocates, and what it launches once it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .launch import Launch
from .memory import memory_order, row_stride
from .torch_calls import Copy, TorchCall, Zero

CallStep = Launch | TorchCall
"""What a call does to memory that it has allocated."""


class Call:
    """What one call of an operator allocates and launches, in order: memory is there at once, launches wait.

    An operator allocates its results and says by ``then`` which launchers write them. A launcher brings tensors into
    the layouts that kernels read, allocates what only the call needs, and launches; nothing else computes anything.
    So whoever traces an operator takes its results and runs no launcher, whose code depends on sizes, and a recording
    repeats what is listed here.

    Attributes:
        allocated: the tensors that were allocated.
    """

    def __init__(self) -> None:
        self.allocated: list[Tensor] = []
        self._launchers: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = []
        self._steps: list[CallStep] = []

    @staticmethod
    def at_once(build: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The results of ``build(call, *arguments, **options)``, after that call has run."""
        call = Call()
        results = build(call, *arguments, **options)
        call.run()
        return results

    def then(self, launcher: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Note ``launcher(call, *arguments, **options)``; it runs with the call."""
        self._launchers.append((launcher, arguments, options))

    def steps(self) -> list[CallStep]:
        """What the launchers launch, and what PyTorch computes between launches, in order."""
        assert not (self._steps and self._launchers), "only launchers launch"
        launchers, self._launchers = self._launchers, []
        for launcher, arguments, options in launchers:
            launcher(self, *arguments, **options)
        return self._steps

    def run(self) -> list[tuple[CallStep, Any]]:
        """Take all steps, and return them with the kernels that were compiled for them."""
        taken: list[tuple[CallStep, Any]] = []
        for step in self.steps():  # a comprehension would be one more frame
            taken.append((step, step.run()))
        return taken

    def empty(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """An empty contiguous tensor on the device of ``like``, and of its dtype unless another is given."""
        tensor = like.new_empty(shape, dtype=dtype)
        self.allocated.append(tensor)
        return tensor

    def empty_rows_like(self, x: Tensor, dtype: torch.dtype | None = None, width: int | None = None) -> Tensor:
        """An empty tensor of x's shape, dense and in x's memory order, with every row (the last dimension) contiguous.

        ``dtype`` and ``width``, the length of a row, are x's own unless given.
        """
        shape = x.shape if width is None else (*x.shape[:-1], width)
        if x.is_contiguous():
            return self.empty(x, shape, dtype)
        return self.empty_in_order(memory_order(x), shape, x.dtype if dtype is None else dtype, x.device)

    def empty_in_order(
        self, order: Sequence[int], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An empty dense tensor, its leading dimensions from the slowest to the fastest in memory as in ``order``."""
        strides = [1] * len(shape)
        step = shape[-1]
        for dim in reversed(order):
            strides[dim] = step
            step *= max(shape[dim], 1)
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        self.allocated.append(tensor)
        return tensor

    def empty_weight_like(self, weight: Tensor | None, needed: bool, dtype: torch.dtype | None = None) -> Tensor | None:
        """A weight's gradient or copy, not yet written, contiguous; None if it is not needed or there is no weight.

        ``dtype`` is the weight's own unless given.
        """
        return self.empty(weight, weight.shape, dtype) if needed and weight is not None else None

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float | None, ...],
        constants: dict[str, Any],
        *,
        warps: int,
        fuse: bool = True,
        overlaps: bool = False,
        registers: int | None = None,
    ) -> None:
        """Launch a kernel, in a launcher: ``Launch`` explains the first arguments.

        ``fuse``: a product that is added to may become one multiply-add, which does not round the product.
        ``overlaps``: the kernel may begin before the previous launch has ended, and calls ``await_previous``.
        ``registers``: the most that a lane may have, if the device ``limits_registers``; None leaves it to the
        compiler.
        """
        options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": fuse}  # newer Triton has another default
        if overlaps:
            options["launch_pdl"] = True
        if registers is not None:
            options["maxnreg"] = registers
        self._steps.append(Launch(kernel, grid, tensors, numbers, constants, options))

    def perform(self, step: TorchCall) -> None:
        """Have PyTorch compute this, in a launcher."""
        self._steps.append(step)

    def zero(self, tensor: Tensor) -> None:
        """Fill a tensor with zeros, in a launcher."""
        self.perform(Zero(tensor))

    def contiguous(self, x: Tensor | None) -> Tensor | None:
        """The tensor, copied, in a launcher, if its elements do not follow each other."""
        return x if x is None or x.is_contiguous() else self._copied(x, self.empty(x, x.shape))

    def as_strided_rows(self, lead: Tensor, *others: Tensor | None) -> tuple[list[Tensor | None], tuple[int, ...]]:
        """Arrange tensors as evenly spaced rows, counted in one order; also return their row strides, in elements.

        All have the leading dimensions of ``lead``; the length of a row may differ. Rows are independent of each other,
        so any order will do: it is the order of ``lead`` in memory, which makes transposed heads as good as contiguous
        ones. A tensor whose rows are not evenly spaced in that order is copied; one from ``empty_rows_like(lead)``
        never is.
        """
        tensors = (lead, *others)
        if all(t is None or t.is_contiguous() for t in tensors):
            return list(tensors), tuple([0 if t is None else t.shape[-1] for t in tensors])
        order = memory_order(lead)
        arranged: list[Tensor | None] = []
        strides: list[int] = []
        for tensor in tensors:
            stride = 0 if tensor is None else row_stride(tensor, order)
            if tensor is not None and stride is None:
                tensor = self.copied_like(lead, tensor)
                stride = row_stride(tensor, order)
            assert stride is not None, "a dense tensor in the lead's memory order has evenly spaced rows"
            arranged.append(tensor)
            strides.append(stride)
        return arranged, tuple(strides)

    def copied_like(self, lead: Tensor, tensor: Tensor) -> Tensor:
        """A copy of a tensor, made in a launcher, with rows in the memory order of ``lead``."""
        return self._copied(tensor, self.empty_rows_like(lead, tensor.dtype, tensor.shape[-1]))

    def _copied(self, tensor: Tensor, copy: Tensor) -> Tensor:
        self.perform(Copy(tensor, copy))
        return copy

"""Calls of every operator, one or several each, for the contracts that all operators keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import recording
from fused_norm.kernels.recording import forget_all
from fused_norm.kernels.triton.launch import Launch
from fused_norm.spec import NormSpec

from .compiled_launches import noted
from .conftest import OPERATORS
from .numerics import BF16, FP16, FP32, in_layout


class Call(NamedTuple):
    """An operator, its tensors and its options. If the operator has a norm, its spec is the first option."""

    name: str
    tensors: Sequence[Tensor | None]
    options: tuple[Any, ...] = ()

    @property
    def spec(self) -> NormSpec | None:
        """The spec of the norm; None if the operator has none."""
        return self.options[0] if OPERATORS[self.name].takes_spec else None

    def with_spec(self, **changes: Any) -> Call:
        """Return the call with a changed spec."""
        assert self.spec is not None
        return self._replace(options=(replace(self.spec, **changes), *self.options[1:]))

    @property
    def semantics(self) -> tuple[Any, ...]:
        """The spec as the arguments of a registered operator."""
        spec = self.spec
        return () if spec is None else (spec.casting, spec.zero_centered, spec.eps, spec.casts_weight)

    @property
    def differentiated(self) -> int:
        """The number of leading tensors that can have a gradient."""
        return len(OPERATORS[self.name].gradients)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that are present and can have a gradient."""
        return tuple(present(self.tensors[: self.differentiated]))

    def leaves(self) -> list[Tensor | None]:
        """Return the tensors; those that can have a gradient become leaves that require one."""
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in self.tensors]
        leaves[self.differentiated :] = self.tensors[self.differentiated :]
        return leaves

    def outputs(
        self, tensors: Sequence[Tensor | None] | None = None, operator: Callable[..., Any] | None = None
    ) -> list[Tensor]:
        """Call the operator, or another function, with these tensors or the call's own, and return the outputs."""
        call = operator or OPERATORS[self.name]
        return present(call(*(self.tensors if tensors is None else tensors), *self.options))

    def results(self, operator: Callable[..., Any] | None = None) -> list[Tensor]:
        """Return the outputs and the gradients of all tensors that can have one."""
        leaves = self.leaves()
        outputs = self.outputs(leaves, operator)
        return [
            *outputs,
            *torch.autograd.grad([y.sin().sum() for y in outputs], present(leaves[: self.differentiated])),
        ]

    def converted(self, convert: Callable[[Tensor], Tensor]) -> Call:
        """Return the call with every tensor converted."""
        return self._replace(tensors=[None if tensor is None else convert(tensor) for tensor in self.tensors])

    def placed(self, place: int, tensor: Tensor) -> Call:
        """Return the call with another tensor at this place."""
        return self._replace(tensors=[*self.tensors[:place], tensor, *self.tensors[place + 1 :]])


def launches_of(call: Callable[[], Any]) -> list[Launch]:
    """Return the launches that a call would make, without making them."""
    forget_all()
    with pytest.MonkeyPatch.context() as patch, noted() as launches:
        patch.setattr(recording, "launch_backend", lambda device: None)
        call()
    forget_all()
    return launches


def present(outputs: Tensor | Sequence[Tensor | None]) -> list[Tensor]:
    """Return the outputs as a list, without those that are None."""
    return [outputs] if isinstance(outputs, Tensor) else [output for output in outputs if output is not None]


def every_call(
    device: str, layout: str = "contiguous", rows: int = 3, width: int = 16, dtype: torch.dtype | None = None
) -> dict[str, Call]:
    """Return calls of every operator by name. Their tensors have several dtypes unless ``dtype`` is given."""

    def rand(*shape: int, usual: torch.dtype = BF16) -> Tensor:
        tensor = torch.randn(shape, device=device).to(dtype or usual)
        return tensor if layout == "contiguous" or len(shape) < 4 else in_layout(layout, tensor)

    x, r, w, inner = rand(2, rows, 2, width), rand(2, rows, 2, width, usual=FP16), rand(width, usual=FP32), rand(width)
    packed = rand(2, rows, 2, 2 * width)
    llama, gemma, none = NormSpec("llama", True), NormSpec("gemma", eps=1e-5), NormSpec("none")
    rotary = max(width // 4 * 2, 2)
    cos, sin = rand(2, 2, rotary), rand(2, 2, rotary)
    whole_cos, whole_sin = (rand(2, 2, rotary if width % 2 else width) for _ in range(2))
    first, second = rand(4, width, usual=FP32), rand(width, 4)
    k = x[:, :1].contiguous()
    sequence, taps = rand(2, 2 * rows, width), rand(width, 4)
    return {
        "norm": Call("rms_norm", (x, w), (llama, None)),
        "norm uncast": Call("rms_norm", (r, None), (none, "static_persistent")),
        "add in gemma": Call("add_rms_norm", (x, r, w), (gemma, None, 1.0)),
        "add": Call("add_rms_norm", (x, x.clone(), inner), (llama, None, 1.0)),
        "add scaled": Call("add_rms_norm", (x, x.clone(), None), (none, None, 0.22)),
        "norm and add": Call("norm_add", (x, r, w), (llama,)),
        "sandwich": Call("norm_add_norm", (x, r, inner, w), (gemma,)),
        "sandwich uncast": Call("norm_add_norm", (x, r, None, w), (none,)),
        "heads": Call("qk_norm", (x, r.transpose(1, 2)[:, :1].contiguous(), w, inner, None, None), (llama, 1, None)),
        "heads rotated in part": Call("qk_norm", (x, k, inner, inner.clone(), cos, sin), (gemma, 1, None)),
        "rotation in part": Call(
            "rope", (x, r[:, :1].contiguous(), cos.float(), sin.float()), (1, True, "half", False, None)
        ),
        "glu": Call("glu", (x, r), ("silu",)),
        "rotation of one": Call("rope", (x, None, whole_cos, whole_sin), (1, False, "half", False, None)),
        "glu packed": Call("glu", (packed, None), ("gelu_tanh",)),
        "gated in groups": Call("gated_rms_norm", (x, r, w), (llama, "silu", True, 2 - width % 2)),
        "gate first": Call("gated_rms_norm", (x, x.clone(), inner), (gemma, "sigmoid", False, 1)),
        "heads rotated": Call("qk_norm", (x, k, w, inner, whole_cos, whole_sin), (llama, 1, None)),
        "heads rotated in part and cast": Call(
            "qk_norm", (x, k, w, w.clone(), cos.float(), sin.float()), (llama, 1, dtype or BF16)
        ),
        "rotation cast": Call(
            "rope", (x, k, whole_cos.float(), whole_sin.float()), (1, False, "half", False, dtype or FP16)
        ),
        "conv": Call("causal_conv1d", (sequence, taps, inner), ("silu",)),
        "conv alone": Call("causal_conv1d", (sequence, rand(width, 3), None), (None,)),
        "expert gate": Call("expert_gate", (packed, None), ("silu", True, 1.5, 1.702)),
        "adapter": Call("lora_add", (r.to(dtype or FP32), x, first, second), (0.7,)),
    }


_EVERY = every_call("cpu")
NAMES = list(_EVERY)
CALLS = pytest.mark.parametrize("case", NAMES)
ONE_OF_EACH = list({call.name: name for name, call in reversed(_EVERY.items())}.values())
"""A call of each operator: the first."""
NORMED = [name for name, call in _EVERY.items() if call.spec is not None]
HEADS = [name for name, call in _EVERY.items() if call.name in ("qk_norm", "rope")]
SEQUENCES = [name for name, call in _EVERY.items() if call.name == "causal_conv1d"]
"""The calls whose rows depend on those before them."""
ROWS = [name for name in NAMES if name not in HEADS and name not in SEQUENCES]
"""The calls whose tensors are rows alone, and neither heads nor sequences."""
IN_PART = [name for name in HEADS if "in part" in name]
"""The calls that rotate a part of each row."""

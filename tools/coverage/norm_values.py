"""The kind of norm that a module is, told by its results on random numbers and not by the patcher's formulas."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

Normalises = Literal["rms", "gated", "layer", "length", "other"]
"""``rms``: rows, or groups in them, by the root of the mean of squares. ``gated``: the same, and a second tensor has an
influence. ``layer``: a mean is subtracted. ``length``: by the norm of rows. ``other``: results do not depend on the
input's scale."""

_SUBTRACTING = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_MOST = 2**20  # Numbers in a weight: more are those of an embedding.
_known: dict[Any, Normalises | None] = {}


def normalises(module: nn.Module) -> Normalises | None:
    """Return the kind of norm that a module is; None for no norm, one that holds modules, or that cannot be tried."""
    if isinstance(module, _SUBTRACTING):
        return "layer"
    tensors = {**module._parameters, **module._buffers}
    shapes = tuple((name, None if tensor is None else tuple(tensor.shape)) for name, tensor in tensors.items())
    inside = any(child is not None for child in module._modules.values())
    foreign = type(module).__module__.startswith("torch.") and not isinstance(module, nn.RMSNorm)
    large = any(tensor is not None and (tensor.dim() > 2 or tensor.numel() > _MOST) for tensor in tensors.values())
    if inside or foreign or large or len(tensors) > 3:
        return None
    plain = tuple((name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str, bool)))
    key = (type(module), type(module).forward, shapes, plain)
    if key not in _known:
        _known[key] = _tried(module)
    return _known[key]


def _tried(module: nn.Module) -> Normalises | None:
    generator = torch.Generator().manual_seed(0)
    tensors = (*module._parameters.values(), *module._buffers.values())
    widths = [tensor.shape[-1] for tensor in tensors if tensor is not None and tensor.dim() > 0]
    widths += [value for value in vars(module).values() if type(value) is int and 8 <= value <= 16384]
    takes_two = len(inspect.signature(type(module).forward).parameters) > 2
    with torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = _with_random_tensors(module, generator)
        for width in dict.fromkeys([*widths, 64]):
            x = torch.randn(2, 3, width, generator=generator) * 8
            x *= torch.tensor([0.5, 1.0, 3.0])[:, None]
            gates = [torch.randn(x.shape, generator=generator) for _ in range(2)] if takes_two else []
            try:
                if takes_two and _is_gated(twin, x, *gates):
                    return "gated"
                return _of_one_tensor(twin, x)
            except Exception:  # a foreign forward may raise anything
                continue
    return None


def _with_random_tensors(module: nn.Module, generator: torch.Generator) -> nn.Module:
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    fresh = set(vars(twin))
    vars(twin).update({name: value for name, value in vars(module).items() if name not in fresh})

    def drawn(tensor: Tensor | None) -> Any:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        return torch.rand(tensor.shape, generator=generator) + 0.5

    parameters: dict[str, Any] = {name: drawn(tensor) for name, tensor in module._parameters.items()}
    wrapped = {name: None if tensor is None else nn.Parameter(tensor, False) for name, tensor in parameters.items()}
    buffers = {name: drawn(tensor) for name, tensor in module._buffers.items()}
    vars(twin).update(_parameters=wrapped, _buffers=buffers, training=False)
    return twin


def _call(twin: nn.Module, *inputs: Tensor) -> Tensor:
    y = type(twin).forward(twin, *(x.clone() for x in inputs))
    if not isinstance(y, Tensor) or y.shape != inputs[0].shape or not y.isfinite().all():
        raise ValueError("no tensor like the first one")
    return y


def _alike(first: Tensor, other: Tensor) -> bool:
    return bool((first - other).abs().max() <= 2e-3 * other.abs().max())


def _is_gated(twin: nn.Module, x: Tensor, gate: Tensor, other: Tensor) -> bool:
    try:
        y = _call(twin, x, gate)
        return _alike(_call(twin, 4 * x, gate), y) and not _alike(_call(twin, x, other), y) and not _alike(y, y.flip(0))
    except Exception:  # the second argument is no gate
        return False


def _of_one_tensor(twin: nn.Module, x: Tensor) -> Normalises | None:
    y = _call(twin, x)
    if not _alike(_call(twin, 4 * x), y) or _alike(_call(twin, x.flip(1)), y) or _alike(y, x.sign()):
        return None
    if _alike(_call(twin, x / 1000), x / 1000):  # it leaves short rows as they are, as what clips lengths does
        return None
    if _alike(_call(twin, x + 20), y):
        return "layer"
    width = x.shape[-1]
    for groups in (1, *(count for count in range(2, 257) if width % count == 0 and width // count > 1)):
        rows = x.unflatten(-1, (groups, width // groups))
        rms = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True))
        gamma = (y / rms.flatten(-2)).flatten(0, -2)
        if _alike(gamma, gamma[:1].expand_as(gamma)):
            has_weight = any(tensor is not None for tensor in (*twin._parameters.values(), *twin._buffers.values()))
            return "length" if not has_weight and _alike(gamma * width**0.5, torch.ones_like(gamma)) else "rms"
    return "other"

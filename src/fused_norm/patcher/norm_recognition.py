"""The recognition of a norm by what it computes.

A replica of the module has its class and attributes, and a small random weight on the CPU in place of the real one,
which is never read: it may be on meta, sharded or offloaded. The replica is compared with the reference formulas bit
for bit, for pairs of input and weight dtypes, and again with another eps. Exactly one formula must match.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..kernels import reference
from ..kernels.arguments import GATES
from ..kernels.gated_rms_norm import GATED_RMS_NORM
from ..kernels.reference import NormFunctions
from ..spec import CASTINGS, Casting, GatedNormSpec, NormSpec
from .probe import (
    DTYPES,
    Case,
    NotTakenError,
    Recognizer,
    UnrecognisedError,
    agrees_in_gradients,
    cpu_replica,
    found_once,
    key_of_module,
    own_attributes,
    plain_pytorch,
    strict,
)
from .source import names_in, parameters_of

_PAIRS = (*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
          (torch.float32, torch.bfloat16))  # fmt: skip
_OTHER_EPS = 0.25
_WEIGHTLESS_CASTINGS: tuple[Casting, ...] = ("llama", "rounded_rstd", "none")  # the others are llama without a weight

_RSQRT_VARIANTS = [
    NormFunctions(root, apply_root, torch.ops.aten.silu.default)
    for root, apply_root in (
        (torch.rsqrt, torch.mul),
        (lambda value: value.pow(-0.5), torch.mul),
        (lambda value: 1.0 / value.sqrt(), torch.mul),
        (torch.sqrt, torch.div),
    )
]
"""How modelling code computes ``x * v ** -0.5``: the root and what is done with it. The last bit of an fp32 differs."""


@dataclass(frozen=True)
class Recognised:
    """The meaning of a norm, and the attribute that holds its eps."""

    spec: NormSpec
    eps_name: str


_SUBTRACTS_MEAN = "subtracts a mean, so it is no RMSNorm"


def looks_like_norm(module: nn.Module) -> bool:
    """Return whether a module is called a norm, or holds one weight and an eps, as norms do; it gets a row then."""
    if isinstance(module, torch.jit.ScriptModule):  # no Python runs in it
        return False
    if "norm" in type(module).__name__.lower():
        return True
    weights = list(module._parameters) or list(module._buffers)
    if weights != ["weight"] or module._modules:
        return False
    return any("eps" in name and issubclass(type(value), float) for name, value in own_attributes(module).items())


def subtracts_mean(module: nn.Module) -> bool:
    """Return whether a module is one of PyTorch's norms that subtract a mean."""
    return isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase))


def recognise(module: nn.Module) -> Recognised:
    """Return the formula that ``module`` computes.

    Raises:
        UnrecognisedError: if it computes no known formula, or cannot be run to find out.
    """
    _check_structure(module)
    weight = "weight" in module._buffers, _weight_of(module) is not None, _width(module)
    names = *module._parameters, None, *module._buffers
    key = recognise, key_of_module(type(module), own_attributes(module)), weight, names
    return found_once(lambda: _compare_with_formulas(module), *key)


def _check_structure(module: nn.Module) -> None:
    """Raise UnrecognisedError for anything that a plain RMSNorm does not have."""
    if subtracts_mean(module):
        raise UnrecognisedError(_SUBTRACTS_MEAN)
    if module._modules:
        raise UnrecognisedError(f"has modules of its own: {', '.join(module._modules)}")
    if others := [name for name, value in module._buffers.items() if value is not None and name != "weight"]:
        raise UnrecognisedError(f"has buffers: {', '.join(others)}")
    if tensors := [name for name, value in vars(module).items() if issubclass(type(value), Tensor)]:
        raise UnrecognisedError(f"holds plain tensors ({', '.join(tensors)}): patch before sharding")
    if others := [name for name, value in module._parameters.items() if value is not None and name != "weight"]:
        raise UnrecognisedError(f"has parameters besides a weight: {', '.join(others)}")
    weight = _weight_of(module)
    if weight is not None and len(_shape(weight)) != 1:
        raise UnrecognisedError(f"its weight has shape {tuple(_shape(weight))}, not one dimension")
    if "is_cuda" in names_in(type(module)):
        raise UnrecognisedError("its forward asks whether it runs on CUDA, and may compute something else there")
    if _is_gated(module):
        return
    parameters = parameters_of(type(module))[1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        names = ", ".join(map(str, parameters)) or "nothing"
        raise UnrecognisedError(f"its forward takes {names}, not just the tensor to normalise")
    if parameters[0].name in ("residual", "scale"):
        raise UnrecognisedError(f"its forward calls its input `{parameters[0].name}`, as a fused norm calls another")


def _is_gated(module: nn.Module) -> bool:
    """Return whether a norm's forward takes two tensors, and calls the second one ``gate``."""
    parameters = parameters_of(type(module))[1:]
    plain = all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    return plain and len(parameters) == 2 and parameters[1].name == "gate"


def _weight_of(module: nn.Module) -> Tensor | None:
    """The parameter or buffer called ``weight``."""
    weight = module._parameters.get("weight")
    return module._buffers.get("weight") if weight is None else weight


def _shape(weight: Tensor) -> torch.Size:
    """A parameter's full shape; ZeRO-3 keeps it in ``ds_shape`` while the parameter itself is empty."""
    return getattr(weight, "ds_shape", weight.shape)


def _width(module: nn.Module) -> int:
    weight = _weight_of(module)
    return (torch.Size(getattr(module, "normalized_shape", (64,))) if weight is None else _shape(weight)).numel()


@plain_pytorch()
def _compare_with_formulas(module: nn.Module) -> Recognised:
    matches: dict[NormSpec, str] = {}
    names = [name for name, value in vars(module).items() if issubclass(type(value), float)]
    for name in names:
        eps = getattr(module, name)
        recognizer = Recognizer[tuple[NormSpec, NormFunctions]](_cases(module, name, eps), _formula)
        for spec in _candidates(module, eps):
            # Under these castings the root is rounded, and so it matters which root it is.
            rounds_root = spec.casting in ("rounded_rstd", "none")
            variants = [variant for variant in _RSQRT_VARIANTS if variant.apply_root is torch.mul or not rounds_root]
            if any(recognizer.agrees((spec, variant)) for variant in variants):
                matches[spec] = name
    if not matches:
        reason = "computes none of the known formulas" if names else "has no eps among its attributes"
        raise UnrecognisedError(_SUBTRACTS_MEAN if _ignores_offsets(module) else reason)
    if len(matches) > 1:
        raise UnrecognisedError(f"several formulas fit it: {'; '.join(map(str, matches))}")
    ((spec, name),) = matches.items()
    if not _has_gradients_of(module, name, spec):
        raise UnrecognisedError("differs from its formula where gradients are needed")
    return Recognised(replace(spec, casts_weight=_casts_weight(module, name, spec)), name)


def _ignores_offsets(module: nn.Module) -> bool:
    """Return whether a module is a LayerNorm of its own: what is added to all of a row changes no result."""
    with suppress(Exception):  # a foreign forward may raise anything
        x, weight = next(pair for pair in _samples(module) if pair[0].dtype == torch.float32)
        replica = _replica(module, weight, training=False)
        results = [_call(replica, x.dim(), *_inputs(rows, _is_gated(module))[0]) for rows in (x, x + 3)]
        y, shifted = (result[0, 0] for result in results)  # a row of numbers of about one
        return torch.allclose(y, shifted, atol=1e-3) and not torch.allclose(y, y.flip(-1), atol=1e-1)
    return False


def _candidates(module: nn.Module, eps: float) -> Iterator[NormSpec]:
    """Every meaning of a norm. Some attribute of one with a gate is the number or the width of its groups."""
    width, weighted = _width(module), _weight_of(module) is not None
    if _is_gated(module):
        numbers = {value for value in vars(module).values() if type(value) is int and value > 0 and width % value == 0}
        groups = sorted({1} | numbers | {width // number for number in numbers})
        castings: tuple[Casting, ...] = ("llama", "gemma")
        for casting, activation, norm_first, count in itertools.product(castings, GATES, (True, False), groups):
            for zero_centered in (False, True) if weighted else (False,):
                if weighted or norm_first or casting == "llama":  # after the gate, without a weight, gemma is llama
                    group_width = width if count > 1 else 0
                    yield GatedNormSpec(
                        casting, zero_centered, weighted, eps, activation, norm_first, count, group_width
                    )
        return
    if module._parameters.get("weight") is None:  # a weight that is a buffer may be for others to read
        yield from (NormSpec(casting, weighted=False, eps=eps) for casting in _WEIGHTLESS_CASTINGS)
    if weighted:
        for casting, zero_centered in itertools.product(CASTINGS, (False, True)):
            if zero_centered or casting != "rounded_gamma":  # there is nothing to round, and it is gemma
                yield NormSpec(casting, zero_centered=zero_centered, eps=eps)


def _has_gradients_of(module: nn.Module, eps_name: str, spec: NormSpec) -> bool:
    """Return whether the module's gradients are those of the formula."""
    with torch.enable_grad():
        x, weight = next(_samples(module))
        # Rows without huge values.
        inputs = [tensor[:1, :4].repeat(2, 1, 1) for tensor in _inputs(x, isinstance(spec, GatedNormSpec))[0]]
        replica = _replica(module, weight, training=True, **{eps_name: _OTHER_EPS})
        for name, parameter in list(replica.named_parameters()):
            setattr(replica, name, strict(parameter.requires_grad_()))
        for name, buffer in list(replica.named_buffers()):
            replica._buffers[name] = strict(buffer)
        parameters = list(replica.parameters())
        formula = partial(_formula, (spec, _RSQRT_VARIANTS[0]), (*parameters, weight)[0], _OTHER_EPS)
        return agrees_in_gradients(partial(type(module).forward, replica), formula, inputs, parameters)


def _casts_weight(module: nn.Module, eps_name: str, spec: NormSpec) -> bool:
    """Return whether the module's backward reads a cast copy of a 16-bit weight, not the weight itself."""
    if not spec.weighted or spec.casting not in ("gemma", "rounded_gamma"):
        return True
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda packed: packed):
        x, weight = next(pair for pair in _samples(module) if pair[0].dtype == torch.bfloat16)
        replica = _replica(module, weight, training=True, **{eps_name: spec.eps})
        _call(replica, x.dim(), *_inputs(x.requires_grad_(), isinstance(spec, GatedNormSpec))[0])
    assert weight is not None
    return weight.untyped_storage().data_ptr() not in saved


def _cases(module: nn.Module, eps_name: str, eps: float) -> Iterator[Case]:
    """Calls of the module's replica, in both modes and with two values of its eps; formulas take weight and eps."""
    is_gated = _is_gated(module)
    samples = [(x, weight, _inputs(x, is_gated)) for x, weight in _samples(module)]
    for value, training in ((eps, True), (eps, False), (_OTHER_EPS, False)):
        for shape in range(len(samples[0][2])):
            for x, weight, inputs in samples:  # first what tells most formulas apart, so that few cases are needed
                replica = _replica(module, weight, training=training, **{eps_name: value})
                yield Case(partial(_call, replica, x.dim()), inputs[shape], (weight, value))


def _samples(module: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs and weights that tell formulas apart: plain, tiny (eps counts), large, zero, huge and not finite rows.

    In fp16 huge rows are clamped to what has a square there.
    """
    generator = torch.Generator().manual_seed(0)
    width, weighted = _width(module), _weight_of(module) is not None
    rows = max(8, 2048 // max(width, 1) // 8 * 8)
    scale = torch.tensor([1.0, 1e-3, 16.0, 0.0, 1e-6, 1e6, 1.0, 1.0]).repeat(rows // 8)[:, None]
    base = torch.randn(rows, width, generator=generator, dtype=torch.float32) * scale
    base_weight = torch.randn(width, generator=generator, dtype=torch.float32) * 0.5 + 0.3
    for x_dtype, weight_dtype in _PAIRS if weighted else ((dtype, dtype) for dtype in DTYPES):
        x = (base.clamp(-200, 200) if x_dtype == torch.float16 else base).to(x_dtype)
        x[6::8, 0], x[7::8, 0] = torch.inf, torch.nan
        yield x.unflatten(0, (2, -1)), base_weight.to(weight_dtype) if weighted else None


def _inputs(x: Tensor, is_gated: bool) -> list[tuple[Tensor, ...]]:
    """The arguments of calls, in several shapes: x with more or fewer dimensions; or x and a gate, in many rows."""
    if not is_gated:
        return [(x,), (x.flatten(0, 1),), (x.unflatten(1, (2, -1)),)]
    gate = 2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return [(x, gate.to(x.dtype)), (x.flatten(0, 1)[:, None], gate.flatten(0, 1)[:, None])]


def _formula(meaning: tuple[NormSpec, NormFunctions], weight: Tensor | None, eps: float, *inputs: Tensor) -> Tensor:
    """The result of the formula, with this eps in place of its own."""
    spec, variant = meaning
    spec = spec if spec.eps == eps else replace(spec, eps=eps)
    weight = weight if spec.weighted else None
    if not isinstance(spec, GatedNormSpec):
        return reference.rms_norm(spec, inputs[0], weight, functions=variant)
    x, gate = inputs
    how = spec.activation, spec.norm_before_gate, spec.groups
    return GATED_RMS_NORM.reference(x, gate, weight, spec, *how, functions=variant)


def _call(replica: nn.Module, usual_dim: int, *inputs: Tensor) -> Tensor:
    """The result of the replica's forward.

    Raises:
        UnrecognisedError: if it is no norm's; if the forward raises, for a tensor of ``usual_dim`` dimensions.
        NotTakenError: if the forward raises for another number of dimensions.
    """
    try:
        y = type(replica).forward(replica, *inputs)
    except Exception as error:  # a foreign forward may raise anything
        if inputs[0].dim() != usual_dim:
            raise NotTakenError from error
        raise UnrecognisedError(f"cannot be run on its own: {type(error).__name__}: {error}") from error
    if not isinstance(y, Tensor):
        raise UnrecognisedError(f"returns {type(y).__name__}, not one tensor")
    if len(inputs) > 1 and y.shape != inputs[0].shape:
        raise UnrecognisedError(f"returns shape {tuple(y.shape)} for a tensor of shape {tuple(inputs[0].shape)}")
    return y


def _replica(module: nn.Module, weight: Tensor | None, *, training: bool, **attributes: float) -> nn.Module:
    """A copy of the module without its tensors, hooks and instance forward, with this weight and these attributes."""
    parameters: dict[str, nn.Parameter | None] = dict.fromkeys(module._parameters)
    buffers: dict[str, Tensor | None] = dict.fromkeys(module._buffers)
    if "weight" in buffers:
        buffers["weight"] = weight
    elif weight is not None:
        parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    own = {"_parameters": parameters, "_buffers": buffers, "training": training}
    return cpu_replica(type(module), {**own_attributes(module), **own, **attributes})

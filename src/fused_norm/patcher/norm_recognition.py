"""The recognition of a norm by what it computes.

A replica of the module (same class, same attributes, small random CPU weight in place of the real one, which is never
read: it may be on meta, sharded or offloaded) is run against the reference formulas, bit for bit, over pairs of input
and weight dtypes, and again with another eps. Exactly one formula must match.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..kernels import reference
from ..kernels.arguments import GATES
from ..kernels.reference import Spelling
from ..spec import CASTINGS, Casting, GatedNormSpec, NormSpec
from .probe import (
    DTYPES,
    Case,
    NotTakenError,
    Outcomes,
    Recognizer,
    UnrecognisedError,
    agrees_in_gradients,
    cpu_replica,
    plain_pytorch,
    watched,
)
from .reached_code import own_attributes, reached_by
from .source import names_in

_PAIRS = (*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
          (torch.float32, torch.bfloat16))  # fmt: skip
_OTHER_EPS = 0.25
_WEIGHTLESS_CASTINGS: tuple[Casting, ...] = ("llama", "rounded_rstd", "none")  # the others are llama without a weight

_SPELLINGS = [
    Spelling(root, by, torch.ops.aten.silu.default)
    for root, by in (
        (torch.rsqrt, torch.mul),
        (lambda value: value.pow(-0.5), torch.mul),
        (lambda value: 1.0 / value.sqrt(), torch.mul),
        (torch.sqrt, torch.div),
    )
]
"""Spellings of ``x * v ** -0.5`` in modelling code, the root and what is done with it, which differ in the last place
of an fp32."""


@dataclass(frozen=True)
class Recognised:
    """The meaning of a norm, and the attribute that holds its eps."""

    spec: NormSpec
    eps_name: str


_outcomes: Outcomes[Recognised] = Outcomes()


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
        UnrecognisedError: where it computes none of those known here, or cannot be run to find out.
    """
    _check_structure(module)
    width, held = _width(module), ("weight" in module._buffers, _held_weight(module) is not None)
    return _outcomes.get_or_compute(reached_by(module), (width, held), lambda: _compare_with_formulas(module))


def _are_x_and_gate(arguments: list[inspect.Parameter]) -> bool:
    """Return whether a norm's forward takes two tensors, and calls the second one ``gate``."""
    plain = all(argument.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for argument in arguments)
    return plain and len(arguments) == 2 and arguments[1].name == "gate"


def _arguments_of(module: nn.Module) -> list[inspect.Parameter]:
    """The arguments of a module's forward."""
    return list(inspect.signature(type(module).forward).parameters.values())[1:]


def _compare_with_formulas(module: nn.Module) -> Recognised:
    matches: dict[NormSpec, str] = {}
    names = [name for name, value in vars(module).items() if issubclass(type(value), float)]
    if not names:
        raise UnrecognisedError("has no eps among its attributes")
    gated = _are_x_and_gate(_arguments_of(module))
    for name in names:
        eps = getattr(module, name)
        recognizer = Recognizer[tuple[NormSpec, Spelling]](_cases(module, name, eps, gated), _expected)
        for spec in _gated_candidates(module, eps) if gated else _candidates(module, eps):
            # Under these castings the root is rounded, and so it matters which root it is.
            rounds_root = spec.casting in ("rounded_rstd", "none")
            spellings = [one for one in _SPELLINGS if one.by is torch.mul or not rounds_root]
            if any(recognizer.agrees((spec, spelling)) for spelling in spellings):
                matches[spec] = name
    if not matches:
        raise UnrecognisedError("computes none of the known formulas")
    if len(matches) > 1:
        raise UnrecognisedError(f"several formulas fit it: {'; '.join(map(str, matches))}")
    ((spec, name),) = matches.items()
    if not _has_gradients_of(module, name, spec):
        raise UnrecognisedError("differs from its formula where gradients are needed")
    return Recognised(replace(spec, casts_weight=_casts_weight(module, name, spec)), name)


def _check_structure(module: nn.Module) -> None:
    """Raise UnrecognisedError for anything that a plain RMSNorm does not have."""
    if subtracts_mean(module):
        raise UnrecognisedError(f"{type(module).__name__} subtracts a mean, so it is no RMSNorm")
    if module._modules:
        raise UnrecognisedError(f"has modules of its own: {', '.join(module._modules)}")
    if others := [name for name, value in module._buffers.items() if value is not None and name != "weight"]:
        raise UnrecognisedError(f"has buffers: {', '.join(others)}")
    if tensors := [name for name, value in vars(module).items() if issubclass(type(value), Tensor)]:
        raise UnrecognisedError(f"holds plain tensors ({', '.join(tensors)}): patch before sharding")
    if others := [name for name, value in module._parameters.items() if value is not None and name != "weight"]:
        raise UnrecognisedError(f"has parameters besides a weight: {', '.join(others)}")
    weight = _held_weight(module)
    if weight is not None and len(_shape(weight)) != 1:
        raise UnrecognisedError(f"its weight has shape {tuple(_shape(weight))}, not one dimension")
    if "is_cuda" in names_in(type(module)):
        raise UnrecognisedError("its forward asks whether it runs on CUDA, and may compute something else there")
    arguments = _arguments_of(module)
    if _are_x_and_gate(arguments):
        return
    if len(arguments) != 1 or arguments[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        names = ", ".join(str(argument) for argument in arguments) or "nothing"
        raise UnrecognisedError(f"its forward takes {names}, not just the tensor to normalise")
    if arguments[0].name in ("residual", "scale"):
        raise UnrecognisedError(f"its forward calls its input `{arguments[0].name}`, as a fused norm calls another")


def _held_weight(module: nn.Module) -> Tensor | None:
    """The parameter or buffer called ``weight``."""
    weight = module._parameters.get("weight")
    return module._buffers.get("weight") if weight is None else weight


def _shape(weight: Tensor) -> torch.Size:
    """A parameter's full shape; ZeRO-3 keeps it in ``ds_shape`` while the parameter itself is empty."""
    return getattr(weight, "ds_shape", weight.shape)


def _width(module: nn.Module) -> int:
    weight = _held_weight(module)
    if weight is not None:
        return _shape(weight).numel()
    return torch.Size(getattr(module, "normalized_shape", (64,))).numel()


def _candidates(module: nn.Module, eps: float) -> Iterator[NormSpec]:
    """Every meaning of a norm. A weight that is a buffer may be there for others to read, and no part of it."""
    if module._parameters.get("weight") is None:
        yield from (NormSpec(casting, weighted=False, eps=eps) for casting in _WEIGHTLESS_CASTINGS)
    if _held_weight(module) is not None:
        for casting, zero_centered in itertools.product(CASTINGS, (False, True)):
            if zero_centered or casting != "rounded_gamma":  # there is nothing to round, and it is gemma
                yield NormSpec(casting, zero_centered=zero_centered, eps=eps)


def _gated_candidates(module: nn.Module, eps: float) -> Iterator[GatedNormSpec]:
    """Every meaning of a norm with a gate; its groups are as many, or as wide, as some attribute says."""
    width, weighted = _width(module), _held_weight(module) is not None
    numbers = {value for value in vars(module).values() if type(value) is int and value > 0 and width % value == 0}
    groups = sorted({1} | numbers | {width // number for number in numbers})
    castings: tuple[Casting, ...] = ("llama", "gemma")
    for casting, activation, first, count in itertools.product(castings, GATES, (True, False), groups):
        for zero_centered in (False, True) if weighted else (False,):
            if weighted or first or casting == "llama":  # behind the gate, without a weight, gemma is llama
                groups_of = count, width if count > 1 else 0
                yield GatedNormSpec(casting, zero_centered, weighted, eps, activation, first, *groups_of)


def _has_gradients_of(module: nn.Module, eps_name: str, spec: NormSpec) -> bool:
    """Return whether the module's gradients are those of the formula."""
    with plain_pytorch(gradients=True):
        x, weight = next(_samples(module))
        given = [one[:1, :4].repeat(2, 1, 1) for one in _inputs(isinstance(spec, GatedNormSpec), x)[0]]  # no huge rows
        replica = _replica(module, weight, eps_name, _OTHER_EPS, training=True)
        for name, parameter in list(replica.named_parameters()):
            setattr(replica, name, watched(parameter.requires_grad_()))
        for name, buffer in list(replica.named_buffers()):
            replica._buffers[name] = watched(buffer)
        learnt = list(replica.parameters())
        formula = partial(_expected, (spec, _SPELLINGS[0]), (*learnt, weight)[0], _OTHER_EPS)
        return agrees_in_gradients(partial(type(module).forward, replica), formula, given, learnt)


def _casts_weight(module: nn.Module, eps_name: str, spec: NormSpec) -> bool:
    """Return whether the module's backward reads something that it made of a 16-bit weight, not the weight itself."""
    if not spec.weighted or spec.casting not in ("gemma", "rounded_gamma"):
        return True
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with plain_pytorch(gradients=True), saved_tensors_hooks(pack, lambda packed: packed):
        x, weight = next(pair for pair in _samples(module) if pair[0].dtype == torch.bfloat16)
        replica = _replica(module, weight, eps_name, spec.eps, training=True)
        gated = isinstance(spec, GatedNormSpec)
        _called(replica, gated, x.dim(), *_inputs(gated, x.requires_grad_())[0])
    assert weight is not None
    memory = weight.untyped_storage().data_ptr()
    return all(one.untyped_storage().data_ptr() != memory for one in saved)


def _cases(module: nn.Module, eps_name: str, eps: float, gated: bool) -> Iterator[Case]:
    """Calls of the module's replica, in both modes and with two values of its eps; formulas take weight and eps."""
    samples = [(x, weight, _inputs(gated, x)) for x, weight in _samples(module)]
    for value, training in ((eps, True), (eps, False), (_OTHER_EPS, False)):
        for place in range(len(samples[0][2])):
            for x, weight, inputs in samples:  # which tell most formulas apart, so that few cases are needed
                replica = _replica(module, weight, eps_name, value, training)
                yield Case(partial(_called, replica, gated, x.dim()), inputs[place], (weight, value))


def _inputs(gated: bool, x: Tensor) -> list[tuple[Tensor, ...]]:
    """The arguments of calls: x, and a gate if there is one; in others x has more dimensions, or fewer.

    Of x with a gate, other calls have many rows of one token each.
    """
    if not gated:
        return [(x,), (x.flatten(0, 1),), (x.unflatten(1, (2, -1)),)]
    gate = 2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return [(x, gate.to(x.dtype)), (x.flatten(0, 1)[:, None], gate.flatten(0, 1)[:, None])]


def _expected(meaning: tuple[NormSpec, Spelling], weight: Tensor | None, eps: float, *given: Tensor) -> Tensor:
    """The result of the formula, with this eps in place of its own."""
    spec, spelling = meaning
    spec, weight = replace(spec, eps=eps), weight if spec.weighted else None
    if not isinstance(spec, GatedNormSpec):
        return reference.rms_norm(spec, given[0], weight, spelling=spelling)
    x, gate = given
    how = spec.activation, spec.norm_before_gate, spec.groups
    return reference.gated_rms_norm(spec, x, gate, weight, *how, spelling)


def _called(replica: nn.Module, gated: bool, usual: int, *given: Tensor) -> Tensor:
    """The result of the replica's forward.

    Raises:
        UnrecognisedError: where it is no norm's; where it raises, for a tensor of the ``usual`` number of dimensions.
        NotTakenError: where it raises for another.
    """
    try:
        y = type(replica).forward(replica, *given)
    except Exception as error:  # a foreign forward may raise anything
        if given[0].dim() != usual:
            raise NotTakenError from error
        raise UnrecognisedError(f"cannot be run on its own: {type(error).__name__}: {error}") from error
    if not isinstance(y, Tensor):
        raise UnrecognisedError(f"returns {type(y).__name__}, not one tensor")
    if gated and y.shape != given[0].shape:
        raise UnrecognisedError(f"returns shape {tuple(y.shape)} for a tensor of shape {tuple(given[0].shape)}")
    return y


def _samples(module: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs and weights that tell formulas apart: plain, tiny (eps counts), large, zero, huge and not finite rows.

    In fp16 huge rows are cut to what has a square there.
    """
    generator = torch.Generator().manual_seed(0)
    width, weighted = _width(module), _held_weight(module) is not None
    rows = max(8, 2048 // max(width, 1) // 8 * 8)
    scale = torch.tensor([1.0, 1e-3, 16.0, 0.0, 1e-6, 1e6, 1.0, 1.0]).repeat(rows // 8)[:, None]
    base = torch.randn(rows, width, generator=generator, dtype=torch.float32) * scale
    base_weight = torch.randn(width, generator=generator, dtype=torch.float32) * 0.5 + 0.3
    for x_dtype, weight_dtype in _PAIRS if weighted else ((dtype, dtype) for dtype in DTYPES):
        x = (base.clamp(-200, 200) if x_dtype == torch.float16 else base).to(x_dtype)
        x[6::8, 0], x[7::8, 0] = torch.inf, torch.nan
        yield x.unflatten(0, (2, -1)), base_weight.to(weight_dtype) if weighted else None


def _replica(module: nn.Module, weight: Tensor | None, eps_name: str, eps: float, training: bool) -> nn.Module:
    """A copy of the module without its tensors, hooks and instance forward, with this weight and this eps."""
    parameters: dict[str, nn.Parameter | None] = dict.fromkeys(module._parameters)
    buffers: dict[str, Tensor | None] = dict.fromkeys(module._buffers)
    if "weight" in buffers:
        buffers["weight"] = weight
    elif weight is not None:
        parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    given = {"_parameters": parameters, "_buffers": buffers, "training": training, eps_name: eps}
    return cpu_replica(type(module), {**own_attributes(module), **given})

"""The implementations that are measured: fused_norm and its peers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fused_norm import kernels
from fused_norm.kernels import fp8
from fused_norm.spec import NormSpec

from .operator_cases import OPERATORS, OperatorCase, OperatorFunction, eager_parts, fused
from .results import RefusedError

Norm = Callable[[Tensor, Tensor], Tensor]
"""From x and w to y."""

OwnParts = Mapping[str, Callable[..., Any]]
"""The parts that a peer has kernels for, by the names of ``Parts``."""


@dataclass(frozen=True)
class Provider:
    """One implementation of the operators.

    Attributes:
        name: in options and tables.
        build: makes the function of a case, which returns a tuple of outputs; that of an ``OperatorCase`` takes the
            tensors of a call, that of a ``LossCase`` its ``LossInputs``. It, or the function, raises ``RefusedError``
            for a case that is not taken.
        package: the package that must be importable.
        on_cpu: it runs if there is no GPU.
        overwrites_gradients: its backward writes into the gradient that it is given.
        overwrites_arguments: the operators in which it writes over its arguments, and gets copies of them.
    """

    name: str
    build: Callable[[Any], Callable[..., Any]]
    package: str = "torch"
    on_cpu: bool = True
    overwrites_gradients: bool = False
    overwrites_arguments: tuple[str, ...] = ()

    def missing(self, device: torch.device) -> str | None:
        """The reason why it cannot be measured on ``device``, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if device.type == "cpu" and not self.on_cpu:
            return "needs a GPU"
        return None


def _peer(own_parts: Callable[[OperatorCase], OwnParts]) -> Callable[[OperatorCase], OperatorFunction]:
    """What builds a case from a peer's own parts, and from eager ones if it has none.

    A case whose own part the peer lacks is refused: that would be ``stock``.
    """

    def build(case: OperatorCase) -> OperatorFunction:
        operator, own = OPERATORS[case.operator], own_parts(case)
        if operator.part not in own:
            raise RefusedError(f"it has no {operator.part.replace('_', ' ')} of its own for {case.operator}")
        parts: Any = {name: part for name, part in own.items() if name != "cast"}
        function = operator.made_of(replace(eager_parts(case), **parts))

        def run_and_cast(*arguments: Tensor) -> tuple[Any, ...]:
            y, *rest = function(*arguments)
            return own["cast"](y), *rest

        return run_and_cast if case.fp8_format else function

    return build


def _stock(case: OperatorCase) -> OwnParts:
    """The formula as in the modelling code of transformers, in eager steps, followed by torchao's cast to FP8."""
    return vars(eager_parts(case)) | ({"cast": _torchao_cast(case)} if case.fp8_format else {})


def _torchao_cast(case: OperatorCase) -> Callable[[Tensor], fp8.Quantized]:
    """The cast of torchao to the format of a case."""
    name = case.option
    if importlib.util.find_spec("torchao") is None or name not in ("tensorwise", "rowwise", "block128", "mxfp8"):
        raise RefusedError(f"torchao has no cast {name} here")
    from torchao.float8.float8_scaling_utils import ScalingGranularity, hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.blockwise_fp8_training import kernels as blockwise
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    fp8_format = fp8.FORMATS[name]
    granularity = ScalingGranularity.AXISWISE if name == "rowwise" else ScalingGranularity.TENSORWISE

    def cast(y: Tensor) -> fp8.Quantized:
        if name == "block128":
            kind = "triton_fp8_blockwise_act_quant_lhs" if y.is_cuda else "torch_blockwise_scale_act_quant_lhs"
            q, scale = getattr(blockwise, kind)(y)
        elif name == "mxfp8":  # which torchao makes of bf16 and fp32 alone
            y = y.float() if y.dtype == torch.float16 else y
            scale, q = to_mx(y, torch.float8_e4m3fn, 32, is_swizzled_scales=True)
        else:
            quantised = hp_tensor_to_float8_dynamic(
                y, torch.float8_e4m3fn, LinearMMConfig(), scaling_granularity=granularity,
                axiswise_dim=-1 if name == "rowwise" else None,
                round_scales_to_power_of_2=fp8_format.power_of_2,
            )  # fmt: skip
            q, scale = quantised._data, quantised._scale.reciprocal()
        return fp8.Quantized(q, scale, fp8_format)

    return cast


def torch_norm(spec: NormSpec) -> Norm:
    """The norm of PyTorch."""
    return lambda x, w: functional.rms_norm(x, w.shape, 1.0 + w if spec.zero_centered else w, spec.eps)


def _torch(case: OperatorCase) -> OwnParts:
    norm = torch_norm(case.spec)

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = r + x
        return norm(s, w), s

    return {"norm": norm, "add_norm": add_norm}


def _compile(case: OperatorCase) -> OperatorFunction:
    torch.compiler.reset()  # Other cases would count as recompilations, of which there is a limit.
    return torch.compile(_peer(_stock)(case), dynamic=False)


def liger_norm(spec: NormSpec, *, in_place: bool) -> Norm:
    """The norm of Liger; ``in_place``: its backward writes over the gradient that it is given."""
    from liger_kernel.ops import LigerRMSNormFunction

    return lambda x, w: LigerRMSNormFunction.apply(x, w, spec.eps, float(spec.zero_centered), spec.casting, in_place)


def _liger(case: OperatorCase) -> OwnParts:
    from liger_kernel.ops import (
        LigerFusedAddRMSNormFunction,
        LigerGELUMulFunction,
        LigerRopeFunction,
        LigerSiLUMulFunction,
    )

    spec = case.spec
    # As Liger patches models: in place, which is fastest, unless the gradient that it is given is needed again.
    norm = liger_norm(spec, in_place=case.operator not in ("norm_add", "norm_add_norm"))

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return LigerFusedAddRMSNormFunction.apply(x, r, w, spec.eps, float(spec.zero_centered), spec.casting, False)

    copies: dict[int, Tensor] = {}

    def own(x: Tensor) -> Tensor:
        """A copy to write over, made before anything is timed: by the first forward, or the one of a backward."""
        if torch.is_grad_enabled():
            return x.clone()
        if x.data_ptr() not in copies:
            copies[x.data_ptr()] = x.clone()
        return copies[x.data_ptr()]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if case.operator == "rope":  # in place, if there is no norm before it
            q, k = own(q), own(k)
        return LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    def gate(gate: Tensor, up: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # the backward writes its gradients over both
            gate, up = own(gate), own(up)
        function = LigerSiLUMulFunction if case.option == "silu" else LigerGELUMulFunction
        return function.apply(gate, up)

    return {"norm": norm, "add_norm": add_norm, "rotate": rotate, "gate": gate}


def _quack(case: OperatorCase) -> OwnParts:
    from quack.rmsnorm import rmsnorm

    eps, offset = case.spec.eps, float(case.spec.zero_centered)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return rmsnorm(x, w, eps=eps, weight_offset=offset)

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return rmsnorm(x, w, residual=r, eps=eps, prenorm=True, weight_offset=offset)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from quack.rotary import apply_rotary_emb

        half = cos[0, :, : cos.shape[-1] // 2], sin[0, :, : sin.shape[-1] // 2]
        return apply_rotary_emb(q, *half).transpose(1, 2), apply_rotary_emb(k, *half).transpose(1, 2)

    return {"norm": norm, "add_norm": add_norm, "rotate": rotate}


def _in_mode(mode: str) -> Callable[[OperatorCase], OperatorFunction]:
    def build(case: OperatorCase) -> OperatorFunction:
        if case.operator != "rms_norm":
            raise RefusedError(f"modes are compared on rms_norm alone, not on {case.operator}")

        def run(x: Tensor, w: Tensor) -> tuple[Tensor]:
            try:
                return (kernels.rms_norm(x, w, **case.semantics, mode=mode),)
            except ValueError as refusal:
                raise RefusedError(str(refusal)) from refusal

        return run

    return build


FUSED = Provider("fused", fused)
_ON_GPU = partial(Provider, on_cpu=False)
PEERS = (
    Provider("stock", _peer(_stock)),
    Provider("torch", _peer(_torch)),
    _ON_GPU("compile", _compile),
    _ON_GPU("liger", _peer(_liger), "liger_kernel", overwrites_gradients=True, overwrites_arguments=("rope", "glu")),
    _ON_GPU("quack", _peer(_quack), "quack"),
)
PROVIDERS = {provider.name: provider for provider in (*PEERS, FUSED)}
"""In the order of tables."""

EVERY = PROVIDERS | {mode: Provider(mode, _in_mode(mode)) for mode in kernels.MODES}
"""All that can be named: the modes of the forward of ``rms_norm`` too."""

OURS = (FUSED.name, *kernels.MODES)

PACKAGES = {"liger_kernel": "liger-kernel", "quack": "quack-kernels", "torchao": "torchao"}
_LIGER_IMPLEMENTATION = "LIGER_KERNEL_IMPL"  # Liger reads it at its import and at calls: a choice for a whole run.


def peer_versions() -> dict[str, str]:
    """The installed versions of the peers, by distribution, and the implementation that Liger is asked for."""
    versions = {}
    for package, distribution in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            versions[distribution] = "not installed"
            continue
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:  # A folder on the path, without metadata.
            versions[distribution] = "of unknown version"
    return versions | {_LIGER_IMPLEMENTATION: os.environ.get(_LIGER_IMPLEMENTATION, "not set")}

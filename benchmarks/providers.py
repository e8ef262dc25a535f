"""The implementations that are measured: fused_norm and its peers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fused_norm import kernels

from .operator_cases import OperatorCase, OperatorFunction, OperatorName, compose_operator


@dataclass(frozen=True)
class Provider:
    """One implementation of the operators.

    Attributes:
        name: in options and tables.
        build: makes the function of a case, from the arguments of a call to a tuple of outputs.
        package: the package that must be importable.
        on_cpu: it runs where there is no GPU.
        compiles: it compiles for each case.
        overwrites_gradients: its backward writes into the gradient that it is given.
        overwrites_arguments: the operators in which it writes over its arguments, and gets copies of them.
        refuses: the errors that it raises for a case that it does not take.
    """

    name: str
    build: Callable[[OperatorCase], OperatorFunction]
    package: str = "torch"
    on_cpu: bool = True
    compiles: bool = False
    overwrites_gradients: bool = False
    overwrites_arguments: tuple[OperatorName, ...] = ()
    refuses: tuple[type[Exception], ...] = ()

    def missing(self, device: torch.device) -> str | None:
        """The reason why it cannot be measured on ``device``, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if device.type == "cpu" and not self.on_cpu:
            return "needs a GPU"
        return None


_NEW_TO_PEERS: tuple[OperatorName, ...] = ("gated", "gate-first", "fp8", "fp8-add", "fp8-columns")


def _stock(case: OperatorCase) -> OperatorFunction:
    """The formula as in the modelling code of transformers, in eager steps."""
    eps = case.spec.eps

    def llama(x: Tensor, w: Tensor) -> Tensor:
        x_hat = x.to(torch.float32)
        x_hat = x_hat * torch.rsqrt(x_hat.pow(2).mean(-1, keepdim=True) + eps)
        return w * x_hat.to(x.dtype)

    def gemma(x: Tensor, w: Tensor) -> Tensor:
        x_hat = x.float()
        x_hat = x_hat * torch.rsqrt(x_hat.pow(2).mean(-1, keepdim=True) + eps)
        return (x_hat * (1.0 + w.float())).type_as(x)

    norm = gemma if case.spec.casting == "gemma" else llama

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = r + x
        return norm(s, w), s

    operator = compose_operator(case.operator, norm, add_norm)
    return _then_cast(operator, case.recipe, case.operator == "fp8-columns") if case.recipe else operator


def _then_cast(norm: OperatorFunction, name: str, over_rows: bool) -> OperatorFunction:
    """An operator, and torchao's cast of its first output, its scales shared along rows or over them."""
    if importlib.util.find_spec("torchao") is None or name not in ("tensorwise", "rowwise", "block128", "mxfp8"):
        raise NotImplementedError(f"torchao has no cast {name} here")
    from torchao.float8.float8_scaling_utils import ScalingGranularity, hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.blockwise_fp8_training import kernels as blockwise
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    fp8_format = kernels.fp8.FORMATS[name].along_rows() if over_rows else kernels.fp8.FORMATS[name]
    granularity = ScalingGranularity.AXISWISE if name == "rowwise" else ScalingGranularity.TENSORWISE

    def cast(y: Tensor) -> kernels.fp8.Quantized:
        if name == "block128":
            side = "rhs" if over_rows else "lhs"
            kind = f"triton_fp8_blockwise_act_quant_{side}" if y.is_cuda else f"torch_blockwise_scale_act_quant_{side}"
            q, scale = getattr(blockwise, kind)(y)
        elif name == "mxfp8":  # which torchao makes of bf16 and fp32 alone
            y = y.float() if y.dtype == torch.float16 else y
            lines = y.t().contiguous() if over_rows else y
            scale, q = to_mx(lines, fp8_format.dtype, 32, is_swizzled_scales=True)
            q = q.t() if over_rows else q
        else:
            made = hp_tensor_to_float8_dynamic(
                y, fp8_format.dtype, LinearMMConfig(), scaling_granularity=granularity,
                axiswise_dim=(0 if over_rows else -1) if name == "rowwise" else None,
                round_scales_to_power_of_2=fp8_format.power_of_2,
            )  # fmt: skip
            q, scale = made._data, made._scale.reciprocal()
        return kernels.fp8.Quantized(q, scale, fp8_format)

    def run(*arguments: Tensor) -> tuple[Any, ...]:
        y, *rest = norm(*arguments)
        return cast(y), *rest

    return run


def _refuse_others(name: str, case: OperatorCase, *operators: OperatorName) -> None:
    """Raises NotImplementedError for a case that its provider would leave to eager steps, those of ``stock``."""
    if case.operator in operators:
        raise NotImplementedError(f"{name} has no operator of its own for {case.operator}")


def _torch(case: OperatorCase) -> OperatorFunction:
    _refuse_others("torch", case, "rotate", "swiglu", "geglu", *_NEW_TO_PEERS)
    eps, centered = case.spec.eps, case.spec.zero_centered

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return functional.rms_norm(x, w.shape, 1.0 + w if centered else w, eps)

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = r + x
        return norm(s, w), s

    return compose_operator(case.operator, norm, add_norm)


def _compile(case: OperatorCase) -> OperatorFunction:
    torch.compiler.reset()  # Other cases would count as recompilations, of which there is a limit.
    return torch.compile(_stock(case), dynamic=False)


def _liger(case: OperatorCase) -> OperatorFunction:
    from liger_kernel.ops import (
        LigerFusedAddRMSNormFunction,
        LigerGELUMulFunction,
        LigerRMSNormFunction,
        LigerRopeFunction,
        LigerSiLUMulFunction,
    )

    _refuse_others("liger", case, *_NEW_TO_PEERS)
    spec, offset = case.spec, float(case.spec.zero_centered)
    # As Liger patches models: in place, which is fastest, unless the gradient that it is given is needed again.
    in_place = case.operator not in ("post", "sandwich")

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, w, spec.eps, offset, spec.casting, in_place)

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return LigerFusedAddRMSNormFunction.apply(x, r, w, spec.eps, offset, spec.casting, False)

    copies: dict[int, Tensor] = {}

    def own(x: Tensor) -> Tensor:
        """A copy to write over, made before anything is timed: by the first forward, or the one of a backward."""
        if torch.is_grad_enabled():
            return x.clone()
        if x.data_ptr() not in copies:
            copies[x.data_ptr()] = x.clone()
        return copies[x.data_ptr()]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if case.operator == "rotate":  # in place, where there is no norm in front
            q, k = own(q), own(k)
        return LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    def gate(gate: Tensor, up: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # the backward writes its gradients over both
            gate, up = own(gate), own(up)
        function = LigerGELUMulFunction if case.operator == "geglu" else LigerSiLUMulFunction
        return function.apply(gate, up)

    return compose_operator(case.operator, norm, add_norm, rotate, gate)


def _quack(case: OperatorCase) -> OperatorFunction:
    from quack.rmsnorm import rmsnorm

    _refuse_others("quack", case, "swiglu", "geglu", *_NEW_TO_PEERS)
    eps, offset = case.spec.eps, float(case.spec.zero_centered)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return rmsnorm(x, w, eps=eps, weight_offset=offset)

    def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return rmsnorm(x, w, residual=r, eps=eps, prenorm=True, weight_offset=offset)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from quack.rotary import apply_rotary_emb

        half = cos[0, :, : cos.shape[-1] // 2], sin[0, :, : sin.shape[-1] // 2]
        return apply_rotary_emb(q, *half).transpose(1, 2), apply_rotary_emb(k, *half).transpose(1, 2)

    return compose_operator(case.operator, norm, add_norm, rotate)


def _fused(case: OperatorCase) -> OperatorFunction:
    """The operators of this project, one call each."""
    semantics: dict[str, Any] = {
        "eps": case.spec.eps,
        "casting": case.spec.casting,
        "zero_centered": case.spec.zero_centered,
    }
    rstds: dict[int, Tensor] = {}

    def kept(x: Tensor) -> Tensor:
        """The rstd that a forward has kept, made before anything is timed."""
        if x.data_ptr() not in rstds:
            rstd = kernels.fp8.rms_norm_fp8(x, None, fp8_format="rowwise", **semantics).rstd
            assert rstd is not None
            rstds[x.data_ptr()] = rstd
        return rstds[x.data_ptr()]

    operators: dict[OperatorName, OperatorFunction] = {
        "norm": lambda x, w: (kernels.rms_norm(x, w, **semantics),),
        "add": partial(kernels.add_rms_norm, **semantics),
        "post": lambda x, r, w: (kernels.norm_add(x, r, w, **semantics),),
        "sandwich": partial(kernels.norm_add_norm, **semantics),
        "qk": partial(kernels.qk_norm, **semantics),
        "rope": lambda q, k, *rest: kernels.qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), *rest, **semantics),
        "rotate": lambda q, k, *angles: kernels.rope(q.transpose(1, 2), k.transpose(1, 2), *angles),
        "swiglu": lambda gate, up: (kernels.glu(gate, up, "silu"),),
        "geglu": lambda gate, up: (kernels.glu(gate, up, "gelu_tanh"),),
        "gated": lambda x, gate, w: (kernels.gated_rms_norm(x, gate, w, **semantics),),
        "gate-first": lambda x, gate, w: (kernels.gated_rms_norm(x, gate, w, norm_before_gate=False, **semantics),),
        "fp8": lambda x, w: (kernels.fp8.rms_norm_fp8(x, w, fp8_format=case.recipe, **semantics),),
        "fp8-add": partial(kernels.fp8.add_rms_norm_fp8, fp8_format=case.recipe, **semantics),
        "fp8-columns": lambda x, w: (
            kernels.fp8.rms_norm_columns_fp8(x, w, kept(x), fp8_format=case.recipe, **semantics),
        ),
    }
    return operators[case.operator]


def _in_mode(mode: str) -> Callable[[OperatorCase], OperatorFunction]:
    def build(case: OperatorCase) -> OperatorFunction:
        spec = case.spec
        if case.operator != "norm":
            raise ValueError(f"modes are compared on the norm alone, not on {case.operator}")
        return lambda x, w: (
            kernels.rms_norm(x, w, spec.eps, casting=spec.casting, zero_centered=spec.zero_centered, mode=mode),
        )

    return build


FUSED = Provider("fused", _fused, compiles=True)
PEERS = (
    Provider("stock", _stock, refuses=(NotImplementedError,)),
    Provider("torch", _torch, refuses=(NotImplementedError,)),
    Provider("compile", _compile, on_cpu=False, compiles=True, refuses=(NotImplementedError,)),
    Provider(
        "liger",
        _liger,
        "liger_kernel",
        on_cpu=False,
        compiles=True,
        overwrites_gradients=True,
        overwrites_arguments=("rotate", "swiglu", "geglu"),
        refuses=(NotImplementedError,),
    ),
    Provider("quack", _quack, "quack", on_cpu=False, compiles=True, refuses=(NotImplementedError,)),
)
PROVIDERS = {provider.name: provider for provider in (*PEERS, FUSED)}
"""In the order of tables."""

FUSED_MODES = (
    FUSED,
    *(Provider(mode, _in_mode(mode), compiles=True, refuses=(ValueError,)) for mode in kernels.MODES),
)

PACKAGES = {"liger_kernel": "liger-kernel", "quack": "quack-kernels", "torchao": "torchao"}
_LIGER_IMPLEMENTATION = "LIGER_KERNEL_IMPL"  # Liger reads it at its import and at calls: a choice for a whole run.


def peer_versions() -> dict[str, str]:
    """The installed versions of the peers, by distribution, and the implementation that Liger is asked for."""
    found = {}
    for package, distribution in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            found[distribution] = "not installed"
            continue
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:  # A folder on the path, without metadata.
            found[distribution] = "of unknown version"
    return found | {_LIGER_IMPLEMENTATION: os.environ.get(_LIGER_IMPLEMENTATION, "not set")}

"""PEFT's LoRA on parameters of experts, whose sum with the weight is computed again in the backward.

PEFT adds to the weight of all experts, ``[experts, out, in]``, the product of its adapter, and lets the module of
experts compute with the sum. The adapter of expert e is row block e of ``lora_A``, and the columns ``e + experts * i``
of ``lora_B``. Autograd would keep the sum, as large as the weight itself, from the forward to the backward of each
layer. Here it keeps the factors of the adapter, which it keeps anyway, and the frozen weight; the backward computes the
sum again, by the same call of PyTorch and so with the same bits, once for all nodes that read it, and frees it.

The sum is rounded to the dtype of the weight, so products with weight and factors apart would have other bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.sharded import is_plain
from ..kernels.switch import switch
from .adapters import PEFTS, SCALED, adds_something
from .fused_norm_module import warn_once
from .hooks import Fused, are_plain_calls, stock_class, why_forward_replaced
from .module_features import FusedModule, ModuleFeature
from .probe import DTYPES, UnrecognisedError, found_once, plain_pytorch, same_values
from .recompute import computed_again
from .recompute_linears import Recipe
from .running_code import RunningCode

_LAYERS = "peft.tuners.lora.layer"
_METHODS = "_activate_lora", "get_delta_factors", "get_param"


class FusedAdapterOnExperts(Fused):
    """Base of the classes put on PEFT's ``ParamWrapper``s; a subclass also derives from that class.

    Attributes:
        fused_norm_running: the code of PEFT's that was compared, for ``_pefts_functions``.
    """

    fused_norm_running: ClassVar[tuple[RunningCode, ...]]
    fused_norm_what = "weight+lora"

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the module inside, with the sum of its parameter and the adapter in place of the parameter.

        ``x`` and the others are what the module of experts takes, and the result is what it returns.
        """
        wrapper: Any = self
        stock = self.fused_norm_origin.forward
        is_switched_off = switch.depth or torch.compiler.is_compiling() or not adds_something(wrapper)
        if is_switched_off or kwargs.get("adapter_names") is not None:
            return stock(self, x, *args, **kwargs)
        reason = why_stock(wrapper)
        if reason is None and not _runs(self.fused_norm_running):
            reason = "PEFT's code has changed since the model was patched"
        if reason is not None:
            warn_once(self.fused_norm_origin, reason, PEFTS)
            return stock(self, x, *args, **kwargs)
        proxy = _adapter_of(wrapper)
        if not are_plain_calls(proxy, inside=type(self)):
            return stock(self, x, *args, **kwargs)
        wrapper._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        parameters, name = wrapper.get_base_layer()._parameters, wrapper.parameter_name
        weight = parameters[name]
        summed = proxy(weight)
        parameters[name] = summed  # as torch.func.functional_call does
        try:
            with computed_again(summed, _recipe(proxy, weight)):
                return wrapper.base_layer(x, *args, **kwargs)
        finally:
            if parameters.get(name) is summed:
                parameters[name] = weight


def is_adapter_on_parameter(module: nn.Module) -> bool:
    """Return whether a module is PEFT's LoRA on a parameter, fused or not; PEFT is not imported for it."""
    kind = getattr(sys.modules.get(_LAYERS), "ParamWrapper", None)
    return kind is not None and stock_class(module) is kind


def why_stock(wrapper: Any) -> str | None:
    """Return the reason why an adapter on a parameter, as it is now, has to run PEFT's forward; None if it has not."""
    if wrapper.disable_adapters or wrapper.merged:
        return "its adapter is merged, or switched off"
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if len(active) != 1:
        return f"it has {len(active)} active adapters"
    if wrapper.num_experts < 2:
        return "its parameter is one matrix, of no experts"
    if isinstance(wrapper.scaling[active[0]], Tensor):
        return SCALED
    module = wrapper.get_base_layer()
    weight = module._parameters.get(wrapper.parameter_name)
    if weight is None or "parametrizations" in module._modules:
        return "its parameter is computed, or no parameter of its module by now"
    tensors = weight, wrapper.lora_A[active[0]].weight, wrapper.lora_B[active[0]].weight
    if any(hasattr(tensor, "ds_id") or not is_plain(tensor) for tensor in tensors):
        return "its parameter or its adapter is sharded, or not plain"
    if type(weight) is not nn.Parameter or weight.dtype not in (*DTYPES, torch.float64):
        return f"its parameter is a {type(weight).__name__} of {weight.dtype}"
    return None


def _adapter_of(wrapper: Any) -> Callable[[Tensor], Tensor]:
    """PEFT's module that adds the only active adapter to a weight."""
    (name,) = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    proxy: Callable[[Tensor], Tensor] = sys.modules[_LAYERS]._LoraFactorsProxy(*wrapper.get_delta_factors(name))
    return proxy


def _recipe(proxy: Any, weight: Tensor) -> Recipe:
    """How to compute what PEFT's module returns of a weight again, from the memory that it reads now."""
    kind, scaling = type(proxy), proxy.scaling

    def outputs(weight: Tensor, lhs: Tensor, rhs: Tensor) -> tuple[Tensor]:
        with torch.no_grad():
            return (kind(lhs, rhs, scaling)(weight),)

    return Recipe.from_call(outputs, weight, proxy.lhs, proxy.rhs)


def _pefts_functions() -> tuple[Any, ...]:
    """The functions of PEFT that compute the sum of a weight and an adapter.

    Raises:
        UnrecognisedError: if PEFT has other ones.
    """
    layers: Any = sys.modules[_LAYERS]
    try:
        methods = [getattr(layers.ParamWrapper, name) for name in _METHODS]
        return *methods, layers._LoraFactorsProxy.__init__, layers._LoraFactorsProxy.forward
    except AttributeError as error:
        raise UnrecognisedError("this release of PEFT adds adapters to parameters in another way") from error


def _runs(running: tuple[RunningCode, ...]) -> bool:
    """Return whether PEFT's functions run the code that was compared."""
    try:
        functions = _pefts_functions()
    except UnrecognisedError:
        return False
    return all(code.is_in(function) for code, function in zip(running, functions, strict=True))


_EXPERTS, _OUT, _IN, _RANK = 3, 6, 5, 2


@plain_pytorch(gradients=True)  # which leaves a default device, such as meta, too
def _compared() -> tuple[RunningCode, ...]:
    """Compare sums and gradients with those of PEFT's forward, bit for bit, and return the code of PEFT's functions."""
    functions = _pefts_functions()
    layers: Any = sys.modules[_LAYERS]
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for is_transposed in (False, True):
            module: Any = nn.Module()
            module.is_transposed = is_transposed
            module.weight = nn.Parameter(torch.randn(_EXPERTS, _OUT, _IN, generator=generator).to(dtype))
            module.weight.requires_grad_(False)
            try:
                config = sys.modules["peft"].LoraConfig(r=_RANK, init_lora_weights=False)
                wrapper = layers.ParamWrapper(module, "only", "weight", config=config, r=_RANK, lora_alpha=3)
                factors = [*wrapper.lora_A.parameters(), *wrapper.lora_B.parameters()]
                for factor in factors:
                    factor.requires_grad_()
                proxy: Any = _adapter_of(wrapper)
                sums = [proxy(module.weight), _recipe(proxy, module.weight).value()[0]]
                with wrapper._activate_lora(["only"]):
                    sums.append(module.weight)
                dy = torch.randn(_EXPERTS, _OUT, _IN, generator=generator).to(dtype)
                gradients = [torch.autograd.grad(sums[place], factors, dy) for place in (0, 2)]
            except Exception as error:  # foreign code may raise anything
                raise UnrecognisedError("this release of PEFT adds adapters to parameters in another way") from error
            pairs = [(sums[0], sums[1]), (sums[0], sums[2]), *zip(*gradients, strict=True)]
            if not all(same_values(*pair) for pair in pairs):
                raise UnrecognisedError("PEFT's code does not compute the sum with an adapter bit for bit")
    return tuple(map(RunningCode, functions))


def _fused(wrapper: Any, origin: Any) -> FusedModule:
    if reason := why_stock(wrapper):
        raise UnrecognisedError(reason)
    return FusedModule(FusedAdapterOnExperts, {"fused_norm_running": found_once(_compared, _compared)})


ADAPTERS_ON_EXPERTS = ModuleFeature("lora", is_adapter_on_parameter, why_forward_replaced, _fused)

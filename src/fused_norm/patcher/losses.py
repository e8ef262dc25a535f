"""Language models whose vocabulary head and loss are one operator, which never holds all logits.

The head of such a model returns lazy logits (``lazy_logits.py``) while the model computes a loss. The model's own
forward, and the loss function that it has at the time, run on them as they are. So a loss that is computed in another
way, or code that looks at the logits, gets real ones.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from ..kernels.autocast import autocast_dtype
from ..kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY, linear_cross_entropy
from ..kernels.plain_calls import dispatch_modes
from ..kernels.sharded import is_plain
from ..kernels.switch import switch
from ..kernels.triton.devices import is_transformed, runs_kernels_on
from .fused_norm_module import warn_once
from .hooks import Fused, are_plain_calls, has_hooks, why_linears_replaced
from .lazy_log_probs import operate
from .lazy_logits import (
    GENUINE,
    REPLACED_BEFORE,
    CrossEntropy,
    LazyLogits,
    LazySum,
    Projection,
    is_in_compiled_function,
)
from .running_code import RunningCode
from .trl_head import with_operator

_CROSS_ENTROPY = RunningCode(functional.cross_entropy)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMPILED = (
    "it reads outputs.logits, which torch.compile does not trace: give it outputs.logits.clone(), or patch the model"
    " with apply_fused_norm(model, loss=False)"
)


class FusedLoss(Fused):
    """Base of the classes put on language models; a subclass also derives from the model's own class."""

    fused_norm_head_class: ClassVar[type[nn.Module]]
    fused_norm_what = "head+loss"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the forward that a trainer of TRL puts on a model gets the operator."""
        super().__setattr__(name, with_operator(self, value) if name == "forward" else value)


class FusedHead(Fused):
    """Base of the class put on the head of a language model; a subclass also derives from ``nn.Linear``."""

    weight: Tensor
    bias: Tensor | None
    fused_norm_what = "head of a fused loss"

    def forward(self, x: Any) -> Any:
        """Logits [..., V] of hidden states [..., H]: lazy ones while a model that this is the head of wants a loss."""
        call = next((call for call in reversed(_calls.stack) if call.head is self), None)
        if call is not None:
            reason = _why_real(self, x)
            if reason is None and (call.has_labels or _may_be_read_later(self, x)):
                how = autocast_dtype(x), call._loss, call._noted, self._parameters
                projection = Projection(x, self.weight, self.bias, *how, operate=None if call.has_labels else operate)
                call.projections.append(projection)
                return LazyLogits.from_projection(projection)
            call.reason = reason
        return self.fused_norm_origin.forward(self, x)

    def fused_norm_cross_entropy(self, x: Tensor, how: CrossEntropy, max_labels: int | None = None) -> Tensor:
        """The loss of rows [..., H] of hidden states; inside ``disabled()`` it is computed by PyTorch's operators.

        Args:
            x: of this head.
            how: what is done to logits, and the loss.
            max_labels: as ``linear_cross_entropy`` has it.
        """
        if switch.depth:
            num_items = None if how.num_items is None else torch.as_tensor(how.num_items)
            args = x, self.weight, self.bias, how.target, num_items, how.reduction, how.ignore_index
            return LINEAR_CROSS_ENTROPY.reference(*args, how.label_smoothing, how.scale, how.cap, how.in_fp32)
        return linear_cross_entropy(
            x,
            self.weight,
            how.target,
            linear_bias=self.bias,
            reduction=how.reduction if how.num_items is None else "mean",
            ignore_index=how.ignore_index,
            label_smoothing=how.label_smoothing,
            num_items=how.num_items,
            logit_scale=1.0 if how.scale is None else how.scale,
            softcap=how.cap,
            logits_in_fp32=how.in_fp32,
            max_labels=max_labels,
        )


class LossCall:
    """A call of a language model that is to return a loss, or logits that a loss will be made of.

    Attributes:
        origin: the model's own class.
        head: whose logits the loss is of.
        has_labels: the model computes the loss.
        is_fused: the operator has computed a loss.
        reason: why it has not, or None.
        projections: calls of the head while it runs.
    """

    def __init__(self, origin: type[nn.Module], head: FusedHead, *, has_labels: bool = True) -> None:
        self.origin, self.head, self.has_labels = origin, head, has_labels
        self.is_fused = False
        self.reason: str | None = None
        self.projections: list[Projection] = []

    def _loss(self, x: Tensor, how: CrossEntropy) -> Tensor:
        self.is_fused = True
        # The host waits here for the device: rows without a label are left out of the products.
        count = None if how.target.is_meta else int((how.target != how.ignore_index).sum())
        return self.head.fused_norm_cross_entropy(x, how, count)

    def _noted(self, reader: str) -> None:
        if not self.is_fused and self.reason is None:
            self.reason = why_read(reader)
        if is_in_compiled_function():
            warn_once(self.origin, _COMPILED, "a compiled function in parts")

    def returned(self, output: Any) -> Any:
        """The output of the model's forward, in which no loss is put off any more.

        Logits are read if the model returns the hidden states that they are made of, without a gradient: a write into
        these is no error in stock.
        """
        for projection in self.projections:
            for lazy in projection.members(LazySum):
                lazy.read("the model")
            x, is_trained = projection.x, any(tensor.requires_grad for tensor in projection.tensors)
            tensors = [leaf for leaf in tree_leaves(output) if type(leaf) is Tensor]
            if not (is_trained and torch.is_grad_enabled()) and any(_share_memory(x, tensor) for tensor in tensors):
                for logits in projection.members(LazyLogits):
                    logits.read("hidden states")
        return tree_map_only(LazySum, lambda loss: loss.read("the model"), output)


class _Calls(threading.local):
    """The calls that are running in a thread, the innermost one last."""

    def __init__(self) -> None:
        self.stack: list[LossCall] = []


_calls = _Calls()


def fused_forward(origin: Any) -> Callable[..., Any]:
    """A forward of models of class ``origin`` that is their own.

    The head's logits are lazy if it gets labels, and in training without them too.
    """
    names = tuple(inspect.signature(origin.forward).parameters)[1:]
    place = names.index("labels")

    @wraps(origin.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[place] if len(args) > place else kwargs.get("labels")
        is_wanted = labels is not None or (self.training and torch.is_grad_enabled())
        if not is_wanted or torch.compiler.is_compiling() or switch.depth or not are_plain_calls(inside=type(self)):
            return origin.forward(self, *args, **kwargs)
        head = self.get_output_embeddings()
        is_inside = any(call.head is head and (call.has_labels or labels is None) for call in _calls.stack)
        if is_inside:  # such as BLIP-2's, which counts this loss as its own
            return origin.forward(self, *args, **kwargs)
        reason = _why_real_logits(self, head, labels)
        if reason is not None:
            if labels is not None:
                warn_once(origin, reason)
            return origin.forward(self, *args, **kwargs)
        call = LossCall(origin, head, has_labels=labels is not None)
        _calls.stack.append(call)
        try:
            output = call.returned(origin.forward(self, *args, **kwargs))
        finally:
            _calls.stack.pop()
            for projection in call.projections:
                projection.is_running = False
            call.projections.clear()
        if labels is not None and not call.is_fused:
            warn_once(origin, call.reason or "its loss is no cross entropy of the logits of its head")
        return output

    return forward


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def why_compiled_loss(model: Any) -> str | None:
    """The reason why the compiled loss function of a model gets real logits: a compiler traces no lazy ones."""
    is_compiled = hasattr(getattr(model, "loss_function", None), "_torchdynamo_orig_callable")
    return "its loss function is compiled" if is_compiled else None


def why_read(reader: str) -> str:
    """The reason why logits are real ones: something reads them."""
    return f"its logits are read by {reader}, before its loss or for another loss than a cross entropy"


def why_seen(head: Any) -> str | None:
    """The reason why other code sees a call of a head: hooks, or a forward of its own that accelerate has not made."""
    if has_hooks(head):
        return "hooks see a call of its head"
    if "forward" in vars(head) and "_old_forward" not in vars(head):
        return "other code has put a forward on its head"
    return None


def _why_real_logits(model: Any, head: Any, labels: Any) -> str | None:
    """The reason why the head of a model has to return real logits in a call with these labels, or None."""
    own = vars(head)
    if type(head) is nn.Linear and "forward" not in own:  # a new one, as resize_token_embeddings makes
        head.__class__ = model.fused_norm_head_class
    if not isinstance(head, FusedHead):
        return f"its head is a {type(head).__name__} by now, no plain linear"
    if reason := why_seen(head):
        return reason
    hook = own.get("_hf_hook")
    if any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ()))):
        return "its head is offloaded, and has no weights between its calls"
    if not are_plain_calls(inside=type(head)) or type(head).forward is not FusedHead.forward:
        return "the forward of linears was replaced"
    if reason := why_compiled_loss(model):
        return reason
    if labels is not None and (type(labels) is not Tensor or labels.dtype != torch.int64):
        return "its labels are no plain tensor of int64"
    if dispatch_modes() or is_transformed():
        return "a mode or a transform of PyTorch watches its call"
    if reason := why_functions_replaced():
        return reason
    return None if labels is None or runs_kernels_on(labels) else f"kernels do not run on {labels.device.type}"


def _why_real(head: FusedHead, x: Any) -> str | None:
    """The reason for real logits of these hidden states."""
    if "weight" not in head._parameters:
        return "its head computes its weight at each access"
    tensors = [x, head.weight, *([] if head.bias is None else [head.bias])]
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or not is_plain(tensor):
            return f"its head computes with a {type(tensor).__name__}"
        if tensor.dtype not in _DTYPES:
            return f"its head computes in {tensor.dtype}"
    if not runs_kernels_on(*tensors):
        return f"kernels do not run on {x.device.type}"
    if x.device != head.weight.device:
        return f"its head is on {head.weight.device}, and the hidden states are on {x.device}"
    if autocast_dtype(x) is None and any(tensor.dtype != x.dtype for tensor in tensors):
        return f"its head is {head.weight.dtype}, and the hidden states are {x.dtype}"
    return None


def _may_be_read_later(head: FusedHead, x: Tensor) -> bool:
    """Return whether logits of these hidden states are for training, and can be computed after the model's forward."""
    is_trained = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in head.parameters()))
    # A weight of torch.func.functional_call or FSDP1 is there for the call alone, and is no parameter.
    is_kept = isinstance(head.weight, nn.Parameter) and not _is_sharded_by_fsdp2(head)
    # In a CUDA graph the host cannot wait for the device.
    return is_trained and is_kept and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _is_sharded_by_fsdp2(head: nn.Module) -> bool:
    """Return whether FSDP2 shards the weight of a head, and so may free it once a forward returns."""
    module = sys.modules.get("torch.distributed._composable_state")
    states = [state() for state in getattr(module, "_module_state_mapping", {}).values()]
    return any(_is_of_unit(head, state) for state in states if type(state).__name__ == "FSDPState")


def _is_of_unit(head: nn.Module, state: Any) -> bool:
    """Return whether a unit of FSDP2 has a head's weight, or cannot be asked."""
    try:
        # PyTorch 2.11 has one group of parameters in a unit.
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        infos = [parameter._module_info for group in groups if group is not None for parameter in group.fsdp_params]
        return any(head is module for info in infos for module in (info.module, *info.shared_modules))
    except AttributeError:
        return True


def why_functions_replaced() -> str | None:
    """The reason, for a report, that a function which heads and losses are made of was replaced; None if none was."""
    for name in ("cross_entropy", *REPLACED_BEFORE):
        function = vars(functional)[name]
        # None of those that were replaced before is genuine, so the code that is asked for is that of cross_entropy.
        if function is not GENUINE.get(name) or not _CROSS_ENTROPY.is_in(function):
            return f"torch.nn.functional.{name} was replaced"
    return why_linears_replaced()

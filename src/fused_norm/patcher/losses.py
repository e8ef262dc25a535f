"""Language models that train with another package's loss: the fused linear cross-entropy of liger-kernel.

Such a loss multiplies hidden states by the weight of ``lm_head`` itself, some rows at a time, and calls no module for
it. So where a call of that module would do anything more, stock code runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.sharded import is_plain
from ..kernels.triton.devices import runs_kernels_on
from ..spec import FusedNormError
from .fused_norm_module import explain, has_hooks, has_origin_forward, is_disabled

_LIGERS_ARGUMENTS = frozenset(
    ("bias", "ce_weight", "label_smoothing", "lse_square_scale", "reduction", "softcap", "use_token_scaling")
)
"""Those that make Liger's loss another one; transformers' own is given them too, and passes over them."""


class FusedLoss(nn.Module):
    """Base of the classes put on language models whose loss is another's; a subclass also derives from the model's."""

    fused_norm_origin: ClassVar[Any]
    fused_norm_origin_forward: ClassVar[Any]


def training_forward(origin: Any, with_loss: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of models of class ``origin`` that is ``with_loss`` where they train on labels, and else their own.

    Its argument ``skip_logits`` is Liger's: with True no logits are made in evaluation either, and with False always.
    """
    names = tuple(inspect.signature(origin.forward).parameters)[1:]

    @wraps(origin.forward)
    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        wanted = self.training if skip_logits is None else skip_logits
        if wanted and named.get("labels") is not None and not is_disabled() and has_origin_forward(type(self)):
            reason = why_own_loss(self) or _why_not_now(self, named)
            if reason is None:
                output = with_loss(self, skip_logits=True, **named)
                if output[0].requires_grad and not torch.compiler.is_compiling():
                    output[0].register_hook(_OneBackward())
                return output
            explain(origin, reason)
        return origin.forward(self, *args, **kwargs)

    return forward


def why_own_loss(model: Any) -> str | None:
    """The reason why a model has to compute its own loss; None where another's makes no other difference."""
    head = model.lm_head
    if type(head) is not nn.Linear or head.bias is not None or "forward" in vars(head) or has_hooks(head):
        return f"its lm_head is no plain linear but a {type(head).__name__}, or other code sees its input"
    loss = model.loss_function
    if loss is not sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss:
        return f"its loss is {getattr(loss, '__qualname__', loss)}, not transformers' for causal models"
    return None


def _why_not_now(model: Any, named: Mapping[str, Any]) -> str | None:
    weight, logits_to_keep = model.lm_head.weight, named.get("logits_to_keep", 0)
    if not is_plain(weight):
        return "not every device has the weight as a whole"
    if not runs_kernels_on(weight):
        return f"kernels do not run on {weight.device.type}"
    if not isinstance(logits_to_keep, int) or logits_to_keep:
        return "it is asked for the logits of some tokens"
    if not _LIGERS_ARGUMENTS.isdisjoint(named):
        return f"its own loss passes over {min(_LIGERS_ARGUMENTS.intersection(named))}, and Liger's does not"
    embedded = named.get("inputs_embeds")
    if isinstance(embedded, Tensor) and not embedded.is_contiguous():
        return "its inputs_embeds lie in another order in memory than Liger takes hidden states in"
    # Liger gives the weight no gradient where hidden states have none.
    before = (one for one in chain((named.get("inputs_embeds"),), model.parameters()) if one is not weight)
    if weight.requires_grad and not any(one is not None and one.requires_grad for one in before):
        return "nothing but its lm_head is trained"
    return None


class _OneBackward:
    """The hook on a loss whose gradients are made in the forward, and multiplied in place in the backward."""

    __slots__ = ("_is_done",)

    def __init__(self) -> None:
        self._is_done = False

    def __call__(self, gradient: Tensor) -> None:
        if self._is_done or torch.is_grad_enabled():
            raise RuntimeError(
                "loss='liger' allows one backward of a step, and no derivatives of its gradients;"
                " apply_fused_norm(model, loss=None) goes without it"
            )
        self._is_done = True


def liger_forward(origin: Any) -> Callable[..., Any] | None:
    """Liger's forward, with its fused linear cross-entropy, for models of a class of transformers'; None without one.

    Its function that patches an instance is not called: for some models it changes classes of the process as well.

    Raises:
        FusedNormError: without the package liger-kernel.
    """
    try:
        forwards = import_module("liger_kernel.transformers.model")
    except ImportError as error:
        raise FusedNormError(
            f"loss='liger' needs the package liger-kernel ({error}): pip install 'fused-norm[liger]'"
        ) from error
    stock = inspect.unwrap(origin.forward)
    package, _, family = stock.__module__.rpartition(".")[0].rpartition(".")
    if package != "transformers.models" or not stock.__qualname__.endswith("ForCausalLM.forward"):
        return None
    name = f"{forwards.__name__}.{family}"
    found = import_module(name) if find_spec(name) else None
    return getattr(found, "lce_forward", None) or getattr(found, "causal_forward", None)

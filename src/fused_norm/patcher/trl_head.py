"""The head that TRL's trainers put on a language model, whose log-probabilities one operator computes.

TRL puts a function on the model as its ``forward``. On a model whose loss is fused, a function that runs the same code
takes its place: in that code, one name means the operator and not TRL's autograd function. TRL's modules stay as they
are. Only code that is known to the letter is run so; any other release of TRL runs its own.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, wraps
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.autocast import autocast_dtype
from ..kernels.linear_log_probs import LINEAR_LOG_PROBS
from ..kernels.switch import switch
from ..kernels.triton.devices import runs_kernels_on
from ..kernels.vocabulary_head import IGNORED, head_tensors, unless_one
from .fused_norm_module import warn_once
from .hooks import name_of, stock_class
from .source import cells_of, text_of

_MODULE, _NAME = "trl.trainer.utils", "add_fused_lm_head.<locals>._fused_forward"
_FUNCTION, _LEAVES_OUT = "_ChunkedLogProbFunction", "_use_triton"
"""What the code of TRL's forward calls: the autograd function, and what says that rows without a label are left out."""

_RELEASE = "1.16"
_FORWARD_DIGEST = "1e32fa21aecb879d73f6137640d7c84e1a61b9e4ddec806f42fc91e58fee2666"
_FILE_DIGEST = "839b28adba1daf35a451a4d897309d2e08b50ee0bcd72855c9e5cf265dbd3a6b"
"""SHA-256 of that forward, and of the file that has the autograd function, in this release."""

_STATISTICS = ("entropy", "is_top1", "mean_logits", "log_sum_sq_probs")
"""TRL's names for what the operator computes besides, in the operator's order."""

_WITH_UNIFORM_GRADIENT = {"log_probs", "entropy", "is_top1"}
"""What ``SFTTrainer`` asks for, whose loss is the sum of log-probabilities by a count, but for ``loss_type="dft"``."""

_OURS = "fused_norm_head_of_trl"


def trl_head(module: nn.Module) -> FunctionType | None:
    """TRL's own function, if TRL has put its head on a module, whatever stands in its place by now; else None."""
    return next(_functions(module), None)


def is_out_of_reach(module: nn.Module) -> bool:
    """Return whether accelerate runs TRL's own function under autocast, and keeps it where nothing takes its place."""
    kept: Any = vars(module).get("_original_forward")
    is_kept = _function_of(vars(module).get("forward")) is None and _function_of(kept) is not None
    return is_kept and not _is_ours(kept.__func__)


def why_trl_runs(module: Any, function: FunctionType) -> str | None:
    """The reason why TRL's head on a module with a fused loss runs as it is now, or None."""
    return why_unknown(function) or _why_other_head(module)


def with_operator(module: nn.Module, forward: Any) -> Any:
    """A forward to put on a module whose loss is fused: one with the operator in place of TRL's, or this one."""
    function = _function_of(forward)
    if function is None or forward.__self__ is not module or _is_ours(forward.__func__):
        return forward
    if (reason := why_unknown(function)) is not None:
        warn_once(stock_class(module), reason, "TRL's head")
        return forward
    return MethodType(_with_operator(function), module)


def without_operator(forward: Any) -> Any:
    """TRL's forward in place of one with the operator; any other forward is returned as it is."""
    function = _function_of(forward)
    return forward if function is None else MethodType(function, forward.__self__)


def cell_of_forward(module: nn.Module) -> CellType | None:
    """The cell with what TRL's function calls if it is not to compute log-probabilities; None without such a function.

    Of several functions, one around the other, that of the innermost one.
    """
    cells = [cells_of(function)["original_forward"] for function in _functions(module)]
    return cells[-1] if cells else None


def _functions(module: nn.Module) -> Iterator[FunctionType]:
    """TRL's functions on a module, from the outside in, also inside of what accelerate puts around them."""
    own = vars(module)
    forward: Any = own.get("forward")
    if _function_of(forward) is None:  # accelerate keeps the forward that it runs under autocast
        forward = own.get("_original_forward")
    while (function := _function_of(forward)) is not None and forward.__self__ is module:
        yield function
        forward = cells_of(function)["original_forward"].cell_contents


def _function_of(forward: Any) -> FunctionType | None:
    """The function of TRL that a method runs, or None."""
    if type(forward) is not MethodType or type(forward.__func__) is not FunctionType:
        return None
    function: FunctionType = forward.__func__
    if _is_ours(function):
        function = getattr(function, _OURS)
    is_trls = function.__globals__.get("__name__") == _MODULE and function.__code__.co_qualname == _NAME
    return function if is_trls and "original_forward" in cells_of(function) else None


def _is_ours(function: FunctionType) -> bool:
    """Return whether a function was made here; what wraps it has its attributes, as ``functools.wraps`` copies them."""
    return function.__globals__ is globals() and hasattr(function, _OURS)


def why_unknown(function: FunctionType) -> str | None:
    """The reason why nobody knows what TRL's function computes, or None."""
    theirs: Any = function.__globals__.get(_FUNCTION)
    codes = [function.__code__]
    with suppress(AttributeError):
        codes += [theirs.forward.__code__, theirs.backward.__code__]
    if len(codes) == 3 and _are_known(*codes) and function.__defaults__ is None:
        return None
    release = getattr(sys.modules.get("trl"), "__version__", "?")
    return f"TRL {release} has other code in its head than TRL {_RELEASE}, or it was replaced"


@lru_cache(maxsize=16)
def _are_known(forward: CodeType, function_forward: CodeType, function_backward: CodeType) -> bool:
    """Return whether these are the codes of TRL's forward, and of the forward and backward of its autograd function."""
    texts = text_of(forward), text_of(function_forward), text_of(function_backward)
    if None in texts or _digest(texts[0]) != _FORWARD_DIGEST:
        return False
    files = {code.co_filename for code in (function_forward, function_backward)}
    lines, _ = inspect.findsource(function_forward)
    return len(files) == 1 and _digest("".join(lines)) == _FILE_DIGEST


def _digest(text: Any) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _why_other_head(module: Any) -> str | None:
    """The reason why the head of a module is none that TRL's forward reads as a whole, or None."""
    head = module.get_output_embeddings()
    if stock_class(head) is not nn.Linear:
        return f"its head is a {name_of(stock_class(head))} by now, no plain linear"
    if (reason := why_taken_apart(*head._parameters.values())) is not None:
        return reason
    return None if runs_kernels_on(head.weight) else f"kernels do not run on {head.weight.device.type}"


def why_taken_apart(*tensors: Any) -> str | None:
    """The reason why TRL has to gather a weight itself, in the forward and in the backward, or None."""
    if any(hasattr(tensor, "ds_id") for tensor in tensors):
        return "ZeRO-3 takes the weight of its head apart, and TRL's head gathers it"
    return None


def _with_operator(function: FunctionType) -> Any:
    """A function that runs the code of TRL's with the operator, if the model that it is called on has a fused loss."""
    seen = _SeenGradients()

    @wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_fused = hasattr(type(self), "fused_norm_head_class") and not switch.depth
        if not is_fused or torch.compiler.is_compiling() or not kwargs.get("fused_lm_head"):
            return function(self, *args, **kwargs)
        if (reason := why_trl_runs(self, function)) is not None:
            warn_once(stock_class(self), reason, "TRL's head")
            return function(self, *args, **kwargs)
        theirs = function.__globals__[_FUNCTION]
        ours = {_FUNCTION: _HeadOperator(stock_class(self), theirs, seen), _LEAVES_OUT: lambda device: True}
        code, namespace = function.__code__, {**function.__globals__, **ours}
        run = FunctionType(code, namespace, function.__name__, function.__defaults__, function.__closure__)
        run.__kwdefaults__ = function.__kwdefaults__
        return run(self, *args, **kwargs)

    vars(forward)[_OURS] = function
    return forward


@dataclass
class _SeenGradients:
    """What backwards of a model have shown, by which later forwards compute no gradient in vain.

    Attributes:
        differ: the log-probabilities of ``SFTTrainer`` had a gradient that differs from row to row.
        of_entropies: entropies had a gradient.
    """

    differ: bool = False
    of_entropies: bool = False

    def note(self, gradient: Tensor | None) -> None:
        """Look at a gradient of log-probabilities, None if they have none; the host waits for it."""
        if gradient is not None and not self.differ:
            self.differ = bool(((gradient != gradient[:1]) & ~gradient.isnan()).any())

    def note_entropies(self, gradient: Tensor | None) -> None:
        """Note whether entropies have a gradient."""
        self.of_entropies = self.of_entropies or gradient is not None


class _HeadOperator:
    """What stands for TRL's autograd function in one call of its forward.

    Attributes:
        origin: the model's own class.
        theirs: TRL's function, for what the operator does not take.
        seen: what backwards of this model have shown.
    """

    def __init__(self, origin: type[nn.Module], theirs: Any, seen: _SeenGradients) -> None:
        self.origin, self.theirs, self.seen = origin, theirs, seen

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> Any:
        """The log-probabilities of targets [N] under the logits of hidden [N, H], and the statistics in ``outputs``."""
        logits = unless_one(temperature), unless_one(logit_scale), softcap, True
        wanted = [name in outputs for name in _STATISTICS]
        tensors, trained = head_tensors(hidden, weight, bias, casts=False)
        is_uniform = set(outputs) == _WITH_UNIFORM_GRADIENT and not self.seen.differ
        reason = why_taken_apart(weight, bias)
        if reason is None:
            dtype = autocast_dtype(hidden) or hidden.dtype
            rest = wanted, None, dtype, is_uniform, True, self.seen.of_entropies, trained
            results, reason = LINEAR_LOG_PROBS.try_fused(*tensors, targets, IGNORED, *logits, *rest)
        if reason is not None:
            warn_once(self.origin, reason, "TRL's head")
            arguments = hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            return self.theirs.apply(*arguments)
        log_probs, entropies, are_largest, mean_logits, log_sums_of_squares = results
        if is_uniform and any(trained[1:]):
            log_probs.register_hook(self.seen.note)
        if entropies is not None and entropies.requires_grad and not self.seen.of_entropies:
            entropies.register_hook(self.seen.note_entropies)
        return log_probs, entropies, log_sums_of_squares, mean_logits, None if are_largest is None else are_largest > 0

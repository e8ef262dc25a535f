"""The survey of one module whose forward may be rewritten: rows for its sites, and its change of class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from ..spec import Kind
from .activation_recognition import looks_like_activation
from .block import Block, SurveyedModel
from .class_swap import class_override_reason, fused_override_reason, stock_class
from .convolution_recognition import is_causal_convolution
from .fused_block import FusedBlock
from .fused_classes import fused_block_class
from .patch_report import Cause, Site
from .patterns import decide_helpers, patterns_of
from .patterns.convolutions import CONVOLUTION_NAME
from .patterns.gates import ACTIVATION_FUNCTION, SIGMOID
from .patterns.heads import QK_NAME
from .patterns.rotations import ROTATION_NAME
from .source import SourceError, WrappedError, global_of, helpers_of, names_in


def decide_block(block: Block, *, is_layer: bool) -> None:
    """Find the sites of a module; those to be fused are among its rewrites, and those of blocks it hands norms to."""
    problem: SourceError | None = None
    block.sites += decide_helpers(block)
    try:
        block.sites += patterns_of(block.origin).decide(block)
    except SourceError as error:
        problem = error
    block.sites += _without_patterns(block, block.sites, is_layer=is_layer, error=problem)


def plan_block(block: Block, model: SurveyedModel) -> bool:
    """Plan the class of a module whose rewrites and recomputing are decided.

    Returns:
        False if its forward cannot be rewritten. Its rows say why, and other modules may have to be planned again.

    Raises:
        FusedNormError: if its class is to change and other code has built on the fused one.
    """
    module, rewrites, recompute = block.module, tuple(block.rewrites), block.recompute
    new = None
    if block.override_reason is not None or block.is_sealed:
        if isinstance(module, FusedBlock) and module.fused_norm_recompute and not recompute:
            rewrites = module.fused_norm_rewrites
            new = fused_block_class(block.origin, rewrites) if rewrites else block.origin
    elif rewrites or recompute:
        try:
            new = fused_block_class(block.origin, rewrites, recompute)
        except SourceError as error:
            block.keep(str(error), "unrecognised")
            return False
        if override := fused_override_reason(new):
            if block.layer is None or not recompute:
                block.keep(override, "overridden")
                return False
            block.layer = block.layer.skipped(override, None)
            return plan_block(block, model)
    elif isinstance(module, FusedBlock):  # another class is not from here
        new = block.origin
    model.plan(module, new)
    return True


def _without_patterns(block: Block, rows: Sequence[Site], *, is_layer: bool, error: SourceError | None) -> list[Site]:
    """A row for each kind of site that cannot be seen, if the forward was replaced or its source cannot be read.

    What a module had before follows from what it holds, what was fused in it, and the names in its forward. ``error``:
    the one that its source gave, None if it can be read.
    """
    replaced = isinstance(error, WrappedError)  # which is another's doing
    reason = None if error is None else str(error)
    override = block.override_reason or class_override_reason(block.origin) or (reason if replaced else None)
    if override is None and reason is None:
        return []
    module = block.module
    rewrites = module.fused_norm_rewrites if override and isinstance(module, FusedBlock) else ()
    fused = {rewrite.pattern for rewrite in rewrites}
    heads = override and any(block.holds_norm(name) for name in module._modules if QK_NAME.fullmatch(name))
    own_names = replaced or not override  # those of a forward that another has replaced tell nothing
    kinds: dict[Kind, object] = {
        "residual": is_layer,
        "rope": heads or fused & {"heads", "rotations"} or (own_names and _names_rotation(block.origin)),
        "mlp": "gates" in fused or (replaced and _names_activation(module)),
        "conv": "convolutions" in fused or (own_names and _convolves(module)),
    }
    kinds_in_rows = {row.kind for row in rows}
    row = partial(Site, block.path, module=block.origin.__name__, reason=override or reason)
    cause: Cause = "overridden" if override else "unrecognised"
    return [
        row(kind=kind, cause=cause) for kind, is_present in kinds.items() if is_present and kind not in kinds_in_rows
    ]


def may_rotate_or_gate(module: nn.Module) -> bool:
    """Return whether a module may have a site of its own, without a norm; most are told apart by the names they use."""
    return (
        isinstance(module, FusedBlock)
        or _names_rotation(type(module))
        or _convolves(module)
        or _names_activation(module, SIGMOID)
    )


def _names_rotation(origin: Any) -> bool:
    """Return whether a forward, or a method that it calls, uses the name of a rotary embedding of its file."""
    methods = (helper for helper in helpers_of(origin).values() if helper.is_method)
    return any(
        ROTATION_NAME.search(name) and global_of(forward, name) is not None
        for forward in (origin, *methods)
        for name in names_in(forward)
    )


def _convolves(module: nn.Module) -> bool:
    """Return whether a module holds a causal convolution, or its forward uses the name of a function for one."""
    holds_one = any(map(is_causal_convolution, module._modules.values()))
    return holds_one or any(map(CONVOLUTION_NAME.search, names_in(stock_class(module))))


def _names_activation(module: nn.Module, *extra: str) -> bool:
    """Return whether a module's forward uses the name of an activation that it holds, or of a function.

    So it does if a method or a function that it calls does. ``extra``: names that count too.
    """
    origin = stock_class(module)
    names = names_in(origin).union(*map(names_in, helpers_of(origin).values()))
    if any(map(ACTIVATION_FUNCTION.search, names)) or not names.isdisjoint(extra):
        return True
    functions = (FunctionType, BuiltinFunctionType)
    members: dict[str, Any] = {name: f for name, f in vars(module).items() if isinstance(f, functions)}
    members |= {name: child for name, child in module._modules.items() if child is not None}
    return any(name in names and looks_like_activation(name, member) for name, member in members.items())

"""Checks that a step has done what the rows of a report promise, if that changes no number.

A norm may write float32 for linears that read 16 bits, the gradient of a residual connection may be added outside of
the norm's backward, attention may have to cast queries: the numbers are the same, and what fusing saves is lost.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..check.fused_calls import FusedCall, is_call_of
from ..model_configs import FAMILIES
from ..patcher import disabled
from ..patcher.adapters import FusedAdapter
from ..patcher.fused_block import FusedBlock
from ..patcher.hooks import is_idle_dropout
from ..patcher.patch_report import Site
from .model_source import layers_of

_WIDE_OUTPUT = "a norm wrote float32 for its linears, which read 16 bits under autocast"
_WIDE_QUERIES = "queries and keys were written in float32, and attention reads 16 bits under autocast"
_NOT_JOINED = "the gradient of its residual connection did not join in the backward of the norm"


def claims_not_kept(
    model: nn.Module, sites: Sequence[Site], calls: Sequence[FusedCall], tokens: Tensor, *, mixed: bool
) -> dict[str, list[str]]:
    """Return the places in which a step has not done what rows of the report promise, by what it did instead.

    ``sites``: the rows of the report that were fused. ``calls``: those of a step with these tokens, with their
    gradients. ``mixed``: under bf16 autocast.
    """
    places_by_claim: dict[str, list[str]] = {}

    def add(what: str, path: str) -> None:
        places = places_by_claim.setdefault(what, [])
        if path not in places:
            places.append(path)

    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    rotated = [site.path for site in sites if site.kind == "rope"]
    casting = _attentions_that_cast(model, rotated, tokens) if mixed else set()
    if family is None or not family.attention_reads_rotated:
        casting = {path for path in casting if _asks_attention(model, path)}
    for site in sites if mixed else ():
        if not any(torch.float32 in call.dtypes for call in calls if is_call_of(site, call)):
            continue
        if site.kind == "consumers":
            # A LoRA layer that may drop some of its input reads it in float32.
            adapters = [linear for linear in linears_of(model, site) if isinstance(linear, FusedAdapter)]
            dropouts = [dropout for adapter in adapters for dropout in cast(Any, adapter).lora_dropout.values()]
            if all(map(is_idle_dropout, dropouts)):
                add(_WIDE_OUTPUT, site.path)
        elif site.kind == "rope" and site.path in casting:
            add(_WIDE_QUERIES, site.path)
    for path, layer in layers_of(model).items():
        if not isinstance(layer, FusedBlock):
            continue
        consumed = [rewrite for rewrite in layer.fused_norm_rewrites if rewrite.pattern == "consumed_norms"]
        joins = family is not None and family.joins_residual
        if joins or any("input" in rewrite.parts for rewrite in consumed):
            mine = [call for call in calls if call.path == path and call.method.__name__ == "fused_norm_passthrough"]
            # The gradient of a norm's input, which the norm hands on, has to flow into the norm's backward.
            differentiated = [call for call in mine if call.arguments.arguments["x"].requires_grad]
            if not mine or any(not call.is_one_node or call.gradients[-1] is None for call in differentiated):
                add(_NOT_JOINED, path)
    return places_by_claim


def linears_of(model: nn.Module, row: Site) -> list[Any]:
    """The linears of a block that consume its norms."""
    block = model.get_submodule(row.path)
    assert isinstance(block, FusedBlock)
    return [block.get_submodule(name) for name in block.fused_norm_linears]


def _asks_attention(model: nn.Module, path: str) -> bool:
    """Return whether the rewritten forward of an attention asks for the dtype that its attention function reads."""
    forward: Any = getattr(type(model.get_submodule(path)), "fused_norm_forward", None)
    return forward is not None and "fused_norm_read_dtype" in inspect.unwrap(forward).__code__.co_names


def _attentions_that_cast(model: nn.Module, paths: Sequence[str], tokens: Tensor) -> set[str]:
    """The modules at ``paths`` in whose stock forward PyTorch's attention casts float32 queries and keys to 16 bits.

    Keys that are repeated before are not among them: their gradients are summed in the dtype that they have.
    """
    casting: set[str] = set()
    running: list[str] = []
    attend = functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if running and query.dtype == key.dtype == torch.float32:
            groups = getattr(model.get_submodule(running[-1]), "num_key_value_groups", 1)
            if groups == 1 or named.get("enable_gqa"):
                casting.add(running[-1])
        return attend(query, key, *arguments, **named)

    with contextlib.ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)).remove)
            stack.callback(module.register_forward_hook(lambda *_: running.clear()).remove)
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", noted))
        stack.enter_context(torch.autocast(tokens.device.type, torch.bfloat16))
        stack.enter_context(torch.no_grad())
        stack.enter_context(disabled())
        model(input_ids=tokens, use_cache=False)
    return casting

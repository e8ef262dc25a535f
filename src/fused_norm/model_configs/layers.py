"""The layers of any causal language model, and the same with linears of 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BLOCK_SIZE = 64
"""Weights of 4 bits that share a scale."""


def quantise(model: Any, dtype: torch.dtype = torch.bfloat16, *, in_fp32: bool = True) -> None:
    """Pack the linears of a model's layers, in place, into nf4 with double quantisation; all else is frozen, in fp32.

    ``dtype``: of the linears' products. ``in_fp32=False``: all else keeps its dtype, as TRL leaves it.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit
    from peft import prepare_model_for_kbit_training

    for layer in layers_of(model).values():
        for path, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear:
                weight, sizes = linear.weight, (linear.in_features, linear.out_features, linear.bias is not None)
                # Without weights first: they are packed when they are moved to the device that they are on.
                packed = Linear4bit(*sizes, dtype, device="meta")
                packed.weight = Params4bit(
                    weight.detach(), False, quant_type="nf4", blocksize=BLOCK_SIZE, module=packed
                )
                packed.bias = linear.bias
                layer.set_submodule(path, packed.to(weight.device))
    model.is_loaded_in_4bit = True
    if in_fp32:
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    else:
        model.requires_grad_(False)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The members of the outermost ``ModuleList`` of each branch of ``model``, by path, in the order they run in."""
    layers: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not path.startswith(tuple(f"{layer}." for layer in layers)):
            layers |= {f"{path}.{name}".removeprefix("."): layer for name, layer in module.named_children()}
    return layers

"""The gate of an MLP is fused in any statement or expression, and a rewritten forward returns the original's values."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

import fused_norm

from .forwards import assert_same_values, everything, layer_of, patterns_of, rewritten_forward, source_of_body

HALVES = "gate, up = self.gate_up(x).chunk(2, dim=-1)"
PLAIN, PACKED = "self.act, gate=self.gate(x), up=self.up(x)", "self.act, packed0"
BY_NAME = "self.act, gate=gate, up=up"
GATES = {
    "Llama": ("return self.other(self.act(self.gate(x)) * self.up(x))", PLAIN),
    "up first": (
        "y = self.up(x) * self.act(self.gate(x) * self.factor); return self.other(y)",
        "self.act, up=self.up(x), gate=self.gate(x) * self.factor",
    ),
    "over statements": (
        "gate = self.gate(x); hidden = self.act(gate); gate = self.up(x); return self.other(hidden * gate)",
        "self.act, gate=hidden, up=gate",
    ),
    "a name used again": (
        "y = self.act(self.gate(x)); y = y * self.up(x); return self.other(y)", "self.act, gate=y, up=self.up(x)"
    ),
    "a function": (
        "return self.other(functional.nn.silu(self.gate(x)) * self.up(x))",
        "functional.nn.silu, gate=self.gate(x), up=self.up(x)",
    ),
    "under an if": (
        """
        for _ in range(2):
            if self.flag:
                x = self.act(self.gate(x)) * self.up(x) * self.factor
        return x
        """,
        PLAIN,
    ),
    "Phi 3": (
        "up = self.gate_up(x); gate, up = up.chunk(2, dim=-1); up = up * self.act(gate); return self.other(up)", PACKED
    ),
    "Granite": ("halves = self.gate_up(x).chunk(2, -1); return self.act(halves[0]) * halves[1]", PACKED),
    "the second half is the gate": (
        "halves = self.gate_up(x).chunk(2, -1); return self.act(halves[1]) * halves[0]",
        "self.act, gate=halves[1], up=halves[0]",
    ),
    "a half is read later": (f"{HALVES}; y = self.act(gate) * up; return y + gate", BY_NAME),
    "a half is read in the next round": (
        f"""
        up = x
        for _ in range(2):
            x = x + up
            {HALVES}
            x = self.act(gate) * up
        return x
        """,
        BY_NAME,
    ),
    "a half is deleted": (f"{HALVES}; y = self.act(gate) * up; del gate; return y", BY_NAME),
    "the whole is changed between": (
        "packed = self.gate_up(x); gate, up = packed.chunk(2, dim=-1); packed.mul_(3); return self.act(gate) * up",
        BY_NAME,
    ),
    # The activation is called after that in stock too.
    "the other factor writes first": (
        "x = Number(x); return (x.mul_(2) * self.act(x)).value", "self.act, up=x.mul_(2), gate=x"
    ),
}  # fmt: skip
"""The body of an MLP's forward, and the arguments of the call that computes its gate."""


@pytest.mark.parametrize("name", GATES)
def test_the_product_becomes_one_call_and_every_value_stays(name: str) -> None:
    before, arguments = GATES[name]
    is_packed = arguments.endswith("packed0")
    call = f"self.fused_norm_gate{'_packed' if is_packed else ''}('silu', {arguments})"
    layer = layer_of(before, "x")
    body = source_of_body(rewritten_forward(layer, everything(layer)))
    assert body.count(call) == 1, f"{body}\ndoes not call {call}"
    assert not re.search(r"act\(|silu\(|chunk" if is_packed else r"act\(|silu\(", body), f"{body}\ncalls more than that"
    assert_same_values(layer, (2,))


LEFT_ALONE = {
    "a write between": """
        packed = Packed(self.gate(x)); hidden = self.act(packed.halves[0]); packed.mul_(2)
        return hidden * self.up(x)
    """,
    "a write of an item between": """
        gate = [Number(x)]; hidden = self.act(gate[0]); gate[0] = Number(1)
        return (hidden * self.up(2)).value
    """,
    "the other factor writes": "x = Number(x); return (self.act(x) * x.mul_(2)).value",
    "an own method writes an alias": "x = y = Number(x); z = self.act(x); up = self.doubled(y); return (z * up).value",
    "a function writes the whole": """
        packed = Packed(Number(x), Number(3)); gate, _ = packed.chunk(2, dim=-1)
        return (self.act(gate) * doubled(packed)).value
    """,
    "a function of PyTorch writes into what it is given": """
        x = Number(x)
        return (self.act(x) * functional.nn.scale(2, out=x)).value
    """,
    "scales": "return self.act(x) * self.factor + self.act(x) * 3",
    "scales by an argument": "return self.act(x) * annotated + self.act(x) * default",
    "later": "return [self.act(y) * x for y in range(3)], (self.act(x) * self.up(x) if self.flag else x)",
    "masks": "padding_mask = x + 1; return self.act(self.gate(x)) * padding_mask",
    "a function of its own": "return silu(self.gate(x)) * self.up(x)",
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_only_resembles_a_gate_is_left_alone(name: str) -> None:
    parameters = "x, silu=silu" if "of its own" in name else "x, annotated: int = 4, default=2"
    mlp = layer_of(LEFT_ALONE[name], parameters)
    assert not [gate for gate in patterns_of(mlp).gates if gate.act.name == "act" or gate.act.is_function]


class WrittenOtherwise(nn.Module):
    """Gates in the forms that are not rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.gate, self.up, self.scale = nn.SiLU(), nn.Linear(4, 4), nn.Linear(4, 4), 0.5

    def forward(self, x):
        y = torch.mul(self.act(self.gate(x)), self.up(x))
        y = self.act(self.gate(y)).mul(self.up(x))
        z = self.act(y)
        z *= self.up(x)
        z = self.act(z) * x if self.training else z
        return torch.mul(self.act(z), 2) * 3 + self.act(z) * self.scale


def test_gates_that_are_written_otherwise_and_what_only_scales_are_left_alone() -> None:
    model = WrittenOtherwise()
    assert fused_norm.apply_fused_norm(model, strict=False).rows == ()
    assert type(model) is WrittenOtherwise


def test_under_autocast_gelu_in_single_operations_is_of_the_dtype_that_pow_gives_it(device: str) -> None:
    """On a GPU autocast computes ``pow`` in float32, and all that follows it."""
    config = AutoConfig.for_model("t5", d_model=64, d_ff=96, feed_forward_proj="gated-gelu", dropout_rate=0.0)
    stock = T5DenseGatedActDense(config).to(device)
    fused = copy.deepcopy(stock)
    assert fused_norm.apply_fused_norm(fused, strict=False).counts["mlp"] == 1
    results = []
    for mlp in (stock, fused):
        products: list[torch.Tensor] = []
        mlp.dropout.register_forward_pre_hook(lambda _, args, products=products: products.append(args[0]))
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            y = mlp(x)
        y.float().square().sum().backward()
        results.append((*products, y, x.grad, *(weight.grad for weight in mlp.parameters())))
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())
    assert results[1][0].dtype == (torch.float32 if device == "cuda" else torch.bfloat16)

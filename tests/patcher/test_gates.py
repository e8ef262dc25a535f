"""The gate of an MLP is fused wherever its product stands; every value stays, and so does the order of the calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.glm.modeling_glm import GlmMLP
from transformers.models.granitemoeshared.modeling_granitemoeshared import GraniteMoeSharedMLP
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import fused_norm
from fused_norm.patcher.patterns import patterns_of

from .forwards import Packed, Recorder, run

FUSED = ["activation act", "gate act"]
PACKED = ["packed act"]
BY_A_FUNCTION = ["activation silu", "gate silu"]


def silu(x: int) -> int:
    return x * 41 + 3


class Number:
    """A number that can be written into."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __mul__(self, other: Number | int) -> Number:
        return Number(self.value * getattr(other, "value", other))

    def __add__(self, other: int) -> Number:
        return Number(self.value + other)

    def mul_(self, factor: int) -> Number:
        self.value *= factor
        return self


def doubled(x: Number | Packed) -> Number:
    for one in getattr(x, "halves", (x,)):
        one.mul_(2)
    return one


functional = SimpleNamespace(nn=SimpleNamespace(silu=silu, dropout=lambda x, inplace: x.mul_(2)))


class Llama(Recorder):
    def forward(self, x):
        return self.other(self.act(self.gate(x)) * self.up(x))


class UpFirst(Recorder):
    def forward(self, x):
        y = self.up(x) * self.act(self.gate(x) * self.factor)
        return self.other(y)


class OverStatements(Recorder):
    def forward(self, x):
        gate = self.gate(x)
        hidden = self.act(gate)
        gate = self.up(x)
        return self.other(hidden * gate)


class WithAFunction(Recorder):
    def forward(self, x):
        return self.other(functional.nn.silu(self.gate(x)) * self.up(x))


class OverStatementsWithAFunction(Recorder):
    def forward(self, x):
        gate = silu(self.gate(x))
        return self.other(self.up(x) * gate)


class HalvesWithAFunction(Recorder):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return silu(gate) * up


class UnderAnIf(Recorder):
    def forward(self, x):
        for _ in range(2):
            if self.flag:
                x = self.act(self.gate(x)) * self.up(x) * self.factor
        return x


class Phi3(Recorder):
    def forward(self, x):
        up = self.gate_up(x)
        gate, up = up.chunk(2, dim=-1)
        up = up * self.act(gate)
        return self.other(up)


class Granite(Recorder):
    def forward(self, x):
        halves = self.gate_up(x).chunk(2, -1)
        return self.act(halves[0]) * halves[1]


class Experts(Recorder):
    def forward(self, x):
        total = 0
        for expert in range(3):
            gate, up = self.gate_up(x + expert).chunk(2, dim=-1)
            total = total + self.act(gate) * up
        return total


class UpIsTheFirstHalf(Recorder):
    def forward(self, x):
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.act(gate) * up


class ReadsAHalfLater(Recorder):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y = self.act(gate) * up
        return y + gate


class ReadsAHalfInTheNextRound(Recorder):
    def forward(self, x):
        up = x
        for _ in range(2):
            x = x + up
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            x = self.act(gate) * up
        return x


class ChangesTheWholeBetween(Recorder):
    def forward(self, x):
        packed = self.gate_up(x)
        gate, up = packed.chunk(2, dim=-1)
        packed.mul_(3)
        return self.act(gate) * up


class ClampsAHalf(Recorder):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        gate = min(gate, 100)
        return self.act(gate) * up


class ReadsAHalfInAFunction(Recorder):
    def forward(self, x):
        def half():
            return gate

        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.act(gate) * up + half()


class SecondHalfIsTheGate(Recorder):
    def forward(self, x):
        halves = self.gate_up(x).chunk(2, -1)
        return self.act(halves[1]) * halves[0]


class NameIsUsedAgain(Recorder):
    def forward(self, x):
        hidden = self.act(self.gate(x))
        hidden = hidden * self.up(x)
        return self.other(hidden)


class InACase(Recorder):
    def forward(self, x):
        match self.factor:
            case 7:
                x = self.act(self.gate(x)) * self.up(x)
            case other:
                x = other
        return x


class OtherFactorWritesFirst(Recorder):
    """The activation is called after that in stock too."""

    def forward(self, x):
        x = Number(x)
        return (x.mul_(2) * self.act(x)).value


@pytest.mark.parametrize(
    ("mlp", "calls"),
    [
        (SecondHalfIsTheGate, FUSED),
        (NameIsUsedAgain, FUSED),
        (InACase, FUSED),
        (OtherFactorWritesFirst, FUSED),
        (Llama, FUSED),
        (UpFirst, FUSED),
        (OverStatements, FUSED),
        (WithAFunction, BY_A_FUNCTION),
        (OverStatementsWithAFunction, BY_A_FUNCTION),
        (HalvesWithAFunction, ["packed silu"]),
        (UnderAnIf, FUSED * 2),
        (Phi3, PACKED),
        (Granite, PACKED),
        (Experts, PACKED * 3),
        (UpIsTheFirstHalf, FUSED),
        (ReadsAHalfLater, FUSED),
        (ReadsAHalfInTheNextRound, FUSED * 2),
        (ChangesTheWholeBetween, FUSED),
        (ClampsAHalf, FUSED),
        (ReadsAHalfInAFunction, FUSED),
    ],
)
@pytest.mark.parametrize("may_postpone", [True, False])
def test_the_product_becomes_one_call_and_every_value_stays(mlp, calls, may_postpone: bool) -> None:
    made = run(mlp, 2, may_postpone=may_postpone)
    assert [call for call in made if not call.startswith("add")] == calls


class ReadsTheActivationTwice(Recorder):
    def forward(self, x):
        hidden = self.act(self.gate(x))
        return hidden * self.up(x) + hidden


class ReplacesTheActivation(Recorder):
    def forward(self, x):
        hidden = self.act(self.gate(x))
        if self.flag:
            hidden = self.other(x)
        return hidden * self.up(x)


class WritesBetween(Recorder):
    def forward(self, x):
        packed = Packed(self.gate(x))
        hidden = self.act(packed.halves[0])
        packed.mul_(2)
        return hidden * self.up(x)


class WritesAnItemBetween(Recorder):
    def forward(self, x):
        gate = [Number(x)]
        hidden = self.act(gate[0])
        gate[0] = Number(1)
        return (hidden * self.up(2)).value


class OtherFactorWrites(Recorder):
    def forward(self, x):
        x = Number(x)
        return (self.act(x) * x.mul_(2)).value


class OwnMethodWrites(Recorder):
    """As an in-place dropout does."""

    def doubled(self, x):
        return x.mul_(2)

    def forward(self, x):
        x = Number(x)
        return (self.act(x) * self.doubled(x)).value


class OwnMethodWritesAnAliasBetween(OwnMethodWrites):
    def forward(self, x):
        x = also = Number(x)
        hidden = self.act(x)
        up = self.doubled(also)
        return (hidden * up).value


class FunctionWritesTheWhole(Recorder):
    def forward(self, x):
        packed = Packed(Number(x), Number(3))
        gate, _ = packed.chunk(2, dim=-1)
        return (self.act(gate) * doubled(packed)).value


class FunctionOfPyTorchWrites(Recorder):
    def forward(self, x):
        x = Number(x)
        return (self.act(x) * functional.nn.dropout(x, inplace=True)).value


class Scales(Recorder):
    def forward(self, x):
        return self.act(x) * self.factor + self.act(x) * 3


class Later(Recorder):
    def forward(self, x):
        return [self.act(y) * x for y in range(3)], (self.act(x) * self.up(x) if self.flag else x)


class Adds(Recorder):
    def forward(self, x):
        return self.act(self.gate(x)) + self.up(x)


class Masks(Recorder):
    def forward(self, x):
        padding_mask = x + 1
        return self.act(self.gate(x)) * padding_mask


class CallsAFunctionOfItsOwn(Recorder):
    def forward(self, x, silu=silu):
        return silu(self.gate(x)) * self.up(x)


class CallsAnotherFunction(Recorder):
    def forward(self, x):
        return abs(self.gate(x)) * self.up(x)


@pytest.mark.parametrize(
    "mlp",
    [
        ReadsTheActivationTwice,
        ReplacesTheActivation,
        WritesBetween,
        WritesAnItemBetween,
        OtherFactorWrites,
        OwnMethodWrites,
        OwnMethodWritesAnAliasBetween,
        FunctionWritesTheWhole,
        FunctionOfPyTorchWrites,
        Scales,
        Later,
        Adds,
        Masks,
        CallsAFunctionOfItsOwn,
        CallsAnotherFunction,
    ],
    ids=lambda mlp: mlp.__name__,
)
def test_what_only_resembles_a_gate_is_left_alone(mlp) -> None:
    assert not [gate for gate in patterns_of(mlp).gates if gate.act.name == "act" or gate.act.is_function]
    assert not [call for call in run(mlp, 2) if not call.startswith("onto")], "a sum may be that of a norm"


@pytest.mark.parametrize(
    ("mlp", "acts"),
    [
        (LlamaMLP, ["act_fn", "up_proj"]),
        (Gemma2MLP, ["act_fn", "up_proj"]),
        (Phi3MLP, ["activation_fn"]),
        (GlmMLP, ["activation_fn"]),
        (GraniteMoeSharedMLP, ["activation"]),
        (Gemma3nTextMLP, ["act_fn", "up_proj"]),
        (Lfm2MLP, ["F.silu", "w3"]),
    ],
)
def test_what_mlps_of_transformers_have(mlp, acts: list[str]) -> None:
    gates = patterns_of(mlp).gates
    assert [gate.act.name for gate in gates] == acts
    assert {gate.number for gate in gates} == {0}


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


def test_gates_that_are_written_otherwise_have_rows_and_what_only_scales_has_none() -> None:
    report = fused_norm.apply_fused_norm(WrittenOtherwise(), strict=False)
    reasons = [site.reason for site in report.kept if site.kind == "mlp"]
    sources = [
        "torch.mul(self.act(self.gate(x)), self.up(x))",
        "self.act(self.gate(y)).mul(self.up(x))",
        "z *= self.up(x)",
        "self.act(z) * x",
    ]
    assert sorted(reasons) == sorted(
        f"its product, {one}, is written in a way that is not rewritten" for one in sources
    )
    assert report.counts["mlp"] == 0
    off = fused_norm.apply_fused_norm(WrittenOtherwise(), mlp=False, strict=False)
    assert [site.cause for site in off.kept if site.kind == "mlp"] == ["option"] * len(sources)

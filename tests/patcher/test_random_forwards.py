"""Fused random forwards have stock's values and gradients, and no patch fails."""

from __future__ import annotations

import inspect
import logging
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import fused_norm

from .by_reference import by_reference
from .models import assert_all_near, slow
from .random_forwards import TOKENS, WIDTH, Layer, Writer, layer_with

BF16 = torch.bfloat16


def step(model: nn.ModuleList, *, flag: bool, mixed: bool) -> dict[str, Tensor] | str:
    """Return by name what a forward returns and the gradients of everything, or the error that it raises."""
    for module in model.modules():
        if hasattr(module, "flag"):
            module.flag = flag
    torch.manual_seed(3)
    model.zero_grad()
    device = next(model.parameters()).device
    inputs = [torch.randn(2, TOKENS, WIDTH, device=device, requires_grad=True) for _ in range(4)]
    try:
        with torch.autocast(device.type, BF16, enabled=mixed):
            values = model[0](*(x * 1 for x in inputs))
        sum((value * torch.randn_like(value)).sum() for value in values if value.requires_grad).backward()
    except (RuntimeError, NameError) as error:  # an edit that autograd refuses, a name without a value
        return f"{type(error).__name__}: {error}"
    leaves = {**dict(zip("abcd", inputs, strict=True)), **dict(model.named_parameters())}
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {f"value {place}": value.detach() for place, value in enumerate(values)} | gradients


def compare(layer: type[Layer], seed: int, counted: Counter[str], device: str) -> list[str]:
    """What a layer of this class computes fused otherwise than stock."""
    torch.manual_seed(seed)
    model = nn.ModuleList([layer()]).to(device)
    modes = [(True, seed % 2 == 0), (False, seed % 2 == 1)]
    stock = [step(model, flag=flag, mixed=mixed) for flag, mixed in modes]
    try:
        report = fused_norm.apply_fused_norm(model, strict=False)
    except Exception as error:
        return [f"apply raises {type(error).__name__}: {error}"]
    counted["forwards"] += 1
    counted["blocks with consumers"] += sum(row.reason is None for row in report.shared_inputs)
    for block in model.modules():
        for rewrite in getattr(block, "fused_norm_rewrites", ()):
            counted.update({rewrite.pattern, *(f"{rewrite.pattern}: {part}" for part in rewrite.parts)})
    differences = []
    with by_reference() as called:
        for (flag, mixed), expected in zip(modes, stock, strict=True):
            if isinstance(expected, str):
                counted["stock raises"] += 1
            elif all(x.isfinite().all() for name, x in expected.items() if name.startswith("value")):
                counted["steps"] += 1
                actual = step(model, flag=flag, mixed=mixed)
                try:
                    assert isinstance(actual, dict), actual
                    assert_all_near(actual, expected, 2e-2 if mixed else 1e-5)
                except AssertionError as error:
                    differences.append(f"flag {flag}, mixed {mixed}: {error}")
    counted.update(called)
    return differences


SEEN_IN_TEN = {
    "steps": 15, "gates": 18, "adds: norm": 11, "adds: inner": 4, "adds: shared_inputs": 1.5, "heads": 6,
    "heads: rotation": 3, "rotations": 3, "consumed_norms: shared_inputs": 0.4, "consumed_norms: input": 1.2,
    "inputs": 1.2, "glu": 30, "add_rms_norm": 10, "add_rms_norm_for_consumers": 1, "rms_norm_for_consumers": 2.5,
    "norm_add": 2.5, "norm_add_norm": 2, "qk_norm": 9, "rope": 3,
}  # fmt: skip
"""The least counts of rewrites and operators in ten forwards: a test of fewer would show nothing."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "fused_norm")


@pytest.mark.parametrize("seeds", [range(30), *(slow(range(i, i + 250)) for i in range(80, 1080, 250))])
def test_random_forwards_compute_what_they_compute_in_stock(seeds: range, device: str) -> None:
    counted: Counter[str] = Counter()
    differences = []
    for seed in seeds:
        layer = Writer(seed).layer()
        if reasons := compare(layer, seed, counted, device):
            differences.append("\n".join([f"seed {seed}", *reasons, inspect.getsource(layer.forward)]))
    assert not differences, "\n\n".join(differences)
    scarce = {kind: counted[kind] for kind, count in SEEN_IN_TEN.items() if counted[kind] < count * len(seeds) / 10}
    assert not scarce


PLAIN = "return self.down(x) if y is None else x + y"
TOGETHER: dict[str, tuple[str, dict[str, int]]] = {
    "a gate in a norm that is fused with an add": (
        "c = self.inner(self.act(self.gate(b)) * self.up(b)); c = a + c; d = self.norm(c)",
        {"gates": 1, "adds: inner": 1, "adds: norm": 1},
    ),
    "an activation ahead of such a norm": (
        "c = self.act(self.gate(b)); c = self.inner(c * self.up(b)); c = a + c; d = self.norm(c)",
        {"gates": 1, "adds: inner": 1, "adds: norm": 1},
    ),
    "an activation ahead of a sum that is normed under a condition": (
        "c = self.act(self.gate(b)); c = self.inner(c * self.up(b)); c = a + c\nif self.flag:\n    c = self.norm(c)",
        {"gates": 1, "adds: inner": 1, "adds: norm": 1},
    ),
    "a norm of a branch whose input is read later": ("c = self.inner(b); c = a + c; d = b * 2", {"adds: inner": 1}),
    "norms of heads, the input of one read later": (
        "c = self.query_norm(b); d = self.key_norm(d); a = b * 2",
        {"heads": 1, "consumed_norms": 0},
    ),
    "a norm of heads behind an add": (
        "b = a + b; c = self.query_norm(b); d = self.key_norm(d)",
        {"heads": 0, "adds: norm": 1},
    ),
    "a norm of heads before an add": (
        "c = self.query_norm(c); d = self.key_norm(d); d = a + d",
        {"heads": 0, "adds: inner": 1},
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_rewrites_of_one_statement_go_together_or_exclude_each_other(name: str, device: str) -> None:
    body, expected = TOGETHER[name]
    counted: Counter[str] = Counter()
    layer = layer_with(f"{body}\nreturn a, b, c, d", PLAIN, PLAIN)
    assert compare(layer, 0, counted, device) == []
    assert {kind: counted[kind] for kind in expected} == expected

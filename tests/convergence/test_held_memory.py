"""The bytes that a step holds are measured; that a level which saves none is named, ``tests/planted`` shows."""

import torch
from torch import nn

from fused_norm.convergence.held_memory import held_memory

from .plans import DEVICE


def test_a_step_holds_in_each_layer_what_autograd_keeps_of_it():
    layers = {"a": nn.Linear(5, 5, bias=False).to(DEVICE), "b": nn.Tanh()}
    x = torch.randn(11, 5, device=DEVICE, requires_grad=True)
    by_layer, after_backward = held_memory(
        lambda: layers["b"](layers["a"](x) * x.exp()).sum(), layers, torch.device(DEVICE)
    )
    assert by_layer == {"a": 220, "b": 220}
    # The outputs of the linear, the exponential and the tanh; at most the loss's own bytes on top.
    assert 3 * 220 <= after_backward <= 3 * 220 + 64

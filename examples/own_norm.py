"""Fuse norms and layers of your own: what they compute decides, not what they are called.

python examples/own_norm.py
"""

import copy

import torch
from torch import nn

from fused_norm import apply_fused_norm


class Scaler(nn.Module):
    """An RMSNorm with a weight round zero, as Gemma has it, under a name of its own."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = 1e-6

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Layer(nn.Module):
    """Two residual blocks: an add and the norm of its sum become one kernel, an activation and its product another."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = Scaler(width), Scaler(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x):
        residual = x
        x = self.first(x)
        x = self.mix(x)
        x = residual + x
        residual = x
        x = self.second(x)
        x = self.down(self.act(self.gate(x)) * self.up(x))
        return residual + x


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stock = nn.Sequential(Layer(96), Layer(96)).to(device, torch.bfloat16)
    for module in stock.modules():
        if isinstance(module, Scaler):
            nn.init.normal_(module.weight, std=0.3)
    fused = copy.deepcopy(stock)
    report = apply_fused_norm(fused)
    print(report)

    x = torch.randn(4, 16, 96, device=device, dtype=torch.bfloat16)
    different = (stock(x) != fused(x)).float().mean().item()
    print(f"outputs that differ from stock's: {different:.2%}")
    return report, different


if __name__ == "__main__":
    main()

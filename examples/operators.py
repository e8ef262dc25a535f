"""The operators alone, for models that are not transformers': each is a function with a backward.

python examples/operators.py
"""

import torch

from fused_norm import kernels


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def random(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    batch, tokens, heads, kv_heads, width = 2, 16, 4, 2, 64
    x, branch, weight, inner = random(batch, tokens, 256), random(batch, tokens, 256), random(256), random(256)

    made = {}
    made["rms_norm"] = kernels.rms_norm(x, weight, 1e-6)
    made["rms_norm, as Gemma has it"] = kernels.rms_norm(x, weight, 1e-6, casting="gemma", zero_centered=True)

    # The sum is what the next residual block adds to.
    made["add_rms_norm"], total = kernels.add_rms_norm(branch, x, weight, 1e-6)
    assert torch.equal(total, x + branch)
    made["norm_add_norm"], total = kernels.norm_add_norm(branch, x, inner, weight, 1e-6)

    q, k = random(batch, heads, tokens, width), random(batch, kv_heads, tokens, width)
    q_weight, k_weight = random(width), random(width)
    angles = torch.arange(tokens, device=device)[:, None] / 10000 ** (torch.arange(0, width, 2, device=device) / width)
    cos, sin = (f(torch.cat((angles, angles), -1))[None].to(torch.bfloat16) for f in (torch.cos, torch.sin))
    made["qk_norm_rope, q"], made["qk_norm_rope, k"] = kernels.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, 1e-6)

    made["glu"] = kernels.glu(x, branch, "silu")  # silu(x) * branch

    for name, y in made.items():
        print(f"{name:<28}{tuple(y.shape)!s:<20}{y.dtype}")
    sum(y.float().square().mean() for y in made.values()).backward()
    print(f"gradient of the weight: norm {weight.grad.norm().item():.4f}")
    return x, weight, made


if __name__ == "__main__":
    main()

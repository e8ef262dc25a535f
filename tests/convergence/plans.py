"""A plan on tiny models that runs in a few seconds, and models of one layer."""

from dataclasses import replace

import torch

from fused_norm.convergence.model_source import ModelSource
from fused_norm.convergence.plan import Plan
from fused_norm.convergence.tiers import TIERS
from fused_norm.model_configs import build, tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = torch.arange(33, device=DEVICE)[None]


def small(family="llama", *, dtype=torch.float32, layers=1, **changes):
    """Build a tiny model of a family with this many layers."""
    return build(tiny_config(family, num_hidden_layers=layers, **changes), seed=0, dtype=dtype).to(DEVICE)


def tiny_plan(comparisons, layers=1, **changes):
    """Return a plan with two steps and three controls for each family that is compared."""
    settings = TIERS["quick"].settings
    settings = replace(settings, steps=2, warmup_steps=1, controls=3)
    tokens = torch.randint(32, 127, (16, settings.length), generator=torch.Generator().manual_seed(0))
    plan = Plan(
        comparisons=tuple(comparisons),
        sources={
            model: ModelSource.of_family(model, settings.overrides_of(model) | {"num_hidden_layers": layers})
            for model in {comparison.model: None for comparison in comparisons}
        },
        settings=settings,
        tokens=dict.fromkeys((comparison.model for comparison in comparisons), tokens),
        facts={"data": 1},
        cpu=not torch.cuda.is_available(),
    )
    return replace(plan, **changes)

"""Models with random weights, above all the tiny ones of the table, built the same way every time."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The config of a family's tiny model.

    Args:
        model_type: a key of ``FAMILIES``.
        overrides: config arguments that replace those of the table or add to them.

    Raises:
        ValueError: ``model_type`` is not in the table.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"no tiny model of type {model_type!r}; there are {', '.join(FAMILIES)}")
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **FAMILIES[model_type].tiny_arguments(overrides))


def families_here() -> tuple[str, ...]:
    """The families of the table that this release of transformers has."""
    from transformers import CONFIG_MAPPING

    return tuple(name for name in FAMILIES if name in CONFIG_MAPPING)


def build(
    config_or_type: PreTrainedConfig | str,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    norm_std: float = 0.3,
) -> PreTrainedModel:
    """A causal language model with random weights, the same for the same arguments on every device.

    Weights are drawn on the CPU, and the caller's random number generators are left as they were. Norm weights are
    moved away from their initial ones or zeros, because a wrong cast or a forgotten gamma does not show if gamma
    is one, and so are biases of experts, which start at zero.

    Args:
        config_or_type: a config, which is copied, or a key of ``FAMILIES``, which stands for its tiny config.
        seed: of all weights.
        dtype: of all parameters.
        device: where the model ends up.
        norm_std: standard deviation of the Gaussian noise added to the norm weights, and a third of it to biases of
            experts; 0 leaves both.

    Returns:
        The model, in training mode.

    Raises:
        ValueError: the type is not in the table, or transformers has no causal language model for the config.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(config_or_type) if isinstance(config_or_type, str) else copy.deepcopy(config_or_type)
    # Not torch.manual_seed: it would reseed the generators of all GPUs too, which the fork does not put back.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        _add_noise(model, norm_std)
    return model.to(device).train()


@torch.no_grad()
def _add_noise(model: nn.Module, std: float) -> None:
    for module in model.modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if (is_norm and name == "weight") or name.endswith("_proj_bias"):  # a bias is [experts, N]
                noise = torch.randn(parameter.shape, dtype=torch.float32) * (std if name == "weight" else std / 3)
                parameter.add_(noise.to(parameter.dtype))

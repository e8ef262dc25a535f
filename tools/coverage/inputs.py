"""Inputs for a model of any kind: made from the names of what its forward takes, and tried until one runs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]

_BATCH, _TOKENS, _FRAMES = 2, 12, 64
_LARGEST_IMAGE = 512
_MOST = 24
_BINS = ("num_mel_bins", "input_feat_per_channel", "n_mels", "feature_size", "num_mel_channels", "input_size")


def inputs_of(module: nn.Module) -> Iterator[Inputs]:
    """Inputs that a model, or a part of it with a config, may run with; the most likely ones first."""
    config = getattr(module, "config", None)
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(type(module).forward).parameters.items()
        if name != "self" and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    main = getattr(type(module), "main_input_name", "input_ids")
    names = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    if not names:
        names = [main] if main in parameters else [name for name in ("input_ids", "pixel_values") if name in parameters]
    if "decoder_input_ids" in parameters:
        names.append("decoder_input_ids")
    if not names and parameters:
        names = [next(iter(parameters))]
    for chosen in (names, [*names, "inputs_embeds"]) if "inputs_embeds" in parameters else (names,):
        if "inputs_embeds" in chosen:
            chosen = [name for name in chosen if name != "input_ids"]
        choices = [list(_values(name, config)) for name in dict.fromkeys(chosen)]
        for values in itertools.islice(itertools.product(*choices), _MOST):
            inputs = dict(zip(dict.fromkeys(chosen), values, strict=True))
            yield inputs | ({"use_cache": False} if "use_cache" in parameters else {})


def _values(name: str, config: Any) -> Iterator[Any]:
    """The values that an argument of this name may have."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = _first(config, "hidden_size", "d_model", "embed_dim", "dim") or _first(text, "hidden_size", "d_model") or 64
    if name.endswith("input_ids") or name in ("input", "tokens"):
        vocabulary = min(_first(text, "vocab_size", "text_vocab_size") or 128, 400)
        books = _first(config, "num_codebooks", "num_channels") or 0
        yield torch.randint(3, max(vocabulary, 5), (_BATCH, _TOKENS), generator=generator)
        if books > 1:
            yield torch.randint(3, vocabulary, (_BATCH, _TOKENS, books), generator=generator)
            yield torch.randint(3, vocabulary, (_BATCH * books, _TOKENS), generator=generator)
    elif "grid_thw" in name:
        yield torch.tensor([[1, 4, 4]])
    elif "mask" in name:
        yield torch.ones(_BATCH, _TOKENS, dtype=torch.long)
        yield torch.ones(_BATCH, _FRAMES, dtype=torch.long)
    elif "position_embeddings" in name:
        head = _first(config, "head_dim") or width // (_first(config, "num_attention_heads", "num_heads") or 1)
        yield random(_BATCH, _TOKENS, head), random(_BATCH, _TOKENS, head)
    elif name.startswith("pixel") or "image" in name:
        yield from _images(config, random)
    elif "features" in name or "spectrogram" in name:
        bins = _first(config, *_BINS) or 80
        longest = 2 * (_first(config, "max_source_positions") or _FRAMES)
        yield random(_BATCH, bins, min(longest, 3000))
        yield random(_BATCH, _FRAMES, bins)
        yield random(_BATCH, bins, _FRAMES)
        yield random(_BATCH, 1, _FRAMES, bins)
        yield random(_FRAMES, bins)
    elif name in ("input_values", "audio_values", "waveform"):
        yield random(_BATCH, 4000)
        yield random(_BATCH, 1, 4000)
        yield random(_BATCH, _FRAMES, _first(config, "num_mel_bins") or 80)
    elif name in ("hidden_states", "inputs_embeds", "embeddings", "x", "hidden_state", "encoder_hidden_states"):
        yield random(_BATCH, _TOKENS, width)
        patch = _first(config, "patch_size")
        if type(patch) is int:
            channels = _first(config, "in_channels", "in_chans", "num_channels") or 3
            yield random(16, channels * (_first(config, "temporal_patch_size") or 1) * patch * patch)
        yield random(16, width)
        yield random(_BATCH, width, _TOKENS)
    elif name in ("past_values", "past_time_features", "time_series"):
        yield random(_BATCH, _first(config, "context_length") or 64)
    else:
        yield random(_BATCH, _TOKENS, width)
        yield torch.randint(3, 100, (_BATCH, _TOKENS), generator=generator)
        yield None


def _images(config: Any, random: Any) -> Iterator[Any]:
    vision = getattr(config, "vision_config", None) or config
    channels = _first(vision, "num_channels", "in_channels", "in_chans") or 3
    size, patch = _first(vision, "image_size"), _first(vision, "patch_size")
    size = size[0] if isinstance(size, (list, tuple)) else size
    patch = patch[0] if isinstance(patch, (list, tuple)) else patch
    sizes = [] if type(patch) is not int else [4 * patch]
    for side in dict.fromkeys([*sizes, *([size] if type(size) is int and size <= _LARGEST_IMAGE else []), 64]):
        yield random(_BATCH, channels, side, side)
        yield random(1, 2, channels, side, side)
    if type(patch) is int:
        yield random(16, channels * (_first(vision, "temporal_patch_size") or 1) * patch * patch)
        yield random(1, 16, channels * patch * patch)


def _first(config: Any, *names: str) -> Any:
    """The first of these attributes that a config has, and that is not None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

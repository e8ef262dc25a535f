"""Folders with tiny models and a tokenizer of bytes, as ``from_pretrained`` takes them: no hub is needed."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fused_norm.model_configs import build

END = "<|end|>"


def tokenizer_of_bytes(*special: str) -> PreTrainedTokenizerFast:
    """One token for each byte, one for the end of a text, which pads too, and one for each of ``special``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END, *special])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def save_checkpoint(model_type: str, folder: Path) -> Path:
    """Save the tiny model of a family of the table, and the tokenizer."""
    model = build(model_type, seed=0)
    tokenizer = tokenizer_of_bytes()
    model.config.eos_token_id = model.config.pad_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

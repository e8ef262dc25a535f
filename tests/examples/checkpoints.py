"""Folders with tiny models and a tokenizer of bytes, as ``from_pretrained`` takes them: no hub is needed."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ImageProcessor,
    Gemma3Processor,
    PreTrainedTokenizerFast,
)

from fused_norm.model_configs import FAMILIES, build

END = "<|end|>"
SETTINGS = {"eos_token": END, "pad_token": END, "model_input_names": ["input_ids", "attention_mask"]}


def tokenizer_of_bytes(*special):
    """Return a tokenizer with a token for each byte, one for the end of a text and padding, and ``special`` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SETTINGS)


def save_checkpoint(model_type, folder):
    """Save the tiny model of a family of the table, and a tokenizer."""
    model = build(model_type, seed=0)
    tokenizer = tokenizer_of_bytes()
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


IMAGE_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
)


def save_vision_language_checkpoint(folder):
    """Save a tiny Gemma 3 with vision, and its processor."""
    config = AutoConfig.for_model(
        "gemma3",
        text_config=dict(FAMILIES["gemma3_text"].tiny) | {"head_dim": 16},
        vision_config={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 7},
        mm_tokens_per_image=4,
    )  # fmt: skip
    names = {"image_token": "<soft>", "boi_token": "<image>", "eoi_token": "</image>"}
    tokenizer = tokenizer_of_bytes(*names.values())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, extra_special_tokens=names, **SETTINGS
    )
    config.image_token_id = tokenizer.image_token_id
    config.boi_token_id = tokenizer.boi_token_id
    config.eoi_token_id = tokenizer.eoi_token_id
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    images = Gemma3ImageProcessor(size={"height": 28, "width": 28})
    Gemma3Processor(images, tokenizer, chat_template=IMAGE_TEMPLATE, image_seq_length=4).save_pretrained(folder)
    return folder

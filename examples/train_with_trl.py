"""Fine-tune with TRL: LoRA or QLoRA on packed sequences, preferences or rewards, and a model fused by a callback.

pip install trl peft
python examples/train_with_trl.py --model Qwen/Qwen3-0.6B --data text.txt
python examples/train_with_trl.py --model Qwen/Qwen3-0.6B --data text.txt --bits 4   # QLoRA: pip install bitsandbytes
python examples/train_with_trl.py --model Qwen/Qwen3-0.6B --data text.txt --method dpo
python examples/train_with_trl.py --model Qwen/Qwen3-0.6B --data text.txt --method grpo
"""

import argparse
from pathlib import Path

import torch
from before_and_after import BeforeAndAfter
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from fused_norm.integrations.trainer import FusedNormCallback


def letters(completions, **kwargs):
    """A reward in place of yours: the share of letters in a text."""
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in completions]


def main(argv=None):
    parser = argparse.ArgumentParser(description="Fine-tuning with TRL, adapters and fused norms.")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a name on the hub, or a folder")
    parser.add_argument("--data", default=__file__, help="a text file, one example a line")
    parser.add_argument("--output", default="out")
    parser.add_argument("--method", choices=("sft", "dpo", "grpo"), default="sft")
    parser.add_argument("--bits", type=int, choices=(4, 16), default=16, help="of the frozen weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=256, help="tokens of a packed row, a pair or an answer")
    parser.add_argument("--attention", default="sdpa", help="flash_attention_2 keeps packed examples apart by itself")
    args = parser.parse_args(argv)

    loading = {"attn_implementation": args.attention, "dtype": "bfloat16"}
    if args.bits == 4:
        loading["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    rows = 4 if args.method == "grpo" else 1  # of a step; in grpo, answers to a prompt
    settings = {
        "output_dir": args.output,
        "max_steps": args.steps,
        "per_device_train_batch_size": rows,
        "bf16": torch.cuda.is_available(),
        "model_init_kwargs": loading,
        "logging_steps": 1,
        "report_to": "none",
    }
    lines = [line for line in Path(args.data).read_text().splitlines() if line.strip()]
    callback = FusedNormCallback()  # takes all options of apply_fused_norm
    given = {
        "model": args.model,
        "peft_config": LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
        "callbacks": [callback, BeforeAndAfter(args.steps, tokens=rows * args.length)],
    }
    if args.method == "grpo":
        config = GRPOConfig(max_completion_length=args.length, num_generations=rows, **settings)
        prompts = Dataset.from_dict({"prompt": lines})
        trainer = GRPOTrainer(args=config, reward_funcs=letters, train_dataset=prompts, **given)
    elif args.method == "dpo":
        pairs = zip(lines, lines[1:], reversed(lines), strict=False)
        names = ("prompt", "chosen", "rejected")
        preferences = Dataset.from_list([dict(zip(names, pair, strict=True)) for pair in pairs])
        config = DPOConfig(max_length=args.length, **settings)
        trainer = DPOTrainer(args=config, train_dataset=preferences, **given)
    else:
        texts = Dataset.from_dict({"text": lines})
        config = SFTConfig(packing=True, max_length=args.length, **settings)
        trainer = SFTTrainer(args=config, train_dataset=texts, **given)
    print(callback.report)
    trainer.train()
    trainer.save_model()  # the adapter
    return trainer


if __name__ == "__main__":
    main()

"""Fine-tune a causal language model with the transformers Trainer, its model patched by a callback.

python examples/train_with_trainer.py --model Qwen/Qwen3-0.6B --data text.txt
"""

import argparse
from pathlib import Path

import torch
from before_and_after import BeforeAndAfter
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from fused_norm.integrations.trainer import FusedNormCallback


def main(argv=None):
    parser = argparse.ArgumentParser(description="Fine-tune with the Trainer and fused norms.")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a name on the hub, or a folder")
    parser.add_argument("--data", default=__file__, help="a text file")
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    args = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = tokenizer(Path(args.data).read_text()).input_ids
    rows = [tokens[start : start + args.length] for start in range(0, len(tokens) - args.length + 1, args.length)]

    callback = FusedNormCallback()  # takes compile_layers=True, and the options of apply_fused_norm
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            learning_rate=1e-5,
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=True,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        processing_class=tokenizer,
        callbacks=[callback, BeforeAndAfter(args.steps, tokens=args.length)],
    )
    print(callback.report)
    trainer.train()
    trainer.save_model()  # the files of a stock model
    return trainer


if __name__ == "__main__":
    main()

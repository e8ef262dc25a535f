"""Fine-tune with TRL's SFTTrainer: LoRA adapters, packed sequences, and fused norms by a callback.

pip install trl peft
python examples/train_with_trl.py --model Qwen/Qwen3-0.6B --data text.txt
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from fused_norm.integrations.trainer import FusedNormCallback


def main(argv=None):
    parser = argparse.ArgumentParser(description="Supervised fine-tuning with TRL, LoRA, packing and fused norms.")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a name on the hub, or a folder")
    parser.add_argument("--data", default=__file__, help="a text file, one example a line")
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=256, help="tokens of a packed sequence")
    parser.add_argument("--attention", default="sdpa", help="flash_attention_2 keeps packed examples apart by itself")
    args = parser.parse_args(argv)

    lines = [line for line in Path(args.data).read_text().splitlines() if line.strip()]
    callback = FusedNormCallback()  # takes the options of apply_fused_norm
    trainer = SFTTrainer(
        model=args.model,
        args=SFTConfig(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            max_length=args.length,
            packing=True,
            bf16=torch.cuda.is_available(),
            model_init_kwargs={"attn_implementation": args.attention},
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"text": lines}),
        peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[callback],
    )
    print(callback.report)
    trainer.train()
    trainer.save_model()  # the adapter
    return trainer


if __name__ == "__main__":
    main()

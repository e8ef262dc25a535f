"""Train a model sharded by FSDP2, through accelerate.

accelerate launch --config_file examples/fsdp2.yaml examples/train_with_fsdp2.py --model Qwen/Qwen3-0.6B
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from before_and_after import BeforeAndAfter
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from fused_norm import apply_fused_norm


def main(argv=None):
    parser = argparse.ArgumentParser(description="Train with FSDP2 and fused norms.")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a name on the hub, or a folder")
    parser.add_argument("--data", default=__file__, help="a text file")
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    args = parser.parse_args(argv)

    accelerator = Accelerator()
    if not accelerator.is_fsdp2:  # accelerate shards on GPUs alone, and says nothing where it does not
        raise SystemExit(
            "nothing would be sharded: that takes two GPUs and `accelerate launch --config_file examples/fsdp2.yaml`"
        )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = torch.tensor(tokenizer(Path(args.data).read_text()).input_ids)
    rows = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    if not len(rows):
        raise SystemExit(f"the text has {len(tokens)} tokens, fewer than --length {args.length}")

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    accelerator.print(apply_fused_norm(model))  # before prepare, which shards it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=1))

    model.train()
    step, meter = 0, BeforeAndAfter(args.steps, tokens=args.length)  # of one process
    while step < args.steps:
        for batch in loader:
            meter.on_step_begin()
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            meter.on_step_end()
            step += 1
            accelerator.print(f"step {step}  loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
            if step == args.steps:
                break

    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output, state_dict=state)
        tokenizer.save_pretrained(args.output)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()

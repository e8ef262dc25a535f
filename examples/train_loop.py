"""Train in a loop of your own, each layer compiled by itself.

python examples/train_loop.py --model Qwen/Qwen3-0.6B --data text.txt
"""

import argparse
from pathlib import Path

import torch
from before_and_after import BeforeAndAfter
from transformers import AutoModelForCausalLM, AutoTokenizer

from fused_norm import apply_fused_norm


def main(argv=None):
    parser = argparse.ArgumentParser(description="A plain PyTorch loop with layer-wise compile and fused norms.")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a name on the hub, or a folder")
    parser.add_argument("--data", default=__file__, help="a text file")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = torch.tensor(tokenizer(Path(args.data).read_text()).input_ids, device=device)
    rows = tokens[: len(tokens) // args.length * args.length].view(-1, 1, args.length)
    if not len(rows):
        raise SystemExit(f"the text has {len(tokens)} tokens, fewer than --length {args.length}")

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).train()
    print(apply_fused_norm(model))  # first patch, then compile
    # The layers, not the model: traced as a whole, transformers makes a dense mask, and attention gets slow.
    for layer in model.model.layers:
        layer.compile(backend=args.backend)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    losses = []
    meter = BeforeAndAfter(args.steps, tokens=args.length)
    for step in range(args.steps):
        meter.on_step_begin()
        row = rows[step % len(rows)]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=row, labels=row, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.on_step_end()
        losses.append(loss.item())
        print(f"step {step + 1}  loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    main()

"""Generate text with a model that is patched while it is loaded.

python examples/generate.py --model Qwen/Qwen3-0.6B --prompt "The norm of a vector is"
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fused_norm


def main(argv=None):
    parser = argparse.ArgumentParser(description="Greedy generation with fused norms.")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a name on the hub, or a folder")
    parser.add_argument("--prompt", default="The norm of a vector is")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # Every keyword but fused_norm goes to from_pretrained as it is.
    model = fused_norm.from_pretrained(
        AutoModelForCausalLM, args.model, dtype=torch.bfloat16, fused_norm={"strict": True}
    ).to(device)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device)
    made = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
    text = tokenizer.decode(made[0], skip_special_tokens=True)
    print(text)
    return text


if __name__ == "__main__":
    main()

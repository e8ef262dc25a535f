"""Ask a vision-language model about an image. Its language layers are fused, and what its vision tower has of norms.

pip install torchvision
python examples/vision_language.py --model Qwen/Qwen2.5-VL-3B-Instruct --image photo.jpg
"""

import argparse

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from fused_norm import apply_fused_norm


def main(argv=None):
    parser = argparse.ArgumentParser(description="Ask about an image, with fused norms.")
    parser.add_argument("--model", default="Qwen/Qwen2.5-VL-3B-Instruct", help="a name on the hub, or a folder")
    parser.add_argument("--image", help="a file; without one, a gradient is drawn")
    parser.add_argument("--question", default="What is in this image?")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    processor = AutoProcessor.from_pretrained(args.model)
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
    print(apply_fused_norm(model))  # also says what of the vision tower stays as it is, and why

    image = Image.open(args.image) if args.image else Image.linear_gradient("L")
    content = [{"type": "image", "image": image.convert("RGB")}, {"type": "text", "text": args.question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    ).to(device, torch.bfloat16)
    made = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
    answer = processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(answer)
    return answer


if __name__ == "__main__":
    main()

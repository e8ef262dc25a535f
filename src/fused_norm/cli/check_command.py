"""``fused-norm check``: is the fused training step as near to the truth as the stock one, on this machine?"""

from __future__ import annotations

import argparse
from dataclasses import replace

from .. import model_configs
from .common import (
    MODEL_HELP,
    UsageError,
    add_fuse_options,
    find_causal_lm,
    fuse_options,
    in_one_line,
    interpret_without_gpu,
    kernels_on,
    positive,
    refuse_missing_path,
    take_layers,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A checkpoint is checked with its own weights, a config with random ones, whose norm weights are moved away "
        "from one. A model type that has a tiny model here (" + ", ".join(model_configs.FAMILIES) + ") stands for that."
    )
    parser.add_argument("model", metavar="MODEL_OR_CONFIG", help=MODEL_HELP)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="bfloat16 on a GPU, else float32")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; the GPU if there is one")
    parser.add_argument("--truth", choices=("float64", "float32"), help="float64 if it fits into the free memory")
    parser.add_argument(
        "--loss-of",
        choices=("labels", "log-probs"),
        default="labels",
        help="labels: the model's own loss; log-probs: a preference loss and a policy gradient (%(default)s)",
    )
    parser.add_argument("--layers", type=positive, help="only the first LAYERS layers")
    parser.add_argument("--batch", type=positive, default=2, help="sequences (2)")
    parser.add_argument("--seq", type=positive, default=32, help="tokens in a sequence (32)")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens and of random weights (0)")
    parser.add_argument("--json", action="store_true", help="print JSON, with every gradient")
    parser.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="refuse a model of a known family that lacks sites of its family (yes)",
    )
    add_fuse_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print errors and the verdict; 0 if all errors are within budget, else 1."""
    options = fuse_options(args, strict=args.strict)
    refuse_missing_path(args.model)
    device = interpret_without_gpu(args.device)
    # After the line above, because these import the kernels.
    import torch
    from tqdm import tqdm

    from ..check.against_float64 import UncheckableError, check_step
    from ..kernels.vocabulary_head import IGNORED
    from ..patcher import apply_fused_norm

    words = kernels_on(device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    source = find_causal_lm(args.model)
    if source.weights is None and args.model == source.config.model_type and args.model in model_configs.FAMILIES:
        source = replace(source, name=f"a tiny {args.model}", config=model_configs.tiny_config(args.model))
    if args.layers is not None:
        take_layers(source.config, args.layers)
    try:
        model = source.build(seed=args.seed, dtype=dtype, device=device)
    except (OSError, ValueError) as error:
        raise UsageError(f"no weights can be loaded from {source.weights}: {in_one_line(error)}") from error
    report = apply_fused_norm(model, **vars(replace(options, strict=False, cuda_graphs=False)))
    if not report.fused:
        raise UsageError(f"nothing to fuse in {report.model}, so there is nothing to check\n{report}")
    generator = torch.Generator().manual_seed(args.seed)
    vocabulary = source.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (args.batch, args.seq), generator=generator).to(device)
    labels = tokens.clone()
    if args.loss_of == "log-probs":
        labels[:, : args.seq // 4] = IGNORED  # a prompt
    try:
        result = check_step(
            model,
            tokens,
            labels,
            loss_of=args.loss_of,
            truth=getattr(torch, args.truth) if args.truth else None,
            options=options,
            progress=lambda steps: tqdm(steps, desc="forward and backward", unit="pass", disable=None),
        )
    except UncheckableError as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(result.to_json())
    else:
        print(f"{source.name}{'' if source.weights else f', random weights, seed {args.seed}'}")
        print(f"fused operators: {words}")
        print(result)
    return 0 if result.ok else 1

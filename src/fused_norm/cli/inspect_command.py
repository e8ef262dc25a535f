"""``fused-norm inspect``: the report of a model that is built without weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..options import FuseOptions
from .common import (
    MODEL_HELP,
    UsageError,
    add_fuse_options,
    find_model,
    fuse_options,
    in_one_line,
    refuse_missing_path,
)

if TYPE_CHECKING:
    from ..convergence.model_source import ModelSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_OR_CONFIG", help=MODEL_HELP)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--source", action="store_true", help="print the rewritten forwards too, as they run")
    row = "print its row for the table of families, and the files that want its name"
    output.add_argument("--row", action="store_true", help=row)
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add_fuse_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if something would be fused, else 1."""
    options = fuse_options(args, strict=False)
    refuse_missing_path(args.model)
    from ..patcher import apply_fused_norm

    source = find_model(args.model, trust_remote_code=args.trust_remote_code)
    model = _build_empty(source, args.trust_remote_code)
    report = apply_fused_norm(model, **vars(options))
    if args.row:
        if options != FuseOptions(strict=False):
            raise UsageError("--row goes with no options on what is fused")
        from .family_row import row_of

        name = source.name if source.name == args.model and "/" in args.model else None
        print(*row_of(model, source.config, report, name), sep="\n")
    elif args.json:
        print(report.to_json())
    else:
        print(f"{source.name}, built without weights\n")
        print(report)
        if args.source:
            print(*_rewritten_forwards(model), sep="\n")
    return 0 if report.fused else 1


def _rewritten_forwards(model: Any) -> Iterator[str]:
    """The source of each rewritten forward, below a comment with the modules that have it."""
    from ..patcher.fused_block import FusedBlock
    from ..patcher.source import source_of_rewritten

    paths: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, FusedBlock) and module.fused_norm_rewrites:
            paths.setdefault(source_of_rewritten(type(module)), []).append(path)
    for source, (first, *others) in paths.items():
        yield f"\n# {first}{f' and {len(others)} more' if others else ''}\n{source}"


def _build_empty(source: ModelSource, trust_remote_code: bool) -> Any:
    """The model of a config on the meta device, with the head it was saved with if that is known."""
    import torch
    import transformers

    config = source.config
    remote = getattr(config, "auto_map", None) or {}
    build = None
    if not (remote and trust_remote_code):
        named = getattr(transformers, (config.architectures or [""])[0], None)
        build = getattr(named, "_from_config", None)
    if build is None:
        for auto, mapping in (
            (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
            (transformers.AutoModelForImageTextToText, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
            (transformers.AutoModelForSeq2SeqLM, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
            (transformers.AutoModel, transformers.MODEL_MAPPING),
        ):
            if type(config) in mapping or (trust_remote_code and auto.__name__ in remote):
                build = partial(auto.from_config, trust_remote_code=trust_remote_code)
                break
        else:
            raise UsageError(
                f"transformers {transformers.__version__} has no model for a config of {config.model_type}"
            )
    try:
        with torch.device("meta"):
            return build(config)
    except Exception as error:
        raise UsageError(f"{source.name} cannot be built without weights: {in_one_line(error)}") from error

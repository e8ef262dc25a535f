"""An export of the norm layer in the form that the Hugging Face ``kernels`` package loads.

``python -m tools.hub_export OUT`` writes a kernel repository to the folder ``OUT``: one build for all devices that
Triton has, which needs PyTorch and Triton and not this package.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import fused_norm
from fused_norm.cli import parse_and_run
from fused_norm.cli.common import UsageError

_PACKAGE = Path(fused_norm.__file__).parent
_FILES = (
    "spec.py",
    "patcher/source.py",
    "patcher/hooks.py",
    "patcher/norm_recognition.py",
    "patcher/probe.py",
    "patcher/running_code.py",
)
"""The files of the package that the layer needs besides the kernels."""

_CARD = """\
---
license: apache-2.0
library_name: kernels
tags: [kernels]
---

# RMSNorm by Triton, forward and backward

One layer, `RMSNorm`, for every norm that transformers marks with `use_kernel_forward_from_hub("RMSNorm")` or
`"RMSNormZeroCentered"`. What a norm computes is found out by its values, so its rounding points stay those of its
class; a norm that computes something else keeps its own forward, as do compiled graphs.

Written by fused-norm {version}. The package itself fuses more: residual adds, norms of queries and keys, rotary
embeddings and gates of MLPs.
"""


def export(folder: str | Path) -> Path:
    """Write a kernel repository with the layer ``RMSNorm``.

    Args:
        folder: the repository, which is made if it does not exist.

    Returns:
        The folder of its one build.

    Raises:
        FileExistsError: the folder has such a build already, or a README that no export has written.
    """
    build = Path(folder) / "build" / "torch-universal"
    if build.exists():
        raise FileExistsError(f"{build} is there already: remove it, or name another folder")
    card = Path(folder) / "README.md"
    if card.exists() and not card.read_text(encoding="utf-8", errors="replace").startswith(_CARD.partition("{")[0]):
        raise FileExistsError(f"{card} is there already, and was not written by an export: name another folder")
    build.mkdir(parents=True)
    package = build / "fused_norm"
    shutil.copytree(_PACKAGE / "kernels", package / "kernels", ignore=shutil.ignore_patterns("fp8.py", "__pycache__"))
    for name in _FILES:
        (package / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(_PACKAGE / name, package / name)
    for name in ("kernels/__init__.py", "patcher/__init__.py"):  # which import what is not exported
        (package / name).write_text("")
    layers = Path(__file__).with_name("layers.py").read_text(encoding="utf-8")
    (package / "layers.py").write_text(layers.replace("from fused_norm.", "from ."), encoding="utf-8")
    # `kernels` imports the outer package, and up to release 0.9 the inner one.
    (package / "__init__.py").write_text("from . import layers\n")
    (build / "__init__.py").write_text("from .fused_norm import layers\n")
    # Builds that differ can be loaded side by side.
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(build.rglob("*.py")))).hexdigest()
    metadata = {
        "name": "fused-norm",
        "id": f"_fused_norm_{digest[:12]}",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    card.write_text(_CARD.format(version=fused_norm.__version__), encoding="utf-8")
    return build


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments, those of the process for None, and return the exit code."""
    description = "Write the norm layer as a repository for the kernels hub."
    return parse_and_run(sys.modules[__name__], "python -m tools.hub_export", description, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="the repository's folder")


def run(args: argparse.Namespace) -> int:
    """Export, and print the folder that was written."""
    try:
        print(f"written: {export(args.out)}")
    except OSError as error:
        raise UsageError(str(error)) from error
    return 0

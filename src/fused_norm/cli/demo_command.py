"""``fused-norm demo``: the demo tier of ``fused-norm converge``."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import converge_command
from .converge_command import run

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    converge_command.add_arguments(parser)
    parser.set_defaults(tier="demo", out=Path("demo"))

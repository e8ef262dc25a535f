"""The command line, ``fused-norm``: one module for each command, imported when it is called.

The command ``check`` is in ``check_command.py``, and so on. Such a module has ``add_arguments(parser)`` and
``run(args) -> int``, which returns the exit code: 0 for yes, 1 for no, 2 for bad input. Neither the module nor its
``add_arguments`` imports torch or transformers, which take seconds: help and misspelt arguments need neither.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import Any

from ..spec import FusedNormError
from .ctrl_c import remembered

_COMMANDS = {
    "inspect": "what would be fused in a model, and why not: no weights, no GPU",
    "check": "one training step, stock against fused, on this machine",
    "converge": "train models stock and fused, and compare them against a measured noise floor",
    "run": "run an unchanged script with every model it loads fused",
    "demo": "train tiny models, stock and fused, and plot both curves",
    "env": "versions and devices, to paste into a bug report",
}

STOPPED = 130
"""The exit code after Ctrl-C, as shells have it."""

# Transformers imports torchao, and PEFT bitsandbytes, if they are installed; these say then what is wrong in them.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
    logging.getLogger(_name).addFilter(lambda record: record.levelno > logging.WARNING)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name. None means those of the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: from argparse, for ``--help``, ``--version`` and misspelt arguments.
    """
    width = max(map(len, _COMMANDS))
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        with remembered():
            from .. import __version__  # takes a moment to find

            top = argparse.ArgumentParser(
                prog="fused-norm",
                description="Fused Triton kernels for norms, residual adds, rotary embeddings, gates, LoRA and\n"
                "losses of Hugging Face models.",
                epilog="commands:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in _COMMANDS.items()),
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            top.add_argument("--version", action="version", version=f"fused-norm {__version__}")
            top.add_argument(
                "command", choices=_COMMANDS, metavar="COMMAND", help="one of those below, each with its own --help"
            )
            name = top.parse_args(argv[:1]).command
            text = _COMMANDS[name]
            command = importlib.import_module(f".{name}_command", __name__)
            return parse_and_run(command, f"fused-norm {name}", f"{text[0].upper()}{text[1:]}.", argv[1:])
    except KeyboardInterrupt:
        print("fused-norm: stopped", file=sys.stderr)
        return STOPPED


def parse_and_run(command: Any, program: str, description: str, argv: Sequence[str] | None = None) -> int:
    """Parse the arguments of one command and run it; errors of the user's, and Ctrl-C, are answered in a line.

    Args:
        command: has ``add_arguments(parser)`` and ``run(args)``, as the modules here.
        program: its name in messages.
        description: for ``--help``.
        argv: its arguments. None means those of the process.

    Returns:
        The exit code.
    """
    from .common import UsageError, as_flags

    try:
        with remembered():  # an error that Ctrl-C has led to is none of the user's
            parser = argparse.ArgumentParser(prog=program, description=description)
            command.add_arguments(parser)
            code: int = command.run(parser.parse_args(argv))
        return code
    except (UsageError, FusedNormError) as error:
        print(f"{program}: {as_flags(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: stopped", file=sys.stderr)
        return STOPPED

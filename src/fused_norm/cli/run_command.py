"""``fused-norm run``: somebody's unchanged script, with every model that it and its processes load patched."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..options import FuseOptions
from ..spec import FusedNormError
from . import STOPPED
from .common import UsageError, add_fuse_options, fuse_options
from .ctrl_c import leave_to_script

if TYPE_CHECKING:
    from ..patcher import PatchReport

_OPTIONS = "FUSED_NORM_RUN"
"""The environment variable that tells the processes of a script the options to fuse with, as JSON."""
_REPORTS = "FUSED_NORM_REPORTS"
"""That of the file in which each of them adds a letter for a model: ``f`` if something was fused, else ``n``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] SCRIPT [ARGS ...]\n       %(prog)s [options] -m MODULE [ARGS ...]"
    parser.epilog = (
        "Python processes that the script starts fuse their models too. Under a launcher: torchrun -m fused_norm run "
        "SCRIPT, accelerate launch -m fused_norm run SCRIPT."
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    parser.add_argument(
        "--strict", action=argparse.BooleanOptionalAction, default=False, help="fail when a model has nothing to fuse"
    )
    add_fuse_options(parser)
    # One list, because argparse would take a "--" between two positionals away from the script.
    parser.add_argument("command", metavar="SCRIPT", nargs=argparse.REMAINDER, help="a Python file and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the script to its end; its own exit code, 1 after an uncaught exception."""
    options = fuse_options(args, strict=args.strict)
    if args.command[:1] == ["--"]:
        del args.command[0]
    if not args.command:
        raise UsageError("name a script, or a module with -m")
    target, arguments = args.command[0], args.command[1:]
    if not args.is_module and not Path(target).exists():
        raise UsageError(f"there is no file {target}")
    if sys.flags.ignore_environment or sys.flags.no_site:
        stock = "under python -E, -I or -S the processes that a script starts keep their models stock"
        if options.strict:
            raise UsageError(stock)
        _say(stock)
    with _as_python_would(target, args.is_module, arguments):
        if args.is_module:
            module = None
            with suppress(ModuleNotFoundError):
                module = importlib.util.find_spec(target)
            if module is None:
                raise UsageError(f"there is no module {target}")
        return _run_fused(target, args.is_module, options)


def _run_fused(target: str, is_module: bool, options: FuseOptions) -> int:
    from ..patcher import on_load

    with _processes_told(options) as reports, on_load(everywhere=True, notify=partial(_tell, reports), **vars(options)):
        leave_to_script()
        try:
            if is_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(target, run_name="__main__")
        except SystemExit:
            _say_if_nothing_was_fused(reports)
            raise
        except BaseException as error:
            traceback = error.__traceback__  # without the frames that ran the script; None if it did not compile
            while traceback is not None and traceback.tb_frame.f_globals.get("__name__") != "__main__":
                traceback = traceback.tb_next
            sys.excepthook(type(error), error.with_traceback(traceback), traceback)
            if options.strict and isinstance(error, FusedNormError):
                _say("without --strict the script goes on with such a model")
            return STOPPED if isinstance(error, KeyboardInterrupt) else 1
        _say_if_nothing_was_fused(reports)
    return 0


def _say_if_nothing_was_fused(reports: Path) -> None:
    if "f" not in (told := reports.read_text()):
        _say(f"nothing was fused (models built, also by processes of the script: {len(told)})")


def fuse_this_process() -> None:
    """Fuse the models of this process, which a script has started, with the options of the command."""
    from ..patcher.load import fuse_from_now_on

    fuse_from_now_on(FuseOptions(**json.loads(os.environ[_OPTIONS])), partial(_tell, Path(os.environ[_REPORTS])))


@contextmanager
def _as_python_would(target: str, is_module: bool, arguments: list[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path[0]`` as python sets them for a script or a module."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [target, *arguments]
    # In these modes python puts nothing in front, so there is nothing to replace.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = str(Path.cwd() if is_module else Path(target).resolve().parent)
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path


@contextmanager
def _processes_told(options: FuseOptions) -> Iterator[Path]:
    """The environment in which Python processes that the script starts call ``fuse_this_process``; where they report.

    A command that another one has started reports where that one reads.
    """
    before = dict(os.environ)
    folders = [str(Path(__file__).parent / "at_start"), *filter(None, [before.get("PYTHONPATH")])]
    with tempfile.NamedTemporaryFile(prefix="fused-norm-") as file:
        told = {"PYTHONPATH": os.pathsep.join(folders), _OPTIONS: json.dumps(vars(options))}
        told[_REPORTS] = before.get(_REPORTS, file.name)
        os.environ.update(told)
        try:
            yield Path(told[_REPORTS])
        finally:  # what the script has set stays, for what runs at its exit
            for name in told:
                os.environ.pop(name, None)
                if name in before:
                    os.environ[name] = before[name]


def _tell(reports: Path, report: PatchReport) -> None:
    # The file is gone for a process that outlives the command.
    with suppress(OSError), open(os.open(reports, os.O_WRONLY | os.O_APPEND), "w") as file:
        file.write("f" if report.fused else "n")
    _say(report.summary())


def _say(text: str) -> None:
    print(f"fused-norm: {text}", file=sys.stderr, flush=True)

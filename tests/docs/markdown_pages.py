"""The code blocks of a Markdown page: found, run in their order, and compared with the output that the page shows.

- ``python`` blocks of a page share one namespace, from top to bottom.
- ``console`` blocks hold commands. Short ones of ``fused-norm`` are run in this process; the arguments of others, and
  of the benchmarks and tools of a checkout, are parsed; targets of make, extras of pip and scripts have to be there.
- A ``text`` block right behind one of these is what it prints; ``...`` in it stands for anything.
- Behind ``<!-- not run: REASON -->`` code is only compiled, and no command is run.
"""

import contextlib
import doctest
import importlib
import io
import itertools
import os
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from unittest import mock

from fused_norm.cli import main

ROOT = Path(__file__).parents[2]

SHORT = ("inspect", "check", "env")
"""The commands of ``fused-norm`` that are run; the arguments of the others, which take minutes, are parsed."""

_BLOCK = re.compile(
    r"(?P<skipped><!-- not run: [^\n]+ -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^(?P=indent)```$"
    r"(?P<output>\n+(?P=indent)```text\n(?P<printed>.*?)^(?P=indent)```$)?",
    re.MULTILINE | re.DOTALL,
)
_PRINTED_ALIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A code block of a page, from a line of it on: whether it is run, and the output that the page shows if any."""

    language: str
    text: str
    line: int
    runs: bool
    printed: str | None


def blocks_of(page):
    """Yield the code blocks of a page in order."""
    for match in _BLOCK.finditer(page):
        text, indent = match["text"], match["indent"]
        line = page.count("\n", 0, match.start("text")) + 1
        lines = [code_line.removeprefix(indent) for code_line in text.splitlines(keepends=True)]
        yield Block(match["language"], "".join(lines), line, match["skipped"] is None, match["printed"])


def run_page(path, folder, stand_ins):
    """Run the blocks of a page; ``stand_ins`` are local folders by the names of models on the hub.

    Raises:
        AssertionError: a block prints something else than the page shows, or is of a kind that cannot be run.
    """
    from fused_norm.kernels.operator import OPERATORS  # after conftest has told Triton where it runs

    page = path.read_text(encoding="utf-8")
    blocks = [block for block in blocks_of(page) if block.language in ("python", "console")]
    for name, stand_in in stand_ins.items():
        blocks = [replace(block, text=block.text.replace(name, stand_in)) for block in blocks]
    # The code is a file with the page's line numbers: tracebacks are right, and Triton and inspect can read it.
    module = ModuleType(f"page_{path.stem.lower()}")
    source = folder / f"{module.__name__}.py"
    lines = [""] * page.count("\n")
    for block in blocks:
        if block.language == "python" and block.runs:
            code = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    module.__file__ = str(source)
    sys.modules[module.__name__] = module
    try:
        with mock.patch.dict(os.environ), mock.patch.dict(OPERATORS):  # pages may change both
            for block in blocks:
                _run_block(block, module, source, stand_ins)
    finally:
        del sys.modules[module.__name__]


def _run_block(block, module, source, stand_ins):
    if block.language == "python":
        code = compile("\n" * (block.line - 1) + block.text, str(source), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            if block.runs:
                exec(code, vars(module))
        printed = output.getvalue()
    else:
        lines = [shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines()]
        printed = "".join(_run_command(words, block.runs) for words in lines if words)
    if block.printed is None or not block.runs:
        return
    for name, stand_in in stand_ins.items():
        printed = printed.replace(stand_in, name)
    assert doctest.OutputChecker().check_output(block.printed, printed, _PRINTED_ALIKE), (
        f"line {block.line} of the page prints\n{printed}\nand the page shows\n{block.printed}"
    )


def _run_command(words: list[str], runs: bool) -> str:
    """Run or parse a command and return what it prints."""
    program, *arguments = itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)
    if "fused_norm" in arguments:  # a launcher that runs the command as a module
        program, arguments, runs = "fused-norm", arguments[arguments.index("fused_norm") + 1 :], False
    if program == "fused-norm":
        return _run_fused_norm(arguments, runs and arguments[0] in SHORT)
    if program == "python" and arguments[:1] == ["-m"] and arguments[1].startswith(("benchmarks", "tools.")):
        command = importlib.import_module(f"{arguments[1]}.command")
        with mock.patch.object(command, "run", return_value=0):
            assert command.main(arguments[2:]) == 0
        return ""
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        unknown = {argument for argument in arguments if "=" not in argument} - {*targets}
        assert not unknown, f"the Makefile has no target {unknown}"
    elif program == "pip":
        _check_installed(arguments)
    elif program in ("python", "torchrun", "accelerate"):
        missing = [argument for argument in arguments if argument.endswith(".py") and not (ROOT / argument).exists()]
        assert not missing, f"there is no {missing}"
    else:
        assert not runs, f"nobody knows how to run {shlex.join(words)!r}: mark it as not run, or add a rule here"
    return ""


def _run_fused_norm(arguments: list[str], runs: bool) -> str:
    with contextlib.ExitStack() as stack:
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if not runs:
            name = f"fused_norm.cli.{arguments[0]}_command"
            stack.enter_context(mock.patch.object(importlib.import_module(name), "run", return_value=0))
        code = main(arguments)
    assert code == 0, f"fused-norm {shlex.join(arguments)} exits with {code}:\n{printed.getvalue()}"
    return printed.getvalue()


def _check_installed(arguments: list[str]) -> None:
    """Check that a ``pip install`` of this package names it, and extras that it has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert arguments[0] == "install"
    for requirement in arguments[1:]:
        match = re.fullmatch(r"(\.|fused-norm)(\[(?P<extras>[\w,]+)\])?", requirement)
        if match is not None:
            unknown = {*(match["extras"] or "").split(",")} - {"", *project["optional-dependencies"]}
            assert not unknown, f"pyproject.toml has no extra {unknown}"

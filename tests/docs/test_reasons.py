"""The page of reasons has every reason, error and warning of the patcher, and none that it does not give."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from .markdown_pages import ROOT

PAGE = ROOT / "docs" / "reasons.md"
PATCHER = ROOT / "src" / "fused_norm" / "patcher"
PLACEMENTS = ROOT / "src" / "fused_norm" / "kernels" / "sharded.py"

NOT_SAID = {
    "gate and up",
    "q and k",
    "\n  and … more",
    "… (…): …",
    "class …: pass",
    "…: fused …; kept ……",
    "; recompute in … layers",
    "…, in place of …",
    "its stock code",
    "no cast under autocast",
    "kernel_layer_name: a fused norm takes no kernel from the hub",
}
"""Parts of messages and of the summary, and code: texts of three words or more that are no message by themselves."""


def texts_of(tree: ast.AST) -> Iterator[str]:
    """The strings in a source that are three words or more, without docstrings; ``…`` stands for what is filled in."""
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in ast.walk(node)} - {id(node)}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.replace("%s", "…")
        else:
            continue
        if len(text.split()) >= 3:
            yield text


def said(paths: Iterable[Path]) -> set[str]:
    """The messages in sources, each up to its first line break."""
    found = {text for path in paths for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))}
    return {text.partition("\n")[0] for text in found - NOT_SAID}


def on_page(page: str) -> set[str]:
    """The messages in the first column of the tables of a page."""
    return {found.strip() for found in re.findall(r"^\| ``? ?(.+?) ?``? \|", page, re.MULTILINE)}


def test_every_message_of_the_patcher_is_on_the_page_and_no_other() -> None:
    messages, entries = said([*PATCHER.rglob("*.py"), PLACEMENTS]), on_page(PAGE.read_text(encoding="utf-8"))
    assert messages - entries == set(), "not on the page"
    assert entries - messages == set(), "on the page, and nowhere in the patcher"


def test_messages_are_found_in_a_source() -> None:
    source = '''def reason(name):
    """A docstring of several words."""
    if name:
        return f"its {name} is not {name!r}: " "or is it"
    raise ValueError("no name was given")
'''
    assert set(texts_of(ast.parse(source))) == {"its … is not …: or is it", "no name was given"}

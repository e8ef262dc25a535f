"""docs/reasons.md has every reason, error and warning of the patcher, and no others."""

import ast
import re

from .markdown_pages import ROOT

PAGE = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
ROWS = [message.strip() for message in re.findall(r"^\| ``? ?(.+?) ?``? \|", PAGE, re.MULTILINE)]
"""The messages in the first column of the tables of the page."""
PATCHER = ROOT / "src" / "fused_norm" / "patcher"
KERNELS = [path for path in (ROOT / "src" / "fused_norm" / "kernels").glob("*.py") if path.name != "fp8.py"]
"""The files of operators that a patched model calls."""

NOT_SAID = {
    "q and k",
    "\n  and … more",
    "… (…): …",
    "class …: pass",
    "…: fused …; kept ……",
    "; … in … layers",
    ": pass use_cache=False",
    "quant_state of a weight",
    "… of …",
    "t….data_ptr() == … and t….dtype is d… and t….shape == s… and t….stride() == p…",
    "cross entropy without logits",
    "log-probabilities of … without logits",
    "…, in place of …",
    "… …: …",
    "  … …  …",
    "its stock code",
    "a compiled function in parts",
    "a norm and its add one by one",
    "no … in",
    "LoRA layers as PEFT has them",
    "PEFT's LoRA code",
    "sum with the adapter",
    "an output of the norm for each linear",
    "outputs computed again in the backward",
    "replayed as CUDA graphs",
    "weight dequantised in one kernel",
    " between grouped products",
    "a part of transformers' experts",
    "its linear by bitsandbytes' code",
    "lambda self: …",
    "kernel_layer_name: a fused module takes no kernel from the hub",
    "… = …",
    "qk norms + rope",
    "head of a fused loss",
}
"""Texts of three words or more that are no messages: parts of messages, of the summary, and code."""

OF_USERS_CALLS = {
    "it has no form for DTensors",
    "zero_centered needs a weight: without one there is no gamma to centre",
    "target is on … and input on …; move them to one device",
    "its weight or bias is trained",
    "w is not contiguous",
    "alpha is a factor inside silu, and activation is …",
    "rstd has shape …, and x …",
    "under casting 'none' the forward uses another rstd than it keeps",
}
"""Refusals that a patched model never returns."""

OF_ARGUMENTS = 32
"""How many more there are of these, which say what an argument of a user's call must be."""


def texts_of(tree):
    """Return the strings of three words or more in a source, without docstrings; ``…`` replaces what is filled in."""
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


def all_texts(paths):
    return {text for path in paths for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))}


def all_refusals(paths):
    """Return the strings in operators' functions that return a refusal or its reason."""
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.returns is not None)
    returned = "Unsupported | None", "str | None", "tuple[Any, str | None]"
    refusing = (node for node in functions if ast.unparse(node.returns) in returned)
    return {text for function in refusing for text in texts_of(function)}


def test_every_message_of_the_patcher_is_on_the_page_and_no_other():
    texts = all_texts(PATCHER.rglob("*.py"))
    code = {text for text in texts if re.search(r"self\.fused_norm_|\bFUSED\b", text)}
    messages = {text.partition("\n")[0] for text in texts - code - NOT_SAID}
    refusals = all_refusals(KERNELS) - OF_USERS_CALLS
    of_arguments = {text for text in refusals - {*ROWS} if " must " in text}
    assert len(of_arguments) == OF_ARGUMENTS, "those that a patched model may return belong on the page"
    messages |= refusals - of_arguments
    assert messages - {*ROWS} == set(), "not on the page"
    assert {*ROWS} - messages == set(), "on the page, and nowhere in the patcher"
    assert len(ROWS) == len({*ROWS}), "a message has two rows"


def test_what_the_page_may_leave_out_is_still_in_the_sources():
    assert NOT_SAID - all_texts(PATCHER.rglob("*.py")) == set()
    assert OF_USERS_CALLS - all_refusals(KERNELS) == set()

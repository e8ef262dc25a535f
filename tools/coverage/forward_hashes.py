"""A short hash of what the forward of a class does: the same if only comments, types or decorators have changed."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from functools import cache
from typing import Any


def name_of(cls: type) -> str:
    """``llama.LlamaAttention`` of a class in ``transformers.models.llama.modeling_llama``."""
    folder = cls.__module__.removeprefix("transformers.").removeprefix("models.").partition(".")[0]
    return f"{folder}.{cls.__qualname__}"


@cache
def forward_hash(cls: Any) -> str:
    """Eight characters that change with the code of a class's forward; dashes if the source cannot be read."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward)))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError):
        return "-" * 8
    for node in ast.walk(definition):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns, node.decorator_list = None, []
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        elif isinstance(node, ast.arg):
            node.annotation = None
    return hashlib.sha256(ast.unparse(definition).encode()).hexdigest()[:8]

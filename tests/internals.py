"""Names below the public interface that tests import, each with the reason; `python -m tests.internals` lists all.

A test reaches the package as a user does: by what `docs/reference.md` documents, by commands, by what packages export.
Whatever else it needs makes the next redesign dearer, so it is here or it is refused (`test_internals.py`).
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
EXPORTING = ("fused_norm", "fused_norm.kernels", "fused_norm.kernels.fp8", "fused_norm.patcher")
EXPORTING += ("fused_norm.model_configs",)
"""Packages whose ``__all__`` is public."""

COMMANDS_AND_PLUGINS = (
    "fused_norm.cli.main",
    "fused_norm.__version__",
    "fused_norm.integrations.axolotl.FusedNormArgs",
)
COMMANDS_AND_PLUGINS += ("fused_norm.integrations.axolotl.FusedNormPlugin",)
"""What users reach by a console script, a version, or a name in a configuration."""

REASONS: dict[str, str] = {}
"""Why tests import each name."""


def public_names() -> set[str]:
    """Return the dotted names that users may import."""
    page = (TESTS.parent / "docs" / "reference.md").read_text(encoding="utf-8")
    names = {*re.findall(r"^::: (\S+)", page, re.MULTILINE), *EXPORTING, *COMMANDS_AND_PLUGINS}
    return names.union(
        *([f"{name}.{export}" for export in importlib.import_module(name).__all__] for name in EXPORTING)
    )


def _is_module(name: str) -> bool:
    path = TESTS.parent / "src" / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def names_in(path: Path) -> Iterator[str]:
    """Yield the dotted names of the package that a file uses: imports, attributes of modules, and names in texts."""
    tree, modules, read = ast.parse(path.read_text(encoding="utf-8")), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fused_norm" and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if _is_module(name):
                    modules[alias.asname or alias.name] = name
                else:
                    yield name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fused_norm":
                    modules[alias.asname or "fused_norm"] = alias.name if alias.asname else "fused_norm"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in read:
            inner = [node]
            while isinstance(inner[-1].value, ast.Attribute):
                inner.append(inner[-1].value)
            read.update(inner)
            root = inner[-1].value
            if isinstance(root, ast.Name) and root.id in modules:
                name = modules[root.id]
                for attribute in reversed(inner):
                    name = f"{name}.{attribute.attr}"
                    if not _is_module(name):
                        yield name
                        break
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if (re.fullmatch(r"fused_norm(\.\w+)+", node.value) and not _is_module(node.value)) or re.fullmatch(
                r"fused_norm(\.\w+){2,}", node.value
            ):
                yield node.value
    yield from (name for name in modules.values() if name.count(".") > 0)


def internals(*paths: Path) -> dict[str, set[str]]:
    """Return the internal names that files below these paths use, each with the files that do."""
    public, users = public_names(), defaultdict(set)
    for path in paths or (TESTS,):
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if file.resolve() != Path(__file__).resolve():
                for name in names_in(file):
                    if name not in public and not name.endswith("__"):
                        users[name].add(file.name)
    return dict(sorted(users.items()))


if __name__ == "__main__":
    found = internals(*map(Path, sys.argv[1:]))
    sys.stdout.writelines(f"{name}  {', '.join(sorted(files))}\n" for name, files in found.items())
    sys.stdout.write(f"{len(found)} names\n")

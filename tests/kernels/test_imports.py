"""The architecture of fused_norm.kernels: imports point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import fused_norm

ROOT = Path(fused_norm.__file__).parent
LAYERS = (
    "spec",
    "kernels.autocast",
    "kernels.sharded",
    "kernels.plans",
    "kernels.triton",
    "kernels.reference",
    "kernels.arguments",
    "kernels.codegen",
    "kernels.recording",
    "kernels.operator",
)
"""From the bottom to the top; above them are the operators, a file each, then the package itself."""


def _within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _layer(module: str) -> int:
    """The height of a module of the package ``fused_norm``."""
    for height, layer in enumerate(LAYERS):
        if _within(module, layer):
            return height
    if module == "kernels":
        return len(LAYERS) + 1
    assert module.startswith("kernels."), f"kernels import {module}"
    return len(LAYERS)


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path) -> set[str]:
    """The modules of ``fused_norm`` that a file imports, wherever in it."""
    parents = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        absolute = []
        if isinstance(node, ast.Import):
            absolute = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["fused_norm", *parents[: len(parents) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            absolute = [".".join((*base, alias.name)) for alias in node.names]
        for name in absolute:
            inside = name.removeprefix("fused_norm.")
            while inside != name and inside:
                if (ROOT / inside.replace(".", "/")).is_dir() or (ROOT / f"{inside.replace('.', '/')}.py").is_file():
                    found.add(inside)
                    break
                inside = inside.rpartition(".")[0]
    return found


GRAPH = {_name(path): _imports(path) for path in (ROOT / "kernels").rglob("*.py")}
EDGES = [(one, other) for one, others in GRAPH.items() for other in others]


def test_no_import_runs_upwards() -> None:
    assert not [(one, other) for one, other in EDGES if _layer(other) > _layer(one)]
    assert GRAPH["kernels.operator"] >= {"spec", "kernels.triton.devices"}, "relative imports are understood"


def test_only_the_spec_is_imported_from_outside() -> None:
    assert {other for _, other in EDGES if not _within(other, "kernels")} == {"spec"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    pending = {one: {other for other in others if other in GRAPH} for one, others in GRAPH.items()}
    while ready := {one for one, others in pending.items() if not others}:
        pending = {one: others - ready for one, others in pending.items() if one not in ready}
    assert not pending, f"in a circle: {sorted(pending)}"

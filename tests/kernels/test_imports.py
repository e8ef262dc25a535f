"""The architecture of fused_norm.kernels: imports point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import fused_norm

ROOT = Path(fused_norm.__file__).parent
LAYERS = (
    "spec",
    "kernels.autocast",
    "kernels.switch",
    "kernels.sharded",
    "kernels.plans",
    "kernels.triton",
    "kernels.reference",
    "kernels.arguments",
    "kernels.interceptors",
    "kernels.codegen",
    "kernels.recording",
    "kernels.plain_calls",
    "kernels.compiler_policy",
    "kernels.norm_spec",
    "kernels.backward",
    "kernels.outputs_per_consumer",
    "kernels.registration",
    "kernels.operator",
)
"""From the bottom to the top; above them are the operators, one a file, then the package itself."""


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
    """Return the modules of ``fused_norm`` that a file imports anywhere."""
    parents = path.relative_to(ROOT).parent.parts
    modules = set()
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
                    modules.add(inside)
                    break
                inside = inside.rpartition(".")[0]
    return modules


GRAPH = {_name(path): _imports(path) for path in (ROOT / "kernels").rglob("*.py")}
EDGES = [(module, imported) for module, imports in GRAPH.items() for imported in imports]


def test_no_import_runs_upwards() -> None:
    assert not [(module, imported) for module, imported in EDGES if _layer(imported) > _layer(module)]
    assert GRAPH["kernels.operator"] >= {"spec", "kernels.triton.devices"}, "relative imports are understood"


def test_only_the_spec_is_imported_from_outside() -> None:
    assert {imported for _, imported in EDGES if not _within(imported, "kernels")} == {"spec"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    pending = {module: {imported for imported in imports if imported in GRAPH} for module, imports in GRAPH.items()}
    while ready := {module for module, imports in pending.items() if not imports}:
        pending = {module: imports - ready for module, imports in pending.items() if module not in ready}
    assert not pending, f"in a circle: {sorted(pending)}"

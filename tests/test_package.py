"""The installed package: what is imported with it, its version, and the README of a package index."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fused_norm

PACKAGE = Path(fused_norm.__file__).parent
ROOT = Path(__file__).parents[1]
MEASURING = ("check", "cli", "convergence")
"""Packages that only commands import."""
PEERS = ("benchmarks", "liger_kernel", "matplotlib", "quack", "tools")


def imported(path: Path, root: Path = PACKAGE.parent) -> Iterator[str]:
    """Return the full names that a file of a package, which lies in ``root``, imports anywhere."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield from (".".join((*base, *filter(None, [node.module]), alias.name)) for alias in node.names)


def test_what_everyone_imports_knows_neither_measurements_nor_peers():
    own = {path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in MEASURING}
    away = [*(f"fused_norm.{name}" for name in MEASURING), *PEERS]
    imports = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in own
        for name in imported(path)
        if any(f"{name}.".startswith(f"{package}.") for package in away)
    }
    assert imports == {("__main__.py", "fused_norm.cli.main")}


@pytest.mark.parametrize("folder", ["src/fused_norm/check", "src/fused_norm/convergence", "benchmarks"])
def test_modules_of_a_folder_import_in_one_direction(folder):
    root, folder = (ROOT / "src" if folder.startswith("src/") else ROOT), ROOT / folder
    package = ".".join(folder.relative_to(root).parts)
    modules = {path.stem: set(imported(path, root)) for path in folder.glob("*.py")}
    graph = {
        name: {other for other in modules if any(f"{each}.".startswith(f"{package}.{other}.") for each in imports)}
        for name, imports in modules.items()
    }
    assert any(graph.values())
    assert TopologicalSorter(graph).prepare() is None  # raises CycleError, which names the circle


def test_no_two_classes_or_types_have_one_name():
    places: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)):  # perhaps a type
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for name in names:
                if name.strip("_")[:1].isupper() and not name.isupper():
                    places.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_the_version_is_that_of_what_is_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"fused-norm": "1.2.3"}.__getitem__)
    assert fused_norm.__version__ == "1.2.3"

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert fused_norm.__version__ == "0.0"


def test_links_of_a_readme_are_addresses_of_the_repository(tmp_path, monkeypatch):
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = "![a\nchart](results/a.png) [how](docs/how.md#so) [here](#here) [there](https://example.org/x.md)\n"
    text += "pip install 'fused-norm @ git+https://git.example/OWNER/x'\n"
    (tmp_path / "README.md").write_text(text)

    def metadata(repository: str = "https://git.example/OWNER/x") -> dict:
        fields: dict = {}
        hook.RepositoryHook(str(tmp_path), {"repository": repository}).update(fields)
        return fields

    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert metadata() == {"readme": {"content-type": "text/markdown", "text": text}}
    assert metadata("https://git.example/you/x")["urls"]["Source"] == "https://git.example/you/x"
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://git.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "me/mine")
    monkeypatch.setenv("GITHUB_REF_NAME", "v1.0")
    fields = metadata()
    assert fields["readme"]["text"] == (
        "![a\nchart](https://git.example/me/mine/raw/v1.0/results/a.png) "
        "[how](https://git.example/me/mine/blob/v1.0/docs/how.md#so) [here](#here) [there](https://example.org/x.md)\n"
        "pip install 'fused-norm @ git+https://git.example/me/mine'\n"
    )
    assert set(fields["urls"]) == {"Source", "Issues", "Changelog"}
    assert all(address.startswith("https://git.example/me/mine") for address in fields["urls"].values())

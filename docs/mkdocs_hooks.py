"""Hooks of MkDocs: what pages link to in the repository, outside of this folder, becomes part of the site.

So links and pictures lead somewhere in the repository and on the site alike.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
STEPS = "[The table of steps](../README.md)"


def on_files(files: Files, config: Any) -> Files:
    """Add the reports, figures and charts of measured runs."""
    for path in sorted((ROOT / RESULTS).rglob("*")):
        if path.suffix in (".json", ".png", ".txt"):
            place = path.relative_to(ROOT / RESULTS).as_posix()
            files.append(File.generated(config, f"results/{place}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link to them, and show the README's table of steps where a page links to it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    steps = readme.partition("## What it brings\n")[2].partition("## Which cards")[0].replace("](docs/", "](")
    return markdown.replace(f"](../{RESULTS}/", "](results/").replace(STEPS, steps)

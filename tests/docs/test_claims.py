"""Versions, commands, families and models on the pages match the project's files."""

import argparse
import importlib
import re
import tomllib
from pathlib import Path

import pytest

import fused_norm
from fused_norm.cli import main
from fused_norm.model_configs import FAMILIES

from ..kernels.compiled_launches import TARGETS
from ..patcher.other_families import OTHERS
from .markdown_pages import ROOT

COMMANDS = Path(fused_norm.__file__).parent / "cli"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text_of(name):
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_the_package_is_described_in_one_way(capsys):
    description = PROJECT["description"]
    assert fused_norm.__doc__ == f"{description}."
    assert f"site_description: {description}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"{description}." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_pages_install_from_the_address_of_the_repository(page):
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    address = hatch["metadata"]["hooks"]["custom"]["repository"]
    assert re.findall(
        r'^pip install "fused-norm @ git\+(.+)"$', (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE
    ) == [address], f"write the address that pyproject.toml names, {address}, into {page}"


def supported_releases():
    page = (ROOT / "docs" / "supported.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (Python|PyTorch|Triton|transformers)\b[^|]*\|(.*)\|$", page, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_the_oldest_releases_are_those_of_the_package():
    oldest = dict(re.findall(r"^(\w+)>=([\d.]+)", "\n".join(PROJECT["dependencies"]), re.MULTILINE))
    names = {"PyTorch": "torch", "Triton": "triton", "transformers": "transformers"}
    required = {"Python": PROJECT["requires-python"].removeprefix(">=")}
    required |= {name: oldest[requirement] for name, requirement in names.items()}
    table = {
        name: re.match(r"(\d+\.\d+) (or newer|to )", supported)[1]
        for name, (supported, *_) in supported_releases().items()
    }
    assert table == required
    for page in ("README.md", "docs/index.md"):
        stated = dict(re.findall(r"\b(Python|PyTorch|Triton|transformers) (\d+\.\d+)(?= or newer| to )", text_of(page)))
        assert stated.keys() >= {"Python", "PyTorch", "transformers"}, page
        assert stated == {name: required[name] for name in stated}, page


def test_the_releases_that_tests_are_run_with_are_those_of_the_page():
    makefile, constraints = (ROOT / name for name in ("Makefile", "constraints.txt"))
    oldest, newest = re.search(r"^MATRIX := (\S+) (\S+)$", makefile.read_text(), re.MULTILINE).groups()
    pinned = dict(re.findall(r"^(\w+)==(\S+)$", constraints.read_text(), re.MULTILINE))
    tested = {name: cells[1] for name, cells in supported_releases().items()}
    assert tested["transformers"] == f"{oldest}, {pinned['transformers']}, {newest}"
    assert (tested["PyTorch"], tested["Triton"]) == (pinned["torch"], pinned["triton"])


def test_the_gpus_that_kernels_are_compiled_for_are_those_of_the_pages():
    tuned = {"sm_90"}  # the H100's, which is run
    for page in ("docs/supported.md", "docs/faq.md", "docs/tuning.md"):
        assert set(re.findall(r"\b(?:sm_\d+|gfx\d+)\b", text_of(page))) | tuned == {*TARGETS}, page


def test_the_commands_that_print_json_are_those_that_are_named():
    printing = set()
    for name in (path.stem.removesuffix("_command") for path in COMMANDS.glob("*_command.py")):
        parser = argparse.ArgumentParser()
        importlib.import_module(f"fused_norm.cli.{name}_command").add_arguments(parser)
        if "--json" in parser.format_help():
            printing.add(name)
    named = re.search(r"`(\w+)` and `(\w+)` print JSON under `--json`", text_of("docs/commands.md")).groups()
    assert {*named} == printing


def test_the_page_lists_the_models_that_tests_build_with_their_sites_and_dtypes():
    sites = {name: family.sites for name, family in OTHERS.items() if name not in FAMILIES}
    page = (ROOT / "docs" / "supported.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([^|]+) \| ([^|]+) \|", page, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(sites)
    for name, fused, dtypes in rows:
        counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", fused)}
        assert {kind: counts.get(kind, 0) for kind in sites[name]} == sites[name], name
        assert dtypes == ("fp32, bf16" if OTHERS[name].in_bf16 else "fp32"), name

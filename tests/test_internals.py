"""Tests import no further internal names; the page of contracts names files that are there."""

from __future__ import annotations

import re

from .internals import REASONS, TESTS, internals

MOST = 81
"""The number of internal names that tests may import."""


def test_internal_names_are_listed_and_become_no_more() -> None:
    used = internals()
    assert used.keys() == REASONS.keys(), {name: used.get(name) for name in used.keys() ^ REASONS.keys()}
    assert len(used) <= MOST


def test_contracts_fit_a_page_and_their_files_are_there() -> None:
    page = (TESTS / "CONTRACTS.md").read_text(encoding="utf-8")
    assert page.count("\n") <= 80
    folder, missing = "", []
    for line in page.splitlines():
        if line.startswith("## "):
            folder = "".join(re.findall(r"`(\w+/)`", line))
        elif line.startswith("|"):
            files = re.findall(r"`([\w/]+\.py|\w+/)`", line.rpartition(" | ")[2])
            missing += [name for name in files if not (TESTS / folder / name).exists()]
    assert not missing

"""The report on the tiny model of each family is the stored one: every site, where it is and what it computes.

Write the stored ones anew with ``python -m tests.patcher.test_reports``, and read what has changed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import fused_norm
from fused_norm.model_configs import build, families_here

from .models import EXPERTS_ARE_MLPS

STORED = Path(__file__).parent / "reports"
_OF_RELEASE_4 = STORED / "transformers_4"
"""Reports that are others in release 4 of transformers."""


def report_on(model_type: str) -> str:
    report = fused_norm.apply_fused_norm(build(model_type, seed=0))
    rows = [
        f"{row.kind:<13} {row.path}: {row.what if row.reason is None else f'kept: {row.reason}'}" for row in report.rows
    ]
    return "".join(f"{line}\n" for line in [report.summary(), *rows])


def stored_for(model_type: str) -> Path:
    of_this_release = _OF_RELEASE_4 / f"{model_type}.txt"
    return of_this_release if EXPERTS_ARE_MLPS and of_this_release.exists() else STORED / f"{model_type}.txt"


@pytest.mark.parametrize("model_type", families_here())
def test_every_site_of_a_family_is_as_stored(model_type: str) -> None:
    assert report_on(model_type) == stored_for(model_type).read_text(encoding="utf-8")


def write() -> None:
    """Store the reports of this release; of release 4 those that differ from the others."""
    for model_type in families_here():
        text, file = report_on(model_type), STORED / f"{model_type}.txt"
        if EXPERTS_ARE_MLPS and not (file.exists() and text == file.read_text(encoding="utf-8")):
            file = _OF_RELEASE_4 / file.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()

"""A family that is added to the table as docs/extending.md shows has green tests without other changes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fused_norm

from .markdown_pages import ROOT

SUITES = (
    "tests/model_configs",
    "tests/patcher/test_apply.py",
    "tests/patcher/test_newer_families.py",
    "tests/patcher/test_patched_models.py",
    "tests/check",
)


@pytest.mark.slow
def test_the_families_of_the_page_pass_the_tests_that_go_over_the_table():
    source = Path(fused_norm.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "tests.docs.families_of_the_page"]
    command += ["-p", "no:cacheprovider", "-k", "phi3 or qwen3_next", *SUITES]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:]
    passed = re.findall(r"^PASSED (\S+)", run.stdout, re.MULTILINE)
    assert len(passed) >= 20
    assert [suite for suite in SUITES if not any(test.startswith(suite) for test in passed)] == []

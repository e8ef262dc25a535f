"""One-line faults: which ones there are, and that stored ones are found again."""

import json
from pathlib import Path

from tools.mutants.command import RESULTS
from tools.mutants.mutations import is_equal_code, mutants_of
from tools.mutants.runner import Map

FILE = Path("src/fused_norm/kernels/example.py")
SOURCE = '''"""A text: x < 1."""
def cache_key(x, y) -> str | None:
    """Another text: x < 1."""
    if x < y[1] and x.detach() is not None:
        logger.warning("x < 1")
        return "a reason"
    return (x, y)
'''


def test_every_kind_of_fault_is_made_and_texts_are_left_alone(tmp_path):
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text(SOURCE)
    faults = {f"{mutant.kind}: {mutant.before} -> {mutant.after}": mutant for mutant in mutants_of(tmp_path, FILE)}
    assert set(faults) == {
        "comparison: x < y[1] -> (x >= y[1])",
        "comparison: x < y[1] -> (x <= y[1])",
        "off by one: y[1] -> y[2]",
        "off by one: y[1] -> y[0]",
        "cast dropped: x.detach() -> x",
        "comparison: x.detach() is not None -> (x.detach() is None)",
        "and/or: x < y[1] and x.detach() is not None -> (x < y[1] or x.detach() is not None)",
        "condition: x < y[1] and x.detach() is not None -> (not (x < y[1] and x.detach() is not None))",
        "condition: x < y[1] and x.detach() is not None -> True",
        'reason dropped: "a reason" -> None',
        "reason dropped: (x, y) -> None",
        "key without a part: (x, y) -> ((y,))",
        "key without a part: (x, y) -> ((x,))",
    }
    mutant = faults["cast dropped: x.detach() -> x"]
    assert mutant.applied(SOURCE.encode()).decode() == SOURCE.replace("x.detach()", "x")
    assert not is_equal_code(mutant, SOURCE.encode())
    cases = [f"t.py::a[{i}]" for i in range(5)]
    slow, other = "t.py::slow", "t.py::of_another_line"
    lines = {test: {"kernels/example.py": [4]} for test in (*cases, slow)} | {other: {"kernels/example.py": [7]}}
    tests = Map()
    tests.replace_file("t.py", dict.fromkeys((*cases, other), 0.1) | {slow: 9.0}, lines)
    mutant = faults["comparison: x < y[1] -> (x >= y[1])"]
    assert tests.tests_of(mutant, 6.0, [cases[4], "t.py::gone"]) == [cases[4], *cases[:3]]
    assert tests.tests_of(mutant, None) == [*cases, slow]


def test_stored_verdicts_are_of_faults_that_are_still_there():
    root, stored = RESULTS.parents[2], json.loads(RESULTS.read_text())
    assert len(stored["mutants"]) >= 250
    files = {Path(name.partition(":")[0]) for name in stored["mutants"]}
    there = {mutant.name for file in files if (root / file).exists() for mutant in mutants_of(root, file)}
    assert len(there & set(stored["mutants"])) > len(stored["mutants"]) // 2, "draw and store new ones"

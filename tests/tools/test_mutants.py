"""One-line faults: which ones there are, and that stored ones are found again."""

from __future__ import annotations

import json
from pathlib import Path

from tools.mutants.command import RESULTS
from tools.mutants.mutations import Mutant, drawn, is_equal_code, mutants_of
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


def mutants(checkout: Path) -> dict[str, Mutant]:
    (checkout / FILE).parent.mkdir(parents=True)
    (checkout / FILE).write_text(SOURCE)
    return {f"{mutant.kind}: {mutant.before} -> {mutant.after}": mutant for mutant in mutants_of(checkout, FILE)}


def test_every_kind_of_fault_is_made_and_texts_are_left_alone(tmp_path: Path) -> None:
    assert set(mutants(tmp_path)) == {
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


def test_a_fault_is_one_change_of_the_source(tmp_path: Path) -> None:
    mutant = mutants(tmp_path)["cast dropped: x.detach() -> x"]
    source = SOURCE.encode()
    assert mutant.applied(source).decode() == SOURCE.replace("x.detach()", "x")
    assert not is_equal_code(mutant, source)


def test_a_seed_draws_the_same_faults_of_lines_that_tests_run(tmp_path: Path) -> None:
    there = mutants(tmp_path).values()
    reached = {"kernels/example.py": {7}}
    first, again = (drawn(tmp_path, 3, 0, reached) for _ in range(2))
    assert first == again
    assert first
    assert all(mutant in there and mutant.statement == (7, 7) for mutant in first)


def test_the_tests_of_a_fault_are_those_that_run_its_statement(tmp_path: Path) -> None:
    mutant = mutants(tmp_path)["cast dropped: x.detach() -> x"]
    tests = Map()
    lines = {"t.py::a": {"kernels/example.py": [4]}, "t.py::b": {"kernels/example.py": [7]}}
    tests.replace_file("t.py", {"t.py::a": 0.5, "t.py::b": 0.1}, lines)
    assert tests.tests_of(mutant, 5.0) == ["t.py::a"]
    assert tests.reached() == {"kernels/example.py": {4, 7}}
    cases = [f"t.py::a[{i}]" for i in range(5)]
    tests.replace_file("t.py", dict.fromkeys(cases, 0.1), {case: {"kernels/example.py": [4]} for case in cases})
    assert len(tests.tests_of(mutant, 5.0)) == 3
    assert tests.tests_of(mutant, 5.0, ["t.py::a[gone]"]) == cases


def test_stored_verdicts_are_of_faults_that_are_still_there() -> None:
    root, stored = RESULTS.parents[2], json.loads(RESULTS.read_text())
    assert len(stored["mutants"]) >= 250
    files = {Path(name.partition(":")[0]) for name in stored["mutants"]}
    there = {mutant.name for file in files if (root / file).exists() for mutant in mutants_of(root, file)}
    assert len(there & set(stored["mutants"])) > len(stored["mutants"]) // 2, "draw and store new ones"

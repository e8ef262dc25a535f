"""A result is loaded as it was saved, and only under the same settings and code."""

import math

from fused_norm.convergence.call_checks import CallRecord
from fused_norm.convergence.comparison import Comparison
from fused_norm.convergence.plan import code_digest
from fused_norm.convergence.suite import ResultStore
from fused_norm.convergence.training import RunRecord
from fused_norm.convergence.verdict import ComparisonResult

RUN = RunRecord(
    (5.0, math.nan), (1.0, math.inf), 0.1, 7, 4.5, {"norm": 2}, {"a": 0.5}, ("b",), gradients={"a": math.inf}
)
CALLS = CallRecord({"norm": 0.5}, not_seen=("norm (norm)",))
RESULT = ComparisonResult(Comparison("llama", "bf16"), RUN, (RUN,), RUN, CALLS)


def test_a_result_comes_back_as_it_was(tmp_path):
    ResultStore(tmp_path).save(RESULT, "settings")
    loaded = ResultStore(tmp_path).load(RESULT.comparison, "settings")
    assert repr(loaded) == repr(RESULT)
    assert [path.suffix for path in (tmp_path / "comparisons").iterdir()] == [".json"]


def test_other_settings_and_files_that_cannot_be_read_count_as_nothing(tmp_path):
    store = ResultStore(tmp_path)
    store.save(RESULT, "settings")
    assert store.load(RESULT.comparison, "other settings") is None
    assert ResultStore(tmp_path, fresh=True).load(RESULT.comparison, "settings") is None
    (path,) = (tmp_path / "comparisons").iterdir()
    path.write_text(path.read_text()[:100])
    assert store.load(RESULT.comparison, "settings") is None


def test_code_that_changed_has_another_digest(tmp_path):
    for name, text in (("one", "x = 1"), ("same", "x = 1"), ("other", "x = 2")):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "below" / "kernel.py").write_text(text)
    first, same, changed = (code_digest(tmp_path / name) for name in ("one", "same", "other"))
    assert first == same != changed

"""A result comes back as it was kept, and only under the settings and the code that it was made with."""

import dataclasses
import math

import pytest

from fused_norm.convergence import store
from fused_norm.convergence.plan import Case
from fused_norm.convergence.recording import Recording
from fused_norm.convergence.store import Result, Store

RUN = Recording((5.0, math.nan), (1.0, math.inf), 0.1, 7, {"norm": 2}, {"a": 0.5}, ("b",), gradients={"a": math.inf})
RESULT = Result(Case("llama", "bf16", mutation="dw"), RUN, (RUN,), RUN, planted=("norm", 3))


def test_a_result_comes_back_as_it_was(tmp_path):
    Store(tmp_path).save(RESULT, "settings")
    found = Store(tmp_path).load(RESULT.case, "settings")
    assert repr(found) == repr(RESULT)
    assert [path.suffix for path in (tmp_path / "cases").iterdir()] == [".json"]


def test_other_settings_and_files_that_cannot_be_read_count_as_nothing(tmp_path):
    kept = Store(tmp_path)
    kept.save(RESULT, "settings")
    assert kept.load(RESULT.case, "other settings") is None
    assert Store(tmp_path, fresh=True).load(RESULT.case, "settings") is None
    (path,) = (tmp_path / "cases").iterdir()
    path.write_text(path.read_text()[:100])
    assert kept.load(RESULT.case, "settings") is None


def test_a_fingerprint_follows_facts_and_code(monkeypatch):
    one = store.fingerprint({"steps": 1})
    assert one == store.fingerprint({"steps": 1})
    assert one != store.fingerprint({"steps": 2})
    monkeypatch.setattr(store, "_code", lambda: "a kernel was changed")
    assert one != store.fingerprint({"steps": 1})


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"planted": ("norm", 0)}, "invalid"),
        ({"stock": None, "hidden": "nothing to see"}, "hidden"),
        ({"stock": None, "trouble": "out of memory"}, "invalid"),
    ],
)
def test_a_fault_that_was_not_run_was_not_caught(changes, outcome):
    assert dataclasses.replace(RESULT, **changes).outcome == outcome

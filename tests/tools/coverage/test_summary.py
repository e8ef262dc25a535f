"""A summary is loaded as it was stored, lists its changes since another one, and is what the page's tables show."""

import copy

import pytest

from benchmarks.markdown import page_with
from tools.coverage import command
from tools.coverage.summary import PART, Summary, changes, stored, summarise, tables

FOUND = {
    "found": {"norm": 5, "gated": 0, "qk": 0, "rope": 2, "residual": 2, "mlp": 0},
    "fused": {"norm": 5, "gated": 0, "qk": 0, "rope": 0, "residual": 2, "mlp": 0},
    "kept": [["rope", "one.OneAttention", "of another | kind", 2]],
    "unfounded": [],
    "classes": {"one.OneNorm": "norm 11111111", "one.OneAttention": "attention 22222222"},
    "layers": 2,
    "norms_run": [4, 5],
    "why_not_run": "ValueError: no",
}
NOTHING = FOUND | {"found": {}, "fused": {}, "kept": [], "classes": {}}
WHOLE = FOUND | {"fused": FOUND["found"], "kept": [], "classes": {"two.TwoNorm": "norm 33333333"}, "why_not_run": None}
FAILED = {"broken": {"failed": "TypeError: 3"}, "tower": {"failed": PART}}
RESULTS = {"one": FOUND, "two": WHOLE, "bare": NOTHING, **FAILED}


@pytest.fixture
def summary():
    return summarise("5.9.0", copy.deepcopy(RESULTS))


def test_a_stored_summary_comes_back_and_has_a_line_for_each_type(summary, tmp_path):
    path = tmp_path / "transformers-5.9.0.json"
    summary.save(path)
    assert Summary.load(path) == summary
    assert sum('"norm": [5, 5]' in line for line in path.read_text(encoding="utf-8").splitlines()) == 2
    assert summary.without == ["bare"]
    assert summary.unbuilt == {"broken": "TypeError: 3"}
    assert summary.parts == ["tower"]
    assert summary.types["one"]["not run"] == [1, "ValueError: no"]


def test_what_came_went_and_changed_is_told(summary):
    changed = copy.deepcopy(summary)
    assert changes(summary, changed) == []
    changed.classes["one.OneNorm"] = "norm 44444444"
    changed.classes["two.TwoMLP"] = "mlp 55555555"
    del changed.classes["one.OneAttention"]
    changed.types["two"]["norm"] = [5, 4]
    assert changes(summary, changed) == [
        "attention one.OneAttention: gone",
        "norm one.OneNorm: its forward is written otherwise",
        "mlp two.TwoMLP: new",
        "type two: 5 of 5 norms, 2 of 2 residual adds, 2 of 2 half rotations"
        " -> 4 of 5 norms, 2 of 2 residual adds, 2 of 2 half rotations",
    ]


def test_pages_show_the_stored_summaries():
    summaries = [Summary.load(path) for path in stored(command.STORED).values()]
    for name, table in tables(summaries).items():
        page = (command.DOCS / name).read_text(encoding="utf-8")
        assert page_with(page, "coverage", table) == page, f"python -m tools.coverage --table writes {name}"


def test_the_command_compares_summaries_and_writes_the_page(summary, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "STORED", tmp_path)
    summary.save(tmp_path / "transformers-5.9.0.json")
    summary.transformers = "5.10.0"
    summary.classes["one.OneNorm"] = "norm 44444444"
    monkeypatch.setattr(command, "_sweep", lambda args: (summary, 0))
    monkeypatch.setattr("transformers.__version__", summary.transformers)
    assert command.main(["--store", "--against"]) == 1
    out = capsys.readouterr().out
    assert "since transformers 5.9.0: 1 changes" in out
    assert "norm one.OneNorm: its forward is written otherwise" in out
    assert command.main(["--against", "5.10.0"]) == 0, "with what was stored before, of this release too"
    monkeypatch.setattr(command, "DOCS", tmp_path)
    for name in ("supported.md", "model_types.md"):
        (tmp_path / name).write_text("<!-- coverage --><!-- end of coverage -->", encoding="utf-8")
    assert command.main(["--table"]) == 0
    assert "| transformers 5.9.0 | transformers 5.10.0 |" in (tmp_path / "supported.md").read_text(encoding="utf-8")
    assert "In transformers 5.10.0, " in (tmp_path / "model_types.md").read_text(encoding="utf-8")

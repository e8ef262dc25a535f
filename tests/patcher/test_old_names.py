"""Old names of options and of kinds of sites work as the new ones do, with a warning at the line that has them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_norm
from fused_norm import FuseOptions, Site
from fused_norm.cli import main
from fused_norm.integrations.trainer import FusedNormCallback
from fused_norm.model_configs import build

SWITCHES = {"consumers": "shared_inputs", "sandwich": "post_norm", "linear": "linear_4bit", "adapter": "lora"}
"""The options that are True or False, by their old names."""
ROUNDING = {"*.input_layernorm": "gemma"}
OPTIONS = [
    *((old, new, value) for old, new in (*SWITCHES.items(), ("readers", "shared_inputs")) for value in (True, False)),
    ("casting", "norm_rounding", ROUNDING),
]


@contextmanager
def warned_of(old: str, new: str) -> Iterator[None]:
    """One warning, which names both, at a line of this file."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
    told = [(warning.category, str(warning.message), warning.filename) for warning in warned]
    assert told == [(FutureWarning, f"fused_norm: {old} is called {new} now", __file__)]


def _loaded(**options: Any) -> FuseOptions:
    with fused_norm.on_load(**options):
        return FuseOptions()


ENTRIES: dict[str, Callable[..., Any]] = {
    "FuseOptions": lambda **options: FuseOptions(**options),
    "apply_fused_norm": lambda **options: fused_norm.apply_fused_norm(build("gemma2", seed=0), **options),
    "FusedNormCallback": lambda **options: vars(FusedNormCallback(**options)),
    "on_load": _loaded,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("old", "new", "value"), OPTIONS)
def test_an_option_by_its_old_name_is_the_option_with_a_warning(entry: str, old: str, new: str, value: Any) -> None:
    with warned_of(old, new):
        by_old = ENTRIES[entry](**{old: value})
    assert by_old == ENTRIES[entry](**{new: value})


@pytest.mark.parametrize(("old", "new", "value"), OPTIONS)
def test_an_option_by_both_names_is_an_error(old: str, new: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{old} is the old name of {new}; give {new} alone"):
        fused_norm.apply_fused_norm(build("llama", seed=0), **{old: value, new: value})


def test_from_pretrained_takes_old_names_in_a_mapping() -> None:
    class Loader:
        @staticmethod
        def from_pretrained() -> Any:
            return build("gemma2", seed=0)

    with warned_of("sandwich", "post_norm"):
        model = fused_norm.from_pretrained(Loader, fused_norm={"sandwich": False})
    assert fused_norm.apply_fused_norm(model).counts["post_norm"] == 4


@pytest.mark.parametrize(("old", "new"), SWITCHES.items())
def test_values_are_read_by_old_names(old: str, new: str) -> None:
    options, report = FuseOptions(**{new: False}), fused_norm.apply_fused_norm(build("gemma2", seed=0))
    with warned_of(old, new):
        assert getattr(options, old) is False
    if old == "consumers":
        with warned_of(old, new):
            assert report.consumers == report.shared_inputs != ()  # type: ignore[attr-defined]
    else:
        with warned_of(old, new):
            assert report.counts[old] == report.counts[new]  # type: ignore[index]
        with warned_of(old, new):
            assert report.counts.get(old, 7) == report.counts[new]  # type: ignore[call-overload]
    with pytest.raises(AttributeError, match="no attribute 'sandwiches'"):
        getattr(report, "sandwiches")  # noqa: B009
    with pytest.raises(KeyError, match="sandwiches"):
        report.counts["sandwiches"]  # type: ignore[index]


def test_pickles_with_old_names_load() -> None:
    options, site = FuseOptions(post_norm=False, norm_rounding=ROUNDING), Site("model.norm", "post_norm", "RMSNorm")
    for value, names in ((options, {"post_norm": "sandwich", "norm_rounding": "casting"}), (site, {})):
        state = {names.get(name, name): held for name, held in vars(value).items()}
        if value is site:
            state["kind"] = "sandwich"
        old = copy.copy(value)
        vars(old).clear()
        vars(old).update(state)
        assert pickle.loads(pickle.dumps(old)) == value
    assert pickle.loads(pickle.dumps(options)) == options


def test_counts_are_loaded_from_checkpoints_of_weights(tmp_path: Path) -> None:
    counts = fused_norm.apply_fused_norm(build("llama", seed=0)).counts
    torch.save(counts, tmp_path / "counts.pt")
    assert torch.load(tmp_path / "counts.pt", weights_only=True) == counts
    assert pickle.loads(pickle.dumps(counts)) == counts


def test_flags_of_commands_keep_their_old_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "gemma2", "--no-sandwich", "--no-consumers"]) == 0
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        "fused_norm: sandwich is called post_norm now",
        "fused_norm: consumers is called shared_inputs now",
    ]
    assert main(["inspect", "gemma2", "--no-post-norm", "--no-shared-inputs"]) == 0
    again = capsys.readouterr()
    assert (again.out, again.err) == (told.out, "")
    assert "post_norm=False" in again.out
    assert main(["inspect", "gemma2", "--no-sandwich", "--post-norm"]) == 2
    assert "sandwich is the old name of post_norm; give post_norm alone" in capsys.readouterr().err

"""Text becomes full sequences, the same ones in the same order, and bad input is named."""

import itertools
import json

import pytest
import torch

from fused_norm.cli import main
from fused_norm.convergence.text_sequences import pack, training_order, varied


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "{}/bad"], "bad is not UTF-8"),
        (["--data", "{}/rows"], "no column 'text'; it has body"),
        (["--data", "{}/rows", "--column", "body"], "the text has 8 tokens, and one sequence takes 33"),
        (["--data", "{}/empty"], "cannot load the dataset"),
    ],
)
def test_text_that_cannot_be_used_is_named(arguments, message, tmp_path, capsys):
    (tmp_path / "bad").write_bytes(b"caf\xe9\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in ("eins", "zwei")))
    line = [argument.format(tmp_path) for argument in arguments]
    assert main(["converge", "llama", "--steps", "2", "--out", str(tmp_path / "out"), *line]) == 2
    assert message in capsys.readouterr().err


def test_packing_cuts_the_running_text_pads_nothing_and_reads_no_more_than_it_needs():
    packed = pack(["abc", "", "dé\n", "ij"], length=4, limit=10)
    assert packed.dtype == torch.int64
    assert [bytes(row.tolist()) for row in packed] == [b"abcd", b"\xc3\xa9\ni"]
    assert pack(itertools.repeat("ab"), length=3, limit=2).shape == (2, 3)


def test_sequences_that_are_mostly_one_token_can_be_left_out():
    sequences = torch.tensor([[7, 7, 7, 1], [7, 7, 1, 2], [1, 2, 3, 4], [0, 0, 0, 0]])
    assert varied(sequences).tolist() == [[7, 7, 1, 2], [1, 2, 3, 4]]


def test_the_training_order_is_fixed_by_its_seed_and_goes_through_all_sequences_before_any_again():
    sequences = torch.arange(6).view(6, 1)
    drawn, again, other = (training_order(sequences, count=15, seed=seed).flatten() for seed in (1, 1, 2))
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)
    assert sorted(drawn[:6].tolist()) == sorted(drawn[6:12].tolist()) == list(range(6))
    assert len(drawn) == 15

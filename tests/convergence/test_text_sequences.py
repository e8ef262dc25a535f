"""Text becomes full sequences, the same ones in the same order, and bad input is named."""

import itertools
import json

import pytest
import torch

from fused_norm.convergence import text_sequences


def write(path, content):
    path.write_text(content, encoding="utf-8", newline="")
    return path


def test_the_standard_library_is_sorted_without_its_tests_and_enough_for_the_full_tier():
    files = text_sequences.standard_library()
    assert files == sorted(files)
    assert {"argparse.py", "typing.py"} <= {path.name for path in files}
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:]) for path in files)
    packed = text_sequences.pack(text_sequences.read_files(files), length=512, limit=320)
    assert packed.shape == (320, 512)
    assert packed.unique().numel() > 90


def test_files_are_read_whole_and_in_the_order_given(tmp_path):
    late = write(tmp_path / "z [1]*.txt", "zwei\n\n  drei ünd\tvier")
    early = write(tmp_path / "a.txt", "eins\n")
    expected = "".join(path.read_text(encoding="utf-8") for path in (late, early))
    assert "".join(text_sequences.read_files([late, early])) == expected


def test_a_dataset_gives_the_texts_of_its_column(tmp_path):
    rows = [{"text": "one", "body": "eins"}, {"text": "two", "body": "zwei"}]
    write(tmp_path / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert list(text_sequences.read_dataset(str(tmp_path))) == ["one", "two"]
    assert list(text_sequences.read_dataset(str(tmp_path), column="body")) == ["eins", "zwei"]


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (lambda folder: list(text_sequences.read_files([folder / "good", folder / "bad"])), r"bad is not UTF-8"),
        (lambda folder: text_sequences.read_dataset(str(folder)), "no column 'text'; it has body"),
        (lambda folder: text_sequences.read_dataset(str(folder / "none")), r"cannot load the dataset '.*' \(split 'tr"),
        (lambda folder: text_sequences.pack(["abc"], length=4, limit=1), "has 3 tokens, and one sequence takes 4"),
    ],
    ids=["not UTF-8", "missing column", "nothing to load", "too short"],
)
def test_what_cannot_be_read_is_named(read, problem, tmp_path):
    write(tmp_path / "good", "good\n")
    write(tmp_path / "train.jsonl", json.dumps({"body": "eins"}) + "\n")
    (tmp_path / "bad").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=problem):
        read(tmp_path)


def test_packing_cuts_the_running_text_pads_nothing_and_reads_no_more_than_it_needs():
    packed = text_sequences.pack(["abc", "", "dé\n", "ij"], length=4, limit=10)
    assert packed.dtype == torch.int64
    assert [bytes(row.tolist()) for row in packed] == [b"abcd", b"\xc3\xa9\ni"]
    assert text_sequences.pack(itertools.repeat("ab"), length=3, limit=2).shape == (2, 3)
    by_words = text_sequences.pack(["a b a"], length=3, limit=1, tokenize=lambda text: [*map(len, text.split())])
    assert by_words.tolist() == [[1, 1, 1]], "by any tokenizer"


def test_sequences_that_are_mostly_one_token_can_be_left_out():
    sequences = torch.tensor([[7, 7, 7, 1], [7, 7, 1, 2], [1, 2, 3, 4], [0, 0, 0, 0]])
    assert text_sequences.varied(sequences).tolist() == [[7, 7, 1, 2], [1, 2, 3, 4]]


def test_the_training_order_is_fixed_by_its_seed_and_goes_through_all_sequences_before_any_again():
    sequences = torch.arange(6).view(6, 1)
    drawn, again, other = (
        text_sequences.training_order(sequences, count=15, seed=seed).flatten() for seed in (1, 1, 2)
    )
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)
    assert sorted(drawn[:6].tolist()) == sorted(drawn[6:12].tolist()) == list(range(6))
    assert drawn[:6].tolist() != drawn[6:12].tolist()
    assert len(drawn) == 15

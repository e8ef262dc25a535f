"""Text becomes full sequences, the same ones in the same order, and bad input is named."""

import itertools
import json

import pytest
import torch

from fused_norm.convergence import text_sequences


def write(path, content):
    path.write_text(content, encoding="utf-8", newline="")
    return path


def test_the_standard_library_is_found_sorted_and_without_its_tests():
    files = text_sequences.standard_library()
    assert files == sorted(files)
    assert {"argparse.py", "typing.py"} <= {path.name for path in files}
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:]) for path in files)


def test_the_standard_library_is_enough_for_the_full_tier():
    packed = text_sequences.pack(text_sequences.read_files(text_sequences.standard_library()), length=512, limit=320)
    assert packed.shape == (320, 512)
    assert packed.unique().numel() > 90


def test_files_are_read_whole_and_in_the_order_given(tmp_path):
    late = write(tmp_path / "z [1]*.txt", "zwei\n\n  drei ünd\tvier")
    early = write(tmp_path / "a.txt", "eins\n")
    assert "".join(text_sequences.read_files([late, early])) == late.read_text(encoding="utf-8") + early.read_text(
        encoding="utf-8"
    )


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    good, bad = write(tmp_path / "good.txt", "good\n"), tmp_path / "bad.txt"
    bad.write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8"):
        list(text_sequences.read_files([good, bad]))


def test_a_dataset_gives_the_texts_of_its_column(tmp_path):
    rows = [{"text": "one", "body": "eins"}, {"text": "two", "body": "zwei"}]
    write(tmp_path / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert list(text_sequences.read_dataset(str(tmp_path))) == ["one", "two"]
    assert list(text_sequences.read_dataset(str(tmp_path), column="body")) == ["eins", "zwei"]


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    write(tmp_path / "train.jsonl", json.dumps({"body": "eins"}) + "\n")
    with pytest.raises(ValueError, match="no column 'text'; it has body"):
        text_sequences.read_dataset(str(tmp_path))


def test_a_dataset_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot load the dataset '.*' \(split 'train'\)"):
        text_sequences.read_dataset(str(tmp_path))


def test_packing_cuts_the_running_text_and_pads_nothing():
    packed = text_sequences.pack(["abc", "", "dé\n", "ij"], length=4, limit=10)
    assert packed.dtype == torch.int64
    assert [bytes(row.tolist()) for row in packed] == [b"abcd", b"\xc3\xa9\ni"]


def test_packing_reads_no_more_than_it_needs():
    assert text_sequences.pack(itertools.repeat("ab"), length=3, limit=2).shape == (2, 3)


def test_packing_takes_any_tokenizer():
    assert text_sequences.pack(
        ["a b a"], length=3, limit=1, tokenize=lambda text: [len(word) for word in text.split()]
    ).tolist() == [[1, 1, 1]]


def test_text_that_fills_no_sequence_is_an_error():
    with pytest.raises(ValueError, match="has 3 tokens, and one sequence takes 4"):
        text_sequences.pack(["abc"], length=4, limit=1)


def test_sequences_that_are_mostly_one_token_can_be_left_out():
    sequences = torch.tensor([[7, 7, 7, 1], [7, 7, 1, 2], [1, 2, 3, 4], [0, 0, 0, 0]])
    assert text_sequences.varied(sequences).tolist() == [[7, 7, 1, 2], [1, 2, 3, 4]]


def test_the_training_order_is_fixed_by_its_seed_and_goes_through_all_sequences_before_any_again():
    sequences = torch.arange(6).view(6, 1)
    drawn = text_sequences.training_order(sequences, count=15, seed=1).flatten()
    assert torch.equal(drawn, text_sequences.training_order(sequences, count=15, seed=1).flatten())
    assert not torch.equal(drawn, text_sequences.training_order(sequences, count=15, seed=2).flatten())
    assert sorted(drawn[:6].tolist()) == sorted(drawn[6:12].tolist()) == list(range(6))
    assert drawn[:6].tolist() != drawn[6:12].tolist()
    assert len(drawn) == 15

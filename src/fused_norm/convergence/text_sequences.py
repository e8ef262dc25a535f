"""Real text as full sequences of tokens, the same ones in the same order for the same seed."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

Tokenize: TypeAlias = Callable[[str], Sequence[int]]


def standard_library() -> list[Path]:
    """The source files of Python's own standard library without its tests, sorted.

    Raises:
        FileNotFoundError: this Python comes without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"no source of the standard library under {root}; name text files of your own")
    return sorted(files)


def read_files(paths: Iterable[Path]) -> Iterator[str]:
    """The lines of UTF-8 text files, in the order of ``paths``, line ends included.

    Raises:
        ValueError: a file is not UTF-8.
    """
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                yield from file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text; convert it or leave it out") from error


def read_dataset(name: str, *, column: str = "text") -> Iterator[str]:
    """The texts of a dataset's split ``train``, streamed in its own order.

    Args:
        name: what ``datasets.load_dataset`` takes, a folder or a name on the hub, followed by ``:config`` if
            the dataset has configurations.
        column: holds the text.

    Raises:
        ValueError: the dataset cannot be loaded, or has no such column.
    """
    import datasets  # takes a second to import, and files need it not

    path, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(path, config or None, split="train", streaming=True)
        columns = rows.column_names or list(next(iter(rows)))
    except Exception as error:
        raise ValueError(f"cannot load the dataset {name!r} (split 'train'): {error}") from error
    if column not in columns:
        raise ValueError(f"the dataset {name!r} has no column {column!r}; it has {', '.join(columns)}")
    return (row[column] for row in rows)


def pack(texts: Iterable[str], *, length: int, limit: int, tokenize: Tokenize = str.encode) -> Tensor:
    """Texts one after the other, cut into full sequences: no padding, so every position trains.

    Args:
        texts: read only as far as needed.
        length: tokens in a sequence.
        limit: the largest number of sequences.
        tokenize: makes token ids of a text; UTF-8 bytes if nothing else is said, which need no vocabulary.

    Returns:
        Token ids, (sequences, length), int64.

    Raises:
        ValueError: the texts do not fill one sequence.
    """
    tokens: list[int] = []
    for text in texts:
        tokens.extend(tokenize(text))
        if len(tokens) >= length * limit:
            break
    count = min(len(tokens) // length, limit)
    if count == 0:
        raise ValueError(f"the text has {len(tokens)} tokens, and one sequence takes {length}; use more text")
    return torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)


def varied(sequences: Tensor) -> Tensor:
    """Those sequences, (sequences, length) int64, of which no token makes up more than half, in their order.

    In a run of one character all positions are alike, and round alike: they count as one.
    """
    most = sequences.mode(dim=1, keepdim=True).values
    return sequences[(sequences == most).float().mean(dim=1) <= 0.5]


def training_order(sequences: Tensor, *, count: int, seed: int) -> Tensor:
    """``count`` sequences in training order, (count, length): one shuffled pass over all of them after another.

    ``sequences``: (sequences, length), any dtype, one sequence or more. ``seed``: of the order.
    """
    generator = torch.Generator().manual_seed(seed)
    passes = [torch.randperm(len(sequences), generator=generator) for _ in range(-(-count // len(sequences)))]
    return sequences[torch.cat(passes)[:count]]

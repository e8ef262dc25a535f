"""The hash of a forward changes with what it does, and with nothing else."""

from __future__ import annotations

from torch import Tensor

from tools.coverage.forward_hashes import forward_hash


class Plain:
    def forward(self, x, factor=2):
        return x * factor


class Typed:
    def forward(self, x: Tensor, factor: int = 2) -> Tensor:
        """The same."""
        # With a comment.
        return x * factor


class Otherwise:
    def forward(self, x, factor=2):
        return x + factor


class WithoutForward:
    pass


def test_a_hash_is_that_of_the_code_alone():
    assert forward_hash(Plain) == forward_hash(Typed) != forward_hash(Otherwise)
    assert forward_hash(WithoutForward) == "--------"

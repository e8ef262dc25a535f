"""What makes Triton's interpreter faster changes no result."""

from __future__ import annotations

import pytest
from triton import knobs

from ..conftest import as_triton_has_it
from .calls import CALLS, every_call
from .numerics import assert_same

if not knobs.runtime.interpret:
    pytest.skip("kernels are compiled", allow_module_level=True)


@CALLS
def test_what_makes_it_faster_changes_no_bit(case: str) -> None:
    call = every_call("cpu")[case]
    call.results()  # after which all types of its operands are known
    fast = call.results()
    with as_triton_has_it():
        assert_same(fast, call.results())

"""The interpreter of the tests has the bits of Triton's own."""

import importlib.util

import numpy as np
import pytest
import triton.language as tl

from .conftest import HAS_GPU

if HAS_GPU:
    pytest.skip("kernels are compiled", allow_module_level=True)

from triton.runtime import interpreter


@pytest.fixture(scope="module")
def own():
    """Return Triton's original interpreter, from a second copy of its module."""
    spec = importlib.util.find_spec("triton.runtime.interpreter")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module._convert_float is not interpreter._convert_float
    return module


EVERY_BF16 = np.arange(2**16, dtype=np.uint16).reshape(64, -1)
SOME_FP32 = np.random.default_rng(0).integers(0, 2**32, (64, 2**10), dtype=np.uint32)
ROUNDINGS = (None, interpreter._ir.ROUNDING_MODE.RTNE)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=["cut off", "to nearest"])
@pytest.mark.parametrize("subnormal", [True, False])
@pytest.mark.parametrize("dtypes", [(tl.bfloat16, tl.float32), (tl.float32, tl.bfloat16)], ids=str)
def test_numbers_are_converted_as_triton_converts_them(dtypes, subnormal, rounding, own):
    bits, sign, smallest = (EVERY_BF16, 15, 0x80) if dtypes[0] is tl.bfloat16 else (SOME_FP32, 31, 0x800000)
    size = bits & ((1 << sign) - 1)
    if not subnormal:
        bits = np.append(bits[size >= smallest], [0, 1 << sign]).astype(bits.dtype)
    numbers = bits if dtypes[0] is tl.bfloat16 else bits.view(np.float32)
    expected = own._convert_float(numbers, *dtypes, rounding)
    np.testing.assert_array_equal(interpreter._convert_float(numbers, *dtypes, rounding), expected)


def test_types_are_the_same_the_first_time_and_later(own):
    for dtype in (tl.int1, tl.int32, tl.uint64, tl.float16, tl.bfloat16, tl.float32, tl.pointer_type(tl.bfloat16)):
        for shape in ([4], [2, 8], [tl.constexpr(2), 8]):
            first, second = tl.block_type(dtype, shape), tl.block_type(dtype, shape)
            assert first == second
            assert first.name == second.name == f"<{first.shape}, {dtype}>"
            assert [*second.shape] == [int(size) for size in shape]
            assert first.numel == second.numel == np.prod([*second.shape])
            assert second.element_ty is dtype
            assert interpreter._get_np_dtype(second) == own._get_np_dtype(second)
            tensor = tl.tensor(None, second)
            assert [size.value for size in tensor.shape] == [*second.shape]
            assert (tensor.numel.value, tensor.dtype) == (second.numel, dtype)
        assert interpreter._get_np_dtype(dtype) == own._get_np_dtype(dtype)
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [3])

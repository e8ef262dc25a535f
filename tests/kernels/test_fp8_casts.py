"""Casts to FP8: torchao's, DeepGEMM's and COAT's codes and scales bit for bit, in PyTorch and in Triton."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_norm.kernels.fp8 import FORMATS, FP8Format, Quantized, dequantize, quantize
from fused_norm.kernels.fp8.cast import cast, cast_groups
from fused_norm.kernels.fp8.codes import codes_of, scale_of
from fused_norm.kernels.fp8.formats import format_from
from fused_norm.kernels.triton.language import TRITON_DTYPES, values_of

from .fp8_values import ALL_FORMATS, DEEPGEMM, E4M3, E5M2, assert_same_bits, assert_same_codes, hard_rows
from .numerics import BF16, DTYPES, FP32

FP8 = pytest.mark.parametrize("code", [E4M3, E5M2], ids=["e4m3", "e5m2"])
VALUES = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def torchao() -> Any:
    """torchao's casts."""
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import config, float8_scaling_utils, float8_training_tensor
        from torchao.prototype.blockwise_fp8_training import kernels
        from torchao.prototype.mx_formats import config as mx_config
        from torchao.prototype.mx_formats import mx_tensor

    class Casts:
        modes = mx_config.ScaleCalculationMode
        to_mx = staticmethod(mx_tensor.to_mx)
        blocks_of_rows = staticmethod(kernels.torch_blockwise_scale_act_quant_lhs)
        blocks_of_columns = staticmethod(kernels.torch_blockwise_scale_act_quant_rhs)

        @staticmethod
        def float8(y: Tensor, code: torch.dtype, axis: int | None, powers: bool) -> tuple[Tensor, Tensor]:
            """Codes, and the scale that codes are multiplied by."""
            granularity = config.ScalingGranularity.TENSORWISE if axis is None else config.ScalingGranularity.AXISWISE
            made = float8_scaling_utils.hp_tensor_to_float8_dynamic(
                y,
                code,
                float8_training_tensor.LinearMMConfig(),
                scaling_granularity=granularity,
                axiswise_dim=axis,
                round_scales_to_power_of_2=powers,
            )
            return made._data, 1.0 / made._scale

    return Casts


@FP8
@VALUES
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "with NaN and inf"])
@pytest.mark.parametrize("powers", [True, False])
def test_one_scale_for_a_tensor_a_row_or_a_column_is_torchaos(
    torchao: Any, code: torch.dtype, dtype: torch.dtype, finite: bool, powers: bool
) -> None:
    y = hard_rows(37, 48, dtype, finite=finite)
    tensor = replace(FORMATS["tensorwise"], dtype=code, power_of_2=powers)
    rows = replace(FORMATS["rowwise"], dtype=code, power_of_2=powers)
    for fp8_format, axis in ((tensor, None), (rows, -1), (rows.along_rows(), 0)):
        ours = quantize(y, fp8_format, transposed=axis is None)
        q, scale = torchao.float8(y, code, axis, powers)
        assert_same_bits(ours.q, q)
        assert_same_bits(ours.scale, scale)
        if axis is None:
            assert_same_bits(ours.transposed, q.t())
            assert ours.transposed.is_contiguous()
    assert ours.q.stride() == (1, 37)


@VALUES
def test_one_scale_for_128_columns_or_rows_is_torchaos(torchao: Any, dtype: torch.dtype) -> None:
    y = hard_rows(37, 256, dtype)
    ours, (q, scale) = quantize(y, "block128"), torchao.blocks_of_rows(y)
    assert_same_bits(ours.q, q)
    assert_same_bits(ours.scale, scale)
    assert ours.scale.stride() == scale.stride() == (1, 37)
    y = torch.cat((y, y.new_ones(128 - 37, 256)))  # torchao takes full blocks of rows alone
    ours, (q, scale) = quantize(y, FORMATS["block128"].along_rows()), torchao.blocks_of_columns(y)
    assert_same_bits(ours.q, q)
    assert_same_bits(ours.scale, scale)
    assert (ours.q.stride(), ours.scale.stride()) == (q.stride(), scale.stride())


@FP8
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("formula", ["floor", "rceil"])
def test_powers_of_two_for_32_columns_or_rows_are_torchaos(
    torchao: Any, code: torch.dtype, dtype: torch.dtype, formula: Any
) -> None:
    fp8_format = replace(FORMATS["mxfp8"], dtype=code, formula=formula)
    mode = torchao.modes.FLOOR if formula == "floor" else torchao.modes.RCEIL
    y = hard_rows(150, 192, dtype)
    scale, q = torchao.to_mx(y, code, 32, mode, is_swizzled_scales=True)
    ours = quantize(y, fp8_format)
    assert_same_bits(ours.q, q)
    assert_same_bits(ours.scale, scale)
    padded = torch.cat((y, y.new_zeros(10, 192))).t().contiguous()
    scale, q = torchao.to_mx(padded, code, 32, mode, is_swizzled_scales=True)
    ours = quantize(y, fp8_format.along_rows())
    assert_same_bits(ours.q, q.t()[:150])
    assert_same_bits(ours.scale, scale)


@VALUES
@pytest.mark.parametrize("powers", [False, True])
def test_deepgemms_formula(dtype: torch.dtype, powers: bool) -> None:
    y = hard_rows(37, 256, dtype)
    grouped = y.float().view(37, 2, 128)
    scale = grouped.abs().amax(-1).clamp(1e-4) / 448.0
    if powers:
        scale = torch.pow(2.0, torch.ceil(torch.log2(scale.abs())))
    q = (grouped * (1.0 / scale[..., None])).clamp(-448, 448).to(E4M3)
    ours = quantize(y, replace(DEEPGEMM, power_of_2=powers))
    assert_same_bits(ours.q, q.view(37, 256))
    assert_same_bits(ours.scale, scale)
    assert ours.scale.stride() == (1, 40)


@FP8
def test_coats_formula(code: torch.dtype) -> None:
    top = torch.finfo(code).max
    y = hard_rows(37, 48, BF16)[6:]
    scale = (y.float().abs().max() + 1e-10) / top
    ours = quantize(y, replace(FORMATS["coat"], dtype=code), transposed=True)
    assert_same_bits(ours.scale, scale)
    assert_same_bits(ours.q, (y.float() / scale).to(code))
    assert_same_bits(ours.transposed, ours.q.t())
    grouped = y.float().view(31, 3, 16)
    scale = (grouped.abs().amax(-1) + 1e-10) / top
    ours = quantize(y, replace(FORMATS["coat_input"], dtype=code))
    assert_same_bits(ours.scale, scale)
    assert_same_bits(ours.q, (grouped / scale[..., None]).to(code).view(31, 48))


BOTH_AXES = [
    *((name, False) for name in ALL_FORMATS),
    *((name, True) for name, fp8_format in ALL_FORMATS.items() if not fp8_format.whole),
]


@pytest.mark.parametrize(("name", "along_rows"), BOTH_AXES)
def test_numbers_come_back_as_near_as_codes_are(name: str, along_rows: bool) -> None:
    fp8_format = ALL_FORMATS[name].along_rows() if along_rows else ALL_FORMATS[name]
    y = torch.randn(37, 256) + torch.arange(37.0)[:, None] + torch.arange(256.0) / 7
    back = dequantize(quantize(y, fp8_format))
    assert back.dtype == FP32
    # Half of the last of four bits; what saturates under the largest power of two below amax loses up to an eighth.
    bound = 1 / 8 if fp8_format.formula == "floor" else 1 / 16
    assert ((back - y).abs() <= bound * y.abs() + 1e-3 * y.abs().max()).all()
    assert ((back - y).abs() > 1e-3).any()


@FP8
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_zeros_have_finite_scales_and_stay_zeros(name: str, code: torch.dtype) -> None:
    made = quantize(torch.zeros(5, 128, dtype=BF16), replace(ALL_FORMATS[name], dtype=code))
    assert made.scale.float().isfinite().all()
    assert (dequantize(made) == 0).all()


@FP8
def test_what_is_beyond_the_largest_code_becomes_it(code: torch.dtype) -> None:
    top = torch.finfo(code).max
    y = torch.full((1, 32), 1.99 * 2.0 ** int(torch.tensor(top).log2()))
    y[0, 1::2] *= -1
    made = quantize(y, replace(FORMATS["mxfp8"], dtype=code))
    assert_same_bits(made.q.float(), top * y.sign())


def test_gradients_go_straight_through_a_cast() -> None:
    y = torch.randn(5, 128, dtype=BF16, requires_grad=True)
    made = quantize(y, "rowwise")
    assert made.placeholder.shape == y.shape
    assert made.placeholder.dtype == BF16
    assert made.placeholder.isnan().all()
    assert made.placeholder.untyped_storage().nbytes() == 2
    assert not made.q.requires_grad
    dy = torch.randn(5, 128, dtype=BF16)
    made.placeholder.backward(dy)
    assert torch.equal(y.grad, dy)


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (1, 128), (128,), (3, 0)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_empty_and_single_rows(name: str, shape: tuple[int, ...]) -> None:
    made = quantize(torch.randn(shape), name)
    assert made.q.shape == dequantize(made).shape == shape


def test_formats_and_shapes_that_do_not_go_together_are_refused() -> None:
    y = torch.randn(5, 100)
    for arguments, error, message in (
        ((y, "block128"), ValueError, "rows of 100 elements cannot be divided into groups of 128"),
        ((y, "mxfp8"), ValueError, "groups of 32"),
        ((y, "columnwise"), ValueError, "or one of tensorwise, rowwise"),
        ((y, "rowwise", True), ValueError, "share their scale along a row"),
        ((y, "tensorwise", "no"), TypeError, "transposed must be True or False, not 'no'"),
        ((torch.arange(3), "rowwise"), TypeError, r"torch\.int64"),
        ((y.to(E4M3), "rowwise"), TypeError, r"y must be float32, .*, not torch\.float8_e4m3fn"),
        (([1.0], "rowwise"), TypeError, "y must be a tensor, not list"),
        ((y.to_sparse(), "rowwise"), TypeError, "y must be a dense tensor"),
        ((torch.ones(()), "rowwise"), ValueError, "y must have at least one dimension"),
        ((y, []), ValueError, "fp8_format must be an FP8Format or one of"),
    ):
        with pytest.raises(error, match=message):
            quantize(*arguments)
    with pytest.raises(TypeError, match="dequantize: codes must be Quantized, not Tensor"):
        dequantize(y)
    for wrong in ({"power_of_2": "no"}, {"group_rows": True}, {"group_columns": 128.0}):
        with pytest.raises(TypeError, match="groups must be ints, and power_of_2 a bool"):
            FP8Format(**{"group_rows": 1, "group_columns": 0, **wrong})
    for wrong, message in (
        ({"dtype": torch.bfloat16}, "dtype must be one of"),
        ({"formula": "amax"}, "formula must be one of"),
        ({"group_columns": 48}, "power of two"),
        ({"group_columns": -16}, "power of two"),
        ({"group_rows": 128, "group_columns": 128}, "beside a 1"),
        ({"group_columns": 1}, "beside a 1"),
        ({"scale_layout": "columns"}, "scales of groups have layouts"),
        ({"group_columns": 32, "formula": "floor"}, "E8M0 ones are swizzled"),
        ({"floor": 0.0}, "1e-30"),
        ({"scale_layout": "tiles"}, "scale_layout must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            FP8Format(**{"group_rows": 1, "group_columns": 0, **wrong})


def test_a_format_comes_back_from_its_options() -> None:
    for fp8_format in ALL_FORMATS.values():
        other = replace(fp8_format.along_rows(), dtype=E5M2)
        for one in (fp8_format, other):
            assert format_from(one.options) == one
        assert format_from(fp8_format.options) is format_from(fp8_format.options)


@triton.jit
def _cast_kernel(
    amax_ptr, y_ptr, scale_ptr, q_ptr, N: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, Y: tl.constexpr
):  # fmt: skip
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + col, mask=col < N, other=0.0)
    scale, factor = scale_of(amax.to(tl.int32, bitcast=True), FORMAT, Y)
    tl.store(scale_ptr + col, scale, mask=col < N)
    codes = codes_of(tl.load(y_ptr + col, mask=col < N, other=0.0), factor, q_ptr.dtype.element_ty, FORMAT)
    tl.store(q_ptr + col, codes, mask=col < N)


@triton.jit
def _decode_kernel(q_ptr, y_ptr):
    code = tl.arange(0, 256)
    tl.store(y_ptr + code, values_of(tl.load(q_ptr + code), q_ptr.dtype.element_ty))


def _cast_in_triton(y: Tensor, amax: Tensor, fp8_format: FP8Format, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 values, each with an amax of its own, all of them numbers of ``dtype``."""
    block = 16384
    q = y.new_empty(y.shape, dtype=fp8_format.dtype)
    scale = y.new_empty(y.shape, dtype=torch.uint8 if fp8_format.swizzled else FP32)
    _cast_kernel[(triton.cdiv(y.numel(), block),)](
        amax, y, scale, q, y.numel(), block, fp8_format, TRITON_DTYPES[dtype]
    )
    return q, scale.view(torch.float8_e8m0fnu) if fp8_format.swizzled else scale


def _beside(values: Tensor, places: int = 3) -> Tensor:
    """fp32 values and their neighbours."""
    bits = values.view(torch.int32)[:, None] + torch.arange(-places, places + 1, device=values.device)
    return bits.to(torch.int32).view(FP32).flatten()


@FP8
def test_kernels_round_and_decode_every_code(code: torch.dtype, device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(code)
    decoded = torch.empty(256, device=device)
    _decode_kernel[(1,)](codes, decoded)
    assert_same_bits(decoded, codes.float())
    numbers = codes.float()[codes.float().isfinite()].unique()
    top = torch.finfo(code).max
    y = torch.cat(
        (_beside(numbers), _beside((numbers[1:] + numbers[:-1]) / 2), torch.tensor([0.0, -0.0], device=device))
    )
    beyond = torch.tensor([1.5 * top, -1e30, float("inf"), -float("inf"), float("nan")], device=device)
    y = torch.cat((y, beyond))
    unscaled = replace(FORMATS["tensorwise"], dtype=code)
    q, scale = _cast_in_triton(y, torch.full_like(y, top), unscaled, FP32)
    assert (scale == 1).all()
    assert_same_bits(q, y.clamp(-top, top).to(code))


@FP8
@VALUES
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_kernels_scale_as_pytorch_does(name: str, dtype: torch.dtype, code: torch.dtype, device: str) -> None:
    fp8_format = replace(ALL_FORMATS[name], dtype=code)
    if dtype == FP32:  # where logarithms round to those of a power of two
        powers = torch.exp2(torch.arange(-100.0, 120.0))
        amax = torch.cat([_beside(powers * factor) for factor in (1.0, 1.5, 1.75)])
        amax = torch.cat((amax, torch.tensor([0.0, 1e-40, 1e-12, 1e-10, 1e-4, float("nan"), float("inf")])))
    else:
        amax = torch.arange(0x8000, dtype=torch.int32).to(torch.int16).view(dtype).float()
    amax = amax.to(device)
    y = (amax * torch.linspace(-1.2, 1.2, amax.numel(), device=device)).to(dtype)
    q, scale = _cast_in_triton(y.float(), amax, fp8_format, dtype)
    expected_q, expected_scale = cast_groups(y, amax.to(dtype), fp8_format)
    assert_same_bits(scale, expected_scale)
    assert_same_bits(q, expected_q)


def test_kernels_raise_what_is_below_the_floor_by_less_than_fp32_tells(device: str) -> None:
    """PyTorch compares with the floor in fp64; of two fp32 numbers around it, the lower one is raised to it."""
    fp8_format = replace(FORMATS["tensorwise"], floor=1.5e-8)
    amax = _beside(torch.tensor([1.5e-8], device=device))
    (q, scale), expected = _cast_in_triton(amax, amax, fp8_format, FP32), cast_groups(amax, amax, fp8_format)
    assert_same_bits(scale, expected[1])
    assert_same_bits(q, expected[0])


def test_groups_along_rows_are_those_of_the_transpose() -> None:
    y = torch.randn(256, 384, dtype=BF16)
    for name in ("block128", "deepgemm", "coat_input", "rowwise"):
        one = ALL_FORMATS[name]
        along_rows, across = quantize(y, one.along_rows()), quantize(y.t().contiguous(), one)
        assert_same_bits(along_rows.q, across.q.t())
        assert_same_bits(along_rows.scale, across.scale.t())
    along_rows, across = quantize(y, FORMATS["mxfp8"].along_rows()), quantize(y.t().contiguous(), "mxfp8")
    assert_same_codes(Quantized(along_rows.q.t(), along_rows.scale, across.fp8_format), across)
    assert cast(y, FORMATS["rowwise"])[2] is None

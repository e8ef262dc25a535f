"""Casts to FP8: torchao's and COAT's codes and scales bit for bit, in PyTorch and in Triton."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels.fp8 import FORMATS, FP8Format, dequantize, quantize

from .fp8_values import E4M3, assert_same_bits, hard_rows
from .numerics import BF16, DTYPES, FP32

VALUES = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def torchao() -> Any:
    """Cast as torchao does."""
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import config, float8_scaling_utils, float8_training_tensor
        from torchao.prototype.blockwise_fp8_training import kernels
        from torchao.prototype.mx_formats import config as mx_config
        from torchao.prototype.mx_formats import mx_tensor

    def casts(name: str, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and the factor that values were multiplied by."""
        if name == "block128":
            return kernels.torch_blockwise_scale_act_quant_lhs(y)
        if name == "mxfp8":
            mode = mx_config.ScaleCalculationMode.FLOOR
            return mx_tensor.to_mx(y, E4M3, 32, mode, is_swizzled_scales=True)[::-1]
        axis, granularity = -1, config.ScalingGranularity.AXISWISE
        if name == "tensorwise":
            axis, granularity = None, config.ScalingGranularity.TENSORWISE
        cast = float8_scaling_utils.hp_tensor_to_float8_dynamic(
            y,
            E4M3,
            float8_training_tensor.LinearMMConfig(),
            scaling_granularity=granularity,
            axiswise_dim=axis,
            round_scales_to_power_of_2=name == "rowwise",
        )
        return cast._data, 1.0 / cast._scale

    return casts


@VALUES
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "with NaN and inf"])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "block128", "mxfp8"])
def test_codes_and_scales_are_torchaos(torchao: Any, name: str, dtype: torch.dtype, finite: bool) -> None:
    if name == "mxfp8" and dtype == torch.float16:
        pytest.skip("torchao makes it of bfloat16 and float32 alone")
    y = hard_rows(37, 256, dtype, finite=finite)
    ours, (q, scale) = quantize(y, name), torchao(name, y)
    assert_same_bits(ours.q, q)
    assert_same_bits(ours.scale, scale)
    assert ours.scale.stride() == ((1, 37) if name == "block128" else scale.stride())


def test_coats_formula() -> None:
    y = hard_rows(37, 48, BF16)[6:]
    scale = (y.float().abs().max() + 1e-10) / 448.0
    ours = quantize(y, "coat")
    assert_same_bits(ours.scale, scale)
    assert_same_bits(ours.q, (y.float() / scale).to(E4M3))
    grouped = y.float().view(31, 3, 16)
    scale = (grouped.abs().amax(-1) + 1e-10) / 448.0
    ours = quantize(y, FORMATS["coat_input"])
    assert_same_bits(ours.scale, scale)
    assert_same_bits(ours.q, (grouped / scale[..., None]).to(E4M3).view(31, 48))


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_come_back_as_near_as_codes_are(name: str) -> None:
    y = torch.randn(37, 256) + torch.arange(37.0)[:, None] + torch.arange(256.0) / 7
    back = dequantize(quantize(y, name))
    assert back.dtype == FP32
    # Half a unit of four bits; values that saturate under the largest power of two below amax lose up to an eighth.
    bound = 1 / 8 if name == "mxfp8" else 1 / 16
    assert ((back - y).abs() <= bound * y.abs() + 1e-3 * y.abs().max()).all()
    assert ((back - y).abs() > 1e-3).any()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_have_finite_scales_and_stay_zeros(name: str) -> None:
    codes = quantize(torch.zeros(5, 128, dtype=BF16), name)
    assert codes.scale.float().isfinite().all()
    assert (dequantize(codes) == 0).all()


def test_what_is_beyond_the_largest_code_becomes_it() -> None:
    y = torch.full((1, 32), 1.99 * 256)
    y[0, 1::2] *= -1
    assert_same_bits(quantize(y, "mxfp8").q.float(), 448.0 * y.sign())


def test_gradients_go_straight_through_a_cast() -> None:
    y = torch.randn(5, 128, dtype=BF16, requires_grad=True)
    quantized = quantize(y, "rowwise")
    assert quantized.placeholder.shape == y.shape
    assert quantized.placeholder.dtype == BF16
    assert quantized.placeholder.isnan().all()
    assert quantized.placeholder.untyped_storage().nbytes() == 2
    assert not quantized.q.requires_grad
    dy = torch.randn(5, 128, dtype=BF16)
    quantized.placeholder.backward(dy)
    assert torch.equal(y.grad, dy)


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (1, 128), (128,), (3, 0)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_empty_and_single_rows(name: str, shape: tuple[int, ...]) -> None:
    quantized = quantize(torch.randn(shape), name)
    assert quantized.q.shape == dequantize(quantized).shape == shape


def test_formats_and_shapes_that_do_not_go_together_are_refused() -> None:
    y = torch.randn(5, 100)
    for arguments, error, message in (
        ((y, "block128"), ValueError, "rows of 100 elements cannot be divided into groups of 128"),
        ((y, "mxfp8"), ValueError, "groups of 32"),
        ((y, "columnwise"), ValueError, "must be one of tensorwise, rowwise"),
        ((torch.arange(3), "rowwise"), TypeError, r"torch\.int64"),
        ((y.to(E4M3), "rowwise"), TypeError, r"y must be float32, .*, not torch\.float8_e4m3fn"),
        (([1.0], "rowwise"), TypeError, "y must be a tensor, not list"),
        ((y.to_sparse(), "rowwise"), TypeError, "y must be a dense tensor"),
        ((torch.ones(()), "rowwise"), ValueError, "y must have at least one dimension"),
        ((y, []), ValueError, r"fp8_format must be one of tensorwise, .*, not \[\]"),
        ((y, FP8Format(64)), ValueError, "fp8_format must be one of tensorwise"),
    ):
        with pytest.raises(error, match=message):
            quantize(*arguments)
    with pytest.raises(TypeError, match="dequantize: codes must be Quantized, not Tensor"):
        dequantize(y)

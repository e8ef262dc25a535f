"""Norms that give FP8: the codes of the unfused sequence bit for bit, and the 16-bit operators' gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_norm.kernels import fp8, rms_norm
from fused_norm.kernels.fp8 import FORMATS, Quantized, add_rms_norm_fp8, dequantize, quantize, rms_norm_fp8
from fused_norm.spec import NormSpec

from ..conftest import slow, slow_rows
from .fp8_values import assert_same_bits, assert_same_codes, hard_rows
from .numerics import BF16, FP16, FP32, Guarded, Norm, assert_same

Names = list[str]


def tensors_of(norm: Norm, shape: tuple[int, ...], device: str, *, finite: bool = True) -> list[Tensor | None]:
    """Draw x, the residual and the weight, None for an absent one; the first rows are hard to cast."""
    x = hard_rows(torch.Size(shape[:-1]).numel(), shape[-1], norm.x, finite=finite).view(shape)
    r = None if norm.r is None else (2 * torch.randn(shape)).to(norm.r)
    if r is not None:
        r.view(-1, shape[-1])[0] = 0
    w = None if norm.w is None else (1.5 * torch.randn(shape[-1])).to(norm.w)
    return [None if tensor is None else tensor.to(device) for tensor in (x, r, w)]


def usual_tensors_of(norm: Norm, device: str) -> list[Tensor | None]:
    """Draw tensors without hard rows."""
    return [
        tensor if tensor is None or tensor.dim() < 2 else tensor[6:] for tensor in tensors_of(norm, (9, 128), device)
    ]


def fused(norm: Norm, fp8_format: str, tensors: Sequence[Tensor | None]) -> tuple[Quantized, Tensor | None]:
    """Return the codes and the sum, which is None if there is no residual."""
    x, r, w = tensors
    meaning: dict[str, Any] = {"casting": norm.casting, "zero_centered": norm.zero_centered}
    if r is None:
        return rms_norm_fp8(x, w, fp8_format=fp8_format, **meaning), None
    return add_rms_norm_fp8(x, r, w, fp8_format=fp8_format, scale=norm.scale, **meaning)


LLAMA, ADDED = Norm(x=BF16, w=BF16), Norm(x=BF16, w=BF16, r=BF16)
NONE = Norm("none", x=FP16, w=FP16)
CASES = [
    *(LLAMA, ADDED, NONE),
    Norm(x=FP16, w=BF16),
    Norm(r=FP32, scale=0.37),
    Norm("gemma", True, x=BF16, w=FP32, r=FP32),
    Norm(x=BF16, w=None, r=FP16),
    Norm("none", x=BF16, w=BF16, r=BF16, scale=0.22),
    Norm("weight_dtype", w=None, r=BF16),
    Norm("rounded_rstd", x=BF16, w=BF16, r=FP32, scale=0.22),
]


def assert_unfused_codes(
    norm: Norm, fp8_format: str, shape: tuple[int, ...], device: str, *, finite: bool = True
) -> None:
    """Assert that codes, scales and sum are those of the 16-bit operator followed by the cast."""
    tensors = tensors_of(norm, shape, device, finite=finite)
    (output, s), (y, expected_s) = fused(norm, fp8_format, tensors), norm.fused(*tensors)
    assert_same_codes(output, quantize(y, fp8_format))
    assert (output.placeholder.shape, output.placeholder.dtype) == (y.shape, y.dtype)
    assert output.placeholder.untyped_storage().nbytes() == y.element_size()
    assert output.placeholder.isnan().all()
    if s is not None:
        assert_same_bits(s, expected_s)


CENTERED = Norm("gemma", True, x=FP32, w=BF16, r=BF16)
LAYOUTS = ("tensorwise", "rowwise", "block128", "mxfp8")
"""A format for each layout of scales."""

FAST_CODES = [
    (NONE, "tensorwise", (7, 128)),  # the norm uses another rstd than the one it saves
    *((LLAMA, name, (7, 128)) for name in FORMATS),
    *((CENTERED, name, (7, 128)) for name in ("tensorwise", "mxfp8")),
    (LLAMA, "tensorwise", (131, 37)),
    (LLAMA, "rowwise", (131, 37)),
    (LLAMA, "rowwise", (7, 1)),
    (LLAMA, "block128", (3, 5, 384)),
    (LLAMA, "mxfp8", (6, 32)),
]
SLOW_CODES = [
    *((norm, name, (7, 128)) for norm in CASES for name in LAYOUTS if (norm, name, (7, 128)) not in FAST_CODES),
    *((LLAMA, "mxfp8", (133, 96)), (LLAMA, "block128", (133, 128)), (LLAMA, "coat_input", (133, 48))),
    *((LLAMA, name, (7, 5000)) for name in ("tensorwise", "rowwise")),
]


@pytest.mark.parametrize(("norm", "name", "shape"), [*FAST_CODES, *slow_rows(*SLOW_CODES)], ids=str)
def test_codes_are_those_of_the_unfused_sequence(norm: Norm, name: str, shape: tuple[int, ...], device: str) -> None:
    assert_unfused_codes(norm, name, shape, device)


@pytest.mark.parametrize("name", [*LAYOUTS, "coat_input"])
def test_nan_and_inf_take_with_them_what_shares_their_scale(name: str, device: str) -> None:
    assert_unfused_codes(LLAMA, name, (7, 128), device, finite=False)


def gradients(outputs: list[Tensor], incoming: list[Tensor], tensors: list[Tensor | None]) -> list[Tensor | None]:
    inputs = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return list(torch.autograd.grad(outputs, inputs, incoming, retain_graph=True, allow_unused=True))


FAST_CASES = [norm for norm in CASES if norm in (LLAMA, ADDED) or norm.casting == "gemma"]


@pytest.mark.parametrize("norm", [*FAST_CASES, *slow(*(norm for norm in CASES if norm not in FAST_CASES))], ids=str)
def test_gradients_are_those_of_the_16_bit_operator(norm: Norm, device: str) -> None:
    leaves = [None if tensor is None else tensor.requires_grad_() for tensor in usual_tensors_of(norm, device)]
    (y, s), (output, fused_s) = norm.fused(*leaves), fused(norm, "block128", leaves)
    assert [tensor.requires_grad for tensor in (output.q, output.scale, output.rstd)] == [False] * 3
    assert output.placeholder.requires_grad
    outputs, ours_of = [y], [output.placeholder]
    if s is not None:
        outputs, ours_of = [y, s], [output.placeholder, fused_s]
    incoming = [torch.randn_like(output) for output in outputs]
    for count in range(1, len(outputs) + 1):
        ours, expected = (gradients(some[:count], incoming[:count], leaves) for some in (ours_of, outputs))
        assert_same(ours, expected)
    if s is not None:
        ours, expected = (gradients(some[1:], incoming[1:], leaves) for some in (ours_of, outputs))
        for a, b in zip(ours, expected, strict=True):
            assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("norm", [LLAMA, ADDED], ids=str)
def test_what_was_made_in_inference_mode_trains_as_in_the_16_bit_operator(norm: Norm, device: str) -> None:
    tensors = usual_tensors_of(norm, device)
    for place in (0, 1) if norm.r else (0,):
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
        with torch.inference_mode():
            leaves[place] = tensors[place].clone()
        outputs = norm.fused(*leaves)[0], fused(norm, "block128", leaves)[0].placeholder
        dy = torch.randn_like(outputs[0])
        expected, ours = (gradients([y], [dy], leaves) for y in outputs)
        assert_same(ours, expected)


def test_second_derivatives_are_those_of_the_formula(device: str) -> None:
    x, w = (torch.randn(shape, device=device, requires_grad=True) for shape in ((3, 128), (128,)))
    dy = torch.randn(3, 128, device=device, requires_grad=True)

    def second(norm: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        (dx,) = torch.autograd.grad(norm(x, w), x, dy, create_graph=True)
        return torch.autograd.grad(dx.sin().sum(), (x, w, dy))

    ours = second(lambda x, w: rms_norm_fp8(x, w, fp8_format="rowwise").placeholder)
    for a, b in zip(ours, second(rms_norm), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("scale_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["coat", "block128", "rowwise"])
@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_norms_of_codes_are_norms_of_their_numbers(
    casting: Any, name: str, scale_dtype: torch.dtype, device: str
) -> None:
    x = quantize(torch.randn(3, 128, device=device), "coat_input")
    x = replace(x, scale=x.scale.to(scale_dtype))
    w = torch.randn(128, device=device, requires_grad=True)
    placeholder = torch.randn(3, 128, device=device, requires_grad=True)  # fp32, so that nothing else is rounded
    output = rms_norm_fp8(replace(x, placeholder=placeholder), w, fp8_format=name, casting=casting)
    numbers = dequantize(x).requires_grad_()
    expected = rms_norm_fp8(numbers, w, fp8_format=name, casting=casting)
    assert_same_codes(output, expected)
    for _ in range(2):  # the second backward repeats what was recorded of the first
        dy = torch.randn(3, 128, device=device)
        ours = torch.autograd.grad(output.placeholder, (placeholder, w), dy, retain_graph=True)
        theirs = torch.autograd.grad(expected.placeholder, (numbers, w), dy, retain_graph=True)
        assert_same(ours, theirs, exact=False)  # a GPU's lanes hold other columns if these are bytes
    frozen = rms_norm_fp8(replace(x, placeholder=None), w.detach().to(BF16), fp8_format=name, casting=casting)
    assert frozen.placeholder.dtype == BF16
    assert not frozen.placeholder.requires_grad


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", [(7, 1408), (2, 3, 5120), (2, 16_400)], ids=str)
def test_gradients_of_norms_of_codes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Rows of several widths, beyond the widest of which numbers of codes are written; each gradient with the other."""
    x = quantize(torch.randn(shape, device=device), "coat_input")
    x = replace(x, q=torch.randn(shape, device=device).to(dtype))
    leaves = [torch.randn(size, device=device, dtype=BF16, requires_grad=True) for size in (shape, shape[-1:])]
    dy = torch.randn(shape, device=device, dtype=BF16)
    for wanted in (leaves, leaves[:1], leaves[1:]):
        placeholder, w = (leaf if any(leaf is one for one in wanted) else leaf.detach() for leaf in leaves)
        output = rms_norm_fp8(replace(x, placeholder=placeholder), w, fp8_format="rowwise", casting="gemma")
        ours = torch.autograd.grad(output.placeholder, wanted, dy)
        numbers, wide_w = dequantize(x).double().requires_grad_(), leaves[1].detach().double().requires_grad_()
        y = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + 1e-6) * wide_w
        exact = torch.autograd.grad(y, (numbers, wide_w), dy.double())
        for grad, leaf in zip(ours, wanted, strict=True):
            expected = exact[0 if leaf is leaves[0] else 1]
            torch.testing.assert_close(grad, expected.to(BF16), rtol=2**-7, atol=1e-4)


def test_rows_are_counted_in_the_order_of_dimensions(device: str) -> None:
    x = torch.randn(5, 3, 128, device=device, dtype=BF16).transpose(0, 1)
    r, w = torch.randn(3, 5, 256, device=device, dtype=BF16)[..., ::2], torch.randn(256, device=device)[::2]
    assert not x.is_contiguous()
    output, s = add_rms_norm_fp8(x, r, w, fp8_format="block128")
    expected, expected_s = add_rms_norm_fp8(x.contiguous(), r.contiguous(), w.contiguous(), fp8_format="block128")
    assert_same_codes(output, expected)
    assert torch.equal(s, expected_s)
    assert output.q.is_contiguous()
    assert s.is_contiguous()


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (0,), (3, 0)], ids=str)
def test_empty_tensors(shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    w = torch.randn(shape[-1], device=device, requires_grad=True)
    for name in FORMATS:
        output = rms_norm_fp8(x, w, fp8_format=name)
        assert_same_codes(output, quantize(x, name))
        dx, dw = torch.autograd.grad(output.placeholder, (x, w), torch.randn(shape, device=device))
        assert dx.shape == shape
        assert torch.equal(dw, torch.zeros_like(w))


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "block128", *slow("mxfp8", "coat_input")])
def test_kernels_write_every_element_and_nothing_beside(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded, tensors = Guarded(), tensors_of(ADDED, (7, 160 if name == "mxfp8" else 128), device)
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: guarded(new_empty(*args, **kwargs)))
    output, s = fused(ADDED, name, tensors)
    assert guarded.count >= 3
    assert guarded.intact()
    monkeypatch.undo()
    y, expected_s = ADDED.fused(*tensors)
    assert_same_codes(output, quantize(y, name))
    assert_same_bits(s, expected_s)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_any_value_is_cast_as_pytorch_casts_it(name: str, dtype: torch.dtype, device: str) -> None:
    """A norm of ones is its weight: any bits, beside others of any magnitude."""
    w = torch.randint(-(2**15), 2**15, (8192,)).to(torch.int16).view(dtype).to(device)
    if name in ("tensorwise", "rowwise", "coat"):
        w = w.masked_fill(~w.isfinite(), 1.0)
    output = rms_norm_fp8(torch.ones(1, 8192, dtype=dtype, device=device), w, 0.0, fp8_format=name)
    assert_same_codes(output, quantize(w[None], name))


def test_what_no_kernel_takes_is_computed_by_pytorch(device: str, launched: Callable[[], Names]) -> None:
    for x in (torch.randn(3, 128, dtype=torch.float64), torch.randn(2, 2 * 32768)):
        x = x.to(device).requires_grad_()
        w = torch.randn(x.shape[-1], dtype=x.dtype, device=device)
        output = rms_norm_fp8(x, w, fp8_format="rowwise")
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6) * w
        torch.testing.assert_close(dequantize(output), y.detach().float(), rtol=1 / 15, atol=1e-2)
        dy = torch.randn_like(x)
        for a, b in zip(torch.autograd.grad(output.placeholder, x, dy), torch.autograd.grad(y, x, dy), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert launched() == []


def test_gpus_that_cannot_cast_take_the_reference_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capability = {"sm": (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability["sm"])
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda:0")
    for sm, casts in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        capability["sm"] = sm
        fp8._casts_to_fp8.cache_clear()
        assert [fp8._casts_to_fp8(device) for _ in range(2)] == [casts, casts]
    fp8._casts_to_fp8.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_arguments_that_do_not_go_together_are_refused(device: str) -> None:
    x, w = (torch.randn(shape, device=device) for shape in ((3, 100), (100,)))
    plain, added = (rms_norm_fp8, x, w), (add_rms_norm_fp8, x, x, w)

    def of_codes(**wrong: Any) -> tuple[Any, ...]:
        return rms_norm_fp8, replace(codes_of_x, **wrong), None

    codes_of_x = quantize(torch.randn(3, 112, device=device), "coat_input")
    for (norm, *arguments), fp8_format, options, error, message in (
        (plain, "block128", {}, ValueError, "rms_norm_fp8: rows of 100 elements cannot be divided into groups of 128"),
        (added, "mxfp8", {}, ValueError, "add_rms_norm_fp8: rows of 100"),
        (plain, "fp8", {}, ValueError, "fp8_format must be one of tensorwise"),
        (added, "rowwise", {"scale": torch.ones(())}, TypeError, "Python float or int"),
        ((add_rms_norm_fp8, x, x[:1], w), "rowwise", {}, ValueError, "residual must have x's shape"),
        (of_codes(q=x), "coat", {}, TypeError, "codes of x must be FP8"),
        (of_codes(q=None), "coat", {}, TypeError, "rms_norm_fp8: the codes of x must be a tensor, not NoneType"),
        (of_codes(scale=None), "coat", {}, TypeError, "rms_norm_fp8: the scales of x must be a tensor, not NoneType"),
        (of_codes(placeholder=[1.0]), "coat", {}, TypeError, "x must be a tensor, not list"),
        ((rms_norm_fp8, [1.0], w), "rowwise", {}, TypeError, "rms_norm_fp8: x must be a tensor, not list"),
        ((rms_norm_fp8, codes_of_x.q, None), "rowwise", {}, TypeError, "x must be float32, .*, not torch.float8_e4m3"),
        ((add_rms_norm_fp8, x, None, w), "rowwise", {}, TypeError, "add_rms_norm_fp8: residual must be a tensor"),
        (of_codes(scale=codes_of_x.scale[:, :3]), "coat", {}, ValueError, "a number for each 16 columns"),
        (of_codes(placeholder=x), "coat", {}, ValueError, "placeholder and scales of x must go with its codes"),
        (of_codes(), "coat", {"casting": "none"}, ValueError, "which codes have not"),
    ):
        with pytest.raises(error, match=message):
            norm(*arguments, fp8_format=fp8_format, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorwise", "mxfp8", "block128", "coat"])
def test_opcheck(name: str, device: str) -> None:
    x, r, w = usual_tensors_of(ADDED, device)
    codes = quantize(x, "coat_input")
    tensors, scale = {
        "tensorwise": ((x, None, w, None, None), 1.0),
        "mxfp8": ((x, None, None, None, None), 1.0),
        "block128": ((x, r.float(), w, None, None), 0.5),
        "coat": ((x, None, w, codes.q, codes.scale), 1.0),
    }[name]
    spec = NormSpec("llama")
    meaning, options = (spec.casting, spec.zero_centered, spec.eps, spec.casts_weight), (scale, name)
    forward = torch.ops.fused_norm.norm_fp8_forward
    # The other checks of opcheck do not take FP8, or compare NaNs.
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(forward, (*meaning, *tensors, *options, True), test_utils=checks)


@pytest.mark.usefixtures("large_graphs")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph_with_equal_results(backend: str, device: str) -> None:
    leaves = [tensor.detach().requires_grad_() for tensor in usual_tensors_of(ADDED, device)]

    def layer(x: Tensor, r: Tensor, w: Tensor) -> tuple[Quantized, Tensor, tuple[Tensor, ...]]:
        blocks, s = add_rms_norm_fp8(x, r, w, fp8_format="block128", scale=0.5)
        whole = rms_norm_fp8(s, w, fp8_format="tensorwise")
        return blocks, s, (whole.q, whole.scale, whole.placeholder)

    def results(layer: Callable[..., Any]) -> list[Tensor]:
        blocks, s, whole = layer(*leaves)
        dy = torch.ones_like(s)
        grads = torch.autograd.grad((blocks.placeholder, s, whole[-1]), leaves, (dy, dy, dy))
        return [blocks.q, blocks.scale, blocks.rstd, s, *whole[:-1], *grads]

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for ours, expected in zip(results(compiled), results(layer), strict=True):
        assert_same_bits(ours, expected)


@pytest.mark.usefixtures("large_graphs")
@pytest.mark.slow
def test_norms_of_codes_compile_as_one_graph_with_equal_gradients(device: str) -> None:
    codes = quantize(torch.randn(3, 128, device=device), "coat_input")
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in ((3, 128), (128,))]

    def norm(q: Tensor, scale: Tensor, placeholder: Tensor, w: Tensor) -> Tensor:
        x = Quantized(q, scale, FORMATS["coat_input"], placeholder)
        return rms_norm_fp8(x, w, fp8_format="rowwise").placeholder

    dy = torch.randn(3, 128, device=device)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    ours, expected = (torch.autograd.grad(run(codes.q, codes.scale, *leaves), leaves, dy) for run in (compiled, norm))
    assert_same(ours, expected)


def test_transforms_see_the_formula(device: str) -> None:
    x, w = torch.randn(3, 2, 128, device=device), torch.randn(128, device=device)

    def loss(x: Tensor) -> Tensor:
        return rms_norm_fp8(x, w, fp8_format="rowwise").placeholder.sin().sum()

    expected = torch.func.grad(lambda x: rms_norm(x, w).sin().sum())(x)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), expected)


def test_kernels_raise_what_is_below_the_floor_by_less_than_fp32_tells(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch compares with the floor in fp64: of the two fp32 numbers around it, the lower one is raised to it."""
    monkeypatch.setitem(FORMATS, "tensorwise", replace(FORMATS["tensorwise"], floor=1.5e-8))
    floor = torch.tensor([1.5e-8], device=device)
    for amax in (floor.view(torch.int32) + torch.arange(-3, 4, dtype=torch.int32, device=device)).view(FP32):
        x, w = torch.ones(2, 16, device=device), amax.expand(16).contiguous()
        ours = rms_norm_fp8(x, w, eps=1e-12, fp8_format="tensorwise")
        expected = quantize(rms_norm(x, w, eps=1e-12), "tensorwise")
        assert_same_bits(ours.scale, expected.scale)
        assert_same_bits(ours.q, expected.q)

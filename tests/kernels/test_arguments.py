"""Bad input: each is refused in front of everything else, in words that name the thing, the value and the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fused_norm.kernels import add_rms_norm, norm_add, norm_add_norm, qk_norm, rms_norm

X = torch.ones(2, 3, 8)
W = torch.ones(8)

BAD_NORMS = {
    "integer input": (lambda: rms_norm(X.int(), W), TypeError, "x must be .*, not torch.int32"),
    "integer weight": (lambda: rms_norm(X, W.long()), TypeError, "weight must be .*, not torch.int64"),
    "boolean input": (lambda: rms_norm(X.bool(), W), TypeError, "x must be .*, not torch.bool"),
    "complex input": (lambda: rms_norm(X.cfloat(), W), TypeError, "x must be .*, not torch.complex64"),
    "fp8 input": (lambda: rms_norm(X.to(torch.float8_e4m3fn), W), TypeError, "x must be .*, not torch.float8_e4m3fn"),
    "no dimension": (lambda: rms_norm(torch.ones(()), None), ValueError, "at least one dimension"),
    "narrow weight": (lambda: rms_norm(X, W[:1]), ValueError, r"weight must have shape \(8,\).*, not \(1,\)"),
    "wide weight": (lambda: rms_norm(X, torch.ones(9)), ValueError, r"weight must have shape \(8,\).*, not \(9,\)"),
    "flat weight": (lambda: rms_norm(X, W[None]), ValueError, r"weight must have shape \(8,\).*, not \(1, 8\)"),
    "weight elsewhere": (lambda: rms_norm(X, W.to("meta")), ValueError, "weight is on meta and x on cpu"),
}
BAD_SUMS = {
    "narrow weight": (lambda: add_rms_norm(X, X, W[:1]), ValueError, r"weight must have shape \(8,\)"),
    "other shape": (lambda: add_rms_norm(X, X[:1], W), ValueError, r"shape \(2, 3, 8\), not \(1, 3, 8\); expand it"),
    "other rank": (lambda: add_rms_norm(X, X[0], W), ValueError, r"shape \(2, 3, 8\), not \(3, 8\)"),
    "integer residual": (lambda: add_rms_norm(X, X.int(), W), TypeError, "residual must be .*, not torch.int32"),
    "residual elsewhere": (lambda: add_rms_norm(X, X.to("meta"), W), ValueError, "residual is on meta and x on cpu"),
    "scale of a tensor": (lambda: add_rms_norm(X, X, W, scale=W[0]), TypeError, "not Tensor; pass x multiplied by it"),
    "scale that is a truth value": (lambda: add_rms_norm(X, X, W, scale=True), TypeError, "scale must be .*, not bool"),
}


BAD_SANDWICHES = {
    "narrow inner weight": (
        lambda: norm_add_norm(X, X, W[:1], W),
        ValueError,
        r": inner_weight must have shape \(8,\)",
    ),
    "narrow weight": (lambda: norm_add_norm(X, X, W, W[:1]), ValueError, r": weight must have shape \(8,\)"),
    "integer inner weight": (
        lambda: norm_add_norm(X, X, W.int(), W),
        TypeError,
        ": inner_weight must be .*, not torch.int32",
    ),
    "weight elsewhere": (lambda: norm_add_norm(X, X, W, W.to("meta")), ValueError, ": weight is on meta and x on cpu"),
    "other shape": (
        lambda: norm_add_norm(X, X[:1], W, W),
        ValueError,
        r"shape \(2, 3, 8\), not \(1, 3, 8\); expand it",
    ),
    "residual elsewhere": (
        lambda: norm_add_norm(X, X.to("meta"), W, W),
        ValueError,
        "residual is on meta and x on cpu",
    ),
}
BAD_NORM_ADDS = {
    "narrow weight": (lambda: norm_add(X, X, W[:1]), ValueError, r": weight must have shape \(8,\)"),
    "other shape": (lambda: norm_add(X, X[0], W), ValueError, r"shape \(2, 3, 8\), not \(3, 8\)"),
    "integer residual": (lambda: norm_add(X, X.int(), W), TypeError, "residual must be .*, not torch.int32"),
}


@pytest.mark.parametrize(("call", "error", "says"), BAD_NORMS.values(), ids=BAD_NORMS)
def test_rms_norm_refuses(call: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^rms_norm: .*{says}"):
        call()


@pytest.mark.parametrize(("call", "error", "says"), BAD_SUMS.values(), ids=BAD_SUMS)
def test_add_rms_norm_refuses(call: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^add_rms_norm: .*{says}"):
        call()


@pytest.mark.parametrize(("call", "error", "says"), BAD_SANDWICHES.values(), ids=BAD_SANDWICHES)
def test_norm_add_norm_refuses(call: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^norm_add_norm.*{says}"):
        call()


@pytest.mark.parametrize(("call", "error", "says"), BAD_NORM_ADDS.values(), ids=BAD_NORM_ADDS)
def test_norm_add_refuses(call: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^norm_add.*{says}"):
        call()


def test_casting_and_centering_are_named_not_counted() -> None:
    with pytest.raises(TypeError, match="positional"):
        rms_norm(X, W, 1e-6, "llama")
    with pytest.raises(TypeError, match="positional"):
        add_rms_norm(X, X, W, 1e-6, "llama")
    with pytest.raises(TypeError, match="positional"):
        norm_add(X, X, W, 1e-6, "llama")
    with pytest.raises(TypeError, match="positional"):
        norm_add_norm(X, X, W, W, 1e-6, "llama")


def test_an_unknown_casting_is_refused() -> None:
    calls = (rms_norm, (X, W)), (add_rms_norm, (X, X, W)), (norm_add, (X, X, W)), (norm_add_norm, (X, X, W, W))
    for call, tensors in (*calls, (qk_norm, (X, X, W, W))):
        with pytest.raises(ValueError, match="casting must be one of llama, gemma, none, not 'fp32'"):
            call(*tensors, casting="fp32")


def test_a_norm_without_a_weight_has_nothing_to_centre() -> None:
    assert torch.equal(rms_norm(X, None, zero_centered=True), rms_norm(X, None))

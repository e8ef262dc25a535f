"""Bad input: each is refused in front of everything else, in words that name the thing, the value and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from fused_norm.kernels import (
    add_rms_norm,
    causal_conv1d,
    gated_rms_norm,
    glu,
    lora_add,
    norm_add,
    norm_add_norm,
    qk_norm,
    qk_norm_rope,
    rms_norm,
    rope,
)

X = torch.ones(2, 3, 8)
W = torch.ones(8)
H = torch.ones(2, 3, 4, 8)
C = torch.ones(1, 4, 8)
A, B = torch.ones(2, 8), torch.ones(8, 2)
TAPS = torch.ones(8, 4)

BAD_NORMS = {
    "no dimension": (lambda: rms_norm(torch.ones(()), None), ValueError, "at least one dimension"),
    "narrow weight": (lambda: rms_norm(X, W[:1]), ValueError, r"weight must have shape \(8,\).*, not \(1,\)"),
    "wide weight": (lambda: rms_norm(X, torch.ones(9)), ValueError, r"weight must have shape \(8,\).*, not \(9,\)"),
    "flat weight": (lambda: rms_norm(X, W[None]), ValueError, r"weight must have shape \(8,\).*, not \(1, 8\)"),
    "unknown mode": (lambda: rms_norm(X, W, mode="best"), ValueError, "mode must be one of .* or None, not 'best'"),
    "centred nothing": (lambda: rms_norm(X, None, zero_centered=True), ValueError, "zero_centered needs a weight"),
}
BAD_SUMS = {
    "narrow weight": (lambda: add_rms_norm(X, X, W[:1]), ValueError, r"weight must have shape \(8,\)"),
    "other shape": (lambda: add_rms_norm(X, X[:1], W), ValueError, r"shape \(2, 3, 8\), not \(1, 3, 8\); expand it"),
    "other rank": (lambda: add_rms_norm(X, X[0], W), ValueError, r"shape \(2, 3, 8\), not \(3, 8\)"),
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
    "other shape": (
        lambda: norm_add_norm(X, X[:1], W, W),
        ValueError,
        r"shape \(2, 3, 8\), not \(1, 3, 8\); expand it",
    ),
}
BAD_NORM_ADDS = {
    "narrow weight": (lambda: norm_add(X, X, W[:1]), ValueError, r": weight must have shape \(8,\)"),
    "other shape": (lambda: norm_add(X, X[0], W), ValueError, r"shape \(2, 3, 8\), not \(3, 8\)"),
}


BAD_HEADS = {
    "one weight": (lambda: qk_norm(H, H, W, None), ValueError, "k_weight is None and q_weight is not; pass both"),
    "other sizes": (lambda: qk_norm(H, H[..., :4], W, W[:4]), ValueError, "heads of one size, not 8 and 4"),
    "weight of k": (lambda: qk_norm(H, H, W, W[:4]), ValueError, r"k_weight must have shape \(8,\)"),
}
BAD_ANGLES = {
    "no cos": (lambda: qk_norm_rope(H, H, W, W, None, C), ValueError, "cos is None and sin is not; pass both"),
    "no sin": (lambda: qk_norm_rope(H, H, W, W, C, None), ValueError, "sin is None and cos is not; pass both"),
    "no angles": (lambda: qk_norm_rope(H, H, W, W, None, None), TypeError, "cos and sin must be tensors, not None"),
    "three dimensions": (lambda: qk_norm_rope(H[0], H, W, W, C, C), ValueError, "q must have 4 dimensions"),
    "heads where": (
        lambda: qk_norm_rope(H, H, W, W, C, C, unsqueeze_dim=3),
        ValueError,
        "unsqueeze_dim must be .* not 3",
    ),
    "odd angles": (lambda: qk_norm_rope(H, H, W, W, C[..., :7], C[..., :7]), ValueError, "even last dimension.*not 7"),
    "wide angles": (lambda: qk_norm_rope(H, H, W, W, *(2 * (torch.ones(4, 16),))), ValueError, "at most q's 8, not 16"),
    "other sin": (
        lambda: qk_norm_rope(H, H, W, W, C, C[..., :4]),
        ValueError,
        r"sin must .*\(1, 4, 8\).*not \(1, 4, 4\)",
    ),
    "other dtype": (
        lambda: qk_norm_rope(H, H, W, W, C, C.bfloat16()),
        ValueError,
        "sin must .*float32, not .*bfloat16",
    ),
    "flat cos": (lambda: qk_norm_rope(H, H, W, W, C[0, 0], C[0, 0]), ValueError, "cos must have 2 to 4 dimensions"),
    "other tokens": (lambda: qk_norm_rope(H, H, W, W, C[:, :3], C[:, :3]), ValueError, "broadcast against q of shape"),
    "heads behind": (lambda: qk_norm_rope(H, H, W, W, C, C, unsqueeze_dim=2), ValueError, "dimension of the heads"),
}
BAD_ROTATIONS = {
    "heads of two sizes": (lambda: rope(H, H[..., :4], C[..., :2], C[..., :2]), ValueError, "not 8 and 4; call rope"),
    "three dimensions": (lambda: rope(H[0], None, C, C), ValueError, "q must have 4 dimensions"),
    "other tokens": (lambda: rope(H, None, C[:, :3], C[:, :3]), ValueError, "broadcast against q of shape"),
    "other tokens of k": (lambda: rope(H, H[:, :, :3], C, C), ValueError, "broadcast against k of shape"),
    "odd angles": (lambda: rope(H, H, C[..., :7], C[..., :7]), ValueError, "even last dimension.*not 7"),
    "elsewhere": (lambda: rope(H, H, C, C, unsqueeze_dim=0), ValueError, "unsqueeze_dim must be .*, not 0"),
    "no layout": (lambda: rope(H, H, C, C, layout="pairs"), ValueError, "layout must be one of half, .*, not 'pairs'"),
    "narrow angles": (
        lambda: rope(H, H, C[..., :4], C[..., :4], layout="deinterleaved"),
        ValueError,
        "cos must be as wide as q, 8, in a deinterleaved layout, not 4",
    ),
    "no truth value for pairs": (
        lambda: rope(H, H, C, C, angles_by_pair=1),
        TypeError,
        "angles_by_pair must be True or False, not 1",
    ),
    "a truth value for a dimension": (lambda: rope(H, H, C, C, unsqueeze_dim=True), ValueError, "must be .*, not True"),
    "a float for a dimension": (lambda: rope(H, H, C, C, unsqueeze_dim=1.0), ValueError, "must be .*, not 1.0"),
    "a word for a truth value": (
        lambda: rope(H, H, C, C, single_rounding="yes"),
        TypeError,
        "single_rounding must be True or False, not 'yes'",
    ),
}
BAD_GATES = {
    "unknown activation": (lambda: glu(X, X, "relu"), ValueError, "one of silu, gelu, gelu_tanh, not 'relu'"),
    "no dimension": (lambda: glu(X[0, 0, 0], None), ValueError, "at least one dimension"),
    "odd halves": (lambda: glu(X[..., :7]), ValueError, r"even last dimension.*not shape \(2, 3, 7\)"),
    "other shape": (lambda: glu(X, X[:1]), ValueError, r"gate's shape \(2, 3, 8\), not \(1, 3, 8\); expand it"),
}
BAD_GATED_NORMS = {
    "narrow weight": (lambda: gated_rms_norm(X, X, W[:1]), ValueError, r"weight must have shape \(8,\)"),
    "other shape": (lambda: gated_rms_norm(X, X[:1], W), ValueError, r"\(2, 3, 8\), not \(1, 3, 8\); expand it"),
    "unknown activation": (lambda: gated_rms_norm(X, X, W, activation="gelu"), ValueError, "silu, sigmoid, not 'gelu'"),
    "no rounding points": (lambda: gated_rms_norm(X, X, W, casting="none"), ValueError, "must be llama or gemma"),
    "uneven groups": (
        lambda: gated_rms_norm(X, X, W, groups=3),
        ValueError,
        "groups must divide .*, 8, .*; 3 does not",
    ),
    "no groups": (lambda: gated_rms_norm(X, X, W, groups=0), ValueError, "0 does not"),
    "a word for a truth value": (
        lambda: gated_rms_norm(X, X, W, norm_before_gate="no"),
        TypeError,
        "norm_before_gate must be True or False, not 'no'",
    ),
    "half a group": (lambda: gated_rms_norm(X, X, W, groups=0.5), TypeError, "groups must be an int, not float"),
}
BAD_ADAPTERS = {
    "no dimension of base": (
        lambda: lora_add(X[0, 0, 0], X, A, B),
        ValueError,
        "base must have at least one dimension",
    ),
    "no dimension of x": (lambda: lora_add(X, X[0, 0, 0], A, B), ValueError, "x must have at least one dimension"),
    "other rows": (lambda: lora_add(X, X[:1], A, B), ValueError, r"shapes \[..., N\].*not \(2, 3, 8\), \(1, 3, 8\)"),
    "flat rows": (lambda: lora_add(X, X.flatten(0, 1), A, B), ValueError, r"not \(2, 3, 8\), \(6, 8\), \(2, 8\)"),
    "turned a": (lambda: lora_add(X, X, A.t(), B), ValueError, r"\[r, K\] and \[N, r\], not .*\(8, 2\), \(8, 2\)"),
    "turned b": (lambda: lora_add(X, X, A, B.t()), ValueError, r"not .*\(2, 8\), \(2, 8\)"),
    "other rank": (lambda: lora_add(X, X, A, B[:, :1]), ValueError, r"not .*\(2, 8\), \(8, 1\)"),
    "narrow a": (lambda: lora_add(X, X, A[:, :7], B), ValueError, r"not .*\(2, 7\), \(8, 2\)"),
    "narrow b": (lambda: lora_add(X, X, A, B[:7]), ValueError, r"not .*\(2, 8\), \(7, 2\)"),
    "flat a": (lambda: lora_add(X, X, W, B), ValueError, r"not .*\(8,\), \(8, 2\)"),
    "scale of a tensor": (lambda: lora_add(X, X, A, B, W[0]), TypeError, "scale must be .*, not Tensor"),
    "scale that is a truth value": (lambda: lora_add(X, X, A, B, True), TypeError, "scale must be .*, not bool"),
}
BAD_CONVOLUTIONS = {
    "two dimensions": (lambda: causal_conv1d(X[0], TAPS), ValueError, "x must have 3 dimensions"),
    "channels first": (
        lambda: causal_conv1d(X.transpose(1, 2), TAPS),
        ValueError,
        r"weight must have shape \(3, taps\)",
    ),
    "weight of a module": (lambda: causal_conv1d(X, TAPS[:, None]), ValueError, r"taps\), not \(8, 1, 4\)"),
    "narrow bias": (lambda: causal_conv1d(X, TAPS, W[:1]), ValueError, r"bias must have shape \(8,\), not \(1,\)"),
    "other dtype": (
        lambda: causal_conv1d(X, TAPS.bfloat16()),
        ValueError,
        "weight is torch.bfloat16 and x torch.float32; cast it first",
    ),
    "other dtype of bias": (lambda: causal_conv1d(X, TAPS, W.half()), ValueError, "bias is torch.float16 and x"),
    "unknown activation": (lambda: causal_conv1d(X, TAPS, None, "gelu"), ValueError, "one of silu, not 'gelu'"),
}
BAD = {
    (name, case): call
    for name, cases in (
        ("rms_norm", BAD_NORMS),
        ("add_rms_norm", BAD_SUMS),
        ("norm_add_norm", BAD_SANDWICHES),
        ("norm_add", BAD_NORM_ADDS),
        ("qk_norm", BAD_HEADS),
        ("qk_norm_rope", BAD_ANGLES),
        ("rope", BAD_ROTATIONS),
        ("glu", BAD_GATES),
        ("gated_rms_norm", BAD_GATED_NORMS),
        ("lora_add", BAD_ADAPTERS),
        ("causal_conv1d", BAD_CONVOLUTIONS),
    )
    for case, call in cases.items()
}
TENSORS: dict[str, tuple[Callable[..., object], dict[str, torch.Tensor]]] = {
    "rms_norm": (rms_norm, {"x": X, "weight": W}),
    "add_rms_norm": (add_rms_norm, {"x": X, "residual": X, "weight": W}),
    "norm_add": (norm_add, {"x": X, "residual": X, "weight": W}),
    "norm_add_norm": (norm_add_norm, {"x": X, "residual": X, "inner_weight": W, "weight": W}),
    "gated_rms_norm": (gated_rms_norm, {"x": X, "gate": X, "weight": W}),
    "glu": (glu, {"gate": X, "up": X}),
    "causal_conv1d": (causal_conv1d, {"x": X, "weight": TAPS, "bias": W}),
    "lora_add": (lora_add, {"base": X, "x": X, "a": A, "b": B}),
    "qk_norm": (qk_norm, {"q": H, "k": H, "q_weight": W, "k_weight": W}),
    "qk_norm_rope": (qk_norm_rope, {"q": H, "k": H, "q_weight": W, "k_weight": W, "cos": C, "sin": C}),
    "rope": (rope, {"q": H, "k": H, "cos": C, "sin": C}),
}
"""The tensors of a good call of every function."""
CALLS = {
    name: partial(function, *tensors.values())
    for name, (function, tensors) in TENSORS.items()
    if name not in ("glu", "lora_add", "rope", "causal_conv1d")  # which have no norm
}


@pytest.mark.parametrize(("name", "case"), BAD, ids=lambda part: part)
def test_refuses(name: str, case: str) -> None:
    call, error, says = BAD[name, case]
    with pytest.raises(error, match=f"^(?={name}: ).*{says}"):
        call()


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_casting_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match="one of llama, gemma, rounded_gamma, weight_dtype, rounded_rstd, none, not 'lama'"
    ):
        CALLS[name](casting="lama")


@pytest.mark.parametrize("name", CALLS)
def test_casting_and_centering_are_named_not_counted(name: str) -> None:
    with pytest.raises(TypeError, match="positional"):
        CALLS[name](1e-6, "llama")


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_an_eps_and_a_centering_of_another_sort_are_refused(name: str, known: bool) -> None:
    """Beside a call with good ones as well, whose recording may be repeated."""
    if known:
        CALLS[name](zero_centered=True, eps=1e-6)
    for bad, error, says in (
        ({"zero_centered": "no"}, TypeError, "zero_centered must be True or False, not 'no'"),
        ({"zero_centered": 1}, TypeError, "zero_centered must be True or False, not 1"),
        ({"eps": -1e-6}, ValueError, "eps must be finite and at least 0, not -1e-06"),
        ({"eps": math.nan}, ValueError, "eps must be finite and at least 0, not nan"),
        ({"eps": W[:1]}, TypeError, "eps must be a Python float, not Tensor"),
        ({"eps": "1e-6"}, TypeError, "eps must be a Python float, not str"),
        ({"eps": None}, TypeError, "eps must be a Python float, not NoneType"),
    ):
        with pytest.raises(error, match=says):
            CALLS[name](**bad)


def nested(layout: torch.layout) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda one: torch.nested.nested_tensor([one, one], layout=layout)


OTHER_SORTS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    **{
        str(dtype): (partial(torch.Tensor.to, dtype=dtype), f"float32, .* or float64, not {dtype}")
        for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    },
    "a list": (torch.Tensor.tolist, "a tensor, not list"),
    "a float": (lambda one: 1.0, "a tensor, not float"),
    "an array": (torch.Tensor.numpy, "a tensor, not ndarray"),
    "sparse": (torch.Tensor.to_sparse, "a dense tensor, not torch.sparse_coo"),
    "MKL-DNN": (torch.Tensor.to_mkldnn, "a dense tensor, not torch._mkldnn"),
    "nested": (nested(torch.strided), "a dense tensor, not nested"),
    "jagged": (nested(torch.jagged), "a dense tensor, not nested"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("sort", OTHER_SORTS)
@pytest.mark.parametrize("name", TENSORS)
def test_what_is_no_dense_tensor_of_floating_point_is_refused_by_its_name(name: str, sort: str) -> None:
    function, tensors = TENSORS[name]
    convert, says = OTHER_SORTS[sort]
    for argument, tensor in tensors.items():
        with pytest.raises(TypeError, match=f"^{name}: {argument} must be {says}"):
            function(**{**tensors, argument: convert(tensor)})


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_on_another_device_is_refused_by_its_name(name: str) -> None:
    function, tensors = TENSORS[name]
    first, *others = tensors
    for argument in others:
        with pytest.raises(ValueError, match=f"^{name}: {argument} is on meta and {first} on cpu"):
            function(**{**tensors, argument: tensors[argument].to("meta")})


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_has_to_be_there_is_refused_by_its_name(name: str) -> None:
    function, tensors = TENSORS[name]
    for argument in tensors:
        if argument.endswith(("up", "cos", "sin")) or (argument.endswith("weight") and name != "causal_conv1d"):
            continue
        if argument == "bias" or (name, argument) == ("rope", "k"):
            continue
        with pytest.raises(TypeError, match=f"^{name}: {argument} must be a tensor, not NoneType"):
            function(**{**tensors, argument: None})


@pytest.mark.parametrize("name", TENSORS)
def test_zeros_without_memory_are_zeros(name: str) -> None:
    function, tensors = TENSORS[name]
    for argument, tensor in tensors.items():
        given = {key: one.clone() for key, one in tensors.items()}
        expected = function(**{**given, argument: torch.zeros_like(tensor)})
        actual = function(**{**given, argument: torch._efficientzerotensor(tensor.shape)})
        for one, other in zip(
            *(made if isinstance(made, tuple) else (made,) for made in (actual, expected)), strict=True
        ):
            assert torch.equal(one, other)


def test_without_a_weight_there_is_nothing_to_centre() -> None:
    plain, centered = (norm_add_norm(X, X, None, W, zero_centered=centered) for centered in (False, True))
    assert torch.equal(plain[1], centered[1])
    assert torch.equal(2 * plain[0], centered[0])

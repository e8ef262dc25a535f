"""Bad input is refused before anything else, by a message with the argument, its value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fused_norm.kernels import (
    add_rms_norm,
    causal_conv1d,
    expert_bias,
    expert_gate,
    expert_permute,
    expert_unpermute,
    gated_rms_norm,
    glu,
    linear_cross_entropy,
    linear_log_probs,
    lora_add,
    norm_add,
    norm_add_norm,
    qk_norm,
    qk_norm_rope,
    rms_norm,
    rope,
)

from .numerics import GLU_ACTIVATIONS

X = torch.ones(2, 3, 8)
W = torch.ones(8)
H = torch.ones(2, 3, 4, 8)
C = torch.ones(1, 4, 8)
NARROW = C[..., :4], C[..., :4]
A, B = torch.ones(2, 8), torch.ones(8, 2)
TAPS = torch.ones(8, 4)
R, INDEX, EXPERT, ENDS = torch.ones(6, 8), torch.arange(6).view(3, 2), torch.zeros(3).long(), torch.full((6,), 3).int()


def loss(**changes: Any) -> torch.Tensor:
    """Return the loss of a good call with some arguments replaced."""
    good = {"input": torch.zeros(2, 3, 4), "linear_weight": torch.zeros(5, 4), "target": torch.zeros(2, 3).long()}
    return linear_cross_entropy(**(good | changes))


def log_probs(**changes: Any) -> object:
    """Return the log-probabilities of a good call with some arguments replaced."""
    good = {"input": torch.zeros(2, 3, 4), "linear_weight": torch.zeros(5, 4), "target": torch.zeros(2, 3).long()}
    return linear_log_probs(**(good | changes))


BAD: dict[str, dict[str, tuple[Any, ...]]] = {
    "rms_norm": {
        "no dimension": (lambda: rms_norm(torch.ones(()), None), "at least one dimension"),
        "narrow weight": (lambda: rms_norm(X, W[:1]), r"weight must have shape \(8,\).*, not \(1,\)"),
        "unknown mode": (lambda: rms_norm(X, W, mode="best"), "mode must be one of .* or None, not 'best'"),
        "centred nothing": (lambda: rms_norm(X, None, zero_centered=True), "zero_centered needs a weight"),
    },
    "add_rms_norm": {
        "narrow weight": (lambda: add_rms_norm(X, X, W[:1]), r"weight must have shape \(8,\)"),
        "other shape": (lambda: add_rms_norm(X, X[:1], W), r"shape \(2, 3, 8\), not \(1, 3, 8\); expand it"),
        "a tensor": (lambda: add_rms_norm(X, X, W, scale=W[0]), "not Tensor; pass x multiplied by it", TypeError),
        "a truth value": (lambda: add_rms_norm(X, X, W, scale=True), "scale must be .*, not bool", TypeError),
    },
    "norm_add_norm": {
        "narrow inner weight": (lambda: norm_add_norm(X, X, W[:1], W), r": inner_weight must have shape \(8,\)"),
        "narrow weight": (lambda: norm_add_norm(X, X, W, W[:1]), r": weight must have shape \(8,\)"),
        "other shape": (lambda: norm_add_norm(X, X[:1], W, W), r"shape \(2, 3, 8\), not \(1, 3, 8\); expand it"),
    },
    "norm_add": {
        "narrow weight": (lambda: norm_add(X, X, W[:1]), r": weight must have shape \(8,\)"),
        "other shape": (lambda: norm_add(X, X[0], W), r"shape \(2, 3, 8\), not \(3, 8\)"),
    },
    "qk_norm": {
        "one weight": (lambda: qk_norm(H, H, W, None), "k_weight is None and q_weight is not; pass both"),
        "other sizes": (lambda: qk_norm(H, H[..., :4], W, W[:4]), "heads of one size, not 8 and 4"),
        "weight of k": (lambda: qk_norm(H, H, W, W[:4]), r"k_weight must have shape \(8,\)"),
    },
    "qk_norm_rope": {
        "no cos": (lambda: qk_norm_rope(H, H, W, W, None, C), "cos is None and sin is not; pass both"),
        "no angles": (lambda: qk_norm_rope(H, H, W, W, None, None), "cos and sin must be tensors, not None", TypeError),
        "wide angles": (lambda: qk_norm_rope(H, H, W, W, *(2 * (torch.ones(4, 16),))), "at most q's 8, not 16"),
        "other sin": (lambda: qk_norm_rope(H, H, W, W, C, C[..., :4]), r"sin must .*\(1, 4, 8\).*not \(1, 4, 4\)"),
        "other dtype": (lambda: qk_norm_rope(H, H, W, W, C, C.bfloat16()), "sin must .*float32, not .*bfloat16"),
        "flat cos": (lambda: qk_norm_rope(H, H, W, W, C[0, 0], C[0, 0]), "cos must have 2 to 4 dimensions"),
        "heads behind": (lambda: qk_norm_rope(H, H, W, W, C, C, unsqueeze_dim=2), "dimension of the heads"),
    },
    "rope": {
        "heads of two sizes": (lambda: rope(H, H[..., :4], C[..., :2], C[..., :2]), "not 8 and 4; call rope"),
        "three dimensions": (lambda: rope(H[0], None, C, C), "q must have 4 dimensions"),
        "other tokens": (lambda: rope(H, None, C[:, :3], C[:, :3]), "broadcast against q of shape"),
        "no layout": (lambda: rope(H, H, C, C, layout="pairs"), "layout must be one of half, .*, not 'pairs'"),
        "narrow angles": (lambda: rope(H, H, *NARROW, layout="deinterleaved"), "cos must be as wide as q, 8, .* 4"),
        "a float for a dimension": (lambda: rope(H, H, C, C, unsqueeze_dim=1.0), "must be .*, not 1.0"),
        "a word": (lambda: rope(H, H, C, C, single_rounding="yes"), "single_rounding must .*'yes'", TypeError),
    },
    "glu": {
        "unknown activation": (lambda: glu(X, X, "tanh"), f"one of {', '.join(GLU_ACTIVATIONS)}, not 'tanh'"),
        "no dimension": (lambda: glu(X[0, 0, 0], None), "at least one dimension"),
        "odd halves": (lambda: glu(X[..., :7]), r"even last dimension.*not shape \(2, 3, 7\)"),
        "other shape": (lambda: glu(X, X[:1]), r"gate's shape \(2, 3, 8\), not \(1, 3, 8\); expand it"),
    },
    "gated_rms_norm": {
        "narrow weight": (lambda: gated_rms_norm(X, X, W[:1]), r"weight must have shape \(8,\)"),
        "other shape": (lambda: gated_rms_norm(X, X[:1], W), r"\(2, 3, 8\), not \(1, 3, 8\); expand it"),
        "no rounding points": (lambda: gated_rms_norm(X, X, W, casting="none"), "must be llama or gemma"),
        "uneven groups": (lambda: gated_rms_norm(X, X, W, groups=3), "groups must divide .*, 8, .*; 3 does not"),
        "a word": (lambda: gated_rms_norm(X, X, W, norm_before_gate="no"), "must be True or False.*'no'", TypeError),
        "half a group": (lambda: gated_rms_norm(X, X, W, groups=0.5), "groups must be an int, not float", TypeError),
    },
    "lora_add": {
        "no dimension of base": (lambda: lora_add(X[0, 0, 0], X, A, B), "base must have at least one dimension"),
        "other rows": (lambda: lora_add(X, X[:1], A, B), r"shapes \[..., N\].*not \(2, 3, 8\), \(1, 3, 8\)"),
        "turned a": (lambda: lora_add(X, X, A.t(), B), r"\[r, K\] and \[N, r\], not .*\(8, 2\), \(8, 2\)"),
        "scale of a tensor": (lambda: lora_add(X, X, A, B, W[0]), "scale must be .*, not Tensor", TypeError),
    },
    "causal_conv1d": {
        "two dimensions": (lambda: causal_conv1d(X[0], TAPS), "x must have 3 dimensions"),
        "channels first": (lambda: causal_conv1d(X.transpose(1, 2), TAPS), r"weight must have shape \(3, taps\)"),
        "weight of a module": (lambda: causal_conv1d(X, TAPS[:, None]), r"taps\), not \(8, 1, 4\)"),
        "narrow bias": (lambda: causal_conv1d(X, TAPS, W[:1]), r"bias must have shape \(8,\), not \(1,\)"),
        "other dtype": (lambda: causal_conv1d(X, TAPS.bfloat16()), "weight is .*bfloat16 and x .*; cast it first"),
        "unknown activation": (lambda: causal_conv1d(X, TAPS, None, "gelu"), "one of silu, not 'gelu'"),
    },
    "expert_gate": {
        "an odd width": (lambda: expert_gate(R[:, :7]), r"even last dimension.*\(6, 7\)"),
        "a negative limit": (lambda: expert_gate(R, limit=-1.0), "limit must be a positive number"),
        "alpha without silu": (lambda: expert_gate(R, None, "gelu", alpha=1.0), "alpha is a factor inside"),
        "a word for a truth value": (lambda: expert_gate(R, interleaved="no"), "interleaved must be True", TypeError),
        "a mask of floats": (lambda: expert_gate(R, R[:, 0]), "absent must be a tensor of torch.bool", TypeError),
        "a long mask": (lambda: expert_gate(R, torch.ones(7).bool()), r"absent must have shape \(6,\)"),
    },
    "expert_permute": {
        "float positions": (lambda: expert_permute(R, R), "position must be a tensor of torch.int64", TypeError),
        "flat positions": (lambda: expert_permute(R, INDEX[0]), r"position must have shape \(6, K\)"),
        "a vector": (lambda: expert_permute(R[0], INDEX), r"x must have shape \[tokens, N\]"),
    },
    "expert_unpermute": {
        "too many weights": (lambda: expert_unpermute(R, R, INDEX), r"\[tokens \* K, N\] and \[tokens, K\]"),
        "integers": (
            lambda: expert_unpermute(R, R[:3, :2], INDEX, dtype=torch.int32),
            "a floating point dtype",
            TypeError,
        ),
        "float positions": (lambda: expert_unpermute(R, R[:3, :2], R[:3, :2]), "position must be a tensor", TypeError),
        "no tensor": (lambda: expert_unpermute(1, R, INDEX), "x must be a tensor", TypeError),
    },
    "expert_bias": {
        "a vector of biases": (lambda: expert_bias(R[0], EXPERT, ENDS), r"bias must have shape \[experts"),
        "int32 experts": (lambda: expert_bias(R, EXPERT.int(), ENDS), "must be a tensor of torch.int64", TypeError),
        "too few ends": (lambda: expert_bias(R, EXPERT, ENDS[:5]), r"ends must have shape \(6,\)"),
    },
    "linear_cross_entropy": {
        "int32 target": (lambda: loss(target=torch.zeros(2, 3).int()), "target must be a tensor of int64", TypeError),
        "a narrow weight": (lambda: loss(linear_weight=torch.zeros(5, 3)), r"must have shapes .*\(5, 3\)"),
        "an integer weight": (lambda: loss(linear_weight=A.int()), "linear_weight must be float32", TypeError),
        "no reduction": (lambda: loss(reduction="none"), "reduction must be one of mean, sum, not 'none'"),
        "items of a sum": (lambda: loss(reduction="sum", num_items=3), "reduction must be 'mean'"),
        "smoothing above 1": (lambda: loss(label_smoothing=1.5), "label_smoothing must be between 0 and 1"),
        "scales": (lambda: loss(logit_scale=W), "logit_scale must be a Python number, not Tensor", TypeError),
        "a tensor": (lambda: loss(label_smoothing=W[0]), "label_smoothing must be a Python number", TypeError),
        "a cap of 0": (lambda: loss(softcap=0.0), "softcap must be positive, not 0.0"),
        "a word to ignore": (lambda: loss(ignore_index="pad"), "ignore_index must be an int, not 'pad'", TypeError),
        "target elsewhere": (lambda: loss(target=torch.zeros(2, 3, device="meta").long()), "target is on meta"),
    },
    "linear_log_probs": {
        "a list": (lambda: log_probs(input=[1.0]), "x must be a tensor, not list", TypeError),
        "int32 target": (lambda: log_probs(target=torch.zeros(2, 3).int()), "must be a tensor of int64", TypeError),
        "a narrow weight": (lambda: log_probs(linear_weight=torch.zeros(5, 3)), r"must have shapes .*\(5, 3\)"),
        "a long bias": (lambda: log_probs(linear_bias=torch.zeros(6)), r"must have shapes .*\(6,\)"),
        "an integer bias": (lambda: log_probs(linear_bias=torch.zeros(5).int()), "linear_bias must be", TypeError),
        "a temperature of 0": (lambda: log_probs(temperature=0.0), "temperature must be positive, not 0.0"),
        "no temperature": (lambda: log_probs(temperature=math.nan), "temperature must be positive, not nan"),
        "temperatures": (
            lambda: log_probs(temperature=W),
            "temperature must be a Python number, not Tensor",
            TypeError,
        ),
        "a cap of 0": (lambda: log_probs(softcap=0.0), "softcap must be positive, not 0.0"),
        "a word for a scale": (lambda: log_probs(logit_scale="2"), "logit_scale must be a Python number", TypeError),
        "a float to ignore": (lambda: log_probs(ignore_index=-1.0), "ignore_index must be an int, not -1.0", TypeError),
        "half a label": (lambda: log_probs(max_labels=0.5), "max_labels must be an int, not 0.5", TypeError),
        "a word for a flag": (lambda: log_probs(entropies="yes"), "entropies must be True or False.*'yes'", TypeError),
        "a number for a flag": (lambda: log_probs(uniform_grad=1), "uniform_grad must be True or False", TypeError),
        "an integer dtype": (lambda: log_probs(dtype=torch.int64), "dtype must be float32, bfloat16", TypeError),
        "target elsewhere": (lambda: log_probs(target=torch.zeros(2, 3, device="meta").long()), "target is on meta"),
    },
}
"""Calls by function, with the message and the error if it is no ``ValueError``."""
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
    if name not in ("glu", "lora_add", "rope", "causal_conv1d")  # these have no norm
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in BAD.items() for case in cases])
def test_refuses(name: str, case: str) -> None:
    call, message, *error = BAD[name][case]
    with pytest.raises(*error or [ValueError], match=f"^(?={name}: ).*{message}"):
        call()


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_casting_centering_or_eps_is_refused(name: str, is_recorded: bool) -> None:
    """It is refused too after a good call, whose recording might be repeated."""
    if is_recorded:
        CALLS[name](zero_centered=True, eps=1e-6)
    with pytest.raises(TypeError, match="positional"):
        CALLS[name](1e-6, "llama")
    castings = "llama, gemma, rounded_gamma, weight_dtype, rounded_rstd, none"
    for bad, error, message in (
        ({"casting": "lama"}, ValueError, f"one of {castings}, not 'lama'"),
        ({"zero_centered": "no"}, TypeError, "zero_centered must be True or False, not 'no'"),
        ({"zero_centered": 1}, TypeError, "zero_centered must be True or False, not 1"),
        ({"eps": -1e-6}, ValueError, "eps must be finite and at least 0, not -1e-06"),
        ({"eps": math.nan}, ValueError, "eps must be finite and at least 0, not nan"),
        ({"eps": W[:1]}, TypeError, "eps must be a Python float, not Tensor"),
        ({"eps": "1e-6"}, TypeError, "eps must be a Python float, not str"),
        ({"eps": None}, TypeError, "eps must be a Python float, not NoneType"),
    ):
        with pytest.raises(error, match=message):
            CALLS[name](**bad)


def nested(layout: torch.layout) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.nested.nested_tensor([tensor, tensor], layout=layout)


OTHER_SORTS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    **{
        str(dtype): (partial(torch.Tensor.to, dtype=dtype), f"float32, .* or float64, not {dtype}")
        for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    },
    "a list": (torch.Tensor.tolist, "a tensor, not list"),
    "a float": (lambda tensor: 1.0, "a tensor, not float"),
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
    convert, message = OTHER_SORTS[sort]
    for argument, tensor in tensors.items():
        with pytest.raises(TypeError, match=f"^{name}: {argument} must be {message}"):
            function(**{**tensors, argument: convert(tensor)})


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_on_another_device_is_refused_by_its_name(name: str) -> None:
    function, tensors = TENSORS[name]
    first, *others = tensors
    for argument in others:
        with pytest.raises(ValueError, match=f"^{name}: {argument} is on meta and {first} on cpu"):
            function(**{**tensors, argument: tensors[argument].to("meta")})


@pytest.mark.parametrize("name", TENSORS)
def test_zeros_without_memory_are_zeros(name: str) -> None:
    function, tensors = TENSORS[name]
    for argument, tensor in tensors.items():
        clones = {key: tensor.clone() for key, tensor in tensors.items()}
        expected = function(**{**clones, argument: torch.zeros_like(tensor)})
        actual = function(**{**clones, argument: torch._efficientzerotensor(tensor.shape)})
        for a, b in zip(
            *(output if isinstance(output, tuple) else (output,) for output in (actual, expected)), strict=True
        ):
            assert torch.equal(a, b)


def test_without_a_weight_there_is_nothing_to_centre() -> None:
    plain, centered = (norm_add_norm(X, X, None, W, zero_centered=centered) for centered in (False, True))
    assert torch.equal(plain[1], centered[1])
    assert torch.equal(2 * plain[0], centered[0])

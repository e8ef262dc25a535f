"""Logits that are computed when they are first read, compared with real logits: values, gradients and errors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from fused_norm.patcher.lazy_logits import CrossEntropy, LazyLogits, Projection

ROWS, WIDTH, VOCABULARY = (2, 5), 6, 9


class Head:
    """A language model's head, which counts how often its logits and losses are computed."""

    def __init__(self, *, bias: bool = False, dtype: torch.dtype = torch.float32, trained: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.weight = (
            torch.randn(*shape, generator=generator).to(dtype).requires_grad_(trained)
            for shape in ((*ROWS, WIDTH), (VOCABULARY, WIDTH))
        )
        self.bias = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_() if bias else None
        self.losses: list[tuple[Tensor, CrossEntropy]] = []
        self.readers: list[str] = []

    def lazy(self, dtype: torch.dtype | None = None) -> LazyLogits:
        # A hidden state is no leaf.
        x = self.x * 1 if torch.is_grad_enabled() else self.x
        return LazyLogits.from_projection(Projection(x, self.weight, self.bias, dtype, self.loss, self.readers.append))

    def real(self) -> Tensor:
        return functional.linear(self.x * 1, self.weight, self.bias)

    def loss(self, x: Tensor, how: CrossEntropy) -> Tensor:
        """Return what the fused operator would compute."""
        self.losses.append((x, how))
        logits = functional.linear(x, self.weight, self.bias).float()
        logits = logits if how.scale is None else logits * how.scale
        logits = logits if how.cap is None else torch.tanh(logits / how.cap) * how.cap
        return how.loss_of(logits)

    def gradients(self, value: Tensor) -> list[Tensor]:
        leaves = [leaf for leaf in (self.x, self.weight, self.bias) if leaf is not None]
        return list(torch.autograd.grad(value, leaves, allow_unused=True))


def assert_as_of_real_logits(head: Head, outcome: Callable[[Tensor], Any], **tolerance: float) -> None:
    """Assert that ``outcome`` returns the same tensors for a head's lazy logits and for real ones."""
    torch.testing.assert_close(outcome(head.lazy()), outcome(head.real()), **tolerance)


def labels(*, ignored: int = 2) -> Tensor:
    target = torch.arange(10).view(ROWS) % VOCABULARY
    target[0, :ignored] = -100
    return target


def shifted_loss(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(
        logits.float()[:, :-1].reshape(-1, VOCABULARY), target[:, 1:].reshape(-1), **options
    )


def test_what_a_tensor_is_reads_nothing() -> None:
    head = Head()
    lazy, real = head.lazy(), head.real()
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "is_leaf", "_base"):
        assert getattr(lazy, name) == getattr(real, name), name
    for name in ("dim", "numel", "__len__", "size", "stride", "is_floating_point", "is_contiguous"):
        assert getattr(lazy, name)() == getattr(real, name)(), name
    assert (lazy.size(0), lazy.size(dim=-1), lazy.stride(1)) == (real.size(0), real.size(-1), real.stride(1))
    assert torch.is_tensor(lazy)
    assert len({lazy, lazy}) == 1
    assert head.readers == []
    with pytest.raises(IndexError, match="does not match the shape of the indexed tensor"):
        lazy[torch.ones(2, 4, dtype=torch.bool)]


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda logits: logits.float(),
    "to float32": lambda logits: logits.to(torch.float32),
    "detach": lambda logits: logits.detach(),
    "contiguous": lambda logits: logits.contiguous(),
    "contiguous rows": lambda logits: logits[..., :-1, :].contiguous().view(-1, VOCABULARY),
    "times a number": lambda logits: logits * 0.5,
    "a number times": lambda logits: 2 * logits,
    "tanh": lambda logits: torch.tanh(logits),
    "a softcap": lambda logits: torch.tanh(logits / 5.0) * 5.0,
    "flatten": lambda logits: logits.flatten(0, 1),
    "reshape": lambda logits: logits.reshape(-1, logits.shape[-1]),
    "slice": lambda logits: logits[..., :-1, :],
    "one row": lambda logits: logits[:, -1],
    "a mask": lambda logits: logits[torch.tensor([[True, False, True, True, False]] * 2)],
    "several": lambda logits: (logits.float()[:, :-1] / 2.0).reshape(-1, VOCABULARY),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_stay_lazy_and_compute_what_they_would_of_real_logits(name: str, dtype: torch.dtype) -> None:
    head, step = Head(dtype=dtype), STEPS[name]
    actual, expected = step(head.lazy()), step(head.real())
    assert isinstance(actual, LazyLogits)
    assert head.readers == []
    for attribute in ("shape", "dtype", "requires_grad"):
        assert getattr(actual, attribute) == getattr(expected, attribute), attribute
    assert actual.stride() == expected.stride()
    assert torch.equal(actual + 0, expected + 0)
    assert len(head.readers) == 1
    if expected.requires_grad:
        gradients = (head.gradients((value * 2).sin().sum()) for value in (actual, expected))
        torch.testing.assert_close(*gradients, rtol=1e-6 if dtype == torch.float32 else 2e-2, atol=1e-6)


READS: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda logits: logits.argmax(-1),
    "a part of the vocabulary": lambda logits: logits[..., :3],
    "rows by their numbers": lambda logits: logits[:, torch.tensor([0, 0, 2])],
    "a mask of elements": lambda logits: logits[torch.ones(*ROWS, VOCABULARY, dtype=torch.bool)],
    "a flag": lambda logits: logits[torch.tensor(True)],
    "times a tensor": lambda logits: logits * torch.tensor(2.0),
    "to another dtype": lambda logits: logits.to(torch.float16),
    "a copy in its dtype": lambda logits: logits.to(logits.dtype, copy=True),
    "in another order of memory": lambda logits: logits[None].contiguous(memory_format=torch.channels_last),
    "numpy": lambda logits: torch.from_numpy(logits.detach().numpy()),
    "print": lambda logits: torch.tensor([ord(letter) for letter in str(logits.detach())]),
    "deepcopy": lambda logits: copy.deepcopy(logits.detach()),
    "save": lambda logits: _saved(logits.detach()),
    "another cross entropy": lambda logits: functional.cross_entropy(logits.transpose(1, 2), labels()),
    "weighted cross entropy": lambda logits: functional.cross_entropy(logits[0], labels()[0], torch.arange(9.0)),
    "losses of rows": lambda logits: functional.cross_entropy(logits[0], labels()[0], reduction="none"),
    "targets that are probabilities": lambda logits: functional.cross_entropy(logits[0], torch.ones(5, 9).softmax(-1)),
    "data": lambda logits: logits.data,
    "by C++": lambda logits: torch._C._nn.cross_entropy_loss(logits.flatten(0, 1), labels().flatten()),
}


def _saved(logits: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(logits, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("name", READS)
def test_all_else_reads_once_and_gets_the_real_logits(name: str) -> None:
    head, read = Head(), READS[name]
    actual, expected = read(head.lazy()), read(head.real())
    assert type(actual) is Tensor
    assert torch.equal(actual, expected)
    assert actual.requires_grad == expected.requires_grad
    assert len(head.readers) == 1
    if expected.requires_grad:
        gradients = (head.gradients(value.float().sum()) for value in (actual, expected))
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


class Doubled(torch.autograd.Function):
    """An autograd function of a user: PyTorch passes it lazy logits unread."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def scaled_in_place(logits: Tensor) -> Tensor:
    loss = shifted_loss(logits, labels())
    loss *= 3
    loss += 1
    return loss


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "two reads": lambda logits: logits.sin().sum() + logits.cos().sum(),
    "a loss and reads": lambda logits: (
        shifted_loss(logits, labels()) + logits.square().mean() + logits.float()[0].sin().sum()
    ),
    "a loss that is written to": scaled_in_place,
    "a user's function": Doubled.apply,
    "a user's function of steps": lambda logits: Doubled.apply((logits.float() / 2.0)[:, 1:]),
    "a user's function of a sum": lambda logits: Doubled.apply(shifted_loss(logits, labels(), reduction="sum")),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_made_of_them_has_the_gradients_of_real_ones(name: str) -> None:
    def outcome(logits: Tensor) -> list[Tensor]:
        number = NUMBERS[name](logits)
        return [number, *head.gradients(number)]

    head = Head(bias=True)
    assert_as_of_real_logits(head, outcome)
    assert len(head.readers) <= 1


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "an element": lambda logits: logits.__setitem__((0, 1, 2), 3.0),
    "a sum": lambda logits: logits.__iadd__(1),
    "a product": lambda logits: logits.mul_(2),
    "a copy": lambda logits: logits.copy_(torch.ones_like(logits)),
    "a result": lambda logits: torch.add(torch.ones(*ROWS, VOCABULARY), 1, out=logits),
    "into a view": lambda logits: logits[:, 2:].mul_(2),
    "into an element of each row": lambda logits: logits[..., 0].mul_(2),
    "into a chunk": lambda logits: logits.chunk(2, dim=-1)[1].fill_(3),
    "in place": lambda logits: functional.relu(logits, inplace=True),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_was_made_of_them_before_a_write_is_as_of_real_ones(name: str) -> None:
    def write(logits: Tensor) -> list[Tensor]:
        copied, view = logits * 0.5, logits[:, 1:]
        WRITES[name](logits)
        return [view * 2 + 0, logits + 0, copied + 0, view + 0, logits * 2 + 0]

    with torch.no_grad():
        assert_as_of_real_logits(Head(trained=False), write, rtol=0, atol=0)
    if name not in ("a result", "into a chunk"):  # which autograd refuses
        head = Head()
        assert_as_of_real_logits(head, lambda logits: head.gradients(write(logits)[1].sin().sum()))


@pytest.mark.parametrize("hooked", ["logits", "view", "neither"])
@pytest.mark.parametrize("written", ["logits", "view"])
def test_a_write_into_a_view_with_a_hook_is_seen_in_both(written: str, hooked: str) -> None:
    def write(logits: Tensor) -> list[Tensor]:
        tensors, grads = {"logits": logits, "view": logits[:, 1:]}, []
        if hooked in tensors:
            tensors[hooked].register_hook(grads.append)
        tensors[written].mul_(2)
        results = [tensors["logits"] + 0, tensors["view"] + 0]
        return [*results, *head.gradients(sum(result.sin().sum() for result in results)), *grads]

    head = Head()
    assert_as_of_real_logits(head, write)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_detached_logits_or_without_gradients_needs_none(reduction: str) -> None:
    lazy = Head().lazy()
    assert not (shifted_loss(lazy.detach(), labels(), reduction=reduction) + 0).requires_grad
    with torch.no_grad():
        assert not (shifted_loss(lazy, labels(), reduction=reduction) + 0).requires_grad
    assert (shifted_loss(lazy, labels(), reduction=reduction) + 0).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_their_cross_entropy_is_the_fused_one(reduction: str) -> None:
    head, target = Head(), labels()
    actual = shifted_loss(head.lazy(), target, reduction=reduction, label_smoothing=0.1)
    expected = shifted_loss(head.real(), target, reduction=reduction, label_smoothing=0.1)
    assert (type(actual) is not Tensor) == (reduction == "sum")
    assert torch.equal(actual + 0, expected)
    ((rows, how),) = head.losses
    assert rows.shape == (8, WIDTH)
    assert (how.reduction, how.label_smoothing, how.num_items) == (reduction, 0.1, None)
    assert head.readers == []
    torch.testing.assert_close(head.gradients(actual + 0), head.gradients(expected))


SEVEN, EXACT_SEVEN = torch.tensor(7), torch.tensor(7.0)


@pytest.mark.parametrize(
    ("change", "items"),
    [
        (lambda total: total / 7, 7),
        (lambda total: total / SEVEN, SEVEN),
        (lambda total: total.div(EXACT_SEVEN), EXACT_SEVEN),
        (lambda total: total.div(7.0, rounding_mode="trunc"), None),
        (lambda total: total / 0, None),
        (lambda total: total / torch.tensor([7.0]), None),
        (lambda total: total / total, None),
        (lambda total: 7 / total, None),
        (lambda total: total / torch.tensor(7.0, requires_grad=True), None),
    ],
)
def test_a_sum_waits_for_its_number_of_items_and_is_a_number_for_all_else(change: Any, items: Any) -> None:
    head = Head()
    totals = [shifted_loss(logits, labels(), reduction="sum") for logits in (head.lazy(), head.real())]
    assert [(total.dtype, total.shape) for total in totals] == 2 * [(torch.float32, ())]
    assert head.losses == []
    torch.testing.assert_close(*map(change, totals))
    assert [how.num_items for _, how in head.losses] == [items]


@pytest.mark.parametrize(
    ("transform", "known"),
    [
        (lambda logits: logits, (None, None, False)),
        (lambda logits: logits * 0.25, (0.25, None, False)),
        (lambda logits: logits / 8.0, (0.125, None, False)),
        (lambda logits: torch.tanh(logits / 30.0) * 30.0, (None, 30.0, False)),
        (lambda logits: torch.tanh(logits.float() / 30.0) * 30.0, (None, 30.0, True)),
        (lambda logits: torch.tanh(logits / 2.0 / 30.0) * 30.0, (0.5, 30.0, False)),
        (lambda logits: torch.tanh(logits / 30.0) * 20.0, None),
        (lambda logits: torch.tanh(logits / -30.0) * -30.0, None),
        (lambda logits: torch.tanh((logits / 30.0).float()) * 30.0, None),
        (lambda logits: logits * 0.0, None),
        (lambda logits: torch.div(logits, 0.5, rounding_mode="floor"), None),
        (lambda logits: logits * 2.0 * 3.0, None),
        (lambda logits: logits[:, torch.tensor([1, 0, 2, 3, 4])], None),
    ],
)
def test_scale_and_cap_are_the_operators_or_real_logits_are_taken(transform: Any, known: Any) -> None:
    head = Head(dtype=torch.bfloat16)
    actual, expected = (shifted_loss(transform(logits), labels()) for logits in (head.lazy(), head.real()))
    assert [(how.scale, how.cap, how.in_fp32) for _, how in head.losses] == ([known] if known else [])
    assert known or torch.equal(actual, expected)


def test_a_loss_in_16_bits_is_pytorchs() -> None:
    head, target = Head(dtype=torch.bfloat16), labels().flatten()
    loss = functional.cross_entropy(head.lazy().view(-1, VOCABULARY), target)
    assert loss.dtype == torch.bfloat16
    assert head.losses == []
    with torch.autocast("cpu", torch.bfloat16):  # which computes cross entropies in float32
        functional.cross_entropy(head.lazy(torch.bfloat16).view(-1, VOCABULARY), target)
    assert len(head.losses) == 1


OTHER_LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any]]] = {
    "fewer labels": (lambda labels: labels[:-1], {}),
    "labels of another shape": (lambda labels: labels.view(2, -1), {}),
    "labels in 32 bits": (lambda labels: labels.int(), {}),
    "the sum by its old name": (lambda labels: labels, {"size_average": False}),
    "a sum of no known name": (lambda labels: labels, {"reduction": "total"}),
}


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_a_loss_that_the_operator_does_not_take_is_pytorchs_or_its_error(name: str) -> None:
    head, (change, arguments) = Head(), OTHER_LOSSES[name]

    def outcome(logits: Tensor) -> tuple[Any, ...]:
        try:
            return Tensor, *functional.cross_entropy(
                logits.flatten(0, 1), change(labels(ignored=0).flatten()), **arguments
            ).flatten().tolist()
        except (RuntimeError, ValueError) as error:
            return type(error), str(error)

    assert outcome(head.lazy()) == outcome(head.real())
    assert head.losses == []


@pytest.mark.parametrize("change", [lambda rows: rows.mul_(2), lambda rows: rows.argmax(-1)], ids=["written", "read"])
def test_logits_that_were_written_into_or_read_have_pytorchs_loss(change: Callable[[Tensor], Tensor]) -> None:
    def loss(logits: Tensor) -> Tensor:
        rows = logits.view(-1, VOCABULARY)
        change(rows)
        return functional.cross_entropy(rows, labels().flatten())

    head = Head()
    assert_as_of_real_logits(head, loss, rtol=0, atol=0)
    assert head.losses == []


ASKED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "a loss of capped logits": (
        lambda logits: torch.tanh(logits / 2) * 2,
        lambda logits: shifted_loss(logits, labels()),
    ),
    "a sum of losses": (lambda logits: logits, lambda logits: shifted_loss(logits, labels(), reduction="sum")),
    "a read": (lambda logits: (logits * 0.5)[:, 1:], lambda logits: logits.sin().sum()),
}
"""By name: a change of the logits, whose result's gradient is read, and a function of the result that is a number."""


@pytest.mark.parametrize(
    ("of", "way"),
    [
        *((of, way) for of in ASKED for way in ("retain_grad", "register_hook", "autograd.grad", "edge", "node")),
        *((of, "by position") for of in ASKED),
        *((of, "inputs") for of in ASKED if of != "a read"),
    ],
)
def test_a_gradient_of_the_logits_is_there_for_who_asks(of: str, way: str) -> None:
    change, number = ASKED[of]

    def gradients(logits: Tensor) -> list[Tensor]:
        logits, grads = change(logits), []
        if way == "autograd.grad":
            return list(torch.autograd.grad(number(logits), [logits]))
        if way == "by position":  # PyTorch's own functions pass most arguments on by their names
            arguments = number(logits), [logits], torch.tensor(2.0)
            if isinstance(logits, LazyLogits):
                return list(LazyLogits.__torch_function__(torch.autograd.grad, (), arguments))
            return list(torch.autograd.grad(*arguments))
        if way == "edge":
            return list(torch.autograd.grad(number(logits), [get_gradient_edge(logits)]))
        if way == "inputs":
            number(logits).backward(inputs=[logits])
            return [logits.grad]
        if way == "node":
            value = number(logits)
            logits.grad_fn.register_prehook(lambda incoming: grads.extend(incoming))
            return [*head.gradients(value), *grads]
        if way == "register_hook":
            logits.register_hook(lambda grad: grads.append(grad) or 2 * grad)
        else:
            logits.retain_grad()
        of_leaves = head.gradients(number(logits))
        assert grads or logits.grad is not None
        return [*of_leaves, *grads, *([] if grads else [logits.grad])]

    head = Head()
    assert_as_of_real_logits(head, gradients)


@pytest.mark.parametrize("way", ["register_hook", "retain_grad", "autograd.grad"])
@pytest.mark.parametrize(
    "change", [lambda logits: logits * 0.5, lambda logits: logits[:, 1:], lambda logits: logits.float()[0] / 3]
)
def test_a_gradient_of_what_was_read_is_there_for_who_asks_later(change: Callable[[Tensor], Tensor], way: str) -> None:
    def gradients(logits: Tensor) -> list[Tensor]:
        derived, grads = change(logits), []
        scaled, late = derived * 3, derived * 5
        value = derived.sin().sum() + scaled.square().sum()
        tensors = [derived, late]
        if way == "autograd.grad":
            return list(torch.autograd.grad(value + late.sin().sum(), tensors))
        for tensor in tensors:
            if way == "register_hook":
                tensor.register_hook(grads.append)
            else:
                tensor.retain_grad()
        value += late.sin().sum() + functional.cross_entropy(scaled.flatten(0, -2), target(scaled))
        return [*head.gradients(value), *(grads or [tensor.grad for tensor in tensors])]

    def target(logits: Tensor) -> Tensor:
        return torch.arange(logits[..., 0].numel()) % VOCABULARY

    head = Head()
    assert_as_of_real_logits(head, gradients)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_gradient_that_cannot_be_told_any_more_is_an_error(is_read: bool) -> None:
    """The loss was made of the head's inputs, whoever asks later for the gradient of a view of its logits."""
    logits = Head().lazy()
    derived = logits[:, 1:]
    rows = functional.cross_entropy(derived.flatten(0, 1), labels()[:, 1:].flatten())
    value = rows + (logits.sin().sum() if is_read else 0)
    for ask in (
        lambda: torch.autograd.grad(value, derived),
        lambda: torch.autograd.grad(value, [get_gradient_edge(derived)]),
        lambda: value.backward(inputs=[derived]),
        lambda: derived.register_hook(print),
        derived.retain_grad,
        lambda: derived.grad_fn,
    ):
        with pytest.raises(RuntimeError, match=r"is asked for after their loss.*loss=False"):
            ask()
    logits.detach().mul_(2)
    with pytest.raises(RuntimeError, match=r"is asked for after their loss.*loss=False"):
        logits.retain_grad()


@pytest.mark.parametrize("of", ["a loss", "a read", "a hooked mean", "a hooked sum"])
def test_second_derivatives_go_through_reads_and_losses(of: str) -> None:
    def number(logits: Tensor) -> Tensor:
        logits = torch.tanh(logits / 2.0) * 2.0
        if of == "a read":
            return logits.square().sum()
        if "hooked" in of:
            logits.register_hook(lambda gradient: None)
        return shifted_loss(logits, labels(), reduction="sum" if "sum" in of else "mean") / 7

    def second(logits: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(number(logits), [head.x, head.weight], create_graph=True)
        return head.gradients(sum(grad.square().sum() for grad in first))

    head = Head(bias=True)
    assert_as_of_real_logits(head, second)


def test_late_reads_have_the_forwards_modes() -> None:
    head = Head()
    with torch.autocast("cpu", torch.bfloat16):
        lazy, real = head.lazy(torch.bfloat16), head.real()
    assert lazy.dtype == torch.bfloat16
    with torch.no_grad():
        sines = lazy.sin()
        no_grad_logits = head.lazy()
    assert not sines.requires_grad
    assert torch.equal(lazy + 0, real)
    gradients = (head.gradients(logits.float().sin().sum()) for logits in (lazy, real))
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)
    assert not (no_grad_logits + 0).requires_grad


@pytest.mark.parametrize("written", ["weight", "x", "bias", "freed"])
def test_what_was_written_to_since_is_an_error_and_never_other_numbers(written: str) -> None:
    head = Head(bias=True, trained=False)
    with torch.no_grad():
        lazy, was_read, expected = head.lazy(), head.lazy(), head.real()
        was_read.sum()
        if written == "freed":  # as FSDP frees gathered weights
            head.weight.untyped_storage().resize_(0)
        else:
            getattr(head, written).mul_(1.5)
    assert lazy.shape == (*ROWS, VOCABULARY)
    for late in (Tensor.sum, lambda logits: shifted_loss(logits, labels())):
        with pytest.raises(RuntimeError, match=r"outputs.logits are computed when they are first read.*loss=False"):
            late(lazy)
    assert head.losses == []
    assert torch.equal(was_read + 0, expected)


def test_a_replaced_function_of_pytorch_works_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy logits look a function up by its name, which is the wrapper's after the replacement."""
    head = Head()
    expected = 2 * functional.log_softmax(head.real(), -1)
    before = functional.log_softmax
    monkeypatch.setattr(functional, "log_softmax", lambda *args, **named: 2 * before(*args, **named))
    assert torch.equal(functional.log_softmax(head.lazy(), -1), expected)


def test_inference_mode_reads_them_too() -> None:
    head = Head()
    with torch.inference_mode():
        lazy = head.lazy()
        assert torch.equal(lazy[..., -1, :].argmax(-1), head.real()[..., -1, :].argmax(-1))

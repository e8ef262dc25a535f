"""What people compute of the logits of a model that is trained without labels, compared with the stock model.

The formulas are those of preference losses and policy gradients: log-probabilities, losses of rows, entropies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fused_norm
from fused_norm.model_configs import build, tiny_config
from fused_norm.patcher import fused_norm_module

from ..conftest import HAS_GPU
from .models import ScaledGradient, losses_of, pair, relative, slow_but, tokens, trainer_of
from .ranks import called_operators, on_two_ranks

Formula = Callable[[Tensor, Tensor], Tensor]


def ids(model: Any) -> Tensor:
    return tokens(next(model.parameters()).device.type, length=9)


def logits_of(model: Any, **kwargs: Any) -> Tensor:
    return model(input_ids=ids(model), use_cache=False, **kwargs).logits


def selected(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probabilities at an index: in 32 bits a difference that holds no log-softmax, in 16 bits row by row."""
    if logits.dtype in (torch.float32, torch.float64):
        at_index = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
        return at_index - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    rows = []
    for row, labels in zip(logits, index, strict=True):
        log_probs = functional.log_softmax(row, dim=-1)
        rows.append(log_probs.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def in_chunks(logits: Tensor, chunk: int = 4) -> Tensor:
    """Entropies from chunks of log-softmax."""
    entropies = []
    for rows in logits.reshape(-1, logits.shape[-1]).split(chunk, dim=0):
        log_probs = functional.log_softmax(rows, dim=-1)
        entropies.append(-(torch.exp(log_probs) * log_probs).sum(-1))
    return torch.cat(entropies).reshape(logits.shape[:-1])


def by_softmax(logits: Tensor) -> Tensor:
    """Entropies as the log of the partition function less the mean logit."""
    return torch.logsumexp(logits, dim=-1) - torch.sum(functional.softmax(logits, dim=-1) * logits, dim=-1)


def one_row(row: Tensor, labels: Tensor) -> Tensor:
    return (row.gather(-1, labels[:, None]) - row.logsumexp(-1, keepdim=True)).squeeze(-1)


def flat(logits: Tensor) -> Tensor:
    return logits.view(-1, logits.shape[-1])


def divided(logits: Tensor, temperature: float = 0.7) -> Tensor:
    logits.div_(temperature)
    return logits


def divided_rows(logits: Tensor) -> Tensor:
    rows = logits[:, :-1]
    rows = rows[:, -4:]
    rows /= 0.7
    return rows


def weighted(rows: Tensor, index: Tensor) -> Tensor:
    """Log-probabilities and entropies of the same rows."""
    return selected(rows, index) + 0.1 * in_chunks(rows)


FORMULAS: dict[str, Formula] = {
    "log-softmax and gather": lambda x, y: x.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1),
    "of shifted rows": lambda x, y: torch.gather(x[:, :-1].log_softmax(-1), dim=2, index=y[:, 1:].unsqueeze(2)).squeeze(
        2
    ),
    "rows of log-softmax": lambda x, y: functional.log_softmax(x, -1)[:, :-1].gather(-1, y[:, 1:, None]),
    "in float32": lambda x, y: functional.log_softmax(x, -1, dtype=torch.float32).gather(-1, y[..., None]),
    "selected": selected,
    "selected, one row": lambda x, y: one_row(x[0] if x.dtype == torch.float64 else x[0].float(), y[0]),
    "by a temperature": lambda x, y: selected(x / 0.7, y),
    "written by a temperature": lambda x, y: selected(divided(x), y),
    "rows written by a temperature": lambda x, y: selected(divided_rows(x), y[:, -4:]),
    "last rows": lambda x, y: selected(x[:, :-1, :][:, -4:, :] / 0.7, y[:, -4:]),
    "losses of rows": lambda x, y: functional.cross_entropy(flat(x), y.view(-1), reduction="none"),
    "losses of labelled rows": lambda x, y: functional.cross_entropy(
        flat(x[:, :-1].contiguous()), masked(y)[:, 1:].reshape(-1), reduction="none"
    ),
    "negative log-likelihoods": lambda x, y: functional.nll_loss(
        functional.log_softmax(flat(x), dim=-1), masked(y).view(-1), reduction="none"
    ),
    "predictions": lambda x, y: (
        (x[:, :-1].argmax(dim=-1) == y[:, 1:]) + x[:, :-1].log_softmax(-1).gather(-1, y[:, 1:, None]).squeeze(-1)
    ),
    "entropies in chunks": lambda x, y: in_chunks(x),
    "entropies by softmax": lambda x, y: by_softmax(x if x.dtype == torch.float64 else x.float()),
    "entropies and log-probabilities": weighted,
}
"""Values for rows, of logits and labels."""

IN_FP32: dict[str, Formula] = {
    "the mean": lambda x, y: functional.cross_entropy(flat(x), masked(y).view(-1))[None],
    "the sum": lambda x, y: functional.cross_entropy(flat(x), y.view(-1), reduction="sum")[None] / 7,
    "smoothed": lambda x, y: functional.cross_entropy(flat(x), y.view(-1), label_smoothing=0.1)[None],
    "the mean of log-softmax": lambda x, y: functional.nll_loss(flat(x).log_softmax(-1), masked(y).view(-1))[None],
    "log-softmax by hand": lambda x, y: (x - x.logsumexp(-1, keepdim=True)).gather(-1, y[..., None]),
    "a copy written by a temperature": lambda x, y: selected(divided(x * 1.5), y),
}
"""Those of logits in float32 alone, or cast to it."""

QUICK = ("log-softmax and gather", "selected", "rows written by a temperature", "entropies in chunks")
FP32, BF16 = torch.float32, torch.bfloat16
CASES = [
    *(pytest.param(name, dtype, marks=[] if name in QUICK else pytest.mark.slow, id=f"{name}, {dtype}")
      for name in FORMULAS for dtype in (FP32, BF16)),
    *(pytest.param(name, FP32, marks=pytest.mark.slow, id=name) for name in IN_FP32),
]  # fmt: skip


def masked(labels: Tensor) -> Tensor:
    return labels.masked_fill(torch.arange(labels.shape[1], device=labels.device) < 3, -100)


def step(model: Any, formula: Formula, **kwargs: Any) -> list[Tensor]:
    """The values of a formula, the gradients of hidden states and of the head, and those of all parameters."""
    hidden: list[Tensor] = []
    norm = model.model.norm.register_forward_hook(lambda module, args, output: hidden.append(output))
    values = formula(logits_of(model, **kwargs), ids(model))
    norm.remove()
    hidden[0].retain_grad()
    weights = torch.linspace(-1.0, 2.0, values.numel(), device=values.device).view(values.shape)
    (values * weights).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    results = [values.detach(), hidden[0].grad, model.lm_head.weight.grad, *gradients]
    model.zero_grad()
    return results


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_it_makes_no_logits_and_is_as_near_to_the_truth_as_stock(
    name: str, dtype: torch.dtype, device: str, reads: list[str]
) -> None:
    formula = (FORMULAS | IN_FP32)[name]
    own, fused = pair(device, dtype=dtype)
    expected, actual = step(own, formula), step(fused, formula)
    truth = step(copy.deepcopy(own).double(), formula)
    assert reads == []
    assert actual[0].dtype == expected[0].dtype
    assert len(actual) == len(expected)
    for place, (ours, stocks, true) in enumerate(zip(actual, expected, truth, strict=True)):
        floor = 3e-6 if dtype == FP32 else 1e-3
        factor = 1.05 if place < 3 else 1.5  # the roundings of all layers differ by chance
        assert relative(ours, true) <= factor * relative(stocks, true) + floor, place


def gradients(model: nn.Module, loss: Tensor, *leaves: Any) -> list[Any]:
    """The loss, and the gradients of it; None for a parameter without one."""
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves), *(parameter.grad for parameter in model.parameters())]


def total(logits: Tensor) -> Tensor:
    """A loss of log-probabilities that differ in their weights."""
    labels = torch.arange(logits.shape[:-1].numel(), device=logits.device).view(logits.shape[:-1])
    return (selected(logits, labels) * labels).sum()


def assert_as_stock(device: str, outcome: Callable[[Any], list[Any]], **options: Any) -> None:
    expected, actual = (outcome(model) for model in pair(device, **options))
    assert len(actual) == len(expected)
    for place, (ours, stocks) in enumerate(zip(actual, expected, strict=True)):
        if ours is None or stocks is None:
            assert ours is stocks, place
            continue
        assert (ours.shape, ours.dtype) == (stocks.shape, stocks.dtype), place
        assert torch.equal(ours.isnan(), stocks.isnan()), place
        scale = stocks.nan_to_num().double().norm().clamp(min=1e-6)
        distance = (ours.nan_to_num().double() - stocks.nan_to_num().double()).norm()
        assert distance <= 1e-5 * scale, (place, float(distance / scale))


READERS: dict[str, Formula] = {
    "clone": lambda x, y: x.clone().sin(),
    "detach": lambda x, y: selected(x.detach() * x[..., :1], y),
    "the largest": lambda x, y: x.max(-1).values,
    "one column": lambda x, y: x[..., 3],
    "rows by numbers": lambda x, y: x[:, y[0] % 5].log_softmax(-1).sin(),
    "several columns": lambda x, y: x.log_softmax(-1).gather(-1, torch.stack([y, y + 1], -1)),
    "fewer rows": lambda x, y: x.log_softmax(-1).gather(-1, y[:1, :3, None]),
    "over rows": lambda x, y: x.log_softmax(1).gather(-1, y[..., None]),
    "of probabilities": lambda x, y: x.softmax(-1).gather(-1, y[..., None]),
    "weighted classes": lambda x, y: functional.cross_entropy(
        flat(x), y.view(-1), torch.arange(x.shape[-1], device=x.device).to(x.dtype), reduction="none"
    ),
    "smoothed losses of rows": lambda x, y: functional.cross_entropy(
        flat(x), y.view(-1), reduction="none", label_smoothing=0.1
    ),
    "a temperature for each row": lambda x, y: selected(x / (1 + y[..., None]), y),
    "two scales": lambda x, y: selected(x * 3.0 * 0.5, y),
    "entropies of other logits": lambda x, y: x.logsumexp(-1) - ((x / 2.0).softmax(-1) * x).sum(-1),
    "a partition function of other logits": lambda x, y: (
        x.gather(-1, y[..., None]).squeeze(-1) - (x / 2.0).logsumexp(-1)
    ),
    "rows in another order": lambda x, y: torch.stack([row.logsumexp(-1) for row in reversed(list(x))]),
    "exponentials of log-probabilities": lambda x, y: x.log_softmax(-1).exp().square(),
}


@pytest.mark.parametrize("name", slow_but(("clone", "two scales", "entropies of other logits"), READERS))
def test_all_else_reads_once(name: str, device: str, reads: list[str]) -> None:
    def outcome(model: Any) -> list[Any]:
        return step(model, READERS[name])

    assert_as_stock(device, outcome)
    assert reads == ["read"]


@pytest.mark.parametrize("config", slow_but(({"final_logit_softcapping": 3.0},), [
    {"final_logit_softcapping": 3.0}, {"logits_scaling": 4.0},
]), ids=str)  # fmt: skip
@pytest.mark.parametrize("cast", [False, True])
def test_scale_and_cap_of_the_model_come_before_the_temperature(
    config: dict[str, float], cast: bool, device: str, reads: list[str]
) -> None:
    name = "gemma2" if "final_logit_softcapping" in config else "granite"

    def outcome(model: Any) -> list[Any]:
        return step(model, lambda x, y: selected((x.float() if cast else x) / 0.7, y))

    assert_as_stock(device, outcome, name=tiny_config(name, **config))
    assert reads == []


def leaf(model: Any) -> list[Any]:
    logits = logits_of(model).detach()
    logits.requires_grad = True
    return gradients(model, total(logits), logits)


def with_a_gradient(model: Any, *, by: str, after: bool) -> list[Any]:
    """The gradient of logits for who asks for it, before or after something is made of them."""
    logits, seen = logits_of(model), []
    ask = {
        "retain_grad": logits.retain_grad,
        "register_hook": lambda: logits.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient),
        "autograd": lambda: None,
    }[by]
    if not after:
        ask()
    loss = logits.log_softmax(-1).gather(-1, ids(model)[..., None]).sin().sum()
    if after:
        ask()
    if by == "autograd":
        return list(torch.autograd.grad(loss, [logits, *model.parameters()]))
    values = gradients(model, loss)
    return [*values, *seen, *([logits.grad] if by == "retain_grad" else [])]


def read_after(model: Any) -> list[Any]:
    logits = logits_of(model)
    loss = total(logits / 0.7) + total(logits)
    return gradients(model, loss + logits.sin().sum())


def with_fast_weights(model: Any) -> list[Any]:
    fast = {name: (tensor.detach() * 1.5).requires_grad_() for name, tensor in model.named_parameters()}
    output = functional_call(model, fast, (), {"input_ids": ids(model), "use_cache": False})
    losses = functional.cross_entropy(flat(output.logits), ids(model).view(-1))
    return gradients(model, total(output.logits) + losses + in_chunks(output.logits).sin().sum(), *fast.values())


def with_nan(model: Any, *, in_head: bool) -> list[Any]:
    with torch.no_grad():
        (model.lm_head if in_head else model.model.norm).weight[0] = float("nan")
    logits = logits_of(model)
    return [total(logits).detach(), in_chunks(logits).detach(), logits.argmax(-1)]


def with_a_buffer(
    model: Any, begin: Formula, end: Callable[[Tensor, Tensor], Tensor] = lambda logits, begun: begun
) -> list[Any]:
    """Labels that are written to once they are read."""
    logits, labels = logits_of(model), ids(model).clone()
    begun = begin(logits, labels)
    labels.fill_(7)
    return [end(logits, begun).detach()]


def of_a_checkpoint(model: Any, *, reentrant: bool) -> list[Any]:
    def cut(embeddings: Tensor, *, whole: bool) -> Tensor:
        logits = model(inputs_embeds=embeddings, use_cache=False).logits
        return logits[:, :-1] if whole else selected(logits / 0.7, ids(model))

    def loss(*, whole: bool) -> Tensor:
        embeddings = model.get_input_embeddings()(ids(model))
        result = checkpoint(cut, embeddings, whole=whole, use_reentrant=False) if not reentrant else checkpoint(
            lambda x: cut(x, whole=whole), embeddings, use_reentrant=True
        )  # fmt: skip
        return total(result) if whole else result.sin().sum()

    return gradients(model, loss(whole=True) + loss(whole=False))


def twice_differentiated(model: Any) -> list[Any]:
    weight = model.lm_head.weight
    (gradient,) = torch.autograd.grad(total(logits_of(model) / 0.7).sin(), weight, create_graph=True)
    return list(torch.autograd.grad(gradient.square().sum(), weight))


def accumulated(model: Any) -> list[Any]:
    total(logits_of(model)).backward()
    first, second = logits_of(model), logits_of(model) / 0.7
    return gradients(model, total(second) - in_chunks(first).sum() + total(second))


def under_no_grad(model: Any) -> list[Any]:
    """Entropies for a log, next to a loss: they carry no gradient."""
    logits = logits_of(model)
    with torch.no_grad():
        entropies = [in_chunks(logits), by_softmax(logits), selected(logits, ids(model))]
        probabilities = logits.log_softmax(-1).exp()
    mixed = -(probabilities * logits.log_softmax(-1)).sum(-1)  # probabilities are constants
    assert not any(entropy.requires_grad for entropy in entropies)
    return [*entropies, *gradients(model, mixed.sum() + total(logits))]


def with_a_constant_partition(model: Any) -> list[Any]:
    logits = logits_of(model)
    with torch.no_grad():
        partition = logits.logsumexp(-1)
    return gradients(model, (logits.gather(-1, ids(model)[..., None]).squeeze(-1) - partition).sin().sum())


def written(model: Any, write: Callable[[Tensor], Any], *, scaled: bool = False, no_grad: bool = False) -> list[Any]:
    """A write into logits or into rows of them, seen by all that share their memory, and by nothing else."""
    output = model(input_ids=ids(model), use_cache=False)
    logits = output.logits
    with torch.set_grad_enabled(not no_grad):
        others = write(logits)
    others = [logits, *(others if isinstance(others, list) else [])]
    if scaled:
        others = [ScaledGradient.apply(other) for other in others]
    losses = [total(other) for other in others]
    return [*(loss.detach() for loss in losses), *gradients(model, sum(losses)), *(x.detach() + 0 for x in others)]


def written_twice(logits: Tensor) -> list[Tensor]:
    rows = logits[:, 1:]
    rows.mul_(0.5)
    rows.div_(0.7)
    return [rows]


def written_copy(logits: Tensor) -> list[Tensor]:
    before = logits * 1.0
    logits.div_(0.7)
    return [before, logits * 1.0]


def written_after_a_loss(logits: Tensor) -> list[Tensor]:
    loss = total(logits)
    return [divided(logits * loss.detach()), divided(logits)]


def written_by_a_mask(logits: Tensor) -> list[Tensor]:
    mask = torch.arange(logits.shape[1], device=logits.device) % 2 == 0
    rows = logits[:, mask]
    rows.div_(0.7)
    return [rows]


def written_reshaped(logits: Tensor) -> list[Tensor]:
    rows = logits[:, 1:].reshape(-1, logits.shape[-1])  # a copy
    rows.div_(0.7)
    other = logits.reshape(-1, logits.shape[-1])  # a view
    other.div_(0.9)
    return [rows[None], other[None]]


def written_with_siblings(logits: Tensor) -> list[Tensor]:
    first, second = logits[:, :4], logits[:, 2:]
    first.div_(0.7)
    return [first, second]


def written_after_a_read(logits: Tensor) -> list[Tensor]:
    kept = logits.detach()
    logits.mul_(0.5)
    return [kept]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "all": divided,
    "rows": divided_rows,
    "twice": written_twice,
    "after a copy": written_copy,
    "selected rows": written_by_a_mask,
    "reshaped": written_reshaped,
    "siblings": written_with_siblings,
    "after a read": written_after_a_read,
    "in another shape": lambda x: [x.view(3, 6, -1)[:2].div_(0.7)],
    "one row": lambda x: [x[0].div_(0.7)[None]],
    "squeezed": lambda x: [x[:1].squeeze(0).div_(0.7)[None]],
    "a number for each row": lambda x: x.div_(torch.ones_like(x[..., :1]) * 2),
}


def with_gradients_of_both(model: Any) -> list[Any]:
    logits = logits_of(model)
    log_probs = logits.log_softmax(-1)
    loss = log_probs.gather(-1, ids(model)[..., None]).sin().sum()
    log_probs.retain_grad()
    logits.retain_grad()
    return gradients(model, loss, log_probs, logits)


def of_no_rows(model: Any) -> list[Any]:
    logits, index = logits_of(model), ids(model)
    none, no_index = logits[:, :0], index[:, :0]
    log_probs = none.log_softmax(-1).gather(-1, no_index[..., None])
    loss = log_probs.sum() + by_softmax(none).sum() + logits.log_softmax(-1).gather(-1, index[..., None]).sum()
    return [none.argmax(-1), log_probs.detach(), *gradients(model, loss)]


def of_pieces(model: Any) -> list[Any]:
    logits, index = logits_of(model), ids(model)
    first, _ = logits.chunk(2, dim=0)
    last = logits.split([4, 5], dim=1)[1]
    row = logits[0, 3].log_softmax(-1).gather(-1, index[0, :1])
    return gradients(model, selected(first, index[:1]).sin().sum() + total(last) + row.sum())


def in_inference_mode(model: Any) -> list[Any]:
    logits = logits_of(model)
    with torch.inference_mode():
        values = [logits.argmax(-1), selected(logits, ids(model)), in_chunks(logits)]
    return [*(value.clone() for value in values), *gradients(model, total(logits))]


def read_and_used(model: Any) -> list[Any]:
    """Log-softmax by hand and by PyTorch, both used and then read."""
    logits, loss = logits_of(model), torch.zeros((), device=model.device)
    for log_probs in (logits.log_softmax(-1), logits - logits.logsumexp(-1, keepdim=True)):
        loss = loss + log_probs.gather(-1, ids(model)[..., None]).sin().sum()
        loss = loss + log_probs.square().mean()
    return gradients(model, loss + logits.mean())


OUTCOMES: dict[str, Callable[[Any], list[Any]]] = {
    "a leaf of detached ones": leaf,
    **{
        f"{by} {'after' if after else 'before'}": lambda model, by=by, after=after: with_a_gradient(
            model, by=by, after=after
        )
        for by in ("retain_grad", "register_hook", "autograd") for after in (False, True)
    },
    "gradients of log-softmax and logits": with_gradients_of_both,
    "no rows": of_no_rows,
    "pieces": of_pieces,
    "inference mode": in_inference_mode,
    "both read and used": read_and_used,
    "a read afterwards": read_after,
    "fast weights": with_fast_weights,
    "NaN in the head": lambda model: with_nan(model, in_head=True),
    "NaN in hidden states": lambda model: with_nan(model, in_head=False),
    "a buffer of indices": lambda model: with_a_buffer(
        model, lambda x, y: x.log_softmax(-1).gather(-1, y[..., None])
    ),
    "a buffer of indices of logits": lambda model: with_a_buffer(
        model, lambda x, y: x.gather(-1, y[..., None]), lambda x, at: at.squeeze(-1) - x.logsumexp(-1)
    ),
    "a buffer of labels": lambda model: with_a_buffer(
        model, lambda x, y: functional.cross_entropy(flat(x), y.view(-1), reduction="sum")
    ),
    "a checkpoint": lambda model: of_a_checkpoint(model, reentrant=True),
    "a checkpoint without reentry": lambda model: of_a_checkpoint(model, reentrant=False),
    "a second derivative": twice_differentiated,
    "several forwards": accumulated,
    "entropies without a gradient": under_no_grad,
    "a partition function without a gradient": with_a_constant_partition,
    "scaled gradients": lambda model: gradients(model, total(ScaledGradient.apply(logits_of(model) / 0.7))),
    "scaled gradients of log-softmax": lambda model: gradients(
        model, ScaledGradient.apply(logits_of(model).log_softmax(-1)).square().sum()
    ),
    **{f"a write: {name}": lambda model, write=write: written(model, write) for name, write in WRITES.items()},
    **{f"a write, scaled gradients: {name}": lambda model, write=WRITES[name]: written(model, write, scaled=True)
       for name in ("all", "rows", "twice")},
    "a write without a gradient": lambda model: written(model, WRITES["rows"], no_grad=True),
    "a write after a loss": lambda model: written(model, written_after_a_loss),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTCOMES)
def test_an_outcome_is_as_in_stock(name: str, device: str) -> None:
    assert_as_stock(device, OUTCOMES[name])


WEIGHTS_CHANGE: dict[str, Callable[[Any], None]] = {
    "a step": lambda model: torch.optim.SGD(model.parameters(), 0.1).step(),
    "data": lambda model: model.lm_head.weight.data.mul_(2),
    "other memory": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 2),
    "freed": lambda model: model.lm_head.weight.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("way", slow_but(("a step", "data"), WEIGHTS_CHANGE))
@pytest.mark.parametrize(
    "name", slow_but(("selected",), ["selected", "losses", "the mean", "argmax", "entropies", "rows"])
)
def test_weights_that_change_before_the_end_of_a_chain_are_an_error(name: str, way: str, device: str) -> None:
    _, model = pair(device)
    logits, labels = logits_of(model), ids(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    at_index, log_probs = logits.gather(-1, labels[..., None]).squeeze(-1), logits.log_softmax(-1)
    ends = {
        "selected": lambda: at_index - logits.logsumexp(-1),
        "losses": lambda: functional.nll_loss(flat(log_probs), labels.view(-1), reduction="none"),
        "the mean": lambda: functional.cross_entropy(flat(logits), labels.view(-1)),
        "argmax": lambda: logits.argmax(-1),
        "entropies": lambda: (log_probs.exp() * log_probs).sum(-1),
        "rows": lambda: logits[:, :-1] + 0,
    }
    WEIGHTS_CHANGE[way](model)
    with pytest.raises(RuntimeError, match="have been written to or freed"):
        ends[name]()


def test_a_step_between_loss_and_backward_is_an_error_as_in_stock(device: str) -> None:
    for model in pair(device):
        losses = [total(logits_of(model)), in_chunks(logits_of(model)).sum()]
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_what_is_detached_stays_over_a_step(device: str) -> None:
    def outcome(model: Any) -> list[Any]:
        logits = logits_of(model)
        kept = logits[:, -1].detach()
        total(logits).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return [kept]

    assert_as_stock(device, outcome)


def test_a_gradient_that_is_not_known_any_more_is_an_error(device: str) -> None:
    _, model = pair(device)
    logits = logits_of(model)
    at_index, partition = logits.gather(-1, ids(model)[..., None]).squeeze(-1), logits.logsumexp(-1)
    loss = (at_index - partition).sum()
    for part in (at_index, partition):
        with pytest.raises(RuntimeError, match="is asked for after their loss"):
            part.retain_grad()
        with pytest.raises(RuntimeError, match="is asked for after their loss"):
            torch.autograd.grad(loss, part, retain_graph=True)


@pytest.mark.parametrize("at", ["evaluation", "no_grad", "frozen", "disabled", "functional_call", "without the loss"])
def test_elsewhere_logits_are_real(at: str, device: str) -> None:
    own, model = pair(device)
    if at == "without the loss":
        fused_norm.apply_fused_norm(model, modules="lm_head", loss=False, strict=False)
    if at == "evaluation":
        model.eval()
    if at == "frozen":
        model.requires_grad_(False)
    with torch.set_grad_enabled(at != "no_grad"):
        if at == "disabled":
            with fused_norm.disabled():
                logits = logits_of(model)
        elif at == "functional_call":
            weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
            logits = functional_call(model, weights, (), {"input_ids": ids(model), "use_cache": False}).logits
        else:
            logits = logits_of(model)
    assert type(logits) is Tensor
    assert torch.equal(logits, logits_of(own))


def test_generation_in_training_mode_is_as_in_stock(device: str) -> None:
    own, fused = pair(device)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fused.generate(ids(fused), **options), own.generate(ids(own), **options))


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_backward_has_the_labels_of_the_call(is_asked: bool, device: str) -> None:
    """Stock raises if they were written to since."""
    results = []
    for is_written in (False, True):
        _, model = pair(device)
        logits, labels = logits_of(model), ids(model).clone()
        loss = functional.cross_entropy(flat(logits), labels.view(-1), reduction="none").sin().sum()
        loss = loss + logits.log_softmax(-1).gather(-1, labels[..., None]).sin().sum() + selected(logits, labels).sum()
        if is_asked:
            logits.retain_grad()
        if is_written:
            labels.fill_(7)
        results.append(gradients(model, loss))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.skipif(HAS_GPU, reason="on a GPU the device asserts, and computes nothing from then on")
def test_no_labels_are_no_index() -> None:
    """A gather by -100 raises, as in stock: nobody's log-probability is 0 by mistake."""
    for model in pair("cpu"):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            logits_of(model).log_softmax(-1).gather(-1, masked(ids(model))[..., None])


@pytest.mark.parametrize("ends_inside", [False, True])
@pytest.mark.parametrize("name", slow_but(("selected",), ["selected", "losses of rows", "entropies by softmax"]))
def test_under_autocast_dtypes_and_roundings_are_the_forwards(
    name: str, ends_inside: bool, device: str, reads: list[str]
) -> None:
    own, fused = pair(device)

    def outcome(model: Any) -> list[Tensor]:
        with torch.autocast(device, torch.bfloat16):
            logits = logits_of(model)
            values = FORMULAS[name](logits, ids(model)) if ends_inside else None
        values = FORMULAS[name](logits, ids(model)) if values is None else values
        (values * torch.linspace(-1, 2, values.numel(), device=device).view(values.shape)).sum().backward()
        return [values.detach(), *(parameter.grad for parameter in model.parameters())]

    expected, actual = outcome(own), outcome(fused)
    assert reads == []
    assert actual[0].dtype == expected[0].dtype
    for ours, stocks in zip(actual, expected, strict=True):
        assert relative(ours, stocks) < 3e-2


def test_a_read_after_autocast_has_the_dtypes_of_the_operations(device: str) -> None:
    for model in pair(device):
        with torch.autocast(device, torch.bfloat16):
            log_probs = logits_of(model).log_softmax(-1)
        inside = log_probs.dtype
        assert (log_probs + 0).dtype == inside


def test_labels_that_a_model_inside_gets_are_its_own_loss(device: str, reads: list[str]) -> None:
    class Outer(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, index: Tensor) -> Tensor:
            inner = self.model(input_ids=index, labels=index, use_cache=False).loss
            return inner + selected(self.model(input_ids=index, use_cache=False).logits, index).sum()

    assert_as_stock(device, lambda model: gradients(model, Outer(model)(ids(model))))
    assert reads == []


def test_an_adapter_and_a_frozen_head(device: str, reads: list[str]) -> None:
    results = []
    for model in pair(device):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config).train()
        logits = logits_of(adapted)
        loss = total(logits[:, :-1] / 0.7) + in_chunks(logits).sum()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in adapted.parameters() if p.requires_grad)])
    for ours, stocks in zip(results[1], results[0], strict=True):
        assert relative(ours, stocks) < 1e-5
    assert reads == []


def mean_of_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss for the Trainer, which has taken the labels."""
    logits = outputs.logits.float()[:, :-1].reshape(-1, outputs.logits.shape[-1])
    return functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_the_trainer_trains_as_stock(own: bool, device: str, tmp_path: Path, reads: list[str]) -> None:
    data = [{"input_ids": row, "labels": row} for row in tokens(batch=4, length=9)]
    losses = []
    for model in pair(device):
        trainer = trainer_of(model, tmp_path, data, max_steps=4, label_smoothing_factor=0.0 if own else 0.1)
        if own:
            trainer.compute_loss_func = mean_of_items
        trainer.train()
        losses.append(losses_of(trainer).tolist())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(reads) == (0 if own else 4)


def wrapped(rank: int, world: int) -> list[dict[str, Any]]:
    """The gradients of two ranks by each wrapper, whether logits were lazy, and whether the operator ran."""
    results = []
    for wrapper in ("stock", "ddp", "static", "fsdp2"):
        model: Any = build("llama", seed=0).train()
        if wrapper != "stock":
            fused_norm.apply_fused_norm(model, modules="lm_head")
        if wrapper == "fsdp2":
            mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
            for unit in (*model.model.layers, model):
                fully_shard(unit, mesh=mesh, reshard_after_forward=True)
            fused_norm.apply_fused_norm(model, modules="lm_head", strict=False)
            trained: Any = model
            beside: Any = build("llama", seed=0).train()
            fused_norm.apply_fused_norm(beside, modules="lm_head")
        else:
            trained = DistributedDataParallel(model, static_graph=wrapper == "static")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses = []
        with called_operators() as called:
            for _ in range(2):
                logits = trained(input_ids=tokens(), use_cache=False).logits
                is_lazy = type(logits) is not Tensor
                loss = total(logits / 0.7)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        is_fused = "linear_log_probs" in called
        results.append({"wrapper": wrapper, "losses": losses, "lazy": is_lazy, "fused": is_fused})
    results[-1]["lazy beside"] = type(beside(input_ids=tokens()).logits) is not Tensor
    return results


@pytest.mark.slow
def test_two_ranks_train_as_stock_and_fsdp2_gets_real_logits(tmp_path: Path) -> None:
    for results in on_two_ranks(wrapped, tmp_path):
        for result in results:
            assert result["losses"] == pytest.approx(results[0]["losses"], rel=1e-5), result
        assert {result["wrapper"]: result["fused"] for result in results} == {
            "stock": False, "ddp": True, "static": True, "fsdp2": False
        }  # fmt: skip
        assert not results[-1]["lazy"]
        assert results[-1]["lazy beside"]


def test_a_compiled_function_of_them_has_one_graph_and_is_logged(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_norm_module, "_warned", {})
    results, counts = [], []
    for model in pair(device):
        graphs: list[Any] = []
        torch._dynamo.reset()
        compiled = torch.compile(
            by_softmax, backend=lambda module, _, graphs=graphs: graphs.append(module) or module.forward
        )
        for _ in range(2):
            model.zero_grad()
            values = gradients(model, compiled(logits_of(model)).sin().sum())
        results.append(values)
        counts.append(len(graphs))
    for ours, stocks in zip(results[1], results[0], strict=True):
        assert relative(ours, stocks) < 1e-5
    assert counts == [1, 1]
    assert "torch.compile does not trace" in caplog.text

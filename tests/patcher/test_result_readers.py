"""Who reads a norm's result, by the source: every use counts, and what cannot be followed is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_norm.patcher.forward_source import SourceError
from fused_norm.patcher.result_readers import Use, uses_of_argument, uses_of_result


class Layer(nn.Module):
    def forward(self, hidden: Tensor, mask: Any = None, **kwargs: Any) -> Tensor:
        residual = hidden
        hidden = self.first(hidden)
        hidden, _ = self.attention(hidden_states=hidden, mask=mask, **kwargs)
        hidden = residual + hidden
        normed = self.second(hidden)
        return hidden + self.mlp(normed)


class Parallel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        a = self.attention(None, y)
        return x + a + self.mlp(y)


class Attention(nn.Module):
    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        shape = hidden_states.shape[:-1]
        rows = hidden_states.size(0)
        q = self.q_proj(hidden_states).view(*shape, -1)
        k, v = self.k_proj(hidden_states), self.v_proj(hidden_states).to(hidden_states.dtype)
        hidden_states = q + k + v
        return self.o_proj(hidden_states) * rows


class AsAList(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.mlp([y])


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.mlp(y[:, :1])


class NowAndThen(nn.Module):
    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        y = self.norm(x)
        if flag:
            y = self.mlp(y)
        return x


class InABranch(nn.Module):
    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        y = x
        if flag:
            y = self.norm(x)
            x = self.mlp(y)
        return x + y


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.mlp(y)
        z = self.norm(y)
        return self.mlp(z)


class Returned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Starred(nn.Module):
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        y = self.norm(x)
        return self.mlp(*more, y)


class Closed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return torch.utils.checkpoint.checkpoint(lambda: self.mlp(y))


def test_what_takes_a_result_is_found_by_position_and_by_name() -> None:
    assert uses_of_result(Layer, "first") == (Use("attention", "hidden_states"),)
    assert uses_of_result(Layer, "second") == (Use("mlp", 0),)
    assert uses_of_result(Parallel, "norm") == (Use("attention", 1), Use("mlp", 0))


@pytest.mark.parametrize("argument", [0, "hidden_states"])
def test_what_takes_an_argument_is_found_and_its_shape_and_dtype_are_not_read(argument: int | str) -> None:
    assert uses_of_argument(Attention, argument) == (Use("q_proj", 0), Use("k_proj", 0), Use("v_proj", 0))


REASONS = {
    AsAList: "its result is read otherwise too: return self.mlp([y])",
    Cut: "its result is read otherwise too: return self.mlp(y[:, :1])",
    NowAndThen: "mlp reads its result only now and then",
    InABranch: "its result may be read by what follows",
    Twice: "norm is used in several places",
    Returned: "the result of norm goes elsewhere",
    Starred: "its result is read otherwise too: return self.mlp(*more, y)",
}


@pytest.mark.parametrize("layer", REASONS, ids=lambda layer: layer.__name__)
def test_what_cannot_be_followed_is_said(layer: Any) -> None:
    with pytest.raises(SourceError) as error:
        uses_of_result(layer, "norm")
    assert str(error.value) == REASONS[layer]


def test_a_function_that_may_run_later_is_followed_too() -> None:
    assert uses_of_result(Closed, "norm") == (Use("mlp", 0),)


@pytest.mark.parametrize("argument", [5, "other", "kwargs"])
def test_an_argument_that_is_not_there_is_said(argument: int | str) -> None:
    with pytest.raises(SourceError, match="its forward takes no argument"):
        uses_of_argument(Layer, argument)

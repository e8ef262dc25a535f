"""Outputs of the linears after a norm, read off the autograd graph so that a backward can compute them again.

What made such a tensor is told by the nodes behind it: a product of matrices, with a bias or without, or with a weight
of 4 bits by bitsandbytes; the sum of it and a LoRA adapter's output, perhaps by one operator; casts. They end at an
output of a norm, which is recomputed itself, and at tensors that the nodes keep anyway: weights, and what an adapter's
second product reads, behind its dropout. So no module is asked or called, and no random number drawn. An output of
anything else is kept, also that of PyTorch's linear with a bias that is not trained, which its node does not keep.

The same library call with operands of the same shapes and memory orders makes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..kernels.linear_4bit import LINEAR_4BIT, LORA_LINEAR_4BIT
from ..kernels.lora import LORA_ADD, LORA_LINEAR, LoraLinear, Options
from ..kernels.triton.call import Call

CAST = "ToCopyBackward0"

_SAME_ORDER = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"))
"""The nodes behind views that leave the elements of a contiguous tensor in their order."""

_LEAF = "torch::autograd::AccumulateGrad"


class Recipe(NamedTuple):
    """How to compute a value again.

    Attributes:
        value: computes it.
        reads: the tensors that it is computed from.
    """

    value: Callable[[], Any]
    reads: tuple[Tensor, ...]

    @classmethod
    def from_call(cls, function: Callable[..., Any], *operands: Any) -> Recipe:
        """The recipe for what a function returns of operands, which are recipes, tensors and plain values."""
        detached = [operand.detach() if isinstance(operand, Tensor) else operand for operand in operands]
        reads: list[Tensor] = []
        for operand in detached:
            reads += operand.reads if type(operand) is Recipe else [operand] if isinstance(operand, Tensor) else []
        return cls(
            lambda: function(*[operand.value() if type(operand) is Recipe else operand for operand in detached]),
            tuple(reads),
        )


class Kept(NamedTuple):
    """A tensor that autograd saves as it is, and its version."""

    tensor: Tensor
    version: int


class Matrix(NamedTuple):
    """The output of a node as a matrix, and how to compute it again.

    Attributes:
        recipe: computes it, of shape ``[rows, columns]``.
        rows, columns: its shape.
        is_of_norm: an output of a norm is among its factors.
    """

    recipe: Recipe
    rows: int
    columns: int
    is_of_norm: bool


class LinearOutputs:
    """Finds out how to compute what nodes of a graph have made.

    Saved-tensor hooks are at work while the graph grows, and pack what nodes keep as ``Kept``, or as a recipe.

    Args:
        outputs: those that are recomputed, by node and number; ``rows_of_norm`` returns one in so many columns and a
            dtype, None unless it is a norm's.
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Mapping[tuple[Any, int], Any]) -> None:
        self._outputs = outputs

    def output_of(self, node: Any) -> Matrix | None:
        """Return how to compute the output of ``node``; None if the graph does not tell."""
        read = self._READ.get(node.name())
        return None if read is None else read(self, node)

    def _product(self, node: Any) -> Matrix | None:
        """``x @ weight``, or ``bias + x @ weight``."""
        bias: list[Tensor] = []
        if node.name() == "MmBackward0":
            edge, _ = node.next_functions
            raw_x, (rows, width) = node._raw_saved_self, node._saved_self_sym_sizes
        else:
            (leaf, _), edge, _ = node.next_functions
            if leaf is not None and leaf.name() == CAST:
                leaf, _ = leaf.next_functions[0]
            if leaf is None or leaf.name() != _LEAF or (node._saved_alpha, node._saved_beta) != (1, 1):
                return None
            bias.append(leaf.variable)
            raw_x, (rows, width) = node._raw_saved_mat1, node._saved_mat1_sym_sizes
        weight, columns = _kept(node._raw_saved_mat2), node._saved_mat2_sym_sizes[1]
        if weight is None:
            return None
        kept_x = _kept(raw_x)  # before what the graph tells, of which a cast may have been written into since
        if kept_x is not None:
            return Matrix(Recipe.from_call(_linear, kept_x, weight, *bias), rows, columns, False)
        x = self._of_norm(edge, width, weight.dtype) or self._behind(edge)
        if x is None or (x.rows, x.columns) != (rows, width):
            return None
        return Matrix(Recipe.from_call(_linear, x.recipe, weight, *bias), rows, columns, x.is_of_norm)

    def _of_norm(self, edge: Any, columns: int, dtype: torch.dtype) -> Matrix | None:
        """The output of a norm, or a cast of it, that comes by an edge, in this dtype; None for anything else."""
        node, number = _behind_views(edge)
        if node is not None and node.name() == CAST:
            node, number = node.next_functions[0]
        output = self._outputs.get((node, number))  # without a node there is none
        return None if output is None else output.rows_of_norm(columns, dtype)

    def _product_in_4_bits(self, node: Any) -> Matrix | None:
        """A product by bitsandbytes, whose node is the ``ctx`` of its ``MatMul4Bit``."""
        if not node._forward_cls.__module__.startswith("bitsandbytes."):
            return None
        _, weight = node.tensors
        columns, width = node.state.shape
        if weight is None or node.dtype_bias is not None:
            return None
        x = self._of_norm(node.next_functions[0], width, node.dtype_A)
        # bitsandbytes takes another kernel for a single row that wants no gradient.
        if x is None or x.rows < 2:
            return None
        return Matrix(Recipe.from_call(_linear_in_4_bits, x.recipe, weight, node.state), x.rows, columns, True)

    def _sum_with_adapter(self, node: Any) -> Matrix | None:
        """The output of a linear with that of its LoRA adapter, of which the node keeps what is behind its dropout."""
        if not LORA_ADD.owns(node):
            return None
        base = self._behind(node.next_functions[0])
        *_, b, h = [_kept(raw) for raw in node._raw_saved_tensors]
        if base is None or b is None or h is None:
            return None
        operands = base.recipe, h.flatten(0, -2), b, LORA_ADD.scalars_of(node)[0]
        return base._replace(recipe=Recipe.from_call(partial(Call.at_once, LORA_ADD.output_of), *operands))

    def _linear_of_4_bits(self, node: Any) -> Matrix | None:
        """The output of a linear with a weight of 4 bits, which keeps nothing of its input."""
        if not LINEAR_4BIT.owns(node):
            return None
        linear: Any = LINEAR_4BIT.unhooked_of(node)
        features, block, dtype, _ = LINEAR_4BIT.scalars_of(node)
        x = self._of_norm(node.next_functions[0], 2 * linear[1].numel() // features, dtype)
        if x is None:
            return None
        how = partial(_linear_of_4_bits, features=features, block=block, dtype=node._input_metadata[0].dtype)
        return Matrix(Recipe.from_call(how, x.recipe, *linear), x.rows, features, True)

    def _linear_with_adapter(self, node: Any) -> Matrix | None:
        """The output of a linear with its LoRA adapter, as one operator has made it."""
        operator = next((candidate for candidate in (LORA_LINEAR, LORA_LINEAR_4BIT) if candidate.owns(node)), None)
        if operator is None:
            return None
        _, _, a, b, *w, h = [_kept(saved) for saved in node._raw_saved_tensors]
        if a is None or b is None or h is None or None in w:
            return None
        linear = *w, *operator.unhooked_of(node)
        factor, drop_factor, drop_factor_back, *_, last = operator.scalars_of(node)
        y_dtype, block = node._input_metadata[0].dtype, 0 if operator is LORA_LINEAR else last
        options = Options(factor, drop_factor, drop_factor_back, h.dtype, y_dtype, block)
        x = self._of_norm(node.next_functions[1], a.shape[1], h.dtype)
        if x is None:
            return None
        how = partial(_with_adapter, operator=operator, options=options)
        recipe = Recipe.from_call(how, x.recipe, h.flatten(0, -2), b, *linear)
        return Matrix(recipe, x.rows, len(b), True)

    def _cast(self, node: Any) -> Matrix | None:
        x, metadata = self._behind(node.next_functions[0]), node._input_metadata[0]
        if x is None:
            return None
        return x._replace(recipe=Recipe.from_call(Tensor.to, x.recipe, metadata.device, metadata.dtype))

    def _behind(self, edge: Any) -> Matrix | None:
        node, _ = _behind_views(edge)
        return None if node is None else self.output_of(node)

    _READ: ClassVar[dict[str, Callable[..., Matrix | None]]] = {
        "MmBackward0": _product,
        "AddmmBackward0": _product,
        "LoraAddBackward": _sum_with_adapter,
        CAST: _cast,
        "MatMul4BitBackward": _product_in_4_bits,
        "Linear4bitBackward": _linear_of_4_bits,
        "LoraLinearBackward": _linear_with_adapter,
        "LoraLinear4bitBackward": _linear_with_adapter,
    }


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias.to(weight.dtype), x, weight)


def _linear_in_4_bits(x: Tensor, weight: Tensor, state: Any) -> Any:
    from bitsandbytes import matmul_4bit

    return matmul_4bit(x, weight, quant_state=state)


def _linear_of_4_bits(x: Tensor, *linear: Tensor | None, features: int, block: int, dtype: torch.dtype) -> Tensor:
    *weight, bias = linear
    return Call.at_once(LINEAR_4BIT.output_of, x, weight, bias, features, block, dtype)


def _with_adapter(
    x: Tensor, h: Tensor, b: Tensor, *linear: Tensor | None, operator: LoraLinear, options: Options
) -> Tensor:
    *weight, bias = linear

    def build(call: Call) -> Tensor:
        w = operator.matrix(call, weight, options.block, (len(b), x.shape[-1]), x)
        (y,) = operator.outputs_of(call, x, h, b, w, bias, options)
        return y

    return Call.at_once(build)


def _behind_views(edge: Any) -> Any:
    node, number = edge
    while node is not None and node.name() in _SAME_ORDER:
        node, number = node.next_functions[0]
    return node, number


def _kept(raw: Any) -> Tensor | None:
    """The tensor that a node keeps; None if it keeps none, what can be recomputed, or one written into since."""
    packed = raw.data
    return packed.tensor if isinstance(packed, Kept) and packed.tensor._version == packed.version else None

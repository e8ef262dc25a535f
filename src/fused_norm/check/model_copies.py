"""Deep copies of models that run themselves, also if a function on them has the model that was copied in a closure."""

from __future__ import annotations

import copy
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def deep_copy(model: nn.Module) -> Any:
    """A deep copy of a model. ``copy.deepcopy`` copies no function: a ``forward`` that other code, such as TRL, has put
    on the model would call what it has in its closure, the model's own forward.
    """
    memo: dict[int, Any] = {}
    new = copy.deepcopy(model, memo)
    copies = {id(module): memo[id(module)] for module in model.modules()}
    for module in new.modules():
        if (forward := vars(module).get("forward")) is not None:
            vars(module)["forward"] = _of_copies(forward, copies)
    return new


def _of_copies(value: Any, copies: dict[int, Any]) -> Any:
    """A function, method or module of copied modules in place of one of theirs; ``copies``: by the id of theirs."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, MethodType):
        function, owner = (_of_copies(part, copies) for part in (value.__func__, value.__self__))
        return value if (function, owner) == (value.__func__, value.__self__) else MethodType(function, owner)
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = tuple(CellType() for _ in value.__closure__)
    new = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    copies[id(value)] = new  # a function may have itself in its closure
    full = [pair for pair in zip(cells, value.__closure__, strict=True) if pair[1] != CellType()]
    for cell, old in full:
        cell.cell_contents = _of_copies(old.cell_contents, copies)
    own = {name: _of_copies(each, copies) for name, each in vars(value).items()}
    parts = [(cell.cell_contents, old.cell_contents) for cell, old in full]
    parts += [(own[name], each) for name, each in vars(value).items()]
    if all(part is old or old is value for part, old in parts):  # the class's own forward, for example
        copies[id(value)] = value
        return value
    new.__kwdefaults__, new.__qualname__, new.__doc__ = value.__kwdefaults__, value.__qualname__, value.__doc__
    vars(new).update(own)
    return new

"""A key for what a function or a module computes, made of all that its code can reach: equal keys, equal results.

From the function or module, the root, everything is followed that code reaches by name: variables of functions around,
defaults, globals and the attributes of modules among them, methods and other members of the root's class and of its
bases, attributes of the instance, which may hide those. What is reached is described in full: a function by its code
and what that reaches in turn, a container by its contents, a class by its members, an immutable value by itself.

A thing that cannot be described so is unknown: an object of somebody's class, what reads the environment, a flag of
PyTorch, or a name that is computed. Then there is no key. Only functions that are listed here, and the operators of
PyTorch, are taken for what they are; those flags of PyTorch that change what operators compute are in every key.
No key holds a class, module or function alive, and comparing keys runs no code of what they describe.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import math
import sys
import warnings
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from ..kernels.operator import dispatch_modes
from .hooks import function_mode
from .running_code import Identity

_MOST_THINGS = 1000
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: no attribute of such a class can be set

_PLAIN = frozenset(map(id, (
    bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented), torch.dtype, torch.layout,
    torch.memory_format,
)))  # fmt: skip
"""Types of immutable values, by identity, as a metaclass may answer anything when it is asked for a hash.

A class that derives from one of them may have attributes, and is none.
"""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}

_INERT = frozenset({
    "__module__", "__qualname__", "__doc__", "__annotations__", "__dict__", "__weakref__", "__slots__", "__constants__",
    "__init_subclass__", "__class_getitem__", "__orig_bases__", "__parameters__", "__firstlineno__",
    "__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__type_params__",
})  # fmt: skip
"""Members of classes that no operator calls; code that names one of them has no key."""

_MAKE = "__new__", "__init__"
_DUNDERS = frozenset({"__class__", "__dict__", "__call__", "__getattr__", "__getattribute__", *_MAKE}) | {
    name for kind in (int, float, list, dict) for name in vars(kind) if name not in _INERT
}
"""Names with underscores that code may use; others, such as ``__globals__``, lead to what is not followed."""

_COMPUTED = frozenset({"getattr", "hasattr", "__getattribute__", "__getattr__", "__dict__"})
"""Names by which code can read attributes that it does not name."""

_DOORS = frozenset({
    "gi_frame", "cr_frame", "ag_frame",
    "bernoulli", "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_",
})  # fmt: skip
"""Attributes that lead to the variables of other functions, and methods of tensors that read random numbers."""

_REGISTRY = "transformers.activations", "ClassInstantier"
"""A dict of classes, each with arguments perhaps, whose items are made of their class and of nothing else."""

_RANDOM = "rand", "bernoulli", "multinomial", "normal", "poisson", "dropout"
_READ = ("LOAD_ATTR", "LOAD_METHOD")
_LOAD_VARIABLE = frozenset({
    "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF",
})  # fmt: skip

_FUNCTIONS: frozenset[Any] = frozenset({
    abs, all, any, bin, callable, chr, divmod, format, getattr, hasattr, hash, hex, isinstance, issubclass, iter, len,
    max, min, next, oct, ord, pow, print, repr, round, sorted, sum,
    torch._C._has_torch_function, torch._C._has_torch_function_unary, torch._C._has_torch_function_variadic,
    torch.overrides.handle_torch_function, warnings.warn,
})  # fmt: skip
_MODULES = frozenset(map(id, (math, sys.modules["_operator"], torch._C._nn)))
"""Functions, and modules of C with such, that compute from nothing but their arguments."""

_METHODS = {id(vars(module)): module.__file__ for module in (torch._tensor, torch.functional, nn_module)}
"""By their variables, the files of the modules in which methods of tensors and modules are defined."""

_OF_C = (MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType, ClassMethodDescriptorType)
_ABSENT = object()

# A metaclass may answer anything.
_members_of, _bases_of, _flags_of, _module_of = (
    type.__dict__[name].__get__ for name in ("__dict__", "__mro__", "__flags__", "__module__")
)


def _is_method_of_torch(function: FunctionType) -> bool:
    """Return whether a function is PyTorch's own method of tensors or modules, with the code that it is defined by."""
    name = function.__code__.co_qualname
    is_method = name.startswith(("Tensor.", "Module.", "_handle_torch_function")) or name in (
        "split",
        "_forward_unimplemented",
    )
    return is_method and function.__code__.co_filename == _METHODS.get(id(function.__globals__))


_OF_TORCH = {
    kind: {
        name: (member, getattr(member, "__code__", None))
        for name, member in vars(kind).items()
        if type(member) is not FunctionType or _is_method_of_torch(member)
    }
    for kind in (Tensor, nn.Module)
}


class Reached(NamedTuple):
    """The code and values that a function or module reaches.

    Attributes:
        key: equal for what would compute the same; None if something is reached that no value tells from another.
        foreign: the name of the first thing that is no Python over PyTorch: a Triton kernel, an extension's function,
            another's autograd function; None without one.
        unknown: the name of the first thing that keeps it from having a key; None if it has one.
        outcomes: what was found out about it, for as long as it is known to be the same: in ``no_code_changes``.
    """

    key: Any
    foreign: str | None
    unknown: str | None
    outcomes: dict[Any, Any]


_seen: ContextVar[dict[Any, tuple[Any, Reached]] | None] = ContextVar("fused_norm_reached", default=None)
"""The results of ``reached_by`` in ``no_code_changes``, by ``_kind_of_root``, each with its root.

While that root lives, no other one has its identity.
"""


def reached_by(root: Any) -> Reached:
    """Return what a function or a module uses when it is called, but for parameters, buffers and hooks."""
    seen = _seen.get()
    if seen is None:
        return _Walk(root).reached()
    alike = _kind_of_root(root)
    if alike not in seen:
        seen[alike] = root, _Walk(root).reached()
    return seen[alike][1]


@contextlib.contextmanager
def no_code_changes() -> Iterator[None]:
    """Look at a function once within this ``with``, in which no code is replaced, and at one of modules alike."""
    token = _seen.set({})
    try:
        yield
    finally:
        _seen.reset(token)


def _kind_of_root(root: Any) -> Any:
    """Return what is equal for modules that use the same at any one time: of one class, with equal plain attributes."""
    if issubclass(type(root), nn.Module):
        own = {name: value_of(value) for name, value in own_attributes(root).items()}
        if all(value is not None for value in own.values()):
            return id(type(root)), tuple(own.items())
    return id(root)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The instance's attributes without those that every module has: parameters, hooks, training flag, forward."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def value_of(thing: Any) -> tuple[str, Any] | None:
    """Return an immutable value in a form that is equal for the same value alone; None if a thing is none.

    Neither 1 and True nor 0.0 and -0.0 are the same.
    """
    kind = type(thing)
    if id(kind) in _PLAIN:
        return kind.__name__, thing
    if kind is float:
        return "float", thing.hex()
    if kind is complex or kind is torch.device:
        return kind.__name__, repr(thing)
    return None


class _Walk:
    """Numbers all that a root reaches, and describes each of these things; in a description others are numbers."""

    def __init__(self, root: Any) -> None:
        self._unknown: str | None = None
        self._foreign: str | None = None
        own = _changeable_bases(type(root)) if issubclass(type(root), nn.Module) else []
        self._places = [(base, _members_of(base)) for base in (Tensor, *own)]
        self._things = [root]
        self._numbers = {id(root): 0}

    def reached(self) -> Reached:
        """The descriptions of all things, the root's first, with PyTorch's flags, as the key."""
        found: list[Any] = [_flags_of_torch(), self._unnamed_members()]
        if found[0] is None:
            self._meet_unknown("a mode of PyTorch, or a global hook")
        for thing in self._things:  # grows meanwhile
            if len(self._things) > _MOST_THINGS:
                self._meet_unknown(f"more than {_MOST_THINGS} things")
                break
            try:
                found.append(self._describe(thing))
            except Exception:  # what others define may answer the simplest question with anything
                self._meet_unknown(_name_of(thing))
        key = tuple(found)
        try:
            hash(key)
        except TypeError:  # of code, whose constants can be replaced
            self._meet_unknown("an unhashable constant")
        return Reached(key if self._unknown is None else None, self._foreign, self._unknown, {})

    def _unnamed_members(self) -> Any:
        """The methods that operators and Python itself call, although no code names them."""
        return tuple([
            (number, name, self._of(member))
            for number, (base, members) in enumerate(self._places)
            for name, member in _unusual(base, members)
            if _is_dunder(name) and name not in _MAKE
        ])  # fmt: skip

    def _of(self, thing: Any) -> Any:
        """An immutable value as such; of anything else its number, which a new thing gets here."""
        if (value := value_of(thing)) is not None:
            return value
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._things)
            self._things.append(thing)
        return self._numbers[id(thing)]

    def _all_of(self, things: Iterable[Any]) -> tuple[Any, ...]:
        return tuple([self._of(thing) for thing in things])

    def _items_of(self, things: Iterable[tuple[Any, Any]]) -> tuple[Any, ...]:
        return tuple([(self._of(name), self._of(thing)) for name, thing in things])

    def _describe(self, thing: Any) -> Any:
        """Describe a thing by values that can be compared; it is asked for its type, and nothing else.

        A class that derives from one of these types may do anything, so it is another.
        """
        kind: Any = type(thing)
        if kind is FunctionType:
            return self._of_function(thing)
        if kind is MethodType:
            return "method", self._of(thing.__func__), self._of(thing.__self__)
        if kind is BuiltinFunctionType:
            return self._of_builtin(thing)
        if kind in (tuple, list, set, frozenset):
            return kind.__name__, self._all_of(thing)
        if kind is dict:
            return "dict", self._items_of(thing.items())
        if kind is staticmethod or kind is classmethod:
            return kind.__name__, self._of(thing.__func__)
        if kind is property:
            return "property", self._all_of((thing.fget, thing.fset, thing.fdel))
        if kind is functools.partial:
            given = self._of(thing.func), self._all_of(thing.args), self._items_of(thing.keywords.items())
            return "partial", *given, self._items_of(vars(thing).items())
        if kind in _OF_C and _is_immutable(thing.__objclass__):
            return kind.__name__, thing.__qualname__
        if issubclass(kind, nn.Module):
            return self._of_module(thing)
        if issubclass(kind, type):
            return self._of_class(thing)
        return self._meet_object(thing)

    def _of_function(self, function: FunctionType) -> Any:
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        given = (
            self._all_of(function.__defaults__ or ()),
            self._items_of((function.__kwdefaults__ or {}).items()),
            self._items_of(vars(function).items()),
        )
        if function in _FUNCTIONS or _is_method_of_torch(function):
            return "given", code, *given
        if _is_given(function.__globals__.get("__name__")):
            self._meet_unknown(f"{function.__globals__['__name__']}.{code.co_qualname}")
            return None
        names = _names_in(code)
        if names.door is not None:
            self._meet_unknown(names.door)
        variables = [self._variable(function, cells, chain, names) for chain in names.chains]
        members = []
        for number, (base, place) in enumerate(self._places):
            read = [name for name in names.attributes if name in place]
            if names.computes:
                read += [name for name, _ in _unusual(base, place)]
            members += [(number, name, self._of(place[name])) for name in read]
        return "function", code, *given, tuple(variables), tuple(members)

    def _variable(self, function: Any, cells: Mapping[str, CellType], chain: tuple[str, ...], names: _Names) -> Any:
        """What a variable holds, or in a module the attribute that code reads at once, with the names of both."""
        name = chain[0]
        if name in cells:
            try:
                value = cells[name].cell_contents
            except ValueError:
                return chain, "empty"
            if name == "__class__" and any(value is base for base, _ in self._places):
                return chain, "own"  # its members are followed by the names that code uses
        else:
            value = function.__globals__.get(name, function.__builtins__.get(name, _ABSENT))
            if value is _ABSENT:
                return chain, "absent"
        for place, attribute in enumerate(chain[1:], 2):
            if not issubclass(type(value), ModuleType):
                break  # what is no module is described with its attributes
            members = vars(value)
            computed = [*map(_members_of, _changeable_bases(type(value)))]
            if attribute not in members or any(attribute in one for one in computed):
                self._meet_unknown(".".join(chain[:place]))  # code of the module tells what it is
                return chain, "computed"
            value = members[attribute]
        if issubclass(type(value), ModuleType):
            self._meet_module(value, ".".join(chain), names.attributes)
            return chain, "module"
        if (_module_of(type(value)), type(value).__qualname__) == _REGISTRY and chain in names.subscripted:
            found = self._of_registry(value, names.subscripted[chain], function)
            if found is not None:
                return chain, found
        return chain, self._of(value)

    def _meet_module(self, module: ModuleType, name: str, attributes: tuple[str, ...]) -> None:
        """A module by itself: code may read any attribute of it, and is followed where it names one."""
        self._meet_unknown(name)
        places = [vars(module)]
        for place in places:  # grows meanwhile
            for found in (place[one] for one in attributes if one in place):
                self._of(found)
                if issubclass(type(found), ModuleType) and all(vars(found) is not one for one in places):
                    places.append(vars(found))

    def _of_registry(self, registry: Any, attribute: str, function: FunctionType) -> Any:
        """What a registry makes of the string in an attribute of the root; None if it is another's, or no string."""
        root = self._things[0]
        is_method = issubclass(type(root), nn.Module) and type(root).forward is function
        name = own_attributes(root).get(attribute) if is_method else None
        if type(name) is not str or any(attribute in members for _, members in self._places):
            return None
        return name, self._of(type(registry)), self._of(dict.get(registry, name))

    def _of_builtin(self, function: BuiltinFunctionType) -> Any:
        """A function of C by its name, if it reads nothing but its arguments."""
        owner: Any = function.__self__
        place = function.__module__ or "builtins"
        operator = getattr(torch._C._VariableFunctions, function.__name__, None)
        if operator is function or id(owner) in _MODULES:
            if any(part in function.__name__ for part in _RANDOM):
                self._meet_unknown(function.__name__)
        elif issubclass(type(owner), type) and _is_immutable(owner):  # such as dict.fromkeys
            place = owner.__module__
        elif function not in _FUNCTIONS:
            self._meet_unknown(f"{place}.{function.__qualname__}")
            if not _is_given(place):
                self._meet_foreign(function)
        return "builtin", place, function.__qualname__

    def _of_module(self, module: nn.Module) -> Any:
        if module is not self._things[0]:
            self._meet_unknown(_name_of(module))  # with a training flag, hooks and parameters
        return "module", self._of(type(module).forward), self._items_of(own_attributes(module).items())

    def _of_class(self, found: Any) -> Any:
        """A class as itself, with all members of its own, of its bases and of its metaclass."""
        place = _module_of(found)
        if found is Tensor or (_is_immutable(found) and place in ("builtins", "torch")):
            return "class", place, found.__qualname__
        if issubclass(found, torch.autograd.Function) and not _is_given(place):
            self._meet_foreign(found)
        bases = _changeable_bases(found)
        followed = [base for base in bases if base is nn.Module or not _is_given(_module_of(base))]
        if followed != bases or not followed:
            self._meet_unknown(f"{place}.{found.__qualname__}")
        return "class", Identity(found), tuple([self._items_of(_unusual(base, _members_of(base))) for base in followed])

    def _meet_object(self, thing: Any) -> None:
        """An object whose inside is not looked at."""
        place = _module_of(type(thing))
        if isinstance(place, str) and place.partition(".")[0] == "triton":
            self._meet_foreign(type(thing))
        if type(thing) is functools._lru_cache_wrapper:  # what it remembers is in no key
            self._of(thing.__wrapped__)
        self._meet_unknown(_name_of(thing))

    def _meet_foreign(self, thing: Any) -> None:
        self._foreign = self._foreign or f"{thing.__module__}.{thing.__qualname__}"
        self._meet_unknown(self._foreign)

    def _meet_unknown(self, name: str) -> None:
        self._unknown = self._unknown or name


def _flags_of_torch() -> Any:
    """The flags that change what operators compute; None if code of others sees operators or modules called."""
    if nn_module._has_any_global_hook() or dispatch_modes() or function_mode() is not None:
        return None
    return (
        torch.get_default_dtype(),
        _precision_of_products(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_mkldnn_enabled(),
    )


def _precision_of_products() -> Any:
    """The precision of products of float32. PyTorch's older interface raises once its newer one was used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backends: Any = torch.backends
        return backends.fp32_precision, backends.mkldnn.matmul.fp32_precision, backends.cuda.matmul.fp32_precision


def _name_of(thing: Any) -> str:
    return f"an object of {type.__dict__['__name__'].__get__(type(thing))}"


def _is_given(place: Any) -> bool:
    """Return whether a module is Python's or PyTorch's, whose code is not followed: not that of PyTorch's layers."""
    if type(place) is not str:
        return False
    top, _, inner = place.partition(".")
    layers = inner.startswith("nn.") and inner != "nn.modules.module"
    return top in sys.stdlib_module_names or (top == "torch" and not layers)


def _is_immutable(found: Any) -> bool:
    """Return whether no attribute of a class can be set."""
    return bool(_flags_of(found) & _IMMUTABLE_TYPE)


def _changeable_bases(found: type) -> list[type]:
    """The classes in which an attribute of a class or its instances is looked up, but for those that never change."""
    metaclass = () if type(found) is ABCMeta else _bases_of(type(found))
    return [base for base in (*_bases_of(found), *metaclass) if not _is_immutable(base)]


def _unusual(base: type, members: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The members of a class that code may use without naming them; of PyTorch's those that others have put there."""
    found = [(name, one) for name, one in members.items() if name not in _INERT and not _is_of_dynamo(one)]
    if base is not Tensor and base is not nn.Module:
        return found
    known = [_OF_TORCH[base].get(name, (_ABSENT, None)) for name, _ in found]
    return [
        one
        for one, (member, code) in zip(found, known, strict=True)
        if one[1] is not member or (code is not None and member.__code__ is not code)
    ]


def _is_of_dynamo(member: Any) -> bool:
    """Return whether Dynamo has put a member on ``nn.Module``, to know modules that a compiled function makes."""
    return type(member) is FunctionType and member.__globals__.get("__name__") == "torch._dynamo.mutation_guard"


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Names(NamedTuple):
    """The names that code uses.

    Attributes:
        chains: variables that are no local ones, each with the attributes that are read off it at once.
        attributes: all attributes, and all strings that may be some, as ``getattr`` takes them.
        computes: it may read attributes that it does not name.
        subscripted: by a chain, the attribute of the first argument that code looks up in it: ``TABLE[self.name]``.
        door: a name that leads to what is not followed, or to random numbers; None without one.
    """

    chains: tuple[tuple[str, ...], ...]
    attributes: tuple[str, ...]
    computes: bool
    subscripted: dict[tuple[str, ...], str]
    door: str | None


@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> _Names:
    """Return the names that a code object, or one inside it, uses."""
    codes = [code]
    for one in codes:  # grows meanwhile
        codes += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    chains: dict[tuple[str, ...], str | None] = {}
    imported = None
    for one in codes:
        ops = [(op.opname, op.argval) for op in dis.get_instructions(one) if op.opname != "EXTENDED_ARG"]
        for place, (kind, name) in enumerate(ops):
            if kind in _LOAD_VARIABLE:
                read = [value for _, value in itertools.takewhile(lambda op: op[0] in _READ, ops[place + 1 :])]
                kinds, values = zip(*ops[place + len(read) + 1 :][:3], strict=True)
                subscripted = (
                    one is code
                    and kinds == ("LOAD_FAST", "LOAD_ATTR", "BINARY_SUBSCR")
                    and values[0] == code.co_varnames[0]
                    and ("STORE_FAST", values[0]) not in ops
                )
                chain = (name, *read)
                chains[chain] = values[1] if subscripted and chains.get(chain, values[1]) == values[1] else None
            elif kind == "IMPORT_NAME":
                imported = name
    strings = [constant for one in codes for constant in one.co_consts if type(constant) is str]
    attributes = [*(name for one in codes for name in one.co_names), *filter(str.isidentifier, strings)]
    first = {chain[0] for chain in chains}
    if "type" in first or "__class__" in attributes:  # which may be called
        attributes += _MAKE
    doors = (name for name in attributes if name in _DOORS or (_is_dunder(name) and name not in _DUNDERS))
    return _Names(
        tuple(chains),
        tuple(dict.fromkeys(attributes)),
        not _COMPUTED.isdisjoint([*first, *attributes]),
        {chain: name for chain, name in chains.items() if name is not None},
        imported or next(doors, None),
    )

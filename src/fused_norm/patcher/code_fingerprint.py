"""A fingerprint of a function or a module, made of all that its code can reach: equal keys, equal results.

Everything is followed that code reaches by name: variables of enclosing functions, defaults, globals, attributes of
modules, members of the root's class and its bases, and attributes of the instance, which may hide those. A function is
described by its code and by what that reaches in turn, a container by its contents, a class by its members, an
immutable value by itself.

If something cannot be described so, there is no key: an object of somebody's class, what reads the environment, a flag
of PyTorch, a name that is computed. Only the functions listed here and the operators of PyTorch are trusted to depend
on nothing but their arguments; the flags of PyTorch that change what operators compute are in every key. No key keeps a
class, module or function alive, and comparing keys runs no code of what they describe.
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

_UNFOLLOWED = frozenset({
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


class Fingerprint(NamedTuple):
    """The code and values that a function or module reaches.

    Attributes:
        key: equal for roots that compute the same; None if something is reached that cannot be compared by value.
        native: the name of the first thing that is not Python over PyTorch (a Triton kernel, a function of an
            extension, an autograd function of others), or None.
        unknown: the name of the first thing that prevents a key, or None.
        results: what recognition found out about this root. Used if there is no key, within ``no_code_changes``.
    """

    key: Any
    native: str | None
    unknown: str | None
    results: dict[Any, Any]


_cache: ContextVar[dict[Any, tuple[Any, Fingerprint]] | None] = ContextVar("fused_norm_fingerprints", default=None)
"""The fingerprints within ``no_code_changes``, each with its root, which keeps that root's ``id`` from being reused."""


def fingerprint(root: Any) -> Fingerprint:
    """Return what a function or a module uses when it is called, except parameters, buffers and hooks."""
    cache = _cache.get()
    if cache is None:
        return _Traversal(root).fingerprint()
    cache_key: Any = id(root)
    if issubclass(type(root), nn.Module):
        own = {name: value_of(value) for name, value in own_attributes(root).items()}
        if None not in own.values():  # modules of one class with equal plain attributes reach the same
            cache_key = id(type(root)), tuple(own.items())
    if cache_key not in cache:
        cache[cache_key] = root, _Traversal(root).fingerprint()
    return cache[cache_key][1]


@contextlib.contextmanager
def no_code_changes() -> Iterator[None]:
    """Cache fingerprints while no code is replaced: one for each function, and for each kind of module."""
    token = _cache.set({})
    try:
        yield
    finally:
        _cache.reset(token)


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


class _Traversal:
    """Describes everything that a root reaches. Things are numbered; a description refers to other things by number."""

    def __init__(self, root: Any) -> None:
        self._unknown: str | None = None
        self._native: str | None = None
        own = _changeable_bases(type(root)) if issubclass(type(root), nn.Module) else []
        self._classes = [(base, _members_of(base)) for base in (Tensor, *own)]
        self._things = [root]
        self._numbers = {id(root): 0}

    def fingerprint(self) -> Fingerprint:
        """The key: PyTorch's flags, then the descriptions of all things, the root's first."""
        flags = _flags_of_torch()
        if flags is None:
            self._note_unknown("a mode of PyTorch, or a global hook")
        # Methods that operators and Python itself call, although no code names them.
        implicit = [
            (number, name, self._ref(member))
            for number, (base, members) in enumerate(self._classes)
            for name, member in _unusual(base, members)
            if _is_dunder(name) and name not in _MAKE
        ]
        descriptions: list[Any] = [flags, tuple(implicit)]
        for thing in self._things:  # grows meanwhile
            if len(self._things) > _MOST_THINGS:
                self._note_unknown(f"more than {_MOST_THINGS} things")
                break
            try:
                descriptions.append(self._describe(thing))
            except Exception:  # code of others may answer the simplest question with anything
                self._note_unknown(_name_of(thing))
        key = tuple(descriptions)
        try:
            hash(key)
        except TypeError:  # code whose constants were replaced
            self._note_unknown("an unhashable constant")
        return Fingerprint(key if self._unknown is None else None, self._native, self._unknown, {})

    def _ref(self, thing: Any) -> Any:
        """An immutable value as such; the number of anything else, which is described later."""
        if (value := value_of(thing)) is not None:
            return value
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._things)
            self._things.append(thing)
        return self._numbers[id(thing)]

    def _refs(self, *things: Any) -> tuple[Any, ...]:
        return tuple([self._ref(thing) for thing in things])

    def _items(self, things: Iterable[tuple[Any, Any]]) -> tuple[Any, ...]:
        return tuple([self._refs(*item) for item in things])

    def _describe(self, thing: Any) -> Any:
        """Describe a thing by comparable values. Only its exact type is asked: a subclass may do anything."""
        kind: Any = type(thing)
        if kind is FunctionType:
            return self._function(thing)
        if kind is MethodType:
            return "method", *self._refs(thing.__func__, thing.__self__)
        if kind is BuiltinFunctionType:
            return self._builtin(thing)
        if kind in (tuple, list, set, frozenset):
            return kind.__name__, self._refs(*thing)
        if kind is dict:
            return "dict", self._items(thing.items())
        if kind is staticmethod or kind is classmethod:
            return kind.__name__, self._ref(thing.__func__)
        if kind is property:
            return "property", self._refs(thing.fget, thing.fset, thing.fdel)
        if kind is functools.partial:
            items = self._items(thing.keywords.items()), self._items(vars(thing).items())
            return "partial", self._refs(thing.func, *thing.args), items
        if kind in _OF_C and _is_immutable(thing.__objclass__):
            return kind.__name__, thing.__qualname__
        if issubclass(kind, nn.Module):
            if thing is not self._things[0]:
                self._note_unknown(_name_of(thing))  # with a training flag, hooks and parameters
            return "module", self._ref(kind.forward), self._items(own_attributes(thing).items())
        if issubclass(kind, type):
            return self._class(thing)
        place = _module_of(kind)
        if isinstance(place, str) and place.partition(".")[0] == "triton":
            self._note_native(kind)
        if kind is functools._lru_cache_wrapper:  # what it remembers is in no key
            self._ref(thing.__wrapped__)
        self._note_unknown(_name_of(thing))
        return None

    def _function(self, function: FunctionType) -> Any:
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        own = (
            self._refs(*(function.__defaults__ or ())),
            self._items((function.__kwdefaults__ or {}).items()),
            self._items(vars(function).items()),
        )
        if function in _FUNCTIONS or _is_method_of_torch(function):
            return "trusted", code, *own
        if _is_of_python_or_torch(function.__globals__.get("__name__")):
            self._note_unknown(f"{function.__globals__['__name__']}.{code.co_qualname}")
            return None
        names = _names_in(code)
        if names.unfollowed is not None:
            self._note_unknown(names.unfollowed)
        variables = [self._variable(function, cells, chain, names) for chain in names.chains]
        members = []
        for number, (base, place) in enumerate(self._classes):
            read = [name for name in names.attributes if name in place]
            if names.computes:
                read += [name for name, _ in _unusual(base, place)]
            members += [(number, name, self._ref(place[name])) for name in read]
        return "function", code, *own, tuple(variables), tuple(members)

    def _variable(self, function: Any, cells: Mapping[str, CellType], chain: tuple[str, ...], names: _Names) -> Any:
        """A variable's value, or of a module the attribute that is read from it at once, with the names of both."""
        name = chain[0]
        if name in cells:
            try:
                value = cells[name].cell_contents
            except ValueError:
                return chain, "empty"
            if name == "__class__" and any(value is base for base, _ in self._classes):
                return chain, "own"  # its members are followed by the names that code uses
        else:
            value = function.__globals__.get(name, function.__builtins__.get(name, _ABSENT))
            if value is _ABSENT:
                return chain, "absent"
        for length, attribute in enumerate(chain[1:], 2):
            if not issubclass(type(value), ModuleType):
                break  # anything else is described with its attributes
            members = vars(value)
            computed = map(_members_of, _changeable_bases(type(value)))
            if attribute not in members or any(attribute in place for place in computed):
                self._note_unknown(".".join(chain[:length]))  # code of the module computes it
                return chain, "computed"
            value = members[attribute]
        if issubclass(type(value), ModuleType):
            self._module(value, ".".join(chain), names.attributes)
            return chain, "module"
        if (_module_of(type(value)), type(value).__qualname__) == _REGISTRY and chain in names.subscripted:
            item = self._registry_item(value, names.subscripted[chain], function)
            if item is not None:
                return chain, item
        return chain, self._ref(value)

    def _module(self, module: ModuleType, name: str, attributes: tuple[str, ...]) -> None:
        """A Python module by itself has no key, as any attribute may be read; those that code names are followed."""
        self._note_unknown(name)
        places = [vars(module)]
        for place in places:  # grows meanwhile
            for value in (place[attribute] for attribute in attributes if attribute in place):
                self._ref(value)
                if issubclass(type(value), ModuleType) and all(vars(value) is not place for place in places):
                    places.append(vars(value))

    def _registry_item(self, registry: Any, attribute: str, function: FunctionType) -> Any:
        """The item of a registry that a string attribute of the root names; None if it is no such string."""
        root = self._things[0]
        is_method = issubclass(type(root), nn.Module) and type(root).forward is function
        name = own_attributes(root).get(attribute) if is_method else None
        if type(name) is not str or any(attribute in members for _, members in self._classes):
            return None
        return name, *self._refs(type(registry), dict.get(registry, name))

    def _builtin(self, function: BuiltinFunctionType) -> Any:
        """A function of C by its name, if it reads nothing but its arguments."""
        owner: Any = function.__self__
        place = function.__module__ or "builtins"
        operator = getattr(torch._C._VariableFunctions, function.__name__, None)
        if operator is function or id(owner) in _MODULES:
            if any(part in function.__name__ for part in _RANDOM):
                self._note_unknown(function.__name__)
        elif issubclass(type(owner), type) and _is_immutable(owner):  # such as dict.fromkeys
            place = owner.__module__
        elif function not in _FUNCTIONS:
            self._note_unknown(f"{place}.{function.__qualname__}")
            if not _is_of_python_or_torch(place):
                self._note_native(function)
        return "builtin", place, function.__qualname__

    def _class(self, cls: Any) -> Any:
        """A class by its identity, with all members of its own, of its bases and of its metaclass."""
        place = _module_of(cls)
        if cls is Tensor or (_is_immutable(cls) and place in ("builtins", "torch")):
            return "class", place, cls.__qualname__
        if issubclass(cls, torch.autograd.Function) and not _is_of_python_or_torch(place):
            self._note_native(cls)
        bases = _changeable_bases(cls)
        followed = [base for base in bases if base is nn.Module or not _is_of_python_or_torch(_module_of(base))]
        if followed != bases or not followed:
            self._note_unknown(f"{place}.{cls.__qualname__}")
        return "class", Identity(cls), tuple([self._items(_unusual(base, _members_of(base))) for base in followed])

    def _note_native(self, thing: Any) -> None:
        self._native = self._native or f"{thing.__module__}.{thing.__qualname__}"
        self._note_unknown(self._native)

    def _note_unknown(self, name: str) -> None:
        self._unknown = self._unknown or name


def _flags_of_torch() -> Any:
    """The flags that change what operators compute; None if code of others sees operators or modules called."""
    if nn_module._has_any_global_hook() or dispatch_modes() or function_mode() is not None:
        return None
    try:
        precision: Any = torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch's older interface, once its newer one was used
        backends: Any = torch.backends
        precision = backends.fp32_precision, backends.mkldnn.matmul.fp32_precision, backends.cuda.matmul.fp32_precision
    deterministic, mkldnn = torch.are_deterministic_algorithms_enabled(), torch._C._get_mkldnn_enabled()
    return torch.get_default_dtype(), precision, deterministic, mkldnn


def _name_of(thing: Any) -> str:
    return f"an object of {type.__dict__['__name__'].__get__(type(thing))}"


def _is_of_python_or_torch(place: Any) -> bool:
    """Return whether a module is of Python or PyTorch, whose code is not followed, other than PyTorch's layers."""
    if type(place) is not str:
        return False
    top, _, inner = place.partition(".")
    layers = inner.startswith("nn.") and inner != "nn.modules.module"
    return top in sys.stdlib_module_names or (top == "torch" and not layers)


def _is_immutable(cls: Any) -> bool:
    """Return whether no attribute of a class can be set."""
    return bool(_flags_of(cls) & _IMMUTABLE_TYPE)


def _changeable_bases(cls: type) -> list[type]:
    """The mutable classes in which an attribute of a class or its instances is looked up."""
    metaclass = () if type(cls) is ABCMeta else _bases_of(type(cls))
    return [base for base in (*_bases_of(cls), *metaclass) if not _is_immutable(base)]


def _unusual(base: type, members: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The members of a class that code may use without naming them; of PyTorch's classes, those that others added."""
    stock_members = _OF_TORCH[base] if base is Tensor or base is nn.Module else {}
    unusual = []
    for name, member in members.items():
        stock, code = stock_members.get(name, (_ABSENT, None))
        is_stock = stock is member and (code is None or member.__code__ is code)
        # Dynamo puts a function on nn.Module, to know modules that a compiled function makes.
        place = member.__globals__.get("__name__") if type(member) is FunctionType else None
        if name not in _INERT and not is_stock and place != "torch._dynamo.mutation_guard":
            unusual.append((name, member))
    return unusual


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Names(NamedTuple):
    """The names that code uses.

    Attributes:
        chains: variables that are not local, each with the attributes that are read from it at once.
        attributes: all attributes, and all strings that may be some, as ``getattr`` takes them.
        computes: it may read attributes that it does not name.
        subscripted: by chain, the attribute of the first argument that code looks up in it: ``TABLE[self.name]``.
        unfollowed: a name that leads to what is not followed, or to random numbers; or None.
    """

    chains: tuple[tuple[str, ...], ...]
    attributes: tuple[str, ...]
    computes: bool
    subscripted: dict[tuple[str, ...], str]
    unfollowed: str | None


@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> _Names:
    """Return the names that a code object, or one inside it, uses."""
    codes = [code]
    for inner in codes:  # grows meanwhile
        codes += [constant for constant in inner.co_consts if isinstance(constant, CodeType)]
    chains: dict[tuple[str, ...], str | None] = {}
    imported = None
    for inner in codes:
        ops = [(op.opname, op.argval) for op in dis.get_instructions(inner) if op.opname != "EXTENDED_ARG"]
        for place, (kind, name) in enumerate(ops):
            if kind in _LOAD_VARIABLE:
                read = [value for _, value in itertools.takewhile(lambda op: op[0] in _READ, ops[place + 1 :])]
                kinds, values = zip(*ops[place + len(read) + 1 :][:3], strict=True)
                subscripted = (
                    inner is code
                    and kinds == ("LOAD_FAST", "LOAD_ATTR", "BINARY_SUBSCR")
                    and values[0] == code.co_varnames[0]
                    and ("STORE_FAST", values[0]) not in ops
                )
                chain = (name, *read)
                chains[chain] = values[1] if subscripted and chains.get(chain, values[1]) == values[1] else None
            elif kind == "IMPORT_NAME":
                imported = name
    strings = [constant for inner in codes for constant in inner.co_consts if type(constant) is str]
    attributes = [*(name for inner in codes for name in inner.co_names), *filter(str.isidentifier, strings)]
    variables = {chain[0] for chain in chains}
    if "type" in variables or "__class__" in attributes:  # which may be called
        attributes += _MAKE
    unfollowed = (name for name in attributes if name in _UNFOLLOWED or (_is_dunder(name) and name not in _DUNDERS))
    return _Names(
        tuple(chains),
        tuple(dict.fromkeys(attributes)),
        not _COMPUTED.isdisjoint([*variables, *attributes]),
        {chain: name for chain, name in chains.items() if name is not None},
        imported or next(unfollowed, None),
    )

"""A recognition is cached only if its key has all flags of the code; other ways to hold a flag prevent caching."""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import contextvars
import functools
import logging
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode

import fused_norm
from fused_norm.kernels.reference import rms_norm
from fused_norm.patcher.activation_recognition import recognise_activation
from fused_norm.patcher.code_fingerprint import fingerprint
from fused_norm.patcher.norm_recognition import recognise
from fused_norm.patcher.probe import UnrecognisedError
from fused_norm.patcher.rotation_recognition import recognise_rotation

SETTINGS = types.ModuleType("settings")
SETTINGS.flag = False  # type: ignore[attr-defined]
sys.modules["settings_of_a_test"] = SETTINGS

FLAG = False
LIST, SET, DICT, NESTED = [False], {0}, {"flag": False}, {"inner": [{"flag": False}]}
ORDERED, LOCAL, VARIABLE = collections.OrderedDict(flag=False), threading.local(), contextvars.ContextVar("flag")
LOCAL.flag = False
VARIABLE.set(False)
LOGGER, TENSOR = logging.getLogger("a flag"), torch.zeros(1)


class Owner:
    pass


class Meta(type):
    flag = False

    @property
    def computed(cls) -> bool:
        return Owner.flag  # type: ignore[attr-defined]


class OfMeta(metaclass=Meta):
    pass


class Config:
    flag, values = False, [False]
    inst: Any = None

    class Inner:
        flag = False

    def __init__(self) -> None:
        self.flag = False

    def method(self) -> bool:
        return Config.flag

    @classmethod
    def of_class(cls) -> bool:
        return cls.flag

    @staticmethod
    def static() -> bool:
        return Config.flag


Owner.flag = False  # type: ignore[attr-defined]
Config.inst = Config()
INSTANCE = Config()


Pair = collections.namedtuple("Pair", "flag")
PAIR = Pair([False])


def attached() -> bool:
    return attached.flag  # type: ignore[attr-defined]


attached.flag = False  # type: ignore[attr-defined]


def with_default(flags: list[bool] = LIST, *, named: dict[str, bool] = DICT) -> bool:
    return flags[0] or named["flag"]


def reads_flag() -> bool:
    return FLAG


@functools.lru_cache
def remembering() -> bool:
    return FLAG


def closed_over() -> tuple[Callable[[], bool], Callable[[bool], None]]:
    flag = False

    def write(value: bool) -> None:
        nonlocal flag
        flag = value

    return lambda: flag, write


READ_CLOSED, WRITE_CLOSED = closed_over()
PARTIAL = functools.partial(lambda flags: flags[0], LIST)
BOUND = INSTANCE.method
BUILTIN = DICT.get


OTHER_MODULE = nn.Identity().eval()


class Doubled(TorchFunctionMode):
    """A mode that doubles the result of ``torch.rsqrt``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.rsqrt else result


class Descriptor:
    def __get__(self, instance: Any, owner: Any) -> bool:
        return FLAG


class OfBase(nn.Module):
    of_base = False
    in_list, described = [False], Descriptor()

    @property
    def of_property(self) -> bool:
        return FLAG


@contextlib.contextmanager
def done(do: Callable[[], Any], undo: Callable[[], Any]) -> Iterator[None]:
    do()
    try:
        yield
    finally:
        undo()


def changed(thing: Any, name: Any, value: Any) -> contextlib.AbstractContextManager[None]:
    """Give an attribute, or an item of a container, another value inside the ``with``."""
    if isinstance(thing, list):
        write = functools.partial(operator.setitem, thing, name)
        return done(functools.partial(write, value), functools.partial(write, thing[name]))
    patch = pytest.MonkeyPatch()
    write = patch.setitem if isinstance(thing, MutableMapping) else functools.partial(patch.setattr, raising=False)
    return done(functools.partial(write, thing, name, value), patch.undo)


def here(value: bool) -> contextlib.AbstractContextManager[None]:
    return changed(sys.modules[__name__], "FLAG", value)


def cached() -> contextlib.AbstractContextManager[None]:
    stack = contextlib.ExitStack()
    stack.callback(remembering.cache_clear)
    stack.enter_context(here(True))
    remembering.cache_clear()
    return stack


def of(read: Callable[[Any], Any], *written: Any) -> Way:
    return read, lambda: changed(*written)


Way = tuple[Callable[[Any], Any], Callable[[], contextlib.AbstractContextManager[Any]]]

# fmt: off
WAYS: dict[str, Way] = {
    "a global": (lambda self: FLAG, lambda: here(True)),
    "a global of Python": of(lambda self: a_flag_of_python, builtins, "a_flag_of_python", True),  # noqa: F821
    "the global of a function": (lambda self: reads_flag(), lambda: here(True)),
    "a list": of(lambda self: LIST[0], LIST, 0, True),
    "a dict": of(lambda self: DICT["flag"], DICT, "flag", True),
    "a nested dict": of(lambda self: NESTED["inner"][0]["flag"], NESTED["inner"][0], "flag", True),
    "a set": (lambda self: 1 in SET, lambda: done(lambda: SET.add(1), lambda: SET.discard(1))),
    "the length of a list": (lambda self: len(LIST) > 1, lambda: done(lambda: LIST.append(True), LIST.pop)),
    "an OrderedDict": of(lambda self: ORDERED["flag"], ORDERED, "flag", True),
    "a tensor": (lambda self: TENSOR.item(), lambda: done(lambda: TENSOR.fill_(1), lambda: TENSOR.fill_(0))),
    "a local of the thread": of(lambda self: LOCAL.flag, LOCAL, "flag", True),
    "a context variable": (lambda self: VARIABLE.get(),
                           lambda: done(lambda: VARIABLE.set(True), lambda: VARIABLE.set(False))),
    "os.getenv": (lambda self: os.getenv("FLAG_OF_A_TEST"), lambda: changed(os.environ, "FLAG_OF_A_TEST", "1")),
    "os.environ": (lambda self: "FLAG_OF_A_TEST" in os.environ, lambda: changed(os.environ, "FLAG_OF_A_TEST", "1")),
    "a logger": of(lambda self: LOGGER.level == logging.DEBUG, LOGGER, "level", logging.DEBUG),
    "the seed of PyTorch": (lambda self: torch.initial_seed() == 5,
                            lambda: done(lambda: torch.manual_seed(5), lambda: torch.manual_seed(0))),
    "a class": of(lambda self: Config.flag, Config, "flag", True),
    "a list on a class": of(lambda self: Config.values[0], Config.values, 0, True),
    "a class in a class": of(lambda self: Config.Inner.flag, Config.Inner, "flag", True),
    "an object on a class": of(lambda self: Config.inst.flag, Config.inst, "flag", True),
    "an object": of(lambda self: INSTANCE.flag, INSTANCE, "flag", True),
    "a named tuple": of(lambda self: PAIR.flag[0], PAIR.flag, 0, True),
    "a bound method": of(lambda self: BOUND(), Config, "flag", True),
    "a bound method of C": of(lambda self: BUILTIN("flag"), DICT, "flag", True),
    "a class method": of(lambda self: Config.of_class(), Config, "flag", True),
    "a static method": of(lambda self: Config.static(), Config, "flag", True),
    "a metaclass": of(lambda self: OfMeta.flag, Meta, "flag", True),
    "a property of a metaclass": of(lambda self: OfMeta.computed, Owner, "flag", True),
    "an attribute of a function": of(lambda self: attached.flag, attached, "flag", True),
    "an attribute of a function's own": of(lambda self: attached(), attached, "flag", True),
    "an annotation of a function": of(lambda self: attached.__annotations__["return"] is True,
                                      attached.__annotations__, "return", True),
    "a default": of(lambda self: with_default(), LIST, 0, True),
    "a named default": of(lambda self: with_default(), DICT, "flag", True),
    "a variable of a function around": (lambda self: READ_CLOSED(),
                                        lambda: done(lambda: WRITE_CLOSED(True), lambda: WRITE_CLOSED(False))),
    "a partial function": of(lambda self: PARTIAL(), LIST, 0, True),
    "a cache": (lambda self: remembering(), cached),
    "a module": of(lambda self: SETTINGS.flag, SETTINGS, "flag", True),
    "a module by another name": of(lambda self: (lambda module: module.flag)(SETTINGS), SETTINGS, "flag", True),
    "an import": (lambda self: __import__("settings_of_a_test").flag, lambda: changed(SETTINGS, "flag", True)),
    "sys.modules": of(lambda self: sys.modules["settings_of_a_test"].flag, SETTINGS, "flag", True),
    "a global by a computed name": (lambda self: globals()["".join("FLAG")], lambda: here(True)),
    "a computed attribute of a module": of(lambda self: getattr(SETTINGS, "".join("flag")), SETTINGS, "flag", True),
    "the globals of a function": (lambda self: reads_flag.__globals__["".join("FLAG")], lambda: here(True)),
    "eval": (lambda self: eval("".join("FLAG")), lambda: here(True)),
    "training of another module": of(lambda self: OTHER_MODULE.training, OTHER_MODULE, "training", True),
    "an attribute of nn.Module": of(lambda self: getattr(self, "a_flag", False), nn.Module, "a_flag", True),
    "an attribute of Tensor": of(lambda self: getattr(torch.Tensor, "a_flag", False), torch.Tensor, "a_flag", True),
    "an operator of tensors": of(lambda self: torch.zeros(()) * 1, torch.Tensor, "__mul__", lambda *_: torch.ones(())),
    "the class of the module": of(lambda self: self.of_base, OfBase, "of_base", True),
    "a list on the class of the module": of(lambda self: self.in_list[0], OfBase.in_list, 0, True),
    "a descriptor on the class of the module": (lambda self: self.described, lambda: here(True)),
    "a property of the module": (lambda self: self.of_property, lambda: here(True)),
    "a computed attribute of the module": of(lambda self: getattr(self, "_".join(("of", "base"))),
                                             OfBase, "of_base", True),
    "the type of the module": of(lambda self: type(self).of_base, OfBase, "of_base", True),
    "the default dtype": (lambda self: torch.ones(1).dtype == torch.float64, lambda: done(
        lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32))),
    "the precision of products": (lambda self: torch.get_float32_matmul_precision() == "medium", lambda: done(
        lambda: torch.set_float32_matmul_precision("medium"), lambda: torch.set_float32_matmul_precision("highest"))),
    "a flag of MKL-DNN": of(lambda self: torch.backends.mkldnn.deterministic,
                            torch.backends.mkldnn, "deterministic", True),
    "deterministic algorithms": (lambda self: torch.are_deterministic_algorithms_enabled(), lambda: done(
        lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False))),
    "torch.is_grad_enabled": (lambda self: not torch.is_grad_enabled(), torch.no_grad),
    "a mode of PyTorch": (lambda self: torch.rsqrt(torch.ones(())) > 1.5, Doubled),
    "a global hook": of(lambda self: len(nn_module._global_forward_hooks), nn_module._global_forward_hooks, 0, print),
}
# fmt: on

NAMED = (
    "an object on a class", "a list on a class", "an attribute of a function", "a metaclass", "a local of the thread",
    "os.getenv", "a logger", "training of another module", "a global by a computed name", "a flag of MKL-DNN",
    "the default dtype",
)  # fmt: skip
QUICK = ("an object on a class", "os.getenv")


def unlike_others() -> Iterator[Any]:
    """Yield objects that have no hash, or whose methods raise errors or return tensors or nonsense."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("not to be asked")

    def tensor(*_: Any) -> Any:
        return torch.ones(3)

    methods = ("__eq__", "__hash__", "__repr__", "__bool__", "__len__", "__iter__")
    for answer in (fails, tensor):
        meta = type("MetaOf" + answer.__name__, (type,), dict.fromkeys(methods, answer))
        kind = meta("Of" + answer.__name__, (), dict.fromkeys(methods, answer) | {"__class__": property(answer)})
        yield kind()
        yield kind
        for base in (str, float, dict):
            yield type(f"{base.__name__}_{answer.__name__}", (base,), dict.fromkeys(methods, answer))()
    yield from (os.environ, {1, 2}, {1: {2}}, collections.deque([1]), argparse.Namespace(), collections.ChainMap())
    yield from (10**5000, float("nan"), slice(1), range(3), Ellipsis, "\ud800", memoryview(b"1"), iter([1]))
    yield weakref.ref(argparse.Namespace())
    yield weakref.proxy(INSTANCE)
    yield type("Nowhere", (), {"__module__": None})
    yield types.FunctionType((lambda: 1).__code__, {"__name__": None})
    yield types.FunctionType((lambda: 1).__code__.replace(co_consts=(None, [1])), globals())
    yield type("Computed", (types.ModuleType,), {"__getattr__": fails})("computed")
    yield functools.partial(print, collections.deque())


def norm_that_reads(flag: Callable[[Any], Any]) -> type[nn.Module]:
    """Return a class of norms that multiply by their weight, or by the weight plus 1 if the flag is set."""

    class Norm(OfBase):
        is_set = flag

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(16)), 1e-6

        def forward(self, x):
            y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
            if self.is_set():
                return (y * (1.0 + self.weight.float())).to(x.dtype)
            return self.weight * y.to(x.dtype)

    return Norm


def rotation_that_reads(flag: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a rotary embedding that turns the other way round if the flag is set."""

    def half(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((second, -first) if flag(None) else (-second, first), dim=-1)

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + half(q) * sin, k * cos + half(k) * sin

    return rotate


def activation_that_reads(flag: Callable[[Any], Any]) -> Callable[..., Any]:
    def act(x):
        return nn.functional.gelu(x) if flag(None) else nn.functional.silu(x)

    return act


@pytest.fixture(autouse=True)
def a_global_of_python(monkeypatch) -> None:
    monkeypatch.setattr(builtins, "a_flag_of_python", False, raising=False)


@pytest.mark.parametrize("way", WAYS)
def test_a_flag_is_in_the_key_or_there_is_none(way: str) -> None:
    flag, flipped = WAYS[way]
    norm = norm_that_reads(flag)
    before = fingerprint(norm())
    assert not flag(norm())
    with flipped():
        assert flag(norm()), "the way is none"
        after = fingerprint(norm())
    if before.key is None:
        assert before.unknown
    else:
        assert after.key != before.key, "remembered as it was"
    assert fingerprint(norm()).key == before.key


@pytest.mark.parametrize("way", NAMED)
def test_what_a_fresh_site_computes_is_recognised_after_a_flag_was_flipped(way: str) -> None:
    flag, flipped = WAYS[way]
    norm, rotate, act = norm_that_reads(flag), rotation_that_reads(flag), activation_that_reads(flag)
    x = torch.randn(3, 5, 16)

    def agrees(module: nn.Module) -> bool:
        spec = recognise(module).spec
        return torch.equal(rms_norm(spec, x, module.weight), module(x))

    assert agrees(norm())
    assert recognise_activation(act).formula == "silu"
    if way in QUICK:
        assert recognise_rotation(rotate).function is rotate
    with flipped():
        assert agrees(norm())
        assert recognise(norm()).spec.zero_centered
        assert recognise_activation(act).formula == "gelu"
        if way in QUICK:
            with pytest.raises(UnrecognisedError, match="does not compute a rotation of pairs"):
                recognise_rotation(rotate)
    assert agrees(norm())
    assert recognise_activation(act).formula == "silu"


@pytest.mark.parametrize("number", range(len(list(unlike_others()))))
def test_no_error_comes_out_of_a_key_whatever_a_thing_answers(number: int) -> None:
    thing = list(unlike_others())[number]

    def act(x):
        return nn.functional.silu(x) if thing is not None else thing

    model = norm_that_reads(lambda self: False)()
    vars(model)["held"] = thing
    for root in (act, model, functools.partial(act, thing), lambda x, held=thing: held):
        first, second = (fingerprint(root).key for _ in range(2))
        assert first == second
        assert hash(first) == hash(second)
    assert recognise_activation(act).formula == "silu"
    x = torch.randn(3, 16)
    expected = model(x)
    report = fused_norm.apply_fused_norm(model)
    assert report.counts["norm"] == 1, report.table()
    assert torch.allclose(model(x), expected)

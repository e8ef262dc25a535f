"""Checks before each replay of a layer's CUDA graphs: is all that its forward may read as it was at the capture?

A forward reads its arguments (``Arguments``), its modules and their attributes (``Snapshot``), and flags of the process
(``flags``). Whatever is not in these is not seen: attributes of objects below attributes, class attributes other than
``forward`` and ``__call__``, globals, closures, and what is written into a tensor by other means than PyTorch's.
"""

from __future__ import annotations

import itertools
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from ..kernels.switch import switch, why_seen_by_mode
from ..kernels.triton.devices import is_transformed
from .hooks import stock_class

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, MethodType, partial, type, Enum)
GRAPHS = "_fused_norm_graphs"
"""The attribute of a layer that holds its graphs."""

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_NOT_READ = _OF_MODULES | {GRAPHS, "forward"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS: Mapping[Any, str] = {
    nn.ModuleList: "_modules",
    nn.ModuleDict: "_modules",
    nn.ParameterList: "_parameters",
    nn.ParameterDict: "_parameters",
}
"""Modules without a forward, and what they hold."""

_LEAVES: Mapping[Any, tuple[str, ...]] = {nn.Linear: (), nn.Dropout: ("p", "training", "inplace"), nn.Identity: ()}
"""The attributes that the forwards of PyTorch's own modules read, besides their parameters."""

_HOLDERS = (dict, list, tuple, set, frozenset)
_CLASS = attrgetter("forward", "__call__")
_CLASS_AND_CODE = attrgetter("forward", "__call__", "forward.__code__")
_values_of = methodcaller("values")
_requires_grad = attrgetter("requires_grad")

_SPECS = 1024
"""Kinds of arguments that are told apart at a time."""

UNREAD = "num_items_in_batch"
"""The argument that trainers pass down to layers, none of which reads it; it is another number in each step."""

_RECORDER = "transformers.utils.output_capturing"
"""The module with the hooks by which transformers 5 returns hidden states and attentions."""

_LINEAR = functional.linear
_new_number = itertools.count()


def _meta_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad, tensor.stride(), tensor.device


class RunEagerError(Exception):
    """The reason why a call of a layer runs eager.

    Attributes:
        is_there: a function that returns whether the reason is still there, if it lies in a module.
    """

    def __init__(self, reason: str, is_there: Callable[[], bool] = lambda: False) -> None:
        super().__init__(reason)
        self.is_there = is_there


class UnreadArgument:
    """Stands for an argument while a layer is captured; the capture fails if it is used."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def _refuse(self, *_: Any) -> Any:
        raise RunEagerError(f"it reads {object.__getattribute__(self, '_name')}")

    __contains__ = __setitem__ = __delitem__ = __setattr__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getattr__ = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class WatchedDict(UserDict[Any, Any]):
    """A dictionary that layers hand to each other, with a note of whether a layer looks into it.

    Attributes:
        is_used: whether it has.
    """

    def __init__(self, watched: UserDict[Any, Any]) -> None:
        self.is_used, self._watched = False, watched

    @property
    def data(self) -> Any:  # type: ignore[override]
        """Its contents, which are those of the watched one."""
        self.is_used = True
        return self._watched.data

    def __getattr__(self, name: str) -> Any:
        self.is_used = True
        return getattr(self._watched, name)


class Arguments(NamedTuple):
    """The arguments of a call, taken apart.

    Attributes:
        number: equal for calls whose arguments differ in the contents of tensors alone.
        spec: their structure, with the values of all that are not tensors, and the properties of those that are; of
            those that most layers do not look at, the names.
        tensors: the tensors, in the order of ``spec``.
    """

    number: int
    spec: tuple[Any, ...]
    tensors: list[Tensor]

    @property
    def first(self) -> tuple[Any, ...]:
        """The properties of the first tensor."""
        return _meta_of(self.tensors[0])

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments with these tensors."""
        rest = iter(tensors)
        positional, named, unread = self.spec
        args = [_value_of(spec, rest) for spec in positional]
        kwargs: dict[str, Any] = {name: _value_of(spec, rest) for name, spec in named}
        return args, kwargs | {name: UnreadArgument(name) for name in unread}


def _is_unread(name: str, value: Any) -> bool:
    """Return whether a named argument is one that layers get and most do not look at."""
    return (name == UNREAD and value is not None) or isinstance(value, UserDict)


def _spec_of(value: Any, tensors: list[Tensor], name: str) -> tuple[Any, ...]:
    kind = type(value)
    if kind is Tensor:
        tensors.append(value)
        return Tensor, *_meta_of(value)
    if kind in (tuple, list):
        return kind, *[_spec_of(element, tensors, name) for element in value]
    if kind in _PLAIN:
        return *_plain_key(value), value
    more = ": pass use_cache=False" if "Cache" in kind.__name__ else ""
    raise RunEagerError(f"{name} is a {kind.__name__}{more}")


def _value_of(spec: tuple[Any, ...], tensors: Iterator[Tensor]) -> Any:
    kind = spec[0]
    if kind is Tensor:
        return next(tensors)
    return kind(_value_of(inner, tensors) for inner in spec[1:]) if kind in (tuple, list) else spec[2]


class LatestArguments:
    """The arguments of the latest call of any layer, so that those of the next one are only compared with them.

    Layers of a model get the same objects one after the other, all but the first one, the hidden states, which are not
    held here.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._arguments: Arguments | None = None
        self._names: tuple[str, ...] = ()
        self._values: tuple[Any, ...] = ()
        self._first: tuple[Any, ...] = ()
        self._metas: list[tuple[Any, ...]] = []

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call, taken apart.

        Raises:
            RunEagerError: for an argument that is neither a tensor, nor a number, string or None, nor a tuple or list
                of these.
        """
        last = self._arguments
        if (
            last is not None
            and args
            and type(args[0]) is Tensor
            and tuple(kwargs) == self._names
            and len(args) + len(kwargs) == len(self._values) + 1
            and all(map(is_, (*args[1:], *kwargs.values()), self._values))
            and _meta_of(args[0]) == self._first
            and list(map(_meta_of, last.tensors)) == self._metas
        ):
            return last._replace(tensors=[args[0], *last.tensors])
        self.forget()
        tensors: list[Tensor] = []
        unread = tuple([name for name, value in kwargs.items() if _is_unread(name, value)])
        positional = tuple([_spec_of(value, tensors, "an argument") for value in args])
        named = tuple([(name, _spec_of(value, tensors, name)) for name, value in kwargs.items() if name not in unread])
        spec = positional, named, unread
        if len(self._numbers) > _SPECS:
            self._numbers.clear()
        number = self._numbers.get(spec)
        if number is None:
            number = self._numbers[spec] = next(_new_number)
        arguments = Arguments(number, spec, tensors)
        others = arguments.tensors[1:]
        values = (*args[1:], *kwargs.values())
        is_first = bool(args) and type(args[0]) is Tensor
        may_keep = not any(isinstance(value, (list, UserDict)) for value in values)  # these change, and hold a graph
        if is_first and may_keep and not any(t.requires_grad for t in others):
            self._arguments = arguments._replace(tensors=others)
            self._names, self._values = tuple(kwargs), values
            self._first, self._metas = _meta_of(args[0]), list(map(_meta_of, others))
        return arguments

    def forget(self) -> None:
        """Let go of the arguments."""
        self._arguments, self._values = None, ()


def flags(device: torch.device) -> tuple[Any, ...]:
    """The flags of the process and the thread that decide which kernels a forward launches.

    Raises:
        RunEagerError: for those under which a replay would leave out what somebody sees or keeps.
    """
    core, kind = torch._C, device.type
    autograd: Any = core._autograd
    if torch_module._has_any_global_hook():
        raise RunEagerError("a global module hook is set")
    if core._current_graph_task_id() != -1:
        raise RunEagerError("it is called inside a backward, as gradient checkpointing does")
    if not autograd._saved_tensors_hooks_is_enabled() or autograd._top_saved_tensors_default_hooks(True) is not None:
        raise RunEagerError("saved-tensor hooks are active, as under gradient checkpointing or offloading")
    if core._len_torch_dispatch_stack() or why_seen_by_mode() is not None:
        raise RunEagerError("a mode is active that sees the functions that are called")
    if torch.is_inference_mode_enabled() or torch.is_anomaly_enabled():
        raise RunEagerError("inference mode or anomaly detection is on")
    if is_transformed():
        raise RunEagerError("a transform of torch.func is active")
    if functional.linear is not _LINEAR:
        raise RunEagerError("torch.nn.functional.linear was replaced")
    return (
        torch.is_grad_enabled(),
        switch.depth == 0,
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.utils._device.CURRENT_DEVICE,
        torch.are_deterministic_algorithms_enabled(),
        core._get_cudnn_deterministic(),
        core._get_cudnn_benchmark(),
        # Whichever setting they come from: ``allow_tf32`` raises if others than itself were used.
        core._get_fp32_precision_getter("cuda", "matmul"),
        core._get_fp32_precision_getter("cuda", "conv"),
        core._get_cublas_allow_bf16_reduced_precision_reduction(),
        core._get_cublas_allow_fp16_reduced_precision_reduction(),
        core._get_cublas_allow_fp16_accumulation(),
        core._get_flash_sdp_enabled(),
        core._get_mem_efficient_sdp_enabled(),
        core._get_math_sdp_enabled(),
        core._get_cudnn_sdp_enabled(),
        *core._get_sdp_priority_order(),
    )


class Snapshot:
    """All that a layer's forward may read of its modules, as it was at one time.

    A layer of a large model has a thousand such values in as many places of memory, which costs more than to compare
    them: so they are read by few loops in C, and compared with one list.

    Attributes:
        number: new for each snapshot, until ``cuda_graphs`` sets it to that of an older one with an equal ``key``.
        key: all that the snapshot saw, as values and ids.
        modules: the layer and all modules in it.
        parameters: the parameters of ``modules``, each once.
        buffers: the buffers of ``modules``, and other tensors among their attributes.
        is_in_place: a function that returns whether tensors have the memory that they had.
    """

    def __init__(self, layer: nn.Module) -> None:
        """Look at a layer.

        Raises:
            RunEagerError: for a module with hooks or somebody's forward, and for attributes of a kind whose own
                attributes nobody compares.
        """
        self.number = next(_new_number)
        self.modules = list(layer.modules())
        self._key: list[Any] = []
        self._attributes: list[tuple[Callable[[Any], tuple[Any, ...]], Mapping[str, Any]]] = []
        self._with_forward: list[nn.Module] = []
        self._owns: list[Mapping[str, Any]] = []
        self._mappings: list[Mapping[str, Any]] = []
        self._sequences: list[Any] = []
        self._sets: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {}
        self._tensors: dict[int, Tensor] = {}
        self._recorded: set[str] = set()
        self._handles = RemovableHandle.next_id
        self._look_at_classes()
        for module in self.modules:
            self._look_at_module(module, is_layer=module is layer)
        self._check_recorder()
        tensors = self._tensors.values()
        self.parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        self.buffers = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        self._values = self._read()
        self.key = tuple(self._key)
        self.is_in_place = _memory_test(tensors)

    def is_now(self) -> bool:
        """Return whether all but the memory of tensors is as it was."""
        if RemovableHandle.next_id != self._handles:  # somebody has put on a hook, of a module or a tensor
            if self._keys_of_hooks() != self._hook_keys:
                return False
            self._handles = RemovableHandle.next_id
        values = self._read()
        if len(values) != len(self._values):
            return False
        if not all(map(is_, values, self._values)) and not self._takes_over(values):
            return False
        return all(copy == value for value, copy in self._sets) and (
            not self._recorded or _records_none(self._recorded)
        )

    def _takes_over(self, values: tuple[Any, ...]) -> bool:
        """Return whether all replaced objects are lists equal to the old ones; then the new ones are compared from now.

        PEFT makes a list for each layer whenever it activates an adapter, twice a step if the reference model is one.
        """
        others = [(old, new) for old, new in zip(self._values, values, strict=True) if old is not new]
        if not all(_are_equal_lists(old, new) for old, new in others):
            return False
        are_there = set(map(id, values))
        lists = {id(held): held for held in self._sequences}
        for old, new in others:
            lists[id(new)] = new
            if id(old) not in are_there:
                lists.pop(id(old), None)
        self._sequences = list(lists.values())
        self._values = self._read()
        return True

    def _read(self) -> tuple[Any, ...]:
        layer = vars(self.modules[0])
        return (
            *chain.from_iterable([read(cls) for read, cls in self._classes]),
            *map(type, self._with_forward),
            *map(_requires_grad, self._tensors.values()),
            *chain.from_iterable([read(attributes) for read, attributes in self._attributes]),
            len(layer) - ("forward" in layer),  # which is around its graphs, as in transformers 4
            *map(len, self._owns),
            *map(len, self._mappings),
            *chain.from_iterable(map(_values_of, self._mappings)),
            *map(len, self._sequences),
            *chain.from_iterable(self._sequences),
        )

    def _look_at_classes(self) -> None:
        classes = dict.fromkeys(map(type, self.modules))
        classes |= dict.fromkeys(map(stock_class, self.modules))
        self._classes = [
            (_CLASS_AND_CODE if isinstance(getattr(cls, "forward", None), FunctionType) else _CLASS, cls)
            for cls in classes
        ]
        self._key += [tuple(map(id, read(cls))) for read, cls in self._classes]

    def _look_at_module(self, module: nn.Module, *, is_layer: bool) -> None:
        own, cls = vars(module), type(module)
        for group in ("_modules", "_parameters", "_buffers"):
            held: Mapping[str, Any] = own[group]
            if held or (cls not in _LEAVES and cls not in _CONTAINERS) or _CONTAINERS.get(cls) == group:
                self._mappings.append(held)
            for name, value in held.items():
                self._key.append((name, id(value)))
                if isinstance(value, Tensor):
                    self._look_at_tensor(value)
        if cls in _CONTAINERS:
            return
        what = stock_class(module).__name__
        self._with_forward.append(module)
        if not is_layer:
            self._owns.append(own)
        self._key.append(id(cls))
        if not is_layer:  # its own hooks, forward and compiler are around its graphs

            def has_hooks() -> bool:
                return any(_keys_of_hooks(own[name]) is None for name in _HOOKS)

            if has_hooks():
                raise RunEagerError(f"{what} inside has hooks", has_hooks)
            self._recorded.update(key for name in _HOOKS for key in _keys_of_hooks(own[name]) or ())
            forward = own.get("forward")
            if forward is not None and getattr(forward, "__func__", None) is not cls.forward:
                raise RunEagerError(f"the forward of {what} inside was replaced", lambda: own.get("forward") is forward)
            if module._compiled_call_impl is not None:
                raise RunEagerError(f"{what} inside is compiled")
        names = _LEAVES.get(cls)
        if names is None:
            read = _names_read_by(stock_class(module))  # type: ignore[arg-type]
            names = tuple([name for name in own if name not in _NOT_READ and (read is None or name in read)])
        if what.endswith("GatedDeltaNet"):
            raise RunEagerError(f"gradients of {what} inside were not those of eager in the last place", lambda: True)
        if names:
            self._attributes.append((_getter(*names), own))
        for name in names:
            self._look_at(own[name], f"{name} of {what}")

    def _look_at_tensor(self, tensor: Tensor) -> None:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor
            self._key.append((id(tensor), tensor.requires_grad))
            state = getattr(tensor, "quant_state", None)
            if state is not None:
                self._attributes.append((_getter("quant_state"), vars(tensor)))
                self._look_at(state, "quant_state of a weight")

    def _look_at(self, value: Any, what: str) -> None:
        """Look at the value of an attribute or an element, which is compared by identity, and at what is in it."""
        kind = type(value)
        if kind in _PLAIN:
            self._key.append(_plain_key(value))
            return
        self._key.append(kind if kind in _HOLDERS else id(value))
        if isinstance(value, Tensor):
            self._look_at_tensor(value)
        elif isinstance(value, _BY_IDENTITY) or id(value) in self._seen:
            return
        elif kind in _HOLDERS:
            self._seen[id(value)] = value
            self._look_inside(value, what)
        elif _is_config(value):
            self._seen[id(value)] = value
            self._look_inside(vars(value), what, is_config=True)
        elif kind.__name__ == "QuantState" and kind.__module__.startswith("bitsandbytes."):
            self._seen[id(value)] = value
            self._look_inside(vars(value), what)
        else:
            raise RunEagerError(f"nobody compares {what}, a {kind.__name__}")

    def _look_inside(self, held: Any, what: str, *, is_config: bool = False) -> None:
        """Look at all in a container; objects in a configuration are compared by identity alone."""
        if isinstance(held, (set, frozenset)):
            if not all(type(element) in _PLAIN for element in held):
                raise RunEagerError(f"nobody compares {what}, a set of objects")
            self._sets.append((held, frozenset(held)))
            self._key.append(frozenset(held))
            return
        is_mapping = isinstance(held, dict)
        (self._mappings if is_mapping else self._sequences).append(held)
        self._key.append(len(held))
        for key, value in held.items() if is_mapping else enumerate(held):
            if type(key) not in _PLAIN:
                raise RunEagerError(f"nobody compares {what}, whose keys are objects")
            self._key.append(key)
            if is_config and type(value) not in (*_PLAIN, *_HOLDERS):
                self._key.append(id(value))
                self._seen[id(value)] = value
            else:
                self._look_at(value, what)

    def _check_recorder(self) -> None:
        if self._recorded and not _records_none(self._recorded):
            raise RunEagerError("outputs of modules inside are recorded, as by output_attentions=True")
        self._hook_keys = self._keys_of_hooks()

    def _keys_of_hooks(self) -> list[set[str] | None]:
        return [_keys_of_hooks(vars(module)[name]) for module in self.modules[1:] for name in _HOOKS]


def _memory_test(tensors: Iterable[Tensor]) -> Callable[[], bool]:
    """A function that returns whether tensors have the memory, the dtype and the form that they have now.

    Raises:
        RunEagerError: for tensors whose memory others give and take.
    """
    values: dict[str, Any] = {}
    tests: list[str] = []
    for tensor in tensors:
        if tensor.is_meta:
            raise RunEagerError("a parameter is on the meta device")
        if type(tensor) not in (Tensor, nn.Parameter) and type(tensor).__name__ not in ("Params4bit", "Int8Params"):
            raise RunEagerError(f"a parameter is a {type(tensor).__name__}")
        if hasattr(tensor, "ds_id"):
            raise RunEagerError("DeepSpeed's ZeRO-3 gives parameters other memory in each step")
        if tensor.requires_grad and type(tensor) is not nn.Parameter:
            raise RunEagerError("a weight that needs a gradient is no plain parameter")
        for prefix, value in (("t", tensor), ("d", tensor.dtype), ("s", tensor.shape), ("p", tensor.stride())):
            values[f"{prefix}{len(tests)}"] = value
        n = len(tests)
        tests.append(
            f"t{n}.data_ptr() == {tensor.data_ptr()} and t{n}.dtype is d{n} and t{n}.shape == s{n}"
            f" and t{n}.stride() == p{n}"
        )
    function: Callable[[], bool] = eval("lambda: " + (" and ".join(tests) or "True"), values)
    return function


@lru_cache(maxsize=256)
def _names_read_by(cls: type[nn.Module]) -> frozenset[str] | None:
    """The names in the code that the forward of one of PEFT's layers may reach; None for other classes.

    A LoRA layer has a dozen dictionaries, most of which only say how it was made.
    """
    if not cls.__module__.startswith("peft.tuners."):
        return None
    names: set[str] = set()
    waiting, seen = ["forward"], set()
    while waiting:
        name = waiting.pop()
        for base in cls.__mro__:
            value = vars(base).get(name)
            function = value.fget if isinstance(value, property) else value
            if base is nn.Module or not isinstance(function, FunctionType) or function in seen:
                continue
            seen.add(function)
            new = set(_names_in(function.__code__)) - names
            names |= new
            waiting += new
    return frozenset(names)


def _names_in(code: CodeType) -> Iterator[str]:
    """The names, and the strings, in a function's code and in the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant


@lru_cache(maxsize=1024)
def _getter(*names: str) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns a tuple of a mapping's values for these names."""
    getter: Callable[[Any], tuple[Any, ...]] = itemgetter(*names, names[0])
    return getter


def is_plain_value(value: Any) -> bool:
    """Return whether a value is a number, a string, None or the like."""
    return type(value) in _PLAIN


def _plain_key(value: Any) -> Any:
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _are_equal_lists(one: Any, other: Any) -> bool:
    """Return whether two objects are lists of the same numbers, strings and the like."""
    return (
        type(one) is type(other) is list
        and all(map(is_plain_value, chain(one, other)))
        and list(map(_plain_key, one)) == list(map(_plain_key, other))
    )


def _is_config(value: Any) -> bool:
    """Return whether a value is a configuration of transformers."""
    return any(cls.__name__ in ("PretrainedConfig", "PreTrainedConfig") for cls in type(value).__mro__)


def _keys_of_hooks(hooks: Mapping[int, Any]) -> set[str] | None:
    """The keys that transformers' own hooks record outputs for; None if there are other hooks.

    Once outputs were asked for, these hooks stay, and return at once unless outputs are asked for again.
    """
    keys: set[str] = set()
    for hook in hooks.values():
        if getattr(hook, "__module__", "") != _RECORDER or hook.__code__.co_freevars[-1] != "key":
            return None
        keys.add(hook.__closure__[-1].cell_contents)
    return keys


def _records_none(keys: set[str]) -> bool:
    """Return whether transformers records no outputs for these keys now."""
    collected = sys.modules[_RECORDER]._active_collector.get()
    return collected is None or keys.isdisjoint(collected)

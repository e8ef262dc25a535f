"""What a layer's forward may read, asked before each replay of its CUDA graphs: is it as it was at the capture?

A forward reads its arguments (``Arguments``), its modules and their attributes (``Snapshot``), and flags of the process
(``flags``). Whatever is not in these is not seen: attributes of objects below attributes, class attributes other than
``forward`` and ``__call__``, globals, closures, and what is written into a tensor by other means than PyTorch's.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from ..kernels.triton.devices import is_transformed
from .fused_norm_module import switch
from .hooks import function_mode, stock_class

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, MethodType, partial, type, Enum)
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward."""

_SPECS = 1024
"""Kinds of arguments that are told apart at a time."""

UNREAD = "num_items_in_batch"
"""The argument that trainers pass down to layers, none of which reads it; it is another number in each step."""

_RECORDER = "transformers.utils.output_capturing"
"""The module with the hooks by which transformers 5 returns hidden states and attentions."""

GRAPHS = "_fused_norm_graphs"
"""The attribute of a layer that holds its graphs."""

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

    def _refuse(self, *_: Any) -> Any:
        raise RunEagerError(f"it reads {UNREAD}")

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getattr__ = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Arguments(NamedTuple):
    """The arguments of a call, taken apart.

    Attributes:
        number: equal for calls whose arguments differ in the contents of tensors alone.
        spec: their structure, with the values of all that are not tensors, and the properties of those that are.
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
        return args, kwargs | ({UNREAD: UnreadArgument()} if unread else {})


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
        unread = kwargs.get(UNREAD) is not None
        positional = tuple([_spec_of(value, tensors, "an argument") for value in args])
        named = tuple([(name, _spec_of(value, tensors, name)) for name, value in kwargs.items() if name != UNREAD])
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
        if is_first and not any(type(value) is list for value in values) and not any(t.requires_grad for t in others):
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
    if core._len_torch_dispatch_stack() or function_mode() is not None:
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
        core._get_cudnn_allow_tf32(),
        core._get_cublas_allow_tf32(),
        core._get_cublas_allow_bf16_reduced_precision_reduction(),
        core._get_cublas_allow_fp16_reduced_precision_reduction(),
        core._get_flash_sdp_enabled(),
        core._get_mem_efficient_sdp_enabled(),
        core._get_math_sdp_enabled(),
        core._get_cudnn_sdp_enabled(),
    )


class Snapshot:
    """All that a layer's forward may read of its modules, as it was at one time.

    Attributes:
        number: equal for two snapshots of one layer if all that they saw is the same.
        key: what they saw.
        modules: all in the layer, itself the first.
        parameters: all of these, each once.
        buffers: their buffers, and other tensors among their attributes.
        is_now: a function that returns whether all but the memory of tensors is as it was.
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
        self._tests: list[str] = []
        self._values: dict[str, Any] = {}
        self._tensors: dict[int, Tensor] = {}
        self._seen: dict[int, Any] = {}
        self._recorded: set[str] = set()
        for cls in dict.fromkeys(map(type, self.modules)):
            self._look_at_class(cls)
        for module in self.modules:
            self._look_at_module(module, is_layer=module is layer)
        if self._recorded:
            self._tests.append(f"{self._name(partial(_records_none, self._recorded))}()")
            if not _records_none(self._recorded):
                raise RunEagerError("outputs of modules inside are recorded, as by output_attentions=True")
        tensors = self._tensors.values()
        self.parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        self.buffers = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        self.key = tuple(self._key)
        self.is_now = self._function(self._tests)
        self.is_in_place = self._function([test for tensor in tensors for test in self._memory_of(tensor)])

    def _name(self, value: Any) -> str:
        name = f"v{len(self._values)}"
        self._values[name] = value
        return name

    def _function(self, tests: Sequence[str]) -> Callable[[], bool]:
        source = "lambda: " + (" and ".join(tests) or "True")
        function: Callable[[], bool] = eval(source, self._values)
        return function

    def _is(self, source: str, value: Any, in_key: Any) -> None:
        self._tests.append(f"{source} is {self._name(value)}")
        self._key.append(in_key)

    def _look_at_class(self, cls: Any) -> None:
        name = self._name(cls)
        self._is(f"{name}.forward", cls.forward, id(cls.forward))
        self._is(f"{name}.__call__", cls.__call__, id(cls.__call__))
        if hasattr(cls, "fused_norm_origin"):
            self._look_at_class(cls.fused_norm_origin)
        elif isinstance(cls.forward, FunctionType):
            self._is(f"{name}.forward.__code__", cls.forward.__code__, id(cls.forward.__code__))

    def _look_at_module(self, module: nn.Module, *, is_layer: bool) -> None:
        own = vars(module)
        cls, attributes = type(module), self._name(own)
        if cls in _CONTAINERS:
            self._tests.append(f'{attributes}["_modules"] == {self._name(dict(own["_modules"]))}')
            self._key += map(id, own["_modules"].values())
            self._look_at_tensors(attributes, own["_parameters"], "_parameters")
            return
        what = stock_class(module).__name__
        self._is(f"{self._name(module)}.__class__", cls, id(cls))
        # One comparison of dictionaries: of most values it asks for identity, and then for equality.
        alike = dict(own)
        for group in ("_parameters", "_buffers"):
            if own[group]:
                self._look_at_tensors(attributes, own[group], group)
            else:
                alike[group] = {}
        alike["_modules"] = dict(own["_modules"])
        self._key += map(id, own["_modules"].values())
        if not is_layer:  # those of the layer itself are around its graphs

            def has_hooks() -> bool:
                return any(_keys_of_hooks(own[name]) is None for name in _HOOKS)

            if has_hooks():
                raise RunEagerError(f"{what} inside has hooks", has_hooks)
            alike |= {name: dict(own[name]) for name in _HOOKS}
            self._recorded.update(key for name in _HOOKS for key in _keys_of_hooks(own[name]) or ())
            forward = own.get("forward")
            if forward is not None and getattr(forward, "__func__", None) is not cls.forward:
                raise RunEagerError(f"the forward of {what} inside was replaced")
            if module._compiled_call_impl is not None:
                raise RunEagerError(f"{what} inside is compiled")
        is_tested = True
        for name, value in own.items():
            if name in _OF_MODULES or name == GRAPHS:
                continue
            source, of_module = f"{attributes}[{name!r}]", f"{name} of {what}"
            if isinstance(value, Tensor):
                is_tested = False
                self._look_at(source, value, of_module)
            elif _is_plain(value):
                alike[name] = _copy_of(value)
                self._key.append((name, _container_key(value)))
            else:
                self._look_at(source, value, of_module)
        if is_tested:
            self._tests.append(f"{attributes} == {self._name(alike)}")
        else:  # tensors are not to be compared by ``==``
            for name, value in alike.items():
                if not isinstance(value, Tensor):
                    self._tests.append(f"{attributes}[{name!r}] == {self._name(value)}")
            self._tests.append(f"len({attributes}) == {len(own)}")

    def _look_at_tensors(self, attributes: str, held: dict[str, Tensor | None], group: str) -> None:
        """Look at the parameters, or the buffers, of a module."""
        self._tests.append(f'len({attributes}["{group}"]) == {len(held)}')
        for name, value in held.items():
            self._is(f'{attributes}["{group}"][{name!r}]', value, (name, id(value)))
            if value is not None:
                self._look_at_tensor(value)

    def _look_at_tensor(self, tensor: Tensor) -> None:
        if id(tensor) in self._tensors:
            return
        self._tensors[id(tensor)] = tensor
        name = self._name(tensor)
        self._tests.append(f"{'' if tensor.requires_grad else 'not '}{name}.requires_grad")
        self._key.append((id(tensor), tensor.requires_grad))
        state = getattr(tensor, "quant_state", None)
        if state is not None:
            self._look_at(f"{name}.quant_state", state, "quant_state of a weight")

    def _look_at(self, source: str, value: Any, what: str) -> None:
        """Look at the value of an attribute or an element, which an expression gives."""
        kind = type(value)
        if kind in _PLAIN:
            self._is(source, value, _plain_key(value))
        elif kind in (dict, list, tuple, set, frozenset):
            self._look_at_container(source, value, what)
        elif isinstance(value, Tensor):
            self._is(source, value, id(value))
            self._look_at_tensor(value)
        elif isinstance(value, _BY_IDENTITY):
            self._is(source, value, id(value))
        elif _is_config(value):
            self._is(source, value, id(value))
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                attributes = vars(value)
                self._tests.append(f"{self._name(attributes)} == {self._name(_copy_of(attributes))}")
                self._key.append(_container_key(attributes))
        elif kind.__name__ == "QuantState" and kind.__module__.startswith("bitsandbytes."):
            self._is(source, value, id(value))
            name = self._name(vars(value))
            for attribute, inner in vars(value).items():
                self._look_at(f"{name}[{attribute!r}]", inner, f"{attribute} of {what}")
        else:
            raise RunEagerError(f"nobody compares {what}, a {kind.__name__}")

    def _look_at_container(self, source: str, value: Any, what: str) -> None:
        """Look at a container and all in it."""
        if _is_plain(value):
            self._tests.append(f"{source} == {self._name(_copy_of(value))}")
            self._key.append(_container_key(value))
            return
        if isinstance(value, (set, frozenset)) or (isinstance(value, dict) and not all(type(k) is str for k in value)):
            raise RunEagerError(f"nobody compares {what}, which holds objects")
        self._key.append((type(value), len(value)))
        self._tests.append(f"len({source}) == {len(value)}")
        for key, element in value.items() if isinstance(value, dict) else enumerate(value):
            self._key.append(key)
            self._look_at(f"{source}[{key!r}]", element, what)

    def _memory_of(self, tensor: Tensor) -> list[str]:
        if tensor.is_meta:
            raise RunEagerError("a parameter is on the meta device")
        if type(tensor) not in (Tensor, nn.Parameter) and type(tensor).__name__ not in ("Params4bit", "Int8Params"):
            raise RunEagerError(f"a parameter is a {type(tensor).__name__}")
        if hasattr(tensor, "ds_id"):
            raise RunEagerError("DeepSpeed's ZeRO-3 gives parameters other memory in each step")
        name, dtype = self._name(tensor), self._name(tensor.dtype)
        shape, stride = self._name(tensor.shape), self._name(tensor.stride())
        return [
            f"{name}.data_ptr() == {tensor.data_ptr()}",
            f"{name}.dtype is {dtype}",
            f"{name}.shape == {shape}",
            f"{name}.stride() == {stride}",
        ]


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


def _is_config(value: Any) -> bool:
    """Return whether a value is a configuration of transformers."""
    return any(cls.__name__ in ("PretrainedConfig", "PreTrainedConfig") for cls in type(value).__mro__)


def is_plain_value(value: Any) -> bool:
    """Return whether a value is a number, a string, None or the like."""
    return type(value) in _PLAIN


def _is_plain(value: Any) -> bool:
    """Return whether a value and all in it is compared by ``==``, which calls 0.0 and -0.0 equal."""
    if isinstance(value, dict):
        return all(type(key) in _PLAIN and _is_plain(inner) for key, inner in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN and not (type(value) in (float, complex) and value == 0)


def _copy_of(value: Any) -> Any:
    """A copy of containers; other objects in them are the same."""
    if type(value) is dict:
        return {key: _copy_of(inner) for key, inner in value.items()}
    return type(value)(map(_copy_of, value)) if type(value) in (list, tuple, set, frozenset) else value


def _plain_key(value: Any) -> Any:
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _container_key(value: Any) -> Any:
    """A key that is equal for containers of the same values; of objects in them, for the same objects."""
    if isinstance(value, dict):
        return dict, tuple([(key, _container_key(inner)) for key, inner in value.items()])
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_container_key, value))
    return _plain_key(value) if type(value) in _PLAIN else id(value)

"""Layers whose forward and backward are captured once as CUDA graphs, and replayed: the host launches one graph.

A replay launches the kernels that eager launched at the same shapes, on the same values, with the same random numbers.
Whatever is not provably so runs eager, and is counted with its reason. Five rules hold:

1. Nothing that lies in the graphs' memory pool leaves it. Outputs are copied, inside the graph, into a buffer of normal
   memory; gradients are copied into new tensors right after the replay.
2. A pair of graphs is in flight from its forward until its backward has run, or its node of autograd's graph is gone.
   A pair is replayed only if all that are in flight held their activations when it was captured, so that it cannot have
   been given their memory.
3. A buffer is written only if nobody else holds its storage: not a view, not a detached alias, not an array of NumPy.
4. A backward that may not be replayed computes the layer again from its inputs, as checkpointing does.
5. Graphs of a model run one after the other, whatever the streams of its calls.

The pool has the activations of one forward and the temporaries of one layer. Shapes share that memory if none of them
is in flight when the next is captured.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, OrderedDict, UserDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .graph_capture import CudaDevice, random_states_of_host
from .graph_guards import (
    GRAPHS,
    LatestArguments,
    RunEagerError,
    Snapshot,
    WatchedDict,
    flags,
    is_plain_value,
)
from .graph_pairs import Flight, GraphPair, LayerCall, LayerForward, LayerOutput, SharedInput, form_of

logger = logging.getLogger("fused_norm")

_SHAPES = 4
"""Shapes that are captured at their second sight, others at their third; twice as many are kept."""

_PAIRS = 2
"""Pairs of graphs for one layer and key: a second one if the first is often in flight, as with two forwards a step."""

_PATIENCE = 3
"""Tries of a capture, moves of parameters in memory, and waits for a second pair, that a layer bears."""

_KINDS = 1024
"""Kinds of calls of a layer that are remembered at a time."""

_STATES = 8
"""States of a layer's modules that are known at a time, such as several adapters."""

_EARLY = 50
"""Forwards after which a model is told that it hardly replays."""

_version = attrgetter("_version")


@dataclass
class Replays:
    """Counts of the calls of a model's layers: replayed, eager and computed again.

    Attributes:
        forwards: calls whose forward was replayed.
        backwards: calls whose backward was.
        captures: pairs of graphs that were captured.
        eager: the number of calls that ran eager, by reason.
        recomputed: the number of backwards that computed their layer again, by reason.
        reserved: bytes of the graphs' memory pool, which is not given back while the model has graphs.
    """

    forwards: int = 0
    backwards: int = 0
    captures: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)
    reserved: int = 0


class LayerReplay:
    """The graphs of one layer.

    Attributes:
        graphs: those of its model.
    """

    def __init__(self, graphs: LayerGraphs) -> None:
        self.graphs = graphs
        graphs.layers.add(self)
        self.refused: str | None = None
        """The reason why this layer runs eager for good."""
        self._obstacle: RunEagerError | None = None
        self._snapshots: list[Snapshot] = []
        self._seen: dict[tuple[Any, ...], LayerOutput] = {}
        self.pairs: dict[tuple[Any, ...], list[GraphPair]] = {}
        self._waits: Counter[tuple[Any, ...]] = Counter()
        self.failures = self.moves = 0

    def __reduce__(self) -> Any:
        """Pickle and copy the layer without its graphs."""
        return LayerReplay, (self.graphs,)

    def __call__(self, forward: LayerForward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``forward(module, *args, **kwargs)``, replayed if it may be."""
        graphs = self.graphs
        if not graphs.lock.acquire(blocking=False):
            graphs.note_eager("another thread runs a layer of this model")
            return forward(module, *args, **kwargs)
        try:
            try:
                call = self._call(forward, module, args, kwargs)
                key = call.snapshot.number, call.arguments.number, call.flags, call.stream
                pair = self._pair(call, key)
            except RunEagerError as reason:
                graphs.note_eager(str(reason))
                pair = None
            else:
                if pair is None:
                    return self._first_sight(call, key, args, kwargs)
            if pair is not None:
                return pair(call.arguments.tensors)
        finally:
            graphs.lock.release()
        return forward(module, *args, **kwargs)

    def _call(self, forward: LayerForward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        graphs = self.graphs
        refused = self.refused or graphs.refused
        if refused is not None:
            raise RunEagerError(refused)
        if module.training and getattr(module, "gradient_checkpointing", False):
            raise RunEagerError("gradient checkpointing is on; recompute takes its place without host time")
        arguments = graphs.latest.read(args, kwargs)
        if not arguments.tensors:
            raise RunEagerError("it gets no tensor")
        device = graphs.device_for(arguments.tensors)
        now = flags(device.device)
        if device.is_capturing():
            raise RunEagerError("somebody else captures it")
        snapshot = self._snapshot(module, device.device)
        if graphs.has_shared_parameters and now[2] and now[4] and graphs.shares(snapshot.parameters):
            raise RunEagerError("autocast casts a parameter once that it shares with other modules")
        family = arguments.first, now[0]
        return LayerCall(forward, arguments, now, device.stream(), snapshot, family)

    def _snapshot(self, module: nn.Module, device: torch.device) -> Snapshot:
        """What the layer may read now: a snapshot that is known, or a new one."""
        known = self._snapshots
        for place, snapshot in enumerate(known):
            if snapshot.is_now():
                if place:
                    known.insert(0, known.pop(place))
                if not snapshot.is_in_place():
                    self._moved(snapshot)
                return snapshot
        if self._obstacle is not None and self._obstacle.is_there():
            raise RunEagerError(str(self._obstacle))
        try:
            new = Snapshot(module)
        except RunEagerError as obstacle:
            self._obstacle = obstacle
            raise
        self._obstacle = None
        if any(tensor.device != device for tensor in (*new.parameters, *new.buffers)):
            raise RunEagerError("some of its parameters are on another device")
        for place, snapshot in enumerate(known):
            if snapshot.key == new.key:  # other objects with the same values
                new.number = snapshot.number
                is_in_place = snapshot.is_in_place()
                known.pop(place)
                if not is_in_place:
                    self._moved(new)
                break
        known.insert(0, new)
        if len(known) > _STATES:
            oldest = known.pop().number
            self._forget(lambda pair: pair.snapshot.number == oldest)
        return new

    def _moved(self, snapshot: Snapshot) -> None:
        """Drop the graphs of parameters that have other memory now."""
        self.moves += 1
        self._forget(lambda _: True)
        self._snapshots.clear()
        if self.moves > _PATIENCE:
            self.refused = "its parameters move in memory, as under FSDP or offloading"
        raise RunEagerError("its parameters have other memory than before")

    def _pair(self, call: LayerCall, key: tuple[Any, ...]) -> GraphPair | None:
        """The graphs that may be replayed for a call; None at its first sight.

        Raises:
            RunEagerError: if there are none.
        """
        graphs = self.graphs
        output = self._seen.get(key)
        if output is None:
            return None
        graphs.land_if_waiting()
        tensors = call.arguments.tensors
        key = (*key, graphs.chain(tensors))
        pairs = self.pairs.get(key, [])
        reason = None
        for pair in pairs:
            reason = pair.why_not_now(tensors)
            if reason is None:
                graphs.use(call.family)
                return pair
        if reason is not None:
            self._waits[key] += 1
            if len(pairs) >= _PAIRS or self._waits[key] < _PATIENCE:  # a second pair only for a habit
                raise RunEagerError(reason)
        if not graphs.may_capture(call.family, output.number):
            self._seen[key[:-1]] = output._replace(number=output.number + 1)
            raise RunEagerError("its shape is one of many")
        graphs.settle(call.family)
        if not graphs.in_flight.keys() <= graphs.with_activations.keys():
            graphs.separate()
            raise RunEagerError(reason or "another forward waits for its backward")
        try:
            pair = GraphPair(graphs, call, output)
        except Exception as error:
            self.failures += 1
            if self.failures >= _PATIENCE:
                self.refused = f"it cannot be captured: {error}"[:300]
            for each in list(_all_graphs):
                each.renounce()
            logger.info("a layer could not be captured as a CUDA graph: %s", error)
            raise RunEagerError("its capture failed") from None
        self.pairs.setdefault(key, []).append(pair)  # to settle may have dropped the list
        graphs.captured(pair)
        return pair

    def _first_sight(self, call: LayerCall, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run eager, and remember what comes out and what else the forward does."""
        graphs, device, snapshot = self.graphs, self.graphs.device, call.snapshot
        read = [*call.arguments.tensors, *snapshot.parameters, *snapshot.buffers]
        versions, state = list(map(_version, read)), device.random_state()
        on_host = random_states_of_host(device.device)
        watched = {name: WatchedDict(value) for name, value in kwargs.items() if isinstance(value, UserDict)}
        out = call.forward(snapshot.modules[0], *args, **kwargs | watched)
        graphs.note_eager("first sight of its arguments")
        parts = [out] if isinstance(out, Tensor) else out
        if not isinstance(out, (Tensor, tuple, list)) or type(out) not in (Tensor, tuple, list):
            self.refused = f"it returns a {type(out).__name__}"
        elif not all(type(part) is Tensor or is_plain_value(part) for part in parts):
            self.refused = "it returns more than tensors"
        elif list(map(_version, read)) != versions:
            self.refused = "it writes into an argument, a parameter or a buffer"
        elif used := [name for name, value in watched.items() if value.is_used]:
            self.refused = f"it reads or writes {used[0]}"
        elif not snapshot.is_now():
            self.refused = "its forward changes its modules' attributes"
        elif (
            random_states_of_host(device.device) != on_host
        ):  # or another thread does: the next call is a first one again
            graphs.note_eager("it draws random numbers on the host")
        else:
            tensors = [part for part in parts if type(part) is Tensor]
            storages = [tensor.untyped_storage()._cdata for tensor in (*tensors, *read)]
            if len(set(storages[: len(tensors)])) < len(tensors) or set(storages[: len(tensors)]) & set(
                storages[len(tensors) :]
            ):
                self.refused = "an output is, or is a view of, an argument or another output"
            elif tensors:
                if len(self._seen) >= _KINDS:
                    self._seen.clear()
                    self._waits.clear()
                self._seen[key] = LayerOutput(
                    type(out),
                    tuple([(t.shape, t.stride(), t.dtype) if type(t) is Tensor else None for t in parts]),
                    tuple([None if type(part) is Tensor else part for part in parts]),
                    not torch.equal(state, device.random_state()),
                )
        return out

    def _forget(self, condition: Callable[[GraphPair], bool]) -> None:
        """Drop the pairs of graphs that meet a condition."""
        for key, pairs in list(self.pairs.items()):
            for pair in [pair for pair in pairs if condition(pair)]:
                pairs.remove(pair)
                self.graphs.forget(pair)
            if not pairs:
                del self.pairs[key]

    def drop(self, family: Any = None) -> None:
        """Drop the graphs of one shape, or all."""
        self._forget(lambda pair: family is None or pair.family == family)


class LayerGraphs:
    """The graphs of all layers of a model: one memory pool, what is in flight, and what became of calls.

    Attributes:
        replays: what became of the calls of layers.
        refused: the reason why all layers run eager from now on; None while they do not.
        lock: held while graphs are looked for and launched.
        latest: the arguments of the latest call.
        layers: those whose graphs are here.
        in_flight: the flights, and shapes, of the pairs in flight, by their numbers.
        with_activations: the pairs whose activations are allocated, by their numbers.
        has_shared_parameters: whether the model has parameters that several of its modules hold.
    """

    def __init__(self, shared_parameters: Iterable[nn.Parameter] = (), *, is_copy: bool = False) -> None:
        self.layers: weakref.WeakSet[LayerReplay] = weakref.WeakSet()
        self._shared_parameters = {id(parameter): parameter for parameter in shared_parameters}
        self._is_copy = is_copy
        self.has_shared_parameters = is_copy or bool(self._shared_parameters)
        self.replays = Replays()
        self.refused: str | None = None
        self.lock = threading.RLock()
        self.latest = LatestArguments()
        self._device: Any = None
        self._is_told = False
        self.in_flight: dict[int, tuple[weakref.ref[Flight], Any]] = {}
        self.with_activations: dict[int, GraphPair] = {}
        self._outputs: dict[int, weakref.ref[Tensor]] = {}
        self._grad_buffers: dict[tuple[Any, ...], Tensor] = {}
        self._shared: dict[tuple[Any, ...], list[SharedInput]] = {}
        self._recent: OrderedDict[Any, None] = OrderedDict()
        self._families: set[Any] = set()
        self._tape: Any = None
        self._is_separate = self._is_waiting = self._is_renounced = False
        _all_graphs.add(self)

    def __reduce__(self) -> Any:
        """Pickle and copy the option, not the graphs; a copy does not know which of its parameters are shared."""
        return partial(LayerGraphs, is_copy=self.has_shared_parameters), ()

    @property
    def device(self) -> Any:
        """The device of the graphs, or of its stand-in."""
        return self._device

    def device_for(self, tensors: Sequence[Tensor]) -> Any:
        """The device of the graphs.

        Raises:
            RunEagerError: if these tensors are not on it, or there are no graphs on it.
        """
        device = tensors[0].device
        for tensor in tensors:
            if tensor.device != device:
                raise RunEagerError("its arguments are on several devices")
        if self._device is None:
            try:
                self._device = make_device(device)
            except RunEagerError:
                raise
            except Exception as error:  # as of an allocator that has no memory pools
                self.refused = f"no CUDA graph can be captured: {error}"[:300]
                raise RunEagerError(self.refused) from None
        if self._device.device != device:
            raise RunEagerError("the model has moved to another device")
        return self._device

    def shares(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether other modules hold one of these trained parameters of float32 too."""
        shared = self._shared_parameters
        return any(
            p.requires_grad and p.dtype == torch.float32 and (self._is_copy or id(p) in shared) for p in parameters
        )

    def note_eager(self, reason: str) -> None:
        """Count a call that runs eager, and log a reason that is new."""
        replays = self.replays
        if reason not in replays.eager:
            logger.info("layers run eager, not as CUDA graphs: %s", reason)
        replays.eager[reason] += 1
        calls = replays.eager.total() + replays.forwards
        if not self._is_told and calls >= _EARLY * len(self.layers) and replays.forwards < calls / 2:
            self._is_told = True
            (most, number) = replays.eager.most_common(1)[0]
            logger.warning(
                "cuda_graphs: less than half of the calls of layers were replayed in %s forwards; %s calls because %s",
                _EARLY, number, most,
            )  # fmt: skip

    def chain(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """For each tensor the address of the output buffer that it is, or 0."""
        outputs = self._outputs
        return tuple([address if (address := tensor.data_ptr()) in outputs else 0 for tensor in tensors])

    def output_at(self, tensor: Tensor) -> Tensor | None:
        """The output buffer of a layer that a tensor is an alias of, or None."""
        ref = self._outputs.get(tensor.data_ptr())
        buffer = None if ref is None else ref()
        if buffer is None or form_of(buffer) != form_of(tensor):
            return None
        return buffer

    def shared_copy(self, place: int, tensor: Tensor) -> SharedInput:
        """The static copy of an argument for all layers: one that no forward in flight needs with other contents."""
        copies = self._shared.setdefault((place, *form_of(tensor)), [])
        for shared in copies:
            if shared.holds(tensor) or shared.is_free():
                return shared
        copies.append(SharedInput(tensor))
        return copies[-1]

    def grad_buffer(self, output: Tensor) -> Tensor:
        """One buffer for the gradients of outputs alike: the replay that follows its copy reads it, and no other."""
        key = form_of(output)
        if key not in self._grad_buffers:
            self._grad_buffers[key] = torch.zeros_like(output)
        return self._grad_buffers[key]

    def fits(self, pair: GraphPair) -> bool:
        """Return whether no pair in flight may have its activations where this pair writes."""
        if self.in_flight.keys() <= pair.live:
            return True
        self._land()
        return self.in_flight.keys() <= pair.live

    def _land(self) -> None:
        """Forget the flights that are over."""
        over = [n for n, (ref, _) in self.in_flight.items() if (flight := ref()) is None or flight.is_done]
        for number in over:
            del self.in_flight[number]
        if self._is_waiting and not self.in_flight:
            self._is_waiting = False
            self.clear()

    def land_if_waiting(self) -> None:
        """Drop all graphs if they are not to be replayed, or if that waits for the last flight, and it is over."""
        if self._is_renounced:
            self._is_renounced = False
            self.clear()
        if self._is_waiting:
            self._land()

    def renounce(self) -> None:
        """Let no graph be replayed any more: after a failed capture they draw random numbers from a former state."""
        self._is_renounced = True

    def separate(self) -> None:
        """Let shapes have memory of their own from now on: two of them are in flight together."""
        self._is_separate = self._is_waiting = True

    def settle(self, family: Any) -> None:
        """Get ready for a capture: another shape may have the memory of activations if none of them is in flight.

        Raises:
            RunEagerError: if memory of the pool is not what the graphs know.
        """
        self._land()
        live = self._device.live_blocks()
        known = self._device.workspaces.union(*(pair.blocks for pair in self.with_activations.values()))
        if not known <= live:
            self.clear()
            self.in_flight.clear()
            self._device.renew()
            raise RunEagerError("other code has freed memory of the graphs")
        if family != self._tape and not self.in_flight and not self._is_separate:
            for pair in self.with_activations.values():
                pair.drop_activations()
            self.with_activations, self._tape = {}, family
            if kept := self._device.live_blocks() - self._device.workspaces:
                self.refused = f"kernels keep {len(kept)} blocks of the graphs' memory"
                self.clear()
                raise RunEagerError(self.refused)
        if family not in self._families:
            self._device.release_memory()

    def may_capture(self, family: Any, sights: int) -> bool:
        """Return whether a shape is to be captured: one of a few, or seen once more; not if captures never pay."""
        if family in self._recent or len(self._families) < _SHAPES:
            return True
        replays = self.replays
        if 2 * _SHAPES * len(self.layers) < replays.captures > replays.forwards / 2:  # one replay follows each capture
            self.refused = (
                f"its shapes vary, {len(self._families)} so far; collators pad to few lengths by pad_to_multiple_of, "
                "or pack rows to one"
            )
            self.clear()
            raise RunEagerError(self.refused)
        return sights > 1

    def captured(self, pair: GraphPair) -> None:
        """Take in a pair that has been captured."""
        if not self.replays.captures:
            logger.info("layers are replayed as CUDA graphs from now on")
        self.replays.captures += 1
        self.replays.reserved = self._device.reserved()
        self._families.add(pair.family)
        if pair.is_training:
            self.with_activations[pair.number] = pair
        for buffer in pair.outputs:
            self._outputs[buffer.data_ptr()] = weakref.ref(buffer)
        self.use(pair.family)

    def use(self, family: Any) -> None:
        """Note that a shape is in use; the one that was not for longest is dropped if there are too many."""
        recent = self._recent
        if recent and next(reversed(recent)) == family:
            return
        recent[family] = None
        recent.move_to_end(family)
        while len(recent) > 2 * _SHAPES:
            oldest = next(iter(recent))
            if any(family == oldest for _, family in self.in_flight.values()):
                break
            del recent[oldest]
            for layer in self.layers:
                layer.drop(oldest)
            self._free_buffers()

    def _free_buffers(self) -> None:
        """Let go of the buffers that no pair holds; a pair that is captured later gets others."""
        self._grad_buffers.clear()
        self._shared.clear()

    def forget(self, pair: GraphPair) -> None:
        """Let go of a pair that is dropped."""
        self.with_activations.pop(pair.number, None)
        pair.drop_activations()
        self.in_flight.pop(pair.number, None)
        for buffer in pair.outputs:
            self._outputs.pop(buffer.data_ptr(), None)

    def try_again(self) -> None:
        """Forget the reasons why layers run eager for good."""
        self.refused = None
        for layer in self.layers:
            layer.refused, layer.failures, layer.moves = None, 0, 0

    def clear(self) -> None:
        """Drop all graphs."""
        for layer in self.layers:
            layer.drop()
        self.with_activations, self._tape = {}, None
        self._recent.clear()
        self._free_buffers()


_all_graphs: weakref.WeakSet[LayerGraphs] = weakref.WeakSet()
"""Those of all models in the process, which draw from the same generator."""


def make_device(device: torch.device) -> Any:
    """The device of graphs for tensors on this one.

    Raises:
        RunEagerError: if it is no CUDA device.
    """
    if device.type != "cuda":
        raise RunEagerError(f"its tensors are on {device.type}, not on a CUDA device")
    return CudaDevice(device)


def replayed(forward: LayerForward) -> LayerForward:
    """A layer's forward, replayed as a CUDA graph if it may be."""

    @wraps(forward)
    def replaying(self: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = None if torch.compiler.is_compiling() else self.__dict__.get(GRAPHS)
        return forward(self, *args, **kwargs) if graphs is None else graphs(forward, self, args, kwargs)

    return replaying


def attach_graphs(model: nn.Module, layers: Sequence[nn.Module]) -> Replays:
    """Give layers their graphs, those that they have already if they all belong to one model; return its counts."""
    known = [vars(layer).get(GRAPHS) for layer in layers]
    graphs = known[0].graphs if known and known[0] is not None else None
    if graphs is not None and all(replay is not None and replay.graphs is graphs for replay in known):
        graphs.try_again()
    else:
        holders = Counter(
            parameter
            for module in model.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        )
        graphs = LayerGraphs(parameter for parameter, count in holders.items() if count > 1)
        for layer in layers:
            vars(layer)[GRAPHS] = LayerReplay(graphs)
    return graphs.replays

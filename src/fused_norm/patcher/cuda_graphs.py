"""Layers whose forward and backward are captured once as CUDA graphs, and replayed: the host launches one graph.

A replay launches the kernels that eager launched at the same shapes, on the same values, with the same random numbers.
Whatever is not provably so runs eager, and is counted with its reason. Four rules hold:

1. Nothing that lies in the graphs' memory pool leaves it. Outputs are copied, inside the graph, into a buffer of normal
   memory; gradients are copied into new tensors right after the replay.
2. A pair of graphs is in flight from its forward until its backward has run, or its node of autograd's graph is gone.
   A pair is replayed only if all that are in flight held their activations when it was captured, so that it cannot have
   been given their memory.
3. A buffer is written only if nobody else holds its storage: not a view, not a detached alias, not an array of NumPy.
4. A backward that may not be replayed computes the layer again from its inputs, as checkpointing does.

The pool has the activations of one forward and the temporaries of one layer. Shapes share that memory if none of them
is in flight when the next is captured.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict, UserDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .graph_capture import CudaDevice
from .graph_guards import (
    GRAPHS,
    Arguments,
    LatestArguments,
    RunEagerError,
    Snapshot,
    WatchedDict,
    flags,
    is_plain_value,
)

logger = logging.getLogger("fused_norm")

LayerForward = Callable[..., Any]

_SHAPES = 4
"""Shapes that are captured at their second sight, others at their third; twice as many are kept."""

_FLAT = 4 * 2**20
"""Bytes up to which the gradients of a layer's parameters leave the pool as one tensor."""

_PAIRS = 2
"""Pairs of graphs for one layer and key: a second one if the first is often in flight, as with two forwards a step."""

_PATIENCE = 3
"""Tries of a capture, moves of parameters in memory, and waits for a second pair, that a layer bears."""

_KINDS = 1024
"""Kinds of calls of a layer that are remembered at a time."""

_STATES = 8
"""States of a layer's modules that are known at a time, such as several adapters."""

_RELEASE = 0.5
"""Seconds in which the temporaries of a captured backward are to be gone."""

_EARLY = 50
"""Forwards after which a model is told that it hardly replays."""

_version = attrgetter("_version")
_numbers = itertools.count()


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


class _Flight:
    """A forward that was replayed and whose backward may come.

    Attributes:
        is_done: its backward has run, and does not run again.
        random_state: of the generator before it, if the layer draws random numbers.
        versions: of its trained parameters.
        held: inputs that need no gradient and lie in another layer's output buffer, which is not written while they
            are held: a pair that is dropped meanwhile computes its layer again from them.
    """

    __slots__ = ("__weakref__", "held", "is_done", "random_state", "versions")

    def __init__(self, random_state: Any, versions: list[int], held: list[Tensor]) -> None:
        self.is_done, self.random_state, self.versions, self.held = False, random_state, versions, held


class _Shared:
    """A static copy of an argument that layers have in common, such as cosines and a mask: copied once a forward."""

    def __init__(self, tensor: Tensor) -> None:
        self.buffer = _empty_as(tensor)
        self._source: weakref.ref[Tensor] | None = None
        self._version = -1
        self.flights: list[weakref.ref[_Flight]] = []

    def holds(self, tensor: Tensor) -> bool:
        """Return whether it is a copy of this tensor as it is now."""
        return self._source is not None and self._source() is tensor and self._version == tensor._version

    def is_free(self) -> bool:
        """Return whether no forward in flight reads it."""
        self.flights = [ref for ref in self.flights if (flight := ref()) is not None and not flight.is_done]
        return not self.flights

    def copy(self, tensor: Tensor) -> None:
        """Make it a copy of this tensor."""
        _copy(self.buffer, tensor)
        self._source, self._version = weakref.ref(tensor), tensor._version


class _LayerOutput(NamedTuple):
    """What a layer returned when it ran eager.

    Attributes:
        kind: Tensor, tuple or list.
        parts: shape, strides and dtype of a tensor, or None, for each part.
        values: the parts that are no tensors; None for tensors.
        draws: whether its forward drew random numbers.
        number: of calls alike that have run eager.
    """

    kind: Any
    parts: tuple[Any, ...]
    values: tuple[Any, ...]
    draws: bool
    number: int = 1


class _Replayed(torch.autograd.Function):
    """A replayed forward as a node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, pair: _GraphPair, held: list[Tensor], *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.pair, ctx.flight = pair, pair.launch(held)
        ctx.save_for_backward(*inputs[: len(pair.differentiable)])
        outputs = tuple([buffer.detach() for buffer in pair.outputs])
        constant = [output for output, grad in zip(outputs, pair.output_grads, strict=True) if grad is None]
        if constant:
            ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        pair, flight = ctx.pair, ctx.flight
        saved = ctx.saved_tensors  # raises if one of them was written to, as in stock
        if list(map(_version, pair.trained)) != flight.versions:
            raise RuntimeError(
                "a parameter of a layer that is replayed as a CUDA graph was changed in place between forward and "
                "backward; apply_fused_norm(model, cuda_graphs=False) lets the layer run eager"
            )
        return None, None, *pair.backward(flight, saved, grads)


_apply = super(torch.autograd.Function, _Replayed).apply  # without looking for torch.func, which the guards have done


class _GraphPair:
    """The graphs of a layer's forward and backward for one key, and the memory that they read and write.

    Attributes:
        number: its own.
        differentiable: the places of the tensors that need a gradient among the arguments.
        trained: the parameters that do.
        inputs: static tensors, one for each among the arguments.
        shared: those of them that layers have in common, by place.
        outputs: buffers of normal memory.
        output_grads: buffers of their gradients; None if one needs none.
        live: the numbers of the pairs that held their activations when this one was captured, and its own.
        family: its shape.
    """

    def __init__(self, layer: LayerReplay, call: _LayerCall, output: _LayerOutput) -> None:
        graphs = self._graphs = layer.graphs
        device = self._device = graphs.device
        self.number = next(_numbers)
        self._output = output
        self._call = call._replace(arguments=call.arguments._replace(tensors=[]))
        self.family, self.snapshot = call.family, call.snapshot
        tensors, is_training = call.arguments.tensors, call.flags[0]
        self.differentiable = [i for i, t in enumerate(tensors) if t.requires_grad] if is_training else []
        self.trained = [p for p in call.snapshot.parameters if p.requires_grad] if is_training else []
        self.is_training = bool(self.differentiable or self.trained)
        self._flight: weakref.ref[_Flight] | None = None
        self.inputs: list[Tensor] = []
        self.shared: dict[int, _Shared] = {}
        self._buffers: list[Tensor] = []
        self._chained: list[int] = []
        for place, tensor in enumerate(tensors):
            buffer = graphs.output_at(tensor)
            if buffer is not None:
                self._buffers.append(buffer)
                if place not in self.differentiable:
                    self._chained.append(place)
                buffer = device.without_owner(buffer)
            elif place in self.differentiable or place == 0:
                buffer = _empty_as(tensor)
            else:
                self.shared[place] = graphs.shared_copy(place, tensor)
                buffer = self.shared[place].buffer
            self.inputs.append(buffer)
        self.outputs = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device.device)
            for shape, stride, dtype in filter(None, output.parts)
        ]
        self._storages = [buffer.untyped_storage()._cdata for buffer in self.outputs]
        self._owners = list(map(torch._C._storage_Use_Count, self._storages))
        self.output_grads: list[Tensor | None] = [None] * len(self.outputs)
        self._result: list[Tensor] | None = None
        self._uses: _Uses | None = None
        self._grads: list[Tensor | None] = []
        self._flat_grads: list[_FlatGrads] = []
        self._repeated: list[int] = []
        self.blocks: frozenset[int] = frozenset()
        self.live = frozenset(graphs.with_activations) | {self.number}
        self._capture()

    def _capture(self) -> None:
        device, graphs = self._device, self._graphs
        before = device.live_blocks()
        try:
            self._replay_forward, self._forward_graph = device.capture(self._forward)
            after = device.live_blocks()
            assert self._result is not None
            if self.is_training:
                self.output_grads = [
                    graphs.grad_buffer(buffer) if result.requires_grad else None
                    for buffer, result in zip(self.outputs, self._result, strict=True)
                ]
                self._replay_backward, self._backward_graph = device.capture(self._backward)
                self._grads = [None if grad is None else device.without_owner(grad) for grad in self._grads]
                self._flat_grads = [flat._replace(grads=device.without_owner(flat.grads)) for flat in self._flat_grads]
                self.blocks = after - before
                before = after
            else:
                self._result = None
            waited = 0.0
            while (kept := device.live_blocks() - before) and waited < _RELEASE:
                time.sleep(0.001)  # autograd's thread lets go of its last tensors when it is scheduled again
                waited += 0.001
            if kept:  # scratch that a kernel keeps is there at the next try
                device.workspaces |= kept
                raise RunEagerError(f"it keeps {len(kept)} blocks of the graphs' memory")
        except BaseException:
            self.drop_activations()
            self._grads, self._flat_grads = [], []
            raise

    def _forward(self) -> None:
        """Compute the layer on static tensors, with leaves in place of its parameters.

        So the hooks of parameters, and the nodes that add up their gradients, stay outside.
        """
        # A leaf is no parameter that others hold hooks on, and its version is its own.
        leaves = [nn.Parameter(parameter.detach()) for parameter in self.trained]
        places = set(self.differentiable)
        heads = [buffer.detach().requires_grad_(i in places) for i, buffer in enumerate(self.inputs)]
        with torch.set_grad_enabled(self.is_training):
            result = self._run(heads, leaves)
        for buffer, tensor in zip(self.outputs, result, strict=True):
            buffer.copy_(tensor.detach())
        torch.clear_autocast_cache()  # of casts that lie in the pool
        self._result = result
        if self.is_training:
            self._uses = _Uses(result, [*(heads[i] for i in self.differentiable), *leaves])
            self._repeated = self._uses.repeated

    def _backward(self) -> None:
        assert self._result is not None
        assert self._uses is not None
        grads = self._uses.gradients(self._result, self.output_grads, retain_graph=True)
        self._grads, self._flat_grads = _flattened(grads, len(self.differentiable))

    def _run(self, tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        """The layer's outputs that are tensors."""
        args, kwargs = self._call.arguments.with_tensors(tensors)
        leaf_of = {id(parameter): leaf for parameter, leaf in zip(self.trained, leaves, strict=True)}
        swapped = [
            (module._parameters, name, parameter)
            for module in self.snapshot.modules
            for name, parameter in module._parameters.items()
            if id(parameter) in leaf_of
        ]
        try:
            for parameters, name, parameter in swapped:
                parameters[name] = leaf_of[id(parameter)]  # type: ignore[assignment]
            out = self._call.forward(self.snapshot.modules[0], *args, **kwargs)
        finally:
            for parameters, name, parameter in swapped:
                parameters[name] = parameter
        return [out] if isinstance(out, Tensor) else [part for part in out if isinstance(part, Tensor)]

    def drop_activations(self) -> None:
        """Let the pool give its activations' memory to other captures."""
        self._result = self._uses = None

    def why_not_now(self, tensors: Sequence[Tensor]) -> str | None:
        """The reason not to replay it on these tensors, or None."""
        flight = None if self._flight is None else self._flight()
        if flight is not None and not flight.is_done:
            return "its last forward waits for its backward"
        if list(map(torch._C._storage_Use_Count, self._storages)) != self._owners:
            return "its last output is still held"
        for place, shared in self.shared.items():
            if not shared.holds(tensors[place]) and not shared.is_free():
                return "an argument that all layers read waits for a backward"
        return None if self._graphs.fits(self) else "another forward waits for its backward"

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The layer's outputs for these tensors, by a replay."""
        for place, (buffer, tensor) in enumerate(zip(self.inputs, tensors, strict=True)):
            shared = self.shared.get(place)
            if shared is not None:
                if not shared.holds(tensor):
                    shared.copy(tensor)
            elif buffer.data_ptr() != tensor.data_ptr():
                _copy(buffer, tensor)
        if self.is_training:
            inputs = [*[tensors[place] for place in self.differentiable], *self.trained]
            held = [tensors[place] for place in self._chained]
            outputs = _apply(self, held, *inputs, *[inputs[place] for place in self._repeated])
        else:
            self.launch([])
            outputs = tuple([buffer.detach() for buffer in self.outputs])
        self._graphs.replays.forwards += 1
        kind, parts, values = self._output[:3]
        if kind is Tensor:
            return outputs[0]
        rest = iter(outputs)
        return kind([value if part is None else next(rest) for part, value in zip(parts, values, strict=True)])

    def launch(self, held: list[Tensor]) -> _Flight:
        """Replay the forward; its flight holds these inputs."""
        state = self._device.random_state() if self._output.draws else None
        flight = _Flight(state, list(map(_version, self.trained)), held)
        if self.is_training:
            self._flight = weakref.ref(flight)
            self._graphs.in_flight[self.number] = self._flight, self.family
            for shared in self.shared.values():
                shared.flights.append(self._flight)
        self._replay_forward()
        return flight

    def backward(self, flight: _Flight, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of ``saved``, the differentiable inputs, and of parameters."""
        graphs, keeps_graph = self._graphs, torch._C._autograd._get_current_graph_task_keep_graph()
        graphs.latest.forget()
        creates_graph = torch.is_grad_enabled()
        if flight.is_done:
            raise RuntimeError(
                "a second backward through a layer that is replayed as a CUDA graph needs retain_graph=True in the "
                "first"
            )
        with graphs.lock:
            reason = None
            if creates_graph:
                reason = "create_graph=True"
            elif self.number not in graphs.in_flight:
                reason = "the graphs were dropped before the backward"
            elif self._device.stream() != self._call.stream:
                reason = "the backward runs on another stream"
            elif not graphs.fits(self):
                reason = "the backward comes in another order than at the capture"
            if reason is None:
                results = self._replayed_grads(grads)
                graphs.replays.backwards += 1
            else:
                graphs.replays.recomputed[reason] += 1
                results = self._recomputed_grads(flight, saved, grads, creates_graph=creates_graph)
            if not keeps_graph and not creates_graph:
                flight.is_done, flight.held = True, []
                graphs.in_flight.pop(self.number, None)
        return results

    def _replayed_grads(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        for buffer, grad in zip(self.output_grads, grads, strict=True):
            if buffer is not None:
                if grad is None:
                    buffer.zero_()
                else:
                    buffer.copy_(grad)
        self._replay_backward()
        copies = _copies_of(self._grads)
        for flat in self._flat_grads:
            for place, copy in zip(flat.places, flat.copies(), strict=True):
                copies[place] = copy
        return copies

    def _recomputed_grads(
        self, flight: _Flight, saved: Sequence[Tensor], grads: Sequence[Tensor | None], *, creates_graph: bool
    ) -> list[Tensor | None]:
        device, inputs = self._device, list(self.inputs)
        for place, tensor in zip(self.differentiable, saved, strict=True):
            inputs[place] = tensor if creates_graph else tensor.detach().requires_grad_()
        leaves: Sequence[Tensor] = self.trained
        if not creates_graph:
            leaves = [nn.Parameter(parameter.detach()) for parameter in self.trained]
        after = device.random_state() if flight.random_state is not None else None
        try:
            if after is not None:
                device.set_random_state(flight.random_state)
            with torch.enable_grad(), self._call.autocast(device.device.type):
                results = self._run(inputs, leaves)
                uses = _Uses(results, [*(inputs[place] for place in self.differentiable), *leaves])
                return uses.gradients(results, grads, create_graph=creates_graph)
        finally:
            if after is not None:
                device.set_random_state(after)


class _Uses:
    """Where a layer's computation uses the tensors that it is to be differentiated by.

    A tensor that is used several times has several gradients, which autograd adds to those of its uses elsewhere one by
    one: their sum would be another sum in the last place.

    Attributes:
        repeated: the places of leaves with several uses, once for each further use.
    """

    def __init__(self, results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._nodes: dict[Any, list[tuple[int, int]]] = {}
        """The leaves, and the numbers of the gradients, that nodes give, for those of several uses."""
        nodes = [leaf.grad_fn or torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
        place_of = {(node, leaf.output_nr): place for place, (node, leaf) in enumerate(zip(nodes, leaves, strict=True))}
        waiting: list[Any] = [result.grad_fn for result in results if result.grad_fn is not None]
        seen, number = set(waiting), [0] * len(leaves)
        while waiting:
            node = waiting.pop()
            for position, edge in enumerate(node.next_functions):
                place = place_of.get(edge)
                if place is not None:
                    number[place] += 1
                    self._nodes.setdefault(node, []).append((place, position))
                elif edge[0] is not None and edge[0] not in seen:
                    seen.add(edge[0])
                    waiting.append(edge[0])
        self.repeated = [place for place, count in enumerate(number) for _ in range(count - 1)]
        several = set(self.repeated)
        self._nodes = {
            node: gives
            for node, pairs in self._nodes.items()
            if (gives := [(place, position) for place, position in pairs if place in several])
        }

    def gradients(self, results: Sequence[Tensor], grads: Sequence[Tensor | None], **how: bool) -> list[Tensor | None]:
        """The gradients of the leaves, one of each, and after them those of ``repeated``.

        ``grads``: those of the results. ``how``: ``retain_graph`` or ``create_graph``.
        """
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
        if not pairs:
            return [None] * (len(self._leaves) + len(self.repeated))
        of_uses: list[list[Tensor | None]] = [[] for _ in self._leaves]

        def take(gives: list[tuple[int, int]], given: Sequence[Tensor | None], _: Any) -> None:
            for place, position in gives:
                of_uses[place].append(given[position])

        hooks = [node.register_hook(partial(take, gives)) for node, gives in self._nodes.items()]
        try:
            outputs, of_outputs = zip(*pairs, strict=True)
            sums = torch.autograd.grad(outputs, self._leaves, of_outputs, allow_unused=True, **how)
        finally:
            for hook in hooks:
                hook.remove()
        further: list[Tensor | None] = []
        for place in self.repeated:
            uses = of_uses[place]
            further.append(uses.pop(1) if len(uses) > 1 else None)
        return [*(uses[0] if uses else total for uses, total in zip(of_uses, sums, strict=True)), *further]


class _LayerCall(NamedTuple):
    """A call of a layer, as its graphs know it.

    Attributes:
        forward: the layer's forward, called with the module first.
        arguments: tensors and all else.
        flags: of the process; the first one is grad mode.
        stream: the current one.
        snapshot: of the layer's modules.
        family: the shape of its first tensor, and whether it trains.
    """

    forward: LayerForward
    arguments: Arguments
    flags: tuple[Any, ...]
    stream: int
    snapshot: Snapshot
    family: tuple[Any, ...]

    def autocast(self, device: str) -> torch.autocast:
        """The autocast that the call was made under."""
        _, _, is_on, dtype, caches, *_ = self.flags
        return torch.autocast(device, dtype, enabled=is_on, cache_enabled=caches)


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
        self._seen: dict[tuple[Any, ...], _LayerOutput] = {}
        self.pairs: dict[tuple[Any, ...], list[_GraphPair]] = {}
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

    def _call(self, forward: LayerForward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _LayerCall:
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
        return _LayerCall(forward, arguments, now, device.stream(), snapshot, family)

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

    def _pair(self, call: _LayerCall, key: tuple[Any, ...]) -> _GraphPair | None:
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
            pair = _GraphPair(self, call, output)
        except Exception as error:
            self.failures += 1
            if self.failures >= _PATIENCE:
                self.refused = f"it cannot be captured: {error}"[:300]
            graphs.clear()
            logger.info("a layer could not be captured as a CUDA graph: %s", error)
            raise RunEagerError("its capture failed") from None
        self.pairs.setdefault(key, []).append(pair)  # to settle may have dropped the list
        graphs.captured(pair)
        return pair

    def _first_sight(
        self, call: _LayerCall, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run eager, and remember what comes out and what else the forward does."""
        graphs, device, snapshot = self.graphs, self.graphs.device, call.snapshot
        read = [*call.arguments.tensors, *snapshot.parameters, *snapshot.buffers]
        versions, state = list(map(_version, read)), device.random_state()
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
                self._seen[key] = _LayerOutput(
                    type(out),
                    tuple([(t.shape, t.stride(), t.dtype) if type(t) is Tensor else None for t in parts]),
                    tuple([None if type(part) is Tensor else part for part in parts]),
                    not torch.equal(state, device.random_state()),
                )
        return out

    def _forget(self, condition: Callable[[_GraphPair], bool]) -> None:
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
        self.in_flight: dict[int, tuple[weakref.ref[_Flight], Any]] = {}
        self.with_activations: dict[int, _GraphPair] = {}
        self._outputs: dict[int, weakref.ref[Tensor]] = {}
        self._grad_buffers: dict[tuple[Any, ...], Tensor] = {}
        self._shared: dict[tuple[Any, ...], list[_Shared]] = {}
        self._recent: OrderedDict[Any, None] = OrderedDict()
        self._families: set[Any] = set()
        self._tape: Any = None
        self._is_separate = self._is_waiting = False

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
            self._device = make_device(device)
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
        if buffer is None or _form(buffer) != _form(tensor):
            return None
        return buffer

    def shared_copy(self, place: int, tensor: Tensor) -> _Shared:
        """The static copy of an argument for all layers: one that no forward in flight needs with other contents."""
        copies = self._shared.setdefault((place, *_form(tensor)), [])
        for shared in copies:
            if shared.holds(tensor) or shared.is_free():
                return shared
        copies.append(_Shared(tensor))
        return copies[-1]

    def grad_buffer(self, output: Tensor) -> Tensor:
        """One buffer for the gradients of outputs alike: the replay that follows its copy reads it, and no other."""
        key = _form(output)
        if key not in self._grad_buffers:
            self._grad_buffers[key] = torch.zeros_like(output)
        return self._grad_buffers[key]

    def fits(self, pair: _GraphPair) -> bool:
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
        """Drop all graphs if that waits for the last flight, and it is over."""
        if self._is_waiting:
            self._land()

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

    def captured(self, pair: _GraphPair) -> None:
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

    def forget(self, pair: _GraphPair) -> None:
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


def make_device(device: torch.device) -> Any:
    """The device of graphs for tensors on this one.

    Raises:
        RunEagerError: if it is no CUDA device.
    """
    if device.type != "cuda":
        raise RunEagerError(f"its tensors are on {device.type}, not on a CUDA device")
    return CudaDevice(device)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty_as(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _copy(buffer: Tensor, tensor: Tensor) -> None:
    """Copy a tensor into a buffer with the same strides; of an expanded one, what is there."""
    source = tensor.detach()
    for dim, stride in enumerate(buffer.stride()):
        if not stride and buffer.shape[dim] > 1:
            buffer, source = buffer.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    buffer.copy_(source)


def _copies_of(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """New tensors with the values of these; those of one dtype by one kernel: x * 1 has the bits of x."""
    copies: list[Tensor | None] = list(tensors)
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            places.setdefault(tensor.dtype, []).append(place)
    for of_dtype in places.values():
        grads: Any = [tensors[place] for place in of_dtype]
        results = torch._foreach_mul(grads, 1) if len(grads) > 1 else [grads[0].clone()]
        for place, copy in zip(of_dtype, results, strict=True):
            copies[place] = copy
    return copies


class _FlatGrads(NamedTuple):
    """Small gradients of a layer's parameters, one after the other in one tensor.

    Attributes:
        places: theirs among all gradients.
        forms: tensors of their shapes, without memory.
        grads: all of them, flat.
    """

    places: list[int]
    forms: list[Tensor]
    grads: Tensor

    def copies(self) -> Sequence[Tensor]:
        """The gradients as parts of one new tensor."""
        parts: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(self.grads.clone(), self.forms)
        return parts


def _flattened(grads: list[Tensor | None], first: int) -> tuple[list[Tensor | None], list[_FlatGrads]]:
    """Gradients without the small ones from the first parameter's on, and these, flat."""
    of_dtypes: dict[torch.dtype, list[int]] = {}
    for place, grad in enumerate(grads):
        if place >= first and grad is not None:
            of_dtypes.setdefault(grad.dtype, []).append(place)
    rest, flat = list(grads), []
    for places in of_dtypes.values():
        members: Any = [grads[place] for place in places]
        if len(members) > 1 and sum(grad.numel() * grad.element_size() for grad in members) <= _FLAT:
            forms = [torch.empty(grad.shape, device="meta") for grad in members]
            flat.append(_FlatGrads(places, forms, torch._C._nn.flatten_dense_tensors(members)))
            for place in places:
                rest[place] = None
    return rest, flat


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

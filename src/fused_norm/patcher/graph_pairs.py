"""A pair of CUDA graphs, a layer's forward and backward for one kind of call: capture, replay, and what is in flight.

The rules that hold are those of ``cuda_graphs.py``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .graph_gradients import FlatGrads, Uses, copies_of, flattened
from .graph_guards import Arguments, RunEagerError, Snapshot

if TYPE_CHECKING:
    from .cuda_graphs import LayerGraphs

LayerForward = Callable[..., Any]

_version = attrgetter("_version")
_numbers = itertools.count()


class Flight:
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


class SharedInput:
    """A static copy of an argument that layers have in common, such as cosines and a mask: copied once a forward."""

    def __init__(self, tensor: Tensor) -> None:
        self.buffer = _empty_as(tensor)
        self._source: weakref.ref[Tensor] | None = None
        self._version = -1
        self.flights: list[weakref.ref[Flight]] = []

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


class LayerOutput(NamedTuple):
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
    def forward(ctx: Any, pair: GraphPair, held: list[Tensor], *inputs: Tensor) -> Any:
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


class GraphPair:
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

    def __init__(self, graphs: LayerGraphs, call: LayerCall, output: LayerOutput) -> None:
        self._graphs = graphs
        device = self._device = graphs.device
        self.number = next(_numbers)
        self._output = output
        self._call = call._replace(arguments=call.arguments._replace(tensors=[]))
        self.family, self.snapshot = call.family, call.snapshot
        tensors, is_training = call.arguments.tensors, call.flags[0]
        self.differentiable = [i for i, t in enumerate(tensors) if t.requires_grad] if is_training else []
        self.trained = [p for p in call.snapshot.parameters if p.requires_grad] if is_training else []
        self.is_training = bool(self.differentiable or self.trained)
        self._flight: weakref.ref[Flight] | None = None
        self.inputs: list[Tensor] = []
        self.shared: dict[int, SharedInput] = {}
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
        self._uses: Uses | None = None
        self._grads: list[Tensor | None] = []
        self._flat_grads: list[FlatGrads] = []
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
            if self.is_training:
                assert self._uses is not None
                self.output_grads = [
                    graphs.grad_buffer(buffer) if is_differentiable else None
                    for buffer, is_differentiable in zip(self.outputs, self._uses.are_differentiable, strict=True)
                ]
                self._replay_backward, self._backward_graph = device.capture(self._backward)
                self._grads = [None if grad is None else device.without_owner(grad) for grad in self._grads]
                self._flat_grads = [flat._replace(grads=device.without_owner(flat.grads)) for flat in self._flat_grads]
                self.blocks = after - before
                before = after
            if kept := device.live_blocks() - before:  # scratch that a kernel keeps is there at the next try
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
        if self.is_training:
            self._uses = Uses(result, [*(heads[i] for i in self.differentiable), *leaves])
            self._repeated = self._uses.repeated

    def _backward(self) -> None:
        assert self._uses is not None
        grads = self._uses.gradients(self.output_grads, retain_graph=True)
        self._grads, self._flat_grads = flattened(grads, len(self.differentiable))

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
        self._uses = None

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
        self._device.take_turn(self._call.stream)
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

    def launch(self, held: list[Tensor]) -> Flight:
        """Replay the forward; its flight holds these inputs."""
        state = self._device.random_state() if self._output.draws else None
        flight = Flight(state, list(map(_version, self.trained)), held)
        if self.is_training:
            self._flight = weakref.ref(flight)
            self._graphs.in_flight[self.number] = self._flight, self.family
            for shared in self.shared.values():
                shared.flights.append(self._flight)
        self._replay_forward()
        return flight

    def backward(self, flight: Flight, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
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
        self._device.take_turn(self._call.stream)
        for buffer, grad in zip(self.output_grads, grads, strict=True):
            if buffer is not None:
                if grad is None:
                    buffer.zero_()
                else:
                    buffer.copy_(grad)
        self._replay_backward()
        copies = copies_of(self._grads)
        for flat in self._flat_grads:
            for place, copy in zip(flat.places, flat.copies(), strict=True):
                copies[place] = copy
        return copies

    def _recomputed_grads(
        self, flight: Flight, saved: Sequence[Tensor], grads: Sequence[Tensor | None], *, creates_graph: bool
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
                uses = Uses(results, [*(inputs[place] for place in self.differentiable), *leaves])
                return uses.gradients(grads, create_graph=creates_graph)
        finally:
            if after is not None:
                device.set_random_state(after)


class LayerCall(NamedTuple):
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


def form_of(tensor: Tensor) -> tuple[Any, ...]:
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

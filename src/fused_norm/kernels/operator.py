"""The base of every fused operator: all ways that a call can take to its kernels, or to the PyTorch formula."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..spec import NormSpec
from . import reference
from .arguments import TensorRules, Unsupported
from .autocast import autocast_dtype
from .backward import (
    BackwardArguments,
    BackwardImpl,
    BackwardState,
    Grads,
    Scalars,
    Tensors,
    function_of_arguments,
    function_of_recording,
)
from .compiler_policy import inductor_is_faster
from .interceptors import Interceptors
from .plain_calls import PLAIN, dispatch_modes, is_grad_needed, is_plain_call
from .recording import Recording, SingleCall, caches, key_function, record, remember
from .registration import define, filled, names_of
from .sharded import call_on_parts, is_sharded, is_taken, why_not_on_parts
from .switch import modes, switch, why_seen_by_mode
from .triton.call import Call
from .triton.devices import is_transformed, runs_kernels_on
from .triton.memory import memory_order

Results = tuple[Any, ...]


class Recompute(NamedTuple):
    """A call that computes outputs of another call again, bit for bit, from arguments saved for a backward anyway.

    Its outputs are the first ones of that other call, in their order, with the same strides.
    """

    operator: Operator
    arguments: Sequence[Any]

    def outputs(self) -> tuple[Tensor, ...]:
        """Compute the outputs, outside of autograd."""
        with torch.no_grad():
            outputs = self.operator(*self.arguments)
        return outputs if isinstance(outputs, tuple) else (outputs,)


calls = Interceptors()
"""Holds each thread's interceptor, to which operators hand their calls, except traced ones, if there is one.

The interceptor's ``called(operator, arguments)`` returns the outputs, which are ``operator.results_of(*arguments)``.
"""


class Operator(ABC):
    """A differentiable operator; a subclass says what is launched, and there is one instance of each.

    There are three ways in: ``operator.checked(*tensors, *options)`` for users' arguments, ``try_fused`` for those of
    patched modules, and ``operator(*tensors, *options)`` for arguments that kernels certainly take. ``why_unsupported``
    alone decides whether they do. If not, ``checked`` runs the PyTorch reference, and ``try_fused`` returns the reason.
    A call that kernels take runs in one of four ways:

    - a plain eager call (``is_plain_call``) repeats a recording, or is recorded now;
    - it runs directly if it cannot be recorded;
    - a call on DTensors runs on the part that the device holds;
    - torch.compile, dispatch modes and tensor subclasses see the operators registered under ``torch.ops.fused_norm``,
      or in compiled graphs the reference, if the compiler is faster with it.
    """

    name: ClassVar[str]
    plain_name: ClassVar[str] = ""
    """The name of the operator whose outputs these are, if this is another form of it."""
    tensors: ClassVar[str]
    """The schema of the tensors; the first of them is always present."""
    options: ClassVar[str] = ""
    """The schema of what follows the tensors: first ``NormSpec spec``, if the operator has a norm.

    A registered operator takes the fields of the spec in its place, and before the tensors.
    """
    outputs: ClassVar[tuple[str, ...]]
    not_differentiable: ClassVar[tuple[str, ...]] = ()
    """The outputs that no gradient flows into."""
    same_shape: ClassVar[tuple[str, ...]] = ()
    """The tensors that must have the shape of the first one."""
    other_shapes: ClassVar[tuple[str, ...]] = ()
    """The tensors whose shape ``check_options`` checks."""
    other_rules: ClassVar[tuple[str, ...]] = ()
    """The tensors that ``check_options`` alone checks."""
    takes_dtensors: ClassVar[bool] = True
    """Each device can compute its part of DTensors that are sharded between rows."""
    extra_saved: ClassVar[tuple[str, ...]] = ()
    """Further results of the forward, computed for the backward alone."""
    copies: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The weights that the forward may copy, mapped to the inputs whose gradients read them.

    A copy, called ``weight_copy``, is a result after ``extra_saved``, and is saved in place of the weight. The forward
    makes it if stock code does not save the weight itself, which other code may write into before the backward.
    """
    further_results: ClassVar[tuple[str, ...]] = ()
    """Results after ``copies`` that ``pack_outputs`` takes and nothing saves."""
    saved: ClassVar[str]
    """The schema of the tensors that the backward takes besides the gradients of the outputs, ``extra_saved`` last."""
    unhooked: ClassVar[tuple[str, ...]] = ()
    """The last of ``saved``: arguments without a gradient that stock code's context holds as attributes, so that
    saved-tensor hooks do not see them."""
    saved_scalars: ClassVar[str] = ""
    """The schema of what else it takes: first ``NormSpec spec``, if the operator has a norm."""
    gradients: ClassVar[tuple[str, ...]]
    """The names of the gradients, which are those of the first tensors in their order."""
    has_products: ClassVar[bool] = False
    """The operator contains products of matrices, which ``reference_backward`` rounds as stock code does; it computes
    the gradients of all other operators in float32, and rounds them once."""
    recomputed_by_itself: ClassVar[bool] = False
    """All arguments are saved for the backward, and the same call recomputes the outputs from them."""

    def __init__(self) -> None:
        """Register the operator with PyTorch."""
        self.tensor_names, self._option_names = names_of(self.tensors), names_of(self.options)
        self._saved_names, self._scalar_names = names_of(self.saved), names_of(self.saved_scalars)
        self.tensor_count, self.option_count = len(self.tensor_names), len(self._option_names)
        self.takes_spec = self._option_names[:1] == ["spec"]
        self.rules = TensorRules(self.tensor_names, self.tensors, self.same_shape, self.other_shapes, self.other_rules)
        self._copied = [name for name in self.copies if name in self.tensor_names]
        copies = [f"{name}_copy" for name in self._copied]
        self.result_names = (*self.outputs, *self.extra_saved, *copies, *self.further_results)
        self._forward_names = (*self.tensor_names, *self._option_names, *self.result_names)
        incoming, needed = [f"d{name}" for name in self.outputs], [f"need_{name}" for name in self.gradients]
        self._backward_names = (*incoming, *self._saved_names, *self._scalar_names, *needed)
        self._not_differentiable = tuple(self.outputs.index(name) for name in self.not_differentiable)
        schema = self.tensors, self.options, "bool training"
        self._forward_op = define(f"{self.name}_forward", schema, self.result_names, self._registered_forward)
        if type(self).backward is not Operator.backward:
            tensors, flags = [f"Tensor? {name}" for name in incoming], [f"bool {name}" for name in needed]
            arguments = *tensors, self.saved, self.saved_scalars, *flags
            self._backward_op = define(f"{self.name}_backward", arguments, self.gradients, self._registered_backward)
        OPERATORS[self.name] = self
        self.function, in_eager = function_of_arguments(self), function_of_recording(self)
        self._nodes = self.function._backward_cls, in_eager._backward_cls
        self.recordings: dict[Any, tuple[Recording, ...]] = {}
        """The recordings of calls, by ``_key`` of their arguments."""
        caches.append(self.recordings)
        self._key = key_function(self.tensors, self.options)
        # The C++ half of `apply`: the Python around it looks after transforms, of which a plain call has none.
        self._apply = super(torch.autograd.Function, in_eager).apply  # type: ignore[misc]

    def check_options(self, *arguments: Any) -> Unsupported | None:
        """Check options, and that tensors are compatible with each other."""
        return None

    def why_reference_only(self, *arguments: Any) -> Unsupported | None:
        """Return why only the reference computes this call, whose tensors pass all other checks; None if kernels do."""
        return None

    def why_unlike_eager(self, *arguments: Any) -> str | None:
        """Return why the kernel's result would differ from the eager model code, or None."""
        return None

    @abstractmethod
    def reference(self, *arguments: Any) -> Any:
        """The outputs by PyTorch's own operators, with the roundings of stock code."""

    @abstractmethod
    def forward(self, call: Call, *arguments: Any, **how: Any) -> Results:
        """Allocate ``outputs``, ``extra_saved``, ``copies``, ``further_results``; ``call`` launches what writes them.

        ``how``: ``training``, without which all ``extra_saved`` is None, and ``copied``, the names of the weights to
        copy, if the operator has ``copies``.
        """

    def empty_results(self, call: Call, *arguments: Any, **how: Any) -> Results:
        """What ``forward`` returns, for whoever traces it; overridden if ``forward`` computes at once."""
        return self.forward(call, *arguments, **how)

    def save(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Tensors, Scalars]:
        """Pick from a forward's arguments and results what the backward takes, ``saved`` and ``saved_scalars``.

        A scalar that has no name of its own is of a tensor: ``x_dtype``, or ``x_order``, the order of x in memory.
        """
        values = self.by_name(arguments, results)
        for name in self._scalar_names:
            if name not in values:
                tensor, kind = values[name.rpartition("_")[0]], name.rpartition("_")[2]
                if kind == "dtype":
                    values[name] = None if tensor is None else tensor.dtype
                else:
                    values[name] = [] if tensor is None else memory_order(tensor)
        for name in self._copied:
            copy = values[f"{name}_copy"]
            # A registered operator returns an empty tensor if there is no copy.
            if copy is not None and values[name] is not None and copy.shape == values[name].shape:
                values[name] = copy
        return tuple([values[name] for name in self._saved_names]), tuple([values[name] for name in self._scalar_names])

    def reads_copy(self, weight: Tensor, arguments: Sequence[Any]) -> bool:
        """Return whether the backward of stock code reads a tensor made of a weight, and not the weight.

        ``weight`` is one of ``arguments``, and named in ``copies``. Unless overridden, it is that of a norm.
        """
        if not self.takes_spec:
            return False
        spec = arguments[self.tensor_count]
        is_cast = spec.casting in ("gemma", "rounded_gamma") and spec.casts_weight and weight.dtype != torch.float32
        return spec.zero_centered or is_cast

    def copied(self, arguments: Sequence[Any], *, traced: bool = False) -> list[str]:
        """The weights to copy for the backward: those that stock code does not save themselves.

        It saves none for a gradient that is not needed, which cannot be told of tensors that are ``traced``.
        """
        args = self.by_name(arguments)
        copied = []
        for name in self._copied:
            if args[name] is not None:
                users = [args[user] for user in self.copies[name] if args.get(user) is not None]
                is_unused = not traced and not any(user.requires_grad for user in users)
                if is_unused or self.reads_copy(args[name], arguments):
                    copied.append(name)
        return copied

    def sources(self, arguments: Sequence[Any], saved: Tensors) -> list[tuple[int, int]]:
        """Pairs of indices, in ``saved`` and arguments, of copies and their weights, if these need a gradient."""
        pairs = [(self._saved_names.index(name), self.tensor_names.index(name)) for name in self._copied]
        return [(at, i) for at, i in pairs if saved[at] is not arguments[i] and arguments[i].requires_grad]

    def as_saved(self, arguments: Sequence[Any], saved: Tensors) -> tuple[Any, ...]:
        """A call's arguments, each weight replaced by its copy if that was saved; ``saved`` may lack absent tensors."""
        if not self._copied:
            return tuple(arguments)
        args, present = self.by_name(arguments), iter([t for t in saved if t is not None])
        hooked = self._saved_names[: len(self._saved_names) - len(self.unhooked)]
        for name in hooked:
            weight = args.get(name, self)  # whatever is no argument is present
            tensor = None if weight is None else next(present)
            if tensor is not None and name in self._copied and tensor.data_ptr() != weight.data_ptr():
                args[name] = tensor
        return tuple(args.values())

    def _how(self, arguments: Sequence[Any], training: bool, *, traced: bool = False) -> dict[str, Any]:
        """The keyword arguments of ``forward``."""
        if not self._copied:
            return {"training": training}
        return {"training": training, "copied": self.copied(arguments, traced=traced) if training else ()}

    def saves_input(self, name: str, tensors: Tensors) -> bool:
        """Return whether the argument ``name`` itself is saved for the backward; ``tensors`` are all of the call's."""
        return name in self._saved_names

    def by_name(self, arguments: Sequence[Any], results: Sequence[Any] = ()) -> dict[str, Any]:
        """A forward's arguments, and its results if given, by their names."""
        return dict(zip(self._forward_names, (*arguments, *results), strict=False))

    def backward_by_name(self, given: BackwardArguments) -> dict[str, Any]:
        """A backward's arguments by their names: ``dy``, the gradient of an output, and ``need_dx`` among them."""
        values = *given.incoming, *given.saved, *given.saved_scalars, *given.needed
        return dict(zip(self._backward_names, values, strict=True))

    def backward(self, call: Call, given: BackwardArguments) -> Grads:
        """Allocate ``gradients``, None for those not needed; ``call`` launches what writes them.

        At least one output has a gradient.
        """
        raise NotImplementedError(f"{self.name} has no launch of its own for its backward")

    def empty_grads(self, call: Call, given: BackwardArguments) -> Grads:
        """What ``backward`` returns, for whoever traces it; overridden if ``backward`` computes at once."""
        return self.backward(call, given)

    def reference_backward(self, given: BackwardArguments) -> Grads:
        """Compute ``gradients`` by PyTorch's own operators, so that they can be differentiated again.

        By the autograd of ``reference``, unless overridden; arguments that are not saved are None. Gradients may have
        another dtype than their tensors, to which autograd casts them, and some may not be needed.
        """
        args = self.backward_by_name(given)
        tensors, options = ([args.get(name) for name in names] for names in (self.tensor_names, self._option_names))
        if not self.has_products:
            tensors = [*map(reference.widened, tensors)]
        return reference.gradients_of(
            lambda *tensors: self.reference(*tensors, *options), tensors, given.incoming, given.needed
        )

    def owns(self, node: Any) -> bool:
        """Return whether a node of the autograd graph is that of a call of this operator."""
        return isinstance(node, self._nodes)

    def scalars_of(self, node: Any) -> Scalars:
        """``saved_scalars`` of a node that this operator ``owns``."""
        state = node.recording.backward_state if hasattr(node, "recording") else node.state
        scalars: Scalars = state.scalars
        return scalars

    def unhooked_of(self, node: Any) -> Tensors:
        """``unhooked`` of a node that this operator ``owns``."""
        tensors: Tensors = node.sources
        return tensors[len(tensors) - len(self.unhooked) :]

    def compute_grads(self, impl: BackwardImpl, given: BackwardArguments) -> Grads:
        """``gradients`` by an implementation, None for those not needed.

        By ``KernelBackward`` they are written when its call has run.
        """
        grads = impl(self, given) if any(given.needed) else (None,) * len(self.gradients)
        return tuple([grad if need else None for grad, need in zip(grads, given.needed, strict=True)])

    def recompute(self, arguments: Sequence[Any], results: Sequence[Any]) -> Recompute | None:
        """The call that recomputes the first ``outputs`` of this one, bit for bit, from what is saved anyway.

        ``results``: those of ``forward``. None for outputs that cannot be recomputed.
        """
        return Recompute(self, arguments) if self.recomputed_by_itself else None

    def is_elementwise(self, *tensors: Any) -> bool:
        """Return whether an output element depends only on inputs at its position, so that DTensors may split rows."""
        return False

    def pack_outputs(self, arguments: Sequence[Any], results: Sequence[Any], *, trained: bool) -> Any:
        """Pack the outputs for the caller. Some operators return the same output once per consumer, or an argument."""
        return results[0] if len(self.outputs) == 1 else tuple(results[: len(self.outputs)])

    def group_outputs(self, outputs: Any) -> list[tuple[Tensor, ...]]:
        """Group the returned tensors by output."""
        return [(y,) for y in (outputs if isinstance(outputs, tuple) else (outputs,))]

    def without_gradient(self, needed: Sequence[bool]) -> tuple[int, ...]:
        """Indices of returned tensors that are not differentiable, given which gradients are needed."""
        return self._not_differentiable

    def public_name(self, *arguments: Any) -> str:
        """The name of the public function that makes this call."""
        return self.plain_name or self.name

    def why_unsupported(self, *arguments: Any) -> Unsupported | None:
        """Decide whether kernels take a call: None, or the reason why not.

        Wrong arguments, for which public functions raise, come before those that the reference alone can compute.
        """
        tensors = arguments[: self.tensor_count]
        spec = arguments[self.tensor_count] if self.takes_spec else None
        refusal = self.rules.check(tensors, spec) or self.check_options(*arguments)
        if refusal is not None:
            return refusal
        reason = self._why_no_kernels(*tensors)
        if reason is None and is_plain_call(tensors):
            reason = self._why_not_saved(arguments)
        elif reason is None and (self.not_differentiable or not self.takes_dtensors):
            reason = "it has no form for DTensors" if any(map(is_sharded, tensors)) else None
        elif reason is None:
            rows = [t for t, is_shared in zip(tensors, self.rules.is_shared, strict=True) if not is_shared]
            elementwise = self.is_elementwise(*tensors)
            reason = why_not_on_parts(rows, self.rules.weights(tensors), elementwise=elementwise)
        return self.why_reference_only(*arguments) if reason is None else Unsupported(reason)

    def _why_no_kernels(self, *tensors: Any) -> str | None:
        """Return the reason that no kernel takes the operator's first tensors, whatever the others are; or None."""
        if runs_kernels_on(*tensors):
            return None
        if is_transformed():
            return "" if torch.jit.is_tracing() else "torch.func or forward AD transforms it"
        for name, tensor in zip(self.tensor_names, tensors, strict=False):
            if tensor is not None and tensor.dtype == torch.float64:
                return f"{name} is {tensor.dtype}"
        return f"kernels do not run on {tensors[0].device.type}"

    def _why_not_saved(self, arguments: Sequence[Any]) -> str | None:
        """Return the reason that autograd cannot save a tensor that the kernels would save; None if it can."""
        tensors = arguments[: self.tensor_count]
        if is_grad_needed(tensors):
            copied = self.copied(arguments)
            for name, t in zip(self.tensor_names, tensors, strict=True):
                if t is not None and t.is_inference() and name not in copied and self.saves_input(name, tensors):
                    return f"{name} was made in inference mode, and is needed in the backward"
        return None

    def checked(self, *arguments: Any) -> Any:
        """The outputs, for arguments of any kind, by the reference if kernels do not take them.

        Raises:
            TypeError: for arguments of a wrong type or dtype.
            ValueError: for wrong values, and tensors that are not compatible.
        """
        outputs, _ = self.try_fused(*arguments, replaces=None)
        if outputs is not None:
            return outputs
        refusal = self.why_unsupported(*arguments)
        if refusal is None:
            return self(*arguments)
        if refusal.error is not None:
            raise refusal.error(f"{self.public_name(*arguments)}: {refusal.reason}")
        return self.reference(*arguments)

    def try_fused(
        self, *arguments: Any, replaces: Any = "stock code", unless: Callable[..., str | None] | None = None
    ) -> tuple[Any, str | None]:
        """The outputs of a call in place of stock code, and None; or None, and why stock code has to run.

        A call that is recorded is repeated; it was checked before. All others are checked and recorded. An empty reason
        is not logged, such as that of stock code that is left to the compiler.

        Args:
            arguments: those of the call, of any kind; a spec may be None if its eps is no number that kernels take.
            replaces: the key of the stock code. Code that rounds in other places has another key. None if there is no
                such code: then the call is repeated if it is recorded, and otherwise not made.
            unless: returns a further reason, or None, for arguments that kernels take.
        """
        if replaces is not None:
            if switch.depth:
                return None, ""
            if (switch.latest_mode is not None or modes()) and (mode := why_seen_by_mode()) is not None:
                return None, mode
            if self.takes_spec:
                spec = arguments[self.tensor_count]
                if spec is None:
                    return None, "its eps is not a finite number of at least 0"
                if spec.casting == "none" and isinstance(arguments[0], Tensor) and autocast_dtype(arguments[0]):
                    return None, "autocast changes what an uncast norm rounds to"
        # What `is_plain_call` asks, but for the questions on tensors, which guards ask: in two ways, to save a frame.
        if not (torch.compiler.is_compiling() or forward_ad._current_level >= 0 or dispatch_modes()):
            try:
                recordings = self.recordings.get(self._key(*arguments), ())
            except (AttributeError, RuntimeError, TypeError):  # no tensor, or one without sizes or with symbolic ones
                recordings = ()
            is_observed = Interceptors.active and calls.interceptor is not None
            for recording in recordings:
                if replaces is None or replaces in recording.may_replace:
                    if is_observed:
                        if recording.fits(*arguments):
                            return calls.interceptor.called(self, arguments), None
                    elif (outputs := recording.call(*arguments)) is not None:
                        return outputs, None
        return (None, None) if replaces is None else self._try_new(arguments, replaces, unless)

    def _try_new(
        self, arguments: tuple[Any, ...], replaces: Any, unless: Callable[..., str | None] | None
    ) -> tuple[Any, str | None]:
        """Check a call that has no recording for this stock code, run it and record it; returns as ``try_fused``."""
        # If no kernel runs on this device, other problems are irrelevant.
        reason = self._why_no_kernels(arguments[0]) if isinstance(arguments[0], Tensor) else None
        if reason is None:
            refusal = self.why_unsupported(*arguments)
            reason = None if refusal is None else refusal.reason
        if reason is None:
            reason = self._why_unlike_eager(*arguments)
        if reason is None and unless is not None:
            reason = unless(*arguments)
        if reason is not None:
            return None, reason
        # Not `is_exporting()`, which Dynamo of PyTorch 2.11 takes to be true in all that it traces.
        if torch.compiler._is_exporting_flag or inductor_is_faster(arguments[0]):
            return None, ""
        outputs = self(*arguments)
        if is_plain_call(arguments[: self.tensor_count]):
            for recording in self.recordings.get(self._key(*arguments), ()):
                if recording.fits(*arguments):
                    recording.may_replace.add(replaces)
        return outputs, None

    def _why_unlike_eager(self, *arguments: Any) -> str | None:
        """``why_unlike_eager``, and tensors with a behaviour of their own, which stock code respects."""
        for name, tensor in zip(self.tensor_names, arguments, strict=False):
            if tensor is not None and type(tensor) not in PLAIN and not is_taken(tensor):
                return f"{name} is a {type(tensor).__name__}"
        return self.why_unlike_eager(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        """The outputs, for arguments that kernels certainly take."""
        if torch.compiler.is_compiling():
            if inductor_is_faster(arguments[0]):
                return self.reference(*arguments)
            # A comparison makes a float a constant of the graph; a symbolic one breaks Dynamo's autograd functions.
            options = arguments[self.tensor_count :]
            if 0.0 in ((options[0].eps, *options[1:]) if self.takes_spec else options):
                pass
            return self._registered(*arguments)
        if calls.interceptor is not None:
            return calls.interceptor.called(self, arguments)
        return self.results_of(*arguments)

    def results_of(self, *arguments: Any) -> Any:
        """Run an untraced call, ignoring any interceptor."""
        tensors = arguments[: self.tensor_count]
        if not is_plain_call(tensors):
            return self._registered(*arguments)
        for recording in self.recordings.get(self._key(*arguments), ()):
            outputs = recording.call(*arguments)
            if outputs is not None:
                return outputs
        outputs = self._recorded(arguments)
        return self._launched(*arguments) if outputs is None else outputs

    def _recorded(self, arguments: tuple[Any, ...]) -> Any:
        """The outputs of a plain call, which is recorded; None if it cannot be."""
        tensors, options = arguments[: self.tensor_count], arguments[self.tensor_count :]
        build, trained = self._builder(tensors, options)
        recorded = record(tensors, options, build, apply=self._apply if trained else None)
        if recorded is None:
            return None
        recording, outputs = recorded
        remember(self.recordings, self._key(*arguments), recording)
        return outputs

    def _launched(self, *arguments: Any) -> Any:
        """The outputs of a plain call that is not recorded."""
        tensors = arguments[: self.tensor_count]
        build, trained = self._builder(tensors, arguments[self.tensor_count :])
        return self._apply(SingleCall(build), *tensors) if trained else Call.at_once(build, *tensors)

    def _builder(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Callable[..., Any], bool]:
        """A function that builds a plain call of its tensors, as ``record`` takes it; and whether it is trained."""
        trained = is_grad_needed(tensors)
        needed = [t is not None and t.requires_grad for t in tensors[: len(self.gradients)]]
        nondiff = self.without_gradient(needed) if trained else ()

        def build(call: Call, *tensors: Tensor | None) -> Any:
            arguments = *tensors, *options
            results = self.forward(call, *arguments, **self._how(arguments, trained))
            if trained:
                return self.outputs_and_saved(arguments, results, nondiff)
            return self.pack_outputs(arguments, results, trained=False)

        return build, trained

    def outputs_and_saved(
        self, arguments: Sequence[Any], results: Sequence[Any], nondiff: Sequence[int]
    ) -> tuple[Any, Tensors, Tensors, BackwardState]:
        """The outputs of a trained call, and what its backward needs, as ``record`` takes them.

        Tensors that saved-tensor hooks do not see are the weights whose copies are saved, and then ``unhooked``.
        """
        outputs = self.pack_outputs(arguments, results, trained=True)
        saved, scalars = self.save(arguments, results)
        sources = [] if torch.compiler.is_compiling() else self.sources(arguments, saved)
        hooked, weights = len(saved) - len(self.unhooked), [arguments[source] for _, source in sources]
        state = BackwardState(scalars, nondiff, [at for at, _ in sources])
        return outputs, tuple(saved[:hooked]), (*weights, *saved[hooked:]), state

    def _registered(self, *arguments: Any) -> Any:
        """The outputs of a call that is not plain: by the parts of DTensors, or by the registered operators."""
        tensors, options = arguments[: self.tensor_count], arguments[self.tensor_count :]
        if is_sharded(tensors[0]):
            return call_on_parts(lambda *parts: self.results_of(*parts, *options), tensors, self.rules.is_shared)
        if is_grad_needed(tensors):
            return self.function.apply(*arguments)
        return self.pack_outputs(arguments, self.run(*arguments, training=False), trained=False)

    def run(self, *arguments: Any, training: bool) -> tuple[Any, ...]:
        """``forward`` by the registered operator."""
        results = self._forward_op(*self._spec_first(arguments, self.tensor_count), training)
        return (results,) if isinstance(results, Tensor) else results

    def run_backward(self, given: BackwardArguments) -> Grads:
        """``backward`` by the registered operator."""
        arguments = *given.incoming, *given.saved, *given.saved_scalars, *given.needed
        grads = self._backward_op(*self._spec_first(arguments, len(given.incoming) + len(given.saved)))
        return (grads,) if isinstance(grads, Tensor) else grads

    def _registered_forward(self, is_traced: bool, *arguments: Any) -> Any:
        *args, training = self._spec_at(self.tensor_count, arguments)
        how = self._how(args, training, traced=True)
        results = self.empty_results(Call(), *args, **how) if is_traced else Call.at_once(self.forward, *args, **how)
        return filled(results, args[0])

    def _registered_backward(self, is_traced: bool, *arguments: Any) -> Any:
        outputs, grads = len(self.outputs), len(self.gradients)
        scalars = outputs + len(self._saved_names)
        args = self._spec_at(scalars, arguments)
        incoming = args[:outputs]
        given = BackwardArguments(incoming, args[outputs:scalars], tuple(args[scalars:-grads]), args[-grads:])
        results = self.empty_grads(Call(), given) if is_traced else Call.at_once(self.backward, given)
        return filled(results, next(d for d in incoming if d is not None))

    def _spec_first(self, arguments: Sequence[Any], index: int) -> Sequence[Any]:
        """The arguments of a registered operator: the fields of the spec, which is at ``index``, before the others."""
        if not self.takes_spec:
            return arguments
        spec = arguments[index]
        fields = spec.casting, spec.zero_centered, spec.eps, spec.casts_weight
        return *fields, *arguments[:index], *arguments[index + 1 :]

    def _spec_at(self, index: int, arguments: Sequence[Any]) -> Sequence[Any]:
        """The inverse of ``_spec_first``."""
        if not self.takes_spec:
            return arguments
        casting, zero_centered, eps, casts_weight, *others = arguments
        spec = NormSpec(casting, zero_centered, eps=eps, casts_weight=casts_weight)
        return *others[:index], spec, *others[index:]


OPERATORS: dict[str, Operator] = {}
"""Every operator by its name; importing a file adds its operators."""

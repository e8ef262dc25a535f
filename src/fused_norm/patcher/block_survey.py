"""The survey of one module whose forward may be rewritten: a row for each of its sites, and its change of class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from ..options import FuseOptions
from ..spec import Kind
from .activation_recognition import recognise_activation
from .class_swap import (
    ClassChange,
    built_upon,
    change_to,
    class_forward_replaced,
    foreign_forward,
    fused_block_class,
    fused_forward_replaced,
    is_called_around,
    is_called_in_parallel,
    stock_class,
)
from .fused_block import FusedBlock
from .fused_norm_module import has_hooks, has_origin_forward
from .norm_recognition import looks_like_norm, subtracts_mean
from .patch_report import Cause, Site
from .patterns import Patterns, patterns_of, rotation_of
from .patterns.adds import Add, MissedAdd
from .patterns.calls import Rewrite
from .patterns.gates import ACTIVATION_FUNCTION, Called
from .patterns.heads import QK_NAME, Heads
from .patterns.rotations import ROTATION_NAME
from .probe import UnrecognisedError
from .source import SourceError, WrappedError, global_of, names_in, returns_sum


@dataclass(frozen=True)
class SurveyedModel:
    """A model's modules by path, their paths by identity, the rows of its norms, and the options."""

    modules: dict[str, nn.Module]
    paths: dict[int, str]
    norm_sites: dict[str, Site]
    options: FuseOptions


class BlockSurvey:
    """The survey of one module whose forward may be rewritten: a layer, an attention or an MLP."""

    def __init__(self, path: str, model: SurveyedModel, *, is_layer: bool) -> None:
        self.path, self.model = path, model
        self.module = model.modules[path]
        self.changes: list[ClassChange] = []
        self._is_layer = is_layer
        self._origin: Any = stock_class(self.module)
        self._owner = foreign_forward(self.module)
        self._fixed = isinstance(self.module, FusedBlock) and built_upon(self.module)
        self._done: tuple[Rewrite, ...] = ()
        if isinstance(self.module, FusedBlock) and has_origin_forward(type(self.module)):
            self._done = self.module.fused_norm_rewrites
        self._rewrites: list[Rewrite] = []

    def rows(self) -> list[Site]:
        """The module's rows; afterwards ``changes`` holds the change of class that they need."""
        try:
            patterns = patterns_of(self._origin)
        except SourceError as error:
            rows = self._without_patterns(str(error), replaced=isinstance(error, WrappedError))
        else:
            rows = [row for index, add in enumerate(patterns.adds) for row in self._survey_add(index, add)]
            rows += [row for missed in patterns.missed_adds for row in self._survey_missed_add(missed)]
            rows += self._survey_rotations(patterns)
            rows += self._survey_gates(patterns)
            rows += self._without_patterns(None, rows)
        if self._owner is not None or self._fixed:
            return rows
        try:
            rewrites = tuple(self._rewrites)
            new = fused_block_class(self._origin, rewrites) if rewrites else self._origin
        except SourceError as error:
            new = self._origin
            rows = [row.kept_for(str(error)) for row in rows]
        if new is not self._origin and (owner := fused_forward_replaced(new)):
            return [row.kept_for(owner, "overridden") for row in rows]
        self.changes = change_to(self.module, new)
        return rows

    def _without_patterns(self, reason: str | None, rows: Sequence[Site] = (), *, replaced: bool = False) -> list[Site]:
        """A row of each kind that ``rows`` has none of, for what other code has changed, and for an unreadable layer.

        What a module had before follows from what it holds, what was fused in it, and the names in its forward.
        ``reason``: why the source cannot be read, None where it can; ``replaced``: that is another's doing.
        """
        owner = self._owner or class_forward_replaced(self._origin) or (reason if replaced else None)
        why = owner or reason
        if why is None:
            return []
        rewrites = self.module.fused_norm_rewrites if owner and isinstance(self.module, FusedBlock) else ()
        fused = {rewrite.pattern for rewrite in rewrites}
        heads = owner and any(self._holds_norm(name) for name in self.module._modules if QK_NAME.fullmatch(name))
        own_names = replaced or not owner  # those of a forward that another has replaced tell nothing
        kinds: dict[Kind, object] = {
            "residual": self._is_layer,
            "rope": heads or fused & {"heads", "rotations"} or (own_names and _names_rotation(self._origin)),
            "mlp": "gates" in fused or (replaced and _names_activation(self.module)),
        }
        known = {row.kind for row in rows}
        row = partial(Site, self.path, module=self._origin.__name__, reason=why)
        cause: Cause = "overridden" if owner else "unrecognised"
        return [row(kind=kind, cause=cause) for kind, there in kinds.items() if there and kind not in known]

    def _parts_done(self, pattern: str, index: int) -> tuple[str, ...] | None:
        """The parts of a match that are fused now; None where it is not."""
        done = (one.parts for one in self._done if (one.pattern, one.index) == (pattern, index))
        return next(done, None)

    def _survey_add(self, index: int, add: Add) -> Iterator[Site]:
        """The rows of an add: with the norm after it, and with the norm of its branch; none where it adds a number."""
        if self._adds_number(add):
            return
        done = self._parts_done("adds", index) or ()
        norm, inner, before = add.names
        dropout = before is not None and isinstance(self._member(inner or ""), nn.Dropout)
        parts = []
        after = None
        if norm is not None and self._holds_norm(norm):
            after = self._row(norm, "residual", "residual", "norm" in done)
            parts += ["norm"] if after.reason is None else []
            yield after
        name = before if dropout else inner
        if name is not None and self._holds_norm(name):
            row = self._row(name, "sandwich", "sandwich", "inner" in done)
            if after is not None and after.reason is None and not _alike(row, after):
                row = row.kept_for("it differs from the norm after the add in more than the weight")
            if row.reason is None:
                parts += ["inner", "dropout"] if dropout else ["inner"]
            yield row
        if parts:
            self._rewrites.append(Rewrite("adds", index, tuple(parts)))

    def _survey_missed_add(self, missed: MissedAdd) -> Iterator[Site]:
        """The rows of an add that reaches a norm in another way than is fused; none where it never does."""
        norms = [norm for norm in self._named(missed.norm) if self._holds_norm(norm)]
        reached = all(bool(getattr(self.module, name, truth)) == truth for name, truth in missed.conditions)
        if not norms or not reached or self._adds_number(missed):
            return
        if missed.function is not None and not returns_sum(global_of(self._origin, missed.function)):
            return
        for norm in norms:
            row = self._row(norm, "residual", "residual", already=False)
            yield row.kept_for(f"its sum, {shorten(missed.source, 80)}, reaches it in a way that is not rewritten")

    def _adds_number(self, add: Add | MissedAdd) -> bool:
        return any(isinstance(self._member(name), (int, float)) for name in add.attributes)

    def _named(self, norm: str) -> list[str]:
        """The norms that a ``MissedAdd`` may mean."""
        held, _, number = norm.partition(".")
        if number != "*" and not number.startswith("-"):
            return [norm]
        all_of_them = [f"{held}.{name}" for name in getattr(self._member(held), "_modules", ())]
        return all_of_them if number == "*" else all_of_them[int(number) :][:1]

    def _survey_rotations(self, patterns: Patterns) -> Iterator[Site]:
        """The rows of the rotations, each with the norms of queries and keys in front of it if there are any."""
        with_norms = {index: self._survey_heads(index, heads) for index, heads in enumerate(patterns.heads)}
        for index, rotation in enumerate(patterns.rotations):
            row = None if rotation.heads is None else with_norms[rotation.heads]
            if row is None:
                row = self._own_row("rope", self._parts_done("rotations", index) is not None)
                row = self._unless_unrecognised(row, rotation.rotate, rotation.arguments)
                self._rewrites += [Rewrite("rotations", index)] if row.reason is None else []
            yield row

    def _survey_heads(self, index: int, heads: Heads) -> Site | None:
        """The row of a rotation that is fused with the norms of queries and keys before it; None without one."""
        done = self._parts_done("heads", index)
        if not all(map(self._holds_norm, heads.names)) or self._both("qk", heads, done is not None).reason is not None:
            return None
        row = None
        if heads.rotate is not None:
            row = self._unless_unrecognised(self._both("rope", heads, "rotation" in (done or ())), heads.rotate, 4)
        fused = row is not None and row.reason is None
        self._rewrites.append(Rewrite("heads", index, ("rotation",) if fused else ()))
        return row if fused else None

    def _unless_unrecognised(self, row: Site, rotate: str, arguments: int) -> Site:
        """``row``, or one that says why the function called by this name, with so many arguments, is not fused."""
        if row.reason is not None:
            return row
        if not arguments:
            return row.kept_for(f"{rotate} takes other arguments than q, k, cos, sin")
        try:
            rotation_of(self._origin, rotate, arguments)
        except UnrecognisedError as error:
            owner = _owner_of(global_of(self._origin, rotate), self._origin)
            row = row if owner is None else row.kept_for(f"{rotate} was replaced, by {owner}", "overridden")
            return row.kept_for(str(error))
        return row

    def _survey_gates(self, patterns: Patterns) -> Iterator[Site]:
        """The rows of the products of something with an activation."""
        rows: dict[int, Site] = {}
        for index, gate in enumerate(patterns.gates):
            known = rows.get(gate.number)
            if known is not None and known.activation is not None:
                continue
            row, act = self._own_row("mlp", self._parts_done("gates", index) is not None), self._called(gate.act)
            if isinstance(act, nn.Module) and (has_hooks(act) or "forward" in vars(act)):
                row = row.kept_for("hooks or other code stand on its activation", "overridden")
            try:
                activation = recognise_activation(act)
            except UnrecognisedError as error:  # who hooks it may also have put attributes on it, as ZeRO-3 does
                if known is None and _looks_like_activation(gate.act.name, act):
                    rows[gate.number] = row.kept_for(str(error))
                continue
            row = replace(row, activation=activation.formula)
            if row.reason is None:
                self._rewrites.append(Rewrite("gates", index, activation=activation))
            rows[gate.number] = row
        yield from rows.values()
        for missed in patterns.missed_gates:
            with suppress(UnrecognisedError):
                formula = recognise_activation(self._called(missed.act)).formula
                reason = f"its product, {shorten(missed.source, 80)}, is written in a way that is not rewritten"
                yield replace(self._own_row("mlp", already=False), activation=formula).kept_for(reason)

    def _called(self, act: Called) -> Any:
        """The module or function that a match may take for an activation."""
        return global_of(self._origin, act.name) if act.is_function else self._member(act.name)

    def _both(self, option: Kind, heads: Heads, already: bool) -> Site:
        """The row of an attention, from the rows of its q norm and its k norm."""
        rows = [self._row(name, "rope", option, already) for name in heads.names]
        row = replace(next((row for row in rows if row.reason is not None), rows[0]), path=self.path)
        if not _alike(*rows) or _widths_differ(self.module, heads):
            return row.kept_for("its q and k norms differ in more than the weight")
        return row

    def _row(self, name: str, kind: Kind, option: Kind, already: bool) -> Site:
        """The row of a site that takes in the norm of this name: fused unless something prevents it.

        It has the first path of a norm that several modules share. ``option``: the kind of sites whose option decides;
        ``already``: it is fused now.

        Raises:
            FusedNormError: where it is not to be fused any more and other code has built on the fused class.
        """
        norm = self._member(name)
        path = self.model.paths[id(norm)]
        row = Site(path, kind, self._origin.__name__)
        site = self.model.norm_sites.get(path)
        if site is None:
            reason = f"its norm is wrapped in a {type(norm).__name__}, which is called as it is"
            return row.kept_for(reason, "overridden")
        row = replace(row, spec=site.spec, replaced=site.replaced)
        if site.reason is not None:
            return row.kept_for(f"its norm is kept: {site.reason}", site.cause)
        called_around = is_called_around(norm) if kind in ("sandwich", "rope") else is_called_in_parallel(norm)
        if has_hooks(norm) or called_around:
            return row.kept_for("hooks or other code stand on its norm", "overridden")
        return self._unless_prevented(row, option, norm, already)

    def _own_row(self, kind: Kind, already: bool) -> Site:
        """The row of a site of the module itself, without a norm: fused unless something prevents it.

        Raises:
            FusedNormError: as ``_row``.
        """
        return self._unless_prevented(Site(self.path, kind, self._origin.__name__), kind, self.module, already)

    def _unless_prevented(self, row: Site, option: Kind, selected: nn.Module, already: bool) -> Site:
        """``row``, kept if other code has the module or the options leave the ``selected`` one out."""
        if self._fixed and not already:
            reason = "other code has built on its layer since that was patched; remove_fused_norm before sharding"
            return row.kept_for(reason, "overridden")
        if self._owner is not None:
            return row.kept_for(self._owner, "overridden")
        if unwanted := why_deselected(option, row.path, selected, self.model.options):
            if self._fixed:
                change_to(self.module, self._origin)
            return row.kept_for(unwanted, "option")
        return row

    def _holds_norm(self, name: str) -> bool:
        """Return whether an attribute is a norm, or a wrapper (PEFT's) with nothing but norms inside.

        A LayerNorm, which is never fused, does not count.
        """
        norm = self._member(name)
        if id(norm) not in self.model.paths or subtracts_mean(norm):
            return False
        return all(not part._parameters if part._modules else looks_like_norm(part) for part in norm.modules())

    def _member(self, name: str) -> Any:
        """An attribute, or with ``name.0`` a module in a list that is one; None where there is none."""
        first, *rest = name.split(".")
        found = getattr(self.module, first, None)
        for part in rest:
            found = found._modules.get(part) if isinstance(found, nn.Module) else None
        return found


def _alike(one: Site, other: Site) -> bool:
    """Return whether the norms of two sites compute the same but for their weights."""
    specs = [row.spec and replace(row.spec, weighted=True) for row in (one, other)]
    return specs[0] is not None and specs[0] == specs[1]


def _widths_differ(attention: nn.Module, heads: Heads) -> bool:
    q_weight, k_weight = (getattr(getattr(attention, name), "weight", None) for name in heads.names)
    shapes = [getattr(weight, "ds_shape", getattr(weight, "shape", None)) for weight in (q_weight, k_weight)]
    return shapes[0] != shapes[1]


def why_deselected(kind: Kind, path: str, norm: nn.Module, options: FuseOptions) -> str | None:
    """The reason why the options leave a site of this kind out, if they do."""
    if not options.wants(kind):
        return f"switched off: {options.because(kind)}"
    return None if options.selects(path, norm) else "not selected by modules"


def _owner_of(function: Any, origin: type[nn.Module]) -> str | None:
    """The name of a function of another package than that of the class which calls it; None for one of its own."""
    if isinstance(function, nn.Module):  # with another forward bound to it, as `kernelize` does
        function = getattr(vars(function).get("forward"), "__func__", None)
    if not isinstance(function, FunctionType):
        return None
    if function.__module__.partition(".")[0] == origin.__module__.partition(".")[0]:
        return None
    return f"{function.__module__}.{function.__qualname__}"


def may_rotate_or_gate(module: nn.Module) -> bool:
    """Return whether a module may have a site of its own, without a norm; most are told apart by the names they use."""
    if isinstance(module, FusedBlock):
        return True
    origin: Any = type(module)
    return _names_rotation(origin) or _names_activation(module)


def _names_rotation(origin: Any) -> bool:
    """Return whether a forward uses the name of a rotary embedding that its module defines."""
    return any(ROTATION_NAME.search(name) and global_of(origin, name) is not None for name in names_in(origin))


def _names_activation(module: nn.Module) -> bool:
    """Return whether the forward of a module uses the name of an activation that it holds, or of a function."""
    names = names_in(stock_class(module))
    functions = (FunctionType, BuiltinFunctionType)
    held: dict[str, Any] = {name: child for name, child in vars(module).items() if isinstance(child, functions)}
    held |= {name: child for name, child in module._modules.items() if child is not None}
    return any(map(ACTIVATION_FUNCTION.search, names)) or any(
        name in names and _looks_like_activation(name, child) for name, child in held.items()
    )


def _looks_like_activation(name: str, act: Any) -> bool:
    """Return whether an attribute is an activation by its values, or by its name."""
    if isinstance(act, nn.Module) and next(act.parameters(), None) is not None:
        return False
    if "act" in name.lower():
        return True
    try:
        recognise_activation(act)
    except UnrecognisedError:
        return False
    return True

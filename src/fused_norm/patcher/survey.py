"""The survey of a model: a row for every site, and the changes of class that fuse those to be fused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..spec import FusedNormError, Kind
from .ahead import Successor
from .blocks import FusedBlock, layer_is_hooked
from .classes import SUCCESSOR, built_upon, foreign_forward, fused_block_class, fused_norm_class
from .heads import QK_NAME, Heads, HeadsRewrite
from .loops import loops_of
from .options import Choice, FuseOptions
from .probe import UnrecognisedError, looks_like_norm, recognise
from .report import Site
from .rewrite import Rewrite, patterns_of, rotation_of
from .runtime import FusedNorm, is_free
from .source import SourceError
from .stream import Add, AddRewrite


@dataclass(frozen=True)
class Change:
    """A module and the class that it is to have; for a layer, perhaps, what comes after it."""

    module: nn.Module
    new: type[nn.Module]
    successor: Successor | None = None


def survey(model: nn.Module, options: FuseOptions) -> tuple[list[Site], list[Change]]:
    """A row for every site, and the changes of class that fuse those to be fused; the model is not touched.

    Raises:
        FusedNormError: where a pattern of ``options.modules`` selects nothing.
    """
    modules = dict(model.named_modules())
    norms = {path: module for path, module in modules.items() if looks_like_norm(module)}
    for pattern in options.patterns:
        if not any(replace(options, modules=pattern).selects(path, module) for path, module in norms.items()):
            raise FusedNormError(
                f"modules={pattern!r} selects none of the {len(norms)} norms of {type(model).__name__}"
            )
    changes: list[Change] = []
    norm_sites = {}
    for path, module in norms.items():
        norm_sites[path], change = _survey_norm(path, module, options)
        changes += change
    rows = list(norm_sites.values())
    holders = _holders(norm_sites)
    successors = _successors(modules, holders)
    known = _Model(modules, {id(module): path for path, module in modules.items()}, norm_sites, options)
    for path in holders:
        block = _Block(path, known, successors.get(path))
        rows += block.survey()
        changes += block.changes
    return rows, changes


def _survey_norm(path: str, norm: nn.Module, options: FuseOptions) -> tuple[Site, list[Change]]:
    origin: Any = type(norm)
    site = Site(path, _kind_of(path), origin.__name__)
    if isinstance(norm, FusedNorm):
        return replace(site, spec=norm.fused_norm_spec), []
    try:
        known = recognise(norm)
    except UnrecognisedError as error:
        return replace(site, reason=str(error), cause="formula"), []
    site = replace(site, spec=known.spec)
    if owner := foreign_forward(norm):
        return replace(site, reason=owner, cause="owner"), []
    if choice := _deselected(site.kind, path, norm, options):
        return replace(site, reason=choice, cause="option"), []
    return site, [Change(norm, fused_norm_class(origin, known.spec, known.eps_name))]


@dataclass(frozen=True)
class _Next:
    """The norm after a layer, the layer that it belongs to, if any, and how the layer before finds it."""

    norm: nn.Module
    layer: nn.Module | None
    successor: Successor


@dataclass(frozen=True)
class _Model:
    """What is known of a model: its modules by path, their paths by identity, the rows of its norms, the options."""

    modules: dict[str, nn.Module]
    paths: dict[int, str]
    norm_sites: dict[str, Site]
    options: FuseOptions


class _Block:
    """One module whose forward may be rewritten, and what becomes of each site in it."""

    def __init__(self, path: str, model: _Model, following: _Next | None) -> None:
        self.path, self.model, self.following = path, model, following
        self.module = model.modules[path]
        self.changes: list[Change] = []
        self._is_layer = path.rpartition(".")[2].isdigit()
        self._origin = _own_class(self.module)
        self._already = self.module.fused_norm_rewrites if isinstance(self.module, FusedBlock) else ()
        self._rewrites: list[Rewrite] = []

    def survey(self) -> list[Site]:
        """Its rows; ``changes`` holds what fuses those to be fused."""
        try:
            patterns = patterns_of(self._origin)
        except SourceError as error:
            return [self._kept(self.path, "residual", str(error))] if self._is_layer else []
        rows = [row for index, add in enumerate(patterns.adds) for row in self._survey_add(index, add)]
        rows += [row for index, heads in enumerate(patterns.heads) for row in self._survey_heads(index, heads)]
        if self._is_layer and not any(row.kind == "residual" for row in rows):
            rows.append(self._kept(self.path, "residual", "no norm in its forward takes the sum of an add"))
        elif self._is_layer and patterns.adds and not any(add.last for add in patterns.adds):
            rows.append(self._kept(self.path, "residual", "it does not return the sum of its last add"))
        rewrites = tuple(self._rewrites)
        across = any(isinstance(one, AddRewrite) and one.norm and patterns.adds[one.index].last for one in rewrites)
        successor = self.following.successor if across and self.following else None
        if rewrites == self._already:
            if self.following and successor != vars(self.module).get(SUCCESSOR):  # it has come here from elsewhere
                self.changes = [Change(self.module, type(self.module), successor)]
            return rows
        try:
            self.changes = [Change(self.module, fused_block_class(self._origin, rewrites), successor)]
        except SourceError as error:
            return [replace(row, reason=row.reason or str(error), cause=row.cause or "formula") for row in rows]
        return rows

    def _survey_add(self, index: int, add: Add) -> Iterator[Site]:
        """The add with the norm after it, then the norm of the branch with the add."""
        already = next((one for one in self._already if isinstance(one, AddRewrite) and one.index == index), None)
        after = None
        if add.norm is not None and self._holds_norm(add.norm):
            after = self._row(self._path_of(add.norm), "residual", "residual", already is not None and already.norm)
            yield after
        elif add.norm is None and add.last and self._is_layer:
            after = self._survey_last(already is not None and already.norm)
            yield after
        inner = None
        if add.inner is not None and self._holds_norm(add.inner):
            inner = self._row(self._path_of(add.inner), "sandwich", "sandwich", already is not None and already.inner)
            if inner.reason is None and after is not None and after.reason is None and not _alike(inner, after):
                reason = "it differs from the norm after the add in more than the weight"
                inner = replace(inner, reason=reason, cause="formula")
            yield inner
        with_norm = (after is not None and after.reason is None) or (already is not None and already.norm)
        with_inner = inner is not None and inner.reason is None
        if with_norm or with_inner:
            self._rewrites.append(AddRewrite(index, with_norm, with_inner))

    def _survey_last(self, already: bool) -> Site:
        """The add that ends a layer and the norm that begins the next."""
        if self.following is None:
            return self._kept(self.path, "residual", "the sum at its end does not go straight to a norm")
        path = self.model.paths[id(self.following.norm)]
        if already:
            return self._row(path, "residual", "across", True)
        layers = [self.module, *([self.following.layer] if self.following.layer is not None else [])]
        if any(_edits_in_place(module) for module in layers):
            return self._kept(path, "residual", "layers write into tensors in place")
        if any(getattr(module, "gradient_checkpointing", False) for module in layers):
            return replace(self._kept(path, "residual", "gradient checkpointing is on"), cause="owner")
        if any(layer_is_hooked(module) for module in layers):
            return replace(self._kept(path, "residual", "hooks stand on the layers"), cause="owner")
        return self._row(path, "residual", "across", False)

    def _survey_heads(self, index: int, heads: Heads) -> Iterator[Site]:
        """The norms of queries and keys with the rotation after them."""
        already = next((one for one in self._already if isinstance(one, HeadsRewrite) and one.index == index), None)
        names = (heads.q_norm, heads.k_norm)
        if not all(self._holds_norm(name) for name in names):
            return
        together = self._both(
            [self._row(self._path_of(name), "rope", "qk", already is not None) for name in names], heads
        )
        rotated = together
        if heads.rotate is not None:
            done = already is not None and already.rotate
            rotated = self._both([self._row(self._path_of(name), "rope", "rope", done) for name in names], heads)
            if rotated.reason is None and not done:
                try:
                    rotation_of(self._origin, heads.rotate)
                except UnrecognisedError as error:
                    rotated = replace(rotated, reason=str(error), cause="formula")
            yield rotated
        if together.reason is None:
            self._rewrites.append(HeadsRewrite(index, heads.rotate is not None and rotated.reason is None))

    def _both(self, rows: list[Site], heads: Heads) -> Site:
        """The row of an attention, from those of its q and its k norm."""
        row = replace(next((row for row in rows if row.reason is not None), rows[0]), path=self.path)
        if row.reason is None and (not _alike(*rows) or _widths_differ(self.module, heads)):
            return replace(row, reason="its q and k norms differ in more than the weight", cause="formula")
        return row

    def _row(self, path: str, kind: Kind, choice: Choice, already: bool) -> Site:
        """The row of a site that takes in the norm at ``path``, fused unless something is in its way."""
        row = Site(path, kind, type(self.module).__name__)
        site = self.model.norm_sites.get(path)
        norm = self.model.modules[path]
        if site is None:
            reason = f"its norm is wrapped in a {type(norm).__name__}, which is called as it is"
            return replace(row, reason=reason, cause="owner")
        row = replace(row, spec=site.spec)
        if already:
            return row
        if site.reason is not None:
            return replace(row, reason=f"its norm is kept: {site.reason}", cause=site.cause)
        if kind in ("sandwich", "rope") and isinstance(norm, FusedNorm) and not is_free(norm):
            return replace(row, reason="hooks or other code stand on its norm", cause="owner")
        if isinstance(self.module, FusedBlock) and built_upon(self.module):
            reason = "other code has built on its layer since that was patched; remove_fused_norm before sharding"
            return replace(row, reason=reason, cause="owner")
        if owner := foreign_forward(self.module):
            return replace(row, reason=owner, cause="owner")
        if choice_ := _deselected(choice, path, norm, self.model.options):
            return replace(row, reason=choice_, cause="option")
        return row

    def _kept(self, path: str, kind: Kind, reason: str) -> Site:
        return Site(path, kind, type(self.module).__name__, reason=reason, cause="formula")

    def _path_of(self, name: str) -> str:
        """Where the norm is reported: its first place, where several modules share it."""
        return self.model.paths[id(getattr(self.module, name))]

    def _holds_norm(self, name: str) -> bool:
        """Whether an attribute is a norm or wraps one."""
        norm = getattr(self.module, name, None)
        return id(norm) in self.model.paths and _is_norm(norm)


def _is_norm(module: Any) -> bool:
    """Whether it is a norm, or a wrapper (PEFT's) with nothing but norms inside."""
    return isinstance(module, nn.Module) and all(
        looks_like_norm(leaf) for leaf in module.modules() if not leaf._modules
    )


def _alike(one: Site, other: Site) -> bool:
    return (
        one.spec is not None
        and other.spec is not None
        and replace(one.spec, weighted=True) == replace(other.spec, weighted=True)
    )


def _widths_differ(block: nn.Module, heads: Heads) -> bool:
    q_weight, k_weight = (getattr(getattr(block, name), "weight", None) for name in (heads.q_norm, heads.k_norm))
    shapes = [getattr(weight, "ds_shape", getattr(weight, "shape", None)) for weight in (q_weight, k_weight)]
    return shapes[0] != shapes[1]


def _own_class(module: nn.Module) -> Any:
    """The class of a module before it was fused."""
    return module.fused_norm_origin if isinstance(module, FusedBlock) else type(module)


def _edits_in_place(layer: nn.Module) -> bool:
    try:
        return patterns_of(_own_class(layer)).edits_in_place
    except SourceError:
        return True


def _successors(modules: dict[str, nn.Module], holders: list[str]) -> dict[str, _Next]:
    """For each layer whose output goes straight to a norm: that norm, the next layer's first or the one after all."""
    held = set(holders)
    found: dict[str, _Next] = {}
    for path, stack in modules.items():
        prefix = f"{path}." if path else ""
        lists = {name for name, child in stack._modules.items() if isinstance(child, nn.ModuleList)}
        if not any(f"{prefix}{name}.0" in held for name in lists):
            continue
        try:
            loops = loops_of(_own_class(stack))
        except SourceError:
            continue
        for loop in loops:
            if loop.layers in lists:
                found.update(_successors_in(path, stack, loop.layers, loop.norm))
    return found


def _successors_in(path: str, stack: nn.Module, name: str, final_norm: str | None) -> Iterator[tuple[str, _Next]]:
    prefix = f"{path}." if path else ""
    layers: Any = stack._modules[name]
    for index in range(len(layers)):
        following, first_norm, norm = None, None, stack._modules.get(final_norm or "")
        if index + 1 < len(layers):
            following = layers[index + 1]
            first_norm = _first_norm(following)
            norm = following._modules.get(first_norm or "")
        if norm is not None and _is_norm(norm):
            successor = Successor(stack, name, index, first_norm, final_norm)
            yield f"{prefix}{name}.{index}", _Next(norm, following, successor)


def _first_norm(layer: nn.Module) -> str | None:
    try:
        return patterns_of(_own_class(layer)).first_norm
    except SourceError:
        return None


def _deselected(choice: Choice, path: str, norm: nn.Module, options: FuseOptions) -> str | None:
    """Why the options leave a site out, if they do."""
    if not options.wants(choice):
        return f"switched off: {options.because(choice)}"
    return None if options.selects(path, norm) else "not selected by modules"


def _kind_of(path: str) -> Kind:
    """q and k norms go by their name, which may have a wrapper's below it; the layer's own index ends the search."""
    for name in reversed(path.split(".")):
        if name.isdigit():
            break
        if QK_NAME.fullmatch(name):
            return "qk"
    return "norm"


def _holders(norm_sites: dict[str, Site]) -> list[str]:
    """The paths of modules that hold a recognised norm, directly or in a wrapper of up to two levels."""
    paths: dict[str, None] = {}
    for site in norm_sites.values():
        if site.spec is not None:
            path = site.path
            for _ in range(3 if site.kind == "norm" else 1):
                if not path:
                    break
                path = path.rpartition(".")[0]
                paths[path] = None
    return list(paths)

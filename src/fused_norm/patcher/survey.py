"""The survey of a model: a row for every site, and the changes of class that fuse those to be fused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..options import FuseOptions
from ..spec import FusedNormError, Kind
from .class_swap import built_upon, foreign_forward, fused_block_class, fused_norm_class
from .forward_rewrite import Rewrite, patterns_of, rotation_of
from .forward_source import SourceError
from .fused_block import FusedBlock
from .fused_norm_module import FusedNorm, may_be_bypassed
from .norm_recognition import UnrecognisedError, looks_like_norm, recognise
from .patch_report import Site
from .query_key_norms import QK_NAME, Pair, PairRewrite
from .residual_adds import Add, AddRewrite


@dataclass(frozen=True)
class ClassChange:
    """A module and the class that it is to have."""

    module: nn.Module
    new: type[nn.Module]


def survey(model: nn.Module, options: FuseOptions) -> tuple[list[Site], list[ClassChange]]:
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
    changes: list[ClassChange] = []
    norm_sites = {}
    for path, module in norms.items():
        norm_sites[path], change = _survey_norm(path, module, options)
        changes += change
    rows = list(norm_sites.values())
    known = _Model(modules, {id(module): path for path, module in modules.items()}, norm_sites, options)
    for path in _holders(norm_sites):
        block = _BlockSurvey(path, known)
        rows += block.rows()
        changes += block.changes
    return rows, changes


def _survey_norm(path: str, norm: nn.Module, options: FuseOptions) -> tuple[Site, list[ClassChange]]:
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
    if option := _deselected(site.kind, path, norm, options):
        return replace(site, reason=option, cause="option"), []
    return site, [ClassChange(norm, fused_norm_class(origin, known.spec, known.eps_name))]


@dataclass(frozen=True)
class _Model:
    """A model's modules by path, their paths by identity, the rows of its norms, and the options."""

    modules: dict[str, nn.Module]
    paths: dict[int, str]
    norm_sites: dict[str, Site]
    options: FuseOptions


class _BlockSurvey:
    """The survey of one module whose forward may be rewritten: a layer or an attention."""

    def __init__(self, path: str, model: _Model) -> None:
        self.path, self.model = path, model
        self.module = model.modules[path]
        self.changes: list[ClassChange] = []
        self._is_layer = path.rpartition(".")[2].isdigit()
        self._origin: Any = type(self.module)
        self._done: tuple[Rewrite, ...] = ()
        if isinstance(self.module, FusedBlock):
            self._origin, self._done = self.module.fused_norm_origin, self.module.fused_norm_rewrites
        self._rewrites: list[Rewrite] = []

    def rows(self) -> list[Site]:
        """The module's rows; afterwards ``changes`` holds the change that fuses those to be fused."""
        try:
            patterns = patterns_of(self._origin)
        except SourceError as error:
            return [self._kept(str(error))] if self._is_layer else []
        rows = [row for index, add in enumerate(patterns.adds) for row in self._survey_add(index, add)]
        rows += [row for index, pair in enumerate(patterns.pairs) for row in self._survey_pair(index, pair)]
        if self._is_layer and not any(row.kind == "residual" for row in rows):
            rows.append(self._kept("no norm in its forward takes the sum of an add"))
        rewrites = tuple(self._rewrites)
        if rewrites == self._done:
            return rows
        try:
            self.changes = [ClassChange(self.module, fused_block_class(self._origin, rewrites))]
        except SourceError as error:
            return [replace(row, reason=row.reason or str(error), cause=row.cause or "formula") for row in rows]
        return rows

    def _survey_add(self, index: int, add: Add) -> Iterator[Site]:
        """The rows of an add: with the norm after it, and with the norm of its branch."""
        done = next((one for one in self._done if isinstance(one, AddRewrite) and one.index == index), None)
        after = inner = None
        if add.norm is not None and self._holds_norm(add.norm):
            after = self._row(self._path_of(add.norm), "residual", "residual", done is not None and done.norm)
            yield after
        if add.inner is not None and self._holds_norm(add.inner):
            inner = self._row(self._path_of(add.inner), "sandwich", "sandwich", done is not None and done.inner)
            if inner.reason is None and after is not None and after.reason is None and not _alike(inner, after):
                reason = "it differs from the norm after the add in more than the weight"
                inner = replace(inner, reason=reason, cause="formula")
            yield inner
        with_norm = (after is not None and after.reason is None) or (done is not None and done.norm)
        with_inner = inner is not None and inner.reason is None
        if with_norm or with_inner:
            self._rewrites.append(AddRewrite(index, with_norm, with_inner))

    def _survey_pair(self, index: int, pair: Pair) -> Iterator[Site]:
        """The row of the norms of queries and keys with the rotation after them."""
        done = next((one for one in self._done if isinstance(one, PairRewrite) and one.index == index), None)
        names = (pair.q_norm, pair.k_norm)
        if not all(self._holds_norm(name) for name in names):
            return
        together = self._both([self._row(self._path_of(name), "rope", "qk", done is not None) for name in names], pair)
        rotated = together
        if pair.rotate is not None:
            already = done is not None and done.rotate
            rotated = self._both([self._row(self._path_of(name), "rope", "rope", already) for name in names], pair)
            if rotated.reason is None and not already:
                try:
                    rotation_of(self._origin, pair.rotate)
                except UnrecognisedError as error:
                    rotated = replace(rotated, reason=str(error), cause="formula")
            yield rotated
        if together.reason is None:
            self._rewrites.append(PairRewrite(index, pair.rotate is not None and rotated.reason is None))

    def _both(self, rows: list[Site], pair: Pair) -> Site:
        """The row of an attention, from the rows of its q norm and its k norm."""
        row = replace(next((row for row in rows if row.reason is not None), rows[0]), path=self.path)
        if row.reason is None and (not _alike(*rows) or _widths_differ(self.module, pair)):
            return replace(row, reason="its q and k norms differ in more than the weight", cause="formula")
        return row

    def _row(self, path: str, kind: Kind, option: Kind, already: bool) -> Site:
        """The row of a site that takes in the norm at ``path``: fused unless something prevents it.

        ``option``: the kind of sites whose option decides; ``already``: it was fused before.
        """
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
        if kind in ("sandwich", "rope") and isinstance(norm, FusedNorm) and not may_be_bypassed(norm):
            return replace(row, reason="hooks or other code stand on its norm", cause="owner")
        if isinstance(self.module, FusedBlock) and built_upon(self.module):
            reason = "other code has built on its layer since that was patched; remove_fused_norm before sharding"
            return replace(row, reason=reason, cause="owner")
        if owner := foreign_forward(self.module):
            return replace(row, reason=owner, cause="owner")
        if deselected := _deselected(option, path, norm, self.model.options):
            return replace(row, reason=deselected, cause="option")
        return row

    def _kept(self, reason: str) -> Site:
        """The row of a layer in which no add can be fused with a norm after it."""
        return Site(self.path, "residual", type(self.module).__name__, reason=reason, cause="formula")

    def _path_of(self, name: str) -> str:
        """The path under which the norm is reported: its first one, where several modules share it."""
        return self.model.paths[id(getattr(self.module, name))]

    def _holds_norm(self, name: str) -> bool:
        """Return whether an attribute is a norm or wraps one."""
        norm = getattr(self.module, name, None)
        return id(norm) in self.model.paths and _is_norm(norm)


def _is_norm(module: Any) -> bool:
    """Return whether it is a norm, or a wrapper (PEFT's) with nothing but norms inside."""
    return isinstance(module, nn.Module) and all(
        looks_like_norm(leaf) for leaf in module.modules() if not leaf._modules
    )


def _alike(one: Site, other: Site) -> bool:
    """Return whether the norms of two sites compute the same but for their weights."""
    return (
        one.spec is not None
        and other.spec is not None
        and replace(one.spec, weighted=True) == replace(other.spec, weighted=True)
    )


def _widths_differ(attention: nn.Module, pair: Pair) -> bool:
    q_weight, k_weight = (getattr(getattr(attention, name), "weight", None) for name in (pair.q_norm, pair.k_norm))
    shapes = [getattr(weight, "ds_shape", getattr(weight, "shape", None)) for weight in (q_weight, k_weight)]
    return shapes[0] != shapes[1]


def _deselected(kind: Kind, path: str, norm: nn.Module, options: FuseOptions) -> str | None:
    """The reason why the options leave a site of this kind out, if they do."""
    if not options.wants(kind):
        return f"switched off: {options.because(kind)}"
    return None if options.selects(path, norm) else "not selected by modules"


def _kind_of(path: str) -> Kind:
    """``qk`` where the norm, or a wrapper around it, has such a name; a layer's index ends the search."""
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

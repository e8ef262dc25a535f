"""A module whose forward may be rewritten, in its model: what it holds, and rows for what may be fused in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..options import FuseOptions
from ..spec import Kind
from .class_swap import (
    ClassChange,
    Fused,
    has_derived_class,
    has_to_change,
    is_called_around,
    stock_class,
    why_instance_overridden,
)
from .fused_block import FusedBlock, Rewrite
from .hooks import has_hooks
from .norm_recognition import looks_like_norm, subtracts_mean
from .patch_report import Cause, Site
from .source import member_of

Surveyed = tuple[Site, type[nn.Module] | None]
"""The row of a module, and the class that it is to have; None if it keeps the class it has."""


@dataclass(frozen=True)
class SurveyedModel:
    """A model under survey, which is not touched: its modules, what is known of them, and the classes they are to have.

    Attributes:
        modules: by their first path.
        paths: the first path of each, by identity.
        norm_sites: the rows of norms, by their paths.
        options: the caller's.
        blocks: the modules whose forward may be rewritten, as far as somebody has asked for them.
        changes: the modules that are to have another class, by identity: one change for each.
        loss_sites: the rows of heads, by their paths.
    """

    modules: dict[str, nn.Module]
    paths: dict[int, str]
    norm_sites: dict[str, Site]
    options: FuseOptions
    blocks: dict[str, Block] = field(default_factory=dict)
    changes: dict[int, ClassChange] = field(default_factory=dict)
    loss_sites: dict[str, Site] = field(default_factory=dict)
    _planned: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, options: FuseOptions) -> SurveyedModel:
        """A model of which nothing is known yet."""
        modules = dict(model.named_modules())
        return cls(modules, {id(module): path for path, module in modules.items()}, {}, options)

    def plan(self, module: nn.Module, new: type[nn.Module] | None) -> None:
        """Plan the class of a module, in place of one that was planned before; None: it keeps the class it has.

        Raises:
            FusedNormError: if other code has built on the fused class that it has.
        """
        self._planned.add(id(module))
        self.changes.pop(id(module), None)
        if new is not None and has_to_change(module, new):
            self.changes[id(module)] = module, new

    def planned(self, module: nn.Module, surveyed: Surveyed) -> Site:
        """Plan the class of a module that was surveyed, and return its row."""
        row, new = surveyed
        self.plan(module, new)
        return row

    def plan_the_others(self) -> None:
        """Plan the stock class of what is fused and has no plan; what other code has built on stays as it is."""
        for module in self.modules.values():
            if isinstance(module, Fused) and id(module) not in self._planned and not has_derived_class(module):
                self.plan(module, stock_class(module))

    def block(self, path: str) -> Block:
        """The module at this path, which is the first of its paths, as one whose forward may be rewritten."""
        if path not in self.blocks:
            self.blocks[path] = Block(path, self)
        return self.blocks[path]


class Block:
    """A layer, an attention or an MLP in its model.

    Attributes:
        path: its first one in the model.
        module: itself.
        origin: its class in the stock model.
        why_overridden: why a change of its class would have no effect, as other code replaced its forward; or None.
        is_sealed: whether other code has derived a class from its fused one, as FSDP does; it stays as it is.
        sealed_sites: what is fused in it then (``Match.fused_sites``).
        sites: the rows of what may be fused in its forward.
        rewrites: the matches in its forward that are to be fused, added to by those that decide on them.
        consumers_row: the row on how its linears read a norm that is passed to it; None if no norm is.
        recompute_row: the row on its recomputing; None if it is no layer with something fused in it, or the option is
            off.
    """

    def __init__(self, path: str, model: SurveyedModel) -> None:
        self.path, self.module = path, model.modules[path]
        self.origin: Any = stock_class(self.module)
        self.why_overridden = why_instance_overridden(self.module)
        self.is_sealed = isinstance(self.module, FusedBlock) and has_derived_class(self.module)
        self.sealed_sites: Collection[tuple[Kind | None, str]] = ()
        self.sites: list[Site] = []
        self.rewrites: list[Rewrite] = []
        self.consumers_row: Site | None = None
        self.recompute_row: Site | None = None
        self._model = model

    def member(self, name: str) -> Any:
        """An attribute, or with ``name.0`` a module in a list that is one; None if there is none."""
        return member_of(self.module, name)

    def child(self, name: str) -> Block | None:
        """The child module as a ``Block``; None if it is a norm or not a module."""
        path = self._model.paths.get(id(getattr(self.module, name, None)))
        return None if path is None or path in self._model.norm_sites else self._model.block(path)

    @property
    def wants_consumers(self) -> bool:
        """Whether the option ``shared_inputs`` is on."""
        return self._model.options.shared_inputs

    def decide_consumers(self, index: int, linears: tuple[str, ...], why_shared: str | None) -> bool:
        """Decide whether the ``linears`` that read argument ``index`` get inputs of their own; it gets a row."""
        rewrite = Rewrite("inputs", index, linears, what="shared_inputs")
        reason = self.why_overridden or why_shared
        if self.is_sealed and not self.module.fused_norm_linears:
            reason = reason or "other code has built on its class since that was patched"
        if not self._model.options.selects(self.path, self.module):
            reason = "not selected by modules"
        self.consumers_row = Site(self.path, "shared_inputs", self.origin.__name__, reason=reason)
        if reason is None and rewrite not in self.rewrites:
            self.rewrites.append(rewrite)
        return reason is None

    @property
    def recomputes(self) -> bool:
        """True for a layer that recomputes outputs of fused operators in its backward."""
        return self.recompute_row is not None and self.recompute_row.reason is None

    def keep(self, reason: str, cause: Cause) -> None:
        """Leave its forward as it is, and say in its rows why."""
        self.rewrites = []
        self.sites = [row.skipped(reason, cause) for row in self.sites]
        self.consumers_row = None if self.consumers_row is None else self.consumers_row.skipped(reason, None)

    def why_left_out(self, kind: Kind, module: nn.Module) -> str | None:
        """The reason why the options leave a site of this kind out, that of a module of the model; or None."""
        return why_left_out(kind, self._model.paths[id(module)], module, self._model.options)

    def holds_norm(self, name: str | None) -> bool:
        """Return whether an attribute is a norm, or a wrapper (PEFT's) with nothing but norms inside.

        A LayerNorm, which is never fused, does not count.
        """
        norm: Any = None if name is None else self.member(name)
        if id(norm) not in self._model.paths or subtracts_mean(norm):
            return False
        return all(not part._parameters if part._modules else looks_like_norm(part) for part in norm.modules())

    def norm_row(self, name: str, kind: Kind, option: Kind | None = None) -> Site:
        """The row of a site that takes in the norm of this name: fused unless something prevents it.

        It has the first path of a norm that several modules share. ``option``: the kind of sites whose option decides,
        if it is another one.

        Raises:
            FusedNormError: if it is not to be fused any more and other code has built on the fused class.
        """
        norm = self.member(name)
        path = self._model.paths[id(norm)]
        row = Site(path, kind, self.origin.__name__)
        site = self._model.norm_sites.get(path)
        if site is None:
            reason = f"its norm is wrapped in a {type(norm).__name__}, which is called as it is"
            return row.skipped(reason, "overridden")
        row = replace(row, spec=site.spec, replaced=site.replaced)
        if site.reason is not None:
            return row.skipped(f"its norm is kept: {site.reason}", site.cause)
        if has_hooks(norm) or is_called_around(norm, with_residual=kind not in ("post_norm", "rope")):
            return row.skipped("hooks or other code stand on its norm", "overridden")
        decisive = option or kind
        own = decisive if decisive in ("residual", "post_norm", "rope") else None, name
        return self._unless_prevented(row, decisive, norm, own)

    def own_row(self, kind: Kind) -> Site:
        """The row of a site of the module itself, without a norm: fused unless something prevents it.

        Raises:
            FusedNormError: as ``norm_row``.
        """
        return self._unless_prevented(Site(self.path, kind, self.origin.__name__), kind, self.module, (kind, ""))

    def _unless_prevented(self, row: Site, option: Kind, selected: nn.Module, site: tuple[Kind | None, str]) -> Site:
        """``row``, kept if other code has the module or the options leave the ``selected`` one out.

        ``site``: as ``Match.fused_sites`` has it; in a sealed module it is fused now or never.
        """
        if self.is_sealed and site not in self.sealed_sites:
            reason = "other code has built on its layer since that was patched; remove_fused_norm before sharding"
            return row.skipped(reason, "overridden")
        if self.why_overridden is not None:
            return row.skipped(self.why_overridden, "overridden")
        if unwanted := why_left_out(option, row.path, selected, self._model.options):
            if self.is_sealed:
                has_to_change(self.module, self.origin)  # raises if it has
            return row.skipped(unwanted, "option")
        return row


def why_left_out(kind: Kind, path: str, module: nn.Module, options: FuseOptions) -> str | None:
    """The reason why the options leave a site of this kind out, that of the module at ``path``; None if it is in."""
    if not options.wants(kind):
        return f"switched off: {options.because(kind)}"
    return None if options.selects(path, module) else "not selected by modules"


def alike(site: Site, other: Site) -> bool:
    """Return whether the norms of two sites compute the same but for their weights."""
    specs = [row.spec and replace(row.spec, weighted=True) for row in (site, other)]
    return specs[0] is not None and specs[0] == specs[1]

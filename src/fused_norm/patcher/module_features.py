"""Features that fuse one module, whatever its parent is; each feature is one object in the file of its code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from ..spec import Kind
from .probe import UnrecognisedError


class OverriddenError(UnrecognisedError):
    """Other code has put its own in the place of what would be fused; the message says whose."""


class FusedModule(NamedTuple):
    """The parts of a fused class for one module.

    Attributes:
        base: the class that has the fused forward.
        members: further attributes of the fused class.
        activation: the formula of the activation in it, for its row, or None.
    """

    base: type[nn.Module]
    members: dict[str, Any]
    activation: str | None = None


@dataclass(frozen=True)
class ModuleFeature:
    """A feature that fuses modules of a kind.

    Attributes:
        kind: of its rows.
        is_site: returns whether a module is of the kind, fused or not.
        why_overridden: returns why code that others have put on the stock class runs, or None.
        fused: returns the parts of the fused class for a module with this stock class. It raises
            ``UnrecognisedError`` if the module stays stock.
        reads: returns the modules inside whose weights it reads; these are no sites.
    """

    kind: Kind
    is_site: Callable[[nn.Module], bool]
    why_overridden: Callable[[Any], str | None]
    fused: Callable[[Any, Any], FusedModule]
    reads: Callable[[Any], Iterable[Any]] = field(default=lambda _: ())

"""The base of the classes of modules whose forward was rewritten, and the methods that such a forward calls.

Each pattern adds its own methods (``runtime``): several modules' work in one kernel. They are called only if no hook,
wrapper, sharding or offloading is skipped by it: the guard of the rewritten forward (``fused_classes.py``) has asked.
If a kernel does not take a module's input, the modules are called one after the other, as in the stock code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..options import RecomputeLevel
from .activation_recognition import Activation
from .hooks import Fused

Runtime = TypeVar("Runtime", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rewrite:
    """A match of a pattern in a forward that is to be fused.

    Attributes:
        pattern: the list in ``Patterns`` that has the match, such as ``adds``.
        index: the match's index in that list.
        parts: the parts of the match that are fused, by the names that the pattern has for them.
        activation: the one that the fused call computes, or None.
        what: the match in words, as ``print(model)`` shows it: ``add+norm``.
    """

    pattern: str
    index: int
    parts: tuple[str, ...] = ()
    activation: Activation | None = None
    what: str = field(default="", compare=False)


class FusedBlock(Fused):
    """Base of the classes put on modules whose forward was rewritten; each derives from the module's own class."""

    fused_norm_rewrites: ClassVar[tuple[Rewrite, ...]]
    fused_norm_recompute: ClassVar[RecomputeLevel]
    fused_norm_cuda_graphs: ClassVar[bool]
    fused_norm_linears: ClassVar[tuple[str, ...]]

    @property
    def fused_norm_what(self) -> str:
        """``add+norm x2``, what rewrites fuse and how often, and ``recompute`` and ``graphs`` if they are on."""
        rewrites = self.fused_norm_rewrites
        counts = Counter(rewrite.what for rewrite in rewrites if rewrite.what != "shared_inputs")
        whats = [what if count == 1 else f"{what} x{count}" for what, count in counts.items()]
        whats += (
            ["shared_inputs"] if any("shared_inputs" in (rewrite.what, *rewrite.parts) for rewrite in rewrites) else []
        )
        options = {"recompute": self.fused_norm_recompute, "graphs": self.fused_norm_cuda_graphs}
        return ", ".join(whats + [name for name, is_on in options.items() if is_on])


def runtime(function: Runtime) -> Runtime:
    """Make a function a method of all modules whose forward was rewritten: such a forward calls it by its name."""
    setattr(FusedBlock, function.__name__, function)
    return function

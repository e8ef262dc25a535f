"""What to fuse and where, as the user asked for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from ..spec import Kind

Choice = Kind | Literal["across"]

_CHOICES: dict[Choice, tuple[str, Choice | None]] = {
    "norm": ("norms", None),
    "qk": ("qk", None),
    "rope": ("rope", "qk"),
    "residual": ("residual", "norm"),
    "sandwich": ("sandwich", "residual"),
    "across": ("across", "residual"),
}
"""The option for each choice, and the choice that it follows where it is None."""

ModuleFilter = str | Sequence[str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class FuseOptions:
    """The options of ``apply_fused_norm``, checked when made.

    Attributes:
        norms: fuse the RMSNorms that are not q or k norms. None is on.
        qk: fuse the norms of queries and keys. None is on.
        rope: make the norms of queries and keys together with the rotary embedding after them. None follows ``qk``.
        residual: fuse a residual add with the norm that follows it in the layer. None follows ``norms``.
        sandwich: fuse the norm of a branch with the add of that branch. None follows ``residual``.
        across: fuse the add that ends a layer with the norm that begins the next one. None follows ``residual``.
        modules: which sites may be fused, by the path of the norm in the model: a shell-style pattern
            (``"model.layers.*.input_layernorm"``), several of them, or a function of path and module. None is all.
        strict: raise when nothing is fused, or when a known family does not have the sites it is known to have.

    Raises:
        TypeError: for a value of another type.
        ValueError: for options that contradict each other or leave nothing to do.
    """

    norms: bool | None = None
    qk: bool | None = None
    rope: bool | None = None
    residual: bool | None = None
    sandwich: bool | None = None
    across: bool | None = None
    modules: ModuleFilter | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        for name in ("norms", "qk", "rope", "residual", "sandwich", "across"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise TypeError(f"{name} must be True, False or None, not {getattr(self, name)!r}")
        if not isinstance(self.strict, bool):
            raise TypeError(f"strict must be True or False, not {self.strict!r}")
        for name in ("residual", "sandwich", "across"):
            if getattr(self, name) and self.norms is False:
                raise ValueError(f"{name}=True needs norms: a residual add is fused into a norm beside it")
        if self.rope and self.qk is False:
            raise ValueError("rope=True needs qk: the rotary embedding is fused into the norms before it")
        if not any(self.wants(kind) for kind in ("norm", "qk")):
            raise ValueError("norms=False and qk=False leave nothing to fuse")
        if self.modules is not None and not callable(self.modules):
            patterns = self.modules if isinstance(self.modules, Sequence) else ()
            if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
                raise TypeError(f"modules must be a pattern, patterns or a function, not {self.modules!r}")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of ``modules``; empty where it is a function or None."""
        if self.modules is None or callable(self.modules):
            return ()
        return (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)

    def wants(self, what: Choice) -> bool:
        """Whether sites of this kind, or residual adds across layers, are to be fused."""
        name, follows = _CHOICES[what]
        choice: bool | None = getattr(self, name)
        if choice is not None:
            return choice
        return True if follows is None else self.wants(follows)

    def because(self, what: Choice) -> str:
        """The option that leaves ``what`` out, as the caller wrote it."""
        name, follows = _CHOICES[what]
        if getattr(self, name) is None and follows is not None:
            return self.because(follows)
        return f"{name}=False"

    def selects(self, path: str, module: nn.Module) -> bool:
        """Whether ``modules`` admits the norm at ``path``."""
        if self.modules is None:
            return True
        if callable(self.modules):
            return bool(self.modules(path, module))
        return any(fnmatchcase(path, pattern) for pattern in self.patterns)

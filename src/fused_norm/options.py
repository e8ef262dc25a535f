"""The options of ``apply_fused_norm``: what to fuse and where. The command line makes its flags from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from .old_names import OldNames, takes_old_names
from .spec import Casting, Kind

if TYPE_CHECKING:
    from torch import nn

RecomputeLevel = Literal[False, True, "mlp", "attention"]
ModuleFilter = str | Sequence[str] | Callable[[str, "nn.Module"], bool]


@dataclass(frozen=True)
class Switch:
    """An option that switches one kind of site on or off.

    Attributes:
        option: its name, as in ``FuseOptions``.
        kind: of the sites.
        what: is fused at such a site, in words.
        follows: the option whose value it takes when it is None; without one, None is on.
        alone: it may be on if that option is off.
    """

    option: str
    kind: Kind
    what: str
    follows: str | None
    alone: bool


def _switch(kind: Kind, what: str, follows: str | None = None, *, alone: bool = False) -> Any:
    return field(default=None, metadata={"kind": kind, "what": what, "follows": follows, "alone": alone})


@takes_old_names
@dataclass(frozen=True)
class FuseOptions(OldNames):
    """The options of ``apply_fused_norm``, checked on creation.

    Attributes:
        norms: fuse the RMSNorms that are not q or k norms. None is on.
        qk: fuse the norms of queries and keys. None is on.
        rope: fuse the rotary embedding, with the norms of queries and keys if they come before it and are fused.
            None follows ``qk``.
        residual: fuse a residual add with the norm that follows it in the layer. None follows ``norms``.
        post_norm: fuse the norm of a branch with the add of that branch. None follows ``residual``.
        mlp: fuse the activation of a gated MLP with the product after it. None is on.
        conv: fuse the short causal convolution of a layer (linear attention, state spaces) with the SiLU after it, if
            PyTorch's would run. None is on.
        experts: fuse what a mixture of experts computes around its grouped products: the order of rows, the gate, and
            the weighted sum. None is on.
        linear_4bit: dequantise the weights of bitsandbytes' 4-bit linears, those without an adapter, in one kernel, and
            read and write 16 bits around them if stock code casts to these. None follows ``lora``.
        lora: fuse PEFT's LoRA layers: the linear, and the adapter's products, scale and sum. If an adapter is on the
            weights of experts, their sum is computed again in the backward, and not kept for it. None is on.
        loss: fuse the vocabulary head of a language model with its loss, so that logits are not held:
            ``outputs.logits`` computes them when it is read, and raises if weights have been written to since. None is
            on.
        modules: which sites may be fused, by the path of the norm in the model, or of the attention, MLP or LoRA layer
            if a site has no norm: a shell-style pattern (``"model.layers.*.input_layernorm"``), several of them, or
            a function of path and module. None is all.
        norm_rounding: rounding points that norms get in place of their own, by patterns of their paths:
            ``{"*.q_norm": "gemma"}``, or ``"llama"``. For models that learn from what an inference engine wrote, which
            may round elsewhere than transformers does. Under ``disabled()`` norms round as their own code does. None
            replaces nothing.
        shared_inputs: let the backward of a fused norm sum the gradients of the linears that consume it, and under
            autocast write the norm in the dtype that they cast it to. Numbers stay the same to the bit, but for the
            order in which a GPU adds up some rows, and for gradients if a loss reads hidden states too.
        recompute: recompute norm outputs, rotated queries and keys and products of gates in the backward, instead of
            keeping them for it: less memory for a little more time, and the same bits unless such a tensor is written
            into in a way that autograd does not count, as ``.data`` and NumPy do. ``"mlp"`` also recomputes the
            outputs of the linears before a gate, ``"attention"`` also queries, keys and values. It is a no-op in a
            layer under gradient checkpointing, offloading or torch.compile, which decide by themselves what is kept.
        cuda_graphs: replay the forward and the backward of each layer as CUDA graphs, so that the host launches two
            graphs a layer in place of its kernels: for steps in which the GPU waits for the host, as with short
            sequences or adapters. Results are the same to the bit. A call that is not provably the one of the capture
            runs eager, and is counted with its reason (``PatchReport.replays``). It takes memory of its own, and does
            nothing under gradient checkpointing, which ``recompute`` replaces, offloading, FSDP or torch.compile.
        strict: raise if nothing is fused, or if a known family does not have the sites it is known to have.

    Raises:
        TypeError: for a value of another type.
        ValueError: for options that contradict each other or leave nothing to do.
    """

    norms: bool | None = _switch("norm", "RMSNorms")
    qk: bool | None = _switch("qk", "norms of the queries and keys")
    rope: bool | None = _switch("rope", "the rotary embedding, with these before it", follows="qk", alone=True)
    residual: bool | None = _switch("residual", "residual add + norm", follows="norms")
    post_norm: bool | None = _switch("post_norm", "the norm of a branch + its add", follows="residual")
    mlp: bool | None = _switch("mlp", "the activation of a gated MLP + its product")
    conv: bool | None = _switch("conv", "a short causal convolution + its SiLU")
    experts: bool | None = _switch("experts", "the gate, rows and sums around the products of experts")
    linear_4bit: bool | None = _switch(
        "linear_4bit", "the weight of a 4-bit linear, dequantised in one kernel", follows="lora", alone=True
    )
    lora: bool | None = _switch("lora", "a LoRA layer: its linear, its adapter and their sum")
    loss: bool | None = _switch("loss", "the vocabulary head + its loss")
    modules: ModuleFilter | None = None
    norm_rounding: Mapping[str, Casting] | None = None
    shared_inputs: bool = True
    recompute: RecomputeLevel = False
    strict: bool = True
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        for switch in SWITCHES.values():
            value = getattr(self, switch.option)
            if not isinstance(value, (bool, type(None))):
                raise TypeError(f"{switch.option} must be True, False or None, not {value!r}")
        for name in ("shared_inputs", "strict", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if not isinstance(self.recompute, (bool, str)) or self.recompute not in get_args(RecomputeLevel):
            raise TypeError(f'recompute must be True, False, "mlp" or "attention", not {self.recompute!r}')
        for switch in SWITCHES.values():
            needed = switch
            while needed.follows is not None and not switch.alone:
                needed = SWITCHES[needed.follows]
            if needed is not switch and getattr(self, switch.option) and getattr(self, needed.option) is False:
                raise ValueError(f"{switch.option}=True contradicts {needed.option}=False")
        if not any(self.wants(switch.kind) for switch in SWITCHES.values()):
            choices = " and ".join(f"{switch.option}=False" for switch in SWITCHES.values() if switch.follows is None)
            raise ValueError(f"{choices} leave nothing to fuse")
        if self.modules is not None and not callable(self.modules):
            patterns = self.modules if isinstance(self.modules, Sequence) else ()
            if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
                raise TypeError(f"modules must be a pattern, patterns or a function, not {self.modules!r}")
        if self.norm_rounding is not None:
            if not isinstance(self.norm_rounding, Mapping) or not all(
                isinstance(pattern, str) for pattern in self.norm_rounding
            ):
                raise TypeError(f"norm_rounding must map patterns of paths to castings, not {self.norm_rounding!r}")
            for casting in self.norm_rounding.values():
                if casting not in ("llama", "gemma"):
                    raise ValueError(f"norm_rounding must give norms 'llama' or 'gemma', not {casting!r}")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of ``modules``; empty if it is a function or None."""
        if self.modules is None or callable(self.modules):
            return ()
        return (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)

    def wants(self, kind: Kind) -> bool:
        """Return whether sites of this kind are to be fused."""
        return getattr(self, self._decisive(kind)) is not False

    def because(self, kind: Kind) -> str:
        """The option that leaves sites of this kind out, as the caller wrote it."""
        return f"{self._decisive(kind)}=False"

    def selects(self, path: str, module: nn.Module) -> bool:
        """Return whether ``modules`` admits the norm, attention, MLP or LoRA layer at ``path``.

        Raises:
            TypeError: if it is a function that returns anything but True and False.
        """
        if self.modules is None:
            return True
        if callable(self.modules):
            selected = self.modules(path, module)
            if not isinstance(selected, bool):
                raise TypeError(f"modules must return True or False, not {selected!r}, which it did for {path!r}")
            return selected
        return any(fnmatchcase(path, pattern) for pattern in self.patterns)

    def norm_rounding_at(self, path: str) -> Casting | None:
        """Return the casting that ``norm_rounding`` gives the norm at ``path``, None if it gives none.

        Raises:
            ValueError: if it gives several.
        """
        castings = {casting for pattern, casting in (self.norm_rounding or {}).items() if fnmatchcase(path, pattern)}
        if len(castings) > 1:
            raise ValueError(f"norm_rounding gives {path} several castings: {', '.join(sorted(castings))}")
        return next(iter(castings), None)

    def _decisive(self, kind: Kind) -> str:
        """The option that decides for sites of this kind: their own, or the one it follows if that is None."""
        option = next(switch.option for switch in SWITCHES.values() if switch.kind == kind)
        while getattr(self, option) is None and (follows := SWITCHES[option].follows) is not None:
            option = follows
        return option


SWITCHES: Mapping[str, Switch] = MappingProxyType(
    {option.name: Switch(option.name, **option.metadata) for option in fields(FuseOptions) if option.metadata}
)
"""The options that switch a kind of site, by name."""

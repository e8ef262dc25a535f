"""Random forwards of layers, with and without the patterns of real models, and the modules that they call."""

from __future__ import annotations

import contextlib
import random
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .forwards import layer_of

TOKENS, WIDTH, HEADS = 3, 12, 2
NAMES = "abcd"
NORMS = ("norm", "norm", "other", "inner", "third", "apart", "norms[0]", "norms[1]", "query_norm", "key_norm")


class Norm(nn.Module):
    """An RMSNorm that rounds as Llama's does."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + 0.3 * torch.randn(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def linear(columns: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, columns, bias=False)


class Block(nn.Module):
    """The submodules of an attention or an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.factor = True, 0.5
        self.q, self.k, self.v, self.gate, self.up, self.down = (linear() for _ in range(6))
        self.packed, self.act, self.dropout = linear(2 * WIDTH), nn.SiLU(), nn.Dropout(0.25)
        self.q_norm, self.k_norm = Norm(WIDTH // HEADS), Norm(WIDTH // HEADS)

    def halve(self, x: Tensor) -> Tensor:
        return halve(x)


class Layer(Block):
    """The submodules of a layer; a subclass adds an attention and an MLP."""

    block_classes: tuple[type[Block], type[Block]]

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other, self.inner, self.third, self.query_norm, self.key_norm = (Norm() for _ in range(6))
        self.apart = Norm(eps=1e-5)
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.attention, self.mlp = (cls() for cls in self.block_classes)


def halve(x: Tensor) -> Tensor:
    """Write into a tensor, and return a new one."""
    return x.mul_(0.5) * 1


ANGLE = torch.rand(1, TOKENS, WIDTH // HEADS // 2, generator=torch.Generator().manual_seed(7)).repeat(1, 1, 2)
ANGLE = ANGLE.to("cuda" if torch.cuda.is_available() else "cpu")
GLOBALS = {
    "__name__": __name__,
    "apply_rotary_pos_emb": apply_rotary_pos_emb,
    "contextlib": contextlib,
    "functional": functional,
    "halve": halve,
    "torch": torch,
    "COS": ANGLE.cos(),
    "SIN": ANGLE.sin(),
}


def layer_with(body: str, *blocks: str) -> type[Layer]:
    """Return a class of layers whose forward takes ``a`` to ``d``, with two blocks, which take ``x`` and ``y``."""
    classes = tuple(layer_of(block, "x, y=None", Block, names=GLOBALS) for block in blocks)
    base = type("Base", (Layer,), {"block_classes": classes})
    return layer_of(body, "a, b, c, d", base, names=GLOBALS)


class Writer:
    """A generator of random statements of forwards."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._temporary = 0

    def layer(self) -> type[Layer]:
        """Return a random class of layers."""
        blocks = [self._block(), self._block()]
        lines = [self._statement() for _ in range(self.random.randint(2, 6))]
        lines += ["return a, b, c, d" if self._is(0.7) else f"return {self._value()}, a, b, c, d"]
        return layer_with("\n".join(lines), *blocks)

    def _is(self, chance: float) -> bool:
        return self.random.random() < chance

    def _choice(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def _drawn(self, *weighted: tuple[float, Callable[[], str]]) -> str:
        weights, writers = zip(*weighted, strict=True)
        return self.random.choices(writers, weights)[0]()

    def _name(self) -> str:
        return self.random.choice(NAMES)

    def _new(self) -> str:
        self._temporary += 1
        return f"t{self._temporary}"

    def _norm(self) -> str:
        return f"self.{self.random.choice(NORMS)}"

    def _test(self) -> str:
        return self._choice(
            "self.flag", "not self.flag", "self.training", "a is None", "b is not a", "self.flag and c is b"
        )

    # Layers

    def _value(self, depth: int = 0) -> str:
        """Return an expression of a tensor as wide as a token."""
        if depth > 2:
            return self._name()
        value = partial(self._value, depth + 1)
        return self._drawn(
            (4, self._name),
            (4, lambda: f"({value()} + {value()})"),
            (4, lambda: f"{self._norm()}({value()})"),
            (1, lambda: f"self.{self._choice('q', 'up', 'down')}({value()})"),
            (2, lambda: self._call(value())),
            (1, lambda: self._choice(f"(self.factor * {value()})", f"({value()} * 0.5)")),
            (1, lambda: f"({value()} if {self._test()} else {value()})"),
            (0.7, lambda: f"({self._name()} := {value()})"),
            (2, lambda: self._product(value(), value())),
            (0.5, lambda: f"torch.tanh({value()})"),
            (0.7, lambda: f"self.dropout({value()})"),
            (0.4, lambda: f"(lambda: {value()})()"),
            (0.3, lambda: f"{self._choice('self.halve', 'halve')}({value()})"),
        )

    def _product(self, gate: str, up: str) -> str:
        act = self._choice(f"self.act({gate})", f"functional.silu({gate})")
        up = self._choice(up, f"self.up({up})")
        return self._choice(f"({act} * {up})", f"({up} * {act})")

    def _call(self, value: str) -> str:
        block = self._choice("self.attention", "self.mlp")
        return self._choice(f"{block}({value})", f"{block}(x={value})", f"{block}({value}, {self._name()})")

    def _statement(self, depth: int = 0) -> str:
        name, value, body = self._name, partial(self._value, 1), partial(self._body, depth)
        compound = [
            (1.5, lambda: f"if {self._test()}:\n{body()}" + (f"\nelse:\n{body()}" if self._is(0.5) else "")),
            (0.8, lambda: self._loop(body)),
            (0.4, lambda: self._attempt(body)),
            (0.4, lambda: f"with contextlib.suppress(ValueError):\n{body()}"),
            (0.3, lambda: f"if {self._test()}:\n    return {value()}, a, b, c, d"),
        ]
        return self._drawn(
            (6, lambda: f"{name()} = {self._value()}"),
            (2, lambda: f"{name()} = {name()}"),
            (7, self._residual),
            (5, self._branch),
            (3, self._gate),
            (1, lambda: f"{name()} = self.query_norm({name()})\n{name()} = self.key_norm({name()})"),
            (1, lambda: f"{name()}, {name()} = {value()}, {value()}"),
            (1, lambda: f"{name()} = {name()} = {value()}"),
            (1, lambda: f"{name()} {self._choice('+=', '*=')} {value()}"),
            (0.7, lambda: self._edit(name())),
            (0.5, lambda: f"kept = {name()}\ndel kept"),
            *(compound if depth < 2 else []),
        )

    def _edit(self, name: str) -> str:
        return self._choice(
            f"{name}.mul_(0.5)", f"{name}[..., 0] = 0.25", f"{name}.add_({self._name()})", f"torch.tanh_({name})",
            f"self.halve({name})", f"halve({name})", f"{self._name()} = self.halve({name})",
        )  # fmt: skip

    def _loop(self, body: Callable[[], str]) -> str:
        end = self._choice("", f"\n    if {self._name()} is d:\n        break")
        return f"for _ in range(2):\n{body()}{end}"

    def _attempt(self, body: Callable[[], str]) -> str:
        fails = self._choice("", f"\n    if {self._name()} is a:\n        raise ValueError")
        return f"try:\n{body()}{fails}\nexcept ValueError:\n{body()}"

    def _body(self, depth: int) -> str:
        lines = [self._statement(depth + 1) for _ in range(self.random.randint(1, 3))]
        return textwrap.indent("\n".join(lines), "    ")

    def _residual(self) -> str:
        """Return the statements of a branch, its sum with the residual, and a norm of the sum."""
        r, h = self.random.sample(NAMES, 2)
        lines = [f"{r} = {h}"] if self._is(0.6) else []
        lines += [f"{h} = {self._norm()}({h})"] if self._is(0.8) else []
        lines += [f"{h} = {self._choice(self._call(h), self._product(h, h), self._value(1))}"]
        lines += [f"{h} = {self._norm()}({h})"] if self._is(0.4) else []
        lines += [f"{h} = self.dropout({h})"] if self._is(0.3) else []
        lines += [f"{self._name()} = {self._name()}"] if self._is(0.15) else []
        branch = self._choice(h, h, h, f"{self._norm()}({h})", f"{h} * self.factor", self._product(h, h))
        total = self._choice(f"{r} + {branch}", f"{r} + {branch}", f"{branch} + {r}")
        total = f"{total} if {self._test()} else {h}" if self._is(0.1) else total
        lines += [f"{h} = {total}"]
        lines += [f"{r} = {h}"] if self._is(0.6) else []
        after = f"{self._name()} = {self._choice(f'{self._norm()}({h})', self._call(f'{self._norm()}({h})'))}"
        lines += [f"if {self._test()}:\n    {after}" if self._is(0.15) else after]
        return "\n".join(lines)

    def _branch(self) -> str:
        """Return a residual add in a single expression, as vision models write it."""
        h, r = self._name(), self._name()
        branch = self._call(f"{self._norm()}({h})")
        branch = self._choice(branch, branch, f"{self._norm()}({branch})", f"self.dropout({branch})")
        return f"{h} = {self._choice(f'{r} + {branch}', f'{branch} + {r}')}"

    def _gate(self) -> str:
        """Return a product with an activation, in one or several statements, of two linears or a packed one."""
        x, y, gate, up = self._name(), self._name(), self._new(), self._new()
        between = self._choice("", "", f"{self._name()} = {self._value(1)}\n")
        act = self._choice("self.act", "functional.silu")
        match self._choice("single", "names", "ahead", "packed", "normed"):
            case "single":
                return f"{y} = self.down({self._product(f'self.gate({x})', f'self.up({x})')})"
            case "names":
                return f"{gate} = self.gate({x})\n{up} = self.up({x})\n{between}{y} = {act}({gate}) * {up}"
            case "ahead":
                return f"{gate} = {act}(self.gate({x}))\n{between}{up} = self.up({x})\n{y} = {up} * {gate}"
            case "packed":
                return f"{gate}, {up} = self.packed({x}).chunk(2, dim=-1)\n{between}{y} = {up} * {act}({gate})"
        return f"{y} = {self._norm()}({self._product(f'self.gate({x})', f'self.up({x})')})\n{y} = {self._name()} + {y}"

    # Blocks

    def _block(self) -> str:
        """Return the body of a block's forward, which mostly reads ``x`` only in linears."""
        lines = [self._reads("q"), self._reads("k")] if self._is(0.7) else [self._reads("q"), "k = q"]
        if self._is(0.2):
            edit = self._choice(
                "x = x * 0.5", "x = x if self.flag else x + 1", "y = x", "x.mul_(0.5)", "x += 1", "del x"
            )
            lines.insert(self.random.randint(0, 2), edit)
        if self._is(0.5):
            lines += self._heads()
        elif self._is(0.8):
            lines += [f"out = {self._product('q', 'k')}"]
        else:
            lines += ["out = q + k"]
        lines += ["out = out if y is None else out + y"]
        return "\n".join([*lines, self._choice("return out", "return self.down(out)")])

    def _reads(self, name: str) -> str:
        """Return statements that assign a linear of ``x`` to a name."""
        linear = self._choice(f"self.{name}", "self.gate", "self.up", "self.v")
        second = self._choice("self.v", "self.down")
        plain = f"{name} = {linear}(x)"
        return self._choice(
            *[plain] * 8,
            f"if self.flag:\n    {name} = {linear}(x)\nelse:\n    {name} = {second}(x)",
            f"for _ in range(2):\n    {name} = {linear}(x)",
            f"{name} = sum(f(x) for f in ({linear}, {second}))",
            f"def read():\n    return {linear}(x)\n{name} = read()",
            f"{name} = {linear}(x) + {second}(x)",
            f"{name} = {linear}(x) + x",
            f"z = x\n{name} = {linear}(z)",
            f"{name} = {linear}(x if self.flag else x * 2)",
        )

    def _heads(self) -> Sequence[str]:
        """Return norms of heads, a rotation of heads, or both, some of them after another change."""
        lines = []
        for name in "qk":
            view = f"{name}.view(*{name}.shape[:-1], {HEADS}, -1)"
            norm = f"self.{name}_norm({view})" if self._is(0.85) else view
            lines += [f"{name} = {norm}.transpose(1, 2)"]
        if self._is(0.2):
            lines.insert(1, self._choice("k = k * 0.5", "k.mul_(0.5)", "halve(q)", "k = k + self.factor"))
        rotate = "q, k = apply_rotary_pos_emb(q, k, COS, SIN)"
        if self._is(0.8):
            lines += [self._choice("z = q", "q = q * 0.5", "k.mul_(0.5)")] if self._is(0.15) else []
            lines += [f"if self.flag:\n    {rotate}" if self._is(0.1) else rotate]
        return [*lines, "out = (q + 2 * k).transpose(1, 2).flatten(-2)"]

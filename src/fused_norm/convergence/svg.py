"""Small charts as SVG text, drawn in the colours of the page around them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]


@dataclass
class Chart:
    """A chart of fixed size; every method adds to it, ``render`` returns it. Classes name the colours.

    Attributes:
        title: read out by screen readers.
        x: range of the x axis.
        y: range of the y axis.
        log_x, log_y: axes in powers of ten.
        x_label, y_label: what the axes show.
    """

    title: str
    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = False
    log_y: bool = False
    x_label: str = ""
    y_label: str = ""
    width: int = 330
    height: int = 190
    _parts: list[str] = field(default_factory=list)

    _LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 30

    def line(self, points: Iterable[Point], kind: str) -> None:
        """A line through points; those that the axes cannot show are left out."""
        placed = [self._place(point) for point in points if self._shows(point)]
        if placed:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            self._parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def area(self, upper: Sequence[Point], kind: str) -> None:
        """What lies below a line."""
        shown = [point for point in upper if self._shows(point)]
        if shown:
            corners = [*shown, (shown[-1][0], self.y[0]), (shown[0][0], self.y[0])]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self._place, corners))
            self._parts.append(f'<polygon class="{kind}" points="{path}"/>')

    def dots(self, points: Iterable[tuple[float, float, str]], kind: str) -> None:
        """Dots that show a text when pointed at; those off the axes lie on their edge."""
        for x, y, text in points:
            left, top = self._place((self._clip(x, self.x), self._clip(y, self.y)))
            self._parts.append(
                f'<circle class="{kind}" cx="{left:.1f}" cy="{top:.1f}" r="2.6"><title>{escape(text)}</title></circle>'
            )

    def render(self) -> str:
        """The chart as an ``svg`` element."""
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img"><title>{escape(self.title)}</title>'
        return head + "".join([*self._axes(), *self._parts]) + "</svg>"

    def _axes(self) -> Iterable[str]:
        right, bottom = self.width - self._RIGHT, self.height - self._BOTTOM
        for value in _ticks(self.y, self.log_y):
            _, top = self._place((self.x[0], value))
            yield f'<line class="grid" x1="{self._LEFT}" x2="{right}" y1="{top:.1f}" y2="{top:.1f}"/>'
            yield f'<text class="tick" x="{self._LEFT - 4}" y="{top + 3:.1f}" text-anchor="end">{_label(value)}</text>'
        for value in _ticks(self.x, self.log_x):
            left, _ = self._place((value, self.y[0]))
            yield f'<text class="tick" x="{left:.1f}" y="{bottom + 12}" text-anchor="middle">{_label(value)}</text>'
        yield f'<text class="label" x="{right}" y="{self.height - 4}" text-anchor="end">{escape(self.x_label)}</text>'
        yield f'<text class="label" x="{self._LEFT}" y="{self.height - 4}">{escape(self.y_label)}</text>'

    def _shows(self, point: Point) -> bool:
        x, y = point
        return (x > 0 or not self.log_x) and (y > 0 or not self.log_y) and math.isfinite(x) and math.isfinite(y)

    def _clip(self, value: float, bounds: tuple[float, float]) -> float:
        return min(max(value, bounds[0]), bounds[1])

    def _place(self, point: Point) -> Point:
        x = _share(self._clip(point[0], self.x), self.x, self.log_x)
        y = _share(self._clip(point[1], self.y), self.y, self.log_y)
        return (
            self._LEFT + x * (self.width - self._LEFT - self._RIGHT),
            self._TOP + (1 - y) * (self.height - self._TOP - self._BOTTOM),
        )


def log_range(values: Iterable[float], *, least: float = 1e-12) -> tuple[float, float]:
    """Whole powers of ten around the values above zero."""
    shown = [value for value in values if value > least and math.isfinite(value)] or [1e-6, 1e-3]
    low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def linear_range(values: Iterable[float]) -> tuple[float, float]:
    """The range of the finite values, a little wider."""
    shown = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(shown), max(shown)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def _share(value: float, bounds: tuple[float, float], log: bool) -> float:
    low, high, at = (*bounds, value)
    if log:
        low, high, at = math.log10(low), math.log10(high), math.log10(at)
    return (at - low) / (high - low) if high > low else 0.5


def _ticks(bounds: tuple[float, float], log: bool) -> list[float]:
    low, high = bounds
    if log:
        exponents = range(round(math.log10(low)), round(math.log10(high)) + 1)
        return [10.0**exponent for exponent in exponents[:: -(-len(exponents) // 6)]]
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step)
    return [step * index for index in range(first, math.floor(high / step) + 1)]


def _label(value: float) -> str:
    return f"{value:g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.0e}".replace("e-0", "e-")

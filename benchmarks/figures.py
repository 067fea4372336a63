"""What a benchmark gives: figures, each with the reference that it was measured against and the goal it is held to.

A benchmark module (`engine`, `postgres`, `views`, `sinks`) has `BENCHMARKS`, a mapping of names to functions that take
a `Scale` and yield `Figure`s. `__main__` finds them, runs them one after the other and prints one table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a run is. `factor` 1 is what the README cites; a smoke run has 0.01."""

    factor: float
    folder: Path

    def rows(self, full: int, *, least: int = 1000) -> int:
        return max(least, int(full * self.factor))

    def seconds(self, full: float, *, least: float = 5.0) -> float:
        return max(least, full * self.factor)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `ratio` is ours against the reference, written so that more is better."""

    name: str
    value: float
    unit: str
    reference: str = ""
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None


Benchmark = Callable[[Scale], Iterable[Figure]]
Benchmarks = Mapping[str, Benchmark]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def short(value: float) -> str:
    """Three digits that matter, with thousands apart."""
    if math.isnan(value):
        return "–"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"

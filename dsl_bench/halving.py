"""Successive halving: many configs timed shortly, the better third of them longer, until few are left.

Compiling is most of what a config costs, so the budget counts configs and every rung after the first only
times again. With rungs of 1/3, 1 and 3 times a trial's usual time, the whole takes about as much device time
as one usual trial of every config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dsl_bench.strategies import Label, Point, Result, preferred

#: by how much a rung thins out, and by how much it times longer
RATE = 3
#: the share of a trial's usual time in the first rung
FIRST = 1 / 3
#: with so few left the finals decide
ENOUGH = 5


@dataclass
class Halving:
    """Asks for the ``trials`` likeliest points at once, then for the survivors of each rung."""

    points: list[Point]
    trials: int
    results: list[Result] = field(default_factory=list)
    _rung: int = -1
    _waiting: set[Label] = field(default_factory=set)
    _last: list[Result] = field(default_factory=list)

    def ask(self, n: int) -> list[Point]:
        """The first rung, up to ``n`` points at a time, then survivors with more effort; empty in between,
        while results are out, and at the end."""
        if self._rung <= 0 and n > 0 and self._entrants():
            self._rung = 0
            chosen = self._entrants()[:n]
            self._waiting |= {p.label for p in chosen}
            return [replace(p, effort=FIRST) for p in chosen]
        told = {r.point.label for r in self._last}
        if not self._waiting <= told:
            return []
        good = sorted((r for r in self._last if r.median_ns is not None), key=lambda r: r.median_ns or 0.0)
        kept = good[: max(1, len(good) // RATE)] if len(good) > ENOUGH else []
        if not kept:
            return []
        self._rung += 1
        self._last = []
        self._waiting = {r.point.label for r in kept}
        return [replace(r.point, effort=FIRST * RATE**self._rung) for r in kept]

    def tell(self, results: Sequence[Result]) -> None:
        """The rung's outcome."""
        self.results += results
        self._last += results

    def prefer(self, labels: Sequence[Label]) -> None:
        """Makes sure that these are in the first rung."""
        if self._rung < 0:
            self.points = preferred(self.points, labels)

    def _entrants(self) -> list[Point]:
        """Those of the first rung that were not asked for yet."""
        return [p for p in self.points[: self.trials] if p.label not in self._waiting]

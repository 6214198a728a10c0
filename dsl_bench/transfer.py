"""What was learned on one case of a workload orders the search on the next."""

from __future__ import annotations

import math

from dsl_bench.records import CaseRef
from dsl_bench.strategies import Label

#: how many winners of other cases a search is told of
MOST = 4
#: another dtype counts as this many doublings of a size
OTHER_DTYPE = 2.0


class Lessons:
    """The best known config of every contender on every case so far."""

    def __init__(self) -> None:
        self._best: dict[str, dict[str, tuple[CaseRef, Label]]] = {}

    def learn(self, contender: str, case: CaseRef, label: Label) -> None:
        """``label`` is the best of ``contender`` on ``case``, as far as is known."""
        self._best.setdefault(contender, {})[case.name] = (case, label)

    def hints(self, contender: str, case: CaseRef) -> list[Label]:
        """The best of the other cases, those of the most similar cases first."""
        others = [held for name, held in self._best.get(contender, {}).items() if name != case.name]
        others.sort(key=lambda held: apart(case, held[0]))
        return list(dict.fromkeys(label for _, label in others))[:MOST]


def apart(one: CaseRef, other: CaseRef) -> float:
    """How different two cases are: doublings between their sizes, summed."""
    total = 0.0 if one.dtype == other.dtype else OTHER_DTYPE
    for name in one.params.keys() | other.params.keys():
        a, b = one.params.get(name), other.params.get(name)
        if isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0:
            total += abs(math.log2(a / b))
        elif a != b:
            total += OTHER_DTYPE
    return total

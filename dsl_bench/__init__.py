"""dsl_bench: GPU kernel languages on the same LLM workloads, as a fraction of the best vendor kernel."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsl_bench.api import run, tune
    from dsl_bench.report import best, fraction_of, geomean
    from dsl_bench.store import load_results

__version__ = "0.1.0"
__all__ = ["best", "fraction_of", "geomean", "load_results", "run", "tune"]

_HOMES = {
    "best": "dsl_bench.report",
    "fraction_of": "dsl_bench.report",
    "geomean": "dsl_bench.report",
    "load_results": "dsl_bench.store",
    "run": "dsl_bench.api",
    "tune": "dsl_bench.api",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that ``import dsl_bench`` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dsl_bench' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """What there is to complete: the public names, imported or not."""
    return sorted({*globals(), *__all__})

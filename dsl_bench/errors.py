"""The exceptions of dsl_bench.

::

    DslBenchError                 every error we raise on purpose
    ├── UsageError                the caller asked for something that does not exist     exit 2
    ├── NothingMatched            a pattern or group selected no work                    exit 3
    ├── RecordError               a results file or line that cannot be read or written
    ├── PluginError               a plugin that breaks the contract
    ├── TimerError                the timer could not do what it promises (never replaced by another)
    └── KernelFault               a kernel that failed: carries a status and what caught it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DslBenchError(Exception):
    """Base of every error raised on purpose; its text is one line for a user."""


class UsageError(DslBenchError):
    """An unknown name, format or value. The text names what was given and what is possible."""


class NothingMatched(DslBenchError):
    """A selection that is well-formed but empty."""


class RecordError(DslBenchError):
    """A results file or folder that cannot be used, named by path and line."""


class PluginError(DslBenchError):
    """A plugin whose contract is broken (wrong API version, wrong type, duplicate name)."""


class TimerError(DslBenchError):
    """The one timer could not measure; another is never used in its place."""


class KernelFault(DslBenchError):
    """A kernel that failed in a known way.

    ``status`` is one of :data:`dsl_bench.records.STATUSES`; ``check`` names what caught it; ``fatal``: it
    left its process in a state that others must not work in.
    """

    def __init__(self, status: str, reason: str, check: str = "", fatal: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.check = check
        self.fatal = fatal


def unknown(kind: str, given: str, known: Iterable[str], note: str = "") -> UsageError:
    """A :class:`UsageError` for a name that does not exist, with the closest ones first."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(names) or 'none'}"
    return UsageError(f"unknown {kind} {given!r}; {hint}{' ' + note if note else ''}")

"""The kernel contract: a frozen value at the end of a kernel file.

A kernel's life: ``valid(case, config)`` says whether it can do the case; ``static(case, config)`` gives
all that is baked into the binary; ``source(static, arch)`` gives what its backend compiles (no GPU, no
tensor); the backend loads the artifact; ``bind`` does the host work of a step once per buffer set (grid,
tensor maps, workspace); the harness redraws every value tensor in place, and times ``Call.run()``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsl_bench.workload import Case

Value = int | str | bool
Config = Mapping[str, Value]
Static = Mapping[str, Any]


@dataclass(frozen=True)
class Needs:
    """What a kernel cannot run without: architectures (``sm_90a``) and packages (``triton>=3.6,<3.7``).
    Empty means any. An unmet need is a row with that reason."""

    archs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One bound invocation.

    ``run()`` enqueues the work on the current stream and returns at once. A kernel of a compared language
    fills the outputs it was given and returns None. A vendor call without a destination sets
    ``allocates`` and returns its outputs by name. ``keep`` holds what must outlive the call.
    """

    run: Callable[[], Mapping[str, Any] | None]
    allocates: bool = False
    keep: tuple[Any, ...] = ()


def _always(case: Case, config: Config) -> str | None:
    return None


def _whole_config(case: Case, config: Config) -> Static:
    return dict(config)


@dataclass(frozen=True)
class Kernel:
    """A kernel and the space it is tuned over. See the module's docstring for the life of one.

    ``id`` is ``<backend>/<name>``; ``space`` maps a name to its values, a config is one choice of each;
    ``default(case)`` is the author's own first guess, and ``seeds(case)`` further ones, best first.
    ``valid`` returns None or the reason why not. ``cost(case, config)`` is a rough time in µs that says what
    to try first; without it a model of waves and roofline guesses. ``files`` are helper files beside the
    kernel file (relative to it) that count into its source hash; what a ``--plugin`` file imports from its
    own folder counts without being named.
    """

    id: str
    workload: str
    space: Mapping[str, Sequence[Value]]
    default: Callable[[Case], Config]
    source: Callable[[Static, str], Any]
    bind: Callable[[Any, Case, Config, Mapping[str, Any], Mapping[str, Any]], Call]
    valid: Callable[[Case, Config], str | None] = _always
    static: Callable[[Case, Config], Static] = _whole_config
    seeds: Callable[[Case], Sequence[Config]] = field(default=lambda case: ())
    needs: Needs = Needs()
    files: tuple[str, ...] = ()
    summary: str = ""
    cost: Callable[[Case, Config], float] | None = None

    @property
    def backend(self) -> str:
        """The name of the backend that compiles this kernel."""
        return self.id.partition("/")[0]

    def configs(self) -> Iterator[dict[str, Value]]:
        """Every point of the space, in a fixed order."""
        names = list(self.space)
        for values in itertools.product(*(self.space[n] for n in names)):
            yield dict(zip(names, values, strict=True))

"""What is not worth a try, and how it is written down.

``valid()`` of a kernel refuses configs before they are compiled; facts of the compiled code refuse some more
before the GPU is touched. Thousands of refused configs go into one record: a reason's number for every point
of the space, in the space's own order.
"""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from dsl_bench.records import ConfigDict, Facts, PrunedKernel

#: shared memory a block may use where the device's own limit is not known (compute capability 9.0), bytes
SMEM_LIMIT = 232448
#: bytes of spills that a config may have; more cost a trip to memory each
MOST_SPILLS = 32


def facts_reason(facts: Facts | None, smem_limit: int = SMEM_LIMIT) -> str:
    """Why a compiled config need not be tried, or an empty string."""
    if facts is None:
        return ""
    smem = max(0, facts.smem_static) + max(0, facts.smem_dynamic)
    if smem > smem_limit:
        return f"{smem} bytes of shared memory, over {smem_limit}"
    spills = max(0, facts.spill_stores) + max(0, facts.spill_loads)
    if spills > MOST_SPILLS:
        return f"{spills} bytes of spills, over {MOST_SPILLS}"
    return ""


def pack(numbers: Sequence[int]) -> str:
    """Numbers below 65536 (mostly equal to their neighbours) as short text."""
    return base64.b64encode(zlib.compress(np.asarray(numbers, dtype="<u2").tobytes(), 9)).decode()


def unpack(text: str) -> list[int]:
    """The numbers behind :func:`pack`."""
    if not text:
        return []
    return [int(n) for n in np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<u2")]


def configs_of(space: Mapping[str, Sequence[int | str | bool]]) -> Iterator[ConfigDict]:
    """Every point of a space in the order in which kernels enumerate theirs."""
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values, strict=True))


def refused(kernel: PrunedKernel) -> Iterator[tuple[ConfigDict, str]]:
    """Every refused config of a record with its reason: the way back from :func:`pack`."""
    codes = unpack(kernel.codes)
    for config, code in zip(configs_of(kernel.space), codes, strict=False):
        if code:
            yield config, kernel.reasons[code - 1]


def text_of(kernel: PrunedKernel) -> str:
    """The most frequent reasons in a line."""
    common = sorted(zip(kernel.counts, kernel.reasons, strict=True), reverse=True)[:3]
    return "; ".join(f"{count} x {reason}" for count, reason in common)


def as_bytes(kernel: PrunedKernel) -> int:
    """What the record of a kernel costs on disk."""
    return len(msgspec.json.encode(kernel))

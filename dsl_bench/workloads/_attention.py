"""What the attention workloads share: lists of lengths, names of cases, exact attention of a sequence."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsl_bench.plugin import DTYPES, UsageError, int_list, positive_int

#: scores held at a time by the reference (1 GiB of float64)
_SCORES = 1 << 27


def runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive equal lengths as (length, count)."""
    for length, group in itertools.groupby(lengths):
        yield length, len(list(group))


def canonical(lengths: Sequence[int]) -> str:
    """The list as users may write it: ``512*16+8192``."""
    return "+".join(f"{n}*{count}" if count > 1 else str(n) for n, count in runs(lengths))


def label(lengths: Sequence[int]) -> str:
    """A short name of a list, unique to it: ``16x512+1x8192``, or sequences, tokens and a hash where long."""
    text = "+".join(f"{count}x{n}" for n, count in runs(lengths))
    if len(text) <= 40:
        return text
    digest = hashlib.sha256(canonical(lengths).encode()).hexdigest()[:6]
    return f"b{len(lengths)}-t{sum(lengths)}-{digest}"


def take(workload: str, given: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """``given`` with ``defaults`` filled in (an empty default is required); UsageError on what is unknown."""
    known = ", ".join(defaults)
    extra = sorted(set(given) - set(defaults))
    missing = sorted(key for key, value in defaults.items() if not value and not given.get(key))
    if extra or missing:
        wrong = [f"unknown {', '.join(extra)}"] if extra else []
        wrong += [f"missing {', '.join(missing)}"] if missing else []
        raise UsageError(f"{workload}: a case takes {known}; {'; '.join(wrong)}")
    values = {**defaults, **given}
    if values["dtype"] not in DTYPES:
        raise UsageError(
            f"{workload}: dtype={values['dtype']!r} is not supported; known: {', '.join(DTYPES)}"
        )
    return values


def parse_lengths(workload: str, text: str) -> tuple[int, ...]:
    """``512*16+8192`` as a tuple; at least one sequence with at least one token among them."""
    try:
        lengths = int_list(text)
    except ValueError as fault:
        raise UsageError(f"{workload}: lens={text!r}: {fault}; write for example 512*16+8192") from None
    if not any(lengths):
        raise UsageError(f"{workload}: lens={text!r} holds no token")
    return lengths


def parse_heads(workload: str, text: str) -> tuple[int, int]:
    """``32/8`` as (query heads, KV heads); a single number means as many of both."""
    first, slash, second = text.partition("/")
    q = positive_int(workload, "heads", first)
    kv = positive_int(workload, "heads", second) if slash else q
    if q % kv:
        raise UsageError(f"{workload}: heads={text!r}: {q} query heads are no multiple of {kv} KV heads")
    return q, kv


def parse_flag(workload: str, key: str, text: str) -> int:
    """A yes or no as 1 or 0."""
    values = {"1": 1, "true": 1, "yes": 1, "0": 0, "false": 0, "no": 0}
    if text.lower() not in values:
        raise UsageError(f"{workload}: {key}={text!r} is neither 1 nor 0")
    return values[text.lower()]


def one_of(workload: str, key: str, text: str, known: Sequence[int]) -> int:
    """``text`` as one of the integers ``known``."""
    value = positive_int(workload, key, text)
    if value not in known:
        raise UsageError(f"{workload}: {key}={text} is not supported; known: {', '.join(map(str, known))}")
    return value


def attend(q: Any, k: Any, v: Any, scale: float, causal: bool, low: bool = False) -> Any:
    """softmax(scale · q·kᵀ)·v of one sequence: q [sq, hq, d], k [sk, hkv, d], v [sk, hkv, dv] to
    [sq, hq, dv]. Query heads share KV heads in order. The causal mask is aligned to the bottom right; a
    query that sees no key gives zeros.

    In float64 by chunks of queries; with ``low`` as a sound kernel does it: float32 sums, probabilities
    rounded to the inputs' type before the second product."""
    import torch

    kind = torch.float32 if low else torch.float64
    (sq, hq, d), (sk, hkv, _) = q.shape, k.shape
    group, dv = hq // hkv, v.shape[2]
    out = torch.zeros((sq, hq, dv), dtype=kind, device=q.device)
    if not sk:
        return out
    keys, values = k.to(kind).permute(1, 2, 0), v.to(kind).transpose(0, 1)
    rows = max(1, _SCORES // (hq * sk))
    for start in range(0, sq, rows):
        stop = min(sq, start + rows)
        seen = max(0, sk - sq + stop) if causal else sk
        if not seen:
            continue
        part = q[start:stop].to(kind).view(stop - start, hkv, group, d).transpose(0, 1)
        scores = torch.bmm(part.reshape(hkv, -1, d), keys[:, :, :seen]).mul_(scale)
        scores = scores.view(hkv, stop - start, group, seen)
        if causal:
            last = torch.arange(start, stop, device=q.device) + (sk - sq)
            hidden = torch.arange(seen, device=q.device)[None, :] > last[:, None]
            scores.masked_fill_(hidden[None, :, None, :], float("-inf"))
        top = scores.amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(kind).min)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        if low:
            weights = weights.to(q.dtype).to(kind)
        found = torch.bmm(weights.view(hkv, -1, seen), values[:, :seen])
        found = found.view(hkv, stop - start, group, dv).div_(total.clamp_min_(torch.finfo(kind).tiny))
        out[start:stop] = found.transpose(0, 1).reshape(stop - start, hq, dv)
    return out


def pages(length: int, page: int) -> int:
    """Pages that a sequence takes."""
    return -(-length // page)


def page_index(lengths: Sequence[int], page: int, pool: int, rng: Any) -> dict[str, Any]:
    """``page_table`` [b, widest] (shuffled pages of the pool, 0 past the end) and ``lengths`` [b]."""
    import numpy as np

    order = rng.permutation(pool).astype(np.int32)
    table = np.zeros((len(lengths), table_width(lengths, page)), dtype=np.int32)
    taken = 0
    for row, length in enumerate(lengths):
        count = pages(length, page)
        table[row, :count] = order[taken : taken + count]
        taken += count
    return {"page_table": table, "lengths": np.asarray(lengths, dtype=np.int32)}


def table_width(lengths: Sequence[int], page: int) -> int:
    """Columns of a page table."""
    return max(1, *(pages(n, page) for n in lengths))


def pool_pages(lengths: Sequence[int], page: int) -> int:
    """Pages of the pool: those in use and one in sixteen besides, as in a server that is never quite full."""
    used = sum(pages(n, page) for n in lengths)
    return used + max(1, used // 16)


def gather(cache: Any, table: Any, length: int) -> Any:
    """The first ``length`` tokens of a sequence from its pages: cache [pool, page, …], table [widest]."""
    count = pages(length, cache.shape[1])
    return cache[table[:count].long()].flatten(0, 1)[:length]

"""The barriers of the Gluon attention kernels, replayed: no deadlock, and nothing overwritten that is read.

Agents (producer, two consumers, the arrival of loads) are generators that yield the phases they wait for; a
seeded scheduler runs any that may go on. The orders of waits and arrivals are those of the kernels.
"""

import random
from collections.abc import Callable, Generator

import pytest

Wait = tuple["Barrier", int] | None
Agent = Generator[Wait, None, None]


class Barrier:
    """An mbarrier: phases end when all have arrived and all bytes have."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.phase = self.loads = 0

    def arrive(self, loads: int = 0) -> None:
        assert self.left > 0, "more arrivals than a phase takes"
        self.left -= 1
        self.loads += loads
        self._end()

    def loaded(self) -> None:
        self.loads -= 1
        self._end()

    def _end(self) -> None:
        if not self.left and not self.loads:
            self.phase += 1
            self.left = self.count

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Replay:
    """Runs agents, and lets what was loaded arrive in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pending: list[Callable[[], None]] = []

    def load(self, place: dict, key: object, value: int, bar: Barrier) -> None:
        """What lies at ``key`` is gone at once, ``value`` comes later."""
        place[key] = None

        def arrive() -> None:
            place[key] = value
            bar.loaded()

        self.pending.append(arrive)

    def run(self, agents: list[Agent]) -> None:
        waits: dict[int, Wait] = dict.fromkeys(range(len(agents)))
        while waits:
            ready: list[int] = [i for i, w in waits.items() if w is None or w[0].passed(w[1])]
            choices = ready + [-1] * bool(self.pending)
            assert choices, "deadlock"
            chosen = self.random.choice(choices)
            if chosen < 0:
                self.pending.pop(self.random.randrange(len(self.pending)))()
                continue
            try:
                waits[chosen] = next(agents[chosen])
            except StopIteration:
                del waits[chosen]


def prefill(tiles: list[int], stages: int, pingpong: bool, replay: Replay) -> list[list[int]]:
    """attention_prefill_gluon with tiles of so many blocks of keys; the blocks each consumer added."""
    q_full, q_free = Barrier(1), Barrier(2)
    k_full, v_full = [Barrier(1) for _ in range(stages)], [Barrier(1) for _ in range(stages)]
    k_free, v_free = [Barrier(2) for _ in range(stages)], [Barrier(2) for _ in range(stages)]
    turn = [Barrier(2), Barrier(2)]
    held: dict[object, int | None] = {}
    added: list[list[int]] = [[], []]

    def produce() -> Agent:
        it = 0
        for item, blocks in enumerate(tiles):
            yield q_free, item & 1 ^ 1
            q_full.arrive(1)
            replay.load(held, "q", item, q_full)
            for _ in range(blocks):
                stage = it % stages
                for name, full, free in (("k", k_full, k_free), ("v", v_full, v_free)):
                    yield free[stage], it // stages & 1 ^ 1
                    full[stage].arrive(1)
                    replay.load(held, (name, stage), it, full[stage])
                it += 1

    def consume(owner: int) -> Agent:
        it = turns = 0
        if pingpong and owner == 1:
            turn[0].arrive()
        for item, blocks in enumerate(tiles):
            yield q_full, item & 1
            yield k_full[it % stages], it // stages & 1
            assert held["k", it % stages] == it
            yield None
            k_free[it % stages].arrive()
            for _ in range(blocks - 1):
                ahead, now = (it + 1) % stages, it % stages
                yield k_full[ahead], (it + 1) // stages & 1
                yield v_full[now], it // stages & 1
                if pingpong:
                    turn[owner].arrive()
                    yield turn[owner], turns & 1
                    turns += 1
                    turn[1 - owner].arrive()
                yield None
                assert (held["k", ahead], held["q"]) == (it + 1, item)
                k_free[ahead].arrive()
                yield None
                assert held["v", now] == it
                added[owner].append(it)
                v_free[now].arrive()
                it += 1
            q_free.arrive()
            yield v_full[it % stages], it // stages & 1
            assert held["v", it % stages] == it
            added[owner].append(it)
            v_free[it % stages].arrive()
            it += 1
        if pingpong and owner == 0:
            turn[0].arrive()
            yield turn[0], turns & 1

    replay.run([produce(), consume(0), consume(1)])
    return added


def mla(items: list[int], lag: bool, replay: Replay) -> list[list[int]]:
    """mla_decode_gluon with items of so many tiles; the tiles added to the left and the right half."""
    q_full, q_free = Barrier(1), Barrier(1)
    full, free = [Barrier(1) for _ in range(6)], [Barrier(1) for _ in range(6)]
    told, heard, scored = Barrier(1), Barrier(1), Barrier(1)
    held: dict[object, int | None] = {}
    added: list[list[int]] = [[], []]

    def produce() -> Agent:
        it = 0
        for item, tiles in enumerate(items):
            yield q_free, item & 1 ^ 1
            q_full.arrive(1)
            replay.load(held, "q", item, q_full)
            for _ in range(tiles):
                for piece in range(3):
                    slot = (it & 1) * 3 + piece
                    yield free[slot], it >> 1 & 1 ^ 1
                    full[slot].arrive(1)
                    replay.load(held, slot, it, full[slot])
                it += 1

    def left() -> Agent:
        it = 0

        def multiply(at: int, item: int) -> Agent:
            for piece in range(3):
                yield full[(at & 1) * 3 + piece], at >> 1 & 1
            yield None
            assert [held[(at & 1) * 3 + piece] for piece in range(3)] == [at] * 3
            assert held["q"] == item

        def tell(at: int) -> Agent:
            yield heard, at & 1 ^ 1
            held["weights"] = at
            told.arrive()

        def add(at: int) -> None:
            assert held[(at & 1) * 3] == at
            added[0].append(at)
            free[(at & 1) * 3].arrive()

        for item, tiles in enumerate(items):
            yield q_full, item & 1
            if not tiles:
                q_free.arrive()
                continue
            yield from multiply(it, item)
            if lag:
                scored.arrive()
            for _ in range(tiles - 1):
                yield from tell(it)
                yield from multiply(it + 1, item)
                add(it)
                yield None
                if lag:
                    scored.arrive()
                it += 1
            q_free.arrive()
            yield from tell(it)
            yield None
            add(it)
            it += 1

    def right() -> Agent:
        it = 0
        for tiles in items:
            for tile in range(tiles):
                stage = it & 1
                yield full[stage * 3 + 1], it >> 1 & 1
                yield full[stage * 3 + 2], it >> 1 & 1
                yield told, it & 1
                if lag and tile + 1 < tiles:
                    yield scored, (it + 1) & 1
                for piece in (1, 2):
                    yield None
                    assert (held["weights"], held[stage * 3 + piece]) == (it, it)
                    free[stage * 3 + piece].arrive()
                added[1].append(it)
                heard.arrive()
                it += 1

    replay.run([produce(), left(), right()])
    return added


@pytest.mark.parametrize("pingpong", [True, False])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_prefill(stages: int, pingpong: bool) -> None:
    for seed in range(200):
        replay = Replay(seed)
        tiles = [replay.random.choice((1, 1, 2, 3, 4, 7)) for _ in range(replay.random.randrange(1, 6))]
        assert prefill(tiles, stages, pingpong, replay) == [list(range(sum(tiles)))] * 2


@pytest.mark.parametrize("lag", [True, False])
def test_mla(lag: bool) -> None:
    for seed in range(600):
        replay = Replay(seed)
        items = [replay.random.choice((0, 1, 2, 3, 4, 7)) for _ in range(replay.random.randrange(1, 6))]
        assert mla(items, lag, replay) == [list(range(sum(items)))] * 2

"""A warp: its registers, and what each instruction does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import PARAM_BASE, SMEM_BASE, U32, Barrier, Block, TensorMap, bf16, fp32
from .program import Instruction, split

if TYPE_CHECKING:
    from . import Cluster

LANES = np.arange(32)


class Warp:
    """32 threads that take the same branches. Registers hold bits: uint32, uint64, or bool."""

    def __init__(self, cluster: Cluster, block: Block, number: int) -> None:
        self.cluster, self.block, self.number = cluster, block, number
        self.registers: dict[str, np.ndarray] = {}
        self.stores: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []
        self.products: list[tuple[np.ndarray, np.ndarray]] = []
        self.flights: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def special(self, name: str) -> np.ndarray | int:
        values: dict[str, Any] = {
            "%tid.x": self.number * 32 + LANES,
            "%laneid": LANES,
            "%ctaid.x": self.block.index,
            "%nctaid.x": self.cluster.grid,
            "%cluster_ctarank": self.block.rank,
            "global_smem": SMEM_BASE,
        }
        if name in values:
            return values[name]
        if found := re.fullmatch(r"\w+_param_(\d+)", name):
            return PARAM_BASE + 128 * int(found.group(1))
        return int(name[2:], 16) if re.match("0[fd]", name) else int(name, 0)

    def get(self, name: str, kind: Any = U32) -> np.ndarray:
        if name in self.registers:
            return self.registers[name].astype(kind) if kind is not bool else self.registers[name]
        if re.match(r"%(r|rd|p|rs)\d|.*@\d", name):
            raise AssertionError(f"{name} is read before it is written")
        value = self.special(name)
        mask = (1 << 8 * np.dtype(kind).itemsize) - 1
        return np.broadcast_to((np.atleast_1d(value).astype(object) & mask).astype(kind), 32)

    def one(self, name: str, lane: int = 0) -> int:
        return int(self.get(name, np.uint64)[lane])

    def put(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        if name == "_":
            return
        if mask.all():
            self.registers[name] = value
        else:
            old = self.registers.get(name, np.zeros(32, value.dtype))
            self.registers[name] = np.where(mask, value, old)

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.get(base, np.uint64).astype(np.int64) + int(offset or "0", 0)

    def run(self) -> Iterator[bool]:
        """Until the end; yields where it has to wait."""
        code, at = self.cluster.program.code, 0
        while True:
            it = code[at]
            at += 1
            mask = np.ones(32, bool)
            if it.guard:
                mask = self.registers[it.guard.lstrip("!")] ^ it.guard.startswith("!")
            if it.op in ("bra", "bra.uni", "ret", "brx.idx"):
                assert mask.all() or not mask.any(), "threads of a warp part"
                if not mask.any():
                    continue
                if it.op == "ret":
                    assert not self.groups and not self.stores, "stores still read shared memory at the end"
                    return
                target = it.args[0]
                if it.op == "brx.idx":
                    target = self.cluster.program.tables[it.args[1]][self.one(it.args[0])]
                at = self.cluster.program.labels[target]
                continue
            yield from self.step(it, mask)

    def step(self, it: Instruction, mask: np.ndarray) -> Iterator[bool]:
        family = it.op.split(".")[0]
        if it.op.startswith(("bar", "mbarrier.try_wait")):
            yield from self.wait(it, mask)
        elif (named := getattr(self, "do_" + family, None)) is not None:
            named(it, mask)
            self.cluster.moved = True
        else:
            raise NotImplementedError(f"{it.op} {it.args}")

    # what waits

    def wait(self, it: Instruction, mask: np.ndarray) -> Iterator[bool]:
        cluster, block = self.cluster, self.block
        if it.op.startswith("mbarrier.try_wait"):
            bar = block.barriers[int(self.address(it.args[1])[0])]
            parity = self.one(it.args[2])
            while bar.phase == parity:
                yield True
            self.put(it.args[0], np.ones(32, bool), mask)
        elif it.op.startswith("barrier.cluster.arrive"):
            cluster.met[0] += 32
        elif it.op.startswith("barrier.cluster.wait"):
            # all warps arrive before any waits a second time, so a count is enough
            everyone = cluster.program.threads * len(cluster.blocks)
            goal = (cluster.met[0] - 1) // everyone + 1
            while cluster.met[0] < goal * everyone:
                yield True
        else:
            number = self.one(it.args[0])
            count = self.one(it.args[1]) if len(it.args) > 1 else cluster.program.threads
            state = block.named.setdefault(number, [0, 0])
            state[0] += 32
            assert state[0] <= count, f"barrier {number}: more threads than {count}"
            opened = state[1]
            if state[0] == count:
                state[:] = [0, opened + 1]
            while state[1] == opened:
                yield True
        cluster.moved = True

    # arithmetic

    def binary(self, it: Instruction, mask: np.ndarray, do: Callable[[Any, Any], Any]) -> None:
        wide = it.op.endswith("64")
        kind = np.uint64 if wide else U32
        signed = np.int64 if wide else np.int32
        a, b = (self.get(x, kind) for x in it.args[1:3])
        if re.search(r"\.s(32|64)$", it.op):
            a, b = a.view(signed), b.view(signed)
        with np.errstate(over="ignore"):
            self.put(it.args[0], np.asarray(do(a, b)).astype(a.dtype).view(kind), mask)

    def do_add(self, it: Instruction, mask: np.ndarray) -> None:
        self.binary(it, mask, lambda a, b: a + b)

    def do_sub(self, it: Instruction, mask: np.ndarray) -> None:
        self.binary(it, mask, lambda a, b: a - b)

    def do_and(self, it: Instruction, mask: np.ndarray) -> None:
        if it.op == "and.pred":
            self.put(it.args[0], self.registers[it.args[1]] & self.registers[it.args[2]], mask)
        else:
            self.binary(it, mask, lambda a, b: a & b)

    def do_or(self, it: Instruction, mask: np.ndarray) -> None:
        if it.op == "or.pred":
            self.put(it.args[0], self.registers[it.args[1]] | self.registers[it.args[2]], mask)
        else:
            self.binary(it, mask, lambda a, b: a | b)

    def do_xor(self, it: Instruction, mask: np.ndarray) -> None:
        self.binary(it, mask, lambda a, b: a ^ b)

    def do_min(self, it: Instruction, mask: np.ndarray) -> None:
        self.binary(it, mask, np.minimum)

    def do_max(self, it: Instruction, mask: np.ndarray) -> None:
        self.binary(it, mask, np.maximum)

    def do_shl(self, it: Instruction, mask: np.ndarray) -> None:
        self.binary(it, mask, lambda a, b: a << b)

    def do_shr(self, it: Instruction, mask: np.ndarray) -> None:
        self.binary(it, mask, lambda a, b: a >> b)

    def do_div(self, it: Instruction, mask: np.ndarray) -> None:
        def toward_zero(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            a, b = a.astype(np.int64), b.astype(np.int64)
            # a quotient that is not used may have no divisor
            safe = np.where(b == 0, 1, b)
            return np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe))

        self.binary(it, mask, toward_zero)

    def do_mul(self, it: Instruction, mask: np.ndarray) -> None:
        def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            full = a.astype(np.int64) * b.astype(np.int64)
            return full >> 32 if ".hi" in it.op else full & 0xFFFF_FFFF

        if ".wide" in it.op:
            a, b = (self.get(x).astype(np.uint64) for x in it.args[1:3])
            self.put(it.args[0], a * b, mask)
        else:
            self.binary(it, mask, product)

    def do_mad(self, it: Instruction, mask: np.ndarray) -> None:
        a, b, c = (self.get(x) for x in it.args[1:4])
        self.put(it.args[0], (a.astype(np.uint64) * b + c).astype(U32), mask)

    def do_neg(self, it: Instruction, mask: np.ndarray) -> None:
        self.put(it.args[0], (-self.get(it.args[1]).astype(np.int64)).astype(U32), mask)

    def do_not(self, it: Instruction, mask: np.ndarray) -> None:
        if it.op == "not.pred":
            self.put(it.args[0], ~self.registers[it.args[1]], mask)
        else:
            self.put(it.args[0], ~self.get(it.args[1]), mask)

    def do_bfe(self, it: Instruction, mask: np.ndarray) -> None:
        x, start, count = self.get(it.args[1]).astype(np.int64), self.one(it.args[2]), self.one(it.args[3])
        x = x >> start & ((1 << count) - 1)
        if it.op.endswith("s32"):
            x = np.where(x >> (count - 1) & 1, x - (1 << count), x)
        self.put(it.args[0], x.astype(U32), mask)

    def do_setp(self, it: Instruction, mask: np.ndarray) -> None:
        _, how, *_rest, kind = it.op.split(".")
        a, b = (self.get(x) for x in it.args[1:3])
        if kind[0] == "s":
            a, b = a.view(np.int32), b.view(np.int32)
        if kind == "b16":
            a, b = a & 0xFFFF, b & 0xFFFF
        compare: dict[str, Callable[[Any, Any], Any]] = {
            "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
            "gt": np.greater, "ge": np.greater_equal,
        }  # fmt: skip
        self.put(it.args[0], compare[how](a, b), mask)

    def do_selp(self, it: Instruction, mask: np.ndarray) -> None:
        chosen = np.where(self.registers[it.args[3]], self.get(it.args[1]), self.get(it.args[2]))
        self.put(it.args[0], chosen, mask)

    def do_mov(self, it: Instruction, mask: np.ndarray) -> None:
        kind = np.uint64 if it.op.endswith("64") else U32
        self.put(it.args[0], self.get(it.args[1], kind), mask)

    def do_cvta(self, it: Instruction, mask: np.ndarray) -> None:
        self.put(it.args[0], self.get(it.args[1], np.uint64), mask)

    def do_cvt(self, it: Instruction, mask: np.ndarray) -> None:
        if it.op == "cvt.rn.bf16x2.f32":
            high, low = (bf16(self.get(x).view(np.float32)).astype(U32) for x in it.args[1:3])
        elif it.op == "cvt.rn.f16x2.f32":
            high, low = (
                self.get(x).view(np.float32).astype(np.float16).view(np.uint16).astype(U32)
                for x in it.args[1:3]
            )
        else:
            assert it.op == "cvt.u64.u32", it.op
            self.put(it.args[0], self.get(it.args[1]).astype(np.uint64), mask)
            return
        self.put(it.args[0], high << 16 | low, mask)

    # threads among each other

    def do_shfl(self, it: Instruction, mask: np.ndarray) -> None:
        assert it.op == "shfl.sync.idx.b32", it.op
        self.put(it.args[0], self.get(it.args[1])[self.get(it.args[2]) & 31], mask)

    def do_elect(self, it: Instruction, mask: np.ndarray) -> None:
        first, chosen = it.args[0].split("|")
        self.put(first, np.zeros(32, U32), mask)
        self.put(chosen, LANES == 0, mask)

    def do_setmaxnreg(self, it: Instruction, mask: np.ndarray) -> None:
        pass

    def do_mapa(self, it: Instruction, mask: np.ndarray) -> None:
        rank = self.get(it.args[2])
        self.put(it.args[0], self.get(it.args[1]) | (rank + 1) << 24, mask)

    # memory

    def do_ld(self, it: Instruction, mask: np.ndarray) -> None:
        if it.op.startswith("ld.param"):
            found = re.search(r"_param_(\d+)", it.args[1])
            value = self.cluster.params[int(found.group(1))]  # type: ignore[union-attr]
            self.put(it.args[0], np.full(32, value & 0xFFFF_FFFF, U32), mask)
            return
        size = int(it.op[-2:].lstrip("b")) // 8
        at = self.address(it.args[1])
        data = sum(self.block.smem[at + i].astype(U32) << 8 * i for i in range(size))
        self.put(it.args[0], np.asarray(data), mask)

    def do_st(self, it: Instruction, mask: np.ndarray) -> None:
        assert it.op.startswith("st.shared"), it.op
        size = int(re.search(r"\.[bu](\d+)", it.op).group(1)) // 8  # type: ignore[union-attr]
        for n, name in enumerate(split(it.args[1].strip("{}"))):
            value = self.get(name)
            for lane in LANES[mask]:
                for i in range(size):
                    self.block.smem[self.address(it.args[0])[lane] + n * size + i] = (
                        value[lane] >> 8 * i & 255
                    )

    def do_stmatrix(self, it: Instruction, mask: np.ndarray) -> None:
        at = self.address(it.args[0])
        names = split(it.args[1].strip("{}"))
        for n, name in enumerate(names):
            pairs = self.get(name)
            cells = np.stack([pairs & 0xFFFF, pairs >> 16], 1).astype(np.uint16).reshape(8, 8)
            if ".trans" in it.op:
                cells = cells.T
            for row in range(8):
                to = int(at[n * 8 + row])
                assert to % 16 == 0
                self.block.smem[to : to + 16] = np.ascontiguousarray(cells[row]).view(np.uint8)
                self.block.dirty[to : to + 16] = self.number + 1

    def do_fence(self, it: Instruction, mask: np.ndarray) -> None:
        if it.op.startswith("fence.proxy.async"):
            self.block.dirty[self.block.dirty == self.number + 1] = 0

    def do_mbarrier(self, it: Instruction, mask: np.ndarray) -> None:
        if it.op.startswith("mbarrier.init"):
            if mask.any():
                assert mask.sum() == 1
                count = self.one(it.args[1])
                self.block.barriers[int(self.address(it.args[0])[0])] = Barrier(count, count)
            return
        at = self.address(it.args[1])
        for lane in LANES[mask]:
            where = int(at[lane])
            block = self.block
            if "shared::cluster" in it.op:
                block, where = self.cluster.blocks[(where >> 24) - 1], where & 0xFF_FFFF
            if ".expect_tx" in it.op:
                block.barriers[where].bytes += self.one(it.args[2])
            block.arrive(where)

    def do_cp(self, it: Instruction, mask: np.ndarray) -> None:
        if "commit_group" in it.op:
            if self.stores:
                self.groups.append(self.stores)
                self.stores = []
        elif "wait_group" in it.op:
            while len(self.groups) > self.one(it.args[0]):
                for store in self.groups.pop(0):
                    store()
        elif mask.any():
            assert mask.sum() == 1
            lane = int(LANES[mask][0])
            (self.load if ".global.mbarrier" in it.op else self.store)(it, lane)

    def box(self, operand: str, lane: int) -> tuple[TensorMap, tuple[int, ...]]:
        map_at, at = split(operand.strip("[] "))
        found = self.cluster.params[(self.one(map_at) - PARAM_BASE) // 128]
        assert isinstance(found, TensorMap)
        signed = (int(self.get(x).view(np.int32)[lane]) for x in split(at.strip("{}")))
        return found, tuple(signed)

    def load(self, it: Instruction, lane: int) -> None:
        to, bar = (int(self.address(it.args[i])[lane]) for i in (0, 2))
        source, at = self.box(it.args[1], lane)
        many = self.one(it.args[3]) if len(it.args) > 3 else 1 << self.block.rank

        def land() -> None:
            offsets, inside = source.cells(at)
            flat = source.data.reshape(-1)
            values = np.where(inside, flat[np.where(inside, offsets, 0)], 0).astype(np.uint16)
            places = source.places(to)
            for block in self.cluster.blocks:
                if many >> block.rank & 1:
                    block.smem[places] = values & 0xFF
                    block.smem[places + 1] = values >> 8
                    block.complete(bar, values.size * 2)

        self.cluster.flying.append(land)

    def store(self, it: Instruction, lane: int) -> None:
        target, at = self.box(it.args[0], lane)
        places = target.places(int(self.address(it.args[1])[lane]))
        smem = self.block.smem
        assert not self.block.dirty[places].any(), "a store reads what no fence has made visible to it"

        def leave() -> None:
            offsets, inside = target.cells(at)
            values = smem[places].astype(np.uint16) | smem[places + 1].astype(np.uint16) << 8
            target.data.reshape(-1)[offsets[inside]] = values[inside]

        self.stores.append(leave)

    # products

    def do_wgmma(self, it: Instruction, mask: np.ndarray) -> None:
        if it.op.startswith("wgmma.mma_async"):
            self.multiply(it)
        elif it.op.startswith("wgmma.commit"):
            self.flights.append(self.products)
            self.products = []
        elif it.op.startswith("wgmma.wait"):
            while len(self.flights) > self.one(it.args[0]):
                for places, bytes_then in self.flights.pop(0):
                    assert np.array_equal(self.block.smem[places], bytes_then), (
                        "operands changed under a wgmma"
                    )

    def operand(self, descriptor: int, rows: np.ndarray) -> np.ndarray:
        """fp32 [rows, 16] of an operand by its descriptor: 128-byte rows, swizzled, in groups of eight."""
        assert descriptor >> 62 == 1
        start, group = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        at = start + (rows // 8 * group + rows % 8 * 128)[:, None] + np.arange(16)[None, :] * 2
        at = at ^ (at >> 3 & 0x70)
        smem = self.block.smem
        places = np.concatenate([at.ravel(), at.ravel() + 1])
        self.products.append((places, smem[places]))
        return fp32(smem[at].astype(np.uint16) | smem[at + 1].astype(np.uint16) << 8)

    def multiply(self, it: Instruction) -> None:
        found = re.search(r"m64n(\d+)k16\.f32\.bf16\.bf16", it.op)
        assert found, it.op
        n = int(found.group(1))
        names = split(it.args[0].strip("{}"))
        assert len(names) == n // 2
        a = self.operand(self.one(it.args[1]), self.number % 4 * 16 + np.arange(16))
        b = self.operand(self.one(it.args[2]), np.arange(n))
        product = a @ b.T
        # scale-d: whether the sums are added to, or overwritten
        adds = it.args[3] == "1" or bool(self.get(it.args[3], bool).all())
        for i, name in enumerate(names):
            row, column = LANES // 4 + 8 * (i // 2 % 2), i // 4 * 8 + LANES % 4 * 2 + i % 2
            sums = product[row, column]
            if adds:
                sums = sums + self.get(name).view(np.float32)
            self.registers[name] = sums.astype(np.float32).view(U32)

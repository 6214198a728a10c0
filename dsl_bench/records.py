"""What crosses a process boundary or the disk: one JSON object a line, tagged by ``kind``.

Imports nothing of ours. Times are nanoseconds in samples and seconds elsewhere, unless the name says
otherwise. Ratios are never stored. Unknown fields are ignored on reading; ``schema`` is raised when an
old line must be upgraded.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA = 1

STATUSES = (
    "ok",
    "compile_error",
    "compile_timeout",
    "launch_error",
    "illegal_access",
    "hang",
    "oom",
    "incorrect",
    "nonfinite",
    "unwritten",
    "mutated_input",
    "unstable",
    "implausible",
    "invalid_config",
    "unavailable",
    "baseline_missing",
)

Regime = Literal["cold", "sustained"]
REGIMES: tuple[Regime, ...] = ("cold", "sustained")

ConfigDict = dict[str, int | str | bool]


class CaseRef(msgspec.Struct, frozen=True):
    """A case as data: enough to rebuild it in a worker and to label a row."""

    workload: str
    name: str
    params: dict[str, int | str]
    dtype: str
    groups: tuple[str, ...] = ()


class Facts(msgspec.Struct, frozen=True):
    """Codegen facts read from a cubin. Bytes and counts; ``spill_*`` are -1 where unknown.

    ``sass`` counts instructions by opcode (HGMMA, UTMALDG, LDL, …) over the whole kernel;
    ``loop_local`` counts LDL and STL on a cycle of the control flow (a spill in a loop).
    """

    registers: int = -1
    stack: int = -1
    spill_stores: int = -1
    spill_loads: int = -1
    smem_static: int = -1
    smem_dynamic: int = -1
    threads: int = -1
    sass: dict[str, int] = msgspec.field(default_factory=dict)
    loop_local: int = -1
    assembler: str = ""
    cubin_bytes: int = 0


class RunHeader(msgspec.Struct, frozen=True, tag="run"):
    """The first line of every results file."""

    schema: int
    run_id: str
    started: str
    command: str
    environment: dict[str, Any]
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    revision: str = ""


class Compiled(msgspec.Struct, frozen=True, tag="compile"):
    """One specialisation: the artifact's key, what it cost to build and what is in it."""

    run_id: str
    key: str
    kernel: str
    kernel_hash: str
    arch: str
    static: dict[str, Any]
    status: str
    seconds: float
    facts: Facts | None = None
    toolchain: str = ""
    cached: bool = False
    reason: str = ""


class Accuracy(msgspec.Struct, frozen=True):
    """Error against the float64 reference, relative to its RMS; ``rounding`` is what rounding alone costs.

    ``rms`` and ``worst`` are absolute errors over the reference's RMS; ``data`` the kind of inputs."""

    data: str
    rms: float
    worst: float
    rounding_rms: float
    rounding_worst: float


class Trial(msgspec.Struct, frozen=True, tag="trial"):
    """One config of one kernel on one case: its verdict and median, no more."""

    run_id: str
    case: CaseRef
    kernel: str
    kernel_hash: str
    config: ConfigDict
    status: str
    key: str = ""
    median_ns: float = 0.0
    n: int = 0
    seconds: float = 0.0
    accuracy: list[Accuracy] = msgspec.field(default_factory=list)
    check: str = ""
    reason: str = ""
    #: -1: not recorded; else as in :class:`dsl_bench.jobs.Candidate`
    rank: int = -1
    estimate: float = 0.0
    #: the share of a trial's usual time that this one got: strategies may time shortly first
    effort: float = 1.0
    #: without pruning: why the config would not have been tried
    pruned: str = ""


class PrunedKernel(msgspec.Struct, frozen=True):
    """What one kernel refused on one case. ``codes`` packs a number for every point of ``space`` in order
    (:mod:`dsl_bench.pruning`): 0 not refused or not looked at, else one more than an index into ``reasons``.
    ``counts`` counts the reasons; defaults and seeds from outside the space are in them alone."""

    kernel: str
    kernel_hash: str
    space: dict[str, list[int | str | bool]]
    reasons: list[str]
    counts: list[int]
    codes: str = ""


class Pruned(msgspec.Struct, frozen=True, tag="pruned"):
    """Every config of one contender on one case that was not tried because ``valid()`` refused it."""

    run_id: str
    case: CaseRef
    contender: str
    kernels: list[PrunedKernel]


class Choice(msgspec.Struct, frozen=True):
    """A kernel with a config, as a candidate on some case. ``median_ns`` is what its trial showed."""

    kernel: str
    kernel_hash: str
    config: ConfigDict
    key: str = ""
    median_ns: float = 0.0


class Tuned(msgspec.Struct, frozen=True, tag="tuned"):
    """The outcome of one contender's search on one case.

    A contender is a language backend (its kernels compete for the place) or one vendor kernel. ``near``
    holds the choices within noise of the winner, best first, the winner at its head. ``bound`` says what
    ended the search: ``space``, ``trials``, ``seconds`` or ``strategy`` (it had nothing more to ask).
    ``regret`` is the best trial's median over the winner's, minus one, after the finalists raced each other:
    what it would have cost to stop at the trials. ``trials`` counts configs, ``retimed`` further timings.
    ``driver`` and ``toolchain`` are what the winner was found with. ``revisits``: the near-ties of an earlier
    record raced again; it says what differed."""

    run_id: str
    case: CaseRef
    contender: str
    strategy: str
    near: list[Choice]
    trials: int
    failed: int
    pruned: int
    compile_seconds: float
    gpu_seconds: float
    bound: str
    gpu: str = ""
    regret: float = 0.0
    driver: str = ""
    toolchain: str = ""
    retimed: int = 0
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    revisits: str = ""


class Participant(msgspec.Struct, frozen=True):
    """One runner of a race. ``role`` is ``language``, ``vendor`` or ``aa`` (a second copy of a baseline)."""

    kernel: str
    backend: str
    role: str
    config: ConfigDict
    kernel_hash: str = ""
    key: str = ""
    version: str = ""
    status: str = "ok"
    check: str = ""
    reason: str = ""
    allocates: bool = False
    host_us: float = 0.0
    accuracy: list[Accuracy] = msgspec.field(default_factory=list)


class Race(msgspec.Struct, frozen=True, tag="race"):
    """One case in one regime: every participant took a turn in every round.

    ``samples[i][r]`` is the time in ns of ``racers[i]`` (an index into ``participants``) in round ``r``;
    participants that failed their check are listed but have no samples. ``timer`` names the timer and
    ``calls`` how many calls one sample averages. ``clock_mhz`` and ``power_w`` are medians over the race,
    ``dropped`` the rounds dropped for thermal or hardware slow-down, ``gaps`` batches dropped because the
    device ran dry, ``retries`` cold launches taken again; ``proven``: captured graphs were shown to hold
    their kernel; ``chunk`` rounds were merged into each kept one; ``null_ns`` is an empty kernel timed the
    same way (0: not timed).
    """

    run_id: str
    case: CaseRef
    regime: Regime
    process: str
    started: str
    participants: list[Participant]
    racers: list[int]
    samples: list[list[int]]
    timer: str
    calls: int
    flops: float
    bytes: float
    data: str = "normal"
    clock_mhz: float = 0.0
    power_w: float = 0.0
    throttle: list[str] = msgspec.field(default_factory=list)
    dropped: int = 0
    foreign: list[str] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    gaps: int = 0
    retries: int = 0
    proven: bool = False
    chunk: int = 1
    null_ns: float = 0.0
    notes: list[str] = msgspec.field(default_factory=list)


class Skip(msgspec.Struct, frozen=True, tag="skip"):
    """Work that was not done, and why (a case a kernel refuses, a backend that is not there)."""

    run_id: str
    workload: str
    case: str
    backend: str
    kernel: str
    status: str
    reason: str
    hint: str = ""
    regime: str = ""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Work that was tried and failed. ``where`` is describe, plan, compile, check, trial or race."""

    run_id: str
    workload: str
    case: str
    backend: str
    kernel: str
    status: str
    where: str
    reason: str
    config: ConfigDict = msgspec.field(default_factory=dict)
    check: str = ""
    regime: str = ""


class Spent(msgspec.Struct, frozen=True):
    """What one backend's search cost. ``tried`` counts configs, ``pruned`` those that were refused before
    they were compiled, ``failures`` trials by status; compile and GPU seconds are those of its workers."""

    tried: int = 0
    pruned: int = 0
    compiled: int = 0
    compile_seconds: float = 0.0
    gpu_seconds: float = 0.0
    failures: dict[str, int] = msgspec.field(default_factory=dict)


class Ledger(msgspec.Struct, frozen=True, tag="ledger"):
    """Where a run's time went: seconds of the device worker by activity, and of the compile pool.

    ``misses`` artifacts were compiled, ``cached`` more were found on disk and ``hits`` times one served a
    further config or case. ``bounds`` counts searches by what ended them. ``device_started`` counts the
    programs that the device worker started, by name: an assembler or compiler among them would mean that what
    the pool had compiled was not used; ``loaded`` counts the artifacts that it loaded instead. ``timeline``
    holds the seconds since the start of the command at which it came to something first or last."""

    run_id: str
    device: dict[str, float]
    compile_seconds: dict[str, float] = msgspec.field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    wall: float = 0.0
    unfinished: list[str] = msgspec.field(default_factory=list)
    cached: int = 0
    loaded: int = 0
    bounds: dict[str, int] = msgspec.field(default_factory=dict)
    spent: dict[str, Spent] = msgspec.field(default_factory=dict)
    device_started: dict[str, int] = msgspec.field(default_factory=dict)
    timeline: dict[str, float] = msgspec.field(default_factory=dict)


class Interpreted(msgspec.Struct, frozen=True, tag="interpret"):
    """A kernel run by its language's CPU interpreter: a verdict, no speed."""

    run_id: str
    case: CaseRef
    kernel: str
    kernel_hash: str
    config: ConfigDict
    status: str
    seconds: float
    accuracy: list[Accuracy] = msgspec.field(default_factory=list)
    check: str = ""
    reason: str = ""


Record = RunHeader | Compiled | Trial | Tuned | Race | Skip | Failure | Interpreted | Ledger | Pruned

encoder = msgspec.json.Encoder()
decoder = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """One line, without its newline."""
    return encoder.encode(record)


def decode(line: bytes) -> Record:
    """The record on a line; raises ``msgspec.ValidationError`` or ``msgspec.DecodeError``."""
    return decoder.decode(line)

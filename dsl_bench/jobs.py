"""The messages between the parent and its workers: jobs in, progress and results out, one JSON a line.

Imports records only. A worker answers every job with any number of ``Progress`` and ``Partial`` lines and
exactly one ``Done`` or ``Refused``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dsl_bench.records import CaseRef, Choice, ConfigDict, Facts, Participant, Record, Regime


class Origin(msgspec.Struct, frozen=True):
    """Where a plugin comes from, so that a worker can load it: an entry point, or a file by path.

    ``kind`` is backend, workload, kernel or file; ``value`` is ``module:object`` or a path."""

    kind: str
    name: str
    value: str
    dist: str = ""


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Load one plugin and tell what is in it."""

    origin: Origin
    extra: tuple[Origin, ...] = ()


class KernelInfo(msgspec.Struct, frozen=True):
    """A kernel as the parent knows it. ``unmet`` names needs that this machine does not meet."""

    id: str
    workload: str
    hash: str
    space: dict[str, list[int | str | bool]]
    summary: str
    archs: tuple[str, ...]
    unmet: str
    lines: int
    origin: Origin
    #: the absolute paths of the kernel's file and of its helper files
    files: tuple[str, ...] = ()


class TargetInfo(msgspec.Struct, frozen=True):
    """An Availability, as data."""

    ready: bool
    reason: str = ""
    hint: str = ""


class BackendInfo(msgspec.Struct, frozen=True):
    """A backend as the parent knows it."""

    name: str
    role: str
    targets: dict[str, TargetInfo]
    versions: dict[str, str]
    toolchain: str
    kernels: list[KernelInfo]
    problems: list[str]
    #: whether its compile workers may be forked from one process that has its language imported
    ahead: bool = False


class WorkloadInfo(msgspec.Struct, frozen=True):
    """A workload as the parent knows it."""

    name: str
    baselines: tuple[str, ...]
    param_names: tuple[str, ...]
    metric: str
    cases: list[CaseRef]


class Described(msgspec.Struct, frozen=True):
    """What one plugin holds. ``state``: ready, failed, incompatible, or (by the parent) duplicate."""

    origin: Origin
    state: str
    reason: str = ""
    traceback: str = ""
    backend: BackendInfo | None = None
    workload: WorkloadInfo | None = None
    kernels: list[KernelInfo] = msgspec.field(default_factory=list)
    #: what a plugin that is ready nevertheless had to leave out, a line each
    problems: list[str] = msgspec.field(default_factory=list)


class ProbeJob(msgspec.Struct, frozen=True, tag="probe"):
    """Ask a backend for some of its targets only: what was not ready may be now."""

    origin: Origin
    targets: tuple[str, ...]


class ParseCases(msgspec.Struct, frozen=True, tag="parse_cases"):
    """Turn a user's own sizes into cases of a workload: those ``given`` by parameters (``where`` says where
    each was read), then those with the ``names`` that such cases are given."""

    workload: Origin
    given: list[dict[str, str]]
    where: list[str] = msgspec.field(default_factory=list)
    names: list[str] = msgspec.field(default_factory=list)


class ExamineWorkload(msgspec.Struct, frozen=True, tag="examine_workload"):
    """Look at what a workload promises; the value is (case, what is wrong or "", what was seen) a line."""

    workload: Origin


class Included(msgspec.Struct, frozen=True):
    """A config that must be among a case's candidates where it is valid: an earlier winner."""

    kernel: str
    case: str
    config: ConfigDict


class PlanJob(msgspec.Struct, frozen=True, tag="plan"):
    """Which configs can do which cases: the author's default and seeds, ``include``, and of the rest of the
    space all (``limit`` -1) or a random sample, by ``seed``, until a kernel has ``limit`` candidates."""

    backend: Origin
    extra: tuple[Origin, ...]
    kernels: tuple[str, ...]
    cases: list[CaseRef]
    arch: str
    limit: int = 0
    seed: int = 0
    include: list[Included] = msgspec.field(default_factory=list)
    #: the cases' workload, for the cost model; without it nothing is estimated
    workload: Origin | None = None
    #: False: what ``valid()`` refuses is a candidate too, of rank 3
    prune: bool = True


class Candidate(msgspec.Struct, frozen=True):
    """A config with what must be compiled for it: the artifact's key and the specialisation.

    ``rank`` 0 is the author's default, 1 a seed, 2 the rest of the space, 3 what the kernel refuses (with the
    reason in ``refused``). ``estimate`` is the cost model's time in µs, 0 where it knows nothing."""

    config: ConfigDict
    key: str
    static: dict[str, Any]
    rank: int = 2
    estimate: float = 0.0
    refused: str = ""


class Planned(msgspec.Struct, frozen=True):
    """One kernel on one case: its candidates, or the reason why there are none. ``pruned`` counts reasons,
    ``codes`` says which points of the space they hit (see :class:`dsl_bench.records.PrunedKernel`).

    ``fault``: the kernel's own code failed; it did not merely refuse the case."""

    kernel: str
    case: CaseRef
    candidates: list[Candidate]
    reason: str = ""
    pruned: dict[str, int] = msgspec.field(default_factory=dict)
    fault: bool = False
    codes: str = ""


class PreloadJob(msgspec.Struct, frozen=True, tag="preload"):
    """Import what later jobs will need, while there is nothing else to do. ``context`` False: the device
    worker does not touch the GPU yet, which may be another's."""

    backends: tuple[Origin, ...]
    extra: tuple[Origin, ...] = ()
    context: bool = True


class CompileJob(msgspec.Struct, frozen=True, tag="compile_job"):
    """Build one specialisation into ``folder`` (which appears only when complete)."""

    backend: Origin
    extra: tuple[Origin, ...]
    kernel: str
    key: str
    static: dict[str, Any]
    arch: str
    folder: str


class Built(msgspec.Struct, frozen=True):
    """What a compile job left behind."""

    key: str
    facts: Facts | None
    seconds: float
    toolchain: str
    cached: bool = False


class Racer(msgspec.Struct, frozen=True):
    """A candidate ready to run: where its code comes from and where its artifact lies."""

    backend: Origin
    extra: tuple[Origin, ...]
    role: str
    choice: Choice
    folder: str
    version: str = ""


class TrialsJob(msgspec.Struct, frozen=True, tag="trials"):
    """Check and time several candidates of one case; then race the finalists if ``finalists`` > 1."""

    run_id: str
    workload: Origin
    case: CaseRef
    racers: list[Racer]
    seconds: float = 0.02
    seed: int = 0


class FinalJob(msgspec.Struct, frozen=True, tag="final"):
    """Race near-ties of one contender against each other in both regimes, ``seconds`` each, to settle which
    one it sends."""

    run_id: str
    workload: Origin
    case: CaseRef
    racers: list[Racer]
    seconds: float = 0.3
    seed: int = 0


class RaceJob(msgspec.Struct, frozen=True, tag="race_job"):
    """Check every participant, race them in each regime, and check them again."""

    run_id: str
    workload: Origin
    case: CaseRef
    regimes: tuple[Regime, ...]
    racers: list[Racer]
    seconds: float
    data: str = "normal"
    seed: int = 0
    process: str = ""


class InterpretJob(msgspec.Struct, frozen=True, tag="interpret_job"):
    """Run one config in the language's CPU interpreter and check it."""

    run_id: str
    workload: Origin
    case: CaseRef
    racer: Racer
    static: dict[str, Any]
    seed: int = 0
    data: str = "normal"


class DoctorJob(msgspec.Struct, frozen=True, tag="doctor"):
    """Measure the machine itself: timer cross-check, floors, bandwidth, L2 knee."""

    quick: bool = True


class ProfileJob(msgspec.Struct, frozen=True, tag="profile"):
    """Bind and check one racer, then run it once between marks that a profiler looks for."""

    workload: Origin
    case: CaseRef
    racer: Racer
    seed: int = 0


Job = (
    Describe
    | ProbeJob
    | ParseCases
    | ExamineWorkload
    | PlanJob
    | PreloadJob
    | CompileJob
    | TrialsJob
    | FinalJob
    | RaceJob
    | InterpretJob
    | DoctorJob
    | ProfileJob
)


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The worker is alive and at ``stage``; ``index`` is the racer it is busy with (-1: none)."""

    stage: str
    index: int = -1


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """A record that is final already."""

    record: Record


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The job's result: plain data whose type the job implies. ``started`` counts the programs that the
    worker started during the job."""

    value: msgspec.Raw
    ledger: dict[str, float] = msgspec.field(default_factory=dict)
    started: dict[str, int] = msgspec.field(default_factory=dict)


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The job failed as a whole."""

    status: str
    reason: str
    check: str = ""
    traceback: str = ""
    #: the device can no longer be used by this process
    fatal: bool = False


Reply = Progress | Partial | Done | Refused

job_decoder = msgspec.json.Decoder(Job)
reply_decoder = msgspec.json.Decoder(Reply)
encoder = msgspec.json.Encoder()


def participant(racer: Racer, **changes: Any) -> Participant:
    """The participant that a racer becomes in a record."""
    choice = racer.choice
    base = Participant(
        kernel=choice.kernel,
        backend=choice.kernel.partition("/")[0],
        role=racer.role,
        config=choice.config,
        kernel_hash=choice.kernel_hash,
        key=choice.key,
        version=racer.version,
    )
    return msgspec.structs.replace(base, **changes)

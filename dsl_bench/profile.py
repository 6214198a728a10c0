"""``profile``: one kernel under ncu, clocks and caches left alone, and the dozen metrics that matter.

The device worker itself runs under ncu; only the launches of the kernel's own ``run()`` are looked at,
between two marks that the worker sets. Metrics: NVIDIA's Nsight Compute documentation.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsl_bench import api, environment, jobs, store
from dsl_bench import catalog as catalogs
from dsl_bench.contest import Memory
from dsl_bench.errors import UsageError
from dsl_bench.jobs import Included, ProfileJob, Refused
from dsl_bench.records import CaseRef, Choice, Record
from dsl_bench.session import Progressor, Session

Row = dict[str, Any]

#: our name → ncu's, with the factor that brings its base unit to ours
METRICS: Mapping[str, tuple[str, float]] = {
    "time_us": ("gpu__time_duration.sum", 1e-3),
    "clock_mhz": ("smsp__cycles_elapsed.avg.per_second", 1e-6),
    "sm_pct": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "tensor_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1.0),
    "dram_pct": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "dram_read_mb": ("dram__bytes_read.sum", 1e-6),
    "dram_write_mb": ("dram__bytes_write.sum", 1e-6),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct", 1.0),
    "warps_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    "issue_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu.sum", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
    "waves": ("launch__waves_per_multiprocessor", 1.0),
}
RANGE = "dsl_bench"
#: ncu replays a launch once a group of counters
PROFILE_SECONDS = 240.0
FIELDS = ("workload", "case", "kernel", "launch", "function", *METRICS)


def find_ncu() -> str:
    """The path of ncu, or a UsageError that says where it comes from."""
    found = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin:/opt/nvidia/nsight-compute")
    if found is None:
        raise UsageError("ncu is not on the PATH: it comes with the CUDA toolkit (Nsight Compute)")
    return found


def measure(ncu: str, job: ProfileJob, seconds: float) -> list[Row]:
    """One row a launch of the kernel's ``run()``, with the fields ``FIELDS``; a metric that this ncu does not
    know is None. Raises UsageError with ncu's own words where it cannot (counters that need rights, another
    profiler at work)."""
    names = [name for name, _ in METRICS.values()]
    text, replies, errors = _attempt(ncu, names, job, seconds)
    unknown = _unknown(f"{text}\n{errors.decode(errors='replace')}")
    if unknown:
        text, replies, errors = _attempt(ncu, [n for n in names if n not in unknown], job, seconds)
    said = _refusal(replies)
    if said:
        raise UsageError(f"{job.racer.choice.kernel} under ncu: {said}")
    rows = parse(text)
    if not rows:
        raise UsageError(f"ncu gave no metrics: {_why(text, errors)}")
    head = {"workload": job.case.workload, "case": job.case.name, "kernel": job.racer.choice.kernel}
    return [{**head, **row} for row in rows]


def _attempt(ncu: str, names: Sequence[str], job: ProfileJob, seconds: float) -> tuple[str, bytes, bytes]:
    """ncu's log, the worker's replies, and what went to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, *_options(log, names), sys.executable, "-P", "-m", "dsl_bench.worker", "device"]
        env = {k: v for k, v in os.environ.items() if k != "DSL_BENCH_PARENT"}
        replies, errors = _run(command, jobs.encoder.encode(job) + b"\n", seconds, env)
        return log.read_text(errors="replace") if log.exists() else "", replies, errors


def _unknown(text: str) -> set[str]:
    """Metrics of ours that ncu says it does not know (those of another chip or release)."""
    complaints = "\n".join(line for line in text.splitlines() if "Failed to find metric" in line)
    return {name for name, _ in METRICS.values() if name in complaints}


def _run(command: list[str], text: bytes, seconds: float, env: Mapping[str, str]) -> tuple[bytes, bytes]:
    """What ``command`` wrote to its two streams, given ``text``; it and all that it started end here."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
    ) as process:
        try:
            return process.communicate(text, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise UsageError(f"ncu did not end within {seconds:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _options(log: Path, names: Sequence[str]) -> list[str]:
    return [
        "--target-processes", "all", "--cache-control", "none", "--clock-control", "none",
        "--nvtx", "--nvtx-include", f"{RANGE}/", "--metrics", ",".join(names),
        "--csv", "--print-units", "base", "--log-file", str(log),
    ]  # fmt: skip


def _refusal(replies: bytes) -> str:
    """Why the worker refused the job, from its replies; empty where it did not."""
    for line in replies.splitlines():
        try:
            reply = jobs.reply_decoder.decode(line)
        except ValueError:
            continue
        if isinstance(reply, jobs.Refused):
            return f"{reply.status}: {reply.reason}"
    return ""


def _why(text: str, stderr: bytes) -> str:
    lines = [line for line in text.splitlines() if line.startswith("==")]
    errors = [line for line in lines if "==ERROR==" in line] or lines or stderr.decode().splitlines()[-1:]
    hint = " (the driver lets only administrators read counters)" if "ERR_NVGPUCTRPERM" in text else ""
    return (" ".join(errors[-1].split()) if errors else "no message") + hint


def parse(text: str) -> list[Row]:
    """Launches in order from ncu's CSV, long form: a line a launch and metric. Unknown metrics are left out;
    a metric that the chip does not have is None."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    ours = {name: (short, factor) for short, (name, factor) in METRICS.items()}
    launches: dict[str, Row] = {}
    for entry in csv.DictReader(lines):
        row = launches.setdefault(entry["ID"], _blank(entry, len(launches)))
        if entry["Metric Name"] in ours:
            short, factor = ours[entry["Metric Name"]]
            row[short] = _number(entry["Metric Value"], factor)
    return list(launches.values())


def _blank(entry: Mapping[str, str], number: int) -> Row:
    return {"launch": number, "function": entry["Kernel Name"].partition("(")[0], **dict.fromkeys(METRICS)}


def _number(text: str, factor: float) -> float | None:
    try:
        return float(text.replace(",", "")) * factor
    except ValueError:
        return None


def rows(request: api.Request, show: Progressor) -> list[Row]:
    """Every language's recorded winner on each case (its author's first choice where none is recorded) under
    ncu, one row a launch. Raises UsageError where there is no ncu, no GPU, or a kernel does not hold."""
    ncu = find_ncu()
    catalog = catalogs.load(request.plugins, show.say)
    work = api.work_of(catalog, request)
    catalogs.require_cache()
    names = list(request.backends) or [n for n, (_, b) in catalog.backends().items() if b.role == "language"]
    ready = [n for n in names if catalog.backend(n)[1].targets["device"].ready]
    if not ready:
        reasons = "; ".join(f"{n}: {catalog.backend(n)[1].targets['device'].reason}" for n in names)
        raise UsageError(f"nothing to profile on this machine ({reasons})")
    records = store.read(request.winners)[0] if request.winners else []
    memory = Memory.of(records, catalog, str(environment.collect().get("gpu", "")))
    found: list[Row] = []
    for workload, cases in work.items():
        with Session(catalog, _Nowhere(), "profile", request.settings, show) as session:
            for case in cases:
                for name in ready:
                    found += _profile(session, ncu, workload, case, name, request.kernels, memory)
    return found


class _Nowhere:
    def write(self, record: Record) -> None:
        """A profile is looked at, not kept."""


def _profile(
    session: Session,
    ncu: str,
    workload: str,
    case: CaseRef,
    backend: str,
    kernels: Sequence[str],
    memory: Memory,
) -> list[Row]:
    hashes = session.catalog.hashes()
    slot = (case.name, backend)
    tuned = memory.tuned.get(slot) or memory.stale.get(slot, (None, ""))[0]
    won = [
        c
        for c in (tuned.near[:1] if tuned else [])
        if hashes.get(c.kernel) == c.kernel_hash and (not kernels or c.kernel in kernels)
    ]
    wanted = [Included(c.kernel, case.name, c.config) for c in won]
    planned = [p for p in session.plan(backend, [case], 0, kernels, wanted) if p.candidates]
    if wanted:
        planned = [p for p in planned if p.kernel == wanted[0].kernel]
    if not planned:
        return []
    chosen = planned[0]
    config = wanted[0].config if wanted else chosen.candidates[0].config
    candidate = next(c for c in chosen.candidates if c.config == config)
    session.compile(chosen.kernel, candidate, 0)
    while session.built(candidate.key) is None:
        session.wait_built(lambda: session.built(candidate.key) is not None)
    built = session.built(candidate.key)
    if isinstance(built, Refused):
        raise UsageError(f"{chosen.kernel} on {case.name}: {built.status}: {built.reason}")
    choice = Choice(chosen.kernel, hashes[chosen.kernel], candidate.config, candidate.key)
    session.show.say(f"{chosen.kernel} on {case.name} under ncu")
    job = ProfileJob(session.workload_origin(workload), case, session.racer(choice))
    return [{**row, "config": dict(candidate.config)} for row in measure(ncu, job, PROFILE_SECONDS)]

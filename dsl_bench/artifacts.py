"""Artifacts on disk, and the small translations between live objects and data that every worker needs."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from dsl_bench import codegen, jobs, registry
from dsl_bench.backend import Artifact
from dsl_bench.errors import DslBenchError
from dsl_bench.records import CaseRef, Facts
from dsl_bench.workload import Case

MANIFEST = "artifact.json"


def to_ref(case: Case) -> CaseRef:
    """A case as data."""
    return CaseRef(case.workload, case.name, dict(case.params), case.dtype, case.groups)


def from_ref(ref: CaseRef) -> Case:
    """A case from data."""
    return Case(ref.workload, ref.name, ref.params, ref.dtype, ref.groups)


def one_line(fault: BaseException) -> str:
    """An exception as one line: its type and the first line of its text."""
    lines = str(fault).strip().splitlines()
    text = lines[0] if lines else ""
    if isinstance(fault, DslBenchError):
        return text
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def compile_artifact(shelf: registry.Shelf, job: jobs.CompileJob) -> jobs.Built:
    """Build into a folder beside the target, then rename: a folder that exists is complete."""
    final = Path(job.folder)
    if (final / MANIFEST).is_file():
        return msgspec.structs.replace(read_manifest(final)[1], cached=True)
    backend = shelf.backend(job.backend)
    kernel = shelf.kernels(job.backend, job.extra)[job.kernel]
    final.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f".{job.key}-", dir=final.parent))
    try:
        artifact = backend.compile(kernel.source(job.static, job.arch), job.arch, folder)
        seconds = time.monotonic() - start
        built = jobs.Built(job.key, _facts(artifact), seconds, backend.toolchain())
        _write_manifest(folder, artifact, built)
        with contextlib.suppress(OSError):  # another worker may have been first with the same bytes
            folder.rename(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return built


def _facts(artifact: Artifact) -> Facts | None:
    if not artifact.cubin:
        return None
    meta = artifact.meta
    facts = codegen.cubin_facts(
        artifact.folder / artifact.cubin,
        artifact.entry,
        threads=int(meta.get("threads", -1)),
        smem_dynamic=int(meta.get("smem", -1)),
        assembler=artifact.assembler,
    )
    known = {k: int(meta[k]) for k in ("spill_stores", "spill_loads") if k in meta}
    return msgspec.structs.replace(facts, **known)


def _write_manifest(folder: Path, artifact: Artifact, built: jobs.Built) -> None:
    data = {
        "cubin": artifact.cubin,
        "entry": artifact.entry,
        "assembler": artifact.assembler,
        "meta": dict(artifact.meta),
        "built": msgspec.to_builtins(built),
    }
    (folder / MANIFEST).write_text(json.dumps(data))


def read_manifest(folder: Path) -> tuple[Artifact, jobs.Built]:
    """The artifact in ``folder`` and what its build reported."""
    data = json.loads((folder / MANIFEST).read_text())
    built = msgspec.convert(data["built"], jobs.Built)
    return Artifact(folder, data["cubin"], data["entry"], data["assembler"], data["meta"]), built

"""Every kind of wrong kernel that must be caught: what it does, what catches it, what the record says.

The tests compare what happens with this list; the table in docs/measuring.md is made of it:
``python tests/wrong_kernels/kinds.py docs/measuring.md``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- wrong kernels: begin -->", "<!-- wrong kernels: end -->"
HOW = "made by `make docs` from tests/wrong_kernels/kinds.py"


@dataclass(frozen=True)
class Verdict:
    """A status, and the check that a record names."""

    status: str
    check: str

    def __str__(self) -> str:
        return f"`{self.status}`, `{self.check}`"


@dataclass(frozen=True)
class Kind:
    """``names`` are kernels in on_cpu.py, on_gpu.py or in_triton.py; ``cpu`` and ``gpu`` what they get there.

    Several verdicts: which of them comes first depends on the machine. None: there is no such form."""

    what: str
    by: str
    cpu: dict[str, tuple[Verdict, ...]]
    gpu: dict[str, tuple[Verdict, ...]]


def _v(text: str) -> tuple[Verdict, ...]:
    """``status/check or status/check``."""
    pairs = (part.strip().split("/") for part in text.split(" or "))
    return tuple(Verdict(status, check) for status, check in pairs)


def _kind(what: str, by: str, cpu: dict[str, str] | None = None, gpu: dict[str, str] | None = None) -> Kind:
    return Kind(
        what,
        by,
        {name: _v(text) for name, text in (cpu or {}).items()},
        {name: _v(text) for name, text in (gpu or {}).items()},
    )


def _same(name: str, verdict: str) -> tuple[dict[str, str], dict[str, str]]:
    return {name: verdict}, {name: verdict}


KINDS: tuple[Kind, ...] = (
    _kind(
        "writes nothing",
        "outputs are filled with a NaN of our own first",
        *_same("writes_nothing", "unwritten/poison"),
    ),
    _kind("writes zeros", "error against float64", *_same("writes_zeros", "incorrect/rms")),
    _kind(
        "gives the last call's output",
        "values drawn anew between two checked calls",
        {"gives_the_last_calls_output": "incorrect/rms"},
        {"gives_the_last_calls_output": "unstable/after"},
    ),
    _kind(
        "caches by the identity of its tensors, or by torch's count of their changes",
        "values drawn anew in place, unseen by that count",
        {"caches_by_identity": "incorrect/rms", "caches_by_version": "incorrect/rms"},
        {"caches_by_identity": "unstable/after", "caches_by_version": "unstable/after"},
    ),
    _kind(
        "computes, or prepares an operand, in `bind`",
        "values drawn anew after `bind`",
        {"computes_in_bind": "incorrect/rms", "transposes_in_bind": "incorrect/rms"},
        {"computes_in_bind": "incorrect/rms", "transposes_in_bind": "incorrect/rms"},
    ),
    _kind(
        "computes on another stream without waiting",
        "poison behind a delay on the current stream; outputs counted on it before any wait",
        gpu={"ignores_the_stream": "unwritten/stream", "is_not_waited_for": "unwritten/stream"},
    ),
    _kind(
        "writes part of the output",
        "poison that is left",
        *_same("writes_a_part", "unwritten/poison"),
    ),
    _kind(
        "writes out of bounds",
        "a canary before and after every tensor",
        {
            "writes_out_of_bounds": "illegal_access/canary",
            "writes_before_its_output": "illegal_access/canary",
            "triton/writes_beyond": "illegal_access/canary",
        },
        {"writes_out_of_bounds": "illegal_access/canary"},
    ),
    _kind(
        "mutates an input",
        "checksum of the inputs before and after",
        {"mutates_an_input": "mutated_input/fingerprint"},
        {
            "mutates_an_input": "mutated_input/fingerprint",
            "mutates_an_input_later": "mutated_input/fingerprint or incorrect/capture",
        },
    ),
    _kind(
        "makes NaN or Inf where the reference has none",
        "both are told from the poison",
        {"makes_nan": "nonfinite/finite", "makes_inf": "nonfinite/finite"},
        {"makes_nan": "nonfinite/finite", "makes_inf": "nonfinite/finite"},
    ),
    _kind(
        "right on round shapes only",
        "ragged cases in every workload",
        {"right_on_round_shapes_only": "unwritten/poison"},
        {"right_on_round_shapes_only": "unwritten/poison"},
    ),
    _kind(
        "right on the first call only",
        "a second check; on a device, after the timing",
        {"right_on_the_first_call_only": "incorrect/rms"},
        {"right_on_the_first_call_only": "incorrect/capture"},
    ),
    _kind(
        "right only if the output was zero",
        "poison, which no sum gets rid of",
        {"needs_zeroed_outputs": "unwritten/poison or nonfinite/finite"},
        {"needs_zeroed_outputs": "nonfinite/finite or unwritten/poison"},
    ),
    _kind(
        "right on uniform data only",
        "normal data, and outliers",
        *_same("right_on_uniform_data_only", "incorrect/rms"),
    ),
    _kind(
        "accumulates in bf16 or fp16",
        "RMS error over 1.1 times that of rounding",
        {"accumulates_in_low_precision": "incorrect/rms", "triton/accumulates_low": "incorrect/rms"},
        {"accumulates_in_low_precision": "incorrect/rms"},
    ),
    _kind(
        "sums split-K partials in bf16 or fp16, or truncates",
        "the same",
        {"splits_k_in_low_precision": "incorrect/rms", "truncates": "incorrect/rms"},
        {"splits_k_in_low_precision": "incorrect/rms"},
    ),
    _kind(
        "reads uninitialised memory, or beyond an input",
        "fresh memory and canaries hold NaN or huge numbers, not zeros",
        {
            "reads_uninitialised_memory": "nonfinite/finite or incorrect/rms",
            "triton/reads_beyond": "nonfinite/finite or incorrect/rms",
        },
        {"reads_uninitialised_memory": "nonfinite/finite or incorrect/rms"},
    ),
    _kind(
        "works in another thread",
        "threads that `bind` or a call left running",
        {
            "works_in_another_thread": "launch_error/threads",
            "works_in_a_thread_of_bind": "launch_error/threads",
        },
        # on a device the thread's own start-up may come after the outputs were looked at
        {"works_in_another_thread": "launch_error/threads or unwritten/stream or unwritten/poison"},
    ),
    _kind(
        "replaces the timer, `torch.cuda.synchronize` or a check",
        "these names, compared with what they held before any plugin was loaded",
        {
            "replaces_the_clock": "launch_error/tamper",
            "replaces_synchronize": "launch_error/tamper",
            "replaces_a_check": "launch_error/tamper",
            "rewrites_a_check": "launch_error/tamper",
        },
        {"replaces_synchronize": "launch_error/tamper", "replaces_the_events": "launch_error/tamper"},
    ),
    _kind(
        "changes torch's global flags",
        "the flags, compared with what they were; put back",
        {"changes_a_flag": "launch_error/flags", "changes_the_default_type": "launch_error/flags"},
        {"changes_a_flag": "launch_error/flags"},
    ),
    _kind(
        "gives tensors of its own (no proof reaches them)",
        "only vendor libraries may",
        *_same("gives_its_own_tensors", "launch_error/allocates"),
    ),
    _kind(
        "hangs in Python",
        "the deadline of a step; the process group is killed",
        *_same("hangs_in_python", "hang/deadline"),
    ),
    _kind("hangs on the device", "the same", gpu={"hangs_on_the_device": "hang/deadline"}),
    _kind(
        "raises",
        "the exception",
        {"raises": "launch_error/exception", "raises_in_bind": "launch_error/exception"},
        {"raises": "launch_error/exception"},
    ),
    _kind(
        "exits",
        "the exception, or the end of its process",
        {"exits": "launch_error/exception", "exits_at_once": "launch_error/process"},
        {"exits": "launch_error/exception", "exits_at_once": "launch_error/process"},
    ),
    _kind(
        "aborts the process",
        "the end of its process, with the signal's name",
        {"aborts": "launch_error/process", "segfaults": "launch_error/process"},
        {"aborts": "launch_error/process"},
    ),
    _kind(
        "takes all the memory",
        "the allocator's refusal, or what is left after `bind`",
        {"takes_all_the_memory": "oom/allocator", "asks_for_too_much": "oom/allocator"},
        {"takes_all_the_memory": "oom/memory", "asks_for_too_much": "oom/allocator"},
    ),
    _kind(
        "leaves a sticky CUDA error",
        "the next synchronisation; a fresh process goes on",
        gpu={
            "leaves_a_sticky_error": "launch_error/exception",
            "accesses_illegally": "illegal_access/exception",
        },
    ),
    _kind(
        "is captured into no graph",
        "a replay takes too short a time, or leaves the poison",
        gpu={
            "leaves_no_graph": "implausible/capture or unwritten/capture",
            "waits_for_the_device": "launch_error/exception",
        },
    ),
    _kind(
        "faster than physics",
        "FLOPs and bytes over fixed rates; a replayed graph's outputs",
        gpu={
            "is_fast_in_bursts": "implausible/physics or incorrect/capture",
            "is_a_library_fast_in_bursts": "implausible/physics",
        },
    ),
)


def table() -> str:
    """The kinds as a table of Markdown."""
    rows = ["| a kernel that | is caught by | status, check | forms |", "|---|---|---|---|"]
    for kind in KINDS:
        verdicts = dict.fromkeys(v for form in (kind.cpu, kind.gpu) for some in form.values() for v in some)
        forms = [f"{len(form)} {name}" for name, form in (("CPU", kind.cpu), ("GPU", kind.gpu)) if form]
        rows.append(f"| {kind.what} | {kind.by} | {'; '.join(map(str, verdicts))} | {', '.join(forms)} |")
    return "\n".join(rows)


def rendered(page: str) -> str:
    """``page`` with the table between its markers."""
    before, rest = page.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(rendered(file.read_text()))

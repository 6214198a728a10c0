"""A sweep's accidents, one a config, in all three languages: ``--plugin tests/wrong_kernels/hazards.py``.

Beside each language's plain GEMM stands ``<language>/hazards``, the same kernel with an axis ``hazard``: in
the compiler (it raises, aborts, dies of a bad address, never ends), in the binary (more shared memory than an
SM has), in the host code (raises, ends the process, takes all the memory) and on the device (never ends,
writes out of bounds, leaves NaN). ``none`` is the one that nothing is wrong with. HAZARDS says what each
becomes.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dsl_bench.plugin import Call, Case, Config, Kernel, Static

#: the statuses that a hazard may end in
HAZARDS: dict[str, tuple[str, ...]] = {
    "none": ("ok",),
    "compiler raises": ("compile_error",),
    "compiler aborts": ("compile_error",),
    "compiler dies": ("compile_error",),
    "compiler hangs": ("compile_timeout",),
    "overflows": ("invalid_config", "compile_error", "launch_error", "oom"),
    "host raises": ("launch_error",),
    "host exits": ("launch_error",),
    "takes all memory": ("oom",),
    "device hangs": ("hang",),
    "illegal access": ("illegal_access", "launch_error"),
    "leaves NaN": ("nonfinite",),
}
#: more than the 227 KiB of shared memory that a block of sm_90 can have
TOO_MUCH = 256 << 10
STAGES = 14


def compiles(hazard: str) -> None:
    """What happens instead of a compilation."""
    if hazard == "compiler raises":
        raise ValueError("no such instruction (on purpose)")
    if hazard == "compiler aborts":
        os.abort()
    if hazard == "compiler dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if hazard == "compiler hangs":
        time.sleep(3600)


def runs(hazard: str, call: Call, output: Any) -> Call:
    """The kernel's call, and what happens after it."""
    import torch

    if hazard == "host exits":
        os._exit(7)
    beyond = torch.full((4,), 1 << 40, device=output.device)

    def run() -> None:
        call.run()
        if hazard == "host raises":
            raise RuntimeError("no such stream (on purpose)")
        if hazard == "takes all memory":
            torch.empty(1 << 40, dtype=torch.uint8, device=output.device)
        if hazard == "device hangs":
            torch.cuda._sleep(1 << 62)
        if hazard == "illegal access":
            output.view(-1)[beyond] = 0.0
        if hazard == "leaves NaN":
            output[-1].fill_(float("nan"))

    return Call(run, keep=(call, beyond))


def static(base: Kernel, case: Case, config: Config) -> Static:
    """The base's, for its own first choice, and the hazard where the compiler is to meet it."""
    baked = dict(base.static(case, chosen(base, case, config)))
    hazard = str(config["hazard"])
    return {**baked, "hazard": hazard} if hazard.startswith(("compiler", "overflows")) else baked


def chosen(base: Kernel, case: Case, config: Config) -> dict[str, Any]:
    """The base's first choice; to overflow, with a ring that no SM can hold."""
    first = dict(base.default(case))
    return {**first, "stages": STAGES} if config["hazard"] == "overflows" else first


def source(base: Kernel, baked: Mapping[str, Any], arch: str) -> Any:
    """What the base compiles, or the accident."""
    hazard = str(baked.get("hazard", "none"))
    compiles(hazard)
    made = base.source({k: v for k, v in baked.items() if k != "hazard"}, arch)
    if hazard == "overflows" and hasattr(made, "smem"):
        return dataclasses.replace(made, smem=TOO_MUCH)
    return made


def bind(base: Kernel, module: Any, case: Case, config: Config, inputs: Any, outputs: Any) -> Call:
    """The base's call with the hazard behind it."""
    call = base.bind(module, case, chosen(base, case, config), inputs, outputs)
    hazard = str(config["hazard"])
    return call if hazard == "none" else runs(hazard, call, outputs["c"])


def seeds(case: Case) -> Sequence[Config]:
    """Every hazard, so that the smallest budget meets all."""
    return [{"hazard": name} for name in HAZARDS if name != "none"]


def hazardous(language: str) -> Kernel:
    """The language's plain GEMM with the axis of hazards."""
    base: Kernel = importlib.import_module(f"dsl_bench.kernels.{language}.gemm").KERNELS[0]
    return dataclasses.replace(
        base,
        id=f"{language}/hazards",
        space={"hazard": tuple(HAZARDS)},
        default=lambda case: {"hazard": "none"},
        seeds=seeds,
        valid=lambda case, config: None,
        static=lambda case, config: static(base, case, config),
        source=lambda baked, arch: source(base, baked, arch),
        bind=lambda module, case, config, i, o: bind(base, module, case, config, i, o),
        files=(),
        cost=None,
        summary="a plain GEMM with accidents",
    )


def offered() -> list[Kernel]:
    """One a language that can be imported here."""
    found = []
    for language in ("triton", "tilelang", "cuda"):
        try:
            found.append(hazardous(language))
        except ImportError:
            continue
    return found


KERNELS = tuple(offered())

"""How long a search takes, ours against the languages' own: `make bench-tuners`, on a machine with a GPU.

For Triton and for TileLang, one list of configs of one kernel at 4096³, three ways to choose from it, each in
a fresh process with empty caches, everything counted from the start of the process:

- ours: `dsl-bench tune` over the list, with fewer trials than it has configs (starting the pool, describing
  and planning included);
- theirs: `triton.autotune` or `tilelang.autotune` over the list, with their own defaults;
- exhaustive: ours with a trial of every config, for the proof alone (its time does not count).

Then the three answers race each other. Ours counts where it is at most 2 % slower than the best of them.
Packages are imported once before anything is timed, so that no arm pays for a cold disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CASE = "4096x4096x4096-bf16"
SIZE = 4096
#: at most this part of the language's own time
FLOORS = {"triton": 1 / 2, "tilelang": 1 / 4}
#: configs in the list, and trials that our search may make
LENGTHS = {"triton": 88, "tilelang": 48}
TRIALS = {"triton": 20, "tilelang": 12}
#: how much slower than the best answer ours may be
LEEWAY = 0.02

Config = dict[str, Any]

#: a kernel that offers the list alone, as a plugin: the same source, the author's order of what to try first
PLUGIN = """
import dataclasses
import json

from dsl_bench.kernels.{language} import gemm

BASE = gemm.KERNELS[0]
LIST = json.loads({configs!r})


def valid(case, config):
    return None if config in LIST else "not in the list"


def known(case):
    wanted = [BASE.default(case), *BASE.seeds(case)]
    return [dict(c) for c in wanted if dict(c) in LIST] or LIST[:1]


KERNELS = (
    dataclasses.replace(
        BASE,
        id="{language}/listed",
        valid=valid,
        default=lambda case: known(case)[0],
        seeds=lambda case: known(case)[1:],
    ),
)
"""


def listed(language: str, count: int, seed: int = 0) -> list[Config]:
    """``count`` configs of the language's plain GEMM that are valid at 4096³: its author's first choices, the
    rest drawn at random. For Triton those of one function, from which ``triton.autotune`` can choose."""
    from importlib import import_module

    from dsl_bench.plugin import Case

    kernel = import_module(f"dsl_bench.kernels.{language}.gemm").KERNELS[0]
    case = Case("gemm", CASE, {"m": SIZE, "n": SIZE, "k": SIZE}, "bf16")
    usable = [c for c in kernel.configs() if kernel.valid(case, c) is None and one_function(language, c)]
    first: list[Config] = []
    for config in map(dict, (kernel.default(case), *kernel.seeds(case))):
        if config in usable and config not in first:
            first.append(config)
    rest = [c for c in usable if c not in first]
    random.Random(seed).shuffle(rest)
    return [*first, *rest][:count]


def one_function(language: str, config: Config) -> bool:
    """Whether a config is a form of Triton's ``gemm_persistent``; any, for TileLang."""
    return language != "triton" or (config["form"] in ("flat", "persistent") and config["bn"] != 192)


# -- the languages' own tuners, each in a process of its own ----------------------------------------------


def tensors() -> tuple[Any, Any, Any]:
    """a [m, k], b [n, k] random and c [m, n], bf16 on the device."""
    import torch

    a, b = (torch.randn(SIZE, SIZE, device="cuda").to(torch.bfloat16) for _ in range(2))
    return a, b, torch.empty_like(a)


def triton_autotune(configs: Sequence[Config]) -> dict[str, Any]:
    """``triton.autotune`` over the list, as its tutorial on host descriptors uses it."""
    import torch
    import triton
    from dsl_bench.kernels.triton.gemm import gemm_persistent
    from triton import knobs
    from triton.tools.tensor_descriptor import TensorDescriptor

    compile_s = 0.0

    def heard(times: Any = None, **more: Any) -> None:
        nonlocal compile_s
        compile_s += float(getattr(times, "total", 0)) / 1e6

    knobs.compilation.listener = heard
    offered = [triton_config(c) for c in configs]
    tuned = triton.autotune(offered, key=["m", "n", "k"])(gemm_persistent)
    a, b, c = tensors()
    maps = [TensorDescriptor(t, list(t.shape), list(t.stride()), [64, 64]) for t in (a, b, c)]
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def grid(meta: Mapping[str, Any]) -> tuple[int]:
        return (min(sms, triton.cdiv(SIZE, meta["BM"]) * triton.cdiv(SIZE, meta["BN"])),)

    tuned[grid](*maps, SIZE, SIZE, SIZE, POINTER=False)
    torch.cuda.synchronize()
    best = offered.index(tuned.best_config)
    failed = sum(not t or min(t) == float("inf") for t in map(as_list, tuned.configs_timings.values()))
    gpu = max(0.0, tuned.bench_time - compile_s)
    return {"config": configs[best], "compile_s": compile_s, "gpu_s": gpu, "failed": failed}


def as_list(times: Any) -> list[float]:
    """Triton keeps a list of quantiles for a config, or one number."""
    return list(times) if isinstance(times, list | tuple) else [float(times)]


def triton_config(config: Config) -> Any:
    """A config of the list as Triton writes it: the descriptors' boxes are set before each is tried."""
    import triton

    def boxes(args: Config) -> None:
        args["a"].block_shape = [args["BM"], args["BK"]]
        args["b"].block_shape = [args["BN"], args["BK"]]
        args["c"].block_shape = [args["BM"], args["BN"] // args["SUB"]]

    values = {name.upper(): config[name] for name in ("bm", "bn", "bk", "group", "sub")}
    values["FLAT"] = config["form"] == "flat"
    return triton.Config(values, num_warps=config["warps"], num_stages=config["stages"], pre_hook=boxes)


def tilelang_autotune(configs: Sequence[Config]) -> dict[str, Any]:
    """``tilelang.autotune`` over the list."""
    import tilelang
    from tilelang.autotuner.tuner import AutoTuner

    gpu_s = 0.0
    measure = AutoTuner._benchmark_target

    def booked(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal gpu_s
        start = time.monotonic()
        try:
            return measure(self, *args, **options)
        finally:
            gpu_s += time.monotonic() - start

    AutoTuner._benchmark_target = booked
    given = tensors()
    tuned = tilelang.autotune(configs=list(configs), supply_prog=lambda params: list(given))(
        tilelang_kernel()
    )
    start = time.monotonic()
    tuned()
    ((_, config),) = tuned._tuner_cache.values()
    compile_s = time.monotonic() - start - gpu_s
    return {"config": dict(config), "compile_s": compile_s, "gpu_s": gpu_s, "failed": None}


def tilelang_kernel() -> Any:
    """Our prim_func as a jitted function of its config."""
    import tilelang

    @tilelang.jit(target={"kind": "cuda", "arch": "sm_90a"})
    def listed_gemm(bm: int = 128, bn: int = 128, stages: int = 3, panel: int = 10) -> Any:
        # imported here: the autotuner's key takes in what a function closes over, which no module can be
        from dsl_bench.kernels.tilelang import gemm

        return gemm.build(bm, bn, stages, panel, "bfloat16")

    return listed_gemm


THEIRS = {"triton": triton_autotune, "tilelang": tilelang_autotune}


# -- ours -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to choose: seconds of wall time from the start of its process, and what it chose. ``over``:
    it was stopped at its limit, so the seconds are a lower bound."""

    name: str
    wall_s: float
    compile_s: float = 0.0
    gpu_s: float = 0.0
    trials: int = 0
    failed: int | None = None
    config: Config | None = None
    over: bool = False
    error: str = ""
    #: seconds after the start at which a search of ours came to what (its ledger's ``timeline``)
    timeline: dict[str, float] = field(default_factory=dict)


def run_process(command: Sequence[str], env: Mapping[str, str], limit: float) -> tuple[float, int, str, str]:
    """Wall seconds, exit code (-1: stopped at the limit), stdout and stderr of a process in a group of its
    own, which may leave logs in the folder for temporary files."""
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=tempfile.gettempdir(),
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
        return time.monotonic() - start, process.returncode, out, err
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return time.monotonic() - start, -1, out, err


def cold(language: str, folder: Path) -> dict[str, str]:
    """An environment with empty caches in ``folder``, and no other language for ours to look at."""
    names = ("DSL_BENCH_CACHE_DIR", "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TILELANG_TMP_DIR")
    folders = {name: str(folder / name.lower()) for name in names}
    for path in folders.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    return {**os.environ, **folders, "DSL_BENCH_BACKENDS": language}


def plugin_file(language: str, configs: Sequence[Config], folder: Path) -> Path:
    """The list as a plugin."""
    path = folder / f"listed_{language}.py"
    path.write_text(PLUGIN.format(language=language, configs=json.dumps(list(configs))))
    return path


def command_of(plugin: Path, language: str, strategy: str, trials: int, out: Path) -> list[str]:
    """Our search as a user starts it."""
    chosen = ["--plugin", str(plugin), "-b", language, "-k", f"{language}/listed", "-c", CASE]
    budget = ["--strategy", strategy, "--trials", str(trials)]
    return [sys.executable, "-P", "-m", "dsl_bench", "tune", "gemm", *chosen, *budget, "--out", str(out)]


def ours(name: str, command: list[str], env: Mapping[str, str], limit: float, language: str) -> Arm:
    """Run a search of ours and read what it recorded."""
    from dsl_bench import store
    from dsl_bench.records import Ledger, Tuned

    wall, code, _, err = run_process(command, env, limit)
    out = Path(command[-1])
    found = store.read([out])[0] if out.exists() else []
    tuned = next((r for r in found if isinstance(r, Tuned) and r.contender == language), None)
    ledger = next((r for r in reversed(found) if isinstance(r, Ledger)), None)
    if tuned is None or ledger is None:
        return Arm(name, wall, over=code == -1, error=err.strip()[-800:] or f"exit code {code}")
    compiling = ledger.compile_seconds.get(language, 0.0)
    config = dict(tuned.near[0].config)
    when = dict(ledger.timeline)
    return Arm(name, wall, compiling, tuned.gpu_seconds, tuned.trials, tuned.failed, config, timeline=when)


def theirs(language: str, configs: Sequence[Config], env: Mapping[str, str], limit: float) -> Arm:
    """Run the language's own tuner and read what it printed."""
    name = f"{language}.autotune"
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--arm",
        language,
        "--configs",
        json.dumps(list(configs)),
    ]
    wall, code, out, err = run_process(command, env, limit)
    if code == -1:
        return Arm(name, wall, over=True, trials=len(configs))
    if code:
        return Arm(name, wall, error=err.strip()[-800:])
    got = json.loads(out.strip().splitlines()[-1])
    return Arm(name, wall, got["compile_s"], got["gpu_s"], len(configs), got["failed"], got["config"])


def race(
    language: str, plugin: Path, answers: Sequence[Config], env: Mapping[str, str], seconds: float = 1.5
) -> list[float]:
    """Medians in ns of the answers, call by call against each other. Runs in this process's workers."""
    os.environ.update({k: v for k, v in env.items() if k.startswith(("DSL_", "TRITON_", "TILELANG_"))})
    from dsl_bench import catalog as catalogs
    from dsl_bench import environment, jobs
    from dsl_bench.contest import Contender, Contest, Memory
    from dsl_bench.records import Choice
    from dsl_bench.session import Progressor, Session, Settings, done_value

    class Nowhere:
        def write(self, record: object) -> None:
            """Nothing of this is kept."""

    found = catalogs.load([str(plugin)])
    case = next(c for c in found.workload("gemm")[1].cases if c.name == CASE)
    rival = Contender(language, language, "language", (f"{language}/listed",))
    settings = Settings(arch=str(environment.collect().get("arch", "sm_90a")))
    with Session(found, Nowhere(), "bench-tuners", settings, Progressor()) as session:
        contest = Contest(session)
        contest.prepare([case], [rival], -1, Memory())
        points = [
            contest.point_of(case, rival, Choice(f"{language}/listed", "", config)) for config in answers
        ]
        for point in points:
            assert point is not None
            session.compile(point.kernel, point.candidate)
        while any(session.built(p.candidate.key) is None for p in points if p):
            session.wait_built(lambda: False)
        racers = [session.racer(contest.choice(p)) for p in points if p]
        origin = session.workload_origin("gemm")
        outcome = session.on_device(
            jobs.FinalJob("bench-tuners", origin, case, racers, seconds), lambda record: None
        )
        if outcome.done is None:
            raise SystemExit(f"the answers could not race: {outcome.refused}")
        _, loads = done_value(outcome.done, tuple[list[float], list[float]])
        return loads


# -- the whole --------------------------------------------------------------------------------------------


def compare(language: str, count: int, trials: int, limit: float, folder: Path) -> dict[str, Any]:
    """All arms of one language and the race of their answers."""
    configs = listed(language, count)
    plugin = plugin_file(language, configs, folder)
    first, second = folder / f"{language}-ours", folder / f"{language}-theirs"
    env = cold(language, first)
    command = command_of(plugin, language, "halving", trials, folder / f"{language}-ours.jsonl")
    arms = [ours("ours", command, env, limit, language)]
    arms.append(theirs(language, configs, cold(language, second), limit))
    whole = command_of(plugin, language, "exhaustive", len(configs), folder / f"{language}-all.jsonl")
    arms.append(ours("exhaustive", whole, env, limit, language))
    answered = [a for a in arms if a.config is not None]
    # an answer that two arms share races as two copies: they show what the race can tell apart
    medians = race(language, plugin, [a.config or {} for a in answered], env) if answered else []
    return {"language": language, "configs": configs, **summary(language, arms, answered, medians)}


def summary(
    language: str, arms: Sequence[Arm], answered: Sequence[Arm], medians: Sequence[float]
) -> dict[str, Any]:
    """The arms as rows, and whether ours held: fast enough, and good enough."""
    best = min(medians, default=0.0)
    slower = {a.name: m / best - 1.0 for a, m in zip(answered, medians, strict=True)}
    rows = [{**vars(a), "slower": slower.get(a.name)} for a in arms]
    mine, their = arms[0], arms[1]
    part = mine.wall_s / their.wall_s
    good = slower.get("ours", 1.0) <= LEEWAY and "exhaustive" in slower
    held = not (mine.error or their.error) and mine.config is not None and good and part <= FLOORS[language]
    return {"arms": rows, "part": part, "floor": FLOORS[language], "good": good, "held": held}


def table(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A result's arms as rows of a table."""
    rows = []
    for arm in result["arms"]:
        rows.append(
            {
                "language": result["language"],
                "by": arm["name"],
                "wall_s": f"{'over ' if arm['over'] else ''}{arm['wall_s']:.1f}",
                "compile_s": round(arm["compile_s"], 1),
                "gpu_s": round(arm["gpu_s"], 1),
                "trials": arm["trials"],
                "failed": arm["failed"],
                "slower": None if arm["slower"] is None else f"{arm['slower']:.1%}",
                "answer": json.dumps(arm["config"]) if arm["config"] else arm["error"][-100:],
            }
        )
    return rows


def timelines(result: Mapping[str, Any]) -> list[str]:
    """When our searches came to what, a line each."""
    lines = []
    for arm in result["arms"]:
        if arm["timeline"]:
            steps = ", ".join(f"{what} {seconds:.1f}" for what, seconds in arm["timeline"].items())
            lines.append(f"{result['language']}, {arm['name']}, seconds: {steps}")
    return lines


def page(record: Mapping[str, Any]) -> str:
    """A record as Markdown: on what, the arms without their answers, and how ours held."""
    from dsl_bench import tables

    env = record["environment"]
    rows = [row for result in record["results"] for row in table(result)]
    columns = [name for name in rows[0] if name != "answer"]
    packages = ", ".join(f"{name} {env['packages'][name]}" for name in ("torch", *FLOORS))
    where = f"{env['gpu']}, {env['cpus']} cores, {record['date']}; driver {env['driver']}, {packages}"
    verdicts = "\n".join(f"- {verdict(result)}" for result in record["results"])
    return f"{where}; {record['case']}.\n\n{tables.markdown(rows, columns)}\n\n{verdicts}"


def verdict(result: Mapping[str, Any]) -> str:
    """A result's last line."""
    return (
        f"{result['language']}: {result['part']:.2f} of the language's own time "
        f"(at most {result['floor']:.2f}), answer {'within' if result['good'] else 'NOT within'} "
        f"{LEEWAY:.0%} of the exhaustive best: {'held' if result['held'] else 'MISSED'}"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--language", action="append", choices=sorted(FLOORS), help="default: both")
    parser.add_argument("--count", type=int, help=f"configs in the list (default: {LENGTHS})")
    parser.add_argument("--trials", type=int, help=f"trials of our search (default: {TRIALS})")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds for each arm")
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only show a record, as Markdown")
    parser.add_argument("--arm", choices=sorted(THEIRS), help=argparse.SUPPRESS)
    parser.add_argument("--configs", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; exit 1 where a floor is missed, 3 without a GPU."""
    given = parse(argv)
    if given.arm:
        print(json.dumps(THEIRS[given.arm](given.configs)))
        return 0
    if given.show:
        print(page(json.loads(given.show.read_text())))
        return 0
    from dsl_bench import environment, tables

    env = environment.collect()
    if not env.get("gpu"):
        print("bench-tuners: no GPU here")
        return 3
    languages = given.language or list(FLOORS)
    for name in ("torch", *languages):
        subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True)
    results, date = [], time.strftime("%Y-%m-%d", time.gmtime())
    with tempfile.TemporaryDirectory() as folder:
        for language in languages:
            count, trials = given.count or LENGTHS[language], given.trials or TRIALS[language]
            results.append(compare(language, count, trials, given.limit, Path(folder)))
            if given.out:  # after each language: what is cut off keeps the first
                record = {
                    "environment": env,
                    "date": date,
                    "case": CASE,
                    "leeway": LEEWAY,
                    "results": results,
                }
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(record, indent=1))
    print(tables.render([row for result in results for row in table(result)], "table"))
    for line in [line for result in results for line in timelines(result)]:
        print(line)
    for result in results:
        print(verdict(result))
    return 0 if all(result["held"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How much of the GPU worker's time is measuring: `make bench-harness`, on a machine with a GPU.

Tunes the quick cases twice with the same seed. The first sweep compiles; of the second, whose artifacts are
all there, the worker's seconds are shown by activity, and at least ``LEAST`` of them must be checks and
timing (warm-up included). A search has no cold regime, so no idle gaps either.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from dsl_bench import environment, store, tables
from dsl_bench.records import Ledger

LEAST = 0.70
MEASURING = ("check", "time")
SWEEP = ("tune", "gemm", "--group", "quick", "--trials", "12", "--seed", "0")


def sweep(out: Path) -> Ledger:
    """One sweep's ledger."""
    code = "from dsl_bench.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *SWEEP, "--out", str(out)], stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the sweep ended with exit code {done.returncode}")
    found, _ = store.read([out])
    return next(r for r in reversed(found) if isinstance(r, Ledger))


def main() -> int:
    """Print the table and the verdict; exit 1 below the bound, 3 without a GPU."""
    if not environment.collect().get("gpu"):
        print("bench-harness: no GPU here")
        return 3
    with tempfile.TemporaryDirectory() as folder:
        sweep(Path(folder) / "first.jsonl")
        ledger = sweep(Path(folder) / "second.jsonl")
    seconds = dict(ledger.device)
    job = seconds.pop("job", sum(seconds.values()))
    device = seconds.pop("device", 0.0)
    measuring = sum(seconds.get(name, 0.0) for name in MEASURING)
    rows = [{"activity": name, "seconds": s, "share": s / job} for name, s in sorted(seconds.items())]
    host = seconds.get("time", 0.0) - device
    rows.append({"activity": "of time: the host alone", "seconds": host, "share": host / job})
    rows.append({"activity": "all jobs", "seconds": job, "share": 1.0})
    rows.append(
        {"activity": "the command, compiling and planning too", "seconds": ledger.wall, "share": None}
    )
    print(tables.render(rows, "table"))
    share = measuring / job
    print(
        f"\nmeasuring: {share:.1%} of the worker's time (at least {LEAST:.0%}); {ledger.misses} compiled anew"
    )
    return 0 if share >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())

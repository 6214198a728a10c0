"""``python -m dsl_bench``, and what the console script runs."""

from __future__ import annotations

import os
import sys


def _fill_streams() -> None:
    """Have a standard stream that was closed (``>&-``) lead nowhere: its number would go to the next file
    that is opened, a worker's pipe for one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def main() -> None:
    """The command line, with Ctrl-C answered in one line even while it is still being imported."""
    _fill_streams()
    try:
        from dsl_bench import cli
    except KeyboardInterrupt:
        sys.stderr.write("dsl-bench: interrupted\n")
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()

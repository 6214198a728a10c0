"""``python -m dsl_bench``, and what the console script runs."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line, with Ctrl-C answered in one line even while it is still being imported."""
    try:
        from dsl_bench import cli
    except KeyboardInterrupt:
        sys.stderr.write("dsl-bench: interrupted\n")
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()

"""docs/authoring.md, executed: each file is written and each command run, in order, in one folder.

A fence's first word is its language. ``python file=NAME`` is written to NAME; ``sh`` must
succeed; ``sh fails`` must end in exit code 1; ``sh gpu`` runs where there is a GPU (test_docs.py parses it
everywhere); ``toml`` is parsed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsl_bench import registry

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "authoring.md").read_text()
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def fences(text: str = PAGE) -> Iterator[tuple[str, str, str]]:
    """(language, what follows it, text) of each fence."""
    for language, rest, body in FENCE.findall(text):
        yield language, rest.strip(), body


class Shell:
    """Runs commands as a reader would, in a folder of its own; what pip installs goes into that folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        tools = folder / "bin"
        tools.mkdir()
        for name, code in (
            ("dsl-bench", "from dsl_bench.__main__ import main; main()"),
            ("python", None),
            ("pip", None),
        ):
            path = tools / name
            run = f"-c '{code}'" if code else "" if name == "python" else self._pip()
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {run} "$@"\n')
            path.chmod(0o755)
        paths = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
            "DSL_BENCH_CACHE_DIR": str(cache),
        }

    def _pip(self) -> str:
        code = (
            "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *'-m pip install --no-index"
            f" --no-deps --no-build-isolation --target {self.site}'.split(), *sys.argv[2:]]))"
        )
        return f'-c "{code}"'

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-ec", line],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=600,
        )


def lines(body: str) -> Iterator[str]:
    return (line for line in body.splitlines() if line.strip() and not line.startswith("#"))


def walk(shell: Shell, gpu: bool) -> list[str]:
    """Do all that the page says; returns the commands that were run."""
    done = []
    for language, rest, body in fences():
        if language == "python":
            (shell.folder / rest.removeprefix("file=")).write_text(body)
        if language != "sh" or (rest == "gpu" and not gpu):
            continue
        for line in lines(body):
            result = shell.run(line)
            wanted = 1 if rest == "fails" and line.startswith("dsl-bench") else 0
            assert result.returncode == wanted, f"{line}\n{result.stdout}\n{result.stderr}"
            done.append(line)
    return done


def test_every_fence_is_of_a_known_kind() -> None:
    for language, rest, _ in fences():
        assert (language, rest.partition("=")[0]) in {
            ("sh", ""),
            ("sh", "fails"),
            ("sh", "gpu"),
            ("python", "file"),
            ("toml", ""),
        }
    assert PAGE.count("```") == 2 * len(list(fences()))


def test_entry_points_are_of_groups_that_are_read() -> None:
    texts = [body for language, _, body in fences() if language == "toml"]
    groups = {g for text in texts for g in tomllib.loads(text)["project"]["entry-points"]}
    assert groups and groups <= set(registry.GROUPS)


def test_the_simplest_are_short() -> None:
    for language, rest, body in fences():
        if language == "python":
            assert len(body.splitlines()) < 60, rest


@pytest.fixture
def shell(tmp_path: Path, cache: Path) -> Shell:
    pytest.importorskip("torch")
    for language in ("triton", "tilelang"):
        pytest.importorskip(language)
    if not any(shutil.which(c) for c in ("g++", "clang++")):
        pytest.skip("no C++ compiler")
    return Shell(tmp_path, cache)


@pytest.mark.sampled(0)
def test_the_page_can_be_followed_without_a_gpu(shell: Shell) -> None:
    # where there is a GPU, `check` races as well: that is what the other test is for
    if Path("/dev/nvidiactl").exists():
        pytest.skip("followed as a whole by the test that needs a GPU")
    assert len(walk(shell, gpu=False)) >= 15


@pytest.mark.gpu
@pytest.mark.timeout(3000)
def test_the_page_can_be_followed_with_a_gpu(shell: Shell) -> None:
    assert len(walk(shell, gpu=True)) >= 23

"""The documents say what the code does: columns, records, and the README's table."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from dsl_bench import cli as cli_module
from dsl_bench import records, report, store

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def test_every_public_column_is_explained() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    explained = set(re.findall(r"`(\w+)`", text))
    assert set(report.ROW_FIELDS) <= explained
    assert set(report.MEAN_FIELDS) <= explained
    assert set(records.STATUSES) <= explained
    assert {kind.__struct_config__.tag for kind in get_args(records.Record)} <= explained


def test_the_readme_is_short_and_has_its_markers() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert text.index(report.BEGIN) < text.index(report.END)


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        if "://" not in link:
            assert (path.parent / link).exists(), f"{path}: {link}"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(path: Path) -> list[str]:
    """Every dsl-bench command in the fences of a page, without its comment."""
    fences = re.findall(r"^```\w*[^\n]*\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = "\n".join(fences).replace("\\\n", " ")
    return re.findall(r"^(?:\.venv/bin/)?dsl-bench (.*?)\s*(?:#.*)?$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist_with_their_options(path: Path) -> None:
    """Parsed by the command line itself, not run: tests/test_authoring.py runs those of docs/authoring.md."""
    group = typer.main.get_command(cli_module.app)
    for line in commands(path):
        name, *args = shlex.split(line)
        assert name in group.commands, line
        group.commands[name].make_context(name, args)


def recorded() -> list[Path]:
    return sorted(RESULTS.rglob("*.jsonl"))


def test_recorded_results_are_whole_and_small() -> None:
    found, problems = store.read(recorded())
    assert problems == []
    assert sum(path.stat().st_size for path in recorded()) <= store.MOST_BYTES
    assert not [r for r in found if isinstance(r, records.Trial)], "`dsl-bench record` leaves trials out"


@pytest.mark.slow
def test_the_readmes_table_is_not_stale(cli: Any, tmp_path: Path) -> None:
    if not recorded():
        pytest.skip("nothing is recorded yet")
    copy = tmp_path / "README.md"
    copy.write_text((ROOT / "README.md").read_text())
    done = cli("report", "-r", str(RESULTS), "--readme", str(copy), "--format", "json")
    assert done.returncode == 0, done.stderr
    stale = {r["kernel"] for r in json.loads(done.stdout) if r["stale"]}
    pages = "\n".join(p.read_text() for p in (ROOT / "docs" / "kernels").glob("*.md"))
    explained = set(re.findall(r"^stale: `([\w/]+)`", pages, flags=re.M))
    assert stale == explained, (
        "changed since they were raced: race them again, or say on their page why that waits; and no others"
    )
    assert copy.read_text() == (ROOT / "README.md").read_text(), (
        "run dsl-bench report -r results --readme README.md"
    )


@pytest.mark.slow
def test_the_kernel_pages_tables_are_not_stale(tmp_path: Path) -> None:
    if not recorded():
        pytest.skip("nothing is recorded yet")
    pages = sorted((ROOT / "docs" / "kernels").glob("*.md"))
    for page in pages:
        (tmp_path / page.name).write_text(page.read_text())
    script = ROOT / "scripts" / "kernel_pages.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=200)
    for page in pages:
        assert (tmp_path / page.name).read_text() == page.read_text(), (
            f"run scripts/kernel_pages.py: {page.name}"
        )

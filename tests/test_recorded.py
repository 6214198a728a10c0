"""What the recorded winners are made of: facts on the records, and a seeded dozen compiled again here."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dsl_bench import store
from dsl_bench.records import Compiled, Race

ROOT = Path(__file__).resolve().parents[1]
PAGES = "\n".join(p.read_text() for p in (ROOT / "docs" / "kernels").glob("*.md"))


def winners() -> list[tuple[Race, Compiled]]:
    """Every language's entry in every recorded race, with what was compiled for it."""
    if not (ROOT / "results").is_dir():
        return []
    found, _ = store.read([ROOT / "results"])
    compiled = {r.key: r for r in found if isinstance(r, Compiled)}
    rows = {}
    for race in found:
        if isinstance(race, Race):
            for index in race.racers:
                person = race.participants[index]
                if person.role == "language":
                    rows[race.case.name, person.kernel, person.key] = (race, compiled[person.key])
    return list(rows.values())


WINNERS = winners()
needs_records = pytest.mark.skipif(not WINNERS, reason="nothing is recorded yet")


@needs_records
def test_every_recorded_winner_has_its_facts() -> None:
    for race, compiled in WINNERS:
        assert compiled.status == "ok"
        assert compiled.facts is not None, (race.case.name, compiled.kernel)
        assert compiled.facts.registers > 0
        assert compiled.facts.assembler


@needs_records
def test_a_winner_that_spills_in_its_loop_is_explained_on_its_page() -> None:
    for race, compiled in WINNERS:
        assert compiled.facts is not None
        if compiled.facts.loop_local > 0:
            assert f"spills: {compiled.kernel} {race.case.name}" in PAGES


@needs_records
def test_a_winner_without_hgmma_at_128_rows_is_explained_on_its_page() -> None:
    for race, compiled in WINNERS:
        assert compiled.facts is not None
        if (
            race.case.workload == "gemm"
            and int(race.case.params["m"]) >= 128
            and not compiled.facts.sass.get("HGMMA")
        ):
            assert f"no HGMMA: {compiled.kernel} {race.case.name}" in PAGES


DOZEN = random.Random(20261202).sample(WINNERS, min(12, len(WINNERS)))


@needs_records
@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("race", "record"), DOZEN, ids=[f"{c.kernel}-{r.case.name}" for r, c in DOZEN])
def test_a_seeded_dozen_compiles_again_without_spills(race: Race, record: Compiled, compiled: Any) -> None:
    """With this machine's own toolchain (the newest Triton, this nvcc, this TileLang); spills count where
    the assembler is the recorded one."""
    assert record.arch == "sm_90a"
    _, facts = compiled(record.kernel, record.static)
    assert facts is not None
    # another Triton allocates registers otherwise: what the record says holds for its own assembler
    if record.facts is None or facts.assembler == record.facts.assembler:
        assert facts.loop_local <= max(0, record.facts.loop_local if record.facts else 0)
    if (
        race.case.workload == "gemm"
        and int(race.case.params["m"]) >= 128
        and record.facts
        and record.facts.sass.get("HGMMA")
    ):
        assert facts.sass.get("HGMMA"), (record.kernel, race.case.name)

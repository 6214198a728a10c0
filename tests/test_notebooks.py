"""The notebooks run on the recorded results, hold no outputs, and call no more than they show."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
nbformat = pytest.importorskip("nbformat")


def test_there_are_four() -> None:
    assert [p.stem[:2] for p in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stripped(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.sampled(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if path.stem.startswith("04"):
        pytest.importorskip("triton")
    monkeypatch.setenv("DSL_BENCH_RESULTS", str(ROOT / "results"))
    book = nbformat.read(path, as_version=4)
    client.NotebookClient(book, timeout=400, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [o for c in book.cells if c.cell_type == "code" for o in c.outputs]
    if path.stem.startswith("04"):
        text = "".join(o.get("text", "") for o in shown)
        assert "triton/my_gemm" in text and "ok" in text and "registers" in text
    else:
        pictures = [o for o in shown if "image/png" in o.get("data", {})]
        assert len(pictures) >= 3

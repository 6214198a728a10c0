"""The vendor backend without a GPU: its contract, and its binding against a stand-in cublasLt in C."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl_bench.backends import _cublaslt, vendor
from dsl_bench.errors import KernelFault
from dsl_bench.workload import Case

#: cublasLt's entry points as its header declares them, computing on the CPU; refuses what it does not expect
STAND_IN = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { int trans[2]; int compute, scale; } Desc;
typedef struct { int type; uint64_t rows, cols; int64_t ld; } Layout;
typedef struct { uint64_t workspace; uint32_t mask, align[4]; } Pref;
typedef struct { uint64_t data[8]; } Algo;
typedef struct { Algo algo; size_t workspace; int state; float waves; int reserved[4]; } Result;
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtCreate(void **h) { *h = malloc(1); return 0; }
int cublasLtMatmulDescCreate(Desc **d, int compute, int scale) {
  *d = calloc(1, sizeof(Desc)); (*d)->compute = compute; (*d)->scale = scale; return 0; }
int cublasLtMatmulDescSetAttribute(Desc *d, int attribute, const void *v, size_t n) {
  if (n != 4 || attribute < 3 || attribute > 4) return 7;
  memcpy(&d->trans[attribute - 3], v, 4); return 0; }
int cublasLtMatrixLayoutCreate(Layout **l, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  *l = calloc(1, sizeof(Layout)); **l = (Layout){type, rows, cols, ld}; return 0; }
int cublasLtMatmulPreferenceCreate(Pref **p) { *p = calloc(1, sizeof(Pref)); return 0; }
int cublasLtMatmulPreferenceSetAttribute(Pref *p, int attribute, const void *v, size_t n) {
  if (attribute == 1 && n == 8) memcpy(&p->workspace, v, 8);
  else if (attribute == 3 && n == 4) memcpy(&p->mask, v, 4);
  else if (attribute >= 5 && attribute <= 8 && n == 4) memcpy(&p->align[attribute - 5], v, 4);
  else return 7;
  return 0; }
int cublasLtMatmulDescDestroy(void *d) { free(d); return 0; }
int cublasLtMatrixLayoutDestroy(void *l) { free(l); return 0; }
int cublasLtMatmulPreferenceDestroy(void *p) { free(p); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, Desc *d, Layout *a, Layout *b, Layout *c, Layout *e, Pref *p,
                                   int wanted, Result *out, int *found) {
  if (!p->workspace || p->mask != 2) return 7;
  *found = 0;
  for (int i = 0; i < 3 && i < wanted; i++) {
    memset(&out[i], 0, sizeof(Result));
    out[i].algo.data[0] = 100 + i; out[i].workspace = 64 * i; out[i].state = i == 1 ? 15 : 0;
    memcpy(out[i].algo.data + 1, p->align, 16); (*found)++;
  }
  return 0; }
static float get(const uint16_t *p, uint64_t i) {
  uint32_t x = (uint32_t)p[i] << 16; float f; memcpy(&f, &x, 4); return f; }
int cublasLtMatmul(void *h, Desc *d, const float *alpha, const uint16_t *A, Layout *a, const uint16_t *B,
                   Layout *b, const float *beta, const uint16_t *C, Layout *c, uint16_t *D, Layout *e,
                   const Algo *algo, void *workspace, size_t size, void *stream) {
  if (d->compute != 68 || d->scale != 0 || d->trans[0] != 1 || d->trans[1] != 0) return 7;
  if (a->type != 14 || *alpha != 1.0f || *beta != 0.0f || C != D || c != e) return 7;
  if (algo->data[0] < 100 || size != 64 * (algo->data[0] - 100)) return 7;
  if (!workspace || stream != (void *)7) return 7;
  if (a->rows != b->rows || c->rows != a->cols || c->cols != b->cols) return 7;
  for (uint64_t j = 0; j < c->cols; j++)
    for (uint64_t i = 0; i < c->rows; i++) {
      float s = 0;
      for (uint64_t k = 0; k < a->rows; k++) s += get(A, k + i * a->ld) * get(B, k + j * b->ld);
      uint32_t x; memcpy(&x, &s, 4); x += 0x7FFF + ((x >> 16) & 1);
      D[i + j * e->ld] = x >> 16;
    }
  return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> _cublaslt.CublasLt:
    """The binding on the stand-in."""
    pytest.importorskip("torch")
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("lt")
    (folder / "lt.c").write_text(STAND_IN)
    path = folder / "libcublasLt.so.13"
    subprocess.run([gcc, "-O1", "-shared", "-fPIC", str(folder / "lt.c"), "-o", str(path)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cublaslt, "find_library", lambda: path)
        return _cublaslt.CublasLt()


def bind(
    library: Any, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int], algo: int
) -> tuple[Any, ...]:
    """The kernel bound to CPU tensors."""
    import torch

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    m, n, k = size
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    c = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    case = Case("gemm", "x", {"m": m, "n": n, "k": k}, "bf16")
    return a, b, c, vendor.CUBLASLT.bind(library, case, {"algo": algo}, {"a": a, "b": b}, {"c": c})


@pytest.mark.parametrize("size", [(16, 24, 32), (7, 5, 3), (1, 9, 11)])
@pytest.mark.parametrize("algo", [0, 1])
def test_cublaslt_gets_the_product_it_should(
    library: Any, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int], algo: int
) -> None:
    import torch

    a, b, c, call = bind(library, monkeypatch, size, algo)
    assert call.run() is None
    assert torch.equal(c, (a.float() @ b.float().t()).bfloat16())


def test_an_index_beyond_the_heuristics_list_is_an_invalid_config(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the stand-in offers three and marks one as not to be used
    with pytest.raises(KernelFault, match="offers 2 algorithms") as fault:
        bind(library, monkeypatch, (8, 8, 8), 2)
    assert fault.value.status == "invalid_config"


def test_a_failing_call_is_a_launch_error(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    *_, call = bind(library, monkeypatch, (8, 8, 8), 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=8))
    with pytest.raises(KernelFault, match="cublasLtMatmul: invalid value") as fault:
        call.run()
    assert fault.value.status == "launch_error"


def test_the_version_is_read_without_a_handle(library: Any) -> None:
    assert library.version == "13.1.0"


@given(st.integers(0, 2**40), st.integers(1, 1 << 20))
def test_alignment_divides_every_row(pointer: int, row: int) -> None:
    got = _cublaslt.alignment(pointer, row)
    assert got in {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert pointer % got == 0
    assert row % got == 0
    assert got == 256 or pointer % (2 * got) or row % (2 * got)


def test_alignment_of_odd_rows_is_two_bytes() -> None:
    assert _cublaslt.alignment(0x7F0000000000, 2 * 1019) == 2
    assert _cublaslt.alignment(0x7F0000000000, 2 * 4096) == 256


def test_the_backend_compiles_nothing_and_says_where_it_cannot_run(tmp_path: Path) -> None:
    backend = vendor.BACKEND
    assert backend.role == "vendor"
    assert backend.probe("compile").ready
    assert not backend.probe("interpret").ready
    device = backend.probe("device")
    assert device.ready or (device.reason and device.hint)
    kernels = {k.id: k for k in backend.kernels()}
    assert set(kernels) == {"vendor/cublas", "vendor/cublaslt"}
    assert [c["algo"] for c in kernels["vendor/cublaslt"].configs()] == list(range(vendor.ALGORITHMS))
    case = Case("gemm", "x", {"m": 1, "n": 1, "k": 1}, "bf16")
    artifact = backend.compile(kernels["vendor/cublas"].source({}, "sm_90a"), "sm_90a", tmp_path)
    assert (artifact.cubin, list(tmp_path.iterdir())) == ("", [])
    assert kernels["vendor/cublaslt"].static(case, {"algo": 3}) == {}


def test_cublas_writes_into_the_output_it_is_given() -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.randn(8, 16).bfloat16(), torch.randn(4, 16).bfloat16()
    c = torch.full((8, 4), float("nan"), dtype=torch.bfloat16)
    case = Case("gemm", "x", {"m": 8, "n": 4, "k": 16}, "bf16")
    call = vendor.CUBLAS.bind(None, case, {}, {"a": a, "b": b}, {"c": c})
    assert call.run() is None
    assert not bool(torch.isnan(c).any())
    a.zero_()
    call.run()
    assert float(c.abs().max()) == 0.0

# `make run` and `make test` are all that a fresh machine needs (Python 3.11+, make, a C++ compiler): either makes
# the environment first, once, and reuses it. Where $(PYTHON) can import torch already (a GPU host), that torch and
# everything beside it is used; elsewhere $(TORCH) is installed, of which a CPU build will do (see the README).

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
EXTRAS ?= triton,tilelang,cuda,dev
PIP_FLAGS ?=
# anything for a host without a network: install only this project, on what the host has
OFFLINE ?=
# tests/conftest.py has the longest tests first
PYTEST_FLAGS ?= -n auto --maxprocesses 8 --dist worksteal
ARGS ?=
# ALL=1: every case of every test; without it tests marked `sampled` do some of theirs
ALL ?=

# the environments of `make test` are made beside each other
MAKEFLAGS += --jobs=2

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check

# modules are compiled when they are first used, most never, and are kept, whatever the caller's shell says
INSTALL := install --no-compile $(PIP_FLAGS)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test check test-gpu wheel bench-harness bench-tuners docs clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.ready ## the main job, for the machine it is on; ARGS="--group llm" passes flags
	$(BIN)/dsl-bench run $(ARGS)

test: $(VENV)/.ready $(if $(OFFLINE),,$(VENV)36/.ready) ## the tests that this machine can run; ALL=1: every case of each
	DSL_BENCH_TRITON36_PYTHON=$(if $(OFFLINE),,$(abspath $(VENV)36/bin/python)) $(PY) -m pytest $(PYTEST_FLAGS) $(if $(ALL),--all)

check: $(VENV)/.ready ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.ready ## regenerate the table of wrong kernels in docs/measuring.md
	$(PY) tests/wrong_kernels/kinds.py docs/measuring.md

test-gpu: $(VENV)/.ready ## the tests that need a Hopper GPU
	$(PY) -m pytest -m gpu --all

wheel: $(VENV)/.ready ## build dist/*.whl
	$(PY) -m build --wheel --no-isolation

bench-harness: $(VENV)/.ready ## how much of the GPU worker's time is measuring
	$(PY) tests/bench_harness.py

bench-tuners: $(VENV)/.ready ## our search against triton.autotune and tilelang.autotune; ARGS="--out FILE"
	$(PY) tests/bench_tuners.py $(ARGS)

clean: ## remove the environments and everything built
	rm -rf $(VENV) $(VENV)36 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

HAS_TORCH := import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=…")
# a .pth line that lets the environment see the packages of $(PYTHON), which may stand in an environment itself;
# a new environment's own setuptools (an old one, before Python 3.12) would hide theirs
HOST_PACKAGES := import sys; [print(f"import site; site.addsitedir({p!r})") for p in sys.path if p.endswith("-packages")]
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@echo "[1/3] the environment $(VENV) (once)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@if $(PYTHON) -c '$(HAS_TORCH)'; then $(PIP) uninstall -q -y setuptools; \
	  $(PYTHON) -c '$(HOST_PACKAGES)' > "$$($(PY) -c '$(SITE)')/_host_packages.pth"; fi
	@echo "[2/3] torch"
	@$(PY) -c '$(HAS_TORCH)' || $(PIP) $(INSTALL) $(TORCH)
	@$(PIP) list --format freeze | grep '^torch==' | tee $(VENV)/constraints.txt
	@echo "[3/3] dsl_bench with $(if $(OFFLINE),what is here,$(EXTRAS))"
	@$(PIP) $(INSTALL) $(if $(OFFLINE),--no-index --no-deps --no-build-isolation -e .,\
	  -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]')
	@touch $@

# Triton 3.6 is what the recorded results were made with: the tests compile with it too, in an environment of its own
$(VENV)36/.ready: pyproject.toml
	@echo "[1/1] the environment $(VENV)36 for Triton 3.6 (once)"
	@test -x $(VENV)36/bin/python || $(PYTHON) -m venv $(VENV)36
	@$(VENV)36/bin/python -m pip --disable-pip-version-check $(INSTALL) 'triton==3.6.0' 'numpy<2.4' msgspec packaging
	@$(VENV)36/bin/python -m pip --disable-pip-version-check $(INSTALL) --no-deps -e .
	@touch $@

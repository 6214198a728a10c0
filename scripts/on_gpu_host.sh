#!/usr/bin/env bash
# Installs this tree on a GPU host without a network, then runs the commands given, one an argument.
#
#   scripts/on_gpu_host.sh 'dsl-bench doctor' 'dsl-bench run gemm'
#
# The host brings Python with torch, Triton and setuptools, and a CUDA toolkit; see docs/measuring.md.
set -uo pipefail
cd "$(dirname "$0")/.."
python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . || exit 1
export PYTHONUNBUFFERED=1 COLUMNS=${COLUMNS:-200}
PATH="$(python3 -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"
for command in "$@"; do
  echo "+ $command ($(date -u +%H:%M:%S))"
  bash -c "$command" || echo "exit $?: $command"
done
echo "+ end ($(date -u +%H:%M:%S))"

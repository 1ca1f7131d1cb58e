#!/usr/bin/env bash
# Runs tests/compilers, which need XLA's TPU and GPU compilers, but no TPU or GPU.
#
#   dev/compilers.sh [pytest arguments]
#
# Creates a virtual environment in .compilers (COMPILERS_VENV sets another folder, PYTHON another interpreter) with
# libtpu, the CUDA plugin and NVIDIA's compiler, 2 GB in total, and reuses it in later runs.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${COMPILERS_VENV:-.compilers}
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
fi
"$venv/bin/pip" install -q -e '.[test,tpu,aot-cuda]'

exec "$venv/bin/python" -m pytest tests/compilers -n 2 -m "" -rs "$@"

#!/usr/bin/env bash
# The tests that need XLA's TPU and GPU compilers, and no TPU or GPU: tests/compilers.
#
#   tests/compilers.sh [pytest arguments]
#
# It makes a virtual environment of its own in .compilers (another folder: COMPILERS_VENV; another Python: PYTHON) with
# libtpu, the CUDA plugin and NVIDIA's compiler, 2 GB in all, and keeps it for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${COMPILERS_VENV:-.compilers}
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
fi
"$venv/bin/pip" install -q -e '.[test,tpu,aot-cuda]'

exec "$venv/bin/python" -m pytest tests/compilers -n 2 -rs "$@"

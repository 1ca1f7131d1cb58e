#!/usr/bin/env bash
# Runs the tests of examples/launchers with the launchers that a package installs: Ray Train and Kubernetes' models.
#
#   dev/launchers.sh [pytest arguments]
#
# Creates a virtual environment in .launchers and reuses it in later runs. dev/slurm.sh tests SLURM.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.launchers
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
fi
# Only what these tests need: the extra `test` and Kubernetes' client have had requirements that contradict each other.
"$venv/bin/pip" install -q -e . pytest pytest-xdist hypothesis 'ray[train]' kubernetes pyyaml

exec "$venv/bin/python" -m pytest tests/examples/test_launchers.py -m "" -rs "$@"

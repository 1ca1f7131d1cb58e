#!/usr/bin/env bash
# Runs all tests that need packages besides those of jstep's extra `test`: other libraries, whose numbers and programs
# they compare. Fails if one of them is skipped because a package is missing, unless that is a compiler.
#
#   dev/peers.sh [pytest arguments]
#
# Creates a virtual environment in .peers with the builds for CPUs, and reuses it in later runs. dev/launchers.sh runs
# those of the launchers.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.peers
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
fi
# As a pair: torchvision's operators are compiled for one version of torch, and with another one its import fails
# ("operator torchvision::nms does not exist"), as it did where only one of the two came from the index of CPU builds.
pair=(torch==2.14.1 torchvision==0.29.1)
"$venv/bin/pip" install -q "${pair[@]}" --index-url https://download.pytorch.org/whl/cpu ||
    "$venv/bin/pip" install -q "${pair[@]}"
# By uv, as pip's search for versions that fit each other has taken longer than all tests.
"$venv/bin/pip" install -q uv
"$venv/bin/uv" pip install -q --python "$venv/bin/python" -e '.[test]' schedulefree pytorch_optimizer torchdata \
    transformers accelerate datasets keras timm diffusers ema_pytorch tensorflow-cpu wandb mlflow nbclient ipykernel

mapfile -t files < <(grep -rlE 'importorskip|find_spec|pytest\.skip\(' tests --include='test_*.py' |
    grep -vE '^tests/(compilers|powercut|typed)/|^tests/examples/test_launchers\.py$|^tests/docs/test_site\.py$' | sort)
"$venv/bin/python" -m pytest -n 2 -m "" -rs "${files[@]}" "$@" | tee "$venv/log"

# Other tests are skipped for what they are: a combination that does not exist, an older JAX.
if grep '^SKIPPED' "$venv/log" | grep -iE 'could not import|not installed|pip install|needs ' | grep -viE 'compiler|libtpu'; then
    echo "dev/peers.sh: these tests were skipped; install what they need"
    exit 1
fi

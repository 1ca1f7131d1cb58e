#!/usr/bin/env bash
# Runs all tests that need packages besides those of jstep's extra `test`: other libraries, whose numbers and programs
# they compare. Fails if one of them is skipped because a package is missing, unless that is a compiler.
#
#   dev/peers.sh [pytest arguments]
#   SKIPPED=FILE dev/peers.sh [pytest arguments]     only the tests that were skipped elsewhere for want of a package
#
# The file has lines of `--write-skipped` (dev/nightly_tests.py); dev/nightly.sh takes those of its steps. Without it all
# tests run of the files that can skip one.
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

# Tests are skipped for what they are, too: a combination that does not exist, an older JAX.
ids_without_package() { # lines of --write-skipped
    awk -F '\t' 'tolower($1) ~ /could not import|not installed|pip install|needs / &&
        tolower($1) !~ /compiler|libtpu|chromium/ { print $2 }' "$1" | sort -u
}
# Other steps run these, or nothing does that needs a package.
elsewhere='^tests/(compilers|powercut|typed)/|^tests/examples/test_launchers\.py|^tests/docs/test_site\.py'

selected=()
if [ -n "${SKIPPED:-}" ] && ids_without_package "$SKIPPED" | grep -vE "$elsewhere" > "$venv/ids"; then
    mapfile -t files < <(sed 's/::.*//' "$venv/ids" | sort -u)
    selected=(--only-ids="$venv/ids")
else
    mapfile -t files < <(grep -rlE 'importorskip|find_spec|pytest\.skip\(' tests --include='test_*.py' |
        grep -vE "$elsewhere" | sort)
fi
PYTHONPATH=dev "$venv/bin/python" -m pytest -n 2 -m "" -p nightly_tests --write-skipped="$venv/skipped" -rs \
    "${selected[@]}" "${files[@]}" "$@"

if ids_without_package "$venv/skipped" | grep .; then
    echo "dev/peers.sh: these tests were skipped, or a part of them; install what they need"
    exit 1
fi

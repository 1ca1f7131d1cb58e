#!/usr/bin/env bash
# Runs the tests with the lowest versions that pyproject.toml allows, or with the newest available ones.
#
#   tests/versions.sh lowest [pytest arguments]
#   tests/versions.sh newest [pytest arguments]
#   PYTHON=python3.14 tests/versions.sh newest
#
# Creates a virtual environment in .venv-lowest or .venv-newest; nothing else is changed.
set -euo pipefail
cd "$(dirname "$0")/.."

which=${1:?"usage: tests/versions.sh lowest|newest [pytest arguments]"}
shift
python=${PYTHON:-python3}
venv=".venv-$which"
"$python" -m venv --clear "$venv"

case $which in
    lowest)
        # The run-time dependencies, each at its lower bound; test dependencies may be newer.
        "$venv/bin/python" - > "$venv/constraints.txt" <<'PY'
import re
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = list(project["dependencies"])
for extra in ("summaries", "plot", "progress"):
    wanted += project["optional-dependencies"][extra]
for requirement in wanted:
    name, version = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)", requirement).groups()
    print(f"{name}=={version}")
PY
        # matplotlib 3.9 uses names that pyparsing 3.3 deprecates, and warnings are errors in the tests.
        echo 'pyparsing<3.3' >> "$venv/constraints.txt"
        cat "$venv/constraints.txt"
        "$venv/bin/pip" install -q -c "$venv/constraints.txt" -e '.[test]'
        ;;
    newest)
        "$venv/bin/pip" install -q --upgrade --upgrade-strategy eager -e '.[test]'
        ;;
    *)
        echo "tests/versions.sh: $which is neither lowest nor newest" >&2
        exit 2
        ;;
esac

"$venv/bin/python" -c 'import jax, orbax.checkpoint as o, sys; print("Python", sys.version.split()[0], "jax", jax.__version__, "orbax", o.__version__)'
"$venv/bin/python" -m pytest -n 2 "$@"

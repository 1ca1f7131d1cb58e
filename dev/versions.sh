#!/usr/bin/env bash
# Runs the tests with the lowest versions that pyproject.toml allows, or with the newest available ones.
#
#   dev/versions.sh lowest [pytest arguments]
#   dev/versions.sh newest [pytest arguments]
#   dev/versions.sh smoke                      the lowest versions, and a short run in place of the tests
#   PYTHON=python3.14 dev/versions.sh newest
#
# "newest" takes the newest Python of this machine, because new versions of JAX leave out old ones of Python.
# Creates a virtual environment in .venv-lowest or .venv-newest; nothing else is changed.
set -euo pipefail
cd "$(dirname "$0")/.."

which=${1:?"usage: dev/versions.sh lowest|newest|smoke [pytest arguments]"}
shift

# The newest Python of this machine, on the path or in pyenv, that starts and is not a pre-release.
newest_python() {
    local name python version starts
    starts='import sys, venv; sys.exit(sys.version_info.releaselevel != "final" or sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)))'
    {
        for name in $(compgen -c python3.); do
            echo "${name#python} $(type -P "$name")"
        done
        for python in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
            version=${python%/bin/python3}
            echo "${version##*/} $python"
        done
    } | grep -E '^3\.(1[1-9]|[2-9][0-9])(\.[0-9]+)? /' | sort -rV | while read -r version python; do
        if "$python" -c "$starts" > /dev/null 2>&1; then
            echo "$python"
            break
        fi
    done
}
python=${PYTHON:-$([ "$which" = newest ] && newest_python || true)}
python=${python:-python3}
venv=".venv-$which"
echo "$which: $("$python" --version) ($(type -P "$python"))"
"$python" -m venv --clear "$venv"

case $which in
    lowest | smoke)
        # The run-time dependencies, each at its lower bound; test dependencies may be newer.
        "$venv/bin/python" - > "$venv/constraints.txt" <<'PY'
import re
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = list(project["dependencies"])
# Not those with their own packages of JAX, which need other machines, nor those of maintainers.
for extra in project["optional-dependencies"].keys() - {"cuda13", "tpu", "aot-cuda", "docs", "test"}:
    wanted += project["optional-dependencies"][extra]
for requirement in sorted(wanted):
    if requirement.startswith("jstep["):  # an extra that is made of others
        continue
    name, version = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)", requirement).groups()
    print(f"{name}=={version}")
PY
        # matplotlib 3.9 uses names that pyparsing 3.3 deprecates, and warnings are errors in the tests.
        echo 'pyparsing<3.3' >> "$venv/constraints.txt"
        cat "$venv/constraints.txt"
        if [ "$which" = smoke ]; then
            # What a user has: no test dependencies. `python -W error` is not for other packages.
            "$venv/bin/pip" install -q -c "$venv/constraints.txt" -e '.[summaries,plot,progress,weights]'
            "$venv/bin/python" dev/smoke.py
            exit
        fi
        "$venv/bin/pip" install -q -c "$venv/constraints.txt" -e '.[test]'
        ;;
    newest)
        "$venv/bin/pip" install -q --upgrade --upgrade-strategy eager -e '.[test]'
        ;;
    *)
        echo "dev/versions.sh: $which is neither lowest nor newest" >&2
        exit 2
        ;;
esac

"$venv/bin/python" -c 'import jax, orbax.checkpoint as o, sys; print("Python", sys.version.split()[0], "jax", jax.__version__, "orbax", o.__version__)'
"$venv/bin/python" -m pytest -n 2 "$@"

#!/usr/bin/env bash
# Runs all tests, quick and thorough, of what changed since a commit: what one runs before a commit, after the quick
# tests of everything (`pytest -n 2`).
#
#   dev/changed.sh [commit] [pytest arguments]      the commit is `main` by default
#   dev/changed.sh HEAD~3 -m thorough               only the thorough ones
#
# dev/changed.py decides which tests these are.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
commit=main
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    commit=$1
    shift
fi
tests=$("$python" dev/changed.py "$commit")
if [ -z "$tests" ]; then
    echo "nothing differs from $commit"
    exit 0
fi
printf '%s\n' "$tests"
# shellcheck disable=SC2086 # one argument per line
exec "$python" -m pytest -n 2 -m "" $tests "$@"

#!/usr/bin/env bash
# Runs the tests that take too long for each change: the newest and the lowest versions, XLA's default optimization
# level, 20 000 steps with all features, XLA's compilers for TPUs and GPUs, and SLURM if it is installed.
#
#   tests/nightly.sh [pytest arguments]
#
# Each step runs even if others fail, with its output in .nightly/<step>.log (NIGHTLY_LOGS sets another folder).
# It ends with a summary; the exit code is 1 if a step failed.
set -uo pipefail
cd "$(dirname "$0")/.."

logs=${NIGHTLY_LOGS:-.nightly}
mkdir -p "$logs"
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
newest=$(command -v python3.13 || ls "$HOME"/.pyenv/versions/3.13.*/bin/python3 2> /dev/null | tail -n 1)
results=()
code=0

step() { # name, command …
    local name=$1 begin=$SECONDS result=passed
    shift
    echo "== $name"
    if ! "$@" > "$logs/$name.log" 2>&1; then
        result=FAILED
        code=1
        tail -n 20 "$logs/$name.log"
    fi
    results+=("$(printf '%-12s %-7s %5d s  %s' "$name" "$result" "$((SECONDS - begin))" \
        "$(grep -aE '(passed|failed|error).* in [0-9]' "$logs/$name.log" | tail -n 1)")")
}

step newest env PYTHON="${newest:-python3}" tests/versions.sh newest "$@"
step lowest env PYTHON="$python" tests/versions.sh lowest "$@"
step optimized env XLA_FLAGS= JSTEP_WHOLE_MATRIX=1 "$python" -m pytest -n 2 "$@"
step soak env PYTHONPATH=. "$python" tests/soak.py
step compilers tests/compilers.sh "$@"
if [ -x tests/slurm.sh ] && command -v sbatch > /dev/null; then
    step slurm env PYTHON="$python" tests/slurm.sh
fi

printf '\n'
printf '%s\n' "${results[@]}"
exit "$code"

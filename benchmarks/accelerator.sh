#!/usr/bin/env bash
# Measures and checks jstep on the accelerators of this machine. Nothing is installed: the Python that has JAX runs it.
#
#   benchmarks/accelerator.sh                          # all parts: bits tests speed memory, at most eight minutes each
#   benchmarks/accelerator.sh speed --out figures      # one part; text and JSON go to a folder, by default accelerator-out
#   benchmarks/accelerator.sh bits:attention-bfloat16  # one network of the part bits
#   benchmarks/accelerator.sh --quick                  # small sizes, on two virtual CPU devices if there is no accelerator
#
# PYTHON is the interpreter (python3). Exit code 0: all parts ended well; 1: one failed, or a promise was broken; 2: there
# is no accelerator, or the arguments are wrong. docs/how/accelerators.md says how to read what it prints.
here=$(cd "$(dirname "$0")" && pwd)
exec env PYTHONPATH="$(dirname "$here"):$(dirname "$here")/tests${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" "$here/accelerator/run_parts.py" "$@"

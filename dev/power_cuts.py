"""Count the states of a disk after a power cut, and the faults of calls, that were tried, and their
outcomes: a table.

PYTHONPATH=. python dev/power_cuts.py [most states] [program ...]
"""

import collections
import json
import os
import sys
import tempfile

TESTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests")
sys.path[:0] = [os.path.join(TESTS, "powercut"), TESTS]

import cut_runs  # noqa: E402
import file_calls  # noqa: E402
from cut_faults import ERRORS, RAISED, Fault  # noqa: E402
from cut_verdicts import counts, judge_of, judged, restart_judge  # noqa: E402
from disk_states import MODELS, PREFIX, History, distinct, sampled, tree_of  # noqa: E402


def rows_of_states(name: str, most: int) -> None:
    """Record a program, and print the number of states of each model, of those tried, and of each
    verdict."""
    with tempfile.TemporaryDirectory() as above:
        above = os.path.realpath(above)
        os.mkdir(f"{above}/disk")
        program = "import sys, cut_runs; cut_runs.main(*sys.argv[1:])"
        file_calls.python(program, name, f"{above}/disk", f"{above}/log")
        history = History(file_calls.read(f"{above}/log"))
        assert history.final() == tree_of(f"{above}/disk")
    is_run = name.startswith("train")
    for model in MODELS:
        states = distinct(history.states(model, share=0.3 if is_run and model != PREFIX else 1.0))
        found = counts(judged(sampled(states, most), judge_of(name)))
        print(f"| {name} | {model} | {len(states)} | {sum(found.values())} | {found} |", flush=True)
        if is_run:
            found = counts(judged(sampled(states, 40, seed=1), restart_judge))
            print(
                f"| {name}, started again | {model} | | {sum(found.values())} | {found} |",
                flush=True,
            )


def row_of_faults(name: str, errors: tuple[int, ...], stride: int) -> None:
    """Let calls of a program fail, and print how many did, with what outcome, and the defects."""
    program = "import sys, cut_faults; cut_faults.main(*sys.argv[1:])"
    faults = []
    for number in errors:
        out = file_calls.python(program, name, json.dumps([int(number)]), stride, timeout=1200)
        faults += Fault.parsed(out.splitlines())
    outcomes = collections.Counter(
        fault.outcome if fault.outcome == RAISED else f"{fault.outcome} {fault.call.split()[0]}"
        for fault in faults
    )
    bad = [fault for fault in faults if fault.defects]
    print(
        f"| faults, {name} | | | {len(faults)} | {dict(outcomes)}, with defects: {len(bad)} |",
        flush=True,
    )
    for text in sorted({str(fault)[:300] for fault in bad})[:20]:
        print("   ", text, flush=True)


def main(most: str = "1500", *names: str) -> None:
    """Print all rows, or those of some programs, of which `faults` is one."""
    for name in cut_runs.RUNS:
        if not names or name in names:
            rows_of_states(name, min(int(most), 400) if name.startswith("train") else int(most))
    if not names or "faults" in names:
        row_of_faults("saver", ERRORS, 1)
        row_of_faults("weights", ERRORS, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])

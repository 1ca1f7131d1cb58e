"""Power cuts and failing calls during the saves of a Saver: what was acknowledged is there, bit for
bit."""

import json
import os

import cut_runs
import file_calls
import pytest
from cut_faults import ERRORS, Fault
from cut_verdicts import acknowledged, judge_of, judged, unacceptable
from disk_states import MODELS, PREFIX, History, complete, distinct, sampled, write
from file_calls import Kind

MOST = 600
SAVERS = [f"saver, {name}" for name in cut_runs.SAVES]


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SAVERS)
def test_states(name, model, record):
    problems = unacceptable(
        judged(sampled(distinct(History(record(name)).states(model)), MOST), judge_of(name))
    )
    assert not problems


@pytest.mark.thorough
def test_a_cut_after_a_cut(record, tmp_path):
    """The process that begins in the middle of a replacement, an eviction or a save is cut, too."""
    name = "a step again"
    calls = record(f"saver, {name}")
    states = distinct(History(calls).states(PREFIX))
    kinds = (Kind.RENAME, Kind.UNLINK, Kind.MKDIR)
    starts = sampled([state for state in states if calls[state.at].kind in kinds], 12)
    assert len(starts) == 12
    folder = os.path.realpath(tmp_path)
    for number, state in enumerate(starts):
        write(state.tree, os.path.join(folder, f"disk{number}"))
    begins = [acknowledged(state) + 1 for state in starts]
    program = (
        "import json, sys, cut_runs; cut_runs.again(sys.argv[1], "
        "json.loads(sys.argv[2]), sys.argv[3])"
    )
    file_calls.python(program, folder, json.dumps(begins), name)
    problems = []
    for number, start in enumerate(starts):
        history = History(
            complete(os.path.join(folder, f"log{number}"), os.path.join(folder, f"disk{number}"))
        )
        for model in MODELS:
            found = judged(
                sampled(distinct(history.states(model, share=0.3)), 15), judge_of(f"saver, {name}")
            )
            problems += [
                (start.why, start.at, model, words) for words in unacceptable(found).items()
            ]
    assert not problems


@pytest.mark.thorough
@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("name", ["saver", "weights"])
def test_faults(name, number, recorder):
    """Each call of a save fails, once and lasting."""
    program = "import sys, cut_faults; cut_faults.main(*sys.argv[1:])"
    faults = Fault.parsed(
        file_calls.python(program, name, json.dumps([int(number)]), 1, timeout=900).splitlines()
    )
    assert len(faults) > 20
    problems = [str(fault) for fault in faults if fault.defects]
    assert not problems

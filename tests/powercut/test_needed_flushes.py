"""Each flush of the code is needed: without any one of them, a state of the disk loses what was acknowledged.

The recorded calls without the flushes of one place are those of the code without that place.
"""

import random

import file_calls
import pytest
from cut_verdicts import judge_of, judged, unacceptable
from disk_states import MODELS, History, by_content, more_than, without_syncs

PROGRAMS = ("saver, quick", "weights, shards", "weights, one file", "records", "train")
MOST = 3000
"""The states of a place and a model that are judged."""
SPARE = {
    "LocalLines.sync < LocalLines.close": "lines that nobody has flushed: nothing was promised of them",
    "LocalLines.close < FingerprintHook.end": "all lines have been flushed before; a close after an error needs it",
    "replace_file < _replace": "the record before a checkpoint: the next second replaces it without a flush",
    "make_folders < StartFile._make": "the folder of the record, likewise",
    "sync_folder < sync_growing < LocalLines.sync < FingerprintHook._finish_all": (
        "the checkpoints of the run flush the same folder"
    ),
}
"""The functions of flushes that no state of these programs needs, and why they are there."""


def is_spare(place):
    """Whether no state needs a place, such as "stores/files.py:97 sync_folder < hooks/bits.py:189 …"."""
    functions = " < ".join(line.split(" ", 1)[1] for line in place.split(" < "))
    return any(functions.endswith(spare) for spare in SPARE)


class Program:
    """A recorded program, and the states of its flushed files."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls
        self.places = file_calls.sync_places(calls)
        self.states = {model: self._states(calls, model) for model in MODELS[1:]}

    def _states(self, calls, model):
        return by_content(History(calls).states(model))

    def lost_without(self, place):
        """Return what is unacceptable without the flushes of a place, of the states that this adds; "" for nothing."""
        less = without_syncs(self.calls, self.places, place)
        for model, whole in self.states.items():
            added = more_than(self._states(less, model).values(), whole)
            random.Random(0).shuffle(added)
            if found := unacceptable(judged(added[:MOST], judge_of(self.name), until_first=True)):
                return f"{self.name}, {model}: {found}"
        return ""


@pytest.mark.thorough
def test_each_flush_is_needed(record):
    needed, places = {}, set()
    for name in PROGRAMS:
        program = Program(name, record(name))
        places |= set(program.places.values())
        for place in sorted(set(program.places.values()) - set(needed)):
            if found := program.lost_without(place):
                needed[place] = found
                print(f"{place}: {found}", flush=True)
    spare = places - set(needed)
    assert not [place for place in spare if not is_spare(place)]
    assert len(spare) == len(SPARE)

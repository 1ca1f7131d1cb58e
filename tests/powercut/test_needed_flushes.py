"""Each flush of the code is needed: without any one of them, a state of the disk loses what was acknowledged.

The recorded calls without the flushes of one place are those of the code without that place.
"""

import random

import file_calls
import pytest
from cut_verdicts import judge_of, judged, unacceptable
from disk_states import MODELS, History, by_content, more_than, without_syncs

PROGRAMS = {"saver, quick": 1.0, "weights, shards": 1.0, "weights, one file": 1.0, "records": 1.0, "train": 0.3}
"""Program → the share of the moments that are looked at."""
MOST = 1000
SPARE: dict[str, str] = {}
"""The places of flushes that no state needs, and why they are there."""


class Program:
    """A recorded program, and the states of its flushed files."""

    def __init__(self, name, calls):
        self.name, self.calls, self.share = name, calls, PROGRAMS[name]
        self.places = file_calls.sync_places(calls)
        self.states = {model: self._states(calls, model) for model in MODELS[1:]}

    def _states(self, calls, model):
        return by_content(History(calls).states(model, share=self.share))

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
    assert places - set(needed) == set(SPARE)

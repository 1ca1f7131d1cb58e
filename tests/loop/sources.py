"""Sources of batches, for tests."""

import numpy as np

from jstep.loop.feed import calls, owned
from jstep.loop.sources import source_of


def handed_out(source, lengths=None, **kwargs):
    return list(calls(owned(source), 0, lengths, **kwargs))


def numbers(batches, start=0, last_step=100, position=None, lengths=None):
    source = source_of(batches, start, last_step, position)
    return [np.asarray(call.args[0]).tolist() for call in handed_out(source, lengths)]


class Indexed:
    """No length: it says by IndexError where it ends."""

    def __init__(self, end=None):
        self.end, self.asked = end, []

    def __getitem__(self, step):
        self.asked.append(step)
        if self.end is not None and step >= self.end:
            raise IndexError(step)
        return step * 10


class Positioned:
    """An iterator with a position."""

    def __init__(self, end=100, state="int"):
        self.at, self.end, self.kind = 0, end, state
        self.shared = {"at": 0}

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= self.end:
            raise StopIteration
        self.at += 1
        self.shared["at"] = self.at
        return (self.at - 1) * 10

    def get_state(self):
        return {"int": self.at, "bytes": str(self.at).encode(), "shared": self.shared}[self.kind]

    def set_state(self, state):
        self.at = int(state["at"] if isinstance(state, dict) else state)


class PositionedLoader:
    """An iterable whose iterator has one, as Grain's and PyTorch's loaders are."""

    def __iter__(self):
        return Positioned()

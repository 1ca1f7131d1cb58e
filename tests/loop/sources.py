"""Sources of batches, for tests."""

import math
import types
from typing import Any, NamedTuple

import numpy as np
import positioned

from jstep.compiling.chunks import make_chunks
from jstep.data.loaders import open_source
from jstep.loop.feeder import BatchReader


class Program(NamedTuple):
    """What a chunk must know of a program."""

    max_steps: int = 1
    is_stacked: bool = False
    is_looped: bool = False
    stage: Any = types.SimpleNamespace(stop=math.inf)


def in_loops(most):
    return lambda step, shapes, args: Program(most, is_stacked=most > 1, is_looped=most > 1)


def handed_out(source, ends=(math.inf,), most=1):
    return list(make_chunks(BatchReader(source), 0, in_loops(most), ends=ends))


def numbers(batches, start=0, last_step=100, position=None):
    source = open_source(batches, start, last_step, position)
    return [np.asarray(call.args[0]).tolist() for call in handed_out(source)]


class Indexed:
    def __init__(self, end=None):
        self.end, self.requested = end, []

    def __getitem__(self, step):
        self.requested.append(step)
        if self.end is not None and step >= self.end:
            raise IndexError(step)
        return step * 10


class Positioned(positioned.Positioned):
    def __init__(self, end=100, state="int"):
        super().__init__(lambda n: n * 10, {"int": int, "shared": dict}[state], end)
        self.shared = {"at": 0}

    def __iter__(self):
        return self

    def __next__(self):
        batch = super().__next__()
        self.shared["at"] = self.at
        return batch

    def get_state(self):
        return self.shared if self.kind is dict else super().get_state()


class Stateful:
    """A loader like those of torchdata and datasets: it has a state, which takes effect in the next
    `iter`."""

    def __init__(self, end=100, make=None, unmake=None):
        self.end, self.begin, self.calls = end, 0, []
        self.make, self.unmake = (
            make or (lambda at: {"at": at}),
            unmake or (lambda state: state["at"]),
        )
        self.live = None

    def __iter__(self):
        self.calls.append("iter")
        for at in range(self.begin, self.end):
            self.at = at + 1
            yield at * 10

    def state_dict(self):
        if "iter" not in self.calls or not hasattr(self, "at"):
            return None  # like datasets before the first batch
        state = self.make(self.at)
        if isinstance(state, dict):
            self.live = state if self.live is None else self.live
            self.live.update(state)
            return self.live
        return state

    def load_state_dict(self, state_dict):
        self.calls.append("load")
        self.begin = self.unmake(state_dict)


class StatefulIterable:
    """An iterable whose iterator has `state_dict` and `load_state_dict`."""

    def __init__(self, end=100):
        self.end = end

    def __iter__(self):
        return _Stateful(self.end)


class _Stateful:
    def __init__(self, end):
        self.at, self.end = 0, end

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= self.end:
            raise StopIteration
        self.at += 1
        return (self.at - 1) * 10

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state_dict):
        self.at = state_dict["at"]

"""Processes of a run as threads of one, which exchange arrays as JAX's collectives do: what they
agree on, by day."""

import threading
from concurrent import futures

import jax
import numpy as np
import waiting
from jax.experimental import multihost_utils


class Fellows:
    """So many threads, each of which is a process for `jax.process_index` and for the collectives.

    Args:
        monkeypatch: Replaces the functions of JAX while the test runs.
        count: Number of processes.

    Attributes:
        exchanges: What each exchange of process 0 gathered, in order.
    """

    def __init__(self, monkeypatch, count=2):
        self._count, self._own = count, threading.local()
        self._barrier = threading.Barrier(count, timeout=waiting.TIMEOUT)
        self._rows = [None] * count
        self.exchanges = []
        monkeypatch.setattr(jax, "process_count", lambda *_: count)
        monkeypatch.setattr(jax, "process_index", lambda *_: self.index)
        monkeypatch.setattr(multihost_utils, "process_allgather", self._gathered)
        monkeypatch.setattr(
            multihost_utils, "broadcast_one_to_all", lambda mine: self._gathered(mine)[0]
        )

    @property
    def index(self):
        """The number of the process that this thread is."""
        return int(getattr(self._own, "index", 0))

    def _gathered(self, mine):
        self._rows[self.index] = np.array(mine)
        self._barrier.wait()
        found = np.stack(self._rows)
        self._barrier.wait()  # nobody sends the next before all have read this
        if self.index == 0:
            self.exchanges.append(found)
        return found

    def each(self, fn):
        """Call a function with each number in its thread; return the results, with errors in their
        places."""

        def one(index):
            self._own.index = index
            try:
                return fn(index)
            except Exception as error:
                return error

        with futures.ThreadPoolExecutor(self._count) as threads:
            return list(threads.map(one, range(self._count)))

"""The numbers in a start's record that always change: metrics, best checkpoints, times, memory."""

import contextlib
import itertools
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jstep.core import stopwatch
from jstep.core.meshes import internal_transfers
from jstep.core.trees import Tree, poll_ready
from jstep.evaluating.evaluation_hook import best_checkpoints, newest_results, watched_metrics
from jstep.evaluating.keep_best import KeepBest, data_hash
from jstep.logs.speed import StepCounterHook
from jstep.loop.run_context import RunContext
from jstep.metering.numbers import read_values, sorted_numbers
from jstep.record.config import encoded
from jstep.record.run_record import file_of
from jstep.record.schema import Start
from jstep.record.state_changes import StateChanges
from jstep.stores.urls import absolute
from jstep.training.metrics import LOSS

_MAX_VALUES = 128
"""The number of scalar metrics that are read, and recorded."""
_MAX_BYTES = 4096
"""The size of the recorded ones as JSON."""
_LASTING_SECS = 1.0
"""The seconds for which a phase must have lasted to be recorded: a start that is killed within the
next second, the period of the record, has probably not left it."""


class _Samples(NamedTuple):
    """The seconds in which the loop was in a hook, and in which the device then computed."""

    hooks: int = 0
    computing: int = 0


class RecordNumbers:
    """The current numbers of a run, for its record.

    Any thread may read them; nothing waits for the device.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._ratios = run.sums.follow_ratios()
        self._devices: Sequence[Any] = ()
        self._samples = _Samples()
        # For `read`, which the loop, the thread that writes the record, and savers call.
        self._lock = threading.Lock()
        # Metrics that were not ready when `read` looked at them. It does not take newer ones before
        # it has read these: the newest are of the latest call, and a loop that is ahead of
        # the device would never find them ready.
        self._pending: dict[str, Any] | None = None
        # What is recorded. Both are replaced, not changed, so that they may be read without the
        # lock.
        self._values: dict[str, Any] = {}
        self._best: dict[str, Any] = {}
        self.changes = StateChanges()

    def inherit(self, start: Start) -> None:
        """Begin with the numbers of an earlier start of the run."""
        self._values = start["values"]
        self._best = start["best"]

    def use_devices(self, state: Tree) -> None:
        """Report the memory of the devices of a state, which may be shapes."""
        for leaf in jax.tree.leaves(state):
            if isinstance(leaf, jax.Array):
                self._devices = list(leaf.sharding.addressable_devices)
                return

    # Reading.

    def read(self) -> None:
        """Take the metrics of the latest step once they are ready, and evaluations' results."""
        run = self._run
        if not run.is_open or file_of(run) is None:
            return
        # The metrics of a step that failed may be deleted: the record keeps older ones.
        with self._lock, contextlib.suppress(Exception), internal_transfers():
            values = {**self._values, **self._arrived_metrics()}
            best = dict(self._best)
            for hook in run.evaluations:
                values |= read_values(newest_results(hook) or {})
                for name, kept in best_checkpoints(hook).items():
                    best[name] = [kept.value, kept.step, absolute(kept.path)]
            self._values = self._sort_by_interest(values)
            self._best = best

    def _arrived_metrics(self) -> dict[str, Any]:
        run = self._run
        arrived: dict[str, Any] = {}
        if self._pending is None:
            metrics = sorted_numbers(run.metrics or {}, run.components.constant_metrics())
            self._pending = dict(itertools.islice(metrics.items(), _MAX_VALUES))
        arrays = [value for value in self._pending.values() if isinstance(value, jax.Array)]
        answers = [poll_ready(array) for array in arrays]
        if None in answers:  # deleted by a hook or a body: the next ones are read
            self._pending = None
        elif all(answers):
            ready = self._pending
            self._pending = None
            arrived |= read_values(ready)
        return arrived | self._ratios.newest_values()

    def _sort_by_interest(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return values with the loss and the metrics of callbacks first.

        These are recorded if there are too many.
        """
        names = [LOSS]
        for hook in self._run.evaluations:
            names += [name for name, _ in watched_metrics(hook)]
        first = {name: values[name] for name in names if name in values}
        return first | values

    def read_latest(self) -> None:
        """Like `read`, with the latest step's even if an earlier step's were not ready before."""
        with contextlib.suppress(Exception):  # a step that failed has no metrics
            self._run.sums.cut()
        if self._pending is not None:
            self.read()
        self.read()

    def sample(self) -> None:
        """Called once a second: note if the device computes during a hook or the body."""
        watch = self._run.watch
        if watch.current != stopwatch.HOOKS and watch.body_began is None:
            return
        samples = self._samples
        computes = self._run.in_flight.unfinished() is not None
        self._samples = _Samples(samples.hooks + 1, samples.computing + computes)

    # The fields of the record.

    def fields(self) -> dict[str, Any]:
        run = self._run
        times = run.recorded_times()
        self.read()
        samples = self._samples
        computing: float | None = None
        if samples.hooks:
            computing = (
                times["seconds"].get(stopwatch.HOOKS, 0.0) * samples.computing / samples.hooks
            )
        counter = run.shared.get(StepCounterHook)
        return {
            "now": stopwatch.CLOCKS.wall(),
            **times,
            "phase": run.watch.lasting_phase(_LASTING_SECS),
            "computing": computing,
            **_host_memory(),
            "examples": self.examples(),
            "state_changes": self.changes.as_record(),
            **_bounded(self._values),
            "best": dict(self._best),
            "kept": self._kept_metrics(),
            "peak_bytes": self._peak_bytes(),
            "mfu": None if counter is None else counter.mfu,
        }

    def examples(self) -> int | None:
        counted, unknown = self._run.examples if self._run.is_open else (0, 0)
        return None if unknown else counted

    def learning_rate(self) -> float | None:
        return self._values.get("learning_rate")

    def _kept_metrics(self) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for hook in self._run.evaluations:
            for name, callback in watched_metrics(hook):
                if isinstance(callback, KeepBest):
                    kept[name] = {"mode": callback.mode, "data": data_hash(callback)}
        return kept

    def _peak_bytes(self) -> int | None:
        """Return the largest peak of a device's memory; None if the backend does not measure it."""
        peak = 0
        with contextlib.suppress(Exception):
            for device in self._devices:
                peak = max(peak, (device.memory_stats() or {}).get("peak_bytes_in_use", 0))
        return peak or None


def _host_memory() -> dict[str, int | None]:
    """Return the memory of this process, current and maximum.

    It is None if the system does not report it as Linux does.
    """
    with contextlib.suppress(OSError, ValueError, KeyError), open("/proc/self/status") as file:
        kibibytes = dict(re.findall(r"^(VmRSS|VmHWM):\s*(\d+)", file.read(), re.MULTILINE))
        return {
            "host_bytes": int(kibibytes["VmRSS"]) * 1024,
            "host_peak_bytes": int(kibibytes["VmHWM"]) * 1024,
        }
    return {"host_bytes": None, "host_peak_bytes": None}


def _bounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first values that fit into a record, and how many do not."""
    size = 0
    recorded: dict[str, Any] = {}
    for name, value in values.items():
        size += len(encoded({name: value}))
        if size > _MAX_BYTES or len(recorded) == _MAX_VALUES:
            break
        recorded[name] = value
    return {"values": recorded, "values_left_out": len(values) - len(recorded)}

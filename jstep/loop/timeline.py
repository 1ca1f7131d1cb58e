"""The observer that records the times and the progress of a run, in a file next to its checkpoints."""

import contextlib
import functools
import itertools
import logging
import math
import threading
from collections.abc import Mapping
from typing import Any

import jax

from jstep.checkpoint.saver import Saver
from jstep.core import stopwatch
from jstep.core.annotations import Tree
from jstep.core.checks import cut_text, format_list, truncate
from jstep.core.meshes import internal_transfers
from jstep.core.records import json_float
from jstep.core.secret_values import error_text
from jstep.core.tables import printable
from jstep.core.threads import in_background, wait_until_done
from jstep.hooks.numbers import is_ready, read_values, scalars
from jstep.hooks.stall_files import exit_reason
from jstep.loop.branch import PARENT, PARENT_RUN
from jstep.loop.given import command_line
from jstep.loop.run import STOPPED, Observer, Origin, Run, name_of_run
from jstep.loop.setup import Setup
from jstep.state.sharding import describe_devices
from jstep.stores.owners import is_alive, this_process
from jstep.stores.run_record import KEPT, Record, has_trained, newest_times
from jstep.stores.timeline import COPY, KILLED, START, TIMES, VERSION
from jstep.stores.timeline_writer import Timeline
from jstep.stores.urls import absolute, location

_MAX_VALUES = 64
"""The maximum number of metrics that are recorded; they are written every second."""
_MAX_REASON = 1000
_IDLE_STARTS = 2
"""The number of starts without a step, one after the other, after which the next one warns."""
_logger = logging.getLogger("jstep")


class TimelineRecorder(Observer):
    """The thread that records, once a second, a run's times and latest numbers, and finally how it ended.

    Only process 0 writes, and only if the run has a checkpoint_dir or a logdir.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._wall = stopwatch.CLOCKS.wall() - sum(setup.watch.seconds().values())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="jstep-timeline", daemon=True)
        self._run: Run | None = None
        self._lock = threading.Lock()
        self._pending: dict[str, Any] | None = None  # the latest metrics, until they are ready
        self._numbers: dict[str, dict[str, Any]] = {"values": {}, "best": {}}
        self._is_opening, self._has_begun, self._is_open = False, threading.Event(), threading.Event()
        self._stopped_by: object = None  # the hook that stopped an earlier start
        self._devices: list[Any] = []  # of this process, which hold the state

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if self._is_opening and self._has_begun.wait(1.0):  # the signal may have prevented the thread
            self._is_open.wait()
        if self._thread.is_alive():
            self._thread.join(timeout=10)  # it may be blocked on an object store
        status, reason, exception = _outcome(self.setup, error, self._stopped_by)
        self.write_times(end=[status, reason], exception=exception)
        self.setup.lines.close()
        self.setup.watch.stop()

    def opened(self, saver: Saver | None, origin: Origin) -> None:
        where = self.setup.options.where
        if where is None or jax.process_index() != 0:
            self.setup.watch.stop()
            return
        # In a thread: a signal ends this wait, but leaves no start without its first line.
        self._is_opening = True
        opening = in_background(functools.partial(self._open, where, saver, origin), name="jstep-timeline-open")
        wait_until_done(opening)
        opening.result()
        if self.setup.lines.timeline is not None:
            self._thread.start()

    def _open(self, where: str, saver: Saver | None, origin: Origin) -> None:
        self._has_begun.set()
        try:
            self._begin(where, saver, origin)
        finally:
            self._is_open.set()

    def _begin(self, where: str, saver: Saver | None, origin: Origin) -> None:
        options = self.setup.options
        try:
            timeline = Timeline(where, options.checkpoint_prefix if saver is None else saver.prefix)
        except OSError as error:
            _logger.warning("%s: the times of this run cannot be kept: %s", where, error)
            self.setup.watch.stop()
            return
        _end_previous(timeline, claimed=origin.is_claimed)
        if not origin.is_copy:
            _warn_of_no_progress(timeline.record, origin.latest or origin.given or 0, options.last_step)
        self._stopped_by = origin.extra.get(STOPPED)
        self.setup.lines.open(timeline)
        self._devices = _local_devices(self.setup.loop.state)
        self.write_times(
            START,
            version=VERSION,
            directory=absolute(where),
            logdir=None if options.logdir is None else absolute(location(options.logdir, "logdir")),
            last_step=options.last_step,
            process=this_process(),
            claims=origin.is_claimed,
            run=name_of_run(self.setup, origin),
            argv=command_line(),
            **{PARENT: origin.parent, PARENT_RUN: origin.parent_run, COPY: origin.is_copy, "config": options.config},
            **_about(self.setup),
        )

    def before_begin(self, run: Run) -> None:
        self._run = run

    def before_close(self) -> None:
        for _ in range(2):  # the previous numbers may not have been ready
            self._read_numbers()

    def write_times(self, kind: str = TIMES, **fields: object) -> None:
        """Write a line with the times so far, if the file is open."""
        self.setup.lines.write(kind, **self._newest(), **fields)

    def _newest(self) -> dict[str, Any]:
        loop, seconds, run = self.setup.loop, self.setup.watch.seconds(), self._run
        self._read_numbers()
        counted, unknown = (0, 0) if run is None else run.reports.examples
        return {
            "time": round(self._wall + sum(seconds.values()), 6),
            "step": [loop.first, max(loop.first, loop.step)] if loop.is_known else None,
            "seconds": {part: round(max(0.0, value), 6) for part, value in seconds.items() if value},
            "now": stopwatch.CLOCKS.wall(),
            "examples": None if unknown else counted,
            **{name: dict(of) for name, of in self._numbers.items()},
            **{name: value for name, value in self._of_devices().items() if value},
        }

    def _read_numbers(self) -> None:
        """Read the numbers of the latest step once they are ready, without waiting for the device."""
        run = self._run
        if run is None or self.setup.lines.timeline is None:
            return
        with self._lock, contextlib.suppress(Exception), internal_transfers():
            if self._pending is None:
                numbers = scalars(run.metrics or {}, run.constant_metrics())
                self._pending = dict(list(numbers.items())[:_MAX_VALUES])
            if is_ready(self._pending.values()):
                numbers, self._pending = self._pending, None
                self._numbers["values"] |= {name: json_float(value) for name, value in read_values(numbers).items()}
            for hook in run.evaluations:
                newest = {} if hook.newest is None else read_values(hook.newest[1])
                self._numbers["values"] |= {name: json_float(value) for name, value in newest.items()}
                self._numbers["best"] |= {
                    name: [json_float(best.value), best.step, absolute(best.path)] for name, best in hook.best.items()
                }
            self._numbers["values"] = dict(list(self._numbers["values"].items())[: 2 * _MAX_VALUES])

    def _of_devices(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # a backend may not know it
            peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in self._devices]
            fields["peak_bytes"] = max(peaks, default=0)
        counter = None if self._run is None else self._run.reports.counter
        return fields | {"mfu": None if counter is None else counter.mfu}

    def flush(self) -> None:
        timeline = self.setup.lines.timeline
        if timeline is not None:
            timeline.flush()

    def about_to_save(self) -> None:
        self.write_times(checkpoint=self.setup.loop.step)

    def _tick(self) -> None:
        timeline = self.setup.lines.timeline
        while timeline is not None:
            try:
                timeline.update(**self._newest())
                timeline.publish()
            except Exception as error:  # an error here must not end the run
                _logger.warning("the times of this run cannot be kept: %s", error)
                self.setup.lines.close()
                self.setup.watch.stop()
                return
            if self._over.wait(timeline.period):
                return


def _end_previous(timeline: Timeline, *, claimed: bool) -> None:
    """Append what the previous start recorded last, if it was killed before it could."""
    start = timeline.record.newest
    if start is None or "end" in start or not start.get("process"):  # older versions recorded neither
        return
    is_dead = claimed or is_alive(start["process"]) is False
    end = [KILLED, exit_reason(timeline.where, timeline.prefix, start["opened"])] if is_dead else None
    timeline.write(TIMES, **newest_times(start), **({} if end is None else {"end": end}), start=start["start"])


def _is_idle(start: Mapping[str, Any]) -> bool:
    """Whether a start took no step, though there were some left."""
    return not has_trained(start) and (start.get("end") or [KILLED])[0] != "finished"


def _warn_of_no_progress(record: Record, step: int, last_step: int | None) -> None:
    idle = list(itertools.takewhile(_is_idle, reversed(record.starts)))
    if len(idle) < _IDLE_STARTS or (last_step is not None and step >= last_step):
        return
    count = len(idle) + (record.count - len(record.starts)) * (len(idle) >= KEPT - 1)
    ends = [": ".join(filter(None, start.get("end") or (KILLED, ""))) for start in idle]
    _logger.warning(
        "the last %d starts of this run took no step: %s. One that is stopped or killed while it restores and compiles "
        "needs more time (stop_secs of train, or the limit of the job), or compiled programs that are kept "
        "(compile_cache=True); one that fails or hangs will do so again",
        count,
        format_list([truncate(printable(end), 200) for end in dict.fromkeys(ends)], 3, "; "),
    )


def _about(setup: Setup) -> dict[str, Any]:
    state = setup.loop.state
    fields: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # the state may be shapes, or donated
        devices = describe_devices(state)
        fields["devices"] = f"{devices['of_state']}×{devices['kind']}"
        fields["parameters"] = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    return fields


def _local_devices(state: Tree) -> list[Any]:
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return list(next((leaf.sharding.addressable_devices for leaf in leaves), ()))


def _outcome(setup: Setup, error: BaseException | None, stopped_by: object) -> tuple[str, str, str | None]:
    """Return how the run ended, why, and the class of its exception."""
    loop, signals = setup.loop, setup.signals
    is_done = loop.is_known and loop.step >= setup.options.stop_step
    is_signal = error is not None and (signals.received is not None or isinstance(error, KeyboardInterrupt))
    kind = None if error is None else type(error).__name__
    if error is not None and (isinstance(error, Exception) or not is_signal):
        first = error_text(error).strip().partition("\n")[0]
        return "failed", cut_text(f"{kind}: {first}".rstrip(": "), _MAX_REASON), kind
    if is_signal and not is_done:
        return "interrupted", "SIGINT" if signals.received is None else signals.reason, kind
    by = loop.stopped_by or (stopped_by if loop.step <= loop.first else None)  # an earlier start of this run, or now
    if isinstance(by, str):
        return "finished", f"stopped by {by}", None
    return "finished", "" if is_done else "the batches ended", None

"""A history of a run's metrics: rows in memory, in checkpoints or in a file, and their plots."""

import contextlib
import functools
import math
import os
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import numpy as np

from jstep.core import processes, trees
from jstep.core.checks import as_int
from jstep.core.logs import logger
from jstep.core.tables import html_table
from jstep.hooks.cadence import make_cadence
from jstep.hooks.hook_states import StateFormat, register_format
from jstep.hooks.origin import Kind
from jstep.hooks.run_info import RunInfo
from jstep.logs.history_file import HistoryFile, Row, Rows, as_path, read_rows
from jstep.logs.reporting import ReportingHook
from jstep.metering.intervals import merge_sums
from jstep.metering.numbers import (
    PendingTransfer,
    numbers_in,
    read_values,
    sort_metrics,
    sorted_numbers,
)
from jstep.showing.drawing import Curve, picture
from jstep.state.train_state import TrainState
from jstep.stores.urls import location
from jstep.training.metrics import Metrics

MOST_ROWS = 1000
"""The maximum number of rows of metrics in a checkpoint; even."""
_SHOWN = 10
"""The number of newest rows in the table of a notebook."""
_DIGITS = 9
"""The digits of a mean, which must not depend on where its sum was cut."""


class History(ReportingHook):
    """A hook that keeps a run's metrics, and the results of its evaluations, as rows of numbers.

    A row has the metrics that log lines show: means over the steps since the last row. Rows are at
    the multiples of last_step / 100, rounded up (of 100 if there is no last_step), and at the last
    step; results of evaluations, such as `eval/loss`, are in the rows of their steps. A resumed run
    has the rows of an uninterrupted one. In a notebook, a History displays a table and a plot of
    each metric.

    Args:
        path: A file for the rows, one line of JSON each; infinite values and NaN are strings. A run
            that resumes from step N drops later rows; the file of another run is renamed to
            `PATH.1` (`PATH.2`, …). Without a path the rows are in the checkpoints; without a
            last_step either, after 1000 rows each two are merged, and the interval doubles.
        every_n_steps: Interval in steps.
        mean: Whether rows have means over the steps since the last row, instead of the metrics of
            the row's own step.

    Attributes:
        names: The names of all metrics. A metric named `step` is named `step_` in the rows.
        rows: A dict for each row, with its `step`.

    Raises:
        ValueError: The path is a URL, or not a regular file. Before the first step: it has
            something other than the rows of a History, another run is writing it, or two histories
            have one path.
        OSError: The file cannot be written. The rows are kept, and are in the checkpoints.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> history = jstep.History()
        >>> state = jstep.train(train_step, state, lambda step: jnp.ones(()), 3, hooks=[history])
        >>> steps, values = history["loss"]
        >>> steps, values
        (array([1, 2, 3]), array([1.    , 0.25  , 0.0625]))

    Source: `History` of Keras.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every_n_steps: int | None = None,
        mean: bool = True,
    ) -> None:
        super().__init__(mean=mean)
        self._every = every_n_steps
        if every_n_steps is not None:
            self._every = as_int(every_n_steps, "every_n_steps", 1, "a number of steps")
        self._path = None if path is None else as_path(path)
        self._lock = threading.RLock()
        self._file: HistoryFile | None = None
        # The rows are of the steps (_first, _last_row]. A row is in memory, and in the file unless
        # a write failed: then all rows from `_unwritten` on are written again. Without a path,
        # `_counts` has how many numbers each value is the mean of, for merging rows.
        self._first = 0
        self._last_row = 0
        self._rows: Rows = {}
        self._unwritten = math.inf
        self._counts: Rows = {}
        # The unfinished row: the sums over the steps (_last_row, _reached], when they were last
        # brought to the host.
        self._sums: dict[str, tuple[float, float]] = {}
        self._reached = 0
        # Without means, the metrics of the step of a checkpoint that has no row yet. If a signal
        # ends the run there, and the next start finds no batch, that step is the last one, and
        # these are its row.
        self._newest: Row = {}
        self._saved_constants = set[str]()  # metrics that did not change in the start before
        self._evaluated = set[str]()  # the names of results of evaluations
        # The prefix of an evaluation → the step of the newest result that has a row.
        self._pulled: dict[str, int] = {}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Return a History with the rows of a file, except an incomplete last line.

        Raises:
            FileNotFoundError: There is no such file.
            OSError: The path is not a regular file.
            ValueError: The file has lines that no History wrote.
        """
        history = cls()
        history._rows = read_rows(location(path, "path"))
        return history

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            copied = {
                "_rows": {step: dict(row) for step, row in self._rows.items()},
                "_counts": dict(self._counts),
            }
            left_out = {"_lock": None, "_file": None, "_given_run": None}
            return vars(self) | copied | left_out

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def _use_run(self, run: RunInfo) -> None:
        super()._use_run(run)
        # The interval, before it doubles.
        if self._every is not None:
            self._base = self._every
        elif run.last_step is None:
            self._base = 100
        else:
            self._base = max(1, -(-run.last_step // 100))  # a hundredth, rounded up
        self._set_interval(run.step)

    def begin(self, state: TrainState) -> bool | None:
        super().begin(state)
        step = self._run.step
        self._pulled = {}
        # Rows of an earlier run with this object, which this one may continue.
        earlier = self._rows if step else {}
        self._rows = {row_step: row for row_step, row in earlier.items() if row_step <= step}
        if not self._rows:
            self._first = step
            self._counts = {}
        if self._path is not None:
            processes.share_errors(self._open, "the file of a History cannot be opened", ValueError)
            if self._file is None:
                with contextlib.suppress(OSError):  # of process 0
                    self._rows = read_rows(self._path)
        self._last_row = min(self._last_row, step)
        if step != self._reached:
            self._sums = {}
        self._set_interval(step)
        return None

    def _set_interval(self, step: int) -> None:
        every = self._base
        if self._path is None and self._run.last_step is None:
            # The rows of a checkpoint are bounded: the interval doubles when MOST_ROWS of them are
            # reached.
            while step // (2 * every) * 2 * every - self._first >= MOST_ROWS * every:
                every *= 2
        self._interval = every
        self._cadence = make_cadence(steps=("every_n_steps", every))

    def _open(self) -> None:
        if not processes.is_process_0() or self._path is None:
            return
        self._run.check_no_links(self._path)
        self._file = HistoryFile(
            self._path,
            self._run.step,
            resumes=self._run.origin.kind is Kind.RESUMED,
        )
        # Rows that are not in the file could not be written, as on a full disk, and are in the
        # checkpoint.
        self._rows = dict(sorted((self._rows | self._file.rows).items()))
        self._unwritten = min(
            (step for step in self._rows if step not in self._file.rows), default=math.inf
        )

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        self._pull()
        self._last_row = step
        super()._when_due(step, state, metrics)
        earlier_interval = self._interval
        self._set_interval(step)
        if self._interval > self._base:
            # The rows of the last two intervals are merged at each row, all of them when the
            # interval has doubled.
            first = step - 2 * self._interval
            if self._interval > earlier_interval:
                first = self._first
                if processes.is_process_0():
                    text = (
                        "History: from step %d on, a row is kept every %d steps; earlier ones "
                        "are merged (see path)"
                    )
                    logger.info(text, step, self._interval)
            # In the queue of rows, as some of these may still be in transfer.
            merge = functools.partial(self._merge, first, self._interval)
            self._run.transfers.add(step, PendingTransfer(lambda: True, lambda: None), merge, self)
        self._write()

    def _make_last_row(self, step: int, state: TrainState, metrics: Metrics | None) -> None:
        if step == self._last_row:
            return
        # Without metrics, this start took no step: an earlier one was killed or interrupted before
        # its end, in the middle of a row.
        self._when_due(step, state, self._newest if metrics is None else metrics)

    def end(self, step: int, state: TrainState) -> None:
        super().end(step, state)
        self._write()

    def deliver(self, step: int, values: dict[str, Any]) -> None:
        """Keep a row; if it cannot be written, the next row, `end` or `flush` raises."""
        if values:
            self._put(step, values)
            with contextlib.suppress(OSError):  # this may be a save, which it must not prevent
                self._write()

    def _merge(self, first: int, every: int, step: int, _: None) -> None:
        """Merge rows of each interval of `every` steps after `first` that ended before `step`."""
        with self._lock:
            rows: Rows = {}
            intervals: dict[int, Rows] = {}  # by their last step
            for row_step, row in self._rows.items():
                if row_step <= first:
                    rows[row_step] = row
                else:
                    end = -(-row_step // every) * every
                    intervals.setdefault(end, {})[row_step] = row
            for end, interval_rows in intervals.items():
                if end < step:
                    interval_rows = self._merge_interval(interval_rows)
                rows |= interval_rows
            self._rows = rows

    def _merge_interval(self, rows: Rows) -> Rows:
        """Return one row with the means of all, at the last step.

        The result of an evaluation stays at its own step.
        """
        last_steps = {name: step for step, row in rows.items() for name in row}
        end = max(rows)
        sums: dict[str, tuple[float, float]] = {}
        merged: Rows = {}
        for step, row in rows.items():
            merged[step] = {}
            for name, value in row.items():
                if name in self._evaluated and last_steps[name] == step:
                    merged[step][name] = value
            counts = self._counts.pop(step, {})
            for name, value in row.items():
                if name in counts:
                    count = counts[name]
                    total = value * count if count else 0.0  # not NaN · 0
                    sums = merge_sums(sums, {name: (total, count)})
                elif step == end:
                    merged[end].setdefault(name, value)
        self._counts[end] = {name: count for name, (_, count) in sums.items()}
        merged[end] = {name: _mean(*pair) for name, pair in sums.items()} | merged[end]
        return {step: row for step, row in merged.items() if row}

    def get_state(self) -> dict[str, Any]:
        """Return the sums of the unfinished row, and the rows that are not in the file."""
        self._carry()
        with self._lock:
            with contextlib.suppress(OSError):
                self._write()
            first = 0.0
            if self._path is not None:
                first = min(self._unwritten, next(reversed(self._rows), 0))
            rows = {step: row for step, row in self._rows.items() if step >= first}
            return {
                "at": self._reached,
                "last_row": self._last_row,
                "first": self._first,
                "evaluated": sorted(self._evaluated),
                "sums": {name: list(pair) for name, pair in self._sums.items()},
                "rows": _columns(rows),
                "counts": _columns(self._counts),
                "constants": sorted(self._constants()),
                "newest": self._newest_metrics(),
            }

    def set_state(self, value: Any) -> None:
        with self._lock:
            self._reached = value["at"]
            self._last_row = value["last_row"]
            self._first = value["first"]
            self._evaluated = set(value["evaluated"])
            self._sums = {name: (total, count) for name, (total, count) in value["sums"].items()}
            rows = _rows(value["rows"])
            if self._path is None:
                self._rows = {}
                self._counts = _rows(value["counts"])
            if self._sums:
                self._run.sums.has_ratios = True
            for step, row in rows.items():
                self._put(step, row)
            self._saved_constants = set(value["constants"])
            self._newest = value["newest"]
            self._set_interval(self._run.step)

    def _newest_metrics(self) -> Row:
        """Return the metrics of the current step, if they have no row yet.

        With means, the sums have them.
        """
        metrics = self._run.metrics
        if self._mean or self._last_row == self._run.step:
            return {}
        if metrics is None:
            return self._newest
        if trees.is_donated(metrics):
            # A hook or the body replaced the state, and donated an array that is also a metric.
            return {}
        return read_values(sorted_numbers(metrics, self._constants()))

    def flush(self) -> None:
        with self._lock, self._deferring_errors():
            self._write()
            if self._file is not None:
                self._file.sync()

    def close(self) -> None:
        if self._given_run is not None:
            with contextlib.suppress(Exception):  # a step that failed has no metrics
                self._carry()
        with self._lock:
            try:
                self._write()
            except OSError as error:
                # The run ends with it, or with another error that this one must not replace.
                logger.warning(
                    "%s; the rows from step %d on are only in memory", error, self._unwritten
                )
            file = self._file
            self._file = None
            if file is not None:
                file.close()
        super().close()

    def _write(self) -> None:
        with self._lock:
            if self._file is not None and self._unwritten < math.inf:
                self._file.put(self._rows, self._unwritten)
            self._unwritten = math.inf

    def _numbers(self, metrics: Metrics, leave_out: Collection[str]) -> PendingTransfer:
        return super()._numbers(metrics, {*leave_out, *self._constants()})

    def _constants(self) -> Collection[str]:
        """Return the names of the metrics that never change.

        A start that runs no step uses the names of an earlier one.
        """
        return self._run.components.constant_metrics().keys() or self._saved_constants

    def _means(self, leave_out: Collection[str]) -> PendingTransfer:
        interval = self._run.sums.take(self._number)
        step = self._last_row
        earlier_sums = self._sums
        self._sums = {}

        def means() -> Row:
            sums = _plus(earlier_sums, interval)
            if self._path is None:
                self._counts[step] = {_key(name): count for name, (_, count) in sums.items()}
            return {name: _mean(*sums[name]) for name in sort_metrics(sums, leave_out)}

        return PendingTransfer(interval.is_ready, means)

    def _carry(self) -> None:
        self._run.transfers.deliver_all()
        self._pull()
        self._sums = _plus(self._sums, self._run.sums.take(self._number))
        self._reached = self._run.step

    def _pull(self) -> None:
        for hook in self._run.evaluations:
            for step in self._new_steps(hook):
                self._pulled[hook.prefix] = step
                row: Row = {}
                for name, number in read_values(numbers_in(hook.results[step])).items():
                    row[f"{hook.prefix}/{name}"] = number
                self._evaluated |= row.keys()
                if not row.items() <= self._rows.get(step, {}).items():
                    # It is not a row of an earlier start, which has written it.
                    self._put(step, row)

    def _new_steps(self, hook: Any) -> list[int]:
        """Return the steps of an evaluation whose results have no row yet."""
        pulled = self._pulled.get(hook.prefix, -1)
        new: list[int] = []
        # From the newest backwards: a run may have thousands of results.
        for step in reversed(hook.results):
            if step <= pulled:
                break
            new.append(step)
        return new[::-1]

    def _put(self, step: int, values: Mapping[str, Any]) -> None:
        with self._lock:
            is_late = step < next(reversed(self._rows), 0) and step not in self._rows
            row = self._rows.setdefault(step, {})
            row |= {_key(name): float(value) for name, value in values.items()}
            if is_late:  # an evaluation older than the last row
                self._rows = dict(sorted(self._rows.items()))
            self._unwritten = min(self._unwritten, step)

    # Views of the rows.

    @property
    def names(self) -> list[str]:
        """The names of all metrics: loss, learning rates, then the others."""
        with self._lock:
            return list(dict.fromkeys(name for row in self._rows.values() for name in row))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A dict for each row, with its `step`."""
        with self._lock:
            return [{"step": step, **row} for step, row in self._rows.items()]

    def __len__(self) -> int:
        return len(self._rows)

    def __bool__(self) -> bool:
        return True  # also before its first row

    def __getitem__(self, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        with self._lock:
            pairs = [(step, row[name]) for step, row in self._rows.items() if name in row]
        if not pairs:
            raise KeyError(
                f"{name!r}: the history has {', '.join(map(repr, self.names)) or 'no rows'}"
            )
        return np.array([step for step, _ in pairs]), np.array([value for _, value in pairs], float)

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`, indexed by step.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(self.rows, columns=["step", *self.names]).set_index("step")

    def svg(self, *, style: bool = True) -> str:
        """The plots of all metrics, as HTML."""
        parts = list[str]()
        pictures: dict[str, list[str]] = {}
        for name in self.names:
            # Results of evaluations, such as `eval/loss`, are in the picture of their metric.
            metric = name.partition("/")[2]
            title = metric if metric in self.names else name
            pictures.setdefault(title, []).append(name)
        for title, names in pictures.items():
            names.sort(key=title.__ne__)  # the metric itself first
            curves = [Curve(name, *self[name], 0, i) for i, name in enumerate(names)]
            parts.append(picture(title, curves, style=style and not parts))
        return "".join(parts)

    def _repr_html_(self) -> str:
        rows = self.rows
        names = self.names
        title = f"History: {len(rows)} rows"
        if rows:
            title += f", steps {rows[0]['step']} to {rows[-1]['step']}"
        cells = []
        for row in rows[-_SHOWN:]:
            numbers = [f"{row[name]:.4g}" if name in row else "" for name in names]
            cells.append([str(row["step"]), *numbers])
        return html_table(title, cells, ("step", *names)) + self.svg()


register_format(
    History,
    StateFormat(
        1,
        {
            "at": 0,
            "last_row": 0,
            "first": 0,
            "evaluated": [],
            "sums": {},
            "rows": {"steps": [], "columns": {}},
            "counts": {"steps": [], "columns": {}},
            "constants": [],
            "newest": {},
        },
    ),
)


def check_paths(hooks: Sequence[object]) -> None:
    paths = Counter(
        os.path.realpath(hook._path) for hook in hooks if isinstance(hook, History) and hook._path
    )
    for path, count in paths.items():
        if count > 1:
            raise ValueError(
                f"hooks: {count} of them are a History with path={path!r}; give each its own path"
            )


def _key(name: str) -> str:
    """Return the key of a metric in a row, where `step` is the step."""
    return "step_" if name == "step" else name


# Sums.


def _plus(sums: Mapping[str, tuple[float, float]], interval: Any) -> dict[str, tuple[float, float]]:
    totals = interval.totals
    if totals is None:
        return {**sums}
    return merge_sums(sums, totals.sums)


def _mean(total: float, count: float) -> float:
    if not count:
        return math.nan
    if count == 1 or not math.isfinite(total):
        return total
    return float(f"{total / count:.{_DIGITS}g}")


# The state in a checkpoint: a column for each metric.


def _columns(rows: Rows) -> dict[str, Any]:
    """Return rows as columns: for each metric, the numbers of rows that have it, and its values."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns = {}
    for name in names:
        numbers = [i for i, row in enumerate(rows.values()) if name in row]
        values = [row[name] for row in rows.values() if name in row]
        columns[name] = {
            "rows": np.array(numbers, np.int64),
            "values": np.array(values, np.float64),
        }
    return {"steps": np.array(list(rows), np.int64), "columns": columns}


def _rows(saved: Any) -> Rows:
    steps = [int(step) for step in saved["steps"]]
    rows: Rows = {step: {} for step in steps}
    for name, column in saved["columns"].items():
        for number, value in zip(column["rows"], column["values"], strict=True):
            rows[steps[int(number)]][name] = float(value)
    return rows

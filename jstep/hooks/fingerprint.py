"""Fingerprints on the way."""

import contextlib
import logging
import os
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core import contexts
from jstep.core.checks import as_bool, as_int, one_of, shown
from jstep.distributed import agreement
from jstep.fingerprints import log as _log
from jstep.fingerprints.fingerprint import named_leaves, stacked
from jstep.hooks.hook import Metrics, RunInfo
from jstep.hooks.run_hook import RunHook
from jstep.state import TrainState
from jstep.stores import join, location

_logger = logging.getLogger("jstep")


class DivergenceError(RuntimeError):
    """A step was made again with other bits; `step` is its number, `leaves` the paths, None where they are unknown."""

    prevents_saving = True

    def __init__(self, message: str, step: int, leaves: tuple[str, ...] | None) -> None:
        super().__init__(message)
        self.step, self.leaves = step, leaves


class _Pending(NamedTuple):
    step: int
    paths: list[str]
    parts: list[tuple[list[int], Any]]

    def is_ready(self) -> bool:
        return all(part.is_ready() for _, part in self.parts if hasattr(part, "is_ready"))

    def words(self) -> np.ndarray[Any, Any]:
        found = np.zeros((len(self.paths), 2), np.uint32)
        with contexts.internal_transfers():
            for numbers, part in self.parts:
                found[numbers] = np.asarray(part)
        return found


class FingerprintHook(RunHook):
    """Keeps a log of the state's fingerprints, and notices where a restarted run makes other bits than before.

    A line every so many steps, `{"step": N, "state": hex, "leaves": {path: hex}}`, after the update that made step N.
    The device computes them in passing, for one read of the state; the loop does not wait, lines are written when
    the device has them, and all of them are on disk before each checkpoint and when the run ends. A line that was
    torn when a process was killed is cut off by the next run.

    Where a run goes on from a checkpoint and makes a step that the log has already, the bits should be the same, and
    are compared: other bits mean other batches, other code, another generator, or a chip that computes wrongly. The
    later line counts. `python -m jstep diff A B` compares two logs. What hooks change in the state at that step is in
    the line where they come before this one.

    Args:
        path: The log, a file or a URL; None for `fingerprints.jsonl` in the logdir of `train`.
        every_n_steps: How often, in steps: at their multiples.
        per_leaf: Whether lines have the fingerprint of each leaf, too.
        on_divergence: `"log"` warns, `"raise"` ends the run, on all processes at the same step and before a checkpoint
            of such a state is saved.

    Raises:
        DivergenceError: From `train`: a step was made again with other bits.
        ValueError: There is neither path nor logdir (before the first step).

    Example:
        >>> import jax.numpy as jnp, json, jstep, pathlib, tempfile
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "fingerprints.jsonl"
        >>> hook = jstep.FingerprintHook(path, every_n_steps=2, per_leaf=False)
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 4, last_step=4, hooks=[hook], progress=False)
        >>> [json.loads(line)["step"] for line in path.read_text().splitlines()]
        [2, 4]
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every_n_steps: int = 100,
        per_leaf: bool = True,
        on_divergence: str = "log",
    ) -> None:
        self._n = as_int(every_n_steps, "every_n_steps", 1, "a number of steps")
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"path={shown(path)}: must be the path of a log, got {type(path).__name__}")
        self._given = None if path is None else location(path, "path")
        self._per_leaf = as_bool(per_leaf, "per_leaf")
        self._raises = one_of(on_divergence, "on_divergence", ("log", "raise")) == "raise"
        self._logdir: str | None = None
        self._path = ""
        self._file: _log.Appender | None = None
        self._before: dict[int, _log.Entry] = {}
        self._pending: deque[_Pending] = deque()

    def use_run(self, run: RunInfo) -> None:
        """Takes the logdir of `train`, where the hook was made without a path."""
        super().use_run(run)
        logdir = getattr(run.writer, "logdir", None)
        self._logdir = None if logdir is None else os.fspath(logdir)

    def begin(self, state: TrainState) -> None:
        """Reads what earlier runs logged, and opens the log.

        Raises:
            ValueError: There is neither path nor logdir, or the path is a directory.
        """
        if self._given is None and self._logdir is None:
            raise ValueError("FingerprintHook has nowhere to write: give it a path, or give train a logdir")
        self._path = self._given or join(self._logdir or "", _log.NAME)
        if os.path.isdir(self._path):
            raise ValueError(f"path={self._path!r}: is a directory; name a file in it, such as {_log.NAME}")
        self._pending.clear()
        self._before = {}
        named_leaves(state)  # what cannot be named is said now, not in an hour
        if jax.process_index() == 0:
            self._before = _entries_of(self._path)
            self._file = _log.appender(self._path)
        if self._raises and not agreement.is_single_process():
            self._before = _broadcast(self._before)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, starts a fingerprint; writes those that the device has finished.

        Raises:
            DivergenceError: A step was made again with other bits.
        """
        if step % self._n:
            return
        before = self._pending[-1].step if self._pending else 0
        paths, leaves, keys = named_leaves(state)
        pending = _Pending(step, paths, stacked(leaves, keys))
        for _, part in pending.parts:
            if hasattr(part, "copy_to_host_async"):
                part.copy_to_host_async()
        self._pending.append(pending)
        # Where processes have to raise together, each looks at the same steps: those up to the last time.
        together = self._raises and not agreement.is_single_process()
        while self._pending and (self._pending[0].step <= before if together else self._pending[0].is_ready()):
            self._finish(self._pending.popleft())
        if self._file is not None:
            self._file.flush(to_disk=False)

    def before_save(self, step: int) -> None:
        """Puts all lines onto the disk.

        Raises:
            DivergenceError: A step was made again with other bits.
        """
        self._finish_all()

    def end(self, step: int, state: TrainState) -> None:
        """Puts all lines onto the disk.

        Raises:
            DivergenceError: A step was made again with other bits.
            OSError: The log cannot be written.
        """
        self._finish_all()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        """Writes what is left, also where the run ended by an error, and closes the log."""
        super().close()
        file, self._file = self._file, None
        if file is None:
            self._pending.clear()
            return
        # The device or the disk failed: the error under way is the one to see.
        try:
            with contextlib.closing(file):
                while self._pending:
                    file.append(self._entry(self._pending.popleft()))
        except Exception as error:
            _logger.warning("%s: the last fingerprints are lost: %s", self._path, error)
        finally:
            self._pending.clear()

    def next_due(self, step: int) -> int:
        """The next multiple."""
        return (step // self._n + 1) * self._n

    def _finish_all(self) -> None:
        try:
            while self._pending:
                self._finish(self._pending.popleft())
        finally:
            if self._file is not None:
                self._file.flush(to_disk=True)

    def _entry(self, pending: _Pending) -> _log.Entry:
        return _log.as_entry(pending.step, pending.paths, pending.words(), per_leaf=self._per_leaf)

    def _finish(self, pending: _Pending) -> None:
        if self._file is None and not self._raises:
            return  # process 0 alone writes and warns
        entry = self._entry(pending)
        if self._file is not None:
            self._file.append(entry)
        before = self._before.pop(entry.step, None)
        difference = None if before is None else _log.difference(before, entry)
        if before is None or difference is None:
            return
        message = (
            f"step {entry.step} was made again with other bits than {self._path} has of it ({before.state} then, "
            f"{entry.state} now): {difference.text()}. Look for other batches, code, seeds, versions or devices; "
            "jstep.replay takes a step again."
        )
        if self._raises:
            raise DivergenceError(message, entry.step, difference.leaves)
        _logger.warning("%s", message)


def _entries_of(path: str) -> dict[int, _log.Entry]:
    try:
        found = _log.read(path)
    except FileNotFoundError:
        return {}
    for problem in found.damaged:
        _logger.warning("%s: %s; it is passed over", path, problem)
    return dict(found.entries)


def _broadcast(entries: dict[int, _log.Entry]) -> dict[int, _log.Entry]:
    """What process 0 read, on all processes."""
    lines = agreement.broadcast_bytes("".join(entry.line() for entry in entries.values()).encode())
    return dict(_log.parsed(lines).entries)

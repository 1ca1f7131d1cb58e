"""Log fingerprints of the state during training."""

import contextlib
import logging
import os
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core.checks import as_bool, one_of, shown
from jstep.core.meshes import internal_transfers
from jstep.distributed import processes
from jstep.hooks.cadence import every
from jstep.hooks.hook import Metrics, RunInfo
from jstep.hooks.run_hook import RunHook
from jstep.state import fingerprint_log as _log
from jstep.state.fingerprints import named_leaves, stacked
from jstep.state.train_state import TrainState
from jstep.stores.files import LocalLines, ObjectLines, is_directory, open_lines
from jstep.stores.objects import join, location

_logger = logging.getLogger("jstep")


class DivergenceError(RuntimeError):
    """A repeated step produced different bits than before.

    Attributes:
        step: The step.
        leaves: The paths of the leaves that differ; None if not known.
    """

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
        with internal_transfers():
            for numbers, part in self.parts:
                found[numbers] = np.asarray(part)
        return found


class FingerprintHook(RunHook):
    """A hook that logs fingerprints of the state, and detects if a restarted run diverges from the earlier one.

    Each line, `{"step": N, "state": hex, "leaves": {path: hex}}`, describes the state after the update to step N. The
    device computes it at the cost of one read of the state, and the loop does not wait: lines are written when the
    values arrive, and all of them are on disk before each checkpoint and when the run ends. A line that is incomplete
    because the process was killed is removed by the next run.

    If a run resumes from a checkpoint and repeats a step that is in the log, the fingerprints are compared. They differ
    if the batches, the code or the random generator changed, or if a chip computes wrongly. The later line counts.
    `python -m jstep diff A B` compares two logs. Changes that hooks make to the state are included if these hooks come
    before this one.

    Args:
        path: The log, a file or a URL; for a directory (one that exists, or a path that ends with a slash),
            `fingerprints.jsonl` in it; None for the one in the logdir of `train`.
        every_n_steps: Interval in steps; due at its multiples.
        per_leaf: Whether lines include the fingerprint of each leaf.
        on_divergence: `"log"` warns; `"raise"` ends the run, on all processes at the same step and before a checkpoint
            of such a state is saved.

    Raises:
        DivergenceError: From `train`: a repeated step produced different bits.
        ValueError: There is neither path nor logdir (before the first step).

    Example:
        >>> import jax.numpy as jnp, json, jstep, pathlib, tempfile
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "fingerprints.jsonl"
        >>> hook = jstep.FingerprintHook(path, every_n_steps=2, per_leaf=False)
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 4, last_step=4, hooks=[hook])
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
        self.cadence = every("every_n_steps", every_n_steps)
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"path={shown(path)}: must be the path of a log, got {type(path).__name__}")
        self._given = None if path is None else location(path, "path")
        self._is_directory = path is not None and os.fspath(path).endswith("/")
        self._per_leaf = as_bool(per_leaf, "per_leaf")
        self._raises = one_of(on_divergence, "on_divergence", ("log", "raise")) == "raise"
        self._logdir: str | None = None
        self._path = ""
        self._file: LocalLines | ObjectLines | None = None
        self._before: dict[int, _log.Entry] = {}
        self._pending: deque[_Pending] = deque()

    def use_run(self, run: RunInfo) -> None:
        """Use the logdir of `train` if the hook has no path."""
        super().use_run(run)
        logdir = getattr(run.writer, "logdir", None)
        self._logdir = None if logdir is None else os.fspath(logdir)

    def begin(self, state: TrainState) -> None:
        """Read the lines of earlier runs, and open the log.

        Raises:
            ValueError: There is neither path nor logdir.
        """
        super().begin(state)
        if self._given is None and self._logdir is None:
            raise ValueError("FingerprintHook has nowhere to write: pass it a path, or pass logdir to train")
        self._path = self._given or self._logdir or ""
        if self._given is None or self._is_directory or is_directory(self._given):
            self._path = join(self._path, _log.NAME)
        self._pending.clear()
        self._before = {}
        named_leaves(state)  # raises now, not at the first fingerprint
        processes.on_all_processes(self._open, "the fingerprints cannot be opened")
        if self._raises and not processes.is_single_process():
            self._before = _broadcast(self._before)

    def _open(self) -> None:
        if jax.process_index() == 0:
            self._before = _entries_of(self._path)
            self._file = open_lines(self._path)

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Start a fingerprint; write those that the device has finished.

        Raises:
            DivergenceError: A repeated step produced different bits.
        """
        before = self._pending[-1].step if self._pending else 0
        paths, leaves, keys = named_leaves(state)
        pending = _Pending(step, paths, stacked(leaves, keys))
        for _, part in pending.parts:
            if hasattr(part, "copy_to_host_async"):
                part.copy_to_host_async()
        self._pending.append(pending)
        # If processes must raise together, each one finishes the same steps: those before the latest.
        together = self._raises and not processes.is_single_process()
        while self._pending and (self._pending[0].step <= before if together else self._pending[0].is_ready()):
            self._finish(self._pending.popleft())
        if self._file is not None:
            self._file.sync(to_disk=False)

    def before_save(self, step: int) -> None:
        """Write all lines to disk.

        Raises:
            DivergenceError: A repeated step produced different bits.
        """
        self._finish_all()

    def end(self, step: int, state: TrainState) -> None:
        """Write all lines to disk.

        Raises:
            DivergenceError: A repeated step produced different bits.
            OSError: The log cannot be written.
        """
        self._finish_all()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        """Write pending lines, also after an error, and close the log."""
        super().close()
        file, self._file = self._file, None
        if file is None:
            self._pending.clear()
            return
        # If the device or the disk fails here, do not hide the error that ended the run.
        try:
            with contextlib.closing(file):
                while self._pending:
                    file.write(self._entry(self._pending.popleft()).line().encode())
        except Exception as error:
            _logger.warning("%s: the last fingerprints are lost: %s", self._path, error)
        finally:
            self._pending.clear()

    def _finish_all(self) -> None:
        try:
            while self._pending:
                self._finish(self._pending.popleft())
        finally:
            if self._file is not None:
                self._file.sync(to_disk=True)

    def _entry(self, pending: _Pending) -> _log.Entry:
        return _log.as_entry(pending.step, pending.paths, pending.words(), per_leaf=self._per_leaf)

    def _finish(self, pending: _Pending) -> None:
        if self._file is None and not self._raises:
            return  # only process 0 writes and warns
        entry = self._entry(pending)
        if self._file is not None:
            self._file.write(entry.line().encode())
        before = self._before.pop(entry.step, None)
        difference = None if before is None else _log.difference(before, entry)
        if before is None or difference is None:
            return
        message = (
            f"step {entry.step} was run again with other bits than {self._path} has for it ({before.state} then, "
            f"{entry.state} now): {difference.text()}. Check batches, code, seeds, versions and devices; jstep.replay "
            "repeats a step."
        )
        if self._raises:
            raise DivergenceError(message, entry.step, difference.leaves)
        _logger.warning("%s", message)


def _entries_of(path: str) -> dict[int, _log.Entry]:
    try:
        found = _log.read(path)
    except FileNotFoundError:
        return {}
    for problem in found.corrupted:
        _logger.warning("%s: %s; it is skipped", path, problem)
    return dict(found.entries)


def _broadcast(entries: dict[int, _log.Entry]) -> dict[int, _log.Entry]:
    """Broadcast the entries that process 0 read to all processes."""
    lines = processes.broadcast_bytes("".join(entry.line() for entry in entries.values()).encode())
    return dict(_log.parsed(lines).entries)

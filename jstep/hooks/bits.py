"""Hooks that check a run bitwise: fingerprints, logged and compared with an earlier log, and updates computed twice."""

import contextlib
import functools
import logging
import os
from typing import Any

import jax
import numpy as np

from jstep.core.annotations import Tree
from jstep.core.checks import as_bool, as_int, check_choice, format_list
from jstep.core.exceptions import WrongStateError, note
from jstep.core.meshes import internal_transfers
from jstep.core.trees import is_array
from jstep.distributed import processes
from jstep.hooks import fingerprint_log
from jstep.hooks.fingerprint_log import Difference, Entry
from jstep.hooks.run_hook import Repeated, RunChunk, RunHook
from jstep.metering.cadence import make_cadence
from jstep.metering.numbers import TransferQueue, start_transfer
from jstep.state.fingerprints import ByDevice, by_device, leaves_with_hash_keys
from jstep.state.train_state import TrainState
from jstep.stores.files import is_directory
from jstep.stores.growing_files import ObjectAppender
from jstep.stores.line_files import LocalLines, open_lines
from jstep.stores.urls import join_path, location
from jstep.training.metrics import Metrics

_logger = logging.getLogger("jstep")

# Log fingerprints of the state during training.


class _OtherBitsError(WrongStateError, RuntimeError):
    def __init__(self, message: str, step: int = 0, leaves: tuple[str, ...] | None = None) -> None:
        super().__init__(message)  # with which it is unpickled
        self.step, self.leaves = step, leaves


class DivergenceError(_OtherBitsError):
    """A repeated step produced different bits than before.

    Attributes:
        step: The step N of the update N − 1 → N.
        leaves: The paths of the leaves that differ; None if not known.
    """


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
        every_n_steps: Interval in steps; due at its multiples.
        path: The log, a file or a URL; for a directory (one that exists, or a path that ends with a slash),
            `fingerprints.jsonl` in it; None for the one in the logdir of `train`.
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
        >>> hook = jstep.FingerprintHook(2, path, per_leaf=False)
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 4, last_step=4, hooks=[hook])
        >>> [json.loads(line)["step"] for line in path.read_text().splitlines()]
        [2, 4]
    """

    instead = "call jstep.fingerprint(state)"

    def __init__(
        self,
        every_n_steps: int = 100,
        path: str | os.PathLike[str] | None = None,
        per_leaf: bool = True,
        on_divergence: str = "log",
    ) -> None:
        self.cadence = make_cadence(steps=("every_n_steps", every_n_steps))
        self._given = None if path is None else location(path, "path")
        self._is_directory = path is not None and os.fspath(path).endswith("/")
        self._per_leaf = as_bool(per_leaf, "per_leaf")
        self._raises = check_choice(on_divergence, "on_divergence", ("log", "raise")) == "raise"
        self._path = ""
        self._file: LocalLines | ObjectAppender | None = None
        self._before: dict[int, Entry] = {}
        self._pending = TransferQueue()

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        self._path = self._given or os.fspath(getattr(self.run.reports.writer, "logdir", ""))
        if not self._path:
            raise ValueError("FingerprintHook has nowhere to write: pass it a path, or pass logdir to train")
        if self._given is None or self._is_directory or is_directory(self._given):
            self._path = join_path(self._path, fingerprint_log.FINGERPRINTS_FILE)
        self._pending, self._before = TransferQueue(), {}
        leaves_with_hash_keys(state)  # raises now, not at the first fingerprint
        processes.on_all_processes(self._open, "the fingerprints cannot be opened")
        if self._raises and not processes.is_single_process():
            self._before = _broadcast(self._before)

    def _open(self) -> None:
        if jax.process_index() == 0:
            self._before = _entries_of(self._path)
            self._file = open_lines(self._path, b'{"step": ', fingerprint_log.is_line)

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        result = by_device(state)
        entry = functools.partial(fingerprint_log.make_entry, step, result, self._per_leaf)
        self._pending.add(step, start_transfer([part for _, part in result.parts], entry), self._finish, self)
        # If processes must raise together, each one finishes the same steps: those before the latest.
        if self._raises and not processes.is_single_process():
            self._pending.deliver_all(before=step)
        else:
            self._pending.deliver_ready()

    def before_save(self, step: int) -> None:
        self._finish_all()

    def end(self, step: int, state: TrainState) -> None:
        self._finish_all()
        file, self._file = self._file, None
        if file is not None:
            with self.deferring_errors(self._path):
                file.close()

    def close(self) -> None:
        super().close()
        file, pending = self._file, self._pending
        self._pending, self._before = TransferQueue(), {}  # nothing is compared any more
        if file is None:
            return
        # If the device or the disk fails here, do not hide the error that ended the run.
        try:
            with contextlib.closing(file):
                pending.deliver_all()
        except Exception as error:
            _logger.warning("%s: the last fingerprints are lost: %s", self._path, error)
        finally:
            self._file = None

    def _finish_all(self) -> None:
        try:
            self._pending.deliver_all()
        finally:
            if self._file is not None:
                with self.deferring_errors(self._path):
                    self._file.sync()

    def _finish(self, step: int, entry: Entry) -> None:
        if self._file is not None:
            with self.deferring_errors(self._path):
                self._file.write(entry.line().encode())
        before = self._before.pop(step, None)
        difference = None if before is None else fingerprint_log.compare_logs(before, entry)
        if before is None or difference is None:
            return
        message = (
            f"step {step} was repeated with a different result than the one logged in {self._path} ({before.state} "
            f"before, {entry.state} now): {difference.text()}. Check batches, code, seeds, versions and devices."
        )
        if self._raises:
            raise DivergenceError(message, step, difference.leaves)
        _logger.warning("%s", message)


def _entries_of(path: str) -> dict[int, Entry]:
    try:
        log = fingerprint_log.read_log(path)
    except FileNotFoundError:
        return {}
    if log.corrupted:
        _logger.warning("%s: skipped: %s", path, format_list(log.corrupted, 5, "; "))
    return dict(log.entries)


def _broadcast(entries: dict[int, Entry]) -> dict[int, Entry]:
    lines = processes.broadcast_bytes("".join(entry.line() for entry in entries.values()).encode())
    return dict(fingerprint_log.parse_log(lines).entries)


# Compute some updates twice, and compare the results bitwise.


class AuditHook(RunHook):
    """A hook that detects silent data corruption by computing some updates twice, from the same state and batch.

    The fingerprints of the two resulting states must be equal. A difference means either silent data corruption (a
    device computes wrongly without an error) or a program that is not deterministic. The error names the leaves, and
    the devices if only some of them differ (every device's copy of a replicated array is compared). The second result
    and its metrics are dropped.

    The update N → N + 1 is audited if N is a multiple of `every_n_steps`, including 0. With `steps_per_call`, the whole
    call that contains step N is repeated. The loop waits for the device at these steps, so that no wrong state is
    passed to a hook or saved; other steps cost nothing. An audited step takes twice the time, and memory for a second
    state. Host callbacks run twice in it. A step that is a plain Python function is called twice, with copies of its
    arrays; its random numbers must be a function of the step.

    Args:
        every_n_steps: Interval in steps; due at its multiples.
        on_mismatch: `"raise"` ends the run, on all processes together, without saving; `"log"` warns and continues
            with the first result.

    Raises:
        AuditError: From `train`: two results differ.
        TypeError: A leaf of the state is not an array (before the first step; names its path).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> hooks = [jstep.AuditHook(every_n_steps=2)]
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 4, last_step=4, hooks=hooks)

    Source: Hochschild et al., "Cores that don't count" (HotOS 2021).
    """

    instead = "compare jstep.fingerprint(state) of two calls of the step"

    def __init__(self, every_n_steps: int = 1000, on_mismatch: str = "raise") -> None:
        self._n = as_int(every_n_steps, "every_n_steps", 1, "a number of steps")
        self._raises = check_choice(on_mismatch, "on_mismatch", ("log", "raise")) == "raise"

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        leaves_with_hash_keys(state)

    def around_chunks(self, run_chunk: RunChunk, repeated: Repeated) -> RunChunk:
        return functools.partial(self.audit_chunk, run_chunk, repeated)

    def steps_between(self, start: int, last_step: int) -> range:
        """The steps N from `start` to `last_step` whose update N → N + 1 is audited."""
        return range(-(-start // self._n) * self._n, last_step, self._n)

    def audit_chunk(self, run_chunk: RunChunk, repeated: Repeated, state: Tree, chunk: Any) -> Any:
        if -chunk.first % self._n >= chunk.steps:
            return run_chunk(state, chunk)
        repeat = repeated(chunk)
        with self.run.watch.part(self.part):
            state_copy, args = _preserved(repeat, state, chunk.args)
        result = run_chunk(state, chunk)
        del state  # usually donated
        jax.block_until_ready(result[0])  # the time so far counts as the step's
        with self.run.watch.part(self.part):
            first = by_device(result[0])
            try:
                second = by_device(repeat(state_copy, *args)[0])
            except Exception as error:
                note(error, f"jstep: raised while AuditHook computed step {chunk.first} a second time")
                raise
            del state_copy
            leaves, devices = _differences(first, second)
        if leaves:
            finding = _audit_error(chunk.first, chunk.steps, leaves, devices)
            if self._raises:
                raise finding
            if jax.process_index() == 0:
                _logger.warning("%s The run continues with the first result.", finding)
        return result


def _preserved(step: object, state: Tree, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The state and arguments for the second computation, copied if the first may donate or change them."""
    if not hasattr(step, "donate"):
        return _copied((state, args))  # a plain function may modify or donate its arguments
    return (_copied(state) if step.donate else state), args


def _copied(tree: Tree) -> Any:
    """Copy all arrays, with shardings that need no other compilation."""
    with internal_transfers():
        return jax.tree.map(_copy, tree)


def _copy(leaf: Any) -> Any:
    if not is_array(leaf):
        return leaf
    copied = leaf.copy()
    # A copy has an equivalent but unequal PartitionSpec, for which the step would be traced again. This moves no data.
    is_on_mesh = isinstance(leaf, jax.Array) and isinstance(leaf.sharding, jax.sharding.NamedSharding)
    return jax.device_put(copied, leaf.sharding) if is_on_mesh else copied


_SHOWN = 8
_SAME, _DIFFERS = 1, 2


class AuditError(_OtherBitsError):
    """An update was computed twice with different results.

    Attributes:
        step: The step N of the update N − 1 → N, or of the first update of the call, if a call takes several.
        leaves: The paths of the state's leaves that differ.
    """


def _audit_error(step: int, steps: int, leaves: tuple[str, ...], devices: tuple[str, ...]) -> AuditError:
    where = ", ".join(devices[:_SHOWN]) + (", …" if len(devices) > _SHOWN else "")
    what = Difference(step, leaves).text() + (f" (on {where} alone)" if where else "")
    update = f"update {step} → {step + 1} was" if steps == 1 else f"updates {step} → {step + steps} were"
    return AuditError(
        f"the {update} computed twice, and the results differ: {what}. A device computes wrongly: resume on other "
        "devices; or the program is not deterministic, as on GPUs without XLA_FLAGS=--xla_gpu_deterministic_ops=true.",
        step + 1,
        leaves,
    )


def _differences(first: ByDevice, second: ByDevice) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The leaves of a state that differ, and the devices, if not all of them; on all processes alike, after a wait."""
    if first.paths != second.paths:
        raise TypeError("train_step: returned a state of other leaves when AuditHook repeated it; must be the same")
    devices = jax.devices()
    marks = processes.max_over_processes(_marks(first, second, devices))
    differ, of_devices = marks[: len(first.paths)], marks[len(first.paths) :]
    leaves = tuple(path for path, mark in zip(first.paths, differ, strict=True) if mark)
    all_do = (of_devices[of_devices > 0] == _DIFFERS).all()
    return leaves, () if all_do else tuple(str(devices[i]) for i in np.flatnonzero(of_devices == _DIFFERS))


def _marks(first: ByDevice, second: ByDevice, devices: list[Any]) -> np.ndarray[Any, Any]:
    """For each leaf, whether it differs; for each device, `_SAME`, `_DIFFERS`, or 0 on another process."""
    leaves, number = len(first.paths), {device: i for i, device in enumerate(devices)}
    marks = np.zeros(leaves + len(devices), np.int32)
    a, b = first.words(), second.words()
    for device in {**a, **b}:
        differ = np.any(a[device] != b[device], axis=1) if device in a and device in b else np.ones(leaves, bool)
        marks[:leaves] |= differ
        if device in number:
            marks[leaves + number[device]] = _DIFFERS if differ.any() else _SAME
    return marks

"""Fingerprints of the state by step: the hook that logs and compares them; its logs, JSON lines.

A line is `{"step": N, "state": hex, "leaves": {path: hex}}`.
"""

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jstep.array_store.claims import FileClaim, claim_file
from jstep.core import processes, trees
from jstep.core.checks import as_bool, as_choice, format_list, format_value
from jstep.core.exceptions import WrongStateError
from jstep.core.logs import logger
from jstep.core.tables import printable
from jstep.hooks.cadence import make_cadence
from jstep.hooks.run_hook import RunHook
from jstep.metering.numbers import TransferQueue, start_transfer
from jstep.state.fingerprints import (
    Fingerprints,
    LeafFingerprints,
    all_as_hexadecimal,
    as_hexadecimal,
    stacked_words,
)
from jstep.state.train_state import TrainState
from jstep.stores.files import is_directory
from jstep.stores.growing_files import (
    TAIL,
    LineFile,
    LineObject,
    append_to,
    read_log_files,
    read_tail,
)
from jstep.stores.untrusted import is_step
from jstep.stores.urls import is_url, join_path, location
from jstep.summary.run_writer import writer_of
from jstep.training.metrics import Metrics

# Logs.

FINGERPRINTS_FILE = "fingerprints.jsonl"
_HEX = re.compile("[0-9a-f]{16}")
_STEP = re.compile(rb'\{"step": ([0-9]{1,18}),')


class Entry(NamedTuple):
    step: int
    state: str
    leaves: Mapping[str, str] | None = None

    def line(self) -> str:
        record: dict[str, Any] = {"step": self.step, "state": self.state}
        if self.leaves is not None:
            record["leaves"] = dict(self.leaves)
        return json.dumps(record, allow_nan=False) + "\n"


class Log(NamedTuple):
    """The lines of a log.

    Attributes:
        path: The path of the log, for errors.
        entries: Step → its last line.
        corrupted: Descriptions of the other lines.
    """

    path: str
    entries: dict[int, Entry]
    corrupted: list[str]

    def add(self, lines: Iterable[bytes], where: str, first: int = 0) -> None:
        """Add the lines of the steps from `first` on; errors that name a line end with `where`."""
        for number, raw in enumerate(lines, 1):
            # Skipped before it is decoded: a line has a fingerprint of each leaf, and a restart
            # needs only the last lines.
            match = _STEP.match(raw)
            if match is not None and int(match[1]) < first:
                continue
            entry = parse_line(raw)
            if entry is not None:
                self.entries[entry.step] = entry
                continue
            version = _later_version(raw)
            if version is not None:
                raise ValueError(
                    f"path={self.path!r}: must have lines of version 1, got version "
                    f"{version} in line {number}{where}, which a later jstep wrote; "
                    "install that one, or give another path"
                )
            if raw.strip(b"\0\r\n ") and raw.endswith(b"\n"):
                # The last line may be an interrupted write.
                text = format_value(raw.decode(errors="replace").strip(), 60)
                self.corrupted.append(f"line {number}{where} is not a fingerprint: {text}")


def read_log(path: str) -> Log:
    log = Log(path, {}, [])
    for part, lines in read_log_files(path):
        log.add(lines, "" if part == path else f" of {part}")
    return log


def read_later(path: str, step: int) -> Log:
    """Return the entries after a step that are in the last part of a log."""
    log = Log(path, {}, [])
    for tail in read_tail(path):
        part = "" if tail.part == path else f" of {tail.part}"
        where = part if tail.is_whole else f"{part} from its last {TAIL} bytes on"
        log.add(tail.lines, where, first=step + 1)
    return log


def parse_lines(data: bytes) -> dict[int, Entry]:
    log = Log("", {}, [])
    log.add(data.splitlines(keepends=True), "")
    return log.entries


def _later_version(raw: bytes) -> str | None:
    """Return the version of a line that a later jstep wrote.

    It is None for lines of this version, which do not have it.
    """
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(raw)
        if isinstance(record, dict) and "version" in record:
            return format_value(record["version"], 20)
    return None


_KEYS = frozenset({"step", "state", "leaves", "notes"})


def parse_line(raw: bytes) -> Entry | None:
    try:
        record = json.loads(raw)
        if not record.keys() <= _KEYS:
            return None
        step = record["step"]
        state = record["state"]
        leaves = record.get("leaves")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not is_step(step) or not isinstance(leaves, dict | None):
        return None
    for text in (state, *(leaves or {}).values()):
        if not isinstance(text, str) or not _HEX.fullmatch(text):
            return None
    return Entry(step, state, leaves)


def is_line(raw: bytes) -> bool:
    return parse_line(raw) is not None


def make_entry(step: int, fingerprints: Fingerprints, per_leaf: bool) -> Entry:
    words = stacked_words(fingerprints.groups)
    leaves = None
    if per_leaf:
        leaves = dict(zip(fingerprints.paths, all_as_hexadecimal(words), strict=True))
    return Entry(step, as_hexadecimal(np.sum(words, axis=0, dtype=np.uint32)), leaves)


class Difference(NamedTuple):
    """The paths that differ between two entries; `leaves` is None if a log has none."""

    step: int
    leaves: tuple[str, ...] | None
    first_only: tuple[str, ...] = ()
    second_only: tuple[str, ...] = ()

    def text(self) -> str:
        if self.leaves is None:
            return "which leaves differ is not known (a log without leaves)"
        other = len(self.first_only) + len(self.second_only)
        model = ""
        if other:
            model = f"; {other} of them in only one of the two: fingerprints of another model"
        differ = "leaf differs" if len(self.leaves) == 1 else "leaves differ"
        leaves = format_list(list(map(printable, self.leaves)), 8)
        return f"{len(self.leaves)} {differ}: {leaves}{model}"


def compare_logs(first: Entry, second: Entry) -> Difference | None:
    if first.state == second.state:
        return None
    if first.leaves is None or second.leaves is None:
        return Difference(first.step, None)
    a = first.leaves
    b = second.leaves
    leaves = tuple(path for path in dict.fromkeys([*a, *b]) if a.get(path) != b.get(path))
    return Difference(
        first.step,
        leaves,
        first_only=tuple(trees.only_in(a, b)),
        second_only=tuple(trees.only_in(b, a)),
    )


# The hook.


class DivergenceError(WrongStateError, RuntimeError):
    """A repeated step is not bitwise identical to the earlier one.

    Attributes:
        step: The step N of the update N − 1 → N.
        leaves: The paths of the leaves that differ; None if unknown.
    """

    def __init__(self, message: str, step: int = 0, leaves: tuple[str, ...] | None = None) -> None:
        super().__init__(message)  # pickle calls it with the message alone
        self.step = step
        self.leaves = leaves


class FingerprintHook(RunHook):
    """A hook that logs fingerprints of the state.

    It detects if a restarted run diverges from the earlier one.

    Each line, `{"step": N, "state": hex, "leaves": {path: hex}}`, describes the state after the
    update to step N, and costs one read of the state on the device. A file above 2 GiB, in a bucket
    an object above 8 MiB, is kept as `PATH.1`, `PATH.2`, …, and the log continues.

    If a run repeats a step that is in the last 64 MiB of the log, the fingerprints are compared;
    the later line counts. `jstep diff A B` compares two logs. Changes by hooks that come before
    this one are included.

    Args:
        every_n_steps: Interval in steps; due at its multiples.
        path: The log, a file or a URL; for a directory, `fingerprints.jsonl` in it; None for the
            one in the logdir of `train`.
        per_leaf: Whether lines include the fingerprint of each leaf.
        on_divergence: `"log"` warns; `"raise"` ends the run, on all processes at the same step and
            before a checkpoint of such a state is saved.

    Raises:
        DivergenceError: From `train`, with `"raise"`.
        ValueError: There is neither path nor logdir (before the first step).

    Example:
        >>> import jax.numpy as jnp, json, jstep, pathlib, tempfile
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "fingerprints.jsonl"
        >>> hook = jstep.FingerprintHook(every_n_steps=2, path=path, per_leaf=False)
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 4, last_step=4, hooks=[hook])
        >>> [json.loads(line)["step"] for line in path.read_text().splitlines()]
        [2, 4]
    """

    _instead = "call jstep.fingerprint(state)"

    def __init__(
        self,
        *,
        every_n_steps: int = 100,
        path: str | os.PathLike[str] | None = None,
        per_leaf: bool = True,
        on_divergence: str = "log",
    ) -> None:
        self._cadence = make_cadence(steps=("every_n_steps", every_n_steps))
        self._given = None if path is None else location(path, "path")
        self._is_directory = path is not None and os.fspath(path).endswith("/")
        self._per_leaf = as_bool(per_leaf, "per_leaf")
        self._raises = as_choice(on_divergence, "on_divergence", ("log", "raise")) == "raise"
        self._path = ""
        self._file: LineFile | LineObject | None = None
        self._claim: FileClaim | None = None
        # Step → its entry by an earlier start, until it is compared. Only the first process has
        # them, unless all processes have to raise.
        self._logged: dict[int, Entry] = {}
        self._pending = TransferQueue()

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        self._path = self._given or os.fspath(getattr(writer_of(self._run), "logdir", ""))
        if not self._path:
            raise ValueError(
                "FingerprintHook has nowhere to write: pass it a path, or pass logdir to train"
            )
        if self._given is None or self._is_directory or is_directory(self._given):
            self._path = join_path(self._path, FINGERPRINTS_FILE)
        self._pending = TransferQueue()
        self._logged = {}
        self._fingerprints = LeafFingerprints(state)  # raises now, not at the first fingerprint
        processes.share_errors(self._open, "the fingerprints cannot be opened")
        if self._raises and not processes.is_single_process():
            text = "".join(entry.line() for entry in self._logged.values())
            self._logged = parse_lines(processes.broadcast_bytes(text.encode()))

    def _open(self) -> None:
        if not processes.is_process_0():
            return
        self._run.check_no_links(self._path)
        self._claim = None if is_url(self._path) else claim_file(self._path)
        log = read_later(self._path, self._run.step)
        if log.corrupted:
            logger.warning("%s: skipped: %s", self._path, format_list(log.corrupted, 5, "; "))
        self._logged = log.entries
        self._file = append_to(self._path, is_line)

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        result = self._fingerprints.start(state)
        entry = functools.partial(make_entry, step, result, self._per_leaf)
        transfer = start_transfer([words for _, words in result.groups], entry)
        self._pending.add(step, transfer, self._finish, self)
        # If processes must raise together, each one finishes the same steps: those before the
        # latest.
        if self._raises and not processes.is_single_process():
            self._pending.deliver_all(stop=step)
        else:
            self._pending.deliver_ready()

    def before_save(self, step: int) -> None:
        self._finish_all()

    def end(self, step: int, state: TrainState) -> None:
        self._finish_all()
        file = self._file
        self._file = None
        if file is not None:
            with self._deferring_errors(self._path):
                file.close()

    def close(self) -> None:
        super().close()
        file = self._file
        pending = self._pending
        claim = self._claim
        self._claim = None
        self._pending = TransferQueue()
        self._logged = {}  # the last fingerprints are only written, not compared
        # If the device or the disk fails here, do not hide the error that ended the run.
        try:
            if file is not None:
                with contextlib.closing(file):
                    pending.deliver_all()
        except Exception as error:
            logger.warning("%s: the last fingerprints are lost: %s", self._path, error)
        finally:
            self._file = None
            if claim is not None:
                claim.release()

    def _finish_all(self) -> None:
        try:
            self._pending.deliver_all()
        finally:
            if self._file is not None:
                with self._deferring_errors(self._path):
                    self._file.sync()

    def _finish(self, step: int, entry: Entry) -> None:
        if self._file is not None:
            with self._deferring_errors(self._path):
                self._file.write(entry.line().encode())
        logged = self._logged.pop(step, None)
        if logged is None:
            return
        difference = compare_logs(logged, entry)
        if difference is None:
            return
        message = (
            f"step {step} was repeated with a different result than the one logged in {self._path} "
            f"({logged.state} before, {entry.state} now): {difference.text()}. Check batches, "
            "code, seeds, versions and devices."
        )
        if self._raises:
            raise DivergenceError(message, step, difference.leaves)
        logger.warning("%s", message)

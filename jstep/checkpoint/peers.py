"""The processes of one save: each writes a part, and the first one publishes the checkpoint.

    1. Each process but the first writes an empty file below `parts/` once it has written its part.
    2. The first process polls for these files, listing `parts/` once each time.
    3. The others wait until the checkpoint exists.

A process that fails posts its error at JAX's coordination service, which all that wait poll. It
does not write the error below `parts/`, because often it fails when it cannot write there. Only
without the service, it does, and the first process reports the error to the others.

With one process, none of this happens.
"""

import time
from collections.abc import Iterator, Sequence

from jstep.array_store.attempts import PARTS, Attempt
from jstep.array_store.manifest import CheckpointError
from jstep.array_store.part_watch import PATIENCE_SECS, PartWatch, patience_secs
from jstep.core import processes
from jstep.core.checks import format_list
from jstep.core.logs import logger
from jstep.core.tables import printable

OUTCOME_SECS = 1800.0
"""Seconds without a heartbeat after which the others give up, once the first process has written
its part."""
_HEARTBEAT_SECS = 30.0
"""Seconds between two heartbeats of the first process, while it waits for parts that grow."""
_FAILED = ".failed"
"""The end of the name of a file with a process's error, which it writes for the first process if
there is no service."""
# What the first process writes at its report key, in this order. Anything else is its error.
_BEGUN = b""
"""It writes its part."""
_HEARTBEAT = b"waiting "
"""It waits for the parts of others. The number of the heartbeat follows."""
_SAVED = b"saved"
"""The checkpoint exists."""


def _failure_key(attempt_id: int) -> str:
    return f"jstep/failed_saves/{attempt_id}"


def post_failure(attempt_id: int, process: int, error: BaseException) -> bool:
    """Post the error of a process; return whether JAX's service has this or another one."""
    return processes.post(_failure_key(attempt_id), f"process {process}: {_failure_text(error)}")


def _failure_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


class Peers:
    """The processes of one save, as one of them sees the others.

    Args:
        attempt_id: The ID of the save, the same on all processes.
        nbytes: The bytes of all arrays, by all processes.
        own_bytes: Of these, what this process writes.

    Attributes:
        index: The index of this process.
        is_first: Whether it is the one that publishes the checkpoint.
        part_keys: The keys below which the processes write their parts.
        part_key: That of this process: the attempt itself, if there is no other.
        own_secs: How long this process has taken to write its part.
    """

    def __init__(
        self, attempt: Attempt, attempt_id: int, index: int, count: int, nbytes: int, own_bytes: int
    ) -> None:
        self._attempt = attempt
        self._id = attempt_id
        self.index = index
        self.count = count
        self.is_first = index == 0
        self.part_keys = [process_key(process) for process in range(count)]
        self.part_key = "" if count == 1 else self.part_keys[index]
        self._own_bytes = own_bytes
        # The parts of other processes are not known: a replicated array is in one of them.
        self._average_bytes = nbytes / count
        self.own_secs = 0.0
        self._heartbeats = 0

    def _report_key(self, process: int) -> str:
        """Return the key of a process's report.

        It reports that the process has written its part; the first process reports the outcome.
        """
        return f"{PARTS}{self._id}.{process}"

    def begin(self) -> None:
        """Report that a save begins; called on process 0 before anything is written."""
        self._report_outcome(_BEGUN)

    def report_part(self) -> None:
        """Report to the first process that this one has written its part."""
        self._attempt.storage.write_atomically(self._report_key(self.index), b"")

    def report_saved(self) -> None:
        """Report to the others that the checkpoint exists; called on the first process."""
        if self._attempt.may_report_saved:
            self._report_outcome(_SAVED)

    def _report_outcome(self, outcome: bytes) -> None:
        if self.count > 1:
            self._attempt.storage.write_atomically(self._report_key(0), outcome)

    def report_failure(self, error: BaseException) -> None:
        """Report to the others why this process has failed, if that is possible."""
        if self.count == 1 or post_failure(self._id, self.index, error):
            return
        storage = self._attempt.storage
        data = _failure_text(error).encode(errors="replace")
        try:
            if self.index:
                storage.write_atomically(f"{self._report_key(self.index)}{_FAILED}", data)
            else:
                self._report_outcome(data)
        except OSError as problem:
            logger.warning(
                "the failure of %s was not reported to other processes: %s",
                storage.path(""),
                problem,
            )

    def _check_none_failed(self) -> None:
        """Raise the error that a process has posted."""
        failure = processes.posted(_failure_key(self._id))
        if failure is not None:
            raise CheckpointError(failure)

    def _watch(self, watched: Sequence[int]) -> PartWatch:
        def progress(remaining: Sequence[int]) -> Sequence[int]:
            keys = [self.part_keys[process] for process in remaining]
            return self._attempt.storage.progress(keys)

        patience = patience_secs(self._average_bytes, self._own_bytes, self.own_secs)
        return PartWatch(progress, watched, patience, time.monotonic())

    def wait_for_parts(self) -> None:
        """On the first process, wait until all others have written; one that hangs is an error."""
        watch = self._watch(range(1, self.count))
        warned_of: set[int] = set()
        self._write_heartbeat()
        heartbeat_at = time.monotonic()
        for pause in _pauses():
            self._check_none_failed()
            self._drop_finished(watch)
            if not watch.processes:
                return
            instant = time.monotonic()
            watch.poll(instant)
            self._check_not_stuck(watch, instant)
            self._warn_of_quiet(watch, instant, warned_of)
            if instant - heartbeat_at > _HEARTBEAT_SECS:
                self._write_heartbeat()
                heartbeat_at = instant
            time.sleep(pause)

    def _drop_finished(self, watch: PartWatch) -> None:
        """Forget the processes that have written; raise the error of one that has failed."""
        names = set(self._attempt.storage.names(PARTS))
        for process in watch.processes:
            if f"{self._id}.{process}{_FAILED}" in names:
                text = self._attempt.storage.read(f"{self._report_key(process)}{_FAILED}") or b""
                raise CheckpointError(
                    f"process {process}: {printable(text.decode(errors='replace'))}"
                )
            if f"{self._id}.{process}" in names:
                watch.forget(process)

    def _check_not_stuck(self, watch: PartWatch, instant: float) -> None:
        stuck = watch.stuck(instant)
        if not stuck:
            return
        stuck_secs = max(watch.quiet_secs(process, instant) for process in stuck)
        is_first_alone = len(watch.processes) == self.count - 1
        finished = "process 0 has" if is_first_alone else "others have"
        raise CheckpointError(
            f"{_processes_text(stuck)}: written nothing for {stuck_secs:.0f} s, while {finished} "
            "finished: its write hangs"
        )

    def _warn_of_quiet(self, watch: PartWatch, instant: float, warned_of: set[int]) -> None:
        """Warn of each process that may hang, unless it is in `warned_of`, and add it there."""
        quiet = []
        for process in watch.processes:
            if process not in warned_of and watch.quiet_secs(process, instant) > PATIENCE_SECS:
                quiet.append(process)
        if not quiet:
            return
        warned_of.update(quiet)
        logger.warning(
            "%s: %s has written nothing for %.0f s, and has %.0f s more: its storage is "
            "slow, or its write hangs",
            self._attempt.storage.path(""),
            _processes_text(quiet),
            PATIENCE_SECS,
            watch.left_secs(quiet[0], instant),
        )

    def _write_heartbeat(self) -> None:
        """Report to the others that the first process lives, and has written its part."""
        self._heartbeats += 1
        self._attempt.storage.write_atomically(
            self._report_key(0), _HEARTBEAT + str(self._heartbeats).encode()
        )

    def wait_for_outcome(self) -> None:
        """On the other processes, wait until the checkpoint exists, or the first one has failed.

        The report of the first process is None before it has begun. In a directory it is None again
        after the end, when the directory has its final name, or was removed. Otherwise it is one of
        the constants above, or an error.
        """
        watch = self._watch([0])
        latest: bytes | None = None
        latest_at = time.monotonic()
        for pause in _pauses():
            self._check_none_failed()
            outcome = self._attempt.storage.read(self._report_key(0))
            if outcome == _SAVED:
                return
            if outcome is None:
                if self._attempt.is_published(self._report_key(self.index)):
                    return
                if latest is not None:
                    raise CheckpointError(
                        f"{self._attempt.storage.path('')}: process 0 has removed it; see its error"
                    )
            elif outcome and not outcome.startswith(_HEARTBEAT):
                raise CheckpointError(f"process 0: {printable(outcome.decode(errors='replace'))}")
            # The first process has not begun, writes, or waits for the parts of others.
            instant = time.monotonic()
            if outcome != latest:
                latest = outcome
                latest_at = instant
            if not outcome:
                # It has not written its part. This process has, and knows how long that takes.
                watch.poll(instant)
                if watch.stuck(instant):
                    raise CheckpointError(
                        f"process 0: written nothing for {watch.quiet_secs(0, instant):.0f} s: "
                        "its write hangs"
                    )
            elif instant - latest_at > OUTCOME_SECS:
                text = (
                    "process 0 has neither published it nor sent a heartbeat in "
                    f"{OUTCOME_SECS:.0f} s"
                )
                raise CheckpointError(f"{self._attempt.storage.path('')}: {text}")
            time.sleep(pause)


def _processes_text(found: Sequence[int]) -> str:
    return format_list([f"process {process}" for process in sorted(found)], 8)


def process_key(process: int) -> str:
    return f"ocdbt.process_{process}/"


def _pauses() -> Iterator[float]:
    """Yield longer and longer pauses."""
    pause = 0.005
    while True:
        yield pause
        pause = min(1.0, 1.5 * pause)

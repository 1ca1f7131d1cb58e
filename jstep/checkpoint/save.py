"""One save of a checkpoint, in a thread of each process: `Save.run` is the whole of it."""

import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from jstep.array_store.attempts import Attempt, writer_module
from jstep.array_store.listing import ROOT
from jstep.array_store.manifest import LeftOutLeaf, Manifest, known_values
from jstep.array_store.store import Store
from jstep.checkpoint.peers import Peers
from jstep.checkpoint.retention import Listener, Retention
from jstep.core.checks import format_bytes
from jstep.state.nonfinite import are_finite_on_host
from jstep.stores.urls import is_url


@dataclasses.dataclass(kw_only=True)
class Save:
    """What one process does of a save.

    Attributes:
        manifest: The manifest, which lacks what is known only at the end.
        arrays: The `OwnParts` to write. They are forgotten once they are written, so that their
            memory is free.
        unchecked_params: The names of the parameters' arrays, if the manifest lacks whether they
            are finite.
        files: Name → `ExternalBytes`.
        release: Gives back the memory of the arrays.
        nbytes: The bytes of all arrays, by all processes, for the error of a full disk.
        left_out: Returns the records of leaves that are left out; may wait for devices.
        flushes: Called before the checkpoint exists.
        permanent_every_secs: As in `CheckpointExtra`.
        listener: Receives a permanent checkpoint, and is waited for before one is deleted.
        number: The number of the save, among those of the Saver.
        began: The monotonic time at which it began.
    """

    store: Store
    attempt: Attempt
    peers: Peers
    retention: Retention
    manifest: Manifest
    arrays: Sequence[Any]
    unchecked_params: Set[str] | None
    files: Mapping[str, Any]
    release: Callable[[], None]
    nbytes: int
    left_out: Callable[[], tuple[LeftOutLeaf, ...]]
    flushes: Sequence[Callable[[], None]]
    permanent_every_secs: float | None
    listener: Listener | None
    number: int
    began: float = dataclasses.field(default_factory=time.monotonic)

    def run(self) -> None:
        """Write this process's part; on the first one, publish the checkpoint; the others wait."""
        began = time.monotonic()
        peers = self.peers
        try:
            if peers.is_first:
                self.attempt.begin()
                if peers.count > 1:
                    peers.begin()
            entries = self._write_part()
            peers.own_secs = time.monotonic() - began
            if not peers.is_first:
                peers.report_part()
            else:
                if peers.count > 1:
                    peers.wait_for_parts()
                    self._merge_parts(entries)
                self._write_orbax_files()
                self._publish()
        except BaseException as error:
            explained = _explained(error, self.attempt.storage.path(""), self.nbytes)
            peers.report_failure(explained)
            # Not `from error`, which would be its own cause if there is nothing to explain.
            raise explained from error.__cause__
        if not peers.is_first:
            peers.wait_for_outcome()

    def _write_part(self) -> int:
        """Write and flush this process's arrays; return the merged database's number of entries."""
        writer = writer_module()
        storage = self.attempt.storage
        key = self.peers.part_key
        if self.unchecked_params is not None:
            # Before `_publish`, which deletes checkpoints, and before `release`, after which other
            # saves may use the memory.
            params = [array for array in self.arrays if array.name in self.unchecked_params]
            values = [part for array in params for _, part in array.values]
            self.manifest = dataclasses.replace(self.manifest, finite=are_finite_on_host(values))
        own_parts = list(self.arrays)
        for name, file in self.files.items():
            own_parts.append(writer.file_array(name, file.read()))
        self.arrays = ()
        entries: int = writer.count_entries(own_parts) if self.peers.count > 1 else 0
        base = writer.database_base(storage.spec(), key)
        root = writer.write(base, own_parts, storage.wait, first=self.peers.is_first)
        self.release()
        self._write_root(key, root)
        for file in self.files.values():
            file.written()
        if not self.peers.is_first:
            storage.finish(key)
        return entries

    def _merge_parts(self, entries: int) -> None:
        writer = writer_module()
        storage = self.attempt.storage
        base = writer.database_base(storage.spec())
        self._write_root("", writer.merge(base, self.peers.part_keys, entries, storage.wait))

    def _write_root(self, key: str, root: bytes | None) -> None:
        if root is not None:
            self.attempt.storage.write(f"{key}{ROOT}", root)

    def _write_orbax_files(self) -> None:
        names = self.manifest.leaves_by_array
        for name, data in writer_module().orbax_files(names, self.manifest.saved_at).items():
            self.attempt.storage.write(name, data)

    def _publish(self) -> None:
        """Make the checkpoint exist, and only then delete what it supersedes."""
        sizes = self.attempt.storage.finish(flushed_keys=self.peers.part_keys[1:])
        for flush in self.flushes:
            flush()
        decision = self.retention.decide(self.manifest, self.permanent_every_secs)
        manifest = dataclasses.replace(
            self.manifest,
            extra=known_values(self.manifest.extra),
            retention=decision.retained,
            files=sizes,
            left_out=self.left_out(),
            temporary=decision.is_temporary,
        )
        remains = self.attempt.publish(manifest)
        # From here on it exists, whatever fails below. The next save deletes what this one should
        # have deleted.
        if self.peers.count > 1:
            self.peers.report_saved()
        self.retention.published_as(manifest, self.number)
        secs = time.monotonic() - self.began  # the store counts its deletions itself
        self.store.erase(remains)
        if self.listener is not None and not manifest.temporary:
            self.listener.saved(manifest.step, self.attempt.path)
        for path in decision.superseded:
            if self.listener is not None:
                self.listener.wait(path)
            self.store.evict(path)
        self.retention.publication_secs = secs
        self.attempt.clean_up()


def _explained(error: BaseException, path: str, nbytes: int) -> BaseException:
    """Return an error that says how much space a full disk lacks, which tensorstore's do not."""
    if not isinstance(error, OSError | ValueError) or is_url(path):
        return error
    full = (errno.ENOSPC, errno.EDQUOT)
    number = next((number for number in full if os.strerror(number) in str(error)), None)
    if number is None:
        return error
    try:
        free_bytes = shutil.disk_usage(os.path.dirname(path)).free
    except OSError:
        # Raised here, it would hide the first error, and the other processes would get none.
        return error
    text = f"{os.strerror(number)} ({format_bytes(nbytes)} needed, {format_bytes(free_bytes)} free)"
    return OSError(number, text, path)

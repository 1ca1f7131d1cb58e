"""A store of checkpoints in a local directory, or one on a file system that all processes share."""

import errno
import gc
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jstep.checkpoint.format.manifest import NAME, CheckpointError, Manifest
from jstep.checkpoint.store import checksums, listing, place
from jstep.checkpoint.store.claim import Claim, file_of
from jstep.checkpoint.store.protocol import Commit

_logger = logging.getLogger("jstep")
_HOLDERS: "weakref.WeakValueDictionary[str, Directory]" = weakref.WeakValueDictionary()
"""The claims of this process: file → its store."""


class Directory:
    """A `Store` in a directory: a checkpoint is a folder, which is renamed to its final name when it is complete."""

    def __init__(self, directory: str, prefix: str | None) -> None:
        self.directory = directory
        self._prefix = prefix
        self._claim: Claim | None = None
        self._is_cleaned = False
        self._arrays: Any = None
        self._bytes = 0
        self.is_left = False

    def path(self, name: str) -> str:
        """See `Store.path`."""
        return os.path.join(self.directory, name)

    def newest_first(self, prefix: str | None, trusted: Collection[int] = frozenset()) -> Iterator[tuple[int, str]]:
        """See `Store.newest_first`."""
        return listing.newest_first(self.directory, prefix, trusted)

    def at(self, prefix: str, step: int) -> str | None:
        """See `Store.at`."""
        return listing.at(self.directory, prefix, step)

    def broken(self, prefix: str, above: int) -> list[tuple[str, str]]:
        """See `Store.broken`."""
        return listing.broken(self.directory, prefix, above)

    def manifest(self, path: str) -> Manifest:
        """See `Store.manifest`."""
        return listing.read_manifest(path)

    def find_corruption(self, path: str, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
        """See `Store.find_corruption`. Reads every byte."""
        if manifest.is_packed:  # copied from a bucket
            from jstep.checkpoint.store import unpack  # not at the top: it imports JAX

            return unpack.find_corruption(unpack.LocalObjects(path), "", manifest, share)
        return checksums.find_corruption(path, manifest, share)

    def restore(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Store.restore`."""
        from jstep.checkpoint.store import tensors, unpack  # not at the top: importing tensorstore is slow

        if manifest.is_packed:
            return unpack.read(unpack.LocalObjects(path), "", manifest, shardings)
        return tensors.read(tensors.in_folder(path), manifest, shardings)

    def claim(self, prefix: str) -> None:
        """See `Store.claim`."""
        self._make()
        if self._claim is None or not self.holds_claim():
            self._claim, self._is_cleaned = self._take(prefix), False
            _HOLDERS[os.path.realpath(self._claim.path)] = self
        if not self._is_cleaned:
            place.remove_leftovers(self.directory, prefix, place.IN_FLIGHT.__contains__)
            self._is_cleaned = True

    def _take(self, prefix: str) -> Claim:
        try:
            return Claim(self.directory, prefix)
        except CheckpointError:
            file = os.path.realpath(file_of(self.directory, prefix))
            if not _is_held_here(file):
                raise
            gc.collect()  # an unreferenced Saver releases its claim here, or when its write has ended
            if (holder := _HOLDERS.get(file)) is not None and holder.is_left:
                holder.finish()
            return Claim(self.directory, prefix)

    def holds_claim(self) -> bool:
        """Return whether this store has the claim, in this process and not in the parent of a fork."""
        return self._claim is not None and self._claim.is_held()

    def finish(self) -> None:
        """Finish the save of an unreferenced Saver; an error is logged, since no call can raise it."""
        try:
            self.wait()
        except Exception:
            _logger.exception("the save in progress in %s was not saved", self.directory)
        self.close()

    def _make(self) -> None:
        try:
            os.makedirs(self.directory, exist_ok=True)
        except OSError as error:
            what = f"the directory of checkpoints cannot be created: {error.strerror}"
            raise OSError(error.errno, what, self.directory) from error
        if not os.access(self.directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(errno.EACCES, "the directory of checkpoints cannot be written", self.directory)

    def _orbax(self) -> Any:
        if self._arrays is None:
            # Not at the top: importing Orbax is slow.
            from jstep.checkpoint.store import orbax_arrays

            self._arrays = orbax_arrays.Checkpointer(self._prefix or "")
        return self._arrays

    def save(self, path: str, arrays: Mapping[str, Any], compress: bool, commit: Commit) -> None:
        """See `Store.save`."""

        def publish(temporary: str, final: str) -> None:
            import jax  # not at the top: listing a directory of checkpoints does not need JAX

            from jstep.checkpoint.store import tensors

            manifest, committed = commit.seal(checksums.collect(temporary, jax.process_count()))
            # Cleaners of old files may remove files while they are written; the rest would look like a checkpoint.
            if lost := _lost(lambda: tensors.missing(temporary, manifest)):
                raise OSError(errno.ENOENT, f"{lost}: files were removed while they were written", temporary)
            listing.write_manifest(temporary, manifest)
            place.publish(temporary, final, [NAME, *manifest.files])
            committed()

        self._bytes = sum(int(array.nbytes) for array in arrays.values())
        try:
            self._orbax().save(path, arrays, compress, publish)
        except Exception as error:
            self._explain(error)
            raise
        except BaseException:
            self._is_cleaned = False  # interrupted: the next save removes the remains
            raise

    def wait(self) -> None:
        """See `Store.wait`."""
        try:
            if self._arrays is not None:
                self._arrays.wait()
        except Exception as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        if place.is_full(error):
            raise place.full_disk(self.directory, self._bytes) from error

    def abandon(self, path: str) -> None:
        """See `Store.abandon`."""
        self._is_cleaned = False
        place.remove(path + listing.TEMPORARY)

    def evict(self, path: str) -> None:
        """See `Store.evict`."""
        place.evict(path)

    def close(self, wait: bool = True) -> None:
        """See `Store.close`."""
        if self._arrays is not None and wait:
            self._arrays.close()
        if self._claim is not None:
            self._claim.release()
            self._claim = None


def _is_held_here(file: str) -> bool:
    holder = _HOLDERS.get(file)
    return holder is not None and holder.holds_claim()


def _lost(missing: Callable[[], str | None]) -> str | None:
    """Describe what is missing of the written files; None if nothing is."""
    try:
        path = missing()
    except Exception as error:  # tensorstore has no error types
        return f"the written files cannot be read ({str(error)[:300]})"
    return path and f"{path!r} no longer exists"

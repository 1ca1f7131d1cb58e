"""A store of checkpoints in a local directory, or one on a file system that all processes share.

A checkpoint is written under a temporary name, its manifest last, and then renamed. Deletion
renames it first.
"""

import contextlib
import itertools
import os
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from jstep.array_store import attempts, listing
from jstep.array_store.claims import FileClaim
from jstep.array_store.manifest import MANIFEST_FILE, CheckpointError, Manifest, encode
from jstep.array_store.store import Store
from jstep.stores.files import foreign_file, make_directories, may_be_file, new_file, sync_directory

_MAX_LISTINGS = 10
"""The maximum number of lists until one has a checkpoint that still exists. A writer evicts one
checkpoint per save."""


class DirectoryStore(Store):
    def __init__(self, directory: str, prefix: str | None) -> None:
        super().__init__(directory, prefix)
        # Whether leftovers of interrupted saves were removed, and no save was interrupted since.
        self._is_clean = False
        # The directory of an attempt of several processes that is not published yet, or has failed.
        # Some of them may write into it until each has called `wait`.
        self._unpublished: str | None = None
        # The result of `list_once`, by prefix; None if each call lists the directory itself.
        self._listed: dict[str, list[listing.PossibleCheckpoint]] | None = None

    def list_once(self) -> None:
        self._listed = listing.possible_by_prefix(self.directory)

    def _possible_checkpoints(self, prefix: str | None) -> list[listing.PossibleCheckpoint]:
        if self._listed is None or prefix is None:
            return listing.possible_checkpoints(self.directory, prefix)
        return self._listed.get(prefix, [])

    def newest_first(self, prefix: str | None) -> Iterator[tuple[int, str]]:
        """See `Store.newest_first`: manifests are read, and the existence of files is checked."""
        for _ in range(_MAX_LISTINGS):
            is_outdated = yield from self._newest_first_of_list(prefix)
            if not is_outdated:
                return
            if self._listed is not None:
                self.list_once()

    def _newest_first_of_list(self, prefix: str | None) -> Generator[tuple[int, str], None, bool]:
        """Yield like `newest_first`, from one list; return whether it was outdated at the start."""
        yielded: set[int] = set()
        for step, _, entry in self._possible_checkpoints(prefix):
            if step in yielded:
                continue
            path = self.path(entry)
            complete = listing.find_complete(path.removesuffix(listing.REPLACED))
            if complete is not None:
                yielded.add(step)
                yield step, complete
            elif not yielded and not os.path.lexists(path):
                # It was evicted, so a newer one exists that is not in this list.
                return True
        return False

    def own_paths(self) -> dict[int, str]:
        paths: dict[int, str] = {}
        for step, _, _ in listing.possible_checkpoints(self.directory, self._prefix):
            paths[step] = self.path(listing.format_name(self._prefix, step))
        return paths

    def find_path(self, prefix: str, step: int) -> str | None:
        return listing.find_complete(self.path(listing.format_name(prefix, step)))

    def find_broken(self, prefix: str, newer_than: int) -> list[tuple[str, str]]:
        """See `Store.find_broken`.

        A directory has its name only while it is complete: no crash leaves a broken one.
        """
        problems = []
        for step, is_final, entry in self._possible_checkpoints(prefix):
            path = self.path(entry)
            if step <= newer_than or not is_final:
                continue
            complete, lacks = listing.find_complete_or_missing(path)
            is_ours = lacks != MANIFEST_FILE or listing.has_data(path)
            if complete is None and is_ours and os.path.lexists(path):
                problems.append((path, f"{lacks} is missing"))
        return problems

    def manifest(self, path: str) -> Manifest:
        return listing.read_manifest(path)

    def storage(self, path: str, manifest: Manifest) -> attempts.LocalStorage:
        return attempts.LocalStorage(os.path.join(path, manifest.data or ""))

    def find_wrong_sizes(self, path: str, manifest: Manifest) -> Mapping[str, str]:
        wrong = {}
        for name, nbytes in manifest.files.items():
            file = os.path.join(path, name)
            if not may_be_file(file):
                wrong[name] = "missing"
                continue
            found = os.lstat(file)
            if stat.S_ISLNK(found.st_mode):
                wrong[name] = "a link"
            elif found.st_size != nbytes:
                wrong[name] = f"{found.st_size} bytes instead of {nbytes}"
        return wrong

    def claim(self) -> None:
        self._check_not_moved()
        make_directories(self.directory)
        super().claim()
        if not self._is_clean:
            self._remove_leftovers()
            self._is_clean = True

    def _check_not_moved(self) -> None:
        """Raise an error if the directory was renamed.

        Otherwise the run would make it again under its old name, and continue in two places.
        """
        claim = self._claim  # once: a `close` that does not wait for the writer's thread drops it
        if isinstance(claim, FileClaim) and claim.is_moved():
            raise CheckpointError(
                f"{self.directory} was renamed while it is written; start again with its new path"
            )

    def lock(self) -> FileClaim:
        self._is_clean = False
        return FileClaim(self.directory, self._prefix)

    def begin(
        self, path: str, attempt_id: int, saved_at: float, *, process: int, count: int
    ) -> attempts.Attempt:
        """Make a temporary directory.

        `save` writes into it, and each step is on the disk before the next one begins.

        1. Arrays and files, and what Orbax needs.
        2. The flushes of `Saver.flushing`.
        3. The manifest, without which a directory is not a checkpoint.
        4. The renamed directory. Only then are superseded checkpoints removed (`retention`).
        """
        self.erase_secs = 0.0
        # If Ctrl-C interrupts this, nobody calls `abandon`; the next save removes the leftovers.
        self._is_clean = False
        if self._unpublished is not None and process == 0:
            # All processes have called `wait` before this save: none writes into it any more.
            remove(self._unpublished)
        temporary = path + listing.TEMPORARY
        if count > 1:
            temporary += f"-{attempt_id}"
            os.makedirs(os.path.join(temporary, attempts.PARTS), exist_ok=True)
            self._unpublished = temporary
        else:
            os.makedirs(temporary)
            self._unpublished = None
        return DirectoryAttempt(self, path, temporary)

    def start(self, attempt: attempts.Attempt, run: Callable[[], None]) -> None:
        super().start(attempt, run)
        self._is_clean = True

    def publish(self, temporary: str, final: str, manifest: Manifest) -> list[str]:
        """Add the manifest, rename the directory, and return the older checkpoint, to be erased."""
        # If the directory was renamed, tensorstore has created it again under its old name.
        self._check_not_moved()
        data = encode(manifest)
        with new_file(os.path.join(temporary, MANIFEST_FILE)) as file:
            file.write(data)
        replaced = final + listing.REPLACED
        if os.path.lexists(final):
            _check_remains(final)
            remove(replaced)
            os.rename(final, replaced)
        sync_directory(temporary)
        os.rename(temporary, final)
        try:
            sync_directory(os.path.dirname(final))
        except OSError:
            self.evict(final)
            if os.path.lexists(replaced):
                os.rename(replaced, final)
            raise
        self._unpublished = None
        return [replaced]

    def abandon(self, path: str) -> None:
        """Remove a failed attempt.

        One of several processes stays until the next save, as they read why it failed.
        """
        self._is_clean = False
        temporary = path + listing.TEMPORARY
        if isinstance(self._claim, FileClaim) and self._claim.is_moved():
            with contextlib.suppress(OSError):
                # If tensorstore has made the directory again, nothing else is in it. Otherwise it
                # is somebody else's.
                if os.listdir(self.directory) == [os.path.basename(temporary)]:
                    remove(temporary)
                    os.rmdir(self.directory)
            return
        remove(temporary)

    def command_to_set_aside(self, path: str) -> str:
        for number in itertools.count():
            aside = f"{path}{listing.ASIDE}{number}"
            if not os.path.lexists(aside):
                break
        return shlex.join(["mv", path, aside])

    def hide(self, path: str) -> list[str]:
        deleted = path + listing.DELETED
        remove(deleted)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, deleted)
            return [deleted]
        return []

    def erase(self, remains: Sequence[str]) -> None:
        began = time.monotonic()
        for path in remains:
            remove(path)
        self.erase_secs += time.monotonic() - began

    def _remove_leftovers(self) -> None:
        """Remove leftovers of interrupted saves and deletions; only the claim's owner may do so."""
        for name, _, suffix in listing.checkpoint_entries(self.directory, self._prefix):
            if not suffix:
                continue  # a checkpoint, complete or not
            final = self.path(name)
            path = final + suffix
            if suffix == listing.REPLACED and listing.find_complete(final) == path:
                # The save that should have replaced it was interrupted: it takes its name back.
                if os.path.lexists(final):
                    _check_remains(final)
                    self.evict(final)
                os.rename(path, final)
            elif not attempts.is_written(path) and path != self._unpublished:
                if not os.path.islink(path) and not os.path.isdir(path):
                    raise foreign_file(path, "is not a directory")
                remove(path)


class DirectoryAttempt(attempts.Attempt):
    may_report_saved = False

    def __init__(self, store: DirectoryStore, path: str, temporary: str) -> None:
        super().__init__(attempts.LocalStorage(temporary), path)
        self._store = store
        self._temporary = temporary

    def publish(self, manifest: Manifest) -> Sequence[str]:
        return self._store.publish(self._temporary, self.path, manifest)

    def is_published(self, report_key: str) -> bool:
        # The rename takes `parts/` along. The names of the files there have the name of this
        # attempt, so that an older checkpoint of the step does not have this one.
        return os.path.exists(os.path.join(self.path, report_key))


def _check_remains(path: str) -> None:
    """Reject what is neither a checkpoint nor the remains of one, but data of another program."""
    names = listing.list_names(path)
    is_directory = os.path.isdir(path) and not os.path.islink(path)
    if not is_directory or (names and not {MANIFEST_FILE, *listing.ORBAX_FILES} & set(names)):
        raise foreign_file(path, "is not a checkpoint")


def remove(path: str) -> None:
    if os.path.islink(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
    elif os.path.isdir(path):  # `rmtree` opens what it is given, even a FIFO or a device
        shutil.rmtree(path, ignore_errors=True)

"""Names, prefixes and directories of checkpoints: the newest one, and waiting for new ones."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator

from jstep.array_store import listing
from jstep.array_store.directory_store import DirectoryStore
from jstep.array_store.manifest import MANIFEST_FILE, MANIFEST_HEAD, CheckpointError
from jstep.array_store.store import Store
from jstep.core.checks import as_int, as_number, as_string, format_list, format_value
from jstep.core.logs import logger
from jstep.stores.files import open_regular
from jstep.stores.untrusted import is_utf8
from jstep.stores.urls import absolute, is_url, location

_MAX_LENGTH = 180
"""The maximum bytes of a prefix: file names have at most 255, of which the step and temporary
suffixes take some."""


def checkpoint_name(prefix: str, step: int) -> str:
    """Return the name of the checkpoint of a step: `prefix-step`.

    Raises:
        TypeError: `prefix` is not a string, or `step` is not an integer.
        ValueError: `step` is negative, or `prefix` cannot be the beginning of a file name.

    Example:
        >>> import jstep
        >>> jstep.checkpoint_name("my-model", 1000)
        'my-model-1000'
    """
    return listing.format_name(as_prefix(prefix), as_int(step, "step", 0))


def latest_checkpoint(directory: str | os.PathLike[str], prefix: str | None = None) -> str | None:
    """Return the path of the newest complete checkpoint (highest step), or None if there is none.

    Args:
        directory: The directory of the checkpoints, a path or a URL; it may be missing.
        prefix: The prefix of the checkpoint names; None for any prefix.

    Example:
        >>> import jstep
        >>> print(jstep.latest_checkpoint("/no/such/directory"))
        None
    """
    prefix = None if prefix is None else as_prefix(prefix)
    return next(
        (path for _, path in open_store(as_directory(directory)).newest_first(prefix)), None
    )


OnSkipped = Callable[[int, str, Exception], None]
"""`on_skipped(step, path, error)` is called for a checkpoint that cannot be read."""
# Results of a poll that are not steps: there is no new checkpoint yet, and the time is over.
_WAIT = -1
_END = -2


def checkpoints_iterator(
    directory: str | os.PathLike[str],
    *,
    prefix: str = "model",
    timeout: float | None = None,
    min_interval_secs: float = 0.0,
) -> Iterator[int]:
    """Iterate over the steps of newly completed checkpoints, for an evaluator in another process.

    Each time, the newest checkpoint is returned if its step is higher than the previous one,
    beginning with the newest existing checkpoint: steps only grow, and older ones are skipped.
    After a rewind (newer checkpoints were deleted, and the run resumed from an older one) the next
    step is one above those before the rewind. Temporary checkpoints, which a run has saved by
    itself, are skipped: the next one replaces them, perhaps before they are read. A checkpoint that
    cannot be read (it is corrupted, or of another format) is skipped, too, with a warning.

    Args:
        directory: The directory of the checkpoints, a path or a URL. A missing directory counts as
            an empty one.
        prefix: The prefix of the checkpoint names.
        timeout: The seconds without a new checkpoint after which the iterator ends; 0 to return the
            existing one and not wait; None to wait forever.
        min_interval_secs: The minimum seconds from one step to the next.

    Returns:
        An iterator of steps, for `Saver.restore(target, step)`. While it waits, it polls once per
        second, or every 10 seconds at a URL. On several processes of a JAX program, all of them get
        the steps that the first one finds.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: timeout or min_interval_secs is negative or not finite, or prefix is invalid.
        OSError: The directory cannot be read.

    Example:
        >>> import tempfile, jstep
        >>> directory = tempfile.mkdtemp()
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> with jstep.Saver(directory) as saver:
        ...     for step in (10, 20):
        ...         _ = saver.save(jstep.TrainState.create({"w": 1.0}, optimizer, global_step=step))
        >>> list(jstep.checkpoints_iterator(directory, timeout=0))
        [20]

    Source: `tf.train.checkpoints_iterator`.
    """
    path = as_directory(directory)
    name = as_prefix(prefix)
    seconds = math.inf
    if timeout is not None:
        seconds = as_number(timeout, "timeout", low=0.0, meaning="None waits forever")
    interval = as_number(min_interval_secs, "min_interval_secs", low=0.0)
    return _steps(open_store(path), name, seconds, interval)


def _steps(store: Store, prefix: str, timeout: float, interval: float) -> Iterator[int]:
    newer_than = -1
    warned_of: set[str] = set()

    def warn_once(step: int, path: str, error: Exception) -> None:
        if path not in warned_of:
            warned_of.add(path)
            logger.warning("checkpoints_iterator skips step %d: %s", step, error)

    while True:
        step = _next(store, prefix, newer_than, timeout, warn_once)
        if step == _END:
            return
        newer_than = step
        yielded_at = time.monotonic()
        yield step
        time.sleep(max(yielded_at + interval - time.monotonic(), 0.0))


def newest_permanent(
    store: Store, prefix: str, newer_than: int = -1, on_skipped: OnSkipped | None = None
) -> int | None:
    """Return the newest step above another one with a checkpoint that is not temporary, or None.

    Args:
        on_skipped: Called for each checkpoint that cannot be read, which is then skipped. If None,
            its error is raised.
    """
    for step, path in store.newest_first(prefix):
        if step <= newer_than:
            break
        try:
            if not store.manifest(path).temporary:
                return step
        except FileNotFoundError:
            continue  # it was replaced meanwhile
        except (CheckpointError, OSError) as error:
            if on_skipped is None:
                raise
            on_skipped(step, path, error)
    return None


def _next(store: Store, prefix: str, newer_than: int, timeout: float, warn_once: OnSkipped) -> int:
    """Wait for a step above another one, and return it, or `_END`; the same on all processes."""
    import jax  # not at the top: listing a directory of checkpoints does not need JAX

    from jstep.core import processes

    # Querying the number of processes would start the backends, which a program that only watches
    # does not need.
    is_distributed = jax.distributed.is_initialized() and jax.process_count() > 1
    deadline = time.monotonic() + timeout
    is_first = not is_distributed or processes.is_process_0()

    def poll() -> tuple[int]:
        """Return a new step, `_END` or `_WAIT`, in a tuple, as `first_ints_on_all` expects.

        Only the result of the first process counts.
        """
        newest = newest_permanent(store, prefix, newer_than, warn_once) if is_first else None
        if newest is not None:
            return (newest,)
        if time.monotonic() >= deadline:
            return (_END,)
        return (_WAIT,)

    problem = f"{store.directory}: cannot be read: see the error of process 0"
    while True:
        if is_distributed:
            (step,) = processes.first_ints_on_all(poll, 1, problem, OSError)
        else:
            (step,) = poll()
        if step != _WAIT:
            return step
        time.sleep(min(store.poll_secs, max(deadline - time.monotonic(), 0.0)))


def as_directory(directory: object) -> str:
    path = absolute(location(directory, "directory"))
    if not is_utf8(path) or ("\\" in path and os.sep != "\\"):
        raise ValueError(
            f"directory={path!r}: must be UTF-8 without backslashes, or tensorstore cannot "
            "write there; give another"
        )
    if not is_url(path) and os.path.lexists(path) and not os.path.isdir(path):
        raise NotADirectoryError(
            f"directory={path!r}: must be a directory, but there is a file of that name"
        )
    if not is_url(path) and _is_checkpoint(path):
        raise ValueError(
            f"directory={path!r}: must be a directory of checkpoints, got a checkpoint; pass "
            f"{os.path.dirname(path)!r}, and restore by its step"
        )
    return path


def _is_checkpoint(path: str) -> bool:
    # The head tells it from the manifest.json of a web application.
    with contextlib.suppress(OSError), open_regular(os.path.join(path, MANIFEST_FILE)) as file:
        return bool(file.read(len(MANIFEST_HEAD)) == MANIFEST_HEAD)
    return False


def as_prefix(prefix: object) -> str:
    hint = "the beginning of a file name, such as 'model'"
    text = as_string(prefix, "prefix", hint)
    is_name = text not in (".", "..") and not {"/", "\\", os.sep, "\0"} & set(text)
    if not is_name or not is_utf8(text) or len(text.encode()) > _MAX_LENGTH:
        raise ValueError(
            f"prefix={format_value(text)}: must be {hint}, at most {_MAX_LENGTH} bytes; "
            "a path is `directory`"
        )
    if listing.has_suffix(text):
        raise ValueError(
            f"prefix={format_value(text)}: must contain none of "
            f"{format_list(listing.SUFFIXES, 4)}, which name what is not a checkpoint; give another"
        )
    return text


def open_store(directory: str, prefix: str | None = None) -> Store:
    """Return the store of a path or URL from `as_directory`.

    Args:
        prefix: The prefix of the checkpoints to write, None only to read.
    """
    if not is_url(directory):
        return DirectoryStore(directory, prefix)
    from jstep.array_store.object_store import ObjectStore  # not at the top: it imports JAX

    return ObjectStore(directory, prefix)

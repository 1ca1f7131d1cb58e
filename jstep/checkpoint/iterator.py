"""`checkpoints_iterator`: the checkpoints of a run as another process writes them."""

import os
import time
from collections.abc import Iterator

import jax

from jstep.checkpoint import arguments as checked
from jstep.checkpoint.names import open_store
from jstep.checkpoint.store.protocol import Store
from jstep.core.checks import as_number
from jstep.distributed import agreement
from jstep.stores import is_url

_POLL_SECS = 1.0
_POLL_SECS_OF_URLS = 10.0  # each look is a request
_WAIT, _END, _FAILED = -1, -2, -3
"""What the first process found, in place of a step."""


def checkpoints_iterator(
    directory: str | os.PathLike[str],
    *,
    prefix: str = "model",
    timeout: float | None = None,
    min_interval_secs: float = 0.0,
) -> Iterator[int]:
    """Iterate over the steps of new checkpoints as they become complete, for an evaluator in another process.

    Each time, the newest checkpoint that was not returned yet is returned, beginning with those that are there. Those
    that were evicted meanwhile are skipped. A step that was deleted and saved again is new.

    Args:
        directory: The directory of the checkpoints, a path or a URL. A missing directory counts as an empty one.
        prefix: The prefix of the checkpoint names.
        timeout: The seconds without a new checkpoint after which the iterator ends; 0 to return those that are there
            and wait for none; None to wait forever.
        min_interval_secs: The minimum seconds from one step to the next.

    Returns:
        An iterator of steps, for `Saver.restore(target, step)`. While it waits, it looks once per second, or every 10
        seconds at a URL. On several processes of a JAX program, all of them get the steps that the first one finds.

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
        [20, 10]

    Source: `tf.train.checkpoints_iterator`.
    """
    found = checked.directory(directory)
    name = checked.prefix(prefix)
    seconds = None if timeout is None else as_number(timeout, "timeout", low=0.0, meaning="None waits forever")
    interval = as_number(min_interval_secs, "min_interval_secs", low=0.0)
    return _steps(open_store(found), name, seconds, interval, _POLL_SECS_OF_URLS if is_url(found) else _POLL_SECS)


def _steps(store: Store, prefix: str, timeout: float | None, interval: float, poll: float) -> Iterator[int]:
    returned: set[int] = set()
    while True:
        step = _next(store, prefix, returned, timeout, poll)
        if step == _END:
            return
        returned.add(step)
        at = time.monotonic()
        yield step
        time.sleep(max(at + interval - time.monotonic(), 0.0))


def _next(store: Store, prefix: str, returned: set[int], timeout: float | None, poll: float) -> int:
    """Wait for the next step, or for the end; the same on all processes."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        error, found = None, _WAIT
        if not _is_distributed() or jax.process_index() == 0:
            try:
                found = _newest(store, prefix, returned)
            except Exception as caught:
                error, found = caught, _FAILED
            left = poll if deadline is None else deadline - time.monotonic()
            found = _END if found == _WAIT and left <= 0 else found
        if _is_distributed():
            (found,) = agreement.broadcast_ints(found)
        if error is not None:
            raise error
        if found == _FAILED:
            raise OSError(f"{store.directory}: cannot be read: see the error of process 0")
        if found != _WAIT:
            return found
        time.sleep(poll if deadline is None else min(poll, max(deadline - time.monotonic(), 0.0)))


def _newest(store: Store, prefix: str, returned: set[int]) -> int:
    """Return the newest step that was not returned yet, and forget those that are no longer there."""
    there = []
    for step, _ in store.newest_first(prefix, frozenset(returned)):
        if step not in returned:
            return step
        there.append(step)
    returned.intersection_update(there)
    return _WAIT


def _is_distributed() -> bool:
    # Asking for the number of processes would start the backends, which a program that only watches does not need.
    return jax.distributed.is_initialized() and jax.process_count() > 1

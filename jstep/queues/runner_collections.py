"""Named collections of QueueRunners."""

import logging
import threading
from typing import Any

from jstep.core.checks import as_bool, as_text, kind, shown
from jstep.queues.coordinator import Coordinator
from jstep.queues.queue_runner import QueueRunner

_log = logging.getLogger(__name__)

QUEUE_RUNNERS = "queue_runners"

# Collections: name → runners, in the order in which they were added.
_collections: dict[str, list[QueueRunner]] = {}
_collections_lock = threading.Lock()


def add_queue_runner(qr: QueueRunner, collection: str = QUEUE_RUNNERS) -> None:
    """Add a runner to a named collection, which `start_queue_runners` starts.

    Collections are global to the process. A runner whose queue was closed is removed from its
    collection, since it can no longer feed it.

    Args:
        qr: The runner.
        collection: The name of the collection.

    Raises:
        TypeError: `qr` is not a QueueRunner, or `collection` is not a string.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=10)
        >>> runner = jstep.QueueRunner(queue, [lambda: queue.enqueue("a"), lambda: queue.enqueue("b")])
        >>> jstep.add_queue_runner(runner, collection="letters")
        >>> coord = jstep.Coordinator()
        >>> threads = jstep.start_queue_runners(coord, collection="letters")
        >>> len(threads)
        2
        >>> coord.request_stop()
        >>> coord.join()
    """
    if not isinstance(qr, QueueRunner):
        raise TypeError(f"qr={shown(qr)}: must be a QueueRunner, got {kind(qr)}")
    with _collections_lock:
        runners = _open_runners(collection)
        if qr not in runners:
            runners.append(qr)


def start_queue_runners(
    coord: Coordinator | None = None,
    daemon: bool = True,
    start: bool = True,
    collection: str = QUEUE_RUNNERS,
) -> list[threading.Thread]:
    """Start the runners of a collection, except those that are running.

    Args:
        coord: The Coordinator that the threads report to and stop with.
        daemon: Whether the process may exit while the threads run.
        start: Whether to start the threads, or only to create them.
        collection: The name of the collection.

    Returns:
        All created threads.

    Raises:
        TypeError: `coord` is not a Coordinator, `collection` is not a string, or another argument is not a bool.

    Example:
        >>> import jstep
        >>> queue, numbers = jstep.FIFOQueue(capacity=10), iter(range(5))
        >>> jstep.add_queue_runner(jstep.QueueRunner(queue, [lambda: queue.enqueue(next(numbers))]))
        >>> threads = jstep.start_queue_runners()
        >>> print(queue.dequeue_many(5))
        [0 1 2 3 4]
    """
    daemon, start = as_bool(daemon, "daemon"), as_bool(start, "start")
    with _collections_lock:
        runners = list(_open_runners(collection))
    if not runners:
        _log.warning("start_queue_runners: there are no queue runners in the collection %r.", collection)
    threads: list[threading.Thread] = []
    for qr in runners:
        if not qr.is_running():
            threads += qr.create_threads(coord, daemon=daemon)
    if start:
        for thread in threads:
            thread.start()
    return threads


def _open_runners(collection: Any) -> list[QueueRunner]:
    collection = as_text(collection, "collection")
    runners = _collections.setdefault(collection, [])
    runners[:] = [qr for qr in runners if not qr.queue.is_closed()]
    return runners

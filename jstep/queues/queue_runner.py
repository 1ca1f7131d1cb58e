"""QueueRunner: threads that feed a queue, and named collections of runners."""

import threading
from collections.abc import Callable, Iterable, Sequence

from jstep.core.checks import as_bool, as_string, describe_type, format_value
from jstep.core.exceptions import OutOfRangeError
from jstep.core.threads import MAKING, Thread, doing
from jstep.core.tracebacks import shortens_tracebacks
from jstep.queues.coordinator import Coordinator, log
from jstep.queues.queues import CancelledError, FIFOQueue, RandomShuffleQueue, runner_thread

QUEUE_RUNNERS = "queue_runners"

# Collections: name → runners, in the order in which they were added.
_collections: dict[str, list["QueueRunner"]] = {}
_collections_lock = threading.Lock()


class QueueRunner:
    """Threads that feed a queue, one for each enqueue op.

    An op is called repeatedly until it raises OutOfRangeError or StopIteration. The queue is closed
    when all ops have ended, also by an error.

    With a Coordinator, an error of an op stops all its threads and is raised by `coord.join`; when
    the coordinator stops, the queue is closed and waiting enqueues are cancelled. Without one,
    errors are logged and collected in `exceptions_raised`. In both cases the error is the cause of
    the OutOfRangeError that the consumer gets at the end.

    Each thread runs in a copy of the context of the thread that starts it: context variables and
    JAX's settings (`jax.enable_x64`, `jax.set_mesh`, …). Threads do not keep the process alive:
    when the main thread ends, an op that waits on a queue is cancelled, also with `daemon=False`.

    Args:
        queue: The queue that the ops feed.
        enqueue_ops: Callables without arguments, each of which enqueues something.

    Raises:
        TypeError: `queue` is not a queue of jstep, `enqueue_ops` is empty, or an op is not
            callable.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=10)
        >>> numbers = iter(range(3))
        >>> runner = jstep.QueueRunner(queue, [lambda: queue.enqueue(next(numbers))])
        >>> coord = jstep.Coordinator()
        >>> threads = runner.create_threads(coord, start=True)
        >>> [queue.dequeue() for _ in range(3)]
        [0, 1, 2]
        >>> coord.request_stop()
        >>> coord.join(threads)

    Source: `tf.train.QueueRunner`.
    """

    @shortens_tracebacks
    def __init__(
        self, queue: FIFOQueue | RandomShuffleQueue, enqueue_ops: Sequence[Callable[[], object]]
    ) -> None:
        if not isinstance(queue, FIFOQueue | RandomShuffleQueue):
            raise TypeError(
                f"queue={format_value(queue)}: must be a FIFOQueue or a RandomShuffleQueue, got "
                f"{describe_type(queue)}"
            )
        ops = tuple(enqueue_ops) if isinstance(enqueue_ops, Iterable) else ()
        if not ops or not all(map(callable, ops)):
            raise TypeError(
                f"enqueue_ops={format_value(enqueue_ops)}: must be a list of functions that "
                "enqueue, one per thread"
            )
        self._queue = queue
        self._ops = ops
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._exceptions: list[BaseException] = []

    @property
    def queue(self) -> FIFOQueue | RandomShuffleQueue:
        """The queue that the ops feed."""
        return self._queue

    @property
    def exceptions_raised(self) -> list[BaseException]:
        """The exceptions of ops since the last `create_threads`, if no Coordinator took them."""
        with self._lock:
            return list(self._exceptions)

    def is_running(self) -> bool:
        """Return whether threads of an earlier `create_threads` have not started or not ended."""
        return any(t.is_alive() or t.ident is None for t in self._threads)

    @shortens_tracebacks
    def create_threads(
        self, coord: Coordinator | None = None, daemon: bool = False, start: bool = False
    ) -> list[threading.Thread]:
        """Create one thread for each enqueue op.

        Args:
            coord: The Coordinator that the threads report to and stop with.
            daemon: Whether the process may exit in the middle of an op; otherwise it waits for the
                op in progress.
            start: Whether to start the threads; if not, call `start()` on each.

        Raises:
            RuntimeError: Threads of an earlier call have not ended yet, or were never started.
        """
        _check_coordinator(coord)
        daemon = as_bool(daemon, "daemon")
        start = as_bool(start, "start")
        with self._lock:
            if self.is_running():
                raise RuntimeError(
                    "create_threads: threads of an earlier call have not ended; join them first"
                )
            self._exceptions = []
            self._coord = coord
            self._left = len(self._ops)
            if coord:
                coord.call_on_stop(lambda: self._queue.close(cancel_pending_enqueues=True))
            threads: list[threading.Thread] = []
            for i, op in enumerate(self._ops):
                called = getattr(op, "__name__", type(op).__name__)
                name = f"QueueRunnerThread-{type(self._queue).__name__}-{i}-{called}"
                threads.append(Thread(target=self.feed, args=(op,), name=name, daemon=daemon))
            self._threads = threads
        for thread in threads:
            if coord:
                coord.register_thread(thread)
            if start:
                thread.start()
        return list(threads)

    def feed(self, op: Callable[[], object]) -> None:
        """Call an op repeatedly: the body of each thread."""
        runner_thread.feeding = True
        try:
            with doing(MAKING):
                while not (self._coord and self._coord.should_stop()):
                    op()
        except StopIteration:
            pass
        except OutOfRangeError as ex:
            if ex.__cause__:
                # The op's input failed: pass the cause on to the consumers of this queue.
                self._queue.fail(ex.__cause__)
        except CancelledError as ex:
            # An open queue cancels nothing, unless the main thread has ended: the op used another
            # queue.
            if not self._queue.is_closed() and threading.main_thread().is_alive():
                self._report(ex)
        except BaseException as ex:
            self._report(ex)
        finally:
            with self._lock:
                self._left -= 1
                is_last = not self._left
            if is_last:
                self._queue.close()

    def _report(self, ex: BaseException) -> None:
        self._queue.fail(ex)
        if not self._coord:
            log.error("Exception in %s", threading.current_thread().name, exc_info=ex)
            with self._lock:
                self._exceptions.append(ex)
            return
        try:
            self._coord.request_stop(ex)
        except BaseException:  # joined already: no later join would raise it
            log.error("Exception in %s after join", threading.current_thread().name, exc_info=ex)


def add_queue_runner(qr: QueueRunner, collection: str = QUEUE_RUNNERS) -> None:
    """Add a runner to a named collection, which `start_queue_runners` starts.

    Collections are global to the process. A runner whose queue was closed is removed.

    Raises:
        TypeError: `qr` is not a QueueRunner, or `collection` is not a string.

    Example:
        >>> import jstep
        >>> queue = jstep.FIFOQueue(capacity=10)
        >>> runner = jstep.QueueRunner(queue, [lambda: queue.enqueue("a")])
        >>> jstep.add_queue_runner(runner, "letters")
        >>> coord = jstep.Coordinator()
        >>> len(jstep.start_queue_runners(coord, collection="letters"))
        1
        >>> coord.request_stop()
        >>> coord.join()
    """
    if not isinstance(qr, QueueRunner):
        raise TypeError(f"qr={format_value(qr)}: must be a QueueRunner, got {describe_type(qr)}")
    with _collections_lock:
        runners = _open_runners(collection)
        if qr not in runners:
            runners.append(qr)


@shortens_tracebacks
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

    Returns:
        All created threads.

    Raises:
        TypeError: `coord` is not a Coordinator, `collection` is not a string, or another argument
            is not a bool.

    Example:
        >>> import jstep
        >>> queue, numbers = jstep.FIFOQueue(capacity=10), iter(range(5))
        >>> jstep.add_queue_runner(jstep.QueueRunner(queue, [lambda: queue.enqueue(next(numbers))]))
        >>> threads = jstep.start_queue_runners()
        >>> print(queue.dequeue_many(5))
        [0 1 2 3 4]
    """
    _check_coordinator(coord)
    daemon = as_bool(daemon, "daemon")
    start = as_bool(start, "start")
    with _collections_lock:
        runners = list(_open_runners(collection))
    if not runners:
        log.warning(
            "start_queue_runners: there are no queue runners in the collection %r.", collection
        )
    idle = [qr for qr in runners if not qr.is_running()]
    return [thread for qr in idle for thread in qr.create_threads(coord, daemon, start)]


def _check_coordinator(coord: object) -> None:
    if not (coord is None or isinstance(coord, Coordinator)):
        raise TypeError(
            f"coord={format_value(coord)}: must be a Coordinator or None, got "
            f"{describe_type(coord)}"
        )


def _open_runners(collection: object) -> list[QueueRunner]:
    collection = as_string(collection, "collection")
    runners = _collections.setdefault(collection, [])
    runners[:] = [qr for qr in runners if not qr.queue.is_closed()]
    return runners

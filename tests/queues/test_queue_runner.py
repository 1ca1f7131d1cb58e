"""`QueueRunner`: its threads, errors, restarts, collections, contexts, and the exit of the
process."""

import contextvars
import itertools
import threading
import time

import jax
import numpy as np
import pytest
from processes import run_program
from queue_calls import Call, drain, wait_until_blocked
from waiting import TIMEOUT, wait_until

from jstep.core.exceptions import OutOfRangeError
from jstep.queues import queues
from jstep.queues.coordinator import Coordinator
from jstep.queues.queue_runner import QueueRunner, add_queue_runner, start_queue_runners
from jstep.queues.queues import CancelledError, FIFOQueue, RandomShuffleQueue


def counting_op(queue, n=None):
    """Return an operation that enqueues 0, 1, …, n - 1 and then raises StopIteration."""
    numbers = itertools.count() if n is None else iter(range(n))
    return lambda: queue.enqueue(next(numbers))


def failing_op(queue, after, exception):
    numbers = itertools.count()

    def op():
        if next(numbers) == after:
            raise exception
        queue.enqueue("item")

    return op


def join_all(threads):
    for thread in threads:
        thread.join(TIMEOUT)
    return not any(thread.is_alive() for thread in threads)


@pytest.fixture(autouse=True)
def no_leftover_threads():
    """Check that all threads of the test end."""
    before = set(threading.enumerate())
    yield
    leftover = set(threading.enumerate()) - before
    assert join_all(leftover), leftover


def test_each_op_runs_in_a_thread_until_exhausted():
    queue = FIFOQueue(3)
    threads = QueueRunner(queue, [counting_op(queue, 5), counting_op(queue, 7)]).create_threads()
    assert len(threads) == 2
    assert not any(t.is_alive() or t.daemon for t in threads)
    for thread in threads:
        thread.start()
    assert sorted(drain(queue)) == sorted([*range(5), *range(7)])
    assert queue.is_closed()
    assert join_all(threads)


@pytest.mark.parametrize("coord", [None, Coordinator()])
def test_op_ends_when_its_input_queue_is_exhausted(coord):
    names, rows = FIFOQueue(2), RandomShuffleQueue(8, 2, seed=0)
    threads = QueueRunner(names, [counting_op(names, 10)]).create_threads(coord, start=True)
    threads += QueueRunner(rows, [lambda: rows.enqueue(names.dequeue() * 10)] * 3).create_threads(
        coord, start=True
    )
    assert sorted(drain(rows)) == list(range(0, 100, 10))
    if coord:
        coord.join()  # all have ended: no stop is needed
        assert not coord.should_stop()
    assert join_all(threads)


@pytest.mark.parametrize(
    "exception", [ValueError("bad record"), SystemExit(3), CancelledError("another queue")]
)
def test_error_stops_all_threads_and_is_raised_by_join(exception):
    queue = FIFOQueue(2)
    coord = Coordinator()
    runner = QueueRunner(queue, [counting_op(queue), failing_op(queue, 5, exception)])
    threads = runner.create_threads(coord, start=True)
    drain(queue)  # returns because the queue is closed
    with pytest.raises(type(exception)) as info:
        coord.join(threads)
    assert info.value is exception
    assert runner.exceptions_raised == []
    with pytest.raises(OutOfRangeError, match="its input failed") as info:
        queue.dequeue()
    assert info.value.__cause__ is exception


def test_errors_are_recorded_without_a_coordinator(caplog):
    queue = FIFOQueue(2)
    first, second = ValueError("first"), KeyError("second")
    runner = QueueRunner(
        queue, [failing_op(queue, 0, first), counting_op(queue, 20), failing_op(queue, 1, second)]
    )
    threads = runner.create_threads(start=True)
    out = drain(queue)  # the other op runs until it is exhausted
    assert join_all(threads)
    assert sorted(x for x in out if x != "item") == list(range(20))
    assert sorted(map(repr, runner.exceptions_raised)) == [
        "KeyError('second')",
        "ValueError('first')",
    ]
    assert "first" in caplog.text
    assert "second" in caplog.text
    with pytest.raises(OutOfRangeError, match="its input failed") as info:
        queue.dequeue()
    assert info.value.__cause__ in (first, second)


def test_error_propagates_to_the_last_queue():
    names, rows = FIFOQueue(2), FIFOQueue(2)
    cause = ValueError("no such folder")
    threads = QueueRunner(names, [failing_op(names, 3, cause)]).create_threads(start=True)
    threads += QueueRunner(rows, [lambda: rows.enqueue(names.dequeue())]).create_threads(start=True)
    assert drain(rows) == ["item"] * 3
    with pytest.raises(OutOfRangeError, match="no such folder") as info:
        rows.dequeue()
    assert info.value.__cause__ is cause
    assert join_all(threads)


def test_closing_by_the_consumer_is_not_an_error(caplog):
    queue = FIFOQueue(2)
    runner = QueueRunner(queue, [counting_op(queue)] * 3)
    threads = runner.create_threads(start=True)
    queue.dequeue()
    queue.close(cancel_pending_enqueues=True)
    assert join_all(threads)
    assert runner.exceptions_raised == []
    assert not caplog.records


def test_runners_of_one_queue_are_created_before_one_of_them_closes_it():
    for trial in range(20):
        queue, elements, coordinator = FIFOQueue(10), iter(range(5)), Coordinator()

        def ended():
            raise StopIteration

        def fill(queue=queue, elements=elements):
            queue.enqueue(next(elements))

        for op in (ended, fill):
            add_queue_runner(QueueRunner(queue, [op]), f"of one queue {trial}")
        coordinator.join(start_queue_runners(coordinator, collection=f"of one queue {trial}"))


class TestRestart:
    def test_not_while_threads_are_running(self):
        queue = FIFOQueue(2)
        coord = Coordinator()
        runner = QueueRunner(queue, [counting_op(queue)])
        threads = runner.create_threads(coord, start=True)
        with pytest.raises(RuntimeError, match="have not ended; join them first"):
            runner.create_threads(coord)
        coord.request_stop()
        coord.join(threads)
        assert len(runner.create_threads(coord, start=True)) == 1
        coord.clear_stop()

    def test_restart_clears_the_recorded_exceptions(self):
        def broken():
            raise ValueError("broken")

        runner = QueueRunner(FIFOQueue(2), [broken])
        for _ in range(2):
            assert join_all(runner.create_threads(start=True))
            assert len(runner.exceptions_raised) == 1


class TestCollections:
    def test_start_queue_runners(self, request):
        name = request.node.name
        queues = [FIFOQueue(3), FIFOQueue(3)]
        for queue in queues:
            add_queue_runner(QueueRunner(queue, [counting_op(queue)] * 2), collection=name)
        coord = Coordinator()
        threads = start_queue_runners(coord, collection=name)
        assert len(threads) == 4
        assert all(t.daemon for t in threads)
        for queue in queues:
            queue.dequeue_many(5)
        coord.request_stop()
        coord.join(threads)
        assert all(queue.is_closed() for queue in queues)

    def test_running_are_skipped_and_closed_are_removed(self, request, caplog):
        name = request.node.name
        queue = FIFOQueue(3)
        runner = QueueRunner(queue, [counting_op(queue)])
        add_queue_runner(runner, name)
        add_queue_runner(runner, name)
        coord = Coordinator()
        threads = start_queue_runners(coord, collection=name)
        assert len(threads) == 1
        assert start_queue_runners(coord, collection=name) == []
        assert not caplog.records
        coord.request_stop()
        coord.join(threads)
        assert start_queue_runners(coord, collection=name) == []
        assert name in caplog.text


# The exit of the process.


def test_threads_do_not_keep_the_process_alive():
    """The main thread exits with an error while threads wait for room and for elements."""
    program = """
        import itertools
        from jstep.queues.coordinator import Coordinator
        from jstep.queues.queue_runner import QueueRunner
        from jstep.queues.queues import FIFOQueue
        numbers = itertools.count()
        def start(coord, daemon):
            full, empty, out = FIFOQueue(2), FIFOQueue(2), FIFOQueue(2)
            feed = [lambda: full.enqueue(next(numbers))] * 2
            QueueRunner(full, feed).create_threads(coord, daemon=daemon, start=True)
            relay = [lambda: out.enqueue(empty.dequeue())]
            QueueRunner(out, relay).create_threads(coord, daemon=daemon, start=True)
            return full.dequeue()
        for daemon in (True, False):
            print(start(Coordinator(), daemon) < start(None, daemon), flush=True)
        raise SystemExit(5)
    """
    assert run_program(program) == (5, "True\nTrue\n", "")


@pytest.mark.thorough
def test_other_threads_keep_waiting_after_the_main_thread():
    """Only threads of a QueueRunner give up, since a program may continue in other threads."""
    program = """
        import threading, time
        from jstep.queues.queues import FIFOQueue
        queue = FIFOQueue(1)
        def consume():
            print(queue.dequeue(), queue.dequeue(), flush=True)
        def produce():
            threading.main_thread().join()
            time.sleep(0.6)
            queue.enqueue("late")
            queue.enqueue("later")
        for target in (consume, produce):
            threading.Thread(target=target).start()
    """
    assert run_program(program) == (0, "late later\n", "")


@pytest.mark.thorough
def test_polling_the_main_thread_loses_no_wake_up():
    """A waiting worker polls whether the main thread is alive, and still receives wake-ups."""
    queue = FIFOQueue(1)
    threads = QueueRunner(queue, [counting_op(queue, 3)] * 2).create_threads(start=True)
    time.sleep(0.6)  # several polls
    assert sorted(drain(queue)) == [0, 1, 2]
    assert join_all(threads)


# Threads run in the context of their creator.

variable = contextvars.ContextVar("variable", default=0)


def context_settings():
    return (
        jax.config.jax_default_prng_impl,
        jax.config.jax_enable_x64,
        jax.sharding.get_mesh(),
        variable.get(),
    )


def settings_op(queue):
    def op():
        queue.enqueue(context_settings())
        raise StopIteration

    return op


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("collected", [False, True])
def test_threads_run_in_the_context_of_their_creator(kind, collected):
    queue, coord = FIFOQueue(10), Coordinator()
    runner = QueueRunner(queue, [settings_op(queue)] * 2)
    token = variable.set(7)
    try:
        with (
            jax.default_prng_impl("rbg"),
            jax.enable_x64(True),
            jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,))),
        ):
            expected = context_settings()
            if collected:
                add_queue_runner(runner, "contexts")
                threads = start_queue_runners(coord, collection="contexts")
            else:
                threads = runner.create_threads(coord, start=True)
            coord.join(threads)
    finally:
        variable.reset(token)
    assert [queue.dequeue(), queue.dequeue()] == [expected] * 2
    assert context_settings() != expected


def test_threads_started_manually():
    queue = FIFOQueue(10)
    (thread,) = QueueRunner(queue, [settings_op(queue)]).create_threads()
    with jax.enable_x64(True):
        thread.start()
    thread.join(TIMEOUT)
    assert queue.dequeue()[1] is True


@pytest.mark.parametrize(
    "take", [lambda queue: queue.dequeue(), lambda queue: queue.dequeue_many(2)]
)
def test_a_dequeue_that_nothing_feeds_says_so_once(monkeypatch, caplog, take):
    """A runner that was never started looks like a hang: `tf.train`'s oldest question."""
    monkeypatch.setattr(queues, "_WARN_SECS", 0.0)
    monkeypatch.setattr(queues, "_POLL_SECS", 0.001)
    queue = FIFOQueue(4)
    call = Call(lambda: take(queue))
    wait_until(lambda: caplog.messages)
    queue.enqueue_many(np.arange(4))
    call.wait()
    assert len(caplog.messages) == 1
    assert (
        "no element was ever enqueued. Start what feeds the queue: jstep.start_queue_runners"
        in caplog.messages[0]
    )
    while queue.size():
        queue.dequeue()
    call = Call(queue.dequeue)  # a queue that was fed, however slowly, is not warned of
    wait_until_blocked(queue, dequeues=1)
    queue.enqueue(1)
    call.wait()
    assert len(caplog.messages) == 1

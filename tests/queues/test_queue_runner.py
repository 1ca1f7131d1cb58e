"""`QueueRunner`: threads, completion, and errors."""

import pytest
from queue_calls import drain
from runner_ops import check_no_leftover_threads, counting_op, failing_op, join_all

from jstep.core.exceptions import OutOfRangeError
from jstep.queues.coordinator import Coordinator
from jstep.queues.queue_runner import QueueRunner, add_queue_runner, start_queue_runners
from jstep.queues.queues import CancelledError, FIFOQueue, RandomShuffleQueue

no_leftover_threads = pytest.fixture(autouse=True)(check_no_leftover_threads)


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
    threads += QueueRunner(rows, [lambda: rows.enqueue(names.dequeue() * 10)] * 3).create_threads(coord, start=True)
    assert sorted(drain(rows)) == list(range(0, 100, 10))
    if coord:
        coord.join()  # all have ended: no stop is needed
        assert not coord.should_stop()
    assert join_all(threads)


@pytest.mark.parametrize("exception", [ValueError("bad record"), SystemExit(3), CancelledError("another queue")])
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
    runner = QueueRunner(queue, [failing_op(queue, 0, first), counting_op(queue, 20), failing_op(queue, 1, second)])
    threads = runner.create_threads(start=True)
    out = drain(queue)  # the other op runs until it is exhausted
    assert join_all(threads)
    assert sorted(x for x in out if x != "item") == list(range(20))
    assert sorted(map(repr, runner.exceptions_raised)) == ["KeyError('second')", "ValueError('first')"]
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

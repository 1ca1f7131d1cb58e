"""QueueRunner: its threads, their ends, their errors."""

import threading

import numpy as np
import pytest
from runner_ops import LONG, counting, drained, ended, ends_all_threads, failing

from jstep.queues import FIFOQueue, QueueRunner, RandomShuffleQueue
from jstep.queues.coordinator import Coordinator
from jstep.queues.errors import CancelledError, OutOfRangeError

no_thread_is_left = pytest.fixture(autouse=True)(ends_all_threads)


def test_one_thread_for_each_op_until_all_are_exhausted():
    queue = FIFOQueue(3)
    threads = QueueRunner(queue, [counting(queue, 5), counting(queue, 7)]).create_threads()
    assert len(threads) == 2
    assert not any(t.is_alive() or t.daemon for t in threads)
    for thread in threads:
        thread.start()
    assert sorted(drained(queue)) == sorted([*range(5), *range(7)])
    assert queue.is_closed()
    assert ended(threads)


@pytest.mark.parametrize("coord", [None, Coordinator()])
def test_an_op_is_exhausted_with_the_queue_that_it_reads(coord):
    names, rows = FIFOQueue(2), RandomShuffleQueue(8, 2, seed=0)
    threads = QueueRunner(names, [counting(names, 10)]).create_threads(coord, start=True)
    threads += QueueRunner(rows, [lambda: rows.enqueue(names.dequeue() * 10)] * 3).create_threads(coord, start=True)
    assert sorted(drained(rows)) == list(range(0, 100, 10))
    if coord:
        coord.join()  # all have ended: no stop is needed
        assert not coord.should_stop()
    assert ended(threads)


def test_the_queue_stays_open_while_one_op_goes_on():
    queue = FIFOQueue(10)
    goes_on = threading.Event()

    def slow():
        goes_on.wait(LONG)
        raise StopIteration

    threads = QueueRunner(queue, [counting(queue, 2), slow]).create_threads(start=True)
    assert ended(threads[:1])
    assert not queue.is_closed()
    goes_on.set()
    assert ended(threads)
    assert queue.is_closed()
    assert drained(queue) == [0, 1]


def test_a_stop_ends_threads_that_wait_and_closes_the_queue():
    queue = FIFOQueue(2)
    coord = Coordinator()
    threads = QueueRunner(queue, [counting(queue)] * 4).create_threads(coord, start=True)
    assert queue.dequeue() == 0
    coord.request_stop()
    assert queue.is_closed()
    coord.join(threads)
    assert not any(t.is_alive() for t in threads)
    assert len(drained(queue)) <= 2


def test_threads_are_registered():
    queue = FIFOQueue(2)
    coord = Coordinator()
    threads = QueueRunner(queue, [counting(queue)]).create_threads(coord, start=True)
    coord.request_stop()
    coord.join()
    assert not threads[0].is_alive()


@pytest.mark.parametrize("exception", [ValueError("bad record"), SystemExit(3), CancelledError("another queue")])
def test_an_error_stops_all_and_comes_out_of_join(exception):
    queue = FIFOQueue(2)
    coord = Coordinator()
    runner = QueueRunner(queue, [counting(queue), failing(queue, 5, exception)])
    threads = runner.create_threads(coord, start=True)
    drained(queue)  # ends, as the queue is closed
    with pytest.raises(type(exception)) as info:
        coord.join(threads)
    assert info.value is exception
    assert runner.exceptions_raised == []
    with pytest.raises(OutOfRangeError, match="its input failed") as info:
        queue.dequeue()
    assert info.value.__cause__ is exception


def test_clean_stop_types_stop_without_an_error():
    class DoneError(Exception):
        pass

    queue = FIFOQueue(2)
    coord = Coordinator(clean_stop_exception_types=(DoneError,))
    threads = QueueRunner(queue, [counting(queue), failing(queue, 3, DoneError())]).create_threads(coord, start=True)
    drained(queue)
    coord.join(threads)
    assert coord.should_stop()


def test_errors_are_kept_without_a_coordinator(caplog):
    queue = FIFOQueue(2)
    first, second = ValueError("first"), KeyError("second")
    runner = QueueRunner(queue, [failing(queue, 0, first), counting(queue, 20), failing(queue, 1, second)])
    threads = runner.create_threads(start=True)
    out = drained(queue)  # the other op goes on to its end
    assert ended(threads)
    assert sorted(x for x in out if x != "item") == list(range(20))
    assert sorted(map(repr, runner.exceptions_raised)) == ["KeyError('second')", "ValueError('first')"]
    assert "first" in caplog.text
    assert "second" in caplog.text
    with pytest.raises(OutOfRangeError, match="its input failed") as info:
        queue.dequeue()
    assert info.value.__cause__ in (first, second)


def test_an_error_comes_through_to_the_last_queue():
    names, rows = FIFOQueue(2), FIFOQueue(2)
    cause = ValueError("no such folder")
    threads = QueueRunner(names, [failing(names, 3, cause)]).create_threads(start=True)
    threads += QueueRunner(rows, [lambda: rows.enqueue(names.dequeue())]).create_threads(start=True)
    assert drained(rows) == ["item"] * 3
    with pytest.raises(OutOfRangeError, match="no such folder") as info:
        rows.dequeue()
    assert info.value.__cause__ is cause
    assert ended(threads)


def test_an_error_of_all_ops_does_not_hang_the_consumer():
    queue = FIFOQueue(2)
    runner = QueueRunner(queue, [failing(queue, 0, ValueError("at once")) for _ in range(2)])
    threads = runner.create_threads(start=True)
    with pytest.raises(OutOfRangeError, match="at once"):
        queue.dequeue_many(3)
    assert ended(threads)


def test_the_traceback_of_the_op_is_kept():
    def broken_reader():
        raise ValueError("broken")

    runner = QueueRunner(FIFOQueue(2), [broken_reader])
    assert ended(runner.create_threads(start=True))
    traceback = runner.exceptions_raised[0].__traceback__
    names = []
    while traceback:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "broken_reader" in names


def test_a_queue_closed_by_the_consumer_is_no_error(caplog):
    queue = FIFOQueue(2)
    runner = QueueRunner(queue, [counting(queue)] * 3)
    threads = runner.create_threads(start=True)
    queue.dequeue()
    queue.close(cancel_pending_enqueues=True)
    assert ended(threads)
    assert runner.exceptions_raised == []
    assert not caplog.records


def test_a_queue_closed_from_the_start_is_one():
    queue = FIFOQueue(2)
    queue.close()
    runner = QueueRunner(queue, [counting(queue)])
    assert ended(runner.create_threads(start=True))
    assert [type(ex) for ex in runner.exceptions_raised] == [CancelledError]


def test_a_coordinator_that_has_stopped():
    queue = FIFOQueue(2)
    coord = Coordinator()
    coord.request_stop()
    threads = QueueRunner(queue, [counting(queue)]).create_threads(coord, start=True)
    coord.join(threads)
    assert drained(queue) == []


def test_an_error_after_join_is_logged(caplog):
    queue = FIFOQueue(2)
    coord = Coordinator()
    go = threading.Event()

    def late():
        go.wait(LONG)
        raise ValueError("nobody joins any more")

    threads = QueueRunner(queue, [late]).create_threads(coord, start=True)
    coord.request_stop()
    coord.join(threads, stop_grace_period_secs=0, ignore_live_threads=True)
    go.set()
    assert ended(threads)
    assert "nobody joins any more" in caplog.text


def test_stress_through_two_queues():
    names, rows = FIFOQueue(16), RandomShuffleQueue(64, 16, seed=1)
    coord = Coordinator()
    numbers = [iter(range(p * 2000, (p + 1) * 2000)) for p in range(8)]
    QueueRunner(names, [lambda n=n: names.enqueue(next(n)) for n in numbers]).create_threads(coord, start=True)
    QueueRunner(rows, [lambda: rows.enqueue(names.dequeue())] * 4).create_threads(coord, start=True)
    out = np.concatenate([rows.dequeue_many(100) for _ in range(160)])
    assert np.array_equal(np.sort(out), np.arange(16_000))
    coord.join()

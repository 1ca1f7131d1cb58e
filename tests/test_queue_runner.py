"""QueueRunner: threads that feed a queue, end with it, and report what goes wrong."""

import itertools
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from jstep.queues import FIFOQueue, RandomShuffleQueue
from jstep.queues.coordinator import Coordinator
from jstep.queues.errors import CancelledError, OutOfRangeError
from jstep.queues.queue_runner import QueueRunner, add_queue_runner, start_queue_runners

LONG = 20  # seconds until a test that hangs fails


def counting(queue, n=None):
    """An op that enqueues 0, 1, 2 … until n."""
    numbers = itertools.count() if n is None else iter(range(n))
    return lambda: queue.enqueue(next(numbers))


def failing(queue, after, exception):
    numbers = itertools.count()

    def op():
        if next(numbers) == after:
            raise exception
        queue.enqueue("item")

    return op


def drained(queue):
    out = []
    while True:
        try:
            out.append(queue.dequeue())
        except OutOfRangeError:
            return out


def ended(threads):
    for thread in threads:
        thread.join(LONG)
    return not any(thread.is_alive() for thread in threads)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert ended(left), left


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


class TestAgain:
    def test_not_while_threads_are_running(self):
        queue = FIFOQueue(2)
        coord = Coordinator()
        runner = QueueRunner(queue, [counting(queue)])
        threads = runner.create_threads(coord, start=True)
        with pytest.raises(RuntimeError, match=rf"have not ended yet: {threads[0].name}"):
            runner.create_threads(coord)
        coord.request_stop()
        coord.join(threads)
        assert len(runner.create_threads(coord, start=True)) == 1
        coord.clear_stop()

    def test_not_while_threads_have_not_been_started(self):
        runner = QueueRunner(FIFOQueue(2), [print])
        runner.create_threads()
        with pytest.raises(RuntimeError, match="were never started"):
            runner.create_threads()

    def test_after_they_have_ended_with_the_exceptions_forgotten(self):
        def broken():
            raise ValueError("broken")

        runner = QueueRunner(FIFOQueue(2), [broken])
        for _ in range(2):
            assert ended(runner.create_threads(start=True))
            assert len(runner.exceptions_raised) == 1


class TestCollections:
    def test_start_queue_runners(self, request):
        name = request.node.name
        queues = [FIFOQueue(3), FIFOQueue(3)]
        for queue in queues:
            add_queue_runner(QueueRunner(queue, [counting(queue)] * 2), collection=name)
        coord = Coordinator()
        threads = start_queue_runners(coord, collection=name)
        assert len(threads) == 4
        assert all(t.daemon for t in threads)
        for queue in queues:
            queue.dequeue_many(5)
        coord.request_stop()
        coord.join(threads)
        assert all(queue.is_closed() for queue in queues)

    def test_collections_are_separate_and_one_is_the_default(self, request):
        mine, theirs = FIFOQueue(3), FIFOQueue(3)
        add_queue_runner(QueueRunner(mine, [counting(mine, 1)]))
        add_queue_runner(QueueRunner(theirs, [counting(theirs, 1)]), collection=request.node.name)
        assert ended(start_queue_runners())
        assert drained(mine) == [0]
        assert theirs.size() == 0

    def test_running_ones_are_left_alone_and_closed_ones_leave(self, request, caplog):
        name = request.node.name
        queue = FIFOQueue(3)
        runner = QueueRunner(queue, [counting(queue)])
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

    def test_made_and_not_started(self, request):
        queue = FIFOQueue(3)
        add_queue_runner(QueueRunner(queue, [counting(queue, 3)]), request.node.name)
        (thread,) = start_queue_runners(start=False, daemon=False, collection=request.node.name)
        assert not thread.daemon
        thread.start()
        assert drained(queue) == [0, 1, 2]

    def test_misuse(self):
        with pytest.raises(TypeError, match=r"qr=<FIFOQueue.*must be a QueueRunner"):
            add_queue_runner(FIFOQueue(1))
        runner = QueueRunner(FIFOQueue(1), [print])
        with pytest.raises(TypeError, match="collection=3"):
            add_queue_runner(runner, 3)
        with pytest.raises(TypeError, match="collection=None"):
            start_queue_runners(collection=None)


class TestMisuse:
    def test_queue(self):
        with pytest.raises(TypeError, match="queue=None: must be a FIFOQueue or a RandomShuffleQueue"):
            QueueRunner(None, [print])

    def test_enqueue_ops(self):
        queue = FIFOQueue(1)
        with pytest.raises(ValueError, match=r"enqueue_ops=\[\]"):
            QueueRunner(queue, [])
        with pytest.raises(TypeError, match="must be a list of callables"):
            QueueRunner(queue, print)
        with pytest.raises(TypeError, match=r"enqueue_ops\[1\]=None: must be callable"):
            QueueRunner(queue, [print, queue.enqueue(1)])

    def test_coord(self):
        with pytest.raises(TypeError, match="coord=True: must be a Coordinator"):
            QueueRunner(FIFOQueue(1), [print]).create_threads(True)


def test_names_and_repr():
    queue = FIFOQueue(1)

    def read_lines():
        raise StopIteration

    runner = QueueRunner(queue, [read_lines, counting(queue, 1)])
    threads = runner.create_threads()
    assert [t.name for t in threads] == [
        "QueueRunnerThread-FIFOQueue-0-read_lines",
        "QueueRunnerThread-FIFOQueue-1-<lambda>",
    ]
    assert runner.queue is queue
    assert repr(runner) == "<QueueRunner of <FIFOQueue 0 of 1>, 2 ops, 0 threads alive>"


def test_stress_through_two_queues():
    names, rows = FIFOQueue(16), RandomShuffleQueue(64, 16, seed=1)
    coord = Coordinator()
    numbers = [iter(range(p * 2000, (p + 1) * 2000)) for p in range(8)]
    QueueRunner(names, [lambda n=n: names.enqueue(next(n)) for n in numbers]).create_threads(coord, start=True)
    QueueRunner(rows, [lambda: rows.enqueue(names.dequeue())] * 4).create_threads(coord, start=True)
    out = np.concatenate([rows.dequeue_many(100) for _ in range(160)])
    assert np.array_equal(np.sort(out), np.arange(16_000))
    coord.join()


@pytest.mark.parametrize("daemon", [True, False])
def test_no_thread_keeps_the_process_alive(daemon):
    """The main thread ends, by an error too, while producers wait for room and others for elements."""
    program = f"""
        import itertools
        from jstep.queues.coordinator import Coordinator
        from jstep.queues.queue_runner import QueueRunner
        from jstep.queues import FIFOQueue
        numbers = itertools.count()
        def start(coord):
            full, empty, out = FIFOQueue(2), FIFOQueue(2), FIFOQueue(2)
            feed = [lambda: full.enqueue(next(numbers))] * 2
            QueueRunner(full, feed).create_threads(coord, daemon={daemon}, start=True)
            relay = [lambda: out.enqueue(empty.dequeue())]
            QueueRunner(out, relay).create_threads(coord, daemon={daemon}, start=True)
            return full.dequeue()
        print(start(Coordinator()) < start(None), flush=True)
        raise SystemExit(5)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "True\n", "")


def test_threads_of_others_wait_on_when_the_main_thread_has_ended():
    """Only what a QueueRunner started gives up: a program may live in threads of its own."""
    program = """
        import threading, time
        from jstep.queues import FIFOQueue
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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "late later\n", "")


def test_a_worker_that_waits_looks_after_the_main_thread_and_goes_on():
    """The poll for the end of the process loses no wake-up."""
    queue = FIFOQueue(1)
    threads = QueueRunner(queue, [counting(queue, 3)] * 2).create_threads(start=True)
    time.sleep(0.6)  # several polls
    assert sorted(drained(queue)) == [0, 1, 2]
    assert ended(threads)

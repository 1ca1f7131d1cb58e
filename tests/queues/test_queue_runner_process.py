"""`QueueRunner` threads at process exit."""

import time

import pytest
from processes import run_program
from queue_calls import drain
from runner_ops import counting_op, join_all

from jstep.queues.queue_runner import QueueRunner
from jstep.queues.queues import FIFOQueue


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

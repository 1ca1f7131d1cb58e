"""QueueRunners and the end of the process."""

import time

from processes import said
from runner_ops import counting, drained, ended

from jstep.queues import FIFOQueue, QueueRunner


def test_no_thread_keeps_the_process_alive():
    """The main thread ends, by an error too, while producers wait for room and others for elements."""
    program = """
        import itertools
        from jstep.queues.coordinator import Coordinator
        from jstep.queues.queue_runner import QueueRunner
        from jstep.queues import FIFOQueue
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
    assert said(program) == (5, "True\nTrue\n", "")


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
    assert said(program) == (0, "late later\n", "")


def test_a_worker_that_waits_looks_after_the_main_thread_and_goes_on():
    """The poll for the end of the process loses no wake-up."""
    queue = FIFOQueue(1)
    threads = QueueRunner(queue, [counting(queue, 3)] * 2).create_threads(start=True)
    time.sleep(0.6)  # several polls
    assert sorted(drained(queue)) == [0, 1, 2]
    assert ended(threads)

"""Closing a queue, interrupting blocked calls, and invalid arguments."""

import signal
import threading
import time

import pytest
from processes import running_program
from queue_calls import Call, both_queues, disable_polling, drain, fifo, filled, wait_until_blocked
from waiting import wait_until

from jstep.core.exceptions import OutOfRangeError
from jstep.queues.queues import CancelledError

no_polling = pytest.fixture(autouse=True)(disable_polling)


class TestClose:
    @both_queues
    def test_remaining_elements_are_returned_before_the_end(self, make):
        queue = filled(make(), range(3))
        queue.close()
        assert queue.is_closed()
        assert sorted(drain(queue)) == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(OutOfRangeError, match=f"{type(queue).__name__} is closed"):
                queue.dequeue()

    @both_queues
    def test_pending_enqueues_are_served(self, make):
        queue = filled(make(1), [0])
        calls = [Call(queue.enqueue, i) for i in range(1, 4)]
        wait_until_blocked(queue, enqueues=3)
        queue.close()
        wait_until_blocked(queue, enqueues=3)
        assert sorted(drain(queue)) == [0, 1, 2, 3]
        for call in calls:
            call.wait()

    @both_queues
    def test_pending_enqueues_are_cancelled_on_request(self, make):
        queue = filled(make(1), [0])
        calls = [Call(queue.enqueue, i) for i in range(1, 4)]
        wait_until_blocked(queue, enqueues=3)
        queue.close(cancel_pending_enqueues=True)
        for call in calls:
            with pytest.raises(CancelledError, match="cancelled"):
                call.wait()
        assert drain(queue) == [0]


class InterruptedOnce(threading.Condition):
    """Ctrl-C just after the first wait."""

    is_over = False

    def wait(self, timeout=None):
        super().wait(timeout)
        if not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt


class TestInterrupts:
    """Ctrl-C interrupts a waiting main thread, and no element is lost."""

    @pytest.mark.thorough
    def test_ctrl_c(self):
        program = """
            import numpy as np
            from jstep.queues.queues import FIFOQueue
            calls = [(0, lambda q: q.dequeue()), (1, lambda q: q.dequeue_many(3)), (2, lambda q: q.enqueue(9))]
            calls.append((1, lambda q: q.enqueue_many(np.zeros(2))))
            for left, call in calls:
                queue = FIFOQueue(2)
                for i in range(left):
                    queue.enqueue(i)
                try:
                    print("ready", flush=True)
                    call(queue)
                except KeyboardInterrupt:
                    assert queue.size() == left
                    while queue.size() < 2:  # the queue still works
                        queue.enqueue(7)
                    queue.dequeue()
                    queue.close()
                    queue.dequeue()
                    print("interrupted", flush=True)
        """
        with running_program(program) as process:
            for _ in range(4):
                assert process.stdout.readline() == "ready\n"
                time.sleep(0.1)  # so that the signal most likely arrives during the wait
                process.send_signal(signal.SIGINT)
                assert process.stdout.readline() == "interrupted\n"
            assert process.wait(timeout=60) == 0

    def test_an_interrupted_dequeue_takes_no_element(self):
        queue = fifo()
        queue._changed = InterruptedOnce(queue._mutex)
        calls = [Call(queue.dequeue) for _ in range(2)]
        wait_until_blocked(queue, dequeues=2)
        queue.enqueue("x")
        wait_until(lambda: not any(call.thread.is_alive() for call in calls))
        assert {type(call.error) for call in calls} == {KeyboardInterrupt, type(None)}
        assert {call.result for call in calls} == {"x", None}

    def test_closing_from_a_signal_handler(self):
        queue = fifo()
        handler = signal.signal(signal.SIGUSR1, lambda *_: queue.close())
        try:
            with queue._mutex:
                signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, handler)
        with pytest.raises(OutOfRangeError):
            queue.dequeue()

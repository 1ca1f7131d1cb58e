"""Closing a queue, interrupting its waits, and wrong arguments."""

import signal
import time

import pytest
from processes import talking
from queue_calls import Call, asleep, both, drained, fifo, never_polls, shuffle

from jstep.queues import FIFOQueue, RandomShuffleQueue, _bounded_queue
from jstep.queues.errors import CancelledError, OutOfRangeError

no_polling = pytest.fixture(autouse=True)(never_polls)


class TestClose:
    @both
    def test_drains_and_then_ends(self, make):
        queue = make()
        for i in range(3):
            queue.enqueue(i)
        queue.close()
        assert queue.is_closed()
        assert sorted(drained(queue)) == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(OutOfRangeError, match=f"{type(queue).__name__} is closed"):
                queue.dequeue()

    @both
    def test_wakes_all_consumers(self, make):
        queue = make()
        calls = [Call(queue.dequeue) for _ in range(3)]
        asleep(queue, dequeues=3)
        queue.close()
        for call in calls:
            with pytest.raises(OutOfRangeError):
                call.wait()

    @both
    def test_refuses_new_elements(self, make):
        queue = make()
        queue.close()
        with pytest.raises(CancelledError, match="is closed"):
            queue.enqueue(1)
        assert queue.size() == 0

    @both
    def test_pending_enqueues_are_served(self, make):
        queue = make(1)
        queue.enqueue(0)
        calls = [Call(queue.enqueue, i) for i in range(1, 4)]
        asleep(queue, enqueues=3)
        queue.close()
        asleep(queue, enqueues=3)
        assert sorted(drained(queue)) == [0, 1, 2, 3]
        for call in calls:
            call.wait()

    @both
    def test_pending_enqueues_are_served_to_dequeue_many(self, make):
        queue = make(1)
        queue.enqueue(0)
        calls = [Call(queue.enqueue, i) for i in range(1, 5)]
        asleep(queue, enqueues=4)
        queue.close()
        assert len(queue.dequeue_many(3)) == 3
        with pytest.raises(OutOfRangeError, match="requested 3, current size 2"):
            queue.dequeue_many(3)
        assert len(drained(queue)) == 2
        for call in calls:
            call.wait()

    @both
    def test_pending_enqueues_are_cancelled_on_request(self, make):
        queue = make(1)
        queue.enqueue(0)
        calls = [Call(queue.enqueue, i) for i in range(1, 4)]
        asleep(queue, enqueues=3)
        queue.close(cancel_pending_enqueues=True)
        for call in calls:
            with pytest.raises(CancelledError, match="cancelled"):
                call.wait()
        assert drained(queue) == [0]

    @both
    def test_twice_and_the_second_may_cancel(self, make):
        queue = make(1)
        queue.enqueue(0)
        call = Call(queue.enqueue, 1)
        asleep(queue, enqueues=1)
        queue.close()
        queue.close(cancel_pending_enqueues=True)
        with pytest.raises(CancelledError):
            call.wait()
        queue.close()
        assert drained(queue) == [0]

    @both
    def test_names_what_the_input_failed_of(self, make):
        queue = make()
        cause = ValueError("bad file")
        queue.fail(cause)
        queue.fail(ValueError("later"))
        queue.close()
        with pytest.raises(OutOfRangeError, match="bad file") as info:
            queue.dequeue()
        assert info.value.__cause__ is cause

    def test_min_after_dequeue_is_ignored_then(self):
        queue = shuffle(10, 5)
        for i in range(5):
            queue.enqueue(i)
        call = Call(queue.dequeue)
        asleep(queue, dequeues=1)
        queue.close()
        assert sorted([call.wait(), *drained(queue)]) == list(range(5))


class TestInterrupts:
    """Ctrl-C while the main thread waits: it gets through, and nothing is lost."""

    def test_ctrl_c(self):
        program = """
            from jstep.queues import FIFOQueue
            calls = [(0, lambda q: q.dequeue()), (1, lambda q: q.dequeue_many(3)), (2, lambda q: q.enqueue(9))]
            for left, call in calls:
                queue = FIFOQueue(2)
                for i in range(left):
                    queue.enqueue(i)
                try:
                    print("ready", flush=True)
                    call(queue)
                except KeyboardInterrupt:
                    assert queue.size() == left
                    while queue.size() < 2:  # and it works as before
                        queue.enqueue(7)
                    queue.dequeue()
                    queue.close()
                    queue.dequeue()
                    print("interrupted", flush=True)
        """
        with talking(program) as process:
            for _ in range(3):
                assert process.stdout.readline() == "ready\n"
                time.sleep(0.1)  # most likely into the wait
                process.send_signal(signal.SIGINT)
                assert process.stdout.readline() == "interrupted\n"
            assert process.wait(timeout=60) == 0

    def test_a_wake_up_meant_for_who_was_interrupted_is_passed_on(self):
        queue = fifo()
        sleepers = queue._for_elements
        original = sleepers._condition.wait

        def interrupted(timeout=None):
            original(timeout)
            raise KeyboardInterrupt

        sleepers._condition.wait = interrupted
        first = Call(queue.dequeue)
        asleep(queue, dequeues=1)
        sleepers._condition.wait = original
        second = Call(queue.dequeue)
        asleep(queue, dequeues=2)
        queue.enqueue("x")
        with pytest.raises(KeyboardInterrupt):
            first.wait()
        assert second.wait() == "x"

    def test_closing_by_a_signal_just_before_the_wait(self, monkeypatch):
        """The wake-up finds nobody asleep yet."""
        monkeypatch.setattr(_bounded_queue, "_POLL_SECS", 0.01)
        queue = fifo()
        original = queue._for_elements.sleep

        def late():
            queue._for_elements.sleep = original
            queue.close()  # on this thread, between its look and its wait
            original()

        queue._for_elements.sleep = late
        with pytest.raises(OutOfRangeError):
            Call(queue.dequeue).wait()

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


class TestMisuse:
    @pytest.mark.parametrize("capacity", [0, -3])
    def test_capacity_that_holds_nothing(self, capacity):
        for make in (FIFOQueue, lambda c: RandomShuffleQueue(c, 0, 0)):
            with pytest.raises(ValueError, match=f"capacity={capacity}: must be at least 1"):
                make(capacity)

    @pytest.mark.parametrize("capacity", [2.5, "2", None, True])
    def test_capacity_that_is_no_integer(self, capacity):
        with pytest.raises(TypeError, match=r"capacity=.*: must be an integer"):
            FIFOQueue(capacity)

    def test_min_after_dequeue_out_of_range(self):
        with pytest.raises(ValueError, match="min_after_dequeue=-1: must be at least 0"):
            RandomShuffleQueue(10, -1, 0)
        for minimum in (10, 11):
            with pytest.raises(ValueError, match=f"min_after_dequeue={minimum}: must be less than capacity=10"):
                RandomShuffleQueue(10, minimum, 0)
        with pytest.raises(TypeError, match="min_after_dequeue"):
            RandomShuffleQueue(10, 0.5, 0)

    def test_seed_that_is_no_integer(self):
        with pytest.raises(TypeError, match="seed='s'"):
            RandomShuffleQueue(10, 0, "s")

    @pytest.mark.parametrize("n", [0, -1])
    def test_batches_of_nothing(self, n):
        with pytest.raises(ValueError, match=f"n={n}: must be at least 1"):
            fifo().dequeue_many(n)

    def test_n_that_is_no_integer(self):
        with pytest.raises(TypeError, match=r"n=2\.5"):
            fifo().dequeue_many(2.5)

    def test_repr(self):
        queue = FIFOQueue(5)
        queue.enqueue(1)
        assert repr(queue) == "<FIFOQueue 1 of 5>"
        queue.close()
        assert repr(queue) == "<FIFOQueue 1 of 5, closed>"
        assert queue.capacity == 5

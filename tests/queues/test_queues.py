"""`FIFOQueue` and `RandomShuffleQueue`: order, blocking, shuffling, closing, and interrupted
calls."""

import collections
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import running_program
from queue_calls import (
    Call,
    both_queues,
    disable_polling,
    drain,
    fifo,
    filled,
    shuffle,
    wait_until_blocked,
)
from waiting import wait_until

from jstep.core.exceptions import OutOfRangeError, items_until_end
from jstep.queues import queues
from jstep.queues.queues import CancelledError, FIFOQueue, RandomShuffleQueue

no_polling = pytest.fixture(autouse=True)(disable_polling)


@both_queues
def test_elements_are_returned_unchanged(make):
    queue = make()
    element = {"a": np.arange(3), "b": (None, "text", [1, 2.5])}
    queue.enqueue(element)
    assert queue.dequeue() is element


@both_queues
def test_dequeue_waits_for_an_element(make):
    queue = make()
    call = Call(queue.dequeue)
    wait_until_blocked(queue, dequeues=1)
    queue.enqueue("x")
    assert call.wait() == "x"


@both_queues
def test_enqueue_waits_for_room(make):
    queue = filled(make(2), [0, 1])
    call = Call(queue.enqueue, 2)
    wait_until_blocked(queue, enqueues=1)
    assert queue.size() == 2
    first = queue.dequeue()
    call.wait()
    assert sorted([first, queue.dequeue(), queue.dequeue()]) == [0, 1, 2]


class TestShuffle:
    def test_min_after_dequeue_elements_stay(self):
        queue = filled(shuffle(10, 3), range(3))
        call = Call(queue.dequeue)
        wait_until_blocked(queue, dequeues=1)
        queue.enqueue(3)
        call.wait()
        assert queue.size() == 3

    def shuffled(self, seed, n=500, capacity=64, min_after_dequeue=31, threads=False):
        queue = RandomShuffleQueue(capacity, min_after_dequeue, seed)

        def produce():
            for i in range(n):
                queue.enqueue(i)
                if threads and i % 17 == 0:
                    time.sleep(1e-4 * (i % 3))  # vary the timing
            queue.close()

        producer = Call(produce)
        if not threads:
            wait_until(lambda: queue.size() == min(n, capacity))
        out = drain(queue)
        producer.wait()
        return out

    def test_order_is_a_permutation_within_the_window(self):
        out = self.shuffled(seed=1)
        assert sorted(out) == list(range(500))
        assert sum(a == b for a, b in enumerate(out)) < 50
        # No element is returned before it can be in the queue.
        assert all(x <= i + 31 for i, x in enumerate(out))

    @pytest.mark.parametrize("min_after_dequeue", [1, 31])
    def test_order_depends_on_the_seed_not_on_timing(self, min_after_dequeue):
        orders = [
            self.shuffled(7, min_after_dequeue=min_after_dequeue, threads=i > 0) for i in range(4)
        ]
        assert orders[0] == orders[1] == orders[2] == orders[3]

    def test_dequeue_many_gives_the_order_of_dequeue(self):
        single = self.shuffled(3)
        queue = RandomShuffleQueue(64, 31, 3)
        producer = Call(lambda: [queue.enqueue(i) for i in range(500)])
        out = [x for _ in range(11) for x in queue.dequeue_many(40).tolist()]
        producer.wait()
        queue.close()
        assert out + drain(queue) == single

    def test_elements_of_the_window_are_equally_likely(self):
        counts = collections.Counter()
        for seed in range(4000):
            queue = filled(shuffle(10, 3, seed), range(6))
            counts[queue.dequeue()] += 1
        assert set(counts) == {0, 1, 2, 3}
        assert all(abs(count - 1000) < 150 for count in counts.values())  # 5.5 standard deviations


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.just("in"), st.just("out"), st.integers(1, 5)), max_size=60),
    st.integers(0, 3),
    st.booleans(),
)
def test_single_thread_behaves_like_a_list(operations, min_after_dequeue, random):
    """Compare operations that do not block with a list as the model."""
    queue = RandomShuffleQueue(8, min_after_dequeue, 0) if random else FIFOQueue(8)
    minimum = min_after_dequeue if random else 0
    model, number = [], 0
    for operation in operations:
        if operation == "in" and len(model) < 8:
            queue.enqueue(number)
            model.append(number)
            number += 1
        elif operation != "in":
            n = 1 if operation == "out" else operation
            if len(model) - minimum >= n:
                got = [queue.dequeue()] if operation == "out" else queue.dequeue_many(n).tolist()
                if not random:
                    assert got == model[:n]
                for x in got:
                    model.remove(x)
        assert queue.size() == len(model)
    queue.close()
    assert sorted(drain(queue)) == model


def test_batches_that_the_exit_of_a_program_closes(monkeypatch):
    items = items_until_end([1, 2])
    assert next(items) == 1
    monkeypatch.setattr(queues, "OutOfRangeError", None)  # the names of a module are gone by then
    items.close()


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
        """  # noqa: E501
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

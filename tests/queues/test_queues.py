"""`FIFOQueue` and `RandomShuffleQueue`: order, blocking, and shuffling."""

import collections
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_calls import Call, both_queues, disable_polling, drain, filled, shuffle, wait_until_blocked
from waiting import wait_until

from jstep.core.exceptions import until_end
from jstep.queues import queues
from jstep.queues.queues import FIFOQueue, RandomShuffleQueue

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
        assert all(x <= i + 31 for i, x in enumerate(out))  # no element is returned before it can be in the queue

    @pytest.mark.parametrize("min_after_dequeue", [1, 31])
    def test_order_depends_on_the_seed_not_on_timing(self, min_after_dequeue):
        orders = [self.shuffled(7, min_after_dequeue=min_after_dequeue, threads=i > 0) for i in range(4)]
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
    items = until_end([1, 2])
    assert next(items) == 1
    monkeypatch.setattr(queues, "OutOfRangeError", None)  # the names of a module are gone by then
    items.close()

"""FIFOQueue and RandomShuffleQueue: order, waiting, shuffling."""

import collections
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_calls import Call, asleep, both, drained, fifo, never_polls, shuffle, until

from jstep.queues import FIFOQueue, RandomShuffleQueue
from jstep.queues.errors import OutOfRangeError

no_polling = pytest.fixture(autouse=True)(never_polls)


def test_first_in_first_out():
    queue = FIFOQueue(100)
    for i in range(100):
        queue.enqueue(i)
    assert queue.size() == 100
    assert [queue.dequeue() for _ in range(50)] == list(range(50))
    assert queue.size() == 50


@both
def test_elements_are_any_object_and_come_back_as_they_are(make):
    queue = make()
    element = {"a": np.arange(3), "b": (None, "text", [1, 2.5])}
    queue.enqueue(element)
    assert queue.dequeue() is element


@both
def test_dequeue_waits_for_an_element(make):
    queue = make()
    call = Call(queue.dequeue)
    asleep(queue, dequeues=1)
    queue.enqueue("x")
    assert call.wait() == "x"


@both
def test_enqueue_waits_for_room(make):
    queue = make(2)
    queue.enqueue(0)
    queue.enqueue(1)
    call = Call(queue.enqueue, 2)
    asleep(queue, enqueues=1)
    assert queue.size() == 2
    first = queue.dequeue()
    call.wait()
    assert sorted([first, queue.dequeue(), queue.dequeue()]) == [0, 1, 2]


@both
def test_every_waiting_consumer_is_served(make):
    queue = make()
    calls = [Call(queue.dequeue) for _ in range(5)]
    asleep(queue, dequeues=5)
    for i in range(5):
        queue.enqueue(i)
    assert sorted(call.wait() for call in calls) == list(range(5))


@both
def test_every_waiting_producer_is_served(make):
    queue = make(1)
    queue.enqueue(0)
    calls = [Call(queue.enqueue, i) for i in range(1, 6)]
    asleep(queue, enqueues=5)
    assert sorted(queue.dequeue() for _ in range(6)) == list(range(6))
    for call in calls:
        call.wait()


class TestShuffle:
    def test_min_after_dequeue_elements_stay(self):
        queue = shuffle(10, 3)
        for i in range(3):
            queue.enqueue(i)
        call = Call(queue.dequeue)
        asleep(queue, dequeues=1)
        queue.enqueue(3)
        call.wait()
        assert queue.size() == 3

    def order(self, seed, n=500, capacity=64, min_after_dequeue=31, threads=False):
        queue = RandomShuffleQueue(capacity, min_after_dequeue, seed)

        def produce():
            for i in range(n):
                queue.enqueue(i)
                if threads and i % 17 == 0:
                    time.sleep(1e-4 * (i % 3))  # other timings
            queue.close()

        producer = Call(produce)
        if not threads:
            until(lambda: queue.size() == min(n, capacity))
        out = drained(queue)
        producer.wait()
        return out

    def test_a_permutation_far_from_the_order_of_arrival(self):
        out = self.order(seed=1)
        assert sorted(out) == list(range(500))
        assert sum(a == b for a, b in enumerate(out)) < 50
        assert all(x <= i + 31 for i, x in enumerate(out))  # nothing is given before it can be there

    @pytest.mark.parametrize("min_after_dequeue", [1, 31])
    def test_the_seed_determines_it_whatever_the_timing(self, min_after_dequeue):
        orders = [self.order(7, min_after_dequeue=min_after_dequeue, threads=i > 0) for i in range(4)]
        assert orders[0] == orders[1] == orders[2] == orders[3]

    def test_the_capacity_does_not_matter(self):
        assert self.order(7, capacity=32) == self.order(7, capacity=400)

    def test_batches_hold_what_single_dequeues_give(self):
        single = self.order(3)
        queue = RandomShuffleQueue(64, 31, 3)
        producer = Call(lambda: [queue.enqueue(i) for i in range(500)])
        out = [x for _ in range(11) for x in queue.dequeue_many(40).tolist()]
        producer.wait()
        queue.close()
        assert out + drained(queue) == single

    def test_a_batch_that_waits_does_not_disturb_the_order(self):
        """dequeue_many that fails, at whatever time, draws nothing."""
        expected = self.order(5, n=40)
        queue = RandomShuffleQueue(64, 31, 5)
        call = Call(queue.dequeue_many, 50)
        for i in range(40):
            queue.enqueue(i)
        queue.close()
        with pytest.raises(OutOfRangeError):
            call.wait()
        assert drained(queue) == expected

    def test_seeds_differ(self):
        assert self.order(1) != self.order(2)
        assert self.order(None) != self.order(None)

    def test_without_a_minimum_it_draws_among_all(self):
        def order(seed):
            queue = shuffle(200, 0, seed)
            for i in range(200):
                queue.enqueue(i)
            return [queue.dequeue() for _ in range(200)]

        out = order(0)
        assert sorted(out) == list(range(200))
        assert out[:10] != list(range(10))
        assert max(out[:20]) > 100
        assert order(0) == out != order(1)

    def test_every_element_of_the_window_is_as_likely(self):
        counts = collections.Counter()
        for seed in range(4000):
            queue = shuffle(10, 3, seed)
            for i in range(6):
                queue.enqueue(i)
            counts[queue.dequeue()] += 1
        assert set(counts) == {0, 1, 2, 3}
        assert all(abs(count - 1000) < 150 for count in counts.values())  # 5.5 standard deviations


@pytest.mark.parametrize("consumers", [1, 3])
@pytest.mark.parametrize("make", [fifo, shuffle, lambda capacity: shuffle(capacity, 31)])
def test_stress_nothing_lost_nothing_twice(make, consumers):
    """8 producers of 3000 items each."""
    queue = make(64)
    producers, items = 8, 3000
    calls = [
        Call(lambda p=p: collections.deque((queue.enqueue(p * items + i) for i in range(items)), maxlen=0))
        for p in range(producers)
    ]

    def consume(batch):
        out = []
        try:
            while True:
                out.extend(queue.dequeue_many(batch).tolist() if batch else [queue.dequeue()])
        except OutOfRangeError:
            return out

    takers = [Call(consume, batch) for batch in (0, 7, 100)[:consumers]]
    for call in calls:
        call.wait()
    queue.close()
    out = [x for taker in takers for x in taker.wait()]
    out += drained(queue)
    assert len(out) == producers * items
    assert set(out) == set(range(producers * items))
    if make is fifo and consumers == 1:  # each producer's own order is kept
        for p in range(producers):
            own = [x for x in out if x // items == p]
            assert own == sorted(own)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.just("in"), st.just("out"), st.integers(1, 5)), max_size=60),
    st.integers(0, 3),
    st.booleans(),
)
def test_one_thread_sees_a_plain_list(operations, min_after_dequeue, random):
    """Against a model: whatever cannot wait is done at once, in order."""
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
    assert sorted(drained(queue)) == model

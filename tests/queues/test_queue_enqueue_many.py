"""`enqueue_many`, which is atomic and does not deadlock, and `dequeue_up_to`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from queue_calls import Call, both_queues, disable_polling, drain, fifo, shuffle, wait_until_blocked

from jstep.core.exceptions import OutOfRangeError
from jstep.queues.queues import CancelledError

no_polling = pytest.fixture(autouse=True)(disable_polling)


def rows(first, stop):
    return np.arange(first, stop)


class TestEnqueueMany:
    def test_each_element_is_a_row_of_each_leaf(self):
        queue = fifo()
        stacked = {
            "x": np.arange(12.0).reshape(3, 2, 2),
            "y": (jnp.arange(3), np.array(["a", "bc", "d"])),
            "none": None,
        }
        with jax.transfer_guard("disallow"):
            queue.enqueue_many(stacked)
            element = queue.dequeue()
        np.testing.assert_array_equal(element["x"], [[0, 1], [2, 3]])
        assert (element["y"], element["none"]) == ((0, "a"), None)
        assert isinstance(element["y"][0], jax.Array)
        rest = queue.dequeue_many(2)
        jax.tree.map(np.testing.assert_array_equal, rest, jax.tree.map(lambda leaf: leaf[1:], stacked))

    def test_the_arrays_can_be_reused(self):
        queue, whole = fifo(), np.zeros((2, 3))
        queue.enqueue_many(whole)
        whole[:] = 1
        first, second = queue.dequeue(), queue.dequeue()
        assert (first.sum(), second.sum()) == (0, 0)
        assert first.base is None  # a view would keep the memory of all rows

    @both_queues
    def test_no_rows_are_added_at_once_even_to_a_full_or_closed_queue(self, make):
        queue = make(1)
        queue.enqueue_many(np.zeros((0, 2)))
        queue.enqueue(0)
        queue.enqueue_many(np.zeros((0, 2)))
        queue.close()
        queue.enqueue_many(np.zeros((0, 2)))
        assert queue.size() == 1

    @both_queues
    def test_it_waits_until_all_fit_and_adds_none_before(self, make):
        queue = make(4)
        queue.enqueue_many(rows(0, 3))
        call = Call(queue.enqueue_many, rows(3, 6))
        wait_until_blocked(queue, fills=1)
        queue.dequeue()
        assert queue.size() == 2
        queue.dequeue()
        call.wait()
        assert queue.size() == 4
        assert len(drain_closed(queue)) == 4

    def test_later_enqueues_wait_behind_it_and_do_not_overtake(self):
        queue = fifo(4)
        queue.enqueue_many(rows(0, 4))
        many = Call(queue.enqueue_many, rows(4, 7))
        wait_until_blocked(queue, fills=1)
        others = [Call(queue.enqueue, 7), Call(queue.enqueue_many, rows(8, 10))]
        wait_until_blocked(queue, enqueues=2, fills=1)
        assert [queue.dequeue() for _ in range(2)] == [0, 1]
        wait_until_blocked(queue, enqueues=2, fills=1)  # two would have room
        assert queue.dequeue() == 2
        many.wait()
        assert [queue.dequeue() for _ in range(4)] == [3, 4, 5, 6]
        for call in others:
            call.wait()
        assert sorted(drain_closed(queue)) == [7, 8, 9]

    @both_queues
    def test_a_batch_that_waits_for_more_than_there_is_room_for(self, make):
        """Neither could ever end if the rows did not exceed the capacity."""
        queue = make(10)
        queue.enqueue_many(rows(0, 5))
        many = Call(queue.enqueue_many, rows(5, 13))
        wait_until_blocked(queue, fills=1)
        assert len(queue.dequeue_many(7)) == 7
        many.wait()
        assert queue.size() == 6
        batch = Call(queue.dequeue_many, 25)  # more than the capacity
        wait_until_blocked(queue, batches=1)
        queue.enqueue_many(rows(0, 10))
        queue.enqueue_many(rows(0, 10))
        assert len(batch.wait()) == 25

    @both_queues
    def test_a_full_capacity_fits_into_an_empty_queue(self, make):
        queue = make(4)
        queue.enqueue_many(rows(0, 4))
        assert sorted(drain_closed(queue)) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match=r"elements has 5 rows: must be at most 4, the capacity of the queue"):
            make(4).enqueue_many(rows(0, 5))

    @both_queues
    def test_closing(self, make):
        queue = make(4)
        queue.enqueue_many(rows(0, 3))
        call = Call(queue.enqueue_many, rows(3, 6))
        wait_until_blocked(queue, fills=1)
        queue.close()
        with pytest.raises(CancelledError, match="is closed: it accepts no more"):
            queue.enqueue_many(rows(6, 7))
        assert sorted(drain(queue)) == [0, 1, 2, 3, 4, 5]  # what waited before is still added
        call.wait()

    @both_queues
    def test_cancelling(self, make):
        queue = make(4)
        queue.enqueue_many(rows(0, 3))
        calls = [Call(queue.enqueue_many, rows(3, 6))]
        wait_until_blocked(queue, fills=1)
        calls += [Call(queue.enqueue, 6), Call(queue.enqueue_many, rows(7, 9))]
        wait_until_blocked(queue, enqueues=2, fills=1)
        queue.close(cancel_pending_enqueues=True)
        for call in calls:
            with pytest.raises(CancelledError, match="was closed while this enqueue waited"):
                call.wait()
        assert sorted(drain(queue)) == [0, 1, 2]


class TestDequeueUpTo:
    @both_queues
    def test_it_waits_for_n_while_the_queue_is_open(self, make):
        queue = make()
        queue.enqueue_many(rows(0, 2))
        call = Call(queue.dequeue_up_to, 3)
        wait_until_blocked(queue, batches=1)
        queue.enqueue(2)
        queue.enqueue(3)
        assert len(call.wait()) == 3
        assert queue.size() == 1

    @both_queues
    def test_it_returns_what_is_left_of_a_closed_queue(self, make):
        queue = make()
        queue.enqueue_many({"x": rows(0, 5)})
        queue.close()
        assert len(queue.dequeue_up_to(3)["x"]) == 3
        assert len(queue.dequeue_up_to(3)["x"]) == 2
        for _ in range(2):
            with pytest.raises(OutOfRangeError, match=r"requested 3, current size 0"):
                queue.dequeue_up_to(3)
        assert queue.dequeue_up_to(0)["x"].shape == (0,)

    def test_min_after_dequeue_counts_until_the_queue_is_closed(self):
        queue = shuffle(10, 4)
        queue.enqueue_many(rows(0, 6))
        call = Call(queue.dequeue_up_to, 3)
        wait_until_blocked(queue, batches=1)
        queue.close()
        assert len(call.wait()) == 3
        assert len(queue.dequeue_up_to(10)) == 3


def drain_closed(queue):
    queue.close()
    return drain(queue)


@pytest.mark.thorough(except_for=["shuffle"])
@pytest.mark.parametrize("make", [fifo, shuffle, lambda capacity: shuffle(capacity, capacity - 2)])
def test_stress_of_all_calls_together(make):
    """Producers of single elements and of batches, consumers of each kind: nothing is lost or doubled."""
    queue, items = make(16), 600

    def produce(producer, size):
        for i in range(0, items, size or 1):
            first = producer * items + i
            queue.enqueue_many(rows(first, first + size)) if size else queue.enqueue(first)

    producers = [Call(produce, number, size) for number, size in enumerate([0, 0, 1, 5, 12, 15])]

    def consume(take):
        out = []
        try:
            while True:
                out += take()
        except OutOfRangeError:
            return out

    takes = [
        lambda: [queue.dequeue()],
        lambda: queue.dequeue_up_to(7).tolist(),
        lambda: queue.dequeue_many(3).tolist(),
        lambda: queue.dequeue_up_to(40).tolist(),
    ]
    consumers = [Call(consume, take) for take in takes]
    for call in producers:
        call.wait()
    queue.close()
    found = [x for call in consumers for x in call.wait()] + drain(queue)
    assert sorted(found) == list(range(6 * items))

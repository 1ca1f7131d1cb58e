"""`dequeue_many`, `enqueue_many` and `dequeue_up_to`: atomic, stacked, and without deadlocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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

from jstep.core.exceptions import OutOfRangeError
from jstep.queues.queues import CancelledError

no_polling = pytest.fixture(autouse=True)(disable_polling)


class TestDequeueMany:
    def test_stacks_leaf_by_leaf(self):
        queue = fifo()
        for i in range(4):
            queue.enqueue(
                {"x": np.full((2, 3), i, np.float32), "y": (i, f"name {i}"), "none": None}
            )
        batch = queue.dequeue_many(3)
        assert batch["x"].shape == (3, 2, 3)
        assert batch["x"].dtype == np.float32
        np.testing.assert_array_equal(batch["x"][:, 0, 0], [0, 1, 2])
        np.testing.assert_array_equal(batch["y"][0], [0, 1, 2])
        assert batch["y"][1].tolist() == ["name 0", "name 1", "name 2"]
        assert batch["none"] is None
        assert queue.size() == 1

    def test_jax_arrays_stay_on_the_device(self):
        queue = filled(fifo(), [jnp.full(2, i) for i in range(3)])
        batch = queue.dequeue_many(3)
        assert isinstance(batch, jax.Array)
        np.testing.assert_array_equal(batch, [[0, 0], [1, 1], [2, 2]])

    @both_queues
    def test_waits_until_n_elements_are_available(self, make):
        queue = make()
        call = Call(queue.dequeue_many, 3)
        wait_until_blocked(queue, batches=1)
        queue.enqueue(0)
        queue.enqueue(1)
        wait_until_blocked(queue, batches=1)
        queue.enqueue(2)
        assert sorted(call.wait().tolist()) == [0, 1, 2]

    def test_capacity_is_exceeded_only_for_the_batch(self):
        queue = fifo(2)
        producers = [Call(queue.enqueue, i) for i in range(8)]
        wait_until_blocked(queue, enqueues=6)
        batch = Call(queue.dequeue_many, 5)
        assert sorted(batch.wait().tolist() + queue.dequeue_many(3).tolist()) == list(range(8))
        for call in producers:
            call.wait()
        for i in range(2):
            queue.enqueue(i)
        call = Call(queue.enqueue, 2)
        wait_until_blocked(queue, enqueues=1)  # the capacity is enforced again
        queue.dequeue()
        call.wait()

    def test_min_after_dequeue_elements_remain(self):
        queue = filled(shuffle(6, 3), range(6))
        call = Call(queue.dequeue_many, 4)
        wait_until_blocked(queue, batches=1)
        queue.enqueue(6)  # above the capacity, for the batch
        call.wait()
        assert queue.size() == 3

    def test_smaller_batch_does_not_overtake(self):
        queue = filled(fifo(), range(3))
        first = Call(queue.dequeue_many, 5)
        wait_until_blocked(queue, batches=1)
        second = Call(queue.dequeue_many, 2)
        wait_until_blocked(queue, dequeues=1, batches=1)
        for i in range(3, 7):
            queue.enqueue(i)
        assert first.wait().tolist() == [0, 1, 2, 3, 4]
        assert second.wait().tolist() == [5, 6]

    @both_queues
    def test_too_few_elements_stay_in_a_closed_queue(self, make):
        queue = filled(make(), range(3))
        queue.close()
        with pytest.raises(OutOfRangeError, match=r"requested 4, current size 3"):
            queue.dequeue_many(4)
        assert sorted(queue.dequeue_many(queue.size()).tolist()) == [0, 1, 2]

    @both_queues
    def test_closing_ends_the_wait(self, make):
        queue = filled(make(), [0])
        call = Call(queue.dequeue_many, 2)
        wait_until_blocked(queue, batches=1)
        other = Call(queue.dequeue)
        wait_until_blocked(queue, dequeues=1, batches=1)
        queue.close()
        with pytest.raises(OutOfRangeError, match="requested 2, current size"):
            call.wait()
        assert other.wait() == 0

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            (
                {"x": np.zeros(4, np.float32)},
                r"the leaf at 'x' .* shape \([34],\) "
                r"in element 0 and .* shape \([34],\) in element 1",
            ),
            (
                {"x": np.zeros(3, np.float64)},
                r"the leaf at 'x' .* float\d\d .* in element 0 and .* float\d\d .* in element 1",
            ),
            ({"y": np.zeros(3, np.float32)}, "element 1 must have the structure"),
            ({"x": "text"}, "the leaf at 'x' must be alike"),
        ],
    )
    @both_queues
    def test_mismatched_elements_are_refused_and_stay(self, make, second, message):
        queue = filled(make(), [{"x": np.zeros(3, np.float32)}, second])
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"dequeue_many\(n=2\): {message}"):
                queue.dequeue_many(2)
        assert queue.size() == 2


class TestDequeueNone:
    """`dequeue_many(0)`, as for `dequeue_many(queue.size())` of an empty queue."""

    @both_queues
    def test_the_batch_is_empty_and_takes_no_element(self, make):
        queue = make()
        element = {
            "x": np.ones((2, 3), np.float32),
            "y": (True, "name"),
            "z": jnp.ones(4, jnp.bfloat16),
            "none": None,
        }
        queue.enqueue(element)
        for _ in range(2):  # with an element in the queue, and without
            batch = queue.dequeue_many(0)
            assert jax.tree.structure(batch) == jax.tree.structure(element)
            one = jax.tree.map(lambda leaf: (type(leaf), leaf.shape[1:], leaf.dtype), batch)
            assert jax.tree.map(len, batch) == {"x": 0, "y": (0, 0), "z": 0, "none": None}
            if queue.size():
                whole = queue.dequeue_many(1)
                assert (
                    jax.tree.map(lambda leaf: (type(leaf), leaf.shape[1:], leaf.dtype), whole)
                    == one
                )

    def test_before_the_first_element(self):
        queue = fifo()
        with pytest.raises(ValueError, match="n=0: an empty batch is made like the first element"):
            queue.dequeue_many(0)
        queue.fail(KeyError("file"))
        queue.close()
        with pytest.raises(
            OutOfRangeError,
            match=r"requested 0, current size 0\); its input failed: KeyError",
        ):
            queue.dequeue_many(0)


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
        jax.tree.map(
            np.testing.assert_array_equal, rest, jax.tree.map(lambda leaf: leaf[1:], stacked)
        )

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
        with pytest.raises(
            ValueError,
            match=r"elements has 5 rows: must be at most 4, the capacity of the queue",
        ):
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
    """Producers of single elements and of batches, consumers of each kind: nothing is lost or
    doubled."""
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

"""`dequeue_many`: atomic and stacked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from queue_calls import Call, both_queues, disable_polling, fifo, filled, shuffle, wait_until_blocked

from jstep.core.exceptions import OutOfRangeError

no_polling = pytest.fixture(autouse=True)(disable_polling)


class TestDequeueMany:
    def test_stacks_leaf_by_leaf(self):
        queue = fifo()
        for i in range(4):
            queue.enqueue({"x": np.full((2, 3), i, np.float32), "y": (i, f"name {i}"), "none": None})
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
                r"the leaf at 'x' .* shape \([34],\) in element 0 and .* shape \([34],\) in element 1",
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
        element = {"x": np.ones((2, 3), np.float32), "y": (True, "name"), "z": jnp.ones(4, jnp.bfloat16), "none": None}
        queue.enqueue(element)
        for _ in range(2):  # with an element in the queue, and without
            batch = queue.dequeue_many(0)
            assert jax.tree.structure(batch) == jax.tree.structure(element)
            one = jax.tree.map(lambda leaf: (type(leaf), leaf.shape[1:], leaf.dtype), batch)
            assert jax.tree.map(len, batch) == {"x": 0, "y": (0, 0), "z": 0, "none": None}
            if queue.size():
                whole = queue.dequeue_many(1)
                assert jax.tree.map(lambda leaf: (type(leaf), leaf.shape[1:], leaf.dtype), whole) == one

    def test_before_the_first_element(self):
        queue = fifo()
        with pytest.raises(ValueError, match="n=0: an empty batch is made like the first element"):
            queue.dequeue_many(0)
        queue.fail(KeyError("file"))
        queue.close()
        with pytest.raises(OutOfRangeError, match=r"requested 0, current size 0\); its input failed: KeyError"):
            queue.dequeue_many(0)

"""FIFOQueue and RandomShuffleQueue: order, waiting, closing, stacking."""

import collections
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jstep.queues import FIFOQueue, RandomShuffleQueue, _bounded_queue
from jstep.queues.errors import CancelledError, OutOfRangeError

LONG = 2  # seconds until a test that hangs fails


@pytest.fixture(autouse=True)
def no_polling(monkeypatch):
    """A lost wake-up shows as a call that hangs."""
    monkeypatch.setattr(_bounded_queue, "_POLL_SECS", 3600)


class Call:
    """A call in a thread of its own."""

    def __init__(self, fn, *args):
        self.result = self.error = None

        def run():
            try:
                self.result = fn(*args)
            except BaseException as ex:
                self.error = ex

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def wait(self):
        self.thread.join(LONG)
        assert not self.thread.is_alive(), "the call hangs"
        if self.error:
            raise self.error
        return self.result


def until(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.001)


def asleep(queue, enqueues=0, dequeues=0, batches=0):
    """Waits until so many calls wait inside of the queue."""
    wanted = (enqueues, dequeues, batches)
    until(lambda: (queue._for_room.count, queue._for_elements.count, queue._for_batch.count) == wanted)


def drained(queue):
    out = []
    while True:
        try:
            out.append(queue.dequeue())
        except OutOfRangeError:
            return out


def fifo(capacity=10):
    return FIFOQueue(capacity)


def shuffle(capacity=10, min_after_dequeue=0, seed=0):
    return RandomShuffleQueue(capacity, min_after_dequeue, seed)


both = pytest.mark.parametrize("make", [fifo, shuffle])


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

    def test_a_bare_array_is_a_tree_too(self):
        queue = fifo()
        queue.enqueue(np.arange(2))
        queue.enqueue(np.arange(2))
        np.testing.assert_array_equal(queue.dequeue_many(2), [[0, 1], [0, 1]])

    def test_texts_of_several_lengths(self):
        queue = fifo()
        for text in ("a", "bcd"):
            queue.enqueue(np.array([text]))
        assert queue.dequeue_many(2).tolist() == [["a"], ["bcd"]]

    def test_jax_arrays_stay_on_the_device(self):
        queue = fifo()
        for i in range(3):
            queue.enqueue(jnp.full(2, i))
        batch = queue.dequeue_many(3)
        assert isinstance(batch, jax.Array)
        np.testing.assert_array_equal(batch, [[0, 0], [1, 1], [2, 2]])

    def test_bfloat16_is_kept(self):
        queue = fifo()
        for _ in range(2):
            queue.enqueue(np.ones(2, jnp.bfloat16))
        assert queue.dequeue_many(2).dtype == jnp.bfloat16

    @both
    def test_waits_until_all_are_there(self, make):
        queue = make()
        call = Call(queue.dequeue_many, 3)
        asleep(queue, batches=1)
        queue.enqueue(0)
        queue.enqueue(1)
        asleep(queue, batches=1)
        queue.enqueue(2)
        assert sorted(call.wait().tolist()) == [0, 1, 2]

    @both
    def test_takes_more_than_the_capacity(self, make):
        queue = make(2)
        producer = Call(lambda: [queue.enqueue(i) for i in range(13)])
        assert sorted([*queue.dequeue_many(11).tolist(), queue.dequeue(), queue.dequeue()]) == list(range(13))
        producer.wait()

    def test_holds_no_more_than_it_needs_above_the_capacity(self):
        queue = fifo(2)
        producers = [Call(queue.enqueue, i) for i in range(8)]
        asleep(queue, enqueues=6)
        batch = Call(queue.dequeue_many, 5)
        assert sorted(batch.wait().tolist() + queue.dequeue_many(3).tolist()) == list(range(8))
        for call in producers:
            call.wait()
        for i in range(2):
            queue.enqueue(i)
        call = Call(queue.enqueue, 2)
        asleep(queue, enqueues=1)  # the capacity is what it was
        queue.dequeue()
        call.wait()

    def test_min_after_dequeue_counts_besides(self):
        queue = shuffle(6, 3)
        for i in range(6):
            queue.enqueue(i)
        call = Call(queue.dequeue_many, 4)
        asleep(queue, batches=1)
        queue.enqueue(6)  # above the capacity, for the batch
        call.wait()
        assert queue.size() == 3

    def test_consecutive_elements_though_others_wait(self):
        queue = fifo()
        first = Call(queue.dequeue_many, 3)
        asleep(queue, batches=1)
        others = [Call(queue.dequeue), Call(queue.dequeue)]
        asleep(queue, dequeues=2, batches=1)
        second = Call(queue.dequeue_many, 2)
        asleep(queue, dequeues=3, batches=1)
        for i in range(7):
            queue.enqueue(i)
        assert first.wait().tolist() == [0, 1, 2]
        a, b = second.wait().tolist()
        assert b == a + 1
        assert sorted([a, b, *(call.wait() for call in others)]) == [3, 4, 5, 6]

    def test_a_smaller_one_does_not_overtake(self):
        queue = fifo()
        for i in range(3):
            queue.enqueue(i)
        first = Call(queue.dequeue_many, 5)
        asleep(queue, batches=1)
        second = Call(queue.dequeue_many, 2)
        asleep(queue, dequeues=1, batches=1)
        for i in range(3, 7):
            queue.enqueue(i)
        assert first.wait().tolist() == [0, 1, 2, 3, 4]
        assert second.wait().tolist() == [5, 6]

    @both
    def test_too_few_in_a_closed_queue_stay_there(self, make):
        queue = make()
        for i in range(3):
            queue.enqueue(i)
        queue.close()
        with pytest.raises(OutOfRangeError, match=r"requested 4, current size 3"):
            queue.dequeue_many(4)
        assert sorted(queue.dequeue_many(queue.size()).tolist()) == [0, 1, 2]

    @both
    def test_closing_ends_the_wait(self, make):
        queue = make()
        queue.enqueue(0)
        call = Call(queue.dequeue_many, 2)
        asleep(queue, batches=1)
        other = Call(queue.dequeue)
        asleep(queue, dequeues=1, batches=1)
        queue.close()
        with pytest.raises(OutOfRangeError, match="requested 2, current size"):
            call.wait()
        assert other.wait() == 0

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            ({"x": np.zeros(4, np.float32)}, r"shapes differ at 'x': \([34],\) in element 0, \([34],\) in element 1"),
            ({"x": np.zeros(3, np.float64)}, r"dtypes differ at 'x': float\d\d in element 0, float\d\d in element 1"),
            ({"y": np.zeros(3, np.float32)}, "element 1 has the structure"),
            ({"x": None}, "element 1 has the structure"),
            ({"x": "text"}, "shapes differ at 'x'"),
        ],
    )
    @both
    def test_elements_that_differ_are_refused_and_stay(self, make, second, message):
        queue = make()
        queue.enqueue({"x": np.zeros(3, np.float32)})
        queue.enqueue(second)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"dequeue_many\(n=2\): {message}"):
                queue.dequeue_many(2)
        assert queue.size() == 2

    def test_what_is_refused_wakes_those_that_wait(self):
        queue = fifo()
        batch = Call(queue.dequeue_many, 2)
        asleep(queue, batches=1)
        others = [Call(queue.dequeue), Call(queue.dequeue)]
        asleep(queue, dequeues=2, batches=1)
        queue.enqueue(1)
        queue.enqueue("one")
        with pytest.raises(ValueError, match="dtypes differ"):
            batch.wait()
        assert [{call.wait() for call in others}] == [{1, "one"}]

    def test_whole_and_fractional_numbers_are_not_mixed(self):
        queue = fifo()
        queue.enqueue(1)
        queue.enqueue(2.5)
        with pytest.raises(ValueError, match="dtypes differ at the tree itself"):
            queue.dequeue_many(2)


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
    """8 producers of 10 000 items each."""
    queue = make(64)
    producers, items = 8, 10_000
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
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        ) as process:
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

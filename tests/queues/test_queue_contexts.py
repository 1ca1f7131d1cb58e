"""`QueueRunner` threads run in the context of their creator."""

import contextvars

import jax
import pytest
from waiting import TIMEOUT

from jstep.queues.coordinator import Coordinator
from jstep.queues.queue_runner import QueueRunner, add_queue_runner, start_queue_runners
from jstep.queues.queues import FIFOQueue

variable = contextvars.ContextVar("variable", default=0)


def context_settings():
    return jax.config.jax_default_prng_impl, jax.config.jax_enable_x64, jax.sharding.get_mesh(), variable.get()


def settings_op(queue):
    def op():
        queue.enqueue(context_settings())
        raise StopIteration

    return op


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("collected", [False, True])
def test_threads_run_in_the_context_of_their_creator(kind, collected):
    queue, coord = FIFOQueue(10), Coordinator()
    runner = QueueRunner(queue, [settings_op(queue)] * 2)
    token = variable.set(7)
    try:
        with (
            jax.default_prng_impl("rbg"),
            jax.enable_x64(True),
            jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,))),
        ):
            expected = context_settings()
            if collected:
                add_queue_runner(runner, "contexts")
                threads = start_queue_runners(coord, collection="contexts")
            else:
                threads = runner.create_threads(coord, start=True)
            coord.join(threads)
    finally:
        variable.reset(token)
    assert [queue.dequeue(), queue.dequeue()] == [expected] * 2
    assert context_settings() != expected


def test_threads_started_manually():
    queue = FIFOQueue(10)
    (thread,) = QueueRunner(queue, [settings_op(queue)]).create_threads()
    with jax.enable_x64(True):
        thread.start()
    thread.join(TIMEOUT)
    assert queue.dequeue()[1] is True

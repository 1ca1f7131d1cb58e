"""`train(last_step=None)`: the batches, a hook or a signal end the run."""

import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jstep

OPTIMIZER = jstep.adam(0.1)
X = np.ones(3, np.float32)
STEP = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x.reshape(3)) ** 2), OPTIMIZER)


def run(batches: Any, **options: Any) -> jstep.TrainState:
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, OPTIMIZER)
    return jstep.train(STEP, state, batches, None, **options)


def ended_queue() -> Any:
    queue = jstep.FIFOQueue(10)
    for _ in range(5):
        queue.enqueue(X)
    queue.close()
    while True:
        yield queue.dequeue()


SOURCES: dict[str, Any] = {
    "list": lambda: [X] * 5,
    "generator": lambda: (X for _ in range(5)),
    "queue": ended_queue,
    "batches": lambda: jstep.batches(np.ones((5, 3), np.float32), 1, num_epochs=1),
}


@pytest.mark.thorough(except_for=["generator-1", "generator-2", "queue-1"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("source", list(SOURCES))
def test_the_batches_end_the_run(source: str, steps_per_call: int, tmp_path: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "jstep"):
        state = run(SOURCES[source](), checkpoint_dir=tmp_path, steps_per_call=steps_per_call)
    assert int(state.global_step) == 5
    assert jstep.Saver(tmp_path).latest_step() == 5
    assert not [record.getMessage() for record in caplog.records if "ended" in record.getMessage()]


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_hook_ends_the_run(steps_per_call: int) -> None:
    class Stop(jstep.Hook):
        def after_step(self, step: int, state: Any, metrics: Any) -> bool:
            return step >= 8

    hooks = [Stop(), jstep.AuditHook(every_n_steps=3), jstep.NanLossHook(), jstep.LoggingHook(every_n_steps=4)]
    assert int(run(lambda step: X, hooks=hooks, steps_per_call=steps_per_call).global_step) == 8

"""`StepCounterHook.examples_per_sec` for batch sizes that change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep


@pytest.mark.thorough
def test_examples_per_sec_follows_the_batch_size():
    """Intervals with batches of one size and of two sizes."""
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2), optimizer)
    data = jstep.batches(np.ones((64, 3), np.float32), {0: 4, 6: 32, 9: 8, 14: 1})
    seen = {}

    class RateRecorder(jstep.Hook):
        def after_step(self, n, state, metrics):
            jax.block_until_ready(state)
            counter.measure_finished()
            seen[n] = (counter.steps_per_sec, counter.examples_per_sec)

    counter = jstep.StepCounterHook(every_n_steps=4)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
    hooks = [counter, RateRecorder()]
    jstep.train(step, state, data, 24, hooks=hooks, steps_per_call=3, progress=False)
    rates = {n: seen[n][1] / seen[n][0] for n in seen if seen[n][0] is not None}
    assert rates[24] == pytest.approx(1.0)
    assert rates[16] == pytest.approx((2 * 8 + 2 * 1) / 4)
    assert rates[12] == pytest.approx((32 * 1 + 8 * 3) / 4)
    assert rates[8] == pytest.approx((4 * 2 + 32 * 2) / 4)

"""`StepCounterHook.examples_per_sec` for batch sizes that change."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import Pair

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


STRUCTURES: dict[str, Any] = {
    "several arguments": lambda x: (np.float32(1), x),
    "a named tuple": lambda x: Pair(x, {"z": x}),
    "a scalar first": lambda x: {"a": np.float32(1), "x": x},
    "only the second changes": lambda x: (1.5, {"y": (2, x)}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("name", STRUCTURES)
def test_examples_of_batches_of_every_structure(name, steps_per_call):
    """Counted exactly, whenever the size changes."""
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, *batch: params["w"] * sum(map(jnp.mean, jax.tree.leaves(batch))), optimizer)
    sizes, seen = [8, 8, 4, 4, 2, 2, 2, 8], []

    class Look(jstep.StepCounterHook):
        def when_due(self, n, state, metrics):
            seen.append((n, self.run.reports.examples))
            return super().when_due(n, state, metrics)

    batches = [STRUCTURES[name](np.ones((n, 3), np.float32)) for n in sizes]
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    hooks = [Look(every_n_steps=2)]
    jstep.train(step, state, batches, 8, hooks=hooks, steps_per_call=steps_per_call, progress=False)
    assert seen == [(n, (sum(sizes[:n]), 0)) for n in (2, 4, 6, 8)]

"""Mixtures in training loops, evaluators and prefetching."""

import jax.numpy as jnp
import numpy as np

import jstep

SOURCES = {"a": np.arange(30.0), "b": -np.arange(1.0, 8.0)}
MIX = jstep.mixture(SOURCES, 4, {0: {"a": 1, "b": 1}, 5: {"a": 1, "b": 0}}).skip(2, 4)


def test_train_uses_batch_n_at_step_n_after_a_restart(tmp_path):
    seen = []

    def step(state, batch):
        seen.append(batch.tolist())
        return state.replace(global_step=state.global_step + 1), {"loss": jnp.float32(0)}

    for last_step in (3, 8):
        state = jstep.TrainState.create({"w": 0.0}, jstep.gradient_descent(0.1))
        jstep.train(step, state, MIX, last_step, checkpoint_dir=tmp_path, progress=False)
    assert seen == [batch.tolist() for batch in MIX[:8]]

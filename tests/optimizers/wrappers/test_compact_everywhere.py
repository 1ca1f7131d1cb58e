"""Every optimizer of the table in `compact`: nearly the same updates, and the same bits after a restart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contract import for_each
from optimizer_table import TABLE

import jstep

REFUSED = {"master_weights": "master_weights", "stochastic_rounding": "stochastic_rounding"}
ENTRIES = sorted(set(TABLE) - set(REFUSED))
NOT_COMPARED = {"soap"}
"""Optimizers whose first updates depend on a basis that rounding turns."""


def start(optimizer: jstep.Optimizer, dtype: Any = jnp.bfloat16) -> Any:
    rng = np.random.default_rng(0)
    params = {"a": jnp.asarray(rng.normal(size=(64, 128)), dtype), "b": jnp.ones((128,), dtype)}
    return jstep.TrainState.create(params, optimizer)


def trained(optimizer: jstep.Optimizer, state: Any, steps: range) -> Any:
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
    for i in steps:
        rng = np.random.default_rng(i)
        grads = {k: jnp.asarray(rng.normal(size=p.shape), p.dtype) for k, p in sorted(state.params.items())}
        state = step(state, grads)
    return state


@for_each(ENTRIES, ["adam"])
def test_updates_are_nearly_those_of_float32_and_resume(name: str, tmp_path: Any) -> None:
    optimizer = TABLE[name].make(1e-3)
    compact = jstep.compact(optimizer)
    half = trained(compact, start(compact), range(2))
    with jstep.Saver(tmp_path) as saver:
        saver.save(half)
        restored = saver.restore(start(compact))
    state = trained(compact, half, range(2, 4))
    assert trained(compact, restored, range(2, 4)) == state
    assert jstep.get_slot_names(state) == jstep.get_slot_names(start(optimizer))
    if name not in NOT_COMPARED:
        found, exact = (trained(one, start(one, jnp.float32), range(4)).params for one in (compact, optimizer))
        before = start(compact, jnp.float32).params
        for key in before:
            way = np.mean(np.abs(exact[key] - before[key]))
            assert np.mean(np.abs(found[key] - exact[key])) <= 0.05 * way + 1e-7, key

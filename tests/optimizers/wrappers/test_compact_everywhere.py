"""Every optimizer of the table in `compact`: nearly the same updates, and the same bits after a restart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


@pytest.mark.parametrize(
    ("make", "holds"),
    [
        (lambda: jstep.adamw(amsgrad=True), {"m": "int8", "v": "uint8", "v_max": "uint8"}),
        (jstep.ademamix, {"m1": "int8", "m2": "int16", "v": "uint8"}),
        (jstep.prodigy, {"m": "int8", "v": "uint8", "s": "int16", "p0": "bfloat16"}),
        (lambda: jstep.ftrl(0.1), {"accum": "float32", "linear": "int16"}),
        (lambda: jstep.madgrad(0.1), {"grad_sum_sq": "float32", "s": "int16", "initial": "bfloat16"}),
        (lambda: jstep.adan(0.1), {"m": "int8", "d": "int8", "v": "uint8", "previous": "float32"}),
        (lambda: jstep.rmsprop(0.1), {"rms": "uint8", "momentum": "int8"}),
        (lambda: jstep.rmsprop(0.1, centered=True), {"rms": "float32", "mg": "float32", "momentum": "int8"}),
        (jstep.adadelta, {"accum": "uint8", "accum_update": "uint8"}),
        (lambda: jstep.adagrad(0.1), {"accumulator": "uint8"}),
        (lambda: jstep.partition({"m": jstep.muon(0.1)}, {"a": "m", "b": None}), {"m/momentum": "int16"}),
        (jstep.schedule_free_adamw, {"z": "bfloat16", "v": "uint8"}),
        (lambda: jstep.adafactor(momentum=0.9), {"m": "int8"}),
        (lambda: jstep.rprop(0.1), {"step_size": "float32", "previous": "float32"}),
        (lambda: jstep.update_every(2, jstep.sgd(0.1, 0.9), accumulate=True),
         {"momentum": "int8", "gradient_sum": "float32"}),
    ],
)  # fmt: skip
def test_what_the_slots_of_optimizers_hold(make: Any, holds: dict[str, str]) -> None:
    state = start(jstep.compact(make()))
    for name, dtype in holds.items():
        assert state.slots[name]["a"].dtype == dtype, name
        assert f"{name}/scale" in state.slots or dtype in ("float32", "bfloat16")

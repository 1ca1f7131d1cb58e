"""Sparse gradients under every optimizer, block and wrapper, against dense gradients in float64.

Repeated ids add up first, traced ids out of range are dropped, and rows that no gradient names keep
parameter and slots bit for bit, unless the optimizer changes rows without a gradient by design
(Adam's moments decay everywhere).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_table import TABLE

import jstep

ROWS, COLUMNS = 6, 3
# Repeated, unused and no ids; out of range (compiled only) at both ends, with and without others.
IDS = [[0, 2, 0], [3, 3, 3], [], [4, 0, 4]]
OUTSIDE = [[0, 2, 0], [3, 9, 3], [-1, 5, 6], [7, 2**31 - 1, -2], [4, 0, 4]]

BLOCKS = {
    "by_value": lambda: jstep.clip_gradients(by_value=(-0.5, 0.5)),
    "by_norm": lambda: jstep.clip_gradients(by_norm=0.5),
    "by_global_norm": lambda: jstep.clip_gradients(by_global_norm=0.5),
    "adaptive": lambda: jstep.clip_gradients(adaptive=0.1),
    "scale_updates": lambda: jstep.scale_updates({"table": 0.5}),
    "normalize_gradients": lambda: jstep.normalize_gradients(),
    "centralize_gradients": lambda: jstep.centralize_gradients(),
    "scale_by_trust_ratio": lambda: jstep.scale_by_trust_ratio(),
    "scale_by_rms": lambda: jstep.scale_by_rms(),
    "trace": lambda: jstep.scope(jstep.trace(0.9), "t"),
    "stateless": lambda: jstep.stateless(
        lambda updates, params, step: jstep.map_gradients(lambda g: 2 * g, updates)
    ),
}

WRAPPERS = {
    "scope": lambda one: jstep.scope(one, "s"),
    "partition": lambda one: jstep.partition({"all": one}, lambda path, leaf: "all"),
    "update_every": lambda one: jstep.update_every(one, 1),
    "accumulating": lambda one: jstep.update_every(one, 1, accumulate=True),
    "skip_nonfinite": jstep.skip_nonfinite,
    "master_weights": jstep.master_weights,
    "stochastic_rounding": lambda one: jstep.stochastic_rounding(one, jax.random.key(0)),
    "average": lambda one: jstep.with_moving_average(one, jstep.ExponentialMovingAverage(0.5)),
    "lookahead": lambda one: jstep.lookahead(one, 1),
    "cautious": jstep.cautious,
    "nested": lambda one: jstep.skip_nonfinite(
        jstep.lookahead(jstep.update_every(jstep.cautious(one), 1), 1)
    ),
}


def momentum():
    return jstep.momentum(jstep.held("rate", 0.1), 0.9)


TABLE_BY_ROWS = (
    *(
        "gradient_descent", "momentum", "nesterov", "adagrad", "rmsprop", "rmsprop_centered",
        "ftrl", "ftrl_l1_l2",
    ),
    *(
        "sgd", "sgd_nesterov", "sgd_dampening", "adadelta", "blocks_trace", "blocks_rms",
        "chain_by_value", "cautious",
    ),
    *(
        "frozen",
        "scale_updates",
        "adaptive_clipping",
        "centralize_gradients",
        "normalize_gradients",
        "stateless",
    ),
)  # fmt: skip

BY_ROWS = {
    **{
        f"block {name}": lambda make=make: jstep.chain(make(), momentum())
        for name, make in BLOCKS.items()
    },
    **{f"wrapper {name}": lambda wrap=wrap: wrap(momentum()) for name, wrap in WRAPPERS.items()},
    **{name: lambda name=name: TABLE[name].make(0.1) for name in TABLE_BY_ROWS},
}
"""Optimizers that change the named rows alone."""


def gradients(n, ids):
    """Return the rows of step n, and the dense gradient that they stand for."""
    values = np.random.default_rng(n).normal(size=(len(ids), COLUMNS)).astype(np.float32)
    dense = np.zeros((ROWS, COLUMNS))
    for i, row in zip(ids, values, strict=True):
        if 0 <= i < ROWS:
            dense[i] += row
    return values, dense


def params(dtype):
    numbers = np.random.default_rng(99).normal(size=(ROWS + 2, COLUMNS)).astype(np.float32)
    return {"table": jnp.asarray(numbers[:ROWS], dtype), "w": jnp.asarray(numbers[ROWS:], dtype)}


def tables(state):
    """Return the table and its slots."""
    kept = {"params": state.params["table"]}
    # Averages keep approaching a row that stays where it is.
    others = ("gradient_", "ExponentialMovingAverage")
    slots = {name: slot for name, slot in state.slots.items() if isinstance(slot, dict)}
    kept |= {name: slot["table"] for name, slot in slots.items() if not name.startswith(others)}
    return {
        name: np.asarray(leaf) for name, leaf in kept.items() if np.shape(leaf) == (ROWS, COLUMNS)
    }


def run_sparse(optimizer, ids, *, compiled):
    def step(state, rows, indices, w):
        table = jstep.IndexedSlices(rows, indices, (ROWS, COLUMNS))
        return jstep.apply_gradients(state, {"table": table, "w": w}, optimizer, scaled=True)

    step = jax.jit(step) if compiled else step
    states = [jstep.TrainState.create(params(jnp.float32), optimizer)]
    for n, named in enumerate(ids):
        rows, _ = gradients(n, named)
        states.append(
            step(
                states[-1],
                jnp.asarray(rows),
                jnp.asarray(named, jnp.int32),
                jnp.full((2, COLUMNS), 0.1),
            )
        )
    return states


def run_dense(make, ids, *, by_rows):
    """Run with dense gradients in float64; with `by_rows`, what is not named is put back after each
    step."""
    with jax.enable_x64(True):
        optimizer = make()
        state = jstep.TrainState.create(params(jnp.float64), optimizer)
        step = jax.jit(
            lambda state, grads: jstep.apply_gradients(state, grads, optimizer, scaled=True)
        )
        found = []
        for n, named in enumerate(ids):
            _, dense = gradients(n, named)
            new = step(
                state,
                {
                    "table": jnp.asarray(dense),
                    "w": jnp.full((2, COLUMNS), np.float64(np.float32(0.1))),
                },
            )
            if by_rows:
                mask = np.isin(np.arange(ROWS), named)[:, None]

                def put_back(old, new, mask=mask):
                    return jnp.where(mask, new, old) if np.shape(new) == (ROWS, COLUMNS) else new

                new = jax.tree.map(put_back, state, new)
            state = new
            found.append(tables(state))
    return found


@pytest.mark.thorough(except_for=["True-rmsprop"])
@pytest.mark.parametrize("name", BY_ROWS)
@pytest.mark.parametrize("compiled", [False, True])
def test_only_named_rows_change(name, compiled):
    ids = OUTSIDE if compiled else IDS
    states = run_sparse(BY_ROWS[name](), ids, compiled=compiled)
    want = run_dense(BY_ROWS[name], ids, by_rows=True)
    for named, before, after, expected in zip(ids, states, states[1:], want, strict=False):
        others = [row for row in range(ROWS) if row not in named]
        old, new = tables(before), tables(after)
        assert old.keys() == new.keys() == expected.keys()
        for slot in new:
            assert new[slot][others].tobytes() == old[slot][others].tobytes(), (slot, named)
            np.testing.assert_allclose(
                new[slot], expected[slot], rtol=2e-5, atol=1e-6, err_msg=f"{slot} {named}"
            )


# Averages and decay outside of momentum, noise that depends on the dtype, and eigenbases that
# rounding turns.
OTHERS = {
    "with_debiased_average",
    "average_of_some",
    "everything",
    "decay_weights",
    "decay_cautiously",
    "accumulating",
}
OTHERS |= {"add_noise", "soap", "normuon", "normuonh"}


@pytest.mark.thorough(except_for=["adam"])
@pytest.mark.parametrize("name", [name for name in TABLE if name not in {*TABLE_BY_ROWS, *OTHERS}])
def test_other_optimizers_see_the_dense_gradient(name):
    entry = TABLE[name]
    state = run_sparse(entry.make(entry.rate), OUTSIDE, compiled=True)[-1]
    want = run_dense(lambda: entry.make(entry.rate), OUTSIDE, by_rows=False)[-1]
    for slot, leaf in tables(state).items():
        np.testing.assert_allclose(leaf, want[slot], rtol=1e-4, atol=1e-5, err_msg=slot)

"""The contract of every optimizer: a partial restore of parameters alone is a new state with these parameters."""

import jax
import jax.numpy as jnp
from contract import assert_same, for_each, make_optimizer, mixed_gradients, mixed_params
from optimizer_table import TABLE

import jstep

STEP = 7


def trained_params():
    def moved(p):
        return p * 3 + 1 if jnp.issubdtype(p.dtype, jnp.floating) else p

    return jax.tree.map(moved, mixed_params())


def restored_in_part(directory, target):
    """Save `trained_params` without slots, and restore what fits into a target."""
    with jstep.Saver(directory) as saver:
        saver.save(jstep.TrainState.create(trained_params(), jstep.gradient_descent(0.1), global_step=STEP))
        return saver.restore(target, partial=True)


@for_each(TABLE, ["adam"])
def test_a_partial_restore_of_parameters_is_a_state_made_of_them(name, tmp_path):
    optimizer = make_optimizer(name)
    want = jstep.TrainState.create(trained_params(), optimizer, global_step=STEP)
    target = jstep.TrainState.create(mixed_params(), optimizer, global_step=STEP)
    got = restored_in_part(tmp_path, target)
    assert_same(got, want)
    zeros = mixed_gradients(0.0)
    assert_same(jstep.apply_gradients(got, zeros, optimizer), jstep.apply_gradients(want, zeros, optimizer))

"""Every donated update and step: no temporaries of the size of the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from contract import each, of
from optimizer_table import TABLE

import jstep

LEAVES, LEAF = 8, (256, 256)
BYTES = LEAVES * 4 * 256 * 256


def abstract(optimizer: jstep.Optimizer) -> tuple[Any, Any]:
    params = {f"{i}{'ab'[i % 2]}": jax.ShapeDtypeStruct(LEAF, jnp.float32) for i in range(LEAVES)}
    return jax.eval_shape(lambda p: jstep.TrainState.create(p, optimizer), params), params


def planned(name: str) -> float:
    """How many copies of the parameters an update may need, by what each XLA was measured to plan.

    That of jaxlib 0.10.0 and 0.10.1 writes out gradients that later ones fuse into what reads them, in 35 of the cases,
    by 0.7 to 1.72 copies. That of 0.12.0 does so for one entry, by 0.7.
    """
    if jax.version.__version_info__ < (0, 10, 2):
        return TABLE[name].copies + 1.75
    return TABLE[name].copies + 0.75 * (name == "everything" and jax.version.__version_info__ >= (0, 12, 0))


def check_memory(lowered: Any, state: Any, temporaries: float) -> None:
    memory = lowered.compile().memory_analysis()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.999 * whole
    assert memory.temp_size_in_bytes <= temporaries * BYTES


def check_update_memory(name: str) -> None:
    optimizer = of(name)
    state, params = abstract(optimizer)
    update = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer), donate_argnums=0)
    check_memory(update.lower(state, params), state, planned(name))


@each
def test_donated_update_has_no_temporary_of_the_size_of_params(name: str) -> None:
    """Gradients are handed over, so that all that is left is what the update itself needs."""
    check_update_memory(name)


@each
def test_donated_step_holds_the_gradients_and_no_more(name: str) -> None:
    optimizer = of(name)
    state, params = abstract(optimizer)
    step = jstep.minimize(lambda p, xs: sum(jnp.sum(p[k] * xs[k]) for k in p), optimizer)
    check_memory(step.lower(state, params), state, planned(name) + 1)

"""Claims of the page "From Flax" and of the recipe for NNX, checked against Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

pytest.importorskip("flax")


def test_the_loss_scale_changes_at_the_steps_of_flax():
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    theirs = dynamic_scale.DynamicScale(growth_interval=4)
    optimizer = jstep.dynamic_loss_scale(jstep.gradient_descent(0.1), initial=2.0**16, period=5)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)

    def loss_fn(params, factor):
        return jnp.sum(params["w"]) * factor

    train_step = jstep.minimize(loss_fn, optimizer)
    of_flax = jax.jit(lambda scale, factor: scale.value_and_grad(loss_fn)({"w": jnp.ones(3)}, factor)[0])
    wanted, found = [], []
    for n in range(60):
        factor = jnp.float32(np.inf if n in (3, 4, 20, 41) else 1.0)
        theirs = of_flax(theirs, factor)
        state, _ = train_step(state, factor)
        wanted.append(float(theirs.scale))
        found.append(float(state.slots["loss_scale"]))
    assert found == wanted
    assert len(set(wanted)) > 5


def test_the_defaults_of_the_loss_scale_of_flax():
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    default = dynamic_scale.DynamicScale()
    names = ("scale", "growth_interval", "growth_factor", "backoff_factor", "minimum_scale")
    assert [float(getattr(default, name)) for name in names] == [2.0**16, 2000, 2, 0.5, 2.0**-126]

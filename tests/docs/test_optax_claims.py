"""Claims of the page "From Optax", checked against Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS

import jstep

optax = pytest.importorskip("optax")
PAGE = DOCS / "from" / "optax.md"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("squared_cosine", lambda: optax.cosine_decay_schedule(1e-3, 1000, alpha=0.1, exponent=2.0)),
        ("bounded_decay", lambda: optax.exponential_decay(1e-2, 100, 0.5, end_value=1e-3)),
    ],
)
def test_schedules_as_functions(page, name, theirs):
    steps = np.arange(0, 1200, 7)
    np.testing.assert_allclose(jax.vmap(page[name])(steps), jax.vmap(theirs())(1.0 * steps), rtol=1e-6, atol=1e-9)


def test_two_real_leaves_are_trained_like_a_complex_one():
    def loss_fn(z):
        return jnp.sum(jnp.abs(z * (1 + 2j) - (3 - 1j)) ** 2)

    theirs = optax.contrib.split_real_and_imaginary(optax.adamw(1e-1, weight_decay=1e-2))
    z = jnp.array([1 + 1j, 2 - 1j], jnp.complex64)
    memory = theirs.init(z)
    optimizer = jstep.adamw(1e-1, weight_decay=1e-2)
    state = jstep.TrainState.create({"real": z.real, "imag": z.imag}, optimizer)
    train_step = jstep.minimize(lambda p: loss_fn(jax.lax.complex(p["real"], p["imag"])), optimizer)
    for _ in range(10):
        with jax.numpy_dtype_promotion("standard"):
            updates, memory = theirs.update(jnp.conj(jax.grad(loss_fn)(z)), memory, z)
        z = optax.apply_updates(z, updates)
        state, _ = train_step(state)
    np.testing.assert_allclose(state.params["real"], z.real, rtol=0, atol=1e-4)
    np.testing.assert_allclose(state.params["imag"], z.imag, rtol=0, atol=1e-4)

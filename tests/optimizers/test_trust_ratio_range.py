"""Trust ratios of tiny and huge leaves: float32 gives the numbers of float64."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

import jstep

RNG = np.random.default_rng(0)
P, G = RNG.normal(size=(2, 6, 5))
OPTIMIZERS: dict[str, Callable[[], jstep.Optimizer]] = {
    "lars": lambda: jstep.lars(0.1),
    "block": lambda: jstep.chain(jstep.scale_by_trust_ratio(), jstep.scale_by_learning_rate(0.1)),
    # Its moments square the gradient, which must be of ordinary size.
    "lamb": lambda: jstep.lamb(0.1),
}
SIZES = [(p, g) for p in (1e-25, 1.0, 1e25) for g in (1e-25, 1.0, 1e25)]


@jax.jit(static_argnums=0)
def update(optimizer: jstep.Optimizer, p: jax.Array, g: jax.Array) -> jax.Array:
    state = jstep.TrainState.create({"w": p}, optimizer)
    updates, _ = optimizer.update({"w": g}, state.slots, state.params, state.global_step)
    return updates["w"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trust_ratios_neither_overflow_nor_underflow(name: str) -> None:
    sizes = [(p, g) for p, g in SIZES if name != "lamb" or g == 1.0]
    optimizer = OPTIMIZERS[name]()
    with jax.enable_x64(True):
        for p, g in sizes:
            narrow, wide = (
                np.asarray(update(optimizer, dtype(p * P), dtype(g * G))) for dtype in (np.float32, np.float64)
            )
            assert 1e-30 < np.max(np.abs(wide)) < 1e30
            np.testing.assert_allclose(narrow, wide, rtol=2e-5, atol=2e-6 * np.max(np.abs(wide)))

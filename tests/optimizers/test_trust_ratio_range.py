"""Trust ratios of tiny and huge leaves: float32 gives the numbers of float64."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

RNG = np.random.default_rng(0)
P, G = RNG.normal(size=(2, 6, 5))
OPTIMIZERS: dict[str, Callable[[], jstep.Optimizer]] = {
    "lars": lambda: jstep.lars(0.1),
    "nesterov": lambda: jstep.lars(0.1, use_nesterov=True, weight_decay=0.1),
    "block": lambda: jstep.chain(jstep.scale_by_trust_ratio(), jstep.scale_by_learning_rate(0.1)),
    # Its moments square the gradient, which must be of ordinary size.
    "lamb": lambda: jstep.lamb(0.1),
}
SIZES = [(p, g) for p in (1e-25, 1.0, 1e25) for g in (1e-25, 1.0, 1e25)]


def update(make: Callable[[], jstep.Optimizer], p: float, g: float, dtype: type) -> np.ndarray:
    optimizer = make()
    state = jstep.TrainState.create({"w": jnp.asarray(p * P, dtype)}, optimizer)
    updates, _ = optimizer.update({"w": jnp.asarray(g * G, dtype)}, state.slots, state.params, state.global_step)
    return np.asarray(updates["w"], np.float64)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trust_ratios_neither_overflow_nor_underflow(name: str) -> None:
    sizes = [(p, g) for p, g in SIZES if name != "lamb" or g == 1.0]
    with jax.enable_x64(True):
        for p, g in sizes:
            wide = update(OPTIMIZERS[name], p, g, np.float64)
            assert 1e-30 < np.max(np.abs(wide)) < 1e30
            np.testing.assert_allclose(
                update(OPTIMIZERS[name], p, g, np.float32), wide, rtol=2e-5, atol=2e-6 * np.max(np.abs(wide))
            )

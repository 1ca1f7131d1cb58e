"""A state that other code donated is refused by name, by every kind of step and on every kind of mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jstep

OPTIMIZER = jstep.momentum(0.1, 0.9)
X = np.ones(4, np.float32)


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((params["w"] - x) ** 2) + params["b"] ** 2


def make_step(**kwargs: Any) -> Any:
    return jstep.minimize(loss_fn, OPTIMIZER, **kwargs)


def make_state(kind: str) -> jstep.TrainState:
    params = {"w": jnp.zeros(4), "b": 0.0}
    if kind == "one device":
        return jstep.TrainState.create(params, OPTIMIZER)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(getattr(AxisType, kind),))
    return jstep.TrainState.create(params, OPTIMIZER, mesh=mesh)


def custom() -> Any:
    inner = make_step(jit=False)
    return jstep.TrainStep(lambda state, x: inner(state, x))


KINDS = ["one device", "Auto", "Explicit"]
STEPS: dict[str, Any] = {
    "minimize": make_step,
    "not donating": lambda: make_step(donate=False),
    "custom": custom,
    "scan_steps": lambda: jstep.scan_steps(make_step()),
}
MESSAGE = "the state's 'params/[bw]' was donated to an earlier step and deleted. Use the state that the step returned"


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("of", ["all", "params"])
def test_a_step_by_hand(kind: str, name: str, of: str) -> None:
    """The step returned the state last, so that it would not look at it again."""
    step, other = STEPS[name](), make_step()
    x = X[None] if name == "scan_steps" else X
    latest, _ = step(make_state(kind), x)
    for _ in range(2):  # in the form for its own results, too
        latest, _ = step(latest, x)
    if of == "all":
        other(latest, X)
    else:  # the global step lives on
        jax.jit(lambda params: params, donate_argnums=0)(latest.params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=MESSAGE):
            step(latest, x)
    assert int(step(make_state(kind), x)[0].global_step) == 1


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["minimize", "custom", "jit", "K steps"])
def test_in_a_run(kind: str, name: str) -> None:
    inner = make_step(jit=False)
    step = jax.jit(lambda state, x: inner(state, x)) if name == "jit" else STEPS.get(name, make_step)()
    other = make_step()

    def forgets(n: int, state: Any, metrics: Any) -> None:
        other(state, X)  # without donate=False

    with pytest.raises(RuntimeError, match=MESSAGE) as caught:
        jstep.train(
            step,
            make_state(kind),
            lambda n: X,
            12,
            hooks=[jstep.every(6, forgets)],
            steps_per_call=3 if name == "K steps" else 1,
            progress=False,
        )
    assert "at step 6, after the update with batch 5, while running the step on batch" in caught.value.__notes__[-1]
    assert "it is lost" in caught.value.__notes__[-1]

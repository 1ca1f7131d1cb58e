"""`coord_check` on a model with known results; the one of docs/how/width-transfer.md is a real one."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jstep


def known_model(width: int) -> Any:
    """Return a model whose parameter w grows by 0.5·width at each step."""
    optimizer = jstep.gradient_descent(0.5 * width)
    step = jstep.minimize(lambda params, x: -params["w"] * jnp.mean(x), optimizer)
    return step, jstep.TrainState.create({"w": 2.0}, optimizer), jnp.ones(3)


def test_sizes_changes_and_growth() -> None:
    def activations(params: Any, x: Any) -> Any:
        return {"linear": params["w"] * x, "same": x, "root": jnp.sqrt(jnp.abs(params["w"] - 2.0)) * x[None]}

    check = jstep.coord_check(known_model, (4, 8, 16), activations, steps=2)
    assert check.sizes["linear"] == {4: 2.0, 8: 2.0, 16: 2.0}
    assert check.changes["linear"] == {4: 4.0, 8: 8.0, 16: 16.0}
    assert check.growth["linear"] == pytest.approx(1.0)
    assert check.growth["root"] == pytest.approx(0.5)
    assert np.isnan(check.growth["same"])
    lines = str(check).splitlines()
    assert lines[0] == "mean |x| over widths, and its change after 2 steps"
    assert lines[2].split() == ["activation", "4", "8", "16", "growth"]
    assert any(line.split() == ["linear", "size", "2", "2", "2"] for line in lines)
    assert any(line.split() == ["change", "4", "8", "16", "1.00"] for line in lines)
    assert jstep.coord_check(known_model, iter([4, 8]), activations).changes["linear"][8] == 20.0  # five steps


def test_params_returned_as_activations_survive_donation() -> None:
    """The step donates the state, and the value before training is still needed."""
    check = jstep.coord_check(known_model, (4, 8), lambda params, x: {"w": params["w"]}, steps=1)
    assert check.changes["w"] == {4: 2.0, 8: 4.0}


# A real model with two hidden layers, one of them with a bias.

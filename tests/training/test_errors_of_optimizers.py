"""Errors of optimizers of the user, and of other libraries, in a step."""

from typing import Any

import pytest

import jstep


def loss_fn(params: Any) -> Any:
    return params["w"] ** 2


def test_errors_of_the_step_get_no_note_about_gradients_that_are_there() -> None:
    def update(updates: Any, slots: Any, params: Any, step: Any) -> Any:
        raise TypeError("None of this works")

    broken = jstep.Optimizer(lambda params, global_step=0: {}, update, lambda step: {})
    with pytest.raises(TypeError, match="None of this") as caught:
        jstep.minimize(loss_fn, broken)(jstep.TrainState.create({"w": 1.0}, broken))
    assert not any("gradients of" in line for line in getattr(caught.value, "__notes__", []))

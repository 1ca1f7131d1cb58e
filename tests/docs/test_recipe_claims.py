"""Sentences of recipes that no code of their page runs."""

import pytest

import jstep


@pytest.mark.thorough
@pytest.mark.parametrize("has_labels", [True, False])
def test_the_first_update_of_a_layer_that_thaws(has_labels: bool) -> None:
    """BYOL and DINO: with a label of its own it is that of a fresh Adam, otherwise up to 3.2 times as large."""
    first, rate = 5000, 1e-3
    optimizer = jstep.adam(rate)
    if has_labels:
        parts = {"body": optimizer, "last": optimizer}
        optimizer = jstep.partition(parts, labels=lambda path, leaf: path)

    def loss(params):
        return params["body"] + params["last"]

    stages = {0: jstep.minimize(loss, optimizer, var_list="body"), first: jstep.minimize(loss, optimizer)}
    state = jstep.TrainState.create({"body": 0.0, "last": 0.0}, optimizer)
    state = jstep.train(stages, state, lambda step: (), first + 1, steps_per_call=500)
    update = -float(state.params["last"]) / rate
    assert update == pytest.approx(1.0 if has_labels else 10**0.5, rel=0.01)
    age = first + 1 - int(state.slots["last/start_step" if has_labels else "start_step"])
    assert age == (1 if has_labels else first + 1)

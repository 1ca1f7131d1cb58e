"""Sentences of recipes that no code of their page runs."""

import pickle

import numpy as np
import pytest

import jstep


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


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_single_environments_of_a_vector_can_be_pickled(mode: str) -> None:
    """Environments on the host: with SAME_STEP they hold all; by default, which ones are to be reset is elsewhere."""
    gymnasium = pytest.importorskip("gymnasium")

    def make():
        environments = [lambda: gymnasium.make("CartPole-v1") for _ in range(3)]
        autoreset = gymnasium.vector.AutoresetMode[mode]
        return gymnasium.vector.SyncVectorEnv(environments, autoreset_mode=autoreset)

    vector, action = make(), np.array([0, 1, 1])
    vector.reset(seed=0)
    with pytest.raises(AttributeError, match="local object"):
        pickle.dumps(vector)
    positions, ends, seen = [], [], []
    for _ in range(40):
        positions.append(pickle.dumps(vector.envs))
        after, _, terminated, *_ = vector.step(action)
        seen.append(after.copy())
        ends.append(terminated.any())
    assert sum(ends) >= 3

    def continues(position: int) -> bool:
        resumed = make()
        resumed.envs = pickle.loads(positions[position])
        return all(np.array_equal(resumed.step(action)[0], seen[position + i]) for i in range(2))

    after_an_end = 1 + ends.index(True)
    assert continues(after_an_end - 1)
    if mode == "SAME_STEP":
        assert all(continues(position) for position in range(38))
    else:
        with pytest.warns(UserWarning, match="already returned terminated"):
            assert not continues(after_an_end)

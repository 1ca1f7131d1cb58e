"""examples/ppo.py: its parts against their definitions, the return it reaches, and runs that are killed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from killed import kill_after, newest_step
from programs import ROOT, fingerprint, run, start
from source_files import import_file

import jstep


@pytest.fixture
def ppo():
    """The module, under JAX's default settings rather than those of the tests."""
    module = import_file(ROOT / "examples" / "ppo.py")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield module


def test_a_push_is_that_of_gym(ppo):
    """The first observations of Gymnasium's CartPole-v1 after reset(seed=42), as its documentation prints them."""
    before = np.float32([[0.0273956, -0.00611216, 0.03585979, 0.0197368]])
    after = np.float32([[0.02727336, 0.18847767, 0.03625453, -0.26141977]])
    np.testing.assert_allclose(ppo.push(jnp.asarray(before), jnp.array([1])), after, atol=2e-8)


def test_an_episode_ends_when_the_pole_falls_or_after_500_pushes(ppo):
    upright, fallen, far = [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.3, 0.0], [2.5, 0.0, 0.0, 0.0]
    environments = {
        "cart": jnp.array([upright, upright, fallen, far]),
        "pushes": jnp.array([3, 499, 20, 30]),
        "last_return": jnp.array([7, 7, 7, 7]),
    }
    new, done = ppo.advance(environments, jnp.ones(4, int), jax.random.key(0))
    assert done.tolist() == [False, True, True, True]
    assert new["pushes"].tolist() == [4, 0, 0, 0]
    assert new["last_return"].tolist() == [7, 500, 21, 31]
    assert jnp.abs(new["cart"][1:]).max() <= 0.05
    assert new["cart"][0, 1] > 0.1  # it was pushed


def test_advantages_are_sums_of_discounted_errors(ppo):
    rng = np.random.default_rng(0)
    value, done, last = rng.normal(size=(12, 3)), rng.random((12, 3)) < 0.2, rng.normal(size=3)
    expected = np.zeros((12, 3))
    for t in range(12):
        for j in range(3):
            weight = 1.0
            for k in range(t, 12):
                after = 0.0 if done[k, j] else (last[j] if k == 11 else value[k + 1, j])
                expected[t, j] += weight * (1.0 + ppo.DISCOUNT * after - value[k, j])
                if done[k, j]:
                    break
                weight *= ppo.DISCOUNT * ppo.TRACE
    seen = {"value": jnp.asarray(value, jnp.float32), "done": jnp.asarray(done)}
    np.testing.assert_allclose(ppo.advantages(seen, jnp.asarray(last, jnp.float32)), expected, rtol=2e-5)


@pytest.mark.thorough
def test_an_iteration_is_one_step_and_sixteen_updates(ppo):
    ppo.ENVIRONMENTS, ppo.PUSHES = 4, 4
    optimizer = jstep.adam(1e-3)
    world = {"environments": ppo.create_environments(jax.random.key(1), 4), "key": jax.random.key(2)}
    state = jstep.TrainState.create(ppo.init_params(jax.random.key(0)), optimizer, model_state=world)
    state, metrics = ppo.make_step(optimizer)(state)
    assert jstep.global_step(state) == 1
    assert int(state.slots["start_step"]) == 1 - ppo.EPOCHS * ppo.MINIBATCHES
    assert state.model_state["environments"]["pushes"].tolist() == [4] * 4
    assert set(metrics) == {"loss", "entropy", "learning_rate", "return"}


@pytest.mark.thorough
def test_it_reaches_the_known_return():
    out = run("ppo.py")
    assert float(re.search(r"greedy return after 300 iterations: ([\d.]+) of 500", out)[1]) >= 475


@pytest.mark.thorough
def test_a_run_killed_anywhere_ends_with_the_same_bits(tmp_path):
    expected = fingerprint(run("ppo.py", "--steps", 60))
    directory = tmp_path / "killed"
    command = ("ppo.py", "--steps", 60, "--dir", directory)
    for step in (6, 18, 42):  # checkpoints are at multiples of 6
        kill_after(start(*command), directory, step)
    assert 42 <= newest_step(directory) < 60
    assert fingerprint(run(*command)) == expected

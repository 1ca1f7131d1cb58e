"""CartPole: the parts of examples/dqn.py and ppo.py, the returns that they reach, and runs that are
killed anywhere."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from killed import kill_after, newest_step
from programs import ROOT, fingerprint, run, start
from source_files import import_file

import jstep

EXAMPLES = ROOT / "examples"
SEEN = np.float32([[0.0273956, -0.00611216, 0.03585979, 0.0197368]])
"""The first observation of Gymnasium's CartPole-v1 after reset(seed=42), as its documentation
prints it."""
AFTER = np.float32([[0.02727336, 0.18847767, 0.03625453, -0.26141977]])
"""The next one, after a push to the right."""


@pytest.fixture
def dqn():
    return import_file(EXAMPLES / "dqn.py")


@pytest.fixture
def ppo():
    """The module, under JAX's default settings rather than those of the tests."""
    module = import_file(EXAMPLES / "ppo.py")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield module


def test_a_push_is_that_of_gym(dqn, ppo):
    carts = dqn.CartPoles(1, seed=0)
    carts.seen = SEEN.copy()
    after, fell = carts.push(np.array([1]))
    np.testing.assert_allclose(after, AFTER, atol=2e-8)
    assert not fell.any()
    np.testing.assert_allclose(ppo.push(jnp.asarray(SEEN), jnp.array([1])), AFTER, atol=2e-8)


def test_an_episode_of_dqn_ends_when_the_pole_falls_or_after_500_pushes(dqn):
    carts = dqn.CartPoles(4, seed=0)
    carts.seen[:] = [
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.3, 0.0],
        [2.5, 0.0, 0.0, 0.0],
    ]
    carts.pushes[:] = [3, 499, 20, 30]
    after, fell = carts.push(np.ones(4, int))
    assert fell.tolist() == [False, False, True, True]
    assert carts.pushes.tolist() == [4, 0, 0, 0]
    assert carts.last_return.tolist() == [0, 500, 21, 31]
    np.testing.assert_array_equal(carts.seen[0], after[0])
    assert np.abs(carts.seen[1:]).max() <= 0.05


def test_a_full_buffer_has_the_newest_rows(dqn):
    buffer = dqn.Buffer(6, at=np.int32(0), seen=np.zeros(2, np.float32))
    for first in (0, 4, 8):
        at = np.arange(first, first + 4)
        buffer.add(at=at, seen=np.stack([at, -at], axis=1))
    assert sorted(buffer.rows["at"]) == [6, 7, 8, 9, 10, 11]
    rows = buffer.sample(np.random.default_rng(0), 50)
    assert set(rows["at"]) == set(range(6, 12))
    np.testing.assert_array_equal(rows["seen"], np.stack([rows["at"], -rows["at"]], axis=1))
    assert (rows["at"].dtype, rows["seen"].dtype) == (np.int32, np.float32)


def test_an_episode_of_ppo_ends_when_the_pole_falls_or_after_500_pushes(ppo):
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
    np.testing.assert_allclose(
        ppo.advantages(seen, jnp.asarray(last, jnp.float32)), expected, rtol=2e-5
    )


@pytest.mark.thorough
def test_an_iteration_is_one_step_and_sixteen_updates(ppo):
    ppo.ENVIRONMENTS, ppo.PUSHES = 4, 4
    optimizer = jstep.adam(1e-3)
    world = {
        "environments": ppo.create_environments(jax.random.key(1), 4),
        "key": jax.random.key(2),
    }
    state = jstep.TrainState.create(
        ppo.init_params(jax.random.key(0)), optimizer, model_state=world
    )
    state, metrics = ppo.make_step(optimizer)(state)
    assert jstep.global_step(state) == 1
    assert int(state.slots["start_step"]) == 1 - ppo.EPOCHS * ppo.MINIBATCHES
    assert state.model_state["environments"]["pushes"].tolist() == [4] * 4
    constants = {"beta1", "beta2", "epsilon"}  # of the optimizer, as a step of `minimize` has them
    assert set(metrics) == {"loss", "entropy", "learning_rate", "return"} | constants


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "least"), [("dqn.py", 150), ("dqn_on_device.py", 150), ("ppo.py", 475)]
)
def test_it_reaches_the_known_return(script, least):
    assert float(re.search(r"return .*: ([\d.]+) of 500", run(script))[1]) >= least


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "steps", "last_step"),
    # Of ppo.py, each sixth step is saved.
    [(("dqn.py",), (1, 2000), 8000), (("ppo.py", "--steps", 60), (6, 18, 42), 60)],
    ids=["dqn", "ppo"],
)
def test_a_run_killed_anywhere_ends_with_the_same_bits(command, steps, last_step, tmp_path):
    expected = fingerprint(run(*command))
    command = (*command, "--dir", tmp_path / "killed")
    for step in steps:
        kill_after(start(*command), tmp_path / "killed", step)
    assert steps[-1] <= newest_step(tmp_path / "killed") < last_step
    assert fingerprint(run(*command)) == expected

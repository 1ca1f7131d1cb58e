"""The section "SAC": its updates against a plain loop, and its targets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS, blocks_of, run_page

import jstep

pytestmark = pytest.mark.thorough  # the page runs for half a minute, here for less

PAGE, SECTION = DOCS / "recipes" / "dqn.md", "SAC"


@pytest.fixture(scope="module")
def page():
    """The names of the blocks with the losses and the updates."""
    definitions = [block.code for block in blocks_of(PAGE, SECTION)[:2]]
    return run_page(PAGE, lambda code: code if code in definitions else "", SECTION)


def adam(slots, grads, rate=1e-3):
    """Adam by hand: (count, m, v) and the change of the parameters."""
    count, m, v = slots
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, v, grads)
    count += 1
    scale = rate * (1 - 0.999**count) ** 0.5 / (1 - 0.9**count)
    return (count, m, v), jax.tree.map(lambda m, v: -scale * m / (jnp.sqrt(v) + 1e-8), m, v)


def plain_updates(page, params, batches, noise):
    """The updates of several steps, one after the other, each with its own Adam and the targets by
    hand."""
    targets, slots = params["critic"], {}
    for name in params:
        zeros = jax.tree.map(jnp.zeros_like, params[name])
        slots[name] = (0, zeros, zeros)

    def update(params, name, loss, *args):
        def of_part(part):
            found = loss({**params, name: part}, *args)
            return found[0] if isinstance(found, tuple) else found  # without aux

        grads = jax.grad(of_part)(params[name])
        slots[name], change = adam(slots[name], grads)
        return {**params, name: jax.tree.map(jnp.add, params[name], change)}

    for i in range(page["UPDATES"]):
        batch = {key: x[i] for key, x in batches.items()}
        params = update(
            params, "critic", page["critic_loss"], batch, noise[i, 0], {**params, "critic": targets}
        )
        targets = jax.tree.map(lambda t, p: t + 0.005 * (p - t), targets, params["critic"])
        entropy = page["actor_loss"](params, batch, noise[i, 1])[1]["entropy"]
        params = update(params, "actor", page["actor_loss"], batch, noise[i, 1])
        params = update(params, "log_alpha", page["alpha_loss"], entropy)
    return params, targets


def test_the_updates_of_a_step_are_those_of_a_plain_loop(page, standard):
    rng, steps = np.random.default_rng(0), page["UPDATES"]
    shapes = {"seen": (3,), "action": (1,), "reward": (), "after": (3,)}
    rows = (steps, page["ROWS"])
    batches = {
        name: rng.normal(size=(*rows, *shape)).astype(np.float32) for name, shape in shapes.items()
    }
    params = page["make_params"](jax.random.key(0))
    keys = [jax.random.fold_in(page["KEY"], step) for step in range(steps)]
    noise = jnp.stack([jax.random.normal(key, (2, page["ROWS"], 1)) for key in keys])
    expected, targets = plain_updates(page, params, batches, noise)

    state, learn = jstep.TrainState.create(params, page["optimizer"]), jax.jit(page["learn"])
    for step in range(steps):
        state, _ = learn(state, {name: x[step] for name, x in batches.items()})
    found = jstep.averaged_params(state, "critic/target")
    assert int(state.global_step) == steps
    ages = {name: steps - int(state.slots[f"{name}/start_step"]) for name in params}
    assert ages == dict.fromkeys(params, steps)
    for one, other in (
        (state.params, expected),
        (found["critic"], targets),
        (found["actor"], expected["actor"]),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), one, other)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), targets, params["critic"])
    assert min(jax.tree.leaves(moved)) > 2e-5 * 2

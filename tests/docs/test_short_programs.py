"""Short programs of several pages: alone, beside the same in plain JAX, Optax or NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pages import DOCS, blocks_of

import jstep

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("standard")]


def names_of(page, section):
    """Run the code of a section, and return what it defines."""
    names = {"jax": jax, "jnp": jnp, "np": np, "jstep": jstep}
    for block in blocks_of(DOCS / page, section):
        exec(compile("\n" * block.line + block.code, page, "exec"), names)
    return names


def loss_of(params, x):
    """A loss whose stand-in for the divergence grows with the parameters."""
    return jnp.mean((params["w"] - x) ** 2), {"kl": jnp.sum(params["w"] ** 2)}


MINIBATCHES = jnp.ones((16, 3))


def params_of_optax(minibatches, target_kl, rate=0.1):
    """The same updates by Optax, in a loop that ends; and how many they were."""
    params, optimizer = {"w": jnp.zeros(3)}, optax.adam(rate)
    slots = optimizer.init(params)
    made = 0
    for x in minibatches:
        (_, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(params, x)
        updates, slots = optimizer.update(grads, slots, params)
        params = optax.apply_updates(params, updates)
        made += 1
        if aux["kl"] > target_kl:
            break
    return params["w"], made


def test_updates_stop_at_target_kl():
    """In two iterations: the age of the slots counts the updates that were made, and no others."""
    make_step = names_of("recipes/ppo.md", "Stop the updates at target_kl")["make_step_until"]
    optimizer = jstep.adamw(0.1, weight_decay=0.0)
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    state, metrics = make_step(0.05, loss_of, optimizer)(state, MINIBATCHES)
    expected, made = params_of_optax(MINIBATCHES, 0.05)
    assert (int(metrics["updates"]), jstep.global_step(state)) == (made, 1)
    assert 1 < made < len(MINIBATCHES)
    np.testing.assert_allclose(state.params["w"], expected, rtol=1e-4)

    state, metrics = make_step(10.0, loss_of, optimizer)(state, MINIBATCHES[:4])
    expected, _ = params_of_optax(jnp.ones((made + 4, 3)), 10.0)
    assert int(metrics["updates"]) == 4
    np.testing.assert_allclose(state.params["w"], expected, rtol=1e-4)


def test_the_rate_adapts_to_the_kl_and_is_restored(tmp_path):
    make_step = names_of("recipes/ppo.md", "A learning rate that adapts to the KL")[
        "make_adaptive_step"
    ]
    optimizer = jstep.gradient_descent(jstep.held("learning_rate", 1e-3))
    step = make_step(0.01, loss_of, optimizer)
    state, rates, expected = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer), [], []
    rate, w = 1e-3, np.zeros(3)
    for n in range(30):
        if n == 15:
            with jstep.Saver(tmp_path) as saver:
                saver.save(state)
                state = saver.restore(jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer))
        state, _ = step(state, MINIBATCHES[:4])
        rates.append(float(jstep.get_hyperparameter(state, "learning_rate")))
        kl = []
        for _ in range(4):
            kl.append(np.sum(w**2))
            w = w - rate * 2 * (w - 1) / 3
        rate = rate / 1.5 if np.mean(kl) > 0.02 else rate
        rate = min(rate * 1.5, 1e-2) if np.mean(kl) < 0.005 else rate
        expected.append(max(rate, 1e-5))
        rate = expected[-1]
    np.testing.assert_allclose(rates, expected, rtol=1e-4)
    assert max(rates) > 1e-3 > min(rates)


def test_pcgrad_is_that_of_numpy():
    code = next(block.code for block in blocks_of(DOCS / "recipes/custom-step.md", "PCGrad"))
    names = {"jax": jax, "jnp": jnp, "ravel_pytree": jax.flatten_util.ravel_pytree}
    exec(code.partition("def pcgrad")[0], names)
    gradients = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    trees = [{"a": jnp.asarray(row[:2]), "b": jnp.asarray(row[2:])} for row in gradients]
    expected = np.zeros(5)
    for i, gradient in enumerate(gradients):
        for j, other in enumerate(gradients):
            if i != j and gradient @ other < 0:
                gradient = gradient - gradient @ other / (other @ other) * other
        expected = expected + gradient
    total = names["without_conflicts"](trees)
    np.testing.assert_allclose(np.concatenate([total["a"], total["b"]]), expected, rtol=1e-4)
    assert np.abs(expected - gradients.sum(0)).max() > 0.1, "there were conflicts"


def test_update_bn_takes_the_mean_of_all_batches(caplog):
    names = names_of("from/pytorch.md", "update_bn")
    hidden = (np.asarray(names["rows"]) @ np.asarray(names["averages"]["w"])).reshape(3, 32, 2)
    np.testing.assert_allclose(
        names["new_statistics"]["mean"], hidden.mean((0, 1)), rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(names["new_statistics"]["var"], hidden.var(1).mean(0), rtol=1e-4)
    np.testing.assert_array_equal(names["evaluated"].params["w"], names["averages"]["w"])
    assert "still hold the old parameters" not in caplog.text, "the program has no slots that could"

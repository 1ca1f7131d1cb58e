"""A Wasserstein GAN on 2D Gaussians, bitwise identical to a loop with two manual Adam optimizers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jstep

N_CRITIC, STEPS = 5, 23
BETA1, BETA2, EPSILON, RATE = 0.5, 0.9, 1e-8, 0.01


def net(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def critic_loss(params, real, noise):
    fake = net(params["actor"], noise)
    values = net(params["critic"], real)
    return jnp.mean(net(params["critic"], fake)) - jnp.mean(values) + 0.1 * jnp.mean(values**2)


def actor_loss(params, real, noise):
    return -jnp.mean(net(params["critic"], net(params["actor"], noise)))


def fresh():
    rng = np.random.default_rng(0)

    def one(inner, out):
        shapes = {"w1": (2, inner), "b1": (1, inner), "w2": (inner, out)}
        return {name: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}

    return {"critic": one(8, 1), "actor": one(6, 2)}


def batch(n):
    rng = np.random.default_rng(100 + n)
    real = np.array([2.0, -1.0]) + rng.normal(size=(16, 2)) * np.array([0.5, 1.5])
    return np.float32(real), np.float32(rng.normal(size=(16, 2)))


@jax.jit
def adam(p, m, v, g, t):
    """One update of Adam, written out."""
    m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, g)
    v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * (g * g), v, g)
    # 1 − βᵗ, at full precision
    correction_m, correction_v = (-jnp.expm1(t * np.float32(np.log(beta))) for beta in (BETA1, BETA2))
    rate = RATE * (jnp.sqrt(correction_v) / correction_m)
    return jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + EPSILON), p, m, v), m, v


def reference():
    params, times = fresh(), {"critic": 0, "actor": 0}
    zeros = {name: jax.tree.map(jnp.zeros_like, params[name]) for name in params}
    slots = {name: (zeros[name], zeros[name]) for name in params}
    losses = {"critic": critic_loss, "actor": actor_loss}

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(name, params, *data):
        return jax.grad(lambda trained: losses[name](params | {name: trained}, *data))(params[name])

    for n in range(STEPS):
        names = ["critic"] + ["actor"] * (n % N_CRITIC == N_CRITIC - 1)
        grads = {name: gradient(name, params, *batch(n)) for name in names}  # all at the same parameters
        for name in names:
            times[name] += 1
            updated, *slots[name] = adam(params[name], *slots[name], grads[name], np.float32(times[name]))
            params = params | {name: updated}
    return params, times


def test_wgan_matches_two_manual_adams():
    adam_optimizer = jstep.adam(RATE, BETA1, BETA2, EPSILON)
    optimizer = jstep.partition(
        {"critic": adam_optimizer, "actor": jstep.update_every(N_CRITIC, adam_optimizer)},
        lambda path, leaf: path.split("/")[0],
    )
    step = jstep.minimize({"critic": (critic_loss, "critic/*"), "actor": (actor_loss, "actor/*")}, optimizer)
    state = jstep.TrainState.create(fresh(), optimizer)
    for n in range(STEPS):
        state, _ = step(state, *batch(n))
    want, times = reference()
    assert {name: STEPS - int(state.slots[f"{name}/start_step"]) for name in times} == times
    jax.tree.map(np.testing.assert_array_equal, state.params, want)

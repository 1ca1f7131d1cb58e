"""Step time of a small network: jstep, Flax TrainState + Optax, and a hand-written flat state.

    python tests/benchmarks/bench_step.py

A 64-64-10 MLP at batch 32, Adam with staircase decay: the overhead around the arithmetic dominates.
"""

import sys

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _timing import interleaved, report

import jstep

K = 100
RATE, DECAY_STEPS, DECAY_RATE = 1e-3, 1000, 0.96


def init_params():
    k1, k2 = jax.random.split(jax.random.key(0))
    return {
        "hidden": {"kernel": jax.random.normal(k1, (64, 64)) * 0.1, "bias": jnp.zeros(64)},
        "out": {"kernel": jax.random.normal(k2, (64, 10)) * 0.1, "bias": jnp.zeros(10)},
    }


def loss_fn(params, x, y):
    h = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    logits = h @ params["out"]["kernel"] + params["out"]["bias"]
    return -jnp.mean(jnp.sum(jax.nn.one_hot(y, 10) * jax.nn.log_softmax(logits), axis=-1))


def hand_written_step(state, x, y):
    """Run a step of Adam on a flat tuple, hand-written for speed."""
    params, m, v, step = state
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    rate = RATE * DECAY_RATE ** (step // DECAY_STEPS).astype(jnp.float32)
    t = (step + 1).astype(jnp.float32)
    corrected = rate * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
    params = jax.tree.map(lambda p, m, v: p - corrected * m / (jnp.sqrt(v) + 1e-8), params, m, v)
    return (params, m, v, step + 1), {"loss": loss, "learning_rate": rate}


def main():
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(32, 64)), jnp.float32), jnp.asarray(rng.integers(0, 10, 32))
    xs, ys = jnp.broadcast_to(x, (K, *x.shape)), jnp.broadcast_to(y, (K, *y.shape))

    optimizer = jstep.adam(jstep.exponential_decay(RATE, DECAY_STEPS, DECAY_RATE, staircase=True))
    train_step = jstep.minimize(loss_fn, optimizer)
    scanned = jstep.scan_steps(train_step)

    schedule = optax.exponential_decay(RATE, DECAY_STEPS, DECAY_RATE, staircase=True)

    def flax_step(state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y)
        return state.apply_gradients(grads=grads), {"loss": loss, "learning_rate": schedule(state.step)}

    # As in Flax's guides and examples, and also with a donated state, which those do not show.
    flax_compiled = jax.jit(flax_step)
    flax_donated = jax.jit(flax_step, donate_argnums=0)
    hand = jax.jit(hand_written_step, donate_argnums=0)
    hand_scanned = jax.jit(
        lambda state, xs, ys: jax.lax.scan(lambda s, b: hand_written_step(s, *b), state, (xs, ys)), donate_argnums=0
    )

    def runner(step, state, *args, per_call=1):
        held = [state]

        def run(calls):
            state = held[0]
            for _ in range(calls // per_call):
                state, metrics = step(state, *args)
            held[0] = state
            return state, metrics

        return run

    def flat():
        params = init_params()
        return params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.int32(0)

    def flax_state():
        new = flax.training.train_state.TrainState.create(apply_fn=None, params=init_params(), tx=optax.adam(schedule))
        return new.replace(step=jnp.int32(0))

    contenders = {
        "jstep minimize": runner(train_step, jstep.TrainState.create(init_params(), optimizer), x, y),
        "Flax TrainState + Optax": runner(flax_compiled, flax_state(), x, y),
        "the same, donated": runner(flax_donated, flax_state(), x, y),
        "hand-written": runner(hand, flat(), x, y),
        "jstep scan_steps, K=100": runner(
            scanned, jstep.TrainState.create(init_params(), optimizer), xs, ys, per_call=K
        ),
        "raw scan, K=100": runner(hand_scanned, flat(), xs, ys, per_call=K),
    }
    times = interleaved(contenders, calls=1000, rounds=21)
    return report(
        "64-64-10 MLP, batch 32, Adam with staircase decay, a step",
        times,
        {
            ("jstep minimize", "Flax TrainState + Optax"): 0.80,
            ("jstep minimize", "the same, donated"): None,
            ("jstep minimize", "hand-written"): 1.08,
            ("jstep scan_steps, K=100", "Flax TrainState + Optax"): 0.40,
            ("jstep scan_steps, K=100", "raw scan, K=100"): 1.05,
        },
    )


if __name__ == "__main__":
    sys.exit(not main())

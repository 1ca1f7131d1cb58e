"""A train step called by hand, of three networks.

    python benchmarks/bench_step.py
    python benchmarks/bench_step.py transformer

All steps run the same loss of the same plain parameters, with AdamW and a staircase of rates, are
compiled once and return the loss and the rate. With two layers of 64 the call takes longer than the
arithmetic; with 8 layers of 256, and with a transformer of two blocks, it does not. Flax's guides
donate no state, so it is shown both ways: XLA's CPU backend copies some of what Optax's chain
donates, so that the undonated step can be the quicker one on a CPU. On an accelerator donation
saves the memory of a second state. Flax NNX takes more time on the host: with `nnx.split` outside
of `jax.jit` almost twice, with `nnx.cached_partial` five times that of a TrainState of two layers.

"In one call" means that all three scan over that many batches, which are stacked before.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _timing import interleaved, report
from bounds import BOUNDS

sys.path.insert(0, str(Path(__file__).parent / "whole_runs"))

from networks_jax import dense, init_layer, init_transformer, transformer

import jstep

RATE, DECAY_STEPS, DECAY_RATE, WEIGHT_DECAY = 1e-3, 1000, 0.96, 0.01
ADAMW, PER_CALL = (0.9, 0.999, 1e-8), 100


@dataclasses.dataclass
class Network:
    """What is measured.

    Attributes:
        init: The parameters, by a key.
        predict: Logits, by parameters and inputs.
        batch: Inputs and labels.
        calls: The number of steps in a turn.
        per_call: The number of steps in one call, where a call has several.
    """

    init: Callable[[Any], Any]
    predict: Callable[[Any, Any], Any]
    batch: tuple[Any, Any]
    calls: int
    per_call: int

    def loss(self, params, x, y):
        """The mean cross-entropy."""
        logits = self.predict(params, x)
        correct = jnp.take_along_axis(logits, y[..., None], -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1, keepdims=True) - correct)


def layers(*widths):
    """A network of dense layers: a function that makes its parameters, and one from inputs to
    logits."""

    def init(key):
        shapes = list(itertools.pairwise(widths))
        keys = jax.random.split(key, len(shapes))
        return {
            f"dense{i}": init_layer(key, *shape)
            for i, (key, shape) in enumerate(zip(keys, shapes, strict=True))
        }

    def predict(params, x):
        *hidden, last = params.values()
        for layer in hidden:
            x = jax.nn.relu(dense(layer, x))
        return dense(last, x)

    return init, predict


def rows(batch, width):
    """Inputs and labels for dense layers."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(batch, width)), jnp.float32), jnp.asarray(
        rng.integers(0, 10, batch)
    )


def characters(batch, length=64):
    """Inputs and labels for the transformer."""
    text = jnp.asarray(np.random.default_rng(0).integers(0, 128, (batch, length + 1)))
    return text[:, :-1], text[:, 1:]


TWO_LAYERS = Network(*layers(64, 64, 10), rows(32, 64), 1000, PER_CALL)
NETWORKS = {
    "2 layers": TWO_LAYERS,
    "8 layers": Network(*layers(*[256] * 8, 10), rows(128, 256), 50, 25),
    "transformer": Network(init_transformer, transformer, characters(8), 8, 8),
}


def init_params():
    """Parameters of the smallest network, which other benchmarks of the loop train."""
    return TWO_LAYERS.init(jax.random.key(0))


def loss_fn(params, x, y):
    """The loss of the smallest network."""
    return TWO_LAYERS.loss(params, x, y)


def flax_step(network):
    """The step and the initial state with Flax and Optax, as in Flax's guides."""
    schedule = optax.exponential_decay(RATE, DECAY_STEPS, DECAY_RATE, staircase=True)
    optimizer = optax.adamw(schedule, weight_decay=WEIGHT_DECAY)

    def step(state, x, y):
        loss, grads = jax.value_and_grad(network.loss)(state.params, x, y)
        metrics = {"loss": loss, "learning_rate": schedule(state.step)}
        return state.apply_gradients(grads=grads), metrics

    def state():
        params = network.init(jax.random.key(0))
        new = flax.training.train_state.TrainState.create(
            apply_fn=network.predict, params=params, tx=optimizer
        )
        return new.replace(step=jnp.int32(0))  # a Python number would compile the step once more

    return step, state


def hand_written_step(network):
    """The step and the initial state without a library: a tuple of the step and of all arrays."""
    structure = jax.tree.structure(jax.eval_shape(network.init, jax.random.key(0)))
    beta1, beta2, epsilon = ADAMW

    def step(state, x, y):
        count, *arrays = state
        n = structure.num_leaves
        params, ms, vs = arrays[:n], arrays[n : 2 * n], arrays[2 * n :]
        loss, grads = jax.value_and_grad(network.loss)(structure.unflatten(params), x, y)
        rate = RATE * DECAY_RATE ** (count // DECAY_STEPS).astype(jnp.float32)
        t = (count + 1).astype(jnp.float32)
        unbias1, unbias2 = 1 / (1 - beta1**t), 1 / (1 - beta2**t)
        news = []
        for p, m, v, g in zip(params, ms, vs, jax.tree.leaves(grads), strict=True):
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            update = unbias1 * m / (jnp.sqrt(unbias2 * v) + epsilon) + WEIGHT_DECAY * p
            news.append((p - rate * update, m, v))
        return (count + 1, *(array for column in zip(*news, strict=True) for array in column)), {
            "loss": loss,
            "learning_rate": rate,
        }

    def state():
        params = jax.tree.leaves(network.init(jax.random.key(0)))
        return (jnp.int32(0), *params, *(jnp.zeros_like(p) for _ in range(2) for p in params))

    return step, state


def jstep_step(network):
    """The compiled step and the initial state of jstep."""
    schedule = jstep.exponential_decay(RATE, DECAY_STEPS, DECAY_RATE, staircase=True)
    optimizer = jstep.adamw(schedule, weight_decay=WEIGHT_DECAY)
    step = jstep.minimize(network.loss, optimizer)
    return step, lambda: jstep.TrainState.create(network.init(jax.random.key(0)), optimizer)


def scanned(step):
    """A program of several steps in one call."""

    def program(state, xs, ys):
        return jax.lax.scan(lambda state, batch: step(state, *batch), state, (xs, ys))

    return jax.jit(program, donate_argnums=0)


def runner(step, state, batch, per_call=1):
    """A contender of `interleaved`, which continues from the state of its last turn."""
    held = [state]

    def run(calls):
        state, metrics = held[0], None
        for _ in range(-(-calls // per_call)):
            state, metrics = step(state, *batch)
        held[0] = state
        return state, metrics

    return run


def contenders_of(name, network):
    """Contenders with one step a call, and with several."""
    ours, our_state = jstep_step(network)
    flax_one, flax_state = flax_step(network)
    hand, hand_state = hand_written_step(network)
    donated = functools.partial(jax.jit, donate_argnums=0)
    k = network.per_call
    stacked = jax.tree.map(lambda a: jnp.broadcast_to(a, (k, *a.shape)), network.batch)
    one = {
        f"jstep, {name}": runner(ours, our_state(), network.batch),
        "Flax + Optax, donated": runner(donated(flax_one), flax_state(), network.batch),
        "Flax + Optax, not donated": runner(jax.jit(flax_one), flax_state(), network.batch),
        "a tuple of arrays": runner(donated(hand), hand_state(), network.batch),
    }
    several = {
        f"jstep, {name}, {k} steps": runner(jstep.scan_steps(ours), our_state(), stacked, k),
        "Flax + Optax, donated": runner(scanned(flax_one), flax_state(), stacked, k),
        "a tuple of arrays": runner(scanned(hand), hand_state(), stacked, k),
    }
    return one, several


def refuse_other_results(name, contenders):
    """Raise an error unless all contenders have the same loss after the same steps."""
    losses = {peer: np.asarray(run(3)[1]["loss"]).ravel()[-1] for peer, run in contenders.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise RuntimeError(f"{name}: the contenders train differently: {losses}")


def main(chosen):
    good = True
    for name, network in NETWORKS.items():
        if chosen and name not in chosen:
            continue
        one, several = contenders_of(name, network)
        for title, contenders in (
            ("A step, called by hand", one),
            ("Several steps in one call", several),
        ):
            refuse_other_results(name, contenders)
            times = interleaved(contenders, calls=network.calls, rounds=15)
            ours, *peers = times
            good &= report(
                title, times, {(ours, peer): BOUNDS["step"].get((ours, peer)) for peer in peers}
            )
    return good


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))

"""Deep Q-learning (DQN) on CartPole in a custom loop: environments, replay buffer in NumPy.

    python examples/dqn.py                 # less than a minute on two CPU cores
    python examples/dqn.py --dir runs/dqn  # save checkpoints; the same command resumes

The loop is the usual one: act, write to the buffer, draw a batch, take a step. `jstep.Run` around
it saves and restores the training state, and the objects passed to `from_loop`: the carts, the
buffer and the random generator. So a run that is killed and restarted ends with bitwise the same
state as an uninterrupted one.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jstep

CARTS, CAPACITY, ROWS, STARTS, DISCOUNT = 8, 8192, 64, 1000, 0.99
LONGEST = 500


class CartPoles:
    """Several carts with the equations of gym's CartPole-v1; ended episodes begin again."""

    def __init__(self, count, seed):
        self.rng = np.random.default_rng(seed)
        self.seen = self.reset(count)
        self.pushes, self.last_return = np.zeros(count, np.int32), np.zeros(count, np.int32)

    def reset(self, count):
        return self.rng.uniform(-0.05, 0.05, (count, 4)).astype(np.float32)

    def push(self, action):
        """Push each cart; return what is seen then, and which poles fell.

        Episodes end after LONGEST pushes, too.
        """
        _, speed, angle, spin = self.seen.T
        sin, cos = np.sin(angle), np.cos(angle)
        force = (20.0 * action - 10.0 + 0.05 * spin**2 * sin) / 1.1
        angular = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        linear = force - 0.05 * angular * cos / 1.1
        change = np.stack([speed, linear, spin, angular], axis=1)
        after = (self.seen + 0.02 * change).astype(np.float32)
        fell = (abs(after[:, 0]) > 2.4) | (abs(after[:, 2]) > np.deg2rad(12.0))

        self.pushes = self.pushes + 1
        over = fell | (self.pushes == LONGEST)
        self.last_return = np.where(over, self.pushes, self.last_return)
        self.pushes = np.where(over, 0, self.pushes)
        self.seen = np.where(over[:, None], self.reset(len(after)), after)
        return after, fell


class Buffer:
    """The newest rows, in arrays.

    Its arguments are one row: `Buffer(8192, seen=np.zeros(4), done=False)`.
    """

    def __init__(self, capacity, **row):
        self.count = 0
        self.rows = {
            name: np.zeros((capacity, *np.shape(x)), np.asarray(x).dtype) for name, x in row.items()
        }

    def add(self, **new):
        for name, rows in self.rows.items():
            rows[(self.count + np.arange(len(new[name]))) % len(rows)] = new[name]
        self.count += len(new[name])

    def sample(self, rng, count):
        capacity = len(next(iter(self.rows.values())))
        chosen = rng.integers(min(self.count, capacity), size=count)
        return {name: rows[chosen] for name, rows in self.rows.items()}


def transitions():
    """A buffer for what `CartPoles` shows."""
    cart = np.zeros(4, np.float32)
    return Buffer(CAPACITY, seen=cart, action=np.int32(0), after=cart, fell=False)


def init_params(key, *sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"kernel": jax.random.normal(key, (n, m)) * (2 / n) ** 0.5, "bias": jnp.zeros(m)}
        for key, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def network(layers, x):
    *hidden, last = layers
    for layer in hidden:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def loss_fn(params, batch, averages):
    """The squared error of the values of the actions; `averages` is the target network."""
    values = network(params, batch["seen"])
    chosen = jnp.take_along_axis(values, batch["action"][:, None], axis=1)[:, 0]
    following = network(averages, batch["after"]).max(axis=1)
    target = 1.0 + DISCOUNT * jnp.where(batch["fell"], 0.0, following)
    return jnp.mean((chosen - target) ** 2)


@jax.jit
def best_action(params, seen):
    return network(params, seen).argmax(axis=1)


def main(steps=8000, seed=0, directory=None):
    optimizer = jstep.with_moving_average(
        jstep.adamw(1e-3, weight_decay=0.0), jstep.ExponentialMovingAverage(0.0, every=60)
    )
    state = jstep.TrainState.create(init_params(jax.random.key(seed), 4, 64, 64, 2), optimizer)
    train_step = jstep.minimize(loss_fn, optimizer, use_averages=True)

    carts, buffer, rng = CartPoles(CARTS, seed), transitions(), np.random.default_rng(seed + 1)
    kept = jstep.from_loop(carts=carts, buffer=buffer, rng=rng)
    options = {
        "checkpoint_dir": directory,
        "save_checkpoint_steps": max(1, steps // 20),
        "log_steps": 1000,
    }
    with jstep.Run(train_step, state, kept, steps, **options) as run:
        for step in run:
            seen, explores = carts.seen, rng.random(CARTS) < np.interp(step, [0, 2000], [1.0, 0.05])
            action = np.where(
                explores, rng.integers(2, size=CARTS), best_action(run.state.params, seen)
            )
            after, fell = carts.push(action)
            buffer.add(seen=seen, action=action, after=after, fell=fell)
            if buffer.count >= STARTS:
                run.train_step(buffer.sample(rng, ROWS))

    print(f"mean return of the latest episodes: {carts.last_return.mean():.1f} of {LONGEST}")
    # Two runs with the same fingerprint ended in bitwise the same state.
    print("fingerprint of the state: {:08x}{:08x}".format(*jstep.fingerprint(run.state)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=8000, help="train steps of the run (default 8000)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, environments and actions (default 0)"
    )
    parser.add_argument(
        "--dir", dest="directory", help="save checkpoints here (default: save none)"
    )
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        # The run has logged where it stopped, and saved if it has a directory.
        sys.exit(130)

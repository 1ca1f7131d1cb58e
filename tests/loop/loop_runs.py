"""A small training run, a hook that records the calls of the loop, and a loader with a position."""

import time

import jax
import jax.numpy as jnp
import numpy as np

import jstep
from jstep.hooks.base import RunHook

OPTIMIZER = jstep.with_moving_average(
    jstep.adam(jstep.exponential_decay(0.1, 10, 0.9)), jstep.ExponentialMovingAverage(0.9)
)
DATA = jstep.batches({"x": np.arange(40.0, dtype=np.float32).reshape(20, 2)}, batch_size=4, seed=3)


def loss_fn(params, batch, rng):
    noise = jax.random.normal(rng, params["w"].shape)
    return jnp.mean((batch["x"] @ params["w"] - 1.0) ** 2) + jnp.sum(noise * params["w"])


STEP = jstep.minimize(loss_fn, OPTIMIZER, rng=jax.random.key(7))


def make_state(step=0):
    return jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER, global_step=step)


def train(last_step, batches=DATA, hooks=(), state=None, step=STEP, **kwargs):
    kwargs.setdefault("progress", False)
    state = make_state() if state is None else state
    return jstep.train(step, state, batches, last_step=last_step, hooks=hooks, **kwargs)


def by_hand(steps, state=None):
    state = make_state() if state is None else state
    for n in range(jstep.global_step(state), steps):
        state, _ = STEP(state, DATA[n])
    return state


def same(a, b):
    leaves = jax.tree.leaves(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))
    return all(leaves)


class Calls(RunHook):
    """Records the calls of the loop; fails or stops at given events."""

    def __init__(self, every_n=None, fail=None, stop=None):
        self.every_n, self.fail, self.stop = every_n, fail, stop
        self.seen, self.metrics, self.calls = [], {}, []

    def note(self, *event):
        self.seen.append(event)
        if self.fail == event:
            raise RuntimeError(f"failed at {event}")

    def begin(self, state):
        self.note("begin", jstep.global_step(state))
        self.run.pending.append((self, self.first_call))

    def first_call(self, *, wait=False):
        self.note("first", self.run.step)
        return True

    def before_step(self, step, state):
        self.calls.append(step)

    def after_step(self, step, state, metrics):
        self.metrics[step] = metrics
        assert jstep.global_step(state) == step
        assert type(step) is int
        self.note("step", step)
        return step == self.stop

    def before_save(self, step):
        self.note("save", step)

    def end(self, step, state):
        assert jstep.global_step(state) == step
        self.note("end", step)

    def close(self):
        super().close()
        self.note("close")

    def next_due(self, step):
        return None if self.every_n is None else (step // self.every_n + 1) * self.every_n

    def steps(self, what="step"):
        return [event[1] for event in self.seen if event[0] == what]


class Counted:
    """A loader with a position, which is an int, bytes or a dict."""

    def __init__(self, kind=int, slow=0.0):
        self.at, self.kind, self.slow = 0, kind, slow

    def __iter__(self):
        return self

    def __next__(self):
        time.sleep(self.slow)
        self.at += 1
        return DATA[self.at - 1]

    def get_state(self):
        return {int: self.at, bytes: b"%d" % self.at, dict: {"at": self.at}}[self.kind]

    def set_state(self, state):
        self.at = int(state["at"] if self.kind is dict else state)

"""Child processes that tests start: common preludes, and functions to start, synchronize and end
them."""

import signal

import forked

IMPORTS = """
import json, os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
import jstep

# Whatever runs the tests may ignore SIGINT, as background jobs of a shell do; programs in a terminal do not.
signal.signal(signal.SIGINT, signal.default_int_handler)
directory = sys.argv[1]

def say(*words):
    print(*words, flush=True)
"""  # noqa: E501

MODEL = """
DATA = jstep.batches({"x": np.random.default_rng(0).normal(size=(64, 8)).astype("f")}, batch_size=8, seed=1)
OPTIMIZER = jstep.with_moving_average(
    jstep.adam(jstep.exponential_decay(0.05, 20, 0.9)), jstep.ExponentialMovingAverage(0.9))

def loss_fn(params, batch, rng):
    x = batch["x"] + 0.1 * jax.random.normal(rng, batch["x"].shape)
    return jnp.mean((jnp.tanh(x @ params["w"]) - x) ** 2)

STEP = jstep.minimize(loss_fn, OPTIMIZER, rng=jax.random.key(7))

def make_state():
    return jstep.TrainState.create({"w": jnp.eye(8)}, OPTIMIZER)

def digest(state):
    import hashlib
    leaves = jax.tree.leaves(state)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()

class Counted:
    at = 0
    def __next__(self):
        self.at += 1
        return DATA[self.at - 1]
    def get_state(self):
        return b"%d" % self.at
    def set_state(self, state):
        self.at = int(state)

def train(last_step, batches=DATA, state=None, **kwargs):
    kwargs.setdefault("progress", False)
    return jstep.train(STEP, make_state() if state is None else state, batches, last_step, **kwargs)
"""  # noqa: E501


def start(script, directory, *args, prelude=IMPORTS + MODEL, stderr=None):
    STARTED.append(forked.start(prelude + script, directory, *args, stderr=stderr))
    return STARTED[-1]


STARTED = []


def kill_all():
    while STARTED:
        with STARTED.pop() as process:  # closes its pipes
            process.kill()


def read_until(process, word):
    """Read the output of a process until a line that starts with `word`; return the words of this
    line."""
    for line in process.stdout:
        if line.startswith(word):
            return line.split()
    raise AssertionError(process.stderr.read()[-3000:])


def signalled(script, directory, word, number=signal.SIGTERM):
    """Start a script and send it a signal as soon as it prints a line that starts with a word;
    return the process."""
    process = start(script, directory)
    read_until(process, word)
    process.send_signal(number)
    return process


def end(process, code=0, timeout=60):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, err[-3000:]
    return out, err

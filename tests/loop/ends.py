"""A run to which something comes in one of its phases; also a program: `ends.py PHASE WHAT
DIRECTORY`."""

import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

import jstep
from jstep.core import signals
from jstep.hooks.run_hook import RunHook

PHASES = (
    *(
        "start", "waiting", "compiling", "call", "hook of train", "hook", "evaluation of train",
        "evaluation", "body",
    ),
    *("save", "end", "after", "closing"),
)  # fmt: skip
STOPS = "SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "stop_secs"
AT, LAST = 5, 8
"""The step at which it comes, except in `start`, `end`, `after` and `closing`, and the last one."""


class BoomError(Exception):
    """An error."""


class Comes:
    """What comes in one phase, once; an error comes each time, and a second SIGINT at once, or in a
    later phase.

    `spend` is called before that, each time.
    """

    def __init__(self, phase, what, spend):
        self.phase, self.what, self.spend, self.step = (
            phase.removesuffix(" of train"),
            what,
            spend,
            0,
        )
        self.left = 2 if what == "SIGINT twice" else 1

    def at(self, phase):
        if phase == self.phase:
            self.spend()
        if not self.left or (
            phase != self.phase and not (self.what == "SIGINT twice" and self.left == 1)
        ):
            return
        if self.what == "an error":
            raise BoomError(phase)
        self.left -= 1
        if self.what == "a hang":
            threading.Event().wait()
        elif self.what == "stop_secs":
            signals._active[-1]._expire()  # what the timer does
        elif self.what != "nothing":
            signal.raise_signal(getattr(signal, self.what.split()[0]))
            self.at(phase)


class Loader:
    def __init__(self, comes):
        self.n, self.comes = 0, comes

    def __iter__(self):
        self.comes.at("start")
        return self

    def __next__(self):
        if self.n == AT:
            self.comes.at("waiting")
        self.n += 1
        return np.ones(2 + (self.comes.phase == "compiling" and self.n == AT + 1), np.float32)


class Validation:
    def __init__(self, comes):
        self.comes = comes

    def __iter__(self):
        yield np.ones(2, np.float32)  # read when the run starts
        if self.comes.step == AT:
            self.comes.at("evaluation")
        yield np.ones(2, np.float32)


class Places(jstep.Hook):
    def __init__(self, comes):
        self.comes = comes

    def after_step(self, step, state, metrics):
        self.comes.step = step
        if step == AT:
            self.comes.at("hook")

    def end(self, step, state):
        self.comes.at("end")

    def get_state(self):
        if self.comes.step == AT:
            self.comes.at("save")
        return {}

    def set_state(self, state):
        pass


class Closes(RunHook):
    def __init__(self, comes):
        self.comes = comes

    def close(self):
        if self.comes.phase == "closing":
            self.comes.at("closing")


def train_step(comes):
    """Return a training step, and the optimizer; in a call, what comes is in a callback of the
    device, or before it."""

    def loss_fn(params, x):
        if x.shape == (3,):
            comes.at("compiling")
        if comes.phase == "call" and comes.what in ("an error", "a hang"):
            x = x + jax.pure_callback(in_call, jax.ShapeDtypeStruct((), np.float32))
        return jnp.mean((params["w"] - x) ** 2)

    def in_call():
        if comes.step == AT:
            comes.at("call")
        return np.float32(0)

    def step_fn(state, x):
        if comes.step == AT and comes.what not in ("an error", "a hang"):
            comes.at("call")
        return compiled(state, x)

    optimizer = jstep.gradient_descent(0.1)
    compiled = jstep.minimize(loss_fn, optimizer)
    return step_fn if comes.phase == "call" else compiled, optimizer


def run(phase, what, directory, spend=lambda: None, ends=()):
    """Run a loop; `ends` are how the loop ends in its body: `break`, `stop`."""
    comes = Comes(phase, what, spend)
    step, optimizer = train_step(comes)
    hooks = [Places(comes), Closes(comes)]
    if comes.phase == "evaluation":
        evaluate = jstep.evaluator(lambda params, x: {"x": jnp.mean(x)}, Validation(comes))
        hooks.append(jstep.EvaluationHook(evaluate, every_n_steps=AT))
    if what == "a hang":
        hooks.append(jstep.StallHook(warn_secs=0.3, exit_secs=1.0))
    arguments = step, jstep.TrainState.create({"w": jnp.float32(0)}, optimizer), Loader(comes), LAST
    options = {
        "hooks": hooks, "checkpoint_dir": directory, "save_checkpoint_secs": None,
        "save_checkpoint_steps": AT if phase == "save" else None,
        "stop_secs": 1000.0 if what == "stop_secs" else None, "log_steps": None, "progress": False,
    }  # fmt: skip
    if phase.endswith(" of train"):
        return jstep.train(*arguments, **options)
    with jstep.Run(*arguments, **options) as loop:
        for number in loop:
            if number == AT:
                comes.at("body")
                if "stop" in ends:
                    loop.stop()
                if "break" in ends:
                    break
        comes.at("after")
    return loop.state


if __name__ == "__main__":
    run(*sys.argv[1:])

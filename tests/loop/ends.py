"""A run to which something comes in one of its phases; also a program: `ends.py PHASE WHAT DIRECTORY`."""

import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

import jstep
from jstep.hooks.run_hook import RunHook
from jstep.loop import signals

PHASES = "start", "waiting", "compiling", "call", "hook", "body", "evaluation", "save", "closing"
STOPS = "SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "stop_secs"
AT, LAST = 5, 8
"""The step at which it comes, except in `start` and `closing`, and the last one."""


class BoomError(Exception):
    """An error."""


class Comes:
    """What comes in one phase, once; an error comes each time, and a second SIGINT at once, or in a later phase."""

    def __init__(self, phase, what):
        self.phase, self.what, self.step = phase, what, 0
        self.left = 2 if what == "SIGINT twice" else 1

    def at(self, phase):
        if not self.left or (phase != self.phase and not (self.what == "SIGINT twice" and self.left == 1)):
            return
        if self.what == "an error":
            raise BoomError(phase)
        self.left -= 1
        if self.what == "a hang":
            threading.Event().wait()
        if self.what == "stop_secs":
            signals._active[-1]._expire()  # what the timer does
        else:
            signal.raise_signal(getattr(signal, self.what.split()[0]))
            self.at(phase)


class Loader:
    def __init__(self, comes):
        self.n, self.comes = 0, comes

    def __iter__(self):
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

    def begin(self, state):
        self.comes.at("start")

    def before_step(self, step, state):
        if step == AT and self.comes.what not in ("an error", "a hang"):
            self.comes.at("call")  # the signal is handled before the call, or after it

    def after_step(self, step, state, metrics):
        self.comes.step = step
        if step == AT:
            self.comes.at("hook")

    def get_state(self):
        if self.comes.step >= AT:
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


def run(phase, what, directory):
    comes = Comes(phase, what)

    def loss_fn(params, x):
        if x.shape == (3,):
            comes.at("compiling")
        if phase == "call" and what in ("an error", "a hang"):
            x = x + jax.pure_callback(in_call, jax.ShapeDtypeStruct((), np.float32))
        return jnp.mean((params["w"] - x) ** 2)

    def in_call():
        if comes.step == AT:
            comes.at("call")
        return np.float32(0)

    optimizer = jstep.gradient_descent(0.1)
    hooks = [Places(comes), Closes(comes)]
    if phase == "evaluation":
        evaluate = jstep.evaluator(lambda params, x: {"x": jnp.mean(x)}, Validation(comes))
        hooks.append(jstep.EvaluationHook(evaluate, every_n_steps=AT))
    if what == "a hang":
        hooks.append(jstep.StallHook(warn_secs=0.3, exit_secs=1.0))
    step = jstep.minimize(loss_fn, optimizer)
    with jstep.Run(
        step, jstep.TrainState.create({"w": jnp.float32(0)}, optimizer), Loader(comes), LAST, hooks=hooks,
        checkpoint_dir=directory, save_checkpoint_secs=None, save_checkpoint_steps=AT if phase == "save" else None,
        stop_secs=1000.0 if what == "stop_secs" else None, log_steps=None, progress=False,
    ) as loop:  # fmt: skip
        for number in loop:
            if number == AT:
                comes.at("body")
    return loop.state


if __name__ == "__main__":
    run(*sys.argv[1:])

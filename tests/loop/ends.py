"""A run to which something comes in one of its phases; also a program: `ends.py PHASE WHAT DIRECTORY`."""

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jstep
from jstep.hooks.run_hook import RunHook
from jstep.loop import signals

PHASES = "start", "waiting", "compiling", "call", "hook", "evaluation", "save", "closing"
STOPS = "SIGTERM", "SIGINT", "SIGUSR1", "stop_secs"
AT, LAST = 5, 8
"""The step at which it comes, except in `start` and `closing`, and the last one."""


class BoomError(Exception):
    """An error."""


class Comes:
    """What comes in one phase, once; an error comes each time, and a second SIGINT at once, or in a later phase."""

    def __init__(self, phase: str, what: str) -> None:
        self.phase, self.what, self.step = phase, what, 0
        self.left = 2 if what == "SIGINT twice" else 1

    def at(self, phase: str) -> None:
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
    """Batches; the one at `AT` has another shape if that is to be compiled for."""

    def __init__(self, comes: Comes) -> None:
        self.n, self.comes = 0, comes

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Any:
        if self.n == AT:
            self.comes.at("waiting")
        self.n += 1
        return np.ones(2 + (self.comes.phase == "compiling" and self.n == AT + 1), np.float32)


class Validation:
    """Batches of an evaluation."""

    def __init__(self, comes: Comes) -> None:
        self.comes = comes

    def __iter__(self) -> Any:
        yield np.ones(2, np.float32)  # read when the run starts
        if self.comes.step == AT:
            self.comes.at("evaluation")
        yield np.ones(2, np.float32)


class Places(jstep.Hook):
    """A user's hook with a state, which is kept in each save."""

    def __init__(self, comes: Comes) -> None:
        self.comes = comes

    def begin(self, state: Any) -> None:
        self.comes.at("start")

    def before_step(self, step: int, state: Any) -> None:
        if step == AT and self.comes.what not in ("an error", "a hang"):
            self.comes.at("call")  # the signal is handled before the call, or after it

    def after_step(self, step: int, state: Any, metrics: Any) -> None:
        self.comes.step = step
        if step == AT:
            self.comes.at("hook")

    def get_state(self) -> dict[str, Any]:
        if self.comes.step >= AT:
            self.comes.at("save")
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


class Closes(RunHook):
    """What the run closes at its end."""

    def __init__(self, comes: Comes) -> None:
        self.comes = comes

    def close(self) -> None:
        if self.comes.phase == "closing":
            self.comes.at("closing")


def run(phase: str, what: str, directory: Any) -> Any:
    """Run `train` to its end, or until it is stopped."""
    comes = Comes(phase, what)

    def loss_fn(params: Any, x: Any) -> Any:
        if x.shape == (3,):
            comes.at("compiling")
        if phase == "call" and what in ("an error", "a hang"):
            x = x + jax.pure_callback(in_call, jax.ShapeDtypeStruct((), np.float32))
        return jnp.mean((params["w"] - x) ** 2)

    def in_call() -> Any:
        if comes.step == AT:
            comes.at("call")
        return np.float32(0)

    optimizer = jstep.gradient_descent(0.1)
    hooks: list[Any] = [Places(comes), Closes(comes)]
    if phase == "evaluation":
        evaluate = jstep.evaluator(lambda params, x: {"x": jnp.mean(x)}, Validation(comes))
        hooks.append(jstep.EvaluationHook(evaluate, every_n_steps=AT))
    if what == "a hang":
        hooks.append(jstep.StallHook(warn_secs=0.3, exit_secs=1.0))
    step: Callable[..., Any] = jstep.minimize(loss_fn, optimizer)
    return jstep.train(
        step, jstep.TrainState.create({"w": jnp.float32(0)}, optimizer), Loader(comes), LAST, hooks=hooks,
        checkpoint_dir=directory, save_checkpoint_secs=None, save_checkpoint_steps=AT if phase == "save" else None,
        stop_secs=1000.0 if what == "stop_secs" else None, log_steps=None, progress=False,
    )  # fmt: skip


if __name__ == "__main__":
    run(*sys.argv[1:])

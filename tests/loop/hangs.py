"""Hangs for tests: code that blocks until the run has said so, and the lines that it says."""

import contextlib
import logging
import re
import socket
import threading

import jax.numpy as jnp

import jstep

HOST = re.escape(socket.gethostname())
SECS = r"\d+(?:\.\d+)? s"


class Hang(logging.Handler):
    """Blocks its caller until the log has so many lines about a stall since then, which are its
    `lines`."""

    def __init__(self, count=1):
        super().__init__(logging.WARNING)
        self._count = count
        self._has_begun = False  # on a loaded machine, a line may come before the call
        self._released = threading.Event()
        self.lines = []

    def emit(self, record):
        text = record.getMessage()
        if self._has_begun and re.search(r"has been|resumed|exit code 75", text):
            self.lines.append(text)
        if sum("has been" in line for line in self.lines) >= self._count:
            self._released.set()

    def __call__(self, *_):
        self._has_begun = True
        assert self._released.wait(20), "no line was logged"


@contextlib.contextmanager
def hang(count=1):
    handler, logger = Hang(count), logging.getLogger("jstep")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def loss_fn(params, x):
    return jnp.mean((params["w"] * x - 1.0) ** 2)


OPTIMIZER = jstep.adam(0.1)
STEP = jstep.minimize(loss_fn, OPTIMIZER)
X = jnp.ones(3)


def data(step):
    return X


def make_state():
    return jstep.TrainState.create({"w": jnp.zeros(3)}, OPTIMIZER)


def train(last_step=20, batches=data, *, step=STEP, hooks=(), warn_secs=0.05, **kwargs):
    kwargs.setdefault("progress", False)
    hooks = [jstep.StallHook(warn_secs=warn_secs), *hooks]
    return jstep.train(step, make_state(), batches, last_step, hooks=hooks, **kwargs)


def once_at(stuck, at):

    def batch(step):
        if step == at:
            stuck()
        return data(step)

    return batch


def line_of(what, place, usual=""):
    """A pattern of a line of a single process; `usual` is "?" if it may have no usual time."""
    usually = rf"(?: \(usually {SECS}\)){usual}"
    return rf"process 0 of 1 \(host {HOST}\) has been {what} for {SECS}{usually}: {place}"

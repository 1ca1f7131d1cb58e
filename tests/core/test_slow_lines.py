"""What is said while a compilation takes long, and before a loop is unrolled."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.core import logs


def test_the_first_line_and_later_ones_with_a_hint(monkeypatch):
    monkeypatch.setattr(logs, "SLOW_SECS", (0.001, 0.002, 0.003))
    lines, done = [], threading.Event()

    def log(text):
        lines.append(text)
        if len(lines) == 3:
            done.set()

    with logs.slow("compiling f", log, "; do this"):
        assert done.wait(60)
    first = "compiling f: 0.001 s so far"
    assert lines == [first, "compiling f: 0.002 s so far; do this", "compiling f: 0.003 s so far; do this"]


def test_nothing_is_said_of_what_is_short(monkeypatch):
    monkeypatch.setattr(logs, "SLOW_SECS", (600.0, 1200.0))
    lines = []
    with logs.slow("compiling f", lines.append):
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "jstep-slow"]
    thread.join(60)
    assert not thread.is_alive()
    assert not lines


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="unrolled on CPUs only")
def test_an_unrolled_loop_of_microbatches_is_named_once(caplog):
    def loss_fn(params, x):
        return jnp.mean(jax.lax.conv(x, params["w"], (1, 1), "SAME") ** 2)

    optimizer = jstep.sgd(0.1)
    state = jstep.TrainState.create({"w": jnp.ones((1, 1, 3, 3))}, optimizer)
    x = np.ones((4, 1, 8, 8), np.float32)
    with caplog.at_level(logging.INFO, "jstep"):
        jstep.train(jstep.minimize(loss_fn, optimizer, num_microbatches=2), state, lambda n: x, 2, progress=None)
    said = [record.message for record in caplog.records if "is unrolled" in record.message]
    assert len(said) == 1
    assert "a loop of 2 iterations with convolutions" in said[0]
    caplog.clear()
    state = jstep.TrainState.create({"w": jnp.ones((1, 1, 3, 3))}, optimizer)
    with caplog.at_level(logging.INFO, "jstep"):
        jstep.minimize(loss_fn, optimizer, num_microbatches=2, unroll=1)(state, x)
    assert "is unrolled" not in caplog.text

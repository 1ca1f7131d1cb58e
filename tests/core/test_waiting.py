"""What is shown while a compilation takes long, and what compilers write by themselves."""

import io
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from waiting import wait_until

import jstep
from jstep.core import logs as room
from jstep.core.logs import slow

OPTIMIZER = jstep.gradient_descent(0.1)


@pytest.fixture
def soon(monkeypatch):
    """Compilations count as long at once."""
    monkeypatch.setattr(room, "SLOW_SECS", (0.01,))


def piped(monkeypatch):
    """Replace standard error by a stream that is not a terminal; pytest replaces it, too, after the
    fixtures."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


@pytest.mark.usefixtures("soon")
def test_one_line(monkeypatch):
    pipe = piped(monkeypatch)
    with slow("compiling f"):
        wait_until(pipe.getvalue)
    assert pipe.getvalue() == "compiling f: 0.01 s so far\n"
    lines = []

    def fails():
        with slow("compiling f", lines.append):
            wait_until(lambda: lines)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert lines == ["compiling f: 0.01 s so far"]
    assert pipe.getvalue() == "compiling f: 0.01 s so far\n"


def step_that_compiles_until(condition):
    """A step whose trace waits for a condition."""

    def loss_fn(params, x):
        wait_until(condition)
        return jnp.sum(params["w"] * x)

    return jstep.minimize(loss_fn, OPTIMIZER)


def state():
    return jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER)


def lines_of(caplog):
    return [
        line for record in caplog.records if (line := record.getMessage()).startswith("compiling")
    ]


@pytest.fixture(params=[True, False], ids=["programs are kept", "no programs are kept"])
def is_kept(request, tmp_path):
    """Whether JAX keeps compiled programs; in other tests pytest's options decide it."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path) if request.param else None)
    yield request.param
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_run_says_that_it_compiles(steps_per_call, is_kept, caplog):
    caplog.set_level(logging.INFO)
    step = step_that_compiles_until(lambda: lines_of(caplog))
    jstep.train(
        step,
        state(),
        lambda n: np.ones(2, np.float32),
        4,
        steps_per_call=steps_per_call,
        log_steps=None,
    )
    hint = "" if is_kept else "; train(compile_cache=True) keeps the program for restarts"
    # A loop over steps is traced for its shapes first, and then compiled.
    assert {line for line in lines_of(caplog) if "so far" in line} == {
        f"compiling train_step: 0.01 s so far{hint}"
    }


@pytest.mark.usefixtures("soon")
def test_progress_false_says_nothing(caplog, monkeypatch):
    pipe = piped(monkeypatch)
    caplog.set_level(logging.INFO)
    step = step_that_compiles_until(lambda: True)
    jstep.train(step, state(), lambda n: np.ones(2, np.float32), 2, progress=False)
    assert lines_of(caplog) == []
    assert pipe.getvalue() == ""


def test_the_first_line_has_the_hint(monkeypatch):
    monkeypatch.setattr(room, "SLOW_SECS", (0.001, 0.002, 0.003))
    lines, done = [], threading.Event()

    def log(text):
        lines.append(text)
        if len(lines) == 3:
            done.set()

    with slow("compiling f", log, "; do this"):
        assert done.wait(60)
    first = "compiling f: 0.001 s so far; do this"
    assert lines == [first, "compiling f: 0.002 s so far", "compiling f: 0.003 s so far"]


def test_nothing_is_said_of_what_is_short():
    assert room.SLOW_SECS == (5, 30, 60, 120, 240)
    lines = []
    with slow("compiling f", lines.append):
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
        jstep.train(
            jstep.minimize(loss_fn, optimizer, num_microbatches=2),
            state,
            lambda n: x,
            2,
            progress=None,
        )
    said = [record.message for record in caplog.records if "is unrolled" in record.message]
    assert len(said) == 1
    assert "a loop of 2 iterations with convolutions" in said[0]
    caplog.clear()
    state = jstep.TrainState.create({"w": jnp.ones((1, 1, 3, 3))}, optimizer)
    with caplog.at_level(logging.INFO, "jstep"):
        jstep.minimize(loss_fn, optimizer, num_microbatches=2, unroll=1)(state, x)
    assert "is unrolled" not in caplog.text

"""The start of a run: restore, compilation and first batch run concurrently, and errors are raised
as usual."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from loop_runs import same
from waiting import wait_until

import jstep
from jstep.checkpoint.reading import OpenCheckpoint

OPTIMIZER = jstep.adam(0.1)
ROWS = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)


def make_step():
    return jstep.minimize(lambda params, x: jnp.mean((x @ params["w"]) ** 2), OPTIMIZER)


def make_state(mesh=None):
    state = jstep.TrainState.create({"w": jnp.ones((16, 4))}, OPTIMIZER)
    return state if mesh is None else jstep.shard_state(state, mesh)


def batches_of(kind):
    data = jstep.batches(ROWS, 8)
    return {
        "data": data,
        "function": lambda n: data[n],
        "list": [data[n] for n in range(10)],
        "iterator": None,
    }[kind]


def train(step, batches, last, directory, mesh=None, **kwargs):
    kwargs.setdefault("progress", False)
    return jstep.train(
        step, make_state(mesh), batches, last, checkpoint_dir=directory, log_steps=None, **kwargs
    )


@pytest.mark.thorough(except_for=["3-function"])
@pytest.mark.parametrize("kind", ["data", "function", "list"])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_the_checkpoint_is_read_while_the_step_is_compiled(
    kind, steps_per_call, tmp_path, compiling_threads, monkeypatch
):
    batches = batches_of(kind)
    train(make_step(), batches, 3, tmp_path)
    uninterrupted = train(make_step(), batches, 9, None, steps_per_call=steps_per_call)
    compiled_first, restore = [], OpenCheckpoint.restore

    def slow(self, *args, **kwargs):
        # A sequential start would time out here.
        wait_until(lambda: "jstep-compile" in compiling_threads)
        compiled_first.append(True)
        return restore(self, *args, **kwargs)

    monkeypatch.setattr(OpenCheckpoint, "restore", slow)
    compiling_threads.clear()
    state = train(make_step(), batches, 9, tmp_path, steps_per_call=steps_per_call)
    assert compiled_first == [True]
    assert compiling_threads.count("jstep-compile") == 1
    assert same(state, uninterrupted)


@pytest.mark.thorough(except_for=["False-1-AxisType.Explicit"])
@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("restores", [False, True])
def test_no_program_of_a_step_is_compiled_twice(
    kind, steps_per_call, restores, tmp_path, compiling_threads, caplog
):
    mesh = None if kind is None else jax.make_mesh((8,), ("data",), axis_types=(kind,))
    kwargs = {} if mesh is None else {"batch_sharding": NamedSharding(mesh, PartitionSpec("data"))}
    data = batches_of("data")
    if restores:
        train(make_step(), data, 3, tmp_path, mesh, **kwargs)
    step = make_step()
    compiling_threads.clear()
    with jax.log_compiles():
        caplog.set_level(logging.WARNING)
        train(step, data, 9, tmp_path, mesh, steps_per_call=steps_per_call, **kwargs)
    names = [
        r.getMessage()
        for r in caplog.records
        if "Finished XLA compilation of jit(train_step" in r.getMessage()
    ]
    assert len(names) == 1
    assert compiling_threads.count("jstep-compile") == 1


# The log line


class Endless:
    def __len__(self):
        raise TypeError("endless")

    def __getitem__(self, step):
        return ROWS[step : step + 8]


def test_a_restart_reads_batches_of_unknown_length(tmp_path):
    for last in (2, 4):
        state = train(make_step(), Endless(), last, tmp_path)
    assert int(state.global_step) == 4


@pytest.mark.usefixtures("no_cached_programs")
def test_one_line_reports_the_times_of_the_start(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(make_step(), batches_of("data"), 3, tmp_path)
    jstep.train(
        make_step(), make_state(), batches_of("data"), 9, checkpoint_dir=tmp_path, progress=None
    )
    (line,) = [
        m for m in (r.getMessage() for r in caplog.records) if m.startswith("first step after")
    ]
    words = line.split(": ")[1]
    assert [part.rsplit(" ", 1)[0] for part in words.split(", ")] == [
        "devices",
        "restore",
        "compile",
        "first batch",
    ]

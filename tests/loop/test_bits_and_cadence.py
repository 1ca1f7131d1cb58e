"""Where a run is cut, and when hooks are due, changes no bit of a run, for every steps_per_call."""

import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from waiting import wait_until

import jstep
from jstep.compiling.dispatch import Dispatch

RNG = np.random.default_rng(0)
CLASSES = RNG.integers(0, 10, 128).astype(np.int32)
P = jax.sharding.PartitionSpec


def new(*shape):
    return jnp.asarray(0.05 * RNG.normal(size=shape), jnp.float32)


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 10), axis=-1))


def dense(params, x, labels):
    return cross_entropy(jax.nn.relu(x @ params["a"]) @ params["b"], labels)


def convolutional(params, x, labels):
    h = jax.lax.conv_general_dilated(
        x, params["a"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return cross_entropy(jax.nn.relu(h).mean((1, 2)) @ params["b"], labels)


class Net(NamedTuple):
    loss: Any
    params: Any
    x: Any


NETS = {
    "dense": Net(
        dense, {"a": new(32, 64), "b": new(64, 10)}, RNG.normal(size=(128, 32)).astype(np.float32)
    ),
    "convolutional": Net(
        convolutional,
        {"a": new(3, 3, 1, 16), "b": new(16, 10)},
        RNG.normal(size=(128, 14, 14, 1)).astype(np.float32),
    ),
}


class Task:
    """A net, its training step, and its batches; on a mesh if there is one."""

    def __init__(self, net, mesh=None):
        self.optimizer = jstep.adam(1e-3)
        self.step = jstep.minimize(net.loss, self.optimizer)
        self.params, self.mesh = net.params, mesh
        self.data = jstep.batches((net.x, CLASSES), 16)
        self.sharding = (
            {} if mesh is None else {"batch_sharding": jax.NamedSharding(mesh, P("data"))}
        )

    def state(self):
        state = jstep.TrainState.create(jax.tree.map(jnp.copy, self.params), self.optimizer)
        return state if self.mesh is None else jstep.shard_state(state, self.mesh)

    def trained(self, last, hooks=(), **options):
        options = {
            "steps_per_call": 8,
            "log_steps": None,
            "progress": False,
            **self.sharding,
            **options,
        }
        state = jstep.train(self.step, self.state(), self.data, last, hooks=hooks, **options)
        wait_until(
            lambda: not any(thread.name == "jstep-compile" for thread in threading.enumerate())
        )
        return state


def assert_no_cut_changes_a_bit(task, directory, **options):
    whole = task.trained(24, **options)
    seen = []
    hooks = [
        jstep.every(5, lambda *given: None),
        jstep.MetricsHook(lambda step, values: seen.append(values), every_n_steps=3, mean=True),
        jstep.NanLossHook(),
    ]
    assert task.trained(24, hooks, **options) == whole
    assert len(seen) == 8
    for last in (10, 13, 24):
        resumed = task.trained(last, checkpoint_dir=directory, **options)
    assert resumed == whole
    again = {"steps_per_call": 8} | task.sharding | options
    replayed = jstep.replay(task.step, task.state(), task.data, directory, 12, **again)
    assert replayed.state == task.trained(12, **options)
    return whole


@pytest.mark.thorough
def test_one_row_is_looped_as_several_are():
    """With the only row of a loop, XLA would compile this step another way."""
    optimizer = jstep.skip_nonfinite(jstep.adam(1e-2))
    x = np.random.default_rng(0).normal(size=(32, 8, 4)).astype(np.float32)
    step = jstep.minimize(lambda params, x: jnp.mean((x @ params["w"] - 1) ** 2), optimizer)

    def trained(steps_per_call):
        state = jstep.TrainState.create({"w": jnp.ones(4)}, optimizer)
        state = jstep.train(
            step, state, lambda i: x[i], 10, steps_per_call=steps_per_call, progress=False
        )
        wait_until(
            lambda: not any(thread.name == "jstep-compile" for thread in threading.enumerate())
        )
        return state

    assert trained("auto") == trained(4) == trained(2)


@pytest.mark.thorough(except_for=["dense"])
@pytest.mark.parametrize("net", ["dense", "convolutional"])
def test_bits_do_not_depend_on_hooks_and_cuts(net, tmp_path):
    assert_no_cut_changes_a_bit(Task(NETS[net]), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("where", ["one device", "auto axes", "explicit axes"])
def test_bits_do_not_depend_on_steps_per_call(net, where, tmp_path):
    kind = {
        "auto axes": jax.sharding.AxisType.Auto,
        "explicit axes": jax.sharding.AxisType.Explicit,
    }.get(where)
    mesh = None if kind is None else jax.make_mesh((8,), ("data",), axis_types=(kind,))
    task = Task(NETS[net], mesh)
    found = [
        assert_no_cut_changes_a_bit(task, tmp_path / str(k), steps_per_call=k)
        for k in (2, 7, 8, 100)
    ]
    assert all(other == found[0] for other in found[1:])
    assert task.trained(24, steps_per_call="auto") == found[0]
    if net == "convolutional":
        assert assert_no_cut_changes_a_bit(task, tmp_path / "1", steps_per_call=1) == found[0]


def test_convolutions_on_a_cpu_run_one_step_a_call(caplog):
    caplog.set_level("INFO")
    calls = []
    hook = jstep.Hook()
    hook.before_step = lambda step, state: calls.append(step)
    task = Task(NETS["convolutional"])
    single = Task(NETS["convolutional"]).trained(6, steps_per_call=1)
    assert task.trained(6, [hook]) == single
    assert calls == [0, 1, 2, 3, 4, 5]
    (line,) = [r.getMessage() for r in caplog.records if "one step per call" in r.getMessage()]
    assert line == (
        "train_step runs one step per call: XLA runs convolutions on a CPU much slower in a loop"
    )


@pytest.fixture
def slow_calls(monkeypatch):
    """The first steps of calls for which the dispatch did more than to run the program."""
    found = []
    run_in_contexts = Dispatch._run_in_contexts

    def noted(self, state, chunk, began):
        found.append(chunk.first)
        return run_in_contexts(self, state, chunk, began)

    monkeypatch.setattr(Dispatch, "_run_in_contexts", noted)
    return found


def test_auto_steps_of_convolutions_are_not_timed(slow_calls):
    """There is nothing to choose: their calls are as quick as with K = 1."""
    Task(NETS["convolutional"]).trained(6, steps_per_call="auto")
    assert slow_calls == [0]


def test_programs_that_take_turns_are_as_quick_as_one(slow_calls):
    """Batches of two shapes, as sequences in buckets of lengths have."""
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    jstep.train(step, state, lambda n: jnp.ones(2 + n % 2), 8, progress=False)
    assert slow_calls == [0, 1]

"""Setups of starts: their contents, and that all differences of two runs are named."""

import importlib.metadata
import os
import platform
import tempfile
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.compiling.stages import as_stages
from jstep.record.differences import PAIR_WORDS, changes
from jstep.record.starts import load_setup, read_starts
from jstep.training.metrics import StepMetrics
from jstep.watching import start_setup


def loss(params, x):
    return jnp.mean((x.astype(params["w"].dtype) @ params["w"]) ** 2)


def setup_of(
    *,
    step=None,
    batch_size=8,
    loss_fn=loss,
    later=False,
    place=lambda state: state,
    is_recorded=True,
    **options,
):
    optimizer = jstep.adam(0.01)
    state = place(jstep.TrainState.create({"w": jnp.ones((4, 2))}, optimizer))
    data = jstep.batches(np.ones((64, 4), np.float32), batch_size, seed=1)
    step = jstep.minimize(loss_fn, optimizer) if step is None else step
    steps = {0: step, 2: jstep.minimize(loss_fn, optimizer)} if later else step
    with tempfile.TemporaryDirectory() as directory:
        where = directory if is_recorded else None
        jstep.train(
            steps,
            state,
            data,
            **{"last_step": 3, "progress": False} | options,
            checkpoint_dir=where,
        )
        if not is_recorded:
            return None
        start = read_starts(directory)["model"][-1]
        found = load_setup(directory, start)["setup"]
    found["arguments"]["checkpoint_dir"] = None  # a different temporary directory each time
    return found


def difference(one, other):
    return changes({"setup": one}, {"setup": other}, PAIR_WORDS).lines


@pytest.fixture(scope="module")
def base():
    return setup_of()


def test_secrets_and_other_variables_are_not_recorded(monkeypatch):
    monkeypatch.setattr(os, "environ", {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--a=1",
        "AWS_SECRET_ACCESS_KEY": "x",
        "HOME": "/root",
        "JAX_COMPILATION_CACHE_DIR": "gs://me:pass@bucket/cache",
        "JAX_MY_TOKEN": "hunter2-hunter2-hunter2",
    })  # fmt: skip
    options = types.SimpleNamespace(config=None)
    monkeypatch.setattr(start_setup.dataclasses, "fields", lambda options: ())
    found = start_setup.describe_setup(
        options,
        options,
        as_stages(lambda state: state),
        0,
        jstep.TrainState.create({}, jstep.adam()),
        [],
    )
    assert found["environment"] == {
        "JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache",
        "JAX_MY_TOKEN": "(not recorded)",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--a=1",
    }


@pytest.mark.thorough(except_for=["several steps"])
@pytest.mark.parametrize("kind", ["several steps", "split batches"])
def test_a_setup_does_not_trace_the_step_again(kind):
    options, traced = {"steps_per_call": 3}, []
    if kind == "split batches":
        mesh, spec = jax.make_mesh((8,), ("data",)), jax.sharding.PartitionSpec
        options = {"batch_sharding": jax.sharding.NamedSharding(mesh, spec("data"))}
        options["place"] = lambda state: jstep.shard_state(state, mesh, spec())

    def counting(params, x):
        traced.append(None)
        return loss(params, x)

    assert setup_of(loss_fn=counting, **options)["programs"][0]["hash"]
    load_setup = len(traced)
    setup_of(loss_fn=counting, is_recorded=False, **options)
    assert len(traced) == 2 * load_setup


def test_each_program_is_recorded_when_it_runs():
    found = setup_of(later=True, batch_size={0: 8, 4: 16}, last_step=6)
    assert [one["stage"] for one in found["programs"]] == [0, 2]
    assert found["lanes"] is None
    resumed = {**found, "programs": found["programs"][1:]}  # starts in the second stage
    assert difference(found, resumed) == []


def test_a_plain_function_is_not_traced(base):
    calls = []

    def step(state, x):
        calls.append(float(x.sum()))
        return state.replace(global_step=state.global_step + 1), {"loss": 0.0}

    found = setup_of(step=step)
    assert (found["programs"][0]["hash"], len(calls)) == (None, 3)
    assert any(
        "the stage from step 0: loss in A, step in B" in line for line in difference(base, found)
    )


def test_the_results_with_bits():
    others = start_setup._results_with_bits({"w": 1}, StepMetrics([1, 2], None), 3)
    named = start_setup._results_with_bits({"w": 1}, StepMetrics({"loss": 1, "other": 2}, None), 3)
    assert (others, named) == ([True] * 4, [True, True, False, True])


def test_versions_of_packages_that_are_not_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert start_setup._versions() == {
        "python": platform.python_version(),
        "jstep": jstep.__version__,
    }


def test_a_setup_has_the_lanes(base):
    four = setup_of(step=jstep.minimize(loss, jstep.adam(0.01), lanes=4))
    assert (four["lanes"], base["lanes"]) == (4, None)
    assert "lanes: 4 before, null now" in changes({"setup": four}, {"setup": base}).bits

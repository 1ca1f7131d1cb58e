"""`verify_resume` of steps that read something else than their arguments while they are traced."""

import itertools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from positioned import Positioned
from problems import DATA, OPTIMIZER, make_state

import jstep

COUNTER = itertools.count()
GENERATOR = np.random.default_rng(0)
READS = {
    "np.random": lambda: np.random.default_rng().normal(size=(4, 3)).astype(np.float32),
    "generator": lambda: np.float32(GENERATOR.normal()),
    "counter": lambda: np.float32(next(COUNTER)),
    "clock": lambda: np.float32(time.perf_counter_ns() % 10**6),
    "key": lambda: jax.random.normal(jax.random.key(next(COUNTER)), ()),
}


def impure_loss(read):
    def loss_fn(params, *batch):
        leaves = jax.tree.leaves((params, batch))
        total = sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves)
        first = jnp.sum(jax.tree.leaves(params)[0])
        return total + jnp.sum(jnp.asarray(read()) * 1e-3) * first  # the line

    return loss_fn


LINE = 1 + next(
    i
    for i, line in enumerate(pathlib.Path(__file__).read_text().splitlines())
    if "# the line" in line
)


def step_of(kind, loss_fn):
    if kind == "minimize":
        return jstep.minimize(loss_fn, OPTIMIZER)
    update = jstep.minimize(
        jax.jit(loss_fn) if kind == "inner jit" else loss_fn, OPTIMIZER, jit=False
    )

    def step(state, *batch):
        return update(state, *batch)

    return jax.jit(step) if kind == "jax.jit" else jstep.TrainStep(step)


@pytest.mark.thorough(
    except_for=["minimize-np.random", "inner jit-counter", "jax.jit-clock", "TrainStep-key"]
)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", ["minimize", "TrainStep", "jax.jit", "inner jit"])
def test_a_step_that_is_another_program_in_each_process_is_reported(kind, read):
    report = jstep.verify_resume(make_state, step_of(kind, impure_loss(READS[read])), DATA, 2, 4)
    assert not report
    assert (report.first_difference, report.differing) == (None, ())
    assert "is another program each time that it is traced" in report.cause
    if read != "key":
        assert f"test_impure_steps.py:{LINE} (loss_fn)" in report.cause
    assert str(report) == f"resuming in a new process changes the run: {report.cause}"


@pytest.mark.parametrize("kind", ["minimize", "TrainStep", "jax.jit", "inner jit"])
def test_a_pure_step_is_not(kind):
    key = jax.random.key(0)

    def loss_fn(params, *batch):
        noise = jax.pure_callback(lambda: np.float32(1.0), jax.ShapeDtypeStruct((), jnp.float32))
        loss = impure_loss(lambda: jax.random.normal(key, ()))(params, *batch)
        return loss + jax.lax.stop_gradient(noise)

    for batches in (DATA, Positioned(DATA.__getitem__, int)):
        assert jstep.verify_resume(make_state, step_of(kind, loss_fn), batches, 2, 4)


def test_a_later_stage_is_traced_too():
    pure = jstep.minimize(impure_loss(lambda: 1.0), OPTIMIZER)
    impure = jstep.minimize(impure_loss(READS["counter"]), OPTIMIZER)
    assert "step" in jstep.verify_resume(make_state, {0: pure, 3: impure}, DATA, 2, 4).cause
    assert jstep.verify_resume(make_state, {0: pure, 4: impure}, DATA, 2, 4)  # it is not reached

"""Batches whose leading axis is not their examples, and batches of ever new shapes."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

OPTIMIZER = jstep.sgd(0.1)


def loss_fn(params, x, *others):
    return jnp.mean(jnp.square(jnp.sum(x) - params["w"]))


def train(step, batches, hooks, last_step=8, **options):
    state = jstep.TrainState.create({"w": jnp.ones(3)}, OPTIMIZER)
    options = {"progress": False} | options
    return jstep.train(step, state, batches, last_step, hooks=hooks, **options)


def rows_of(shape, **options):
    """Return the examples of a step, by the rates of a run."""
    counter = jstep.StepCounterHook(every_n_steps=4, **options)
    batches = [np.zeros(shape, np.float32)] * 8
    train(
        jstep.minimize(loss_fn, OPTIMIZER), batches, [counter], steps_per_call=options.pop("k", 1)
    )
    if counter.examples_per_sec is None:
        return None
    return round(counter.examples_per_sec / counter.steps_per_sec)


@pytest.mark.parametrize(
    ("examples", "expected"),
    [
        (None, 4),
        (192, 192),
        (lambda x: x.shape[0] * x.shape[1] * x.shape[2], 4 * 6 * 8),
        (lambda x: 0, None),
    ],
)
def test_the_examples_of_a_batch_may_be_given(examples, expected):
    assert rows_of((4, 6, 8), examples=examples) == expected


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_they_are_those_of_a_step_and_of_each_shape(steps_per_call, tmp_path):
    seen = []

    def count(x, y):
        seen.append((x.shape, y.shape))
        return x.shape[0] * x.shape[1]

    batches = [
        (np.zeros((2, 3 if n < 4 else 5), np.float32), np.zeros(7, np.float32)) for n in range(8)
    ]
    train(
        jstep.minimize(loss_fn, OPTIMIZER), batches,
        [jstep.StepCounterHook(every_n_steps=4, examples=count)], steps_per_call=steps_per_call,
        checkpoint_dir=tmp_path,
    )  # fmt: skip
    assert set(seen) == {((2, 3), (7,)), ((2, 5), (7,))}
    assert jstep.runs(tmp_path)[0].examples == 4 * 6 + 4 * 10


@pytest.mark.parametrize("examples", [0, -1, 2.5, True, "4"])
def test_wrong_numbers_of_examples_are_refused(examples):
    with pytest.raises((TypeError, ValueError), match="examples="):
        jstep.StepCounterHook(examples=examples)


def test_a_result_that_is_no_number_of_examples_is_refused():
    with pytest.raises((TypeError, ValueError), match="examples: its result"):
        rows_of((4, 6), examples=lambda x: x.shape)


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("kind", ["minimize", "jax.jit"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_one_warning_after_five_programs(kind, steps_per_call, caplog):
    step = jstep.minimize(loss_fn, OPTIMIZER)
    if kind == "jax.jit":
        update = jstep.minimize(loss_fn, OPTIMIZER, jit=False)
        step = jax.jit(lambda state, x: update(state, x))

    def run(number_of_shapes):
        caplog.clear()
        batches = iter([np.zeros(1 + n % number_of_shapes, np.float32) for n in range(24)])
        with caplog.at_level(logging.WARNING, logger="jstep"):
            train(step, batches, [], 24, steps_per_call=steps_per_call)
        return [
            record.getMessage()
            for record in caplog.records
            if "batch-shapes" in record.getMessage()
        ]

    assert run(4) == []
    jax.clear_caches()
    (line,) = run(12)
    assert "was compiled 5 times, for batches of as many shapes" in line

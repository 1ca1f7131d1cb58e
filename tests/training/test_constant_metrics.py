"""Constant metrics: values that the step does not compute belong to the traced program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regression import X, Y, fresh, loss_fn

import jstep
from jstep.hooks.metric_sums import Accumulate
from jstep.training.looped import loop_step
from jstep.training.metrics import split_metrics
from jstep.training.step import call_step


def by_shape(state: Any, x: jax.Array) -> Any:
    """A step whose constant metric depends on the shape of the batch."""
    return state, {"rows": np.float32(x.shape[0]), "mean": jnp.mean(x)}


def constants_of(step: Any, *args: Any) -> set[str]:
    """The names of the constant metrics of a call of a step."""
    return set(call_step(step, args[0], args[1:])[1].constants.values)


def test_constants_belong_to_the_program_that_ran() -> None:
    step = jstep.TrainStep(by_shape, donate=False)
    state = fresh(jstep.gradient_descent(0.1))
    seen = [float(step(state, jnp.ones(n))[1]["rows"]) for n in (2, 3, 2, 3)]
    assert seen == [2, 3, 2, 3]
    assert constants_of(step, state, jnp.ones(2)) == {"rows"}
    assert float(jstep.scan_steps(step)(state, jnp.ones((4, 5)))[1]["rows"][3]) == 5


def test_custom_hyperparameter_numbers_are_constants() -> None:
    base = jstep.gradient_descent(0.5)
    custom = base._replace(hyperparameters=lambda step: {"a": 0.25, "b": np.float32(3), "c": 7, "d": True})
    step = jstep.minimize(loss_fn, custom)
    state, metrics = step(fresh(custom), X, Y)
    assert constants_of(step, fresh(custom), X, Y) == {"a", "b", "c", "d"}
    assert {name: metrics[name].item() for name in "abcd"} == {"a": 0.25, "b": 3.0, "c": 7, "d": True}
    assert all(isinstance(metrics[name], np.generic) for name in "abcd")
    traced = step.trace(state, X, Y)
    assert jax.tree.structure(traced.out_info[1]) == jax.tree.structure(metrics)


def test_numbers_that_32_bits_hold_are_constants() -> None:
    values = {
        "low": -(2**31),
        "high": 2**31 - 1,
        "flag": True,
        "half": 0.5,
        "array": np.int64(3),
        "off": np.bool_(False),
    }
    others = {"below": -(2**31) - 1, "above": 2**31, "vector": np.ones(2), "text": np.str_("x"), "jax": jnp.float32(1)}
    computed, constants = split_metrics(values | others)
    assert list(computed) == list(others)
    kinds = {"i": "int32", "f": "float32", "b": "bool"}
    assert {name: (one, str(one.dtype)) for name, one in constants.values.items()} == {
        name: (value, kinds[np.asarray(value).dtype.kind]) for name, value in values.items()
    }


# Steps in the loop of a call.


def test_decorated_step_is_another_step() -> None:
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(loss_fn, optimizer)
    accumulate = Accumulate()
    first = loop_step(step, 2, accumulate)

    @functools.wraps(step)
    def frozen(state: Any, *args: Any) -> Any:
        new, metrics = step(state, *args)
        return new.replace(params=state.params), metrics

    assert loop_step(frozen, 2, accumulate) is loop_step(frozen, 2, Accumulate()) is not first
    assert loop_step(step, 2, accumulate) is first is not loop_step(step, 3, accumulate)
    batches = [(X, Y)] * 4
    trained = jstep.train(frozen, fresh(optimizer), batches, 4, steps_per_call=2, progress=False)
    np.testing.assert_array_equal(trained.params["w"], 1.0)


# Returned metrics do not share memory with the step.


@pytest.mark.parametrize(
    "optimizer", [jstep.adam(0.1), jstep.skip_nonfinite(jstep.adam(0.1))], ids=["plain", "guarded"]
)
def test_metrics_may_be_donated_and_deleted(optimizer: jstep.Optimizer) -> None:
    step = jstep.minimize(loss_fn, optimizer)
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
    state, total = step(fresh(optimizer), X, Y)
    state, metrics = step(state, X, Y)
    total = add(add(total, metrics), metrics)
    np.testing.assert_allclose(total["beta1"], 2.7, rtol=1e-6)
    for value in metrics.values():
        if isinstance(value, jax.Array):
            value.delete()
    metrics.clear()
    state, metrics = step(state, X, Y)
    assert float(metrics["beta1"]) == pytest.approx(0.9)
    with pytest.raises((TypeError, ValueError)):
        metrics["beta1"][...] = 0

"""Errors for invalid losses and their arguments, var_list, microbatches, metrics and scans."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from bad_input import PARAMS, Case, adam, check, compute, create, linear, step

import jstep


def scanned(**kwargs: Any) -> Any:
    step = jstep.minimize(lambda p: linear(p, jnp.ones((1, 2))), adam)
    return jstep.scan_steps(step, **kwargs)(create(PARAMS, adam))


CASES: dict[str, Case] = {
    # Loss and its arguments.
    "loss a vector": (lambda: compute(lambda p, x: x @ p["dense"]["kernel"]), ValueError, ("loss", "(6, 3)", "scalar")),
    "loss an integer": (lambda: compute(lambda p, x: jnp.int32(1)), TypeError, ("loss", "int32")),
    "loss None": (lambda: compute(lambda p, x: None), TypeError, ("loss", "NoneType")),
    "loss a tuple": (lambda: compute(lambda p, x: (linear(p, x), 1)), TypeError, ("has_aux=True",)),
    "loss without its aux": (lambda: compute(linear, has_aux=True), TypeError, ("has_aux", "(loss, aux)")),
    "loss a complex": (
        lambda: compute(lambda p, x: jax.lax.complex(linear(p, x), 0.0)),
        TypeError,
        ("loss", "complex64"),
    ),
    "loss of a step a vector": (lambda: step(lambda p, x: p["dense"]["bias"]), ValueError, ("loss", "(3,)")),
    "loss of a step an integer": (lambda: step(lambda p, x: 1), TypeError, ("loss", "int32")),
    "loss_fn not a function": (lambda: jstep.minimize(3.0, adam), TypeError, ("loss_fn", "3.0")),
    "loss_fn and optimizer swapped": (lambda: jstep.minimize(adam, linear), TypeError, ("optimizer",)),
    # var_list.
    "params with a function": (
        lambda: jstep.compute_gradients(lambda p: p["w"])({"w": 1.0, "act": jnp.tanh}),
        TypeError,
        ("params", "'act'"),
    ),
    "var_list with a typo": (
        lambda: compute(var_list=["dense/kernal"]),
        ValueError,
        ("var_list", "'dense/kernal'", "'dense/kernel'"),
    ),
    "var_list glob of nothing": (lambda: compute(var_list=["decoder/*"]), ValueError, ("'decoder/*'", "dense/")),
    "var_list second entry": (lambda: compute(var_list=["dense/*", "bias"]), ValueError, ("'bias'", "dense/bias")),
    "var_list a subtree's name": (lambda: compute(var_list=["dense"]), ValueError, ("'dense'", "'dense/*'")),
    "var_list only integers": (lambda: compute(var_list=["n"]), ValueError, ("'n'", "int32")),
    "var_list empty": (lambda: compute(var_list=[]), ValueError, ("var_list",)),
    "var_list nothing chosen": (lambda: compute(var_list=lambda path, leaf: False), ValueError, ("var_list",)),
    "var_list predicate of None": (lambda: compute(var_list=lambda path, leaf: None), TypeError, ("var_list", "bool")),
    "var_list a number": (lambda: compute(var_list=3), TypeError, ("var_list", "3")),
    "var_list a tree of another structure": (
        lambda: compute(var_list={"dense": {"kernel": True}, "n": False}),
        ValueError,
        ("var_list", "dense/bias"),
    ),
    "var_list a tree of strings": (
        lambda: compute(var_list={"dense": {"kernel": "yes", "bias": "no"}, "n": "no"}),
        TypeError,
        ("var_list", "bool", "'dense/"),
    ),
    "var_list of a step": (lambda: step(var_list=["dense/kernal"]), ValueError, ("'dense/kernel'",)),
    # Microbatches and gates.
    "microbatches do not divide": (lambda: compute(num_microbatches=4), ValueError, ("num_microbatches=4", "6")),
    "microbatches zero": (lambda: compute(num_microbatches=0), ValueError, ("num_microbatches=0",)),
    "microbatches negative": (lambda: jstep.minimize(linear, adam, num_microbatches=-2), ValueError, ("-2",)),
    "microbatches float": (lambda: compute(num_microbatches=2.0), TypeError, ("num_microbatches", "2.0")),
    "microbatches of a scalar": (lambda: compute(x=jnp.float32(1), num_microbatches=2), ValueError, ("scalar",)),
    "microbatches of an empty batch": (
        lambda: compute(x=jnp.ones((0, 2)), num_microbatches=2),
        ValueError,
        ("num_microbatches=2", "0 rows"),
    ),
    "microbatches of unequal args": (
        lambda: jstep.compute_gradients(lambda p, x, y: linear(p, x), num_microbatches=2)(
            PARAMS, jnp.ones((6, 2)), jnp.ones(4)
        ),
        ValueError,
        ("6", "4"),
    ),
    "microbatches without a batch": (
        lambda: jstep.compute_gradients(lambda p: linear(p, jnp.ones((1, 2))), num_microbatches=2)(PARAMS),
        ValueError,
        ("num_microbatches=2", "batch"),
    ),
    "weight_fn not a function": (lambda: compute(weight_fn=1.0), TypeError, ("weight_fn", "1.0")),
    "weight_fn of vectors": (
        lambda: compute(num_microbatches=2, weight_fn=lambda x: x[:, 0]),
        ValueError,
        ("weight_fn", "(3,)"),
    ),
    "gate unknown": (lambda: compute(gate_gradients=7), ValueError, ("gate_gradients", "7", "GATE_OP")),
    "aggregation unknown": (
        lambda: compute(aggregation_method="add_n"),
        TypeError,
        ("aggregation_method", "'add_n'", "AggregationMethod"),
    ),
    # Metrics and model state.
    "metrics unknown": (lambda: step(metrics=("gradnorm",)), ValueError, ("metrics", "'gradnorm'", "grad_norm")),
    "metrics a number": (lambda: step(metrics=3), TypeError, ("metrics", "3")),
    "rng a number": (lambda: step(rng=3), TypeError, ("rng", "jax.random.key")),
    "aux with a string": (
        lambda: step(lambda p, x: (linear(p, x), {"name": "x"}), has_aux=True),
        TypeError,
        ("aux", "name", "'x'"),
    ),
    "aux collides": (
        lambda: step(lambda p, x: (linear(p, x), {"learning_rate": 1.0}), has_aux=True),
        ValueError,
        ("metrics", "'learning_rate'", "aux"),
    ),
    "aux named loss": (
        lambda: step(lambda p, x: (linear(p, x), {"loss": 1.0}), has_aux=True),
        ValueError,
        ("'loss'", "aux"),
    ),
    "model_state missing in the state": (
        lambda: step(lambda p, m, x: (linear(p, x), m), has_model_state=True),
        ValueError,
        ("has_model_state", "model_state="),
    ),
    "model_state of another structure": (
        lambda: step(
            lambda p, m, x: (linear(p, x), {"mean": m["mean"]}),
            state=create(PARAMS, adam, model_state={"mean": 0.0, "var": 1.0}),
            has_model_state=True,
        ),
        ValueError,
        ("model_state", "structure"),
    ),
    "model_state of another shape": (
        lambda: step(
            lambda p, m, x: (linear(p, x), {"mean": jnp.ones(2)}),
            state=create(PARAMS, adam, model_state={"mean": 0.0}),
            has_model_state=True,
        ),
        ValueError,
        ("model_state", "'mean'", "(2,)", "()"),
    ),
    "model_state not returned": (
        lambda: step(
            lambda p, m, x: linear(p, x), state=create(PARAMS, adam, model_state={"a": 0.0}), has_model_state=True
        ),
        TypeError,
        ("model_state", "(loss, model_state)"),
    ),
    # scan_steps.
    "scan of a number": (lambda: jstep.scan_steps(3), TypeError, ("train_step", "3")),
    "scan length negative": (lambda: scanned(length=-1), ValueError, ("length", "-1")),
    "scan length float": (lambda: scanned(length=1.5), TypeError, ("length", "1.5")),
    "scan of scalars": (
        lambda: jstep.scan_steps(jstep.minimize(linear, adam))(create(PARAMS, adam), jnp.float32(1)),
        ValueError,
        ("scan_steps", "scalar", "leading axis"),
    ),
    "scan of unequal args": (
        lambda: jstep.scan_steps(jstep.minimize(lambda p, x, y: linear(p, x), adam))(
            create(PARAMS, adam), jnp.ones((3, 6, 2)), jnp.ones((4, 1))
        ),
        ValueError,
        ("3", "4"),
    ),
    "scan without args": (scanned, ValueError, ("length",)),
}


@pytest.mark.parametrize("name", CASES)
def test_invalid_arguments_raise(name: str) -> None:
    check(CASES[name])


def test_an_error_leaves_the_state_usable() -> None:
    """The error is raised before compiling, so nothing is donated."""
    state = create(PARAMS, adam)
    good, bad = jstep.minimize(linear, adam), jstep.minimize(linear, adam, var_list=["nothing"])
    for wrong in (lambda: bad(state, jnp.ones((6, 2))), lambda: good(state, jnp.ones((6, 5)))):
        with pytest.raises((ValueError, TypeError)):
            wrong()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    state, _ = good(state, jnp.ones((6, 2)))
    assert jstep.global_step(state) == 1


def test_arguments_are_checked_before_the_first_call() -> None:
    for early in (
        lambda: jstep.minimize(linear, adam, metrics=("norm",)),
        lambda: jstep.minimize(linear, adam, gate_gradients=9),
        lambda: jstep.minimize(linear, adam, num_microbatches=0),
        lambda: jstep.minimize(linear, adam, aggregation_method=None),
        lambda: jstep.compute_gradients(linear, weight_fn=3),
    ):
        with pytest.raises((ValueError, TypeError)):
            early()

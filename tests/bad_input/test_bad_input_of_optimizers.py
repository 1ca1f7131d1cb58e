"""Errors for invalid steps, params, hyperparameters, gradients and compositions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_input import GRADS, PARAMS, Case, adam, apply, changed, check, create, linear, step

import jstep

CASES: dict[str, Case] = {
    # The step.
    "global_step negative": (lambda: jstep.create_global_step(-1), ValueError, ("global_step", "-1")),
    "global_step float": (lambda: jstep.create_global_step(1.0), TypeError, ("global_step", "1.0", "integer")),
    "global_step float array": (lambda: jstep.create_global_step(jnp.float32(1)), TypeError, ("global_step",)),
    "global_step bool": (lambda: jstep.create_global_step(True), TypeError, ("global_step", "True")),
    "global_step str": (lambda: jstep.create_global_step("3"), TypeError, ("global_step", "'3'", "str")),
    "global_step None": (lambda: jstep.create_global_step(None), TypeError, ("global_step", "None")),
    "global_step vector": (lambda: jstep.create_global_step(np.arange(3)), ValueError, ("global_step", "(3,)")),
    "global_step too large": (
        lambda: jstep.create_global_step(2**31),
        ValueError,
        ("global_step", "2147483648", "int32", "jax_enable_x64"),
    ),
    "global_step traced float": (lambda: jax.jit(jstep.create_global_step)(1.0), TypeError, ("global_step",)),
    "create with a negative step": (lambda: create(PARAMS, adam, -3), ValueError, ("global_step", "-3")),
    "create with a float step": (lambda: create(PARAMS, adam, 1.5), TypeError, ("global_step", "1.5")),
    "increment negative": (lambda: jstep.increment_global_step(create(PARAMS, adam), -2), ValueError, ("amount", "-2")),
    "increment float": (lambda: jstep.increment_global_step(create(PARAMS, adam), 0.5), TypeError, ("amount", "0.5")),
    "global_step of a state without": (
        lambda: jstep.global_step(create(PARAMS, adam).replace(global_step=None)),
        ValueError,
        ("no global step", "create_global_step"),
    ),
    # Params.
    "params with a function": (
        lambda: create({"layers": [{"act": jnp.tanh}]}, adam),
        TypeError,
        ("params", "'layers/0/act'", "partition"),
    ),
    "params with a string": (lambda: create({"name": "dense"}, adam), TypeError, ("params", "'name'", "'dense'")),
    "params with an object array": (lambda: create({"a": np.array([None, 1])}, adam), TypeError, ("params", "'a'")),
    "params complex": (lambda: create({"a": {"b": jnp.ones(2, complex)}}, adam), TypeError, ("'a/b'", "complex")),
    "model_state with a string": (
        lambda: create(PARAMS, adam, model_state={"mode": "train"}),
        TypeError,
        ("'mode'", "'train'"),
    ),
    # Hyperparameters.
    "learning_rate negative": (lambda: jstep.gradient_descent(-0.1), ValueError, ("learning_rate", "-0.1")),
    "learning_rate str": (lambda: jstep.adam("0.1"), TypeError, ("learning_rate", "'0.1'", "str")),
    "learning_rate None": (lambda: jstep.adam(None), TypeError, ("learning_rate", "None")),
    "learning_rate list": (lambda: jstep.adam([0.1, 0.2]), TypeError, ("learning_rate", "[0.1, 0.2]")),
    "learning_rate vector": (lambda: jstep.adam(jnp.ones(2)), ValueError, ("learning_rate", "(2,)", "vmap")),
    "learning_rate nan": (lambda: jstep.adam(float("nan")), ValueError, ("learning_rate", "nan")),
    "learning_rate inf": (lambda: jstep.momentum(np.inf, 0.9), ValueError, ("learning_rate", "inf")),
    "learning_rate negative array": (lambda: jstep.adagrad(jnp.float32(-1)), ValueError, ("learning_rate", "-1")),
    "learning_rate bool": (lambda: jstep.rmsprop(True), TypeError, ("learning_rate", "True")),
    "learning_rate complex": (lambda: jstep.adam(1j), TypeError, ("learning_rate", "1j")),
    "momentum too large": (lambda: jstep.momentum(0.1, 1.5), ValueError, ("momentum", "1.5")),
    "momentum negative": (lambda: jstep.momentum(0.1, -0.5), ValueError, ("momentum", "-0.5")),
    "adagrad accumulator zero": (
        lambda: jstep.adagrad(0.1, 0.0),
        ValueError,
        ("initial_accumulator_value", "0", "> 0"),
    ),
    "adagrad accumulator negative": (lambda: jstep.adagrad(0.1, -1), ValueError, ("initial_accumulator_value", "-1")),
    "beta1 one": (lambda: jstep.adam(0.1, beta1=1.0), ValueError, ("beta1", "1.0", "< 1")),
    "beta1 negative": (lambda: jstep.adam(0.1, beta1=-0.1), ValueError, ("beta1", "-0.1")),
    "beta2 too large": (lambda: jstep.adam(0.1, beta2=1.5), ValueError, ("beta2", "1.5")),
    "adam epsilon": (lambda: jstep.adam(0.1, epsilon=-1e-8), ValueError, ("epsilon", "-1e-08")),
    "rmsprop decay": (lambda: jstep.rmsprop(0.1, decay=1.1), ValueError, ("decay", "1.1")),
    "rmsprop momentum": (lambda: jstep.rmsprop(0.1, momentum=-1), ValueError, ("momentum", "-1")),
    "rmsprop epsilon": (lambda: jstep.rmsprop(0.1, epsilon=-1), ValueError, ("epsilon", "-1")),
    "ftrl power": (lambda: jstep.ftrl(0.1, 0.5), ValueError, ("learning_rate_power", "0.5", "≤ 0")),
    "ftrl accumulator": (
        lambda: jstep.ftrl(0.1, initial_accumulator_value=-0.1),
        ValueError,
        ("initial_accumulator_value", "-0.1"),
    ),
    "ftrl rate zero": (lambda: jstep.ftrl(0.0), ValueError, ("learning_rate", "0")),
    "ftrl l1": (lambda: jstep.ftrl(0.1, l1_regularization_strength=-1), ValueError, ("l1_regularization", "-1")),
    "ftrl l2": (lambda: jstep.ftrl(0.1, l2_regularization_strength=-1), ValueError, ("l2_regularization", "-1")),
    "ftrl shrinkage": (
        lambda: jstep.ftrl(0.1, l2_shrinkage_regularization_strength=-1),
        ValueError,
        ("l2_shrinkage_regularization_strength", "-1"),
    ),
    "ftrl beta": (lambda: jstep.ftrl(0.1, beta=-1), ValueError, ("beta", "-1")),
    "schedule of strings": (lambda: apply(GRADS, jstep.adam(lambda n: "x")), TypeError, ("learning_rate", "'x'")),
    "schedule of None": (lambda: apply(GRADS, jstep.adam(lambda n: None)), TypeError, ("learning_rate", "None")),
    "schedule of vectors": (
        lambda: apply(GRADS, jstep.gradient_descent(lambda n: jnp.ones(2))),
        ValueError,
        ("learning_rate", "(2,)"),
    ),
    # Gradients.
    "all gradients None": (
        lambda: apply({"dense": {"kernel": None, "bias": None}, "n": None}),
        ValueError,
        ("No gradients provided for any variable", "dense/kernel"),
    ),
    "gradient missing": (
        lambda: apply({"dense": {"kernel": jnp.ones((2, 3))}, "n": None}),
        ValueError,
        ("'dense/bias'", "missing"),
    ),
    "gradient extra": (lambda: apply(changed(scale=jnp.ones(3))), ValueError, ("'dense/scale'", "extra")),
    "gradient of another shape": (
        lambda: apply(changed(kernel=jnp.ones((3, 2)))),
        ValueError,
        ("'dense/kernel'", "(3, 2)", "(2, 3)"),
    ),
    "gradient broadcastable": (
        lambda: apply(changed(kernel=jnp.ones(3))),
        ValueError,
        ("'dense/kernel'", "(3,)", "(2, 3)"),
    ),
    "gradient scalar": (lambda: apply(changed(kernel=1.0)), ValueError, ("'dense/kernel'", "()", "(2, 3)")),
    "gradient integer": (
        lambda: apply(changed(bias=jnp.ones(3, jnp.int32))),
        TypeError,
        ("'dense/bias'", "int32", "floating"),
    ),
    "gradient of an integer leaf": (lambda: apply({**GRADS, "n": jnp.ones(2)}), TypeError, ("'n'", "int32", "None")),
    "gradient a string": (lambda: apply(changed(bias="zero")), TypeError, ("'dense/bias'", "str")),
    "gradient a subtree": (lambda: apply(changed(bias={"a": jnp.ones(3)})), ValueError, ("dense/bias",)),
    "gradient a list for a dict": (lambda: apply([jnp.ones(3)]), ValueError, ("gradients", "structure")),
    "gradients None": (lambda: apply(None), ValueError, ("gradients", "structure")),
    # Optimizer and state.
    "another optimizer": (
        lambda: apply(GRADS, jstep.momentum(0.1, 0.9), adam),
        ValueError,
        ("'momentum'", "['m', 'start_step', 'v']", "TrainState.create"),
    ),
    "an optimizer without slots": (
        lambda: apply(GRADS, jstep.gradient_descent(0.1), adam),
        ValueError,
        ("['m', 'start_step', 'v']", "TrainState.create"),
    ),
    "an optimizer with more slots": (
        lambda: apply(GRADS, jstep.rmsprop(0.1, centered=True), jstep.rmsprop(0.1)),
        ValueError,
        ("'mg'", "TrainState.create"),
    ),
    "gradients per example": (
        lambda: apply(jax.tree.map(lambda g: jnp.stack([g] * 8), GRADS), jstep.gradient_descent(0.1)),
        ValueError,
        ("(8,", "take the mean of gradients per example over axis 0"),
    ),
    "a loss with its gradients": (
        lambda: apply((jnp.float32(0), GRADS), jstep.gradient_descent(0.1)),
        ValueError,
        ("element 1 of this tuple has it: unpack the tuple",),
    ),
    "no gradients": (
        lambda: apply(None, jstep.gradient_descent(0.1)),
        ValueError,
        ("the structure of params; got None; missing", "None for a leaf to leave out"),
    ),
    "an optimizer with an average": (
        lambda: apply(GRADS, jstep.with_moving_average(adam, jstep.ExponentialMovingAverage(0.9)), adam),
        ValueError,
        ("'ExponentialMovingAverage'",),
    ),
    "slots of other params": (
        lambda: jstep.apply_gradients(
            create({"w": jnp.ones(3)}, adam).replace(params={"w": jnp.ones(4)}), {"w": jnp.ones(4)}, adam
        ),
        ValueError,
        ("slot 'm'", "'w'", "(3,)", "(4,)"),
    ),
    "slots of a smaller model": (
        lambda: jstep.apply_gradients(
            create({"w": 1.0}, adam).replace(params={"w": jnp.float32(1), "b": jnp.float32(1)}),
            {"w": jnp.float32(1), "b": None},
            adam,
        ),
        ValueError,
        ("slot 'm'", "'b'"),
    ),
    "apply without an optimizer": (lambda: apply(GRADS, jstep.adam, adam), TypeError, ("optimizer", "adam(...)")),
    "minimize without an optimizer": (lambda: jstep.minimize(linear, 0.1), TypeError, ("optimizer", "0.1", "float")),
    "minimize with the constructor": (lambda: jstep.minimize(linear, jstep.adam), TypeError, ("adam(...)",)),
    "apply without a state": (
        lambda: jstep.apply_gradients({"w": 1.0}, {"w": 1.0}, adam),
        TypeError,
        ("state", "TrainState", "dict"),
    ),
    "step without a state": (lambda: step(state=PARAMS), TypeError, ("state", "TrainState", "dict")),
    "step without a global step": (
        lambda: step(state=create(PARAMS, adam).replace(global_step=None)),
        ValueError,
        ("global step", "create_global_step"),
    ),
    "create with the constructor": (lambda: create({"w": 1.0}, jstep.adam), TypeError, ("optimizer", "adam(...)")),
    "create without optimizer": (lambda: create({"w": 1.0}, None), TypeError, ("optimizer", "None")),
    # Composition.
    "chain of nothing": (lambda: jstep.chain(), ValueError, ("chain",)),
    "chain of a number": (lambda: jstep.chain(adam, 0.1), TypeError, ("optimizers[1]", "0.1")),
    "chain of two adams": (lambda: jstep.chain(adam, adam), ValueError, ("named", "jstep.scope(")),
    "chain of two rates": (
        lambda: jstep.chain(jstep.gradient_descent(0.1), jstep.gradient_descent(0.2)),
        ValueError,
        ("'learning_rate'", "jstep.scope("),
    ),
    "chain of colliding slots": (
        lambda: create(PARAMS, jstep.chain(*(jstep.Optimizer(o.init, o.update, lambda n: {}) for o in (adam, adam)))),
        ValueError,
        ("'m'", "jstep.scope("),
    ),
    "scope without a name": (lambda: jstep.scope("", adam), ValueError, ("name", "''")),
    "scope with a slash": (lambda: jstep.scope("a/", adam), ValueError, ("name", "'a/'")),
    "scope with swapped arguments": (lambda: jstep.scope(adam, "fast"), TypeError, ("must be",)),
    "partition of nothing": (lambda: jstep.partition({}, lambda path, leaf: "a"), ValueError, ("optimizers",)),
    "partition of a list": (lambda: jstep.partition([adam], lambda path, leaf: "a"), TypeError, ("optimizers", "list")),
    "partition with a number for a label": (
        lambda: jstep.partition({3: adam}, lambda path, leaf: 3),
        (TypeError, ValueError),
        ("optimizers", "3"),
    ),
    "partition with an unknown label": (
        lambda: create(PARAMS, jstep.partition({"rest": adam}, lambda path, leaf: "rset")),
        ValueError,
        ("'rset'", "dense/", "'rest'"),
    ),
    "partition with labels of a dict": (
        lambda: jstep.partition({"a": adam}, {"w": "a"}),
        TypeError,
        ("labels", "(path, leaf)"),
    ),
    "partition with a constructor": (
        lambda: jstep.partition({"a": jstep.adam}, lambda path, leaf: "a"),
        TypeError,
        ("'a'", "adam(...)"),
    ),
    "clip_gradients with nothing": (lambda: jstep.clip_gradients(), ValueError, ("by_value", "by_global_norm")),
    "clip_gradients with two": (
        lambda: jstep.clip_gradients(by_norm=1.0, by_value=1.0),
        ValueError,
        ("exactly one", "by_norm", "by_value"),
    ),
    "clip_gradients zero": (lambda: jstep.clip_gradients(by_global_norm=0.0), ValueError, ("by_global_norm", "0")),
    "clip_gradients negative": (lambda: jstep.clip_gradients(by_value=-1.0), ValueError, ("by_value", "-1")),
    "clip_gradients reversed": (lambda: jstep.clip_gradients(by_value=(1.0, -1.0)), ValueError, ("by_value", "min")),
    "clip_gradients of three": (
        lambda: jstep.clip_gradients(by_value=(1, 2, 3)),
        ValueError,
        ("by_value", "(1, 2, 3)"),
    ),
    "skip_nonfinite of a number": (lambda: jstep.skip_nonfinite(3), TypeError, ("optimizer", "3")),
}


@pytest.mark.parametrize("name", CASES)
def test_invalid_arguments_raise(name: str) -> None:
    check(CASES[name])

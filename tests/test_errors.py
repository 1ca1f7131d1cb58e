"""Everything wrong that can be passed in, and what the message must say: argument, value, path, way out."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}, "n": jnp.arange(2)}
GRADS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}, "n": None}
create = jstep.TrainState.create
adam = jstep.adam()


def linear(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(x @ params["dense"]["kernel"] + params["dense"]["bias"][None])


def apply(grads: Any, optimizer: jstep.Optimizer = adam, state_optimizer: jstep.Optimizer | None = None) -> Any:
    return jstep.apply_gradients(create(PARAMS, state_optimizer or optimizer), grads, optimizer)


def changed(**changes: Any) -> Any:
    return {**GRADS, "dense": {**GRADS["dense"], **changes}}


def compute(loss_fn: Any = linear, x: Any = None, **kwargs: Any) -> Any:
    return jstep.compute_gradients(loss_fn, **kwargs)(PARAMS, jnp.ones((6, 2)) if x is None else x)


def step(loss_fn: Any = linear, optimizer: Any = adam, state: Any = None, args: Any = None, **kwargs: Any) -> Any:
    state = create(PARAMS, adam) if state is None else state
    return jstep.minimize(loss_fn, optimizer, **kwargs)(state, *((jnp.ones((6, 2)),) if args is None else args))


def rows(values: Any = (2, 1), indices: Any = (0, 1), shape: Any = (4, 1)) -> jstep.IndexedSlices:
    return jstep.IndexedSlices(jnp.ones(values), jnp.asarray(indices), shape)


def sparse(slices: jstep.IndexedSlices) -> Any:
    optimizer = jstep.gradient_descent(1.0)
    return jstep.apply_gradients(create({"table": jnp.zeros((4, 1))}, optimizer), {"table": slices}, optimizer)


Case = tuple[Callable[[], Any], type[Exception], tuple[str, ...]]
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
    "increment negative": (
        lambda: jstep.increment_global_step(create(PARAMS, adam), -2),
        ValueError,
        ("amount", "-2"),
    ),
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
    "params with an object array": (
        lambda: create({"a": np.array([None, 1])}, adam),
        TypeError,
        ("params", "'a'"),
    ),
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
    "learning_rate negative array": (
        lambda: jstep.adagrad(jnp.float32(-1)),
        ValueError,
        ("learning_rate", "-1"),
    ),
    "learning_rate bool": (lambda: jstep.rmsprop(True), TypeError, ("learning_rate", "True")),
    "learning_rate complex": (lambda: jstep.adam(1j), TypeError, ("learning_rate", "1j")),
    "momentum too large": (lambda: jstep.momentum(0.1, 1.5), ValueError, ("momentum", "1.5")),
    "momentum negative": (lambda: jstep.momentum(0.1, -0.5), ValueError, ("momentum", "-0.5")),
    "adagrad accumulator zero": (
        lambda: jstep.adagrad(0.1, 0.0),
        ValueError,
        ("initial_accumulator_value", "0", "> 0"),
    ),
    "adagrad accumulator negative": (
        lambda: jstep.adagrad(0.1, -1),
        ValueError,
        ("initial_accumulator_value", "-1"),
    ),
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
    "schedule of vectors": (
        lambda: apply(GRADS, jstep.gradient_descent(lambda n: jnp.ones(2))),
        ValueError,
        ("learning_rate", "(2,)"),
    ),
    # Gradients handed over.
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
    "gradient of an integer leaf": (
        lambda: apply({**GRADS, "n": jnp.ones(2)}),
        TypeError,
        ("'n'", "int32", "None"),
    ),
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
        lambda: create(
            PARAMS,
            jstep.chain(*(jstep.Optimizer(o.init, o.update, lambda n: {}) for o in (adam, adam))),
        ),
        ValueError,
        ("'m'", "jstep.scope("),
    ),
    "scope without a name": (lambda: jstep.scope("", adam), ValueError, ("name", "''")),
    "scope with a slash": (lambda: jstep.scope("a/", adam), ValueError, ("name", "'a/'")),
    "scope the other way round": (lambda: jstep.scope(adam, "fast"), TypeError, ("must be",)),
    "partition of nothing": (lambda: jstep.partition({}, lambda path, leaf: "a"), ValueError, ("optimizers",)),
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
    # Loss and its arguments.
    "loss a vector": (
        lambda: compute(lambda p, x: x @ p["dense"]["kernel"]),
        ValueError,
        ("loss", "(6, 3)", "scalar"),
    ),
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
    "var_list with a typo": (
        lambda: compute(var_list=["dense/kernal"]),
        ValueError,
        ("var_list", "'dense/kernal'", "'dense/kernel'"),
    ),
    "var_list glob of nothing": (lambda: compute(var_list=["decoder/*"]), ValueError, ("'decoder/*'", "dense/")),
    "var_list second entry": (
        lambda: compute(var_list=["dense/*", "bias"]),
        ValueError,
        ("'bias'", "dense/bias"),
    ),
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
    "scan of no function": (lambda: jstep.scan_steps(3), TypeError, ("train_step", "3")),
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
    "scan without args": (
        lambda: jstep.scan_steps(jstep.minimize(lambda p: linear(p, jnp.ones((1, 2))), adam))(create(PARAMS, adam)),
        ValueError,
        ("length",),
    ),
    # Sparse gradients.
    "rows of a float index": (lambda: sparse(rows(indices=(0.0, 1.0))), TypeError, ("'table'", "integers", "float32")),
    "rows out of range": (lambda: sparse(rows(indices=(0, 4))), ValueError, ("'table'", "4", "4 rows")),
    "rows negative": (lambda: sparse(rows(indices=(-1, 0))), ValueError, ("'table'", "-1")),
    "rows of another width": (lambda: sparse(rows(values=(2, 3))), ValueError, ("'table'", "(2, 1)", "(2, 3)")),
    "rows fewer than indices": (lambda: sparse(rows(values=(1, 1))), ValueError, ("'table'", "(2, 1)", "(1, 1)")),
    "rows of another table": (lambda: sparse(rows(shape=(5, 1))), ValueError, ("'table'", "(5, 1)", "(4, 1)")),
    "rows of integers": (
        lambda: sparse(jstep.IndexedSlices(jnp.ones((1, 1), jnp.int32), jnp.array([0]), (4, 1))),
        TypeError,
        ("'table'", "int32"),
    ),
    "rows of a matrix of indices": (lambda: sparse(rows(indices=[[0, 1]])), ValueError, ("'table'", "(1, 2)")),
    # gradients().
    "gradients of integers": (lambda: jstep.gradients(lambda x: x, jnp.arange(3)), TypeError, ("xs", "int32")),
    "gradients to integers": (
        lambda: jstep.gradients(lambda x: x.astype(jnp.int32), jnp.ones(3)),
        TypeError,
        ("fn", "int32"),
    ),
    "grad_ys of another structure": (
        lambda: jstep.gradients(lambda x: (x, x), jnp.ones(2), grad_ys=jnp.ones(2)),
        ValueError,
        ("grad_ys",),
    ),
    "grad_ys of another shape": (
        lambda: jstep.gradients(lambda x: {"a": x}, jnp.ones(2), grad_ys={"a": jnp.ones(3)}),
        ValueError,
        ("grad_ys", "'a'", "(3,)", "(2,)"),
    ),
    # Clipping.
    "clip_by_norm zero": (lambda: jstep.clip_by_norm(jnp.ones(2), 0.0), ValueError, ("clip_norm", "0")),
    "clip_by_norm negative": (lambda: jstep.clip_by_norm(jnp.ones(2), -1), ValueError, ("clip_norm", "-1")),
    "clip_by_norm nan": (lambda: jstep.clip_by_norm(jnp.ones(2), np.nan), ValueError, ("clip_norm", "nan")),
    "clip_by_norm str": (lambda: jstep.clip_by_norm(jnp.ones(2), "1"), TypeError, ("clip_norm", "'1'")),
    "clip_by_norm vector": (lambda: jstep.clip_by_norm(jnp.ones(2), jnp.ones(2)), ValueError, ("clip_norm", "(2,)")),
    "clip_by_norm of integers": (
        lambda: jstep.clip_by_norm({"a": {"b": jnp.arange(2)}}, 1.0),
        TypeError,
        ("'a/b'", "int32"),
    ),
    "clip_by_average_norm": (lambda: jstep.clip_by_average_norm(jnp.ones(2), 0), ValueError, ("clip_norm", "0")),
    "clip_by_average_norm of integers": (
        lambda: jstep.clip_by_average_norm({"a": jnp.arange(2)}, 1.0),
        TypeError,
        ("'a'", "int32"),
    ),
    "clip_by_global_norm": (lambda: jstep.clip_by_global_norm([jnp.ones(2)], -3), ValueError, ("clip_norm", "-3")),
    "clip_by_global_norm of integers": (
        lambda: jstep.clip_by_global_norm({"a": jnp.arange(2)}, 1.0),
        TypeError,
        ("'a'", "int32"),
    ),
    "clip_by_global_norm of a function": (
        lambda: jstep.clip_by_norm({"a": {"f": jnp.tanh}}, 1.0),
        TypeError,
        ("'a/f'", "no array"),
    ),
    "clip_by_value reversed": (lambda: jstep.clip_by_value(jnp.ones(2), 2, 1), ValueError, ("min", "2", "max", "1")),
    # Averages.
    "ema decay too large": (lambda: jstep.ExponentialMovingAverage(1.1), ValueError, ("decay", "1.1")),
    "ema decay negative": (lambda: jstep.ExponentialMovingAverage(-0.1), ValueError, ("decay", "-0.1")),
    "ema decay str": (lambda: jstep.ExponentialMovingAverage("0.9"), TypeError, ("decay", "'0.9'")),
    "ema num_updates a number": (
        lambda: jstep.ExponentialMovingAverage(0.9, num_updates=100),
        TypeError,
        ("num_updates", "100", "apply"),
    ),
    "ema name": (lambda: jstep.ExponentialMovingAverage(0.9, name=""), ValueError, ("name", "''")),
    "ema without num_updates": (
        lambda: jstep.ExponentialMovingAverage(0.9, num_updates=True).apply({"w": jnp.ones(1)}, {"w": jnp.ones(1)}),
        ValueError,
        ("num_updates", "None", "global_step"),
    ),
    "ema num_updates negative": (
        lambda: jstep.ExponentialMovingAverage(0.9, num_updates=True).apply(
            {"w": jnp.ones(1)}, {"w": jnp.ones(1)}, num_updates=-1
        ),
        ValueError,
        ("num_updates", "-1"),
    ),
    "ema of another tree": (
        lambda: jstep.ExponentialMovingAverage(0.9).apply({"w": jnp.ones(1)}, {"w": jnp.ones(1), "b": jnp.ones(1)}),
        ValueError,
        ("averages", "'b'"),
    ),
    "with_moving_average of a number": (
        lambda: jstep.with_moving_average(adam, 0.9),
        TypeError,
        ("ema", "0.9", "ExponentialMovingAverage"),
    ),
    "averaged_params without averages": (
        lambda: jstep.averaged_params(create(PARAMS, adam)),
        ValueError,
        ("'ExponentialMovingAverage'", "with_moving_average"),
    ),
    "averaged_params with a typo": (
        lambda: jstep.averaged_params(
            create(PARAMS, jstep.with_moving_average(adam, jstep.ExponentialMovingAverage(0.9, name="avg"))), "avgg"
        ),
        ValueError,
        ("'avgg'", "'avg'"),
    ),
    # Schedules.
    "exponential_decay rate": (lambda: jstep.exponential_decay(0.1, 10, -0.5), ValueError, ("decay_rate", "-0.5")),
    "inverse_time_decay rate": (lambda: jstep.inverse_time_decay(0.1, 10, -0.5), ValueError, ("decay_rate", "-0.5")),
    "polynomial_decay power": (lambda: jstep.polynomial_decay(0.1, 10, power=-1), ValueError, ("power", "-1")),
    "schedule of a str": (lambda: jstep.exponential_decay("0.1", 10, 0.5), TypeError, ("learning_rate", "'0.1'")),
    "schedule of a vector": (lambda: jstep.cosine_decay(jnp.ones(2), 10), ValueError, ("learning_rate", "(2,)")),
    "schedule of nan": (lambda: jstep.constant(float("nan")), ValueError, ("value", "nan")),
    "restarts t_mul": (lambda: jstep.cosine_decay_restarts(0.1, 10, t_mul=0.5), ValueError, ("t_mul", "0.5")),
    "restarts m_mul": (lambda: jstep.cosine_decay_restarts(0.1, 10, m_mul=-1), ValueError, ("m_mul", "-1")),
    "piecewise values": (
        lambda: jstep.piecewise_constant([10, 20], [1.0, 0.5]),
        ValueError,
        ("values", "2", "boundaries"),
    ),
    "piecewise order": (
        lambda: jstep.piecewise_constant([20, 10], [1.0, 0.5, 0.1]),
        ValueError,
        ("boundaries", "20", "10", "increase"),
    ),
    "piecewise equal": (lambda: jstep.piecewise_constant([10, 10], [1.0, 0.5, 0.1]), ValueError, ("boundaries",)),
    "piecewise nan": (lambda: jstep.piecewise_constant([np.nan], [1.0, 0.5]), ValueError, ("boundaries", "nan")),
    "piecewise a str": (lambda: jstep.piecewise_constant([10], [1.0, "x"]), TypeError, ("values[1]", "'x'")),
    "warmup negative": (lambda: jstep.linear_warmup(0.1, -1), ValueError, ("warmup_steps", "-1")),
    "warmup str": (lambda: jstep.linear_warmup(0.1, "5"), TypeError, ("warmup_steps", "'5'")),
    "shift negative": (lambda: jstep.shift(0.1, -1), ValueError, ("start_step", "-1")),
    "shift float": (lambda: jstep.shift(0.1, 1.5), TypeError, ("start_step", "1.5")),
    "join numbers": (lambda: jstep.join([0.1, 0.2], []), ValueError, ("schedules", "boundaries")),
    "join order": (lambda: jstep.join([0.1, 0.2, 0.3], [5, 5]), ValueError, ("boundaries", "5")),
    "join float": (lambda: jstep.join([0.1, 0.2], [5.5]), TypeError, ("boundaries[0]", "5.5")),
    "join at zero": (lambda: jstep.join([0.1, 0.2], [0]), ValueError, ("boundaries[0]", "0")),
    "join of a str": (lambda: jstep.join([0.1, "x"], [5]), TypeError, ("schedules[1]", "'x'")),
}

WITH_DECAY_STEPS: dict[str, Callable[[Any], Any]] = {
    "decay_steps of exponential_decay": lambda d: jstep.exponential_decay(0.1, d, 0.5),
    "decay_steps of natural_exp_decay": lambda d: jstep.natural_exp_decay(0.1, d, 0.5),
    "decay_steps of inverse_time_decay": lambda d: jstep.inverse_time_decay(0.1, d, 0.5),
    "decay_steps of polynomial_decay": lambda d: jstep.polynomial_decay(0.1, d),
    "decay_steps of cosine_decay": lambda d: jstep.cosine_decay(0.1, d),
    "first_decay_steps of cosine_decay_restarts": lambda d: jstep.cosine_decay_restarts(0.1, d),
    "decay_steps of linear_cosine_decay": lambda d: jstep.linear_cosine_decay(0.1, d),
}
BAD_PERIODS = [(0, ValueError), (-1, ValueError), (-0.5, ValueError), (np.nan, ValueError), (np.inf, ValueError)]
BAD_PERIODS += [("10", TypeError), (None, TypeError), (True, TypeError), ([10], TypeError)]
for label, make in WITH_DECAY_STEPS.items():
    for bad, kind in BAD_PERIODS:
        CASES[f"{label}: {bad}"] = (functools.partial(make, bad), kind, (label.split()[0], str(bad)))


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_and_explained(name: str) -> None:
    call, kind, fragments = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{message!r} does not say {missing}"


def test_an_error_leaves_the_state_usable() -> None:
    """Refused before it is compiled, nothing is donated."""
    state = create(PARAMS, adam)
    good, bad = jstep.minimize(linear, adam), jstep.minimize(linear, adam, var_list=["nothing"])
    for wrong in (lambda: bad(state, jnp.ones((6, 2))), lambda: good(state, jnp.ones((6, 5)))):
        with pytest.raises((ValueError, TypeError)):
            wrong()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    state, _ = good(state, jnp.ones((6, 2)))
    assert jstep.global_step(state) == 1


def test_what_can_be_checked_early_is_checked_before_compiling() -> None:
    for early in (
        lambda: jstep.minimize(linear, adam, metrics=("norm",)),
        lambda: jstep.minimize(linear, adam, gate_gradients=9),
        lambda: jstep.minimize(linear, adam, num_microbatches=0),
        lambda: jstep.minimize(linear, adam, aggregation_method=None),
        lambda: jstep.compute_gradients(linear, weight_fn=3),
    ):
        with pytest.raises((ValueError, TypeError)):
            early()

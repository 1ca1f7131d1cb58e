"""Optax transformations with extra arguments: line searches, Polyak's step, plateaus."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jstep

START = {"x": jnp.float32(-1.0), "y": jnp.float32(2.0)}
X = jnp.ones(4)


def loss_fn(params: Any, x: Any) -> Any:
    x, y = jnp.mean(x) * params["x"].astype(jnp.float32), params["y"].astype(jnp.float32)
    return (1 - x) ** 2 + 10 * (y - x**2) ** 2


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "lbfgs": optax.lbfgs,
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.01),
    "plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1)),
    "chain": lambda: optax.chain(optax.contrib.reduce_on_plateau(patience=1), optax.clip(100.0), optax.lbfgs()),
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
}


def run_optax(transformation: Any, steps: int) -> Any:
    params = START
    value_fn = lambda p: loss_fn(p, X)  # noqa: E731

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, opt_state = transformation.update(grad, opt_state, params, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(params, updates), opt_state

    with jax.numpy_dtype_promotion("standard"):
        opt_state = transformation.init(params)
        for _ in range(steps):
            params, opt_state = step(params, opt_state)
    return params


def run_jstep(optimizer: jstep.Optimizer, steps: int, params: Any = START, **kwargs: Any) -> jstep.TrainState:
    step = jstep.minimize(loss_fn, optimizer, **kwargs)
    state = jstep.TrainState.create(params, optimizer)
    for _ in range(steps):
        state, _ = step(state, X)
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    return state


@pytest.mark.thorough(except_for=["polyak"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_matches_optax(name: str) -> None:
    state = run_jstep(jstep.from_optax(TRANSFORMATIONS[name]()), 6)
    want = run_optax(TRANSFORMATIONS[name](), 6)
    np.testing.assert_allclose([state.params["x"], state.params["y"]], [want["x"], want["y"]], rtol=1e-3)


WRAPPERS: dict[str, Callable[[jstep.Optimizer], jstep.Optimizer]] = {
    "scope": lambda one: jstep.scope("s", one),
    "label": lambda one: jstep.partition({"a": one}, lambda path, leaf: "a"),
    "guard": jstep.skip_nonfinite,
    "masters": jstep.master_weights,
    "scale": lambda one: jstep.dynamic_loss_scale(one, initial=8.0),
    "deep": lambda one: jstep.skip_nonfinite(
        jstep.master_weights(jstep.partition({"a": jstep.scope("b", one)}, lambda path, leaf: "a"))
    ),
}


@pytest.mark.thorough(except_for=["label"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_line_search_inside_wrappers(wrapper: str) -> None:
    alone = run_jstep(jstep.from_optax(optax.lbfgs()), 5)
    state = run_jstep(WRAPPERS[wrapper](jstep.from_optax(optax.lbfgs())), 5)
    np.testing.assert_allclose(state.params["x"], alone.params["x"], rtol=2e-3)
    np.testing.assert_allclose(state.params["y"], alone.params["y"], rtol=2e-3)


@pytest.mark.thorough(except_for=["rng"])
@pytest.mark.parametrize("kwargs", [{"num_microbatches": 2}, {"rng": jax.random.key(0)}], ids=["microbatches", "rng"])
def test_with_microbatches_and_keys(kwargs: Any) -> None:
    def with_rng(params: Any, x: Any, rng: Any = None) -> Any:
        return loss_fn(params, x)

    optimizer = jstep.from_optax(optax.lbfgs())
    step = jstep.minimize(with_rng, optimizer, **kwargs)
    state, _ = step(jstep.TrainState.create(START, optimizer), X)
    np.testing.assert_allclose(state.params["x"], run_jstep(optimizer, 1).params["x"], rtol=1e-4)


@pytest.mark.thorough
def test_line_search_over_some_leaves() -> None:
    line_search = jstep.from_optax(optax.lbfgs())
    frozen = jstep.partition({"a": line_search}, lambda path, leaf: "a" if path == "x" else None)
    for optimizer, kwargs in ((frozen, {}), (line_search, {"var_list": ["x"]})):
        state = run_jstep(optimizer, 4, **kwargs)
        assert float(state.params["y"]) == 2.0
        assert float(loss_fn(state.params, X)) < 6  # the minimum over x is 5.8, near x = -1.41
    low = {"x": jnp.bfloat16(-1.0), "y": jnp.bfloat16(2.0), "n": jnp.int32(3), "none": None}
    state = run_jstep(jstep.master_weights(jstep.from_optax(optax.lbfgs())), 12, low)
    assert state.params["x"].dtype == jnp.bfloat16
    assert float(loss_fn(state.params, X)) < 4  # initially 14; the loss is as coarse as the bfloat16 parameters


@pytest.mark.thorough
def test_scan_and_restore(tmp_path: Any) -> None:
    optimizer = jstep.from_optax(optax.lbfgs())
    step = jstep.minimize(loss_fn, optimizer)
    state, _ = jstep.scan_steps(step)(jstep.TrainState.create(START, optimizer), jnp.ones((4, 4)))
    np.testing.assert_allclose(state.params["x"], run_jstep(optimizer, 4).params["x"], rtol=1e-3)
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
        restored = saver.restore(jstep.TrainState.create(START, optimizer))
    one, other = step(state, X)[0], step(restored, X)[0]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough(except_for=["transformation2-needs value of"])
@pytest.mark.parametrize(
    ("transformation", "missing"),
    [
        (optax.lbfgs(), "needs value, grad, value_fn of"),
        (optax.polyak_sgd(), "needs value of"),
        (optax.chain(optax.adam(1.0), optax.contrib.reduce_on_plateau()), "needs value of"),
    ],
)
def test_missing_arguments_are_named(transformation: Any, missing: str) -> None:
    grads = {"x": jnp.float32(1.0), "y": jnp.float32(1.0)}
    inner = jstep.from_optax(transformation)
    for optimizer in (inner, jstep.skip_nonfinite(jstep.scope("s", inner))):
        state = jstep.TrainState.create(START, optimizer)
        with pytest.raises(TypeError, match=rf"transformation: {missing}.*jstep\.minimize, which gives"):
            jstep.apply_gradients(state, grads, optimizer)
    value_and_grad = jax.value_and_grad(lambda params: loss_fn(params, X))
    context = jstep.Context(jnp.float32(50.0), value_and_grad)
    state = jstep.TrainState.create(START, inner)
    moved = jstep.apply_gradients(state, value_and_grad(START)[1], inner, context=context)
    assert float(moved.params["x"]) != float(START["x"])


LOOKAHEAD = optax.lookahead(optax.sgd(0.1), 2, 0.5)
# What `dpsgd` makes of its deprecated argument `seed`.
PRIVATE = optax.chain(
    optax.contrib.differentially_private_aggregate(1.0, 0.5, jax.random.key(0)), optax.scale_by_learning_rate(0.1)
)
LOOKAHEAD_ADVICE = r"use jstep\.lookahead\(jstep\.from_optax\(fast_optimizer\)"
PRIVATE_ADVICE = r"needs the gradient of each example.*jax\.vmap\(jax\.grad"


@pytest.mark.parametrize(
    ("transformation", "params", "advice"),
    [
        (LOOKAHEAD, START, LOOKAHEAD_ADVICE),
        (LOOKAHEAD, optax.LookaheadParams.init_synced(START), LOOKAHEAD_ADVICE),
        (optax.masked(optax.chain(optax.clip(1.0), LOOKAHEAD), True), START, LOOKAHEAD_ADVICE),
        # A leaf with an axis would train on wrong numbers: the axis is taken for the examples.
        (PRIVATE, {"w": jnp.ones(4)}, PRIVATE_ADVICE),
        (PRIVATE, START, PRIVATE_ADVICE),
        (optax.multi_transform({"a": PRIVATE}, "a"), START, PRIVATE_ADVICE),
    ],
)
def test_transformations_that_no_step_can_serve_are_rejected_by_create(
    transformation: Any, params: Any, advice: str
) -> None:
    optimizer = jstep.from_optax(transformation)
    with pytest.raises(TypeError, match=f"^transformation: .*{advice}"):
        jstep.TrainState.create(params, optimizer)


def test_a_transformation_of_other_parameters_is_rejected() -> None:
    class Other:
        init = staticmethod(lambda params: ())
        update = staticmethod(lambda grads, opt_state, params: (params.fast, opt_state))

    with pytest.raises(TypeError, match=r"its update does not take a plain tree of parameters.*'fast'"):
        run_jstep(jstep.from_optax(Other()), 1)


def test_other_errors_of_a_transformation_propagate() -> None:
    class Wrong:
        init = staticmethod(lambda params: ())

        @staticmethod
        def update(grads: Any, opt_state: Any, params: Any, **extra: Any) -> Any:
            raise TypeError("'value' is mine")

    with pytest.raises(TypeError, match=r"^'value' is mine"):
        run_jstep(jstep.from_optax(Wrong()), 1)

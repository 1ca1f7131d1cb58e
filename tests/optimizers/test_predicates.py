"""Labels, masks and predicates receive the leaves of the state, even inside wrappers."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {
    "low": jnp.ones((2, 2), jnp.bfloat16),
    "high": jnp.ones((2, 2)),
    "n": jnp.int32(1),
    "none": None,
}
GRADS = {"low": jnp.ones((2, 2), jnp.bfloat16), "high": jnp.ones((2, 2)), "n": None, "none": None}


def is_low(path, leaf):
    return leaf.dtype == jnp.bfloat16


def by_dtype(path, leaf):
    return {"bfloat16": "low", "float32": "high"}.get(str(leaf.dtype))


def partition_by_dtype():
    return jstep.partition(
        {"low": jstep.gradient_descent(1.0), "high": jstep.gradient_descent(0.0)}, by_dtype
    )


WRAPPERS = {
    "masters": jstep.master_weights,
    "scoped": lambda one: jstep.master_weights(jstep.scope(one, "s")),
    "guarded": lambda one: jstep.skip_nonfinite(
        jstep.master_weights(jstep.with_moving_average(one, EMA))
    ),
    "labels": lambda one: jstep.master_weights(
        jstep.partition(
            {"a": jstep.partition({"b": one}, lambda path, leaf: "b")}, lambda path, leaf: "a"
        )
    ),
    "chain": lambda one: jstep.master_weights(jstep.chain(jstep.clip_gradients(by_value=9.0), one)),
}
EMA = jstep.ExponentialMovingAverage(0.5)
# Each case subtracts 1 from `low` and does not change `high`.
CASES = {
    "labels": partition_by_dtype,
    "labels-in-labels": lambda: jstep.partition(
        {"x": partition_by_dtype()}, lambda path, leaf: "x" if by_dtype(path, leaf) else None
    ),
    "decay": lambda: jstep.chain(
        jstep.add_weight_decay(1.0, is_low), jstep.stateless(_decay_alone)
    ),
    "decoupled": lambda: jstep.chain(jstep.gradient_descent(0.0), jstep.decay_weights(1.0, is_low)),
    "factors": lambda: jstep.chain(
        jstep.gradient_descent(1.0),
        jstep.scale_updates(lambda path, leaf: float(is_low(path, leaf))),
    ),
    "slots": lambda: jstep.leafwise(_slotted, hyper={}, slots={"m": jstep.Slot(shape=_shape)}),
}
# Each case calls its functions, which return the axes of a leaf or the radius, with a path and a
# leaf.
AXES_CASES = {
    "orthogonalize": lambda axes: jstep.orthogonalize(scale=None, axes=axes),
    "neurons": lambda axes: jstep.normalize_neurons(axes=axes),
    "hyperball-axes": lambda axes: jstep.on_hyperball(0.1, axes=axes),
    "hyperball-radius": lambda axes: jstep.on_hyperball(
        0.1, lambda path, leaf: 1.0 + axes(path, leaf)[0]
    ),
    "units": lambda axes: jstep.clip_gradients(adaptive=1.0, axes=axes),
    "centralize": lambda axes: jstep.centralize_gradients(axes=axes),
}


def _decay_alone(updates, params, step):
    """Return −(u − g): the term that decay added to gradients of 1."""
    return jax.tree.map(lambda u: 1 - u, updates)


def _shape(path, leaf):
    return leaf.shape if is_low(path, leaf) else None


def _slotted(g, p, slots, h):
    return (0 * g, {}) if slots["m"] is None else (-g, {"m": slots["m"] + 1})


@pytest.mark.thorough(except_for=["slots-labels"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", CASES)
def test_predicates_see_the_dtypes_of_the_state(case, wrapper):
    optimizer = WRAPPERS[wrapper](CASES[case]())
    state = jstep.TrainState.create(PARAMS, optimizer)
    state = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))(state, GRADS)
    np.testing.assert_allclose(state.params["low"].astype(jnp.float32), 0.0, atol=1e-6)
    np.testing.assert_array_equal(state.params["high"], 1.0)


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", AXES_CASES)
def test_functions_of_axes_see_the_dtypes_of_the_state(case, wrapper):
    seen = []

    def axes(path, leaf):
        seen.append((path, str(leaf.dtype)))
        return 0, 1

    optimizer = WRAPPERS[wrapper](AXES_CASES[case](axes))
    state = jax.eval_shape(lambda: jstep.TrainState.create(PARAMS, optimizer))
    seen.clear()
    jax.eval_shape(lambda s: jstep.apply_gradients(s, GRADS, optimizer), state)
    assert set(seen) == {("low", "bfloat16"), ("high", "float32")}


def test_averages_and_trust_ratios_see_the_dtypes_of_the_state():
    optimizer = jstep.master_weights(
        jstep.with_moving_average(jstep.gradient_descent(0.1), EMA, is_low)
    )
    averages = jstep.TrainState.create(PARAMS, optimizer).slots["ExponentialMovingAverage"]
    assert averages["high"] is None
    assert averages["low"].dtype == jnp.float32
    for wrapper in (lambda one: one, jstep.master_weights):
        lars = wrapper(
            jstep.lars(1.0, momentum=0.0, trust_coefficient=0.5, trust_ratio_mask=is_low)
        )
        state = jstep.apply_gradients(jstep.TrainState.create(PARAMS, lars), GRADS, lars)
        np.testing.assert_allclose(state.params["low"].astype(jnp.float32), 0.5, rtol=1e-2)
        np.testing.assert_allclose(state.params["high"], 0.0, atol=1e-6)


# The labels of a partition as a tree: in the form of the parameters, or a prefix of it.


class Net(NamedTuple):
    policy: Any
    value: Any


def w():
    return jnp.ones((2, 2))


NET = Net({"w": w(), "b": jnp.ones(2)}, [w(), jnp.ones(2), None])


def rates(params, labels, wrap=lambda optimizer: optimizer):
    """How far each leaf moves: 1 with the label x, 2 with y, 0 if it is frozen."""
    optimizer = wrap(jstep.partition({"x": jstep.sgd(1.0), "y": jstep.sgd(2.0)}, labels))
    state = jstep.TrainState.create(params, optimizer)
    moved = jstep.apply_gradients(state, jax.tree.map(jnp.ones_like, params), optimizer)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(moved.params), strict=True)
    return [round(float(jnp.max(jnp.abs(before - after)))) for before, after in pairs]


@pytest.mark.thorough(except_for=["params2-labels2-wanted2", "params4-y-wanted4"])
@pytest.mark.parametrize(
    ("params", "labels", "wanted"),
    [
        ({"a": w(), "b": w()}, {"a": "x", "b": "y"}, [1, 2]),
        ([w(), w()], ["y", "x"], [2, 1]),
        (NET, Net({"w": "x", "b": None}, ["y", "x", None]), [0, 1, 2, 1]),
        (NET, Net(None, "x"), [0, 0, 1, 1]),
        ({"a": w(), "b": w()}, "y", [2, 2]),
        (w(), "x", [1]),
    ],
)
def test_each_leaf_has_the_label_of_the_tree(params, labels, wanted):
    assert rates(params, labels) == wanted
    assert (
        rates(
            params, labels, lambda one: jstep.chain(jstep.clip_gradients(by_global_norm=1e9), one)
        )
        == wanted
    )


# Weight decay that differs from leaf to leaf: mappings, and masks that select nothing.

PARAMS_OF_DECAY = {"a": jnp.float32(2.0), "ab": jnp.float32(2.0), "c": {"d": jnp.float32(2.0)}}
BLOCKS = {
    "add_weight_decay": lambda *args: jstep.chain(
        jstep.add_weight_decay(*args), jstep.scale_by_learning_rate(1.0)
    ),
    "decay_weights": lambda *args: jstep.chain(
        jstep.gradient_descent(0.0), jstep.decay_weights(*args)
    ),
    "cautious": lambda *args: jstep.chain(
        jstep.gradient_descent(1e-9), jstep.decay_weights(*args, cautious=True)
    ),
}


def decayed(optimizer, step=0):
    """Return the fraction by which an update reduced each weight."""
    state = jstep.TrainState.create(PARAMS_OF_DECAY, optimizer, global_step=step)
    train_step = jstep.minimize(lambda params: 1e-9 * sum(jax.tree.leaves(params)), optimizer)
    state, _ = train_step(state)
    return [round(float(1 - new / 2), 6) for new in jax.tree.leaves(state.params)]


@pytest.mark.thorough(except_for=["add_weight_decay"])
@pytest.mark.parametrize("block", BLOCKS)
def test_forms_of_decay_and_mask(block):
    make = BLOCKS[block]
    cases = [
        ((0.1,), [0.1, 0.1, 0.1]),
        ((0.1, {"a": 2.0, "ab": 0.5, "c/d": 0.0}), [0.2, 0.05, 0.0]),
        ((0.1, {"a": np.float32(2.0), "a*": 3.0}), [0.2, 0.3, 0.1]),
        (({"a": 0.1, "c/*": 0.3},), [0.1, 0.0, 0.3]),
        (({"a": 0.1, "*": 0.2}, {"a": 2.0, "c/d": 0.5}), [0.2, 0.2, 0.1]),
        (({"a": 0.1, "*": 0.2}, ["a", "c/d"]), [0.1, 0.0, 0.2]),
        (({"a": jstep.linear(0.0, 1.0, 10), "ab": 0.2},), [0.4, 0.2, 0.0]),
        ((0.1, {"a": True, "ab": False, "c": {"d": True}}), [0.1, 0.0, 0.1]),
        ((0.1, {"a": True, "ab": False, "c": True}), [0.1, 0.0, 0.1]),
    ]
    for args, expected in cases:
        assert decayed(make(*args), step=4) == expected, args


@pytest.mark.thorough(except_for=["decay_weights"])
@pytest.mark.parametrize("block", BLOCKS)
def test_held_decay_and_partition(block):
    make = BLOCKS[block]
    assert decayed(make({"a": jstep.held("wd", 0.1)}, {"a": 2.0})) == [0.2, 0.0, 0.0]
    half = make(0.1, {"a": 2.0, "ab": 3.0})
    optimizer = jstep.partition(
        {"x": half, "y": half}, lambda path, leaf: "x" if path == "a" else "y"
    )
    assert decayed(optimizer) == [0.2, 0.3, 0.1]


def test_hyperparameters_are_reported_by_entry():
    optimizer = jstep.chain(
        jstep.gradient_descent(1.0), jstep.decay_weights({"a": 0.1, "c/*": 0.2})
    )
    assert set(optimizer.hyperparameters(0)) == {
        "decoupled_weight_decay/a", "decoupled_weight_decay/c/*", "learning_rate"
    }  # fmt: skip
    assert set(jstep.add_weight_decay(0.1, {"a": 2.0}).hyperparameters(0)) == {"weight_decay"}


# Averages, slow weights and schedule-free parameters are found in nested optimizers.

PARAMS_OF_LOOKUP = {"a": jnp.float32(1.0), "b": jnp.float32(2.0)}
GRADS_OF_LOOKUP = {"a": jnp.float32(1.0), "b": jnp.float32(1.0)}
FREE = lambda: jstep.schedule_free_sgd(0.5)  # noqa: E731
PARTS = {
    "averages": (
        lambda: jstep.with_moving_average(jstep.gradient_descent(0.5), EMA),
        jstep.averaged_params,
        "ExponentialMovingAverage",
    ),
    "slow": (lambda: jstep.lookahead(jstep.gradient_descent(0.5)), jstep.slow_params, "slow"),
    "schedule-free": (FREE, jstep.schedule_free_params, "z"),
}


def run_two_steps(optimizer):
    state = jstep.TrainState.create(PARAMS_OF_LOOKUP, optimizer)
    for _ in range(2):
        state = jstep.apply_gradients(state, GRADS_OF_LOOKUP, optimizer)
    return state


@pytest.mark.thorough(except_for=["schedule-free"])
@pytest.mark.parametrize("part", PARTS)
def test_several_candidates_raise_and_are_listed(part):
    make, extract, slot = PARTS[part]
    candidates = [f"x/{slot}", f"x/y/{slot}"]
    state = run_two_steps(
        jstep.partition(
            {"x": make(), "x/y": make()}, lambda path, leaf: "x" if path == "a" else "x/y"
        )
    )
    with pytest.raises(
        ValueError, match=re.escape(f"several such slots, {sorted(candidates)}; give")
    ):
        extract(state)
    np.testing.assert_allclose(
        extract(state, f"x/{slot}")["a"], extract(run_two_steps(make()))["a"]
    )
    np.testing.assert_array_equal(extract(state, f"x/{slot}")["b"], state.params["b"])


def select_nothing(path, leaf):
    return False


@pytest.mark.parametrize(
    "nothing", [select_nothing, {"a": False, "b": False}], ids=["function", "tree"]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda mask: jstep.adamw(0.1, weight_decay_mask=mask),
        lambda mask: jstep.chain(jstep.sgd(0.1), jstep.decay_weights(0.1, mask)),
    ],
    ids=["argument", "element"],
)
def test_a_decay_mask_that_selects_nothing_is_one_warning(make, nothing, caplog):
    run_two_steps(make(nothing))
    assert caplog.text.count("mask: it selects none of the 2 parameters, so that none decays") == 1


@pytest.mark.parametrize(
    "mask", [["a"], {"a": True, "b": False}, lambda path, leaf: path == "a", {"a": 0.5, "b": 0}]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda **mask: jstep.chain(
            jstep.scale_by_adam(),
            jstep.add_weight_decay(0.1, **mask),
            jstep.scale_by_learning_rate(0.1),
        ),
        lambda **mask: jstep.chain(jstep.sgd(0.1), jstep.decay_weights(0.1, cautious=True, **mask)),
    ],
    ids=["add_weight_decay", "decay_weights"],
)
def test_mask_and_weight_decay_mask_are_one_argument(make, mask):
    state = run_two_steps(make(mask=mask))
    other = run_two_steps(make(weight_decay_mask=mask))
    undecayed = run_two_steps(make(mask=["b"]))
    np.testing.assert_array_equal(state.params["a"], other.params["a"])
    np.testing.assert_array_equal(state.params["b"], other.params["b"])
    assert np.any(state.params["a"] != undecayed.params["a"])


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("other", "warnings"), [(None, 0), (lambda path, leaf: path == "b", 0), (select_nothing, 1)]
)
def test_a_decay_mask_of_one_label_may_select_nothing_if_another_selects(
    other, warnings, is_nested, caplog
):
    masks = {"a": select_nothing, "b": other}
    optimizers = {label: jstep.adamw(0.1, weight_decay_mask=mask) for label, mask in masks.items()}
    optimizer = jstep.partition(optimizers, lambda path, leaf: path)
    if is_nested:
        optimizer = jstep.partition({"both": optimizer}, lambda path, leaf: "both")
    run_two_steps(optimizer)
    assert (
        caplog.text.count("mask: it selects none of the 2 parameters, so that none decays")
        == warnings
    )

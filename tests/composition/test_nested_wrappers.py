"""Randomly nested optimizers and random trees: slot names, structure, and skipped steps."""

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

import jstep
from jstep.optimizers.names import hyperparameter_names, slot_names

KEY = jax.random.key(3)
LATE = jstep.ExponentialMovingAverage(0.9, zero_debias=True, name="late", start_step=2)
LABELS = ("a", "a/b", "a/b/c", "b")
PLAIN = [
    lambda: jstep.gradient_descent(0.1),
    lambda: jstep.momentum(0.1, 0.9),
    lambda: jstep.adam(jstep.held("rate", 0.1)),
    lambda: jstep.adafactor(0.1, min_dim_size_to_factor=2),
    lambda: jstep.ftrl(0.1),
    lambda: jstep.schedule_free_adamw(0.1),
    lambda: jstep.from_optax(optax.adam(0.1)),
]
WRAPPERS = [
    jstep.skip_nonfinite,
    jstep.master_weights,
    jstep.lookahead,
    jstep.cautious,
    jstep.dynamic_loss_scale,
    lambda one: jstep.stochastic_rounding(one, KEY),
    lambda one: jstep.with_moving_average(one, jstep.ExponentialMovingAverage(0.9)),
    lambda one: jstep.with_moving_average(one, LATE, ["*"]),
    lambda one: jstep.chain(jstep.clip_gradients(by_global_norm=1.0), one),
    lambda one: jstep.chain(jstep.clip_gradients(adaptive=0.1), jstep.add_noise(1e-3, 0.5, KEY), one),
    lambda one: jstep.chain(one, jstep.decay_weights(jstep.held("decay", 1e-3), ["*"])),
    lambda one: jstep.chain(one, jstep.scale_updates({"*": 0.5})),
    *(lambda one, label=label: jstep.scope(label, one) for label in LABELS),
]


def by_path_length(labels: Any) -> Any:
    return lambda path, leaf: labels[len(path) % len(labels)]


def partitioned(parts: Any) -> Any:
    """Return a partition with a label for each part; the other leaves are frozen."""
    labels = list(LABELS[: len(parts)])
    return jstep.partition(dict(zip(labels, parts, strict=True)), by_path_length([*labels, None]))


optimizers = st.recursive(
    st.sampled_from(PLAIN).map(lambda make: (make,)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(WRAPPERS), inner),
        st.tuples(st.just(partitioned), st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


def build(plan: Any) -> jstep.Optimizer:
    make, *inner = plan
    if not inner:
        return make()
    return make([build(one) for one in inner[0]]) if make is partitioned else make(build(inner[0]))


shapes = st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 4)])
dtypes = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
leaves = st.one_of(
    st.builds(lambda shape, dtype: jnp.full(shape, 0.5, dtype), shapes, dtypes),
    st.just(jnp.array([1, 2])),
    st.none(),
)
inner_trees = st.dictionaries(st.text("xyz", min_size=1, max_size=3), leaves, max_size=2)
trees = st.dictionaries(st.text("abcd", min_size=1, max_size=4), st.one_of(leaves, inner_trees), min_size=1, max_size=4)


def gradient(leaf: Any) -> Any:
    return jnp.full_like(leaf, 0.25) if jnp.issubdtype(leaf.dtype, jnp.floating) else None


def shapes_and_dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def check_message(error: ValueError, *fragments: str) -> None:
    assert all(text in str(error) for text in fragments), error


@hypothesis.settings(max_examples=40)
@hypothesis.given(optimizers, trees, st.booleans())
def test_slot_names_are_known_and_structure_is_preserved(plan: Any, params: Any, guarded: bool) -> None:
    try:
        optimizer = build(plan)
        optimizer = jstep.skip_nonfinite(optimizer) if guarded else optimizer
    except ValueError as error:
        check_message(error, "both have a", "jstep.scope(")  # duplicate names raise when the optimizer is built
        hypothesis.reject()
    try:
        state = jax.eval_shape(lambda p: jstep.TrainState.create(p, optimizer), params)
    except ValueError as error:
        check_message(error, "matches")  # the mask selects only leaves that cannot be trained
        return
    assert sorted(slot_names(optimizer, state.params) or ()) == sorted(state.slots)
    assert len(hyperparameter_names(optimizer)) == len(set(hyperparameter_names(optimizer)))
    grads = jax.tree.map(gradient, params)
    try:
        new = jax.eval_shape(lambda s, g: jstep.apply_gradients(s, g, optimizer), state, grads)
    except ValueError as error:
        check_message(error, "must be outermost" if "loss_scale" in str(error) else "No gradients provided")
        return
    assert shapes_and_dtypes(new) == shapes_and_dtypes(state)
    slots = {name: tree for name, tree in state.slots.items() if "held" in name.split("/")}
    assert all(tree.dtype == jnp.float32 for tree in slots.values())


@hypothesis.settings(max_examples=10)
@hypothesis.given(optimizers)
def test_guarded_optimizers_skip_and_continue(plan: Any) -> None:
    params = {"a": jnp.ones((2, 3)), "bb": jnp.ones(3, jnp.bfloat16), "ccc": jnp.ones(())}
    grads = jax.tree.map(lambda p: jnp.full_like(p, 0.25), params)
    try:
        optimizer = jstep.skip_nonfinite(jstep.scope("inner", build(plan)))
    except ValueError as error:
        check_message(error, "both have a")
        hypothesis.reject()
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
    try:
        state = jstep.TrainState.create(params, optimizer)
        first = step(state, grads)
    except ValueError as error:
        fragment = "must be outermost" if "loss_scale" in str(error) else "matches"
        check_message(error, "No gradients provided" if "No gradients" in str(error) else fragment)
        return
    skipped = step(first, {**grads, "a": jnp.full((2, 3), jnp.nan)})
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(skipped.params), strict=True):
        np.testing.assert_array_equal(a, b)
    counters = ("start_step", "loss_scale", "scale_since")
    for name in first.slots:
        if name.rsplit("/", 1)[-1] not in counters:
            for a, b in zip(jax.tree.leaves(first.slots[name]), jax.tree.leaves(skipped.slots[name]), strict=True):
                np.testing.assert_array_equal(a, b)
    after = step(skipped, grads)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(after.params))

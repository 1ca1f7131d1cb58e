"""Randomly nested optimizers and random trees: slot names, structure, skipped steps, and leaves
that are alone."""

import contextlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from thorough import examples

import jstep
from jstep.core import trees
from jstep.slots.roles import roles_of

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
CHAINS = [
    lambda one: jstep.chain(jstep.clip_gradients(by_global_norm=1.0), one),
    lambda one: jstep.chain(
        jstep.clip_gradients(adaptive=0.1), jstep.add_noise(1e-3, 0.5, KEY), one
    ),
]
MASKED_CHAINS = [
    lambda one: jstep.chain(one, jstep.decay_weights(jstep.held("decay", 1e-3), ["*"])),
    lambda one: jstep.chain(one, jstep.scale_updates({"*": 0.5})),
]
EVERY = lambda one: jstep.update_every(one, 2, accumulate=True)  # noqa: E731
MASKED = [lambda one: jstep.with_moving_average(one, LATE, ["*"]), *MASKED_CHAINS]
WRAPPERS = [
    jstep.skip_nonfinite,
    jstep.master_weights,
    jstep.lookahead,
    jstep.cautious,
    jstep.dynamic_loss_scale,
    EVERY,
    lambda one: jstep.stochastic_rounding(one, KEY),
    lambda one: jstep.with_moving_average(one, jstep.ExponentialMovingAverage(0.9)),
    *CHAINS,
    *MASKED,
    *(lambda one, label=label: jstep.scope(one, label) for label in LABELS),
]


def by_path_length(labels):
    return lambda path, leaf: labels[len(path) % len(labels)]


def partitioned(parts):
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


def build(plan):
    """Return the optimizer of a plan; reject plans with slots or hyperparameters of the same
    name."""
    make, *inner = plan
    if not inner:
        return make()
    arguments = [build(one) for one in inner[0]] if make is partitioned else build(inner[0])
    return without_collision(lambda: make(arguments))


def without_collision(make):
    try:
        return make()
    except ValueError as error:
        if "both have a" not in str(error) or "jstep.scope(" not in str(error):
            raise
        hypothesis.reject()


def inner_plans(plan):
    make, *inner = plan
    return inner[0] if make is partitioned else inner


def has_mask(plan):
    return plan[0] in MASKED or any(map(has_mask, inner_plans(plan)))


def is_trained(plan, path):
    """Return whether an optimizer of the plan updates the leaf at `path`."""
    if plan[0] is partitioned:
        part = by_path_length([*plan[1], None])(path, None)
        return part is not None and is_trained(part, path)
    return all(is_trained(one, path) for one in inner_plans(plan))


def hides_loss_scale(plan, is_outermost=True):
    """Return whether a loss scale is inside a partition, a chain, `update_every` or another loss
    scale."""
    if plan[0] is jstep.dynamic_loss_scale and not is_outermost:
        return True
    is_outermost &= plan[0] not in (
        partitioned,
        EVERY,
        jstep.dynamic_loss_scale,
        *CHAINS,
        *MASKED_CHAINS,
    )
    return any(hides_loss_scale(one, is_outermost) for one in inner_plans(plan))


def first_error(plan, params):
    """Return a pattern of the error that creation or the first update must raise, or None."""
    paths = [
        path
        for path, leaf in trees.leaves_with_paths(params)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if not paths:
        return "matches" if has_mask(plan) else "No gradients provided"
    if hides_loss_scale(plan):
        return "must be outermost"
    return None if any(is_trained(plan, path) for path in paths) else "No gradients provided"


def raises(error):
    return contextlib.nullcontext() if error is None else pytest.raises(ValueError, match=error)


shapes = st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 4)])
dtypes = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
leaves = st.one_of(
    st.builds(lambda shape, dtype: jnp.full(shape, 0.5, dtype), shapes, dtypes),
    st.just(jnp.array([1, 2])),
    st.none(),
)
inner_trees = st.dictionaries(st.text("xyz", min_size=1, max_size=3), leaves, max_size=2)
trees_of_params = st.dictionaries(
    st.text("abcd", min_size=1, max_size=4), st.one_of(leaves, inner_trees), min_size=1, max_size=4
)


def gradient(leaf):
    return jnp.full_like(leaf, 0.25) if jnp.issubdtype(leaf.dtype, jnp.floating) else None


def shapes_and_dtypes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@examples(40)
@hypothesis.given(optimizers, trees_of_params, st.booleans())
@hypothesis.example(
    (partitioned, [(jstep.dynamic_loss_scale, (PLAIN[0],))]), {"a": jnp.ones(3)}, False
)
@hypothesis.example((MASKED[0], (PLAIN[0],)), {"a": jnp.array([1, 2])}, False)
def test_slot_names_are_known_and_structure_is_preserved(plan, params, guarded):
    optimizer = build(plan)
    optimizer = without_collision(lambda: jstep.skip_nonfinite(optimizer)) if guarded else optimizer
    error = first_error(plan, params)
    grads = jax.tree.map(gradient, params)
    with raises(error):
        state = jax.eval_shape(lambda p: jstep.TrainState.create(p, optimizer), params)
        new = jax.eval_shape(
            lambda s, g: jstep.apply_gradients(s, g, optimizer, scaled=True), state, grads
        )
    if error is not None:
        return
    roles = roles_of(optimizer, state.params)
    assert roles.complete
    assert sorted(roles) == sorted(state.slots)
    assert shapes_and_dtypes(new) == shapes_and_dtypes(state)
    slots = {name: tree for name, tree in state.slots.items() if "held" in name.split("/")}
    assert all(tree.dtype == jnp.float32 for tree in slots.values())


@pytest.mark.thorough
@examples(15)
@hypothesis.given(plan=optimizers, other=optimizers)
def test_a_leaf_is_updated_by_its_own_optimizer_alone_and_resumes(plan, other, tmp_path_factory):
    """Whatever the other label has, whose name begins alike: the leaf is as if the rest were
    frozen."""
    params = {"a": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "bb": jnp.ones(3)}
    if any(
        first_error(one, params) or hides_loss_scale(one, False) or has_mask(one)
        for one in (plan, other)
    ):
        return
    if is_trained(plan, "a") and is_trained(other, "bb"):
        check_alone(plan, other, params, tmp_path_factory)


def test_a_leaf_beside_others(tmp_path_factory):
    params = {"a": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "bb": jnp.ones(3)}
    check_alone(
        (jstep.lookahead, (PLAIN[2],)),
        (partitioned, [(PLAIN[1],), (PLAIN[5],)]),
        params,
        tmp_path_factory,
    )


def check_alone(plan, other, params, tmp_path_factory):
    parts = {"x": build(plan), "x/y": build(other)}
    both = without_collision(
        lambda: jstep.partition(parts, lambda path, leaf: "x" if path == "a" else "x/y")
    )
    alone = jstep.partition({"x": parts["x"]}, lambda path, leaf: "x" if path == "a" else None)
    found = []
    for optimizer in (both, alone):
        step = jax.jit(
            lambda s, g, optimizer=optimizer: jstep.apply_gradients(s, g, optimizer, scaled=True)
        )
        state = jstep.TrainState.create(params, optimizer)
        for n in range(2):
            state = step(state, jax.tree.map(lambda p: jnp.cos(p + n), params))  # noqa: B023
        with jstep.Saver(tmp_path_factory.mktemp("nest"), async_save=False) as saver:
            saver.save(state)
            restored = saver.restore(jstep.TrainState.create(params, optimizer))
        assert step(restored, params) == step(state, params)
        found.append(step(state, params))
    np.testing.assert_array_equal(found[0].params["a"], found[1].params["a"])

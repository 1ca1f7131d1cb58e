"""The role of a slot is determined by the optimizer that created it, never by its name or
position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"w": jnp.array([1.0, -2.0]), "v": jnp.float32(0.5)}
ODD = ("loss_scale", "start_step", "last_finite_step", "scale_since", "skipped", "held/x")
PLAIN = ("s1", "s2", "s3", "s4", "s5", "s6/x")


def counting(names, kind):
    """Return a descent whose rate depends on counters in its slots: changing a slot changes the
    parameters."""

    def init(params, global_step=0):
        if kind == "trees":
            return {name: jax.tree.map(jnp.zeros_like, params) for name in names}
        return {
            name: jnp.zeros((), jnp.int32 if kind == "integers" else jnp.float32) for name in names
        }

    def update(updates, slots, params, step):
        counts = {name: jax.tree.map(lambda x: x + 1, slots[name]) for name in names}
        total = sum(
            jnp.max(jax.tree.leaves(tree)[0]).astype(jnp.float32) for tree in counts.values()
        )
        return jax.tree.map(lambda g: -0.01 * total * g, updates), counts

    return jstep.Optimizer(init, update, lambda step: {})


def by_label(*labels):
    return lambda path, leaf: labels[0] if path == "w" else labels[-1]


EMA = jstep.ExponentialMovingAverage(0.5, zero_debias=True)
WRAPPERS = {
    "nothing": lambda one: one,
    "scope": lambda one: jstep.scope(one, "start_step"),
    "skip_nonfinite": lambda one: jstep.skip_nonfinite(jstep.scope(one, "x")),
    "dynamic_loss_scale": lambda one: jstep.dynamic_loss_scale(jstep.scope(one, "x")),
    "master_weights": jstep.master_weights,
    "lookahead": lambda one: jstep.lookahead(one, sync_period=2),
    "averages": lambda one: jstep.with_moving_average(one, EMA),
    "averages-of-lookahead": lambda one: jstep.with_moving_average(jstep.lookahead(one, 2), EMA),
    "chain-beside": lambda one: jstep.skip_nonfinite(
        jstep.chain(jstep.scale_by_adam(), jstep.scope(one, "x"))
    ),
    "labels": lambda one: jstep.partition(
        {"a": one, "a/b": jstep.skip_nonfinite(jstep.adam())}, by_label("a", "a/b")
    ),
    "labels-turned": lambda one: jstep.partition(
        {"a/b": one, "a": jstep.skip_nonfinite(jstep.adam())}, by_label("a/b", "a")
    ),
    "guarded-labels": lambda one: jstep.skip_nonfinite(
        jstep.partition({"held_": one, "start_step": jstep.adam()}, by_label("held_", "start_step"))
    ),
}


OWN_AGE = {
    "lookahead": "lookahead/start_step",
    "averages": "with_moving_average/start_step",
    "averages-of-lookahead": "with_moving_average/start_step",
}
"""Name of the age slot of a wrapper if the usual name is taken."""


def loss_fn(params, x):
    return jnp.sum(params["w"] ** 2) * x + params["v"] ** 2


def run(optimizer, **kwargs):
    state = jstep.TrainState.create(PARAMS, optimizer)
    step = jstep.minimize(loss_fn, optimizer, **kwargs)
    history = []
    for x in (1.0, jnp.nan, 0.5, 2.0):
        state, metrics = step(state, jnp.float32(x))
        history.append(metrics)
    return state, history


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["floats", "integers", "trees"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_of_custom_slots_have_no_special_meaning(wrapper, kind):
    (odd, history), (plain, want) = (
        run(WRAPPERS[wrapper](counting(names, kind))) for names in (ODD, PLAIN)
    )
    np.testing.assert_equal(
        jax.tree.map(np.asarray, odd.params), jax.tree.map(np.asarray, plain.params)
    )
    assert [sorted(one) for one in history] == [sorted(one) for one in want]
    for one, other in zip(history, want, strict=True):
        np.testing.assert_equal(jax.tree.map(np.asarray, one), jax.tree.map(np.asarray, other))
    rename = dict(zip(PLAIN, ODD, strict=True))
    for name, tree in plain.slots.items():
        names = {
            name.removesuffix(p) + o
            for p, o in rename.items()
            if name == p or name.endswith("/" + p)
        } or {name}
        if name == "start_step":
            names = {OWN_AGE.get(wrapper, name)}
        np.testing.assert_equal(
            jax.tree.map(np.asarray, odd.slots[names.pop()]), jax.tree.map(np.asarray, tree)
        )


# Guards in all positions.

GUARD = jstep.skip_nonfinite


def test_labels_without_gradients_are_not_reported_as_skipped():
    optimizer = jstep.partition(
        {"a": GUARD(jstep.adam()), "a/b": GUARD(jstep.adam())}, by_label("a", "a/b")
    )
    state = jstep.TrainState.create(PARAMS, optimizer)
    step = jstep.minimize(loss_fn, optimizer, var_list=["v"])
    state, metrics = step(state, jnp.float32(1.0))
    assert [float(metrics[name]) for name in ("a/skipped", "a/b/skipped", "skipped")] == [0, 0, 0]
    assert int(state.slots["a/last_finite_step"]) == 0
    assert int(state.slots["a/b/last_finite_step"]) == 1


# Ages of custom optimizers and of labels without gradients.


def test_slots_inside_a_custom_wrapper_keep_their_roles():
    def wrapper(inner):
        def init(params, global_step=0):
            slots = {f"my/{name}": tree for name, tree in inner.init(params, global_step).items()}
            return slots | {"extra": jnp.zeros(())}

        def update(updates, slots, params, step):
            inner_slots = {
                name.removeprefix("my/"): tree
                for name, tree in slots.items()
                if name.startswith("my/")
            }
            updates, inner_slots = inner.update(updates, inner_slots, params, step)
            return updates, {f"my/{name}": tree for name, tree in inner_slots.items()} | {
                "extra": slots["extra"]
            }

        return jstep.Optimizer(init, update, inner.hyperparameters)

    state, history = run(GUARD(wrapper(jstep.adam())))
    want, _ = run(GUARD(jstep.adam()))
    np.testing.assert_array_equal(state.params["w"], want.params["w"])
    assert int(state.slots["my/start_step"]) == 1
    scaled, history = run(wrapper(jstep.dynamic_loss_scale(jstep.adam(), initial=8.0)))
    np.testing.assert_allclose(scaled.params["w"], want.params["w"], rtol=1e-5)
    assert [float(one["skipped"]) for one in history] == [0, 1, 0, 0]
    assert float(history[0]["my/loss_scale"]) == 8

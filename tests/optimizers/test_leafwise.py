"""`leafwise` with a rule that uses all of its features, and `from_direction`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.optimizers.leaf_values import leaf_flag, mask

PARAMS = {
    "w": {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3), jnp.bfloat16)},
    "n": jnp.array([1, 2]),
    "c": jnp.array([1.0, 2.0, 3.0]),
    "none": None,
}


def grads_of(value=1.0):
    return jax.tree.map(
        lambda p: jnp.full_like(p, value) if jnp.issubdtype(p.dtype, jnp.floating) else None, PARAMS
    )


TRACED = []


def rule(g, p, slots, h):
    """A rule with slots that are copies, of other shapes, absent or of low precision; scalars, sums
    and flags."""
    TRACED.append((p.shape, h["decays"], h["axis"]))
    assert isinstance(h["rate"], float)
    assert (
        {slot.dtype for slot in slots.values() if slot is not None}
        == {p.dtype}
        == {jnp.dtype(jnp.float32)}
    )
    new = {
        "z": slots["z"] - h["rate"] * g,
        "norm": slots["norm"] + jnp.sum(g * g),
        "m": slots["m"] + g,
    }
    if slots["row"] is not None:
        new["row"] = slots["row"] + jnp.mean(g, axis=h["axis"])
    decayed = g + (p if h["decays"] else 0.0)
    return -h["rate"] * h["d"] / h["size"] * decayed, new


def engine(**changes):
    given = {
        "hyper": {"rate": 0.5},
        "slots": {
            "z": jstep.Slot("copy"),
            "norm": jstep.Slot(shape=lambda path, leaf: ()),
            "row": jstep.Slot(shape=lambda path, leaf: leaf.shape[:1] if leaf.ndim == 2 else None),
            "m": jstep.Slot(dtype=jnp.bfloat16),
        },
        "scalars": {"d": 0.25},
        "flags": {
            "decays": mask("decay_mask", ["w/*"]),
            "axis": leaf_flag(lambda path, leaf: leaf.ndim - 1),
        },
        "prepare": lambda h: {"d": 2 * h["d"]},
        "measure": lambda g, p, slots, h: {"squares": jnp.sum(g * g)},
        "conclude": lambda h: {"size": jnp.sqrt(h["squares"])},
        "aged": True,
        "sparse": False,
    }
    return jstep.leafwise(rule, **(given | changes))


def test_slots_of_every_kind():
    optimizer = engine()
    state = jstep.TrainState.create(PARAMS, optimizer, 5)
    assert sorted(state.slots) == ["d", "m", "norm", "row", "start_step", "z"]
    assert state.slots["d"].dtype == jnp.float32
    assert state.slots["z"]["w"]["b"].dtype == jnp.float32
    assert (
        state.slots["z"]["c"].unsafe_buffer_pointer() != state.params["c"].unsafe_buffer_pointer()
    )
    assert state.slots["m"]["c"].dtype == jnp.bfloat16
    assert state.slots["norm"]["c"].shape == ()
    assert state.slots["row"]["c"] is None
    assert state.slots["row"]["w"]["a"].shape == (2,)
    TRACED.clear()
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer), donate_argnums=0)
    state = step(state, grads_of())
    # The rule is traced once for each combination of shape, dtype and flags.
    assert sorted(TRACED) == [((2, 3), True, 1), ((2, 3), True, 1), ((3,), False, 0)]
    size = np.sqrt(15.0)
    np.testing.assert_allclose(state.params["c"], PARAMS["c"] - 0.5 * 0.5 / size, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"]["a"], 1 - 0.5 * 0.5 / size * 2, rtol=1e-6)
    np.testing.assert_allclose(state.slots["z"]["c"], PARAMS["c"] - 0.5)
    np.testing.assert_allclose(state.slots["norm"]["w"]["b"], 6.0)
    np.testing.assert_allclose(state.slots["row"]["w"]["b"], 1.0)
    assert float(state.slots["d"]) == 0.5
    state = step(state, {**grads_of(), "c": None})
    np.testing.assert_allclose(state.slots["norm"]["c"], 3.0)
    assert float(state.slots["d"]) == 1.0


def test_slots_of_other_params_raise_and_name_the_path():
    optimizer = engine()
    state = jstep.TrainState.create(PARAMS, optimizer)
    other = {**PARAMS, "w": {"a": jnp.ones((4, 3)), "b": jnp.ones((2, 3), jnp.bfloat16)}}
    with pytest.raises(
        ValueError,
        match=r"slot 'z': must have shape \(4, 3\) at 'w/a', got \(2, 3\)",
    ):
        jstep.apply_gradients(
            state.replace(params=other), {**grads_of(), "w": {"a": None, "b": None}}, optimizer
        )
    row = {**state.slots, "row": jax.tree.map(lambda x: x[:1], state.slots["row"])}
    with pytest.raises(
        ValueError,
        match=r"slot 'row': must have shape \(2,\) at 'w/a', got \(1,\)",
    ):
        jstep.apply_gradients(state.replace(slots=row), grads_of(), optimizer)


def test_custom_hyperparameters_are_checked_and_scheduled():
    def sign(rate):
        return jstep.leafwise(
            lambda g, p, slots, h: (-h["rate"] * jnp.sign(g), {}), hyper={"rate": rate}
        )

    for rate in (0.5, np.float32(0.5), jnp.float32(0.5), lambda step: 0.5, jstep.held("rate", 0.5)):
        state = jstep.TrainState.create({"a": jnp.ones(2)}, sign(rate))
        new = jstep.apply_gradients(state, {"a": jnp.array([3.0, -3.0])}, sign(rate))
        np.testing.assert_allclose(new.params["a"], [0.5, 1.5])
    with pytest.raises(TypeError, match="rate='x'"):
        sign("x")


# `from_direction`, and the one form of rules: values by attribute and by name.


def _average(g, p, s, h):
    m = h.beta1 * s.m + (1 - h.beta1) * g
    return jnp.sign(m), {"m": m}


@pytest.mark.parametrize(("mask", "w", "b"), [(None, -0.45, -0.45), (["w"], -0.45, -0.5)])
def test_a_plain_weight_decay_applies_to_the_leaves_of_the_mask(mask, w, b):
    hyper = {"learning_rate": jstep.held("learning_rate", 0.5), "beta1": 0.5, "weight_decay": 0.1}
    optimizer = jstep.from_direction("new", _average, {"m": 0.0}, hyper, weight_decay_mask=mask)
    assert repr(optimizer).startswith("from_direction('new', _average, {'m': 0.0}, {")
    state = jstep.TrainState.create({"w": -1.0, "b": -1.0, "n": 3}, optimizer)
    state = jstep.apply_gradients(
        state, {"w": jnp.float32(-2.0), "b": jnp.float32(-2.0), "n": None}, optimizer
    )
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-6)
    np.testing.assert_allclose(state.params["b"], b, rtol=1e-6)
    assert jstep.get_slot_names(state) == ["m"]


RULES = {
    "attributes": lambda g, p, s, h: (-h.rate * (s.m + g), {"m": s.m + g}),
    "items": lambda g, p, s, h: (-h["rate"] * (s["m"] + g), {"m": s["m"] + g}),
    "changed": lambda g, p, s, h: (s.update(m=s.m + g), (-h.rate * s.m, s))[1],
    "tree": lambda g, p, s, h: (-h.rate * (s.m + g), jax.tree.map(lambda x: x + g, s)),
    "jit": lambda g, p, s, h: jax.jit(lambda s: (-0.5 * (s["m"] + g), {"m": s.m + g}))(s),
}


@pytest.mark.thorough(
    except_for=["attributes-True", "items-False", "changed-False", "tree-False", "jit-False"]
)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_values_are_attributes_and_those_of_a_dict(name, sparse):
    optimizer = jstep.leafwise(RULES[name], hyper={"rate": 0.5}, slots={"m": 1.0}, finished=True)
    state = jstep.TrainState.create({"w": jnp.zeros((2, 3))}, optimizer)
    gradient = jnp.full((2, 3), 2.0)
    given = jstep.IndexedSlices(gradient[:1], jnp.array([1]), (2, 3)) if sparse else gradient
    step = jax.jit(lambda state, g: jstep.apply_gradients(state, {"w": g}, optimizer))
    new = step(step(state, given), given)
    np.testing.assert_array_equal(new.params["w"][1], np.full(3, -4.0))  # −0.5·3 − 0.5·5
    np.testing.assert_array_equal(new.slots["m"]["w"][1], np.full(3, 5.0))
    assert type(new.slots) is dict


@pytest.mark.parametrize("argument", ["prepare", "conclude"])
def test_static_values_are_passed_to_the_rule_and_others_are_rejected_by_name(argument):
    seen = []

    def rule(g, p, s, h):
        seen.append((h.sizes, h.name))
        return -0.1 * g * h.k, {}

    def updated(k):
        returned = {argument: lambda h: {"k": k, "sizes": 3, "name": "power"}}
        optimizer = jstep.leafwise(rule, hyper={}, **returned)
        state = jstep.TrainState.create({"w": 1.0}, optimizer)
        return float(jstep.apply_gradients(state, {"w": jnp.float32(1)}, optimizer).params["w"])

    for k in (3, 3.0, jnp.float32(3)):
        assert updated(k) == pytest.approx(0.7)
    assert set(seen) == {(3, "power")}
    with pytest.raises(TypeError, match=f"{argument}: must return .* got a list for 'k'"):
        updated([3.0])

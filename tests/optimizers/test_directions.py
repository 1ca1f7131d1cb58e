"""`from_direction`, its errors, and the one form of rules: values by attribute and by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep


def _average(g, p, s, h):
    m = h.beta1 * s.m + (1 - h.beta1) * g
    return jnp.sign(m), {"m": m}


@pytest.mark.parametrize(("mask", "w", "b"), [(None, -0.45, -0.45), (["w"], -0.45, -0.5)])
def test_a_plain_weight_decay_applies_to_the_leaves_of_the_mask(mask, w, b):
    hyper = {"learning_rate": jstep.held("learning_rate", 0.5), "beta1": 0.5, "weight_decay": 0.1}
    optimizer = jstep.from_direction("new", _average, {"m": 0.0}, hyper, weight_decay_mask=mask)
    assert repr(optimizer).startswith("from_direction('new', _average, {'m': 0.0}, {")
    state = jstep.TrainState.create({"w": -1.0, "b": -1.0, "n": 3}, optimizer)
    state = jstep.apply_gradients(state, {"w": jnp.float32(-2.0), "b": jnp.float32(-2.0), "n": None}, optimizer)
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


@pytest.mark.thorough(except_for=["attributes-True", "items-False", "changed-False", "tree-False", "jit-False"])
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

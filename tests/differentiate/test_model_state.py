"""The kinds of numbers in model_state, and its integers and bools under lanes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.core.jaxprs import body_of
from jstep.differentiate.lanes import Lanes, trace_on_lanes
from jstep.differentiate.reproducible import _way, evaluate_reproducibly

X = jnp.arange(32.0).reshape(16, 2) / 32
LABELS = jnp.arange(16) % 3
SGD = jstep.sgd(0.1)


def run(change, old, steps=2, **options):
    """Return the model_state after steps whose loss changes one leaf by `change(old, x, labels,
    rng)`."""

    def loss(params, state, x, labels, rng=None):
        return jnp.mean((x @ params["w"]) ** 2), {
            "a": {"leaf": change(state["a"]["leaf"], x, labels, rng)}
        }

    step = jstep.minimize(loss, SGD, has_model_state=True, **options)
    state = jstep.TrainState.create({"w": jnp.ones(2)}, SGD, model_state={"a": {"leaf": old}})
    for _ in range(steps):
        state, _ = step(state, X, LABELS)
    return state.model_state["a"]["leaf"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (jnp.float32(0.0), jnp.int32(3), 3.0),
        (jnp.int32(0), jnp.array(True), 1),
        (jnp.int8(0), jnp.int32(3), 3),
        (jnp.bfloat16(0.0), jnp.float32(1.5), 1.5),
        (jnp.array(False), jnp.array(True), True),
    ],
)
def test_a_kind_that_the_state_can_hold_is_converted(old, new, expected):
    found = run(lambda *_: new, old)
    assert (found.dtype, found) == (old.dtype, expected)


def classes(labels):
    return jnp.zeros(3, jnp.int32).at[labels].add(1)


ALIKE = {
    "steps": (lambda old, x, labels, rng: old + 1, jnp.int32(3)),
    "ring": (lambda old, x, labels, rng: (old + 1) % 3, jnp.int32(2)),
    "constant": (lambda old, x, labels, rng: jnp.arange(3), jnp.zeros(3, jnp.int32)),
    "unchanged": (lambda old, x, labels, rng: old, jnp.int32(3)),
    "flag": (lambda old, x, labels, rng: ~old, jnp.array(False)),
    "raw_key": (
        lambda old, x, labels, rng: jax.random.key_data(
            jax.random.split(jax.random.wrap_key_data(old))[0]
        ),
        jnp.arange(2, dtype=jnp.uint32),
    ),
    "steps_in_a_loop": (
        lambda old, x, labels, rng: jax.lax.scan(lambda c, row: (c, row), old, x)[0] + 1,
        jnp.int32(3),
    ),
    "steps_beside_rows_in_a_call": (
        lambda old, x, labels, rng: jax.jit(lambda a, b: (a + 1, b))(old, x)[0],
        jnp.int32(3),
    ),
}
OF_A_LANE = {
    "counts": (lambda old, x, labels, rng: old + classes(labels), jnp.zeros(3, jnp.int32)),
    "number_of_rows": (lambda old, x, labels, rng: old + x.shape[0], jnp.int32(5)),
    "chosen_by_rows": (
        lambda old, x, labels, rng: jax.lax.cond(x[0, 0] > 1, lambda s: s, lambda s: s + s, old),
        jnp.int32(3),
    ),
    "while_by_rows": (
        lambda old, x, labels, rng: jax.lax.while_loop(
            lambda s: s < labels[0], lambda s: s + s, old
        ),
        jnp.int32(3),
    ),
    "key": (lambda old, x, labels, rng: old + jax.random.randint(rng, (), 0, 100), jnp.int32(0)),
    "bool": (lambda old, x, labels, rng: old | (x.max() > 0.5), jnp.array(False)),
}
OPTIONS = {
    "lanes": {"lanes": 4},
    "microbatches": {"lanes": 4, "num_microbatches": 2},
    "max_rows": {"lanes": 2, "max_rows_per_device": 4},
    "sharpness": {"lanes": 2, "sharpness": 0.1},
}


@pytest.mark.thorough(except_for=["lanes-steps_in_a_loop", "max_rows-steps"])
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("options", OPTIONS)
def test_integers_that_no_lane_changes_alone_are_those_of_one_lane(options, name):
    change, old = ALIKE[name]
    parts = {"num_microbatches": 2} if options in ("microbatches", "max_rows") else {}
    np.testing.assert_array_equal(run(change, old, **OPTIONS[options]), run(change, old, **parts))


@pytest.mark.thorough(
    except_for=["lanes-counts", "lanes-number_of_rows", "lanes-key", "microbatches-number_of_rows"]
)
@pytest.mark.parametrize("name", OF_A_LANE)
@pytest.mark.parametrize("options", OPTIONS)
def test_integers_that_depend_on_a_lane_are_refused(options, name):
    change, old = OF_A_LANE[name]
    key = {"rng": jax.random.key(1)} if name == "key" else {}
    with pytest.raises(
        TypeError,
        match=r"lanes=\d: the leaf 'a/leaf' of model_state must not depend on the rows",
    ):
        run(change, old, **OPTIONS[options], **key)


@pytest.mark.thorough
def test_what_all_lanes_compute_alike_is_what_the_function_computes():
    """Programs of conditions and loops are computed in the same way as the others."""

    def fn(x, n):
        most = n.astype(jnp.float32)

        def turn(carry):
            i, y = carry
            return i + 1, y / jnp.sum(y) * most + 1

        return {
            "cond": jax.lax.cond(n > 1, lambda y: y / jnp.sum(y), lambda y: y * jnp.sum(y), x),
            "while": jax.lax.while_loop(
                lambda carry: jnp.sum(carry[1]) * carry[0].astype(jnp.float32) < most * 40,
                turn,
                (1, x),
            ),
            "nothing": jnp.zeros(3),
            "norm": jax.jit(lambda y: jnp.sqrt(jnp.sum(y**2)))(x) * 2.0,
            "given": n,
        }

    x = jnp.arange(6.0) + 1
    for n in (jnp.int32(1), jnp.int32(2)):
        found, expected = evaluate_reproducibly(Lanes(2), fn, x, n), jax.jit(fn)(x, n)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, strict=True), found, expected
        )


def test_which_operations_every_device_computes_on_its_parts():
    """The others would have other bits on another number of devices."""

    def fn(x, y, n):
        return [
            x + 1.0,
            jnp.sum(x),
            jnp.sum(y),
            jax.lax.cond(n > 1, lambda v: v * 2, lambda v: v, x),
            jax.lax.cond(n > 1, lambda v: v / jnp.sum(v), lambda v: v, x),
            jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, n),
            jnp.argmax(x) + n,
            x @ x,
            jax.jit(lambda v: v * 3)(x),
            jax.jit(jnp.cumsum)(x),
        ]

    program, _ = trace_on_lanes(
        Lanes(4), lambda given: fn(*given), [jnp.arange(8.0), jnp.ones(3), jnp.int32(2)]
    )
    operations = [
        one for one in body_of(program).operations if one.name not in ("gt", "convert_element_type")
    ]
    assert [(one.name, _way(4, one)) for one in operations] == [
        ("add", "shards"),
        ("reduce_sum", "sum"),
        ("reduce_sum", "whole"),
        ("cond", "shards"),
        ("cond", "apart"),
        ("while", "whole"),
        ("argmax", "shards"),
        ("add", "shards"),
        ("dot_general", "whole"),
        ("jit", "shards"),
        ("jit", "apart"),
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OfArrays:
    """A model_state whose class accepts arrays alone."""

    mean: jax.Array

    def __post_init__(self):
        jnp.shape(self.mean)


def test_the_class_of_a_model_state_gets_arrays_alone():
    def loss(params, state, x):
        return jnp.mean((x @ params["w"]) ** 2), OfArrays(0.5 * state.mean + jnp.mean(x))

    step = jstep.minimize(loss, SGD, has_model_state=True, lanes=4)
    state, _ = step(
        jstep.TrainState.create({"w": jnp.ones(2)}, SGD, model_state=OfArrays(jnp.float32(1.0))), X
    )
    np.testing.assert_allclose(state.model_state.mean, 0.5 + np.mean(X), rtol=1e-6)

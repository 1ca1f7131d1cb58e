"""Clipping: equations, properties, low precision, and derivatives at zero norms."""

import json
import re

import golden_clips
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from thorough import examples

import jstep
from jstep.differentiate.microbatches import squared_norm

SHAPES = [(), (1,), (5,), (2, 3)]
numbers = st.floats(-1e6, 1e6, width=32).map(lambda x: 0.0 if abs(x) < 1e-6 else x)
arrays = st.sampled_from(SHAPES).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=numbers)
)
trees = st.tuples(arrays, arrays).map(lambda xy: {"a": xy[0], "none": None, "b": [xy[1]]})
limits = st.floats(1e-3, 1e3)
CLIPS = {
    "norm": lambda t, c: jstep.clip_by_norm(t, c),
    "rows": lambda t, c: jstep.clip_by_norm(t, c, axes=0),
    "average": lambda t, c: jstep.clip_by_average_norm(t, c),
    "global": lambda t, c: jstep.clip_by_global_norm(t, c)[0],
}


def norm(*leaves):
    return float(np.sqrt(sum(np.sum(np.square(leaf.astype(np.float64))) for leaf in leaves)))


def check_structure(before, after):
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype


def check_scaled(before, after, scale):
    np.testing.assert_allclose(
        np.asarray(after, np.float64), before.astype(np.float64) * scale, rtol=3e-6, atol=1e-30
    )


@examples(100)
@given(trees, st.floats(-100, 100), st.floats(0, 100))
def test_clip_by_value(tree, low, width):
    low, high = np.float32(low), np.float32(low + width)
    clipped = jstep.clip_by_value(tree, float(low), float(high))
    check_structure(tree, clipped)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(clipped), strict=True):
        # XLA may flush denormal numbers to zero.
        np.testing.assert_allclose(
            after, np.minimum(np.maximum(before, low), high), rtol=0, atol=1e-37
        )


@examples(100)
@given(trees, limits)
@example({"a": np.zeros(3, np.float32)}, 1.0)
@example({"a": np.array([3.0, 4.0], np.float32)}, 5.0)
def test_clip_by_norm(tree, limit):
    clipped = jstep.clip_by_norm(tree, limit)
    check_structure(tree, clipped)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(clipped), strict=True):
        size = norm(before)
        if size < limit * (1 - 1e-6):
            # Within the limit, values are bitwise unchanged.
            np.testing.assert_array_equal(after, before)
        else:
            check_scaled(before, after, min(1.0, limit / size) if size else 1.0)
            assert norm(np.asarray(after)) <= limit * (1 + 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("axes", [0, 1, -1, (0, 1)])
def test_rows_of_a_table_are_clipped_over_axes(axes):
    rows = jstep.IndexedSlices(
        jnp.array([[3.0, 4.0], [1.0, 0.0], [6.0, 8.0]]), jnp.array([2, 0, 2]), (4, 2)
    )
    clipped = jstep.clip_by_norm({"t": rows}, 2.0, axes=axes)["t"].to_dense()
    np.testing.assert_allclose(
        clipped, jstep.clip_by_norm(rows.to_dense(), 2.0, axes=axes), rtol=1e-6
    )


@examples(100)
@given(trees, st.floats(1e-2, 1e2), st.floats(1e-2, 1e2))
def test_clip_by_global_norm_with_a_known_norm(tree, limit, known):
    clipped, size = jstep.clip_by_global_norm(tree, limit, use_norm=jnp.float32(known))
    assert float(size) == np.float32(known)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(clipped), strict=True):
        check_scaled(before, after, min(1.0, limit / known))


def test_known_values():
    np.testing.assert_allclose(
        jstep.clip_by_norm(np.array([[3.0, 4.0]], np.float32), 4.0), [[2.4, 3.2]], rtol=1e-6
    )
    rows = jstep.clip_by_norm(np.array([[3.0, 4.0], [0.3, 0.4]], np.float32), 1.0, axes=1)
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(
        jstep.clip_by_average_norm(np.array([[-3.0, 0.0, 0.0], [4.0, 0.0, 0.0]], np.float32), 0.8),
        [[-2.88, 0.0, 0.0], [3.84, 0.0, 0.0]],
        rtol=1e-6,
    )  # the example of TensorFlow: the average norm is 5/6
    clipped, size = jstep.clip_by_global_norm(
        [np.array([-3.0], np.float32), None, np.array([4.0], np.float32)], 4.0
    )
    assert float(size) == 5.0
    assert clipped[1] is None
    np.testing.assert_allclose([float(clipped[0][0]), float(clipped[2][0])], [-2.4, 3.2], rtol=1e-6)


# Precision.


@pytest.mark.thorough(except_for=["bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_low_precision_norms_accumulate_in_float32(dtype):
    # In float16 the squares overflow; in bfloat16 a sum of ones stops at 256.
    many, large = jnp.ones(10_000, dtype), jnp.full(4, 30_000, dtype)
    for x, expected in ((many, 100.0), (large, 2 * float(large[0]))):
        size = jstep.global_norm({"x": x})
        assert size.dtype == jnp.float32
        np.testing.assert_allclose(size, expected, rtol=1e-5)
        for clipped in (
            jstep.clip_by_norm(x, 1.0),
            jstep.clip_by_global_norm(x, 1.0)[0],
            jstep.clip_by_average_norm(x, 1.0 / x.size),
        ):
            assert clipped.dtype == dtype
            np.testing.assert_allclose(
                clipped.astype(jnp.float32),
                x.astype(jnp.float32) / expected,
                rtol=float(jnp.finfo(dtype).eps),
            )
    assert jstep.clip_by_value(large, -1.0, 1.0).dtype == dtype


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_float64_leaves_are_accumulated_in_float64():
    tree = {"a": np.array([3.0]), "b": np.array([4.0], np.float32), "tiny": np.array([1e-9])}
    assert jstep.global_norm(tree).dtype == jnp.float64
    clipped, size = jstep.clip_by_global_norm(tree, 1.0)
    np.testing.assert_allclose(size, 5.0, rtol=1e-15)
    np.testing.assert_allclose(clipped["a"], 0.6, rtol=1e-15)
    assert clipped["b"].dtype == jnp.float32


@pytest.mark.thorough
def test_limits_may_be_traced_and_scheduled():
    x = jnp.array([3.0, 4.0])
    for name, clip in CLIPS.items():
        each = jnp.array([1.0, 10.0]) / (2 if name == "average" else 1)
        clipped = jax.vmap(clip, (None, 0))(x, each)
        np.testing.assert_allclose(clipped, [[0.6, 0.8], [3.0, 4.0]], rtol=1e-6)
    np.testing.assert_array_equal(jax.jit(lambda c: jstep.clip_by_value(x, -c, c))(3.5), [3.0, 3.5])


# Clipping in a chain.


def update_of(optimizer, grads, step=0):
    params = jax.tree.map(jnp.zeros_like, grads)
    state = jstep.TrainState.create(params, optimizer, step)
    new = jstep.apply_gradients(state, grads, jstep.chain(optimizer, jstep.gradient_descent(1.0)))
    return jax.tree.map(jnp.negative, new.params)


@pytest.mark.parametrize(
    ("given", "expected", "reported"),
    [
        (
            {"by_value": 2.0},
            ([2.0, 2.0], [-2.0]),
            {"clip_by_value_min": -2.0, "clip_by_value_max": 2.0},
        ),
        (
            {"by_value": (-1.0, 3.5)},
            ([3.0, 3.5], [-1.0]),
            {"clip_by_value_min": -1.0, "clip_by_value_max": 3.5},
        ),
        ({"by_norm": 2.5}, ([1.5, 2.0], [-2.5]), {"clip_by_norm": 2.5}),
        ({"by_average_norm": 1.25}, ([1.5, 2.0], [-1.25]), {"clip_by_average_norm": 1.25}),
        ({"by_global_norm": 6.5}, ([1.5, 2.0], [-6.0]), {"clip_by_global_norm": 6.5}),
        (
            {"by_global_norm": lambda step: jnp.asarray([6.5, 13.0])[step]},
            ([1.5, 2.0], [-6.0]),
            {"clip_by_global_norm": 6.5},
        ),
        (
            {"by_value": (lambda step: -1.0, lambda step: 3.5)},
            ([3.0, 3.5], [-1.0]),
            {"clip_by_value_min": -1.0, "clip_by_value_max": 3.5},
        ),
    ],
)
def test_clip_gradients(given, expected, reported):
    optimizer = jstep.clip_gradients(**given)
    found = update_of(optimizer, {"a": jnp.array([3.0, 4.0]), "b": jnp.array([-12.0])})
    np.testing.assert_allclose(found["a"], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found["b"], expected[1], rtol=1e-6)
    assert optimizer.init({"a": jnp.zeros(2)}) == {}
    assert {k: float(v) for k, v in optimizer.hyperparameters(0).items()} == reported


def test_scheduled_limits_follow_the_step():
    optimizer = jstep.clip_gradients(by_norm=lambda step: jnp.asarray([5.0, 1.0])[step])
    np.testing.assert_allclose(
        update_of(optimizer, {"a": jnp.array([3.0, 4.0])}, 1)["a"], [0.6, 0.8], rtol=1e-6
    )


# Sparse rows.


@pytest.mark.thorough
@pytest.mark.parametrize(
    "clip",
    [
        lambda x: jstep.clip_by_norm(x, 1.0),
        lambda x: jstep.clip_by_average_norm(x, 0.2),  # over the elements of the table
        lambda x: jstep.clip_by_global_norm(x, 1.0)[0],
        lambda x: jstep.clip_by_value(x, -0.9, 3.5),
    ],
)
def test_repeated_rows_are_added_before_they_are_clipped(clip):
    sparse = jstep.IndexedSlices(jnp.array([[1.0], [2.0], [4.0]]), jnp.array([1, 1, 3]), (5, 1))
    assert float(jstep.global_norm({"t": sparse})) == 5.0
    clipped = clip(sparse)
    assert isinstance(clipped, jstep.IndexedSlices)
    np.testing.assert_allclose(clipped.to_dense(), clip(sparse.to_dense()), rtol=1e-6)


# The programs of clipping: what is compiled for each leaf, what moves between devices, and the bits
# they compute.

OPTIMIZER = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(0.1))


def update(state, grads):
    return jstep.apply_gradients(state, grads, OPTIMIZER)


@pytest.mark.parametrize(
    ("names", "exponents"),
    [
        (["global 1"], [-60, 50]),
        pytest.param(None, golden_clips.EXPONENTS, marks=pytest.mark.thorough),
    ],
    ids=["few", "all"],
)
def test_values_and_norms_have_the_recorded_bits(names, exponents):
    known = json.loads(golden_clips.PATH.read_text())
    found = golden_clips.recorded(names, exponents)
    # Recorded with XLA's default flags; with those of the tests complex numbers near 1e-36 round
    # differently.
    found = {case: bits for case, bits in found.items() if not case.endswith(" mixed global 1e-36")}
    assert len(found) > 12
    assert found == {case: known[case] for case in found}


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(64, 64), (4096,), (512, 300)])
def test_norms_of_bfloat16_have_the_bits_of_the_plain_sum(shape):
    """XLA adds converted numbers in another order behind a product."""
    for seed in range(3):
        x = (1e3 * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)
        plain = jax.jit(lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)))))(x)
        assert jax.jit(lambda x: jstep.clip_by_global_norm({"x": x}, 1.0)[1])(x) == plain


def test_each_leaf_is_squared_and_summed_once():
    params = {
        f"{name}{i}": jnp.ones(shape)
        for name, shape in (("w", (8, 8)), ("b", (8,)))
        for i in range(10)
    }
    state = jstep.TrainState.create(params, OPTIMIZER)
    assert (
        jax.jit(update).lower(state, params).as_text().count("stablehlo.reduce(") <= len(params) + 2
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_leaves_are_not_gathered_and_their_sums_are_added_together(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))

    def moved(count):
        specs = {
            "w": PartitionSpec("data", "model"),
            "v": PartitionSpec("model"),
            "r": PartitionSpec(),
        }
        params = {
            f"{name}{i}": jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, spec))
            for name, spec in specs.items()
            for i in range(count)
        }
        state = jstep.TrainState.create(params, OPTIMIZER)
        program = jax.jit(update).lower(state, params).compile().as_text()
        return sorted(
            re.findall(
                r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(",
                program,
            )
        )

    assert moved(1) == moved(3)
    assert set(moved(3)) == {"all-reduce"}


# Norms that are not finite.


@pytest.mark.thorough(except_for=["nan-global", "inf-rows", "-inf-global"])
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_norms_turn_clipped_leaves_into_nan(name, bad):
    assert np.all(np.isnan(CLIPS[name](jnp.array([1.0, bad]), 1.0)))
    tree = CLIPS[name]({"a": jnp.array([1.0, bad]), "b": jnp.array([0.5])}, 1.0)
    assert np.isnan(tree["b"][0]) == (name == "global")


def test_clipping_with_debug_nans():
    with jax.debug_nans(True):
        for clip in CLIPS.values():
            clip({"a": jnp.array([3.0, 4.0])}, 1.0)


@pytest.mark.parametrize(
    "optimizer", [jstep.skip_nonfinite(jstep.adam(0.1)), OPTIMIZER], ids=["skip", "clip"]
)
def test_norms_do_not_copy_leaves(optimizer):
    if jax.__version_info__ < (0, 10, 2):
        pytest.skip(
            "XLA of JAX before 0.10.2 materializes gradients "
            "that later versions fuse into their consumers"
        )
    params = {name: jax.ShapeDtypeStruct((1 << 18,), jnp.float32) for name in "abcd"}
    state = jax.eval_shape(lambda params: jstep.TrainState.create(params, optimizer), params)
    step = jax.jit(
        lambda state, grads: jstep.apply_gradients(state, grads, optimizer), donate_argnums=0
    )
    assert step.lower(state, params).compile().memory_analysis().temp_size_in_bytes < 1 << 14


def test_the_factor_of_a_loss_is_divided_out_before_squaring():
    """As for the gradient noise scale: float32 does not hold the square of a scaled gradient."""
    gradients, scale = [jnp.array([3e18, 4e18], jnp.float32), None], jnp.float32(1e18)
    assert np.isclose(squared_norm([gradients[0] * 10, None], scale), 2500.0, rtol=1e-5)
    assert np.isclose(squared_norm([gradients[0] / 1e18, None]), 25.0, rtol=1e-5)


# Derivatives of norms and of clipping.

WEIGHTS = np.array([1.0, 2.0, 3.0])
SIZES = [1e-3, 1.0, 1e15]


def _values(size, dtype="float32"):
    x = (jnp.array([1.0, -0.5, 0.25], jnp.float32) * jnp.float32(size)).astype(dtype)
    return x, np.asarray(x, np.float64)


@pytest.mark.thorough(except_for=["eager-float32-large", "jit-bfloat16-one"])
@pytest.mark.parametrize("size", SIZES, ids=["small", "one", "large"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradient_of_the_global_norm(size, dtype, wrap):
    x, exact = _values(size, dtype)
    found = wrap(jax.grad(jstep.global_norm))({"a": x, "b": jnp.zeros(2), "none": None})
    assert found["a"].dtype == dtype
    rtol = 1e-2 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(
        np.asarray(found["a"], np.float64), exact / np.linalg.norm(exact), rtol=rtol
    )
    assert found["b"].tolist() == [0, 0]


@pytest.mark.thorough(except_for=["clipped-large-average", "clipped-large-norm", "within-one-rows"])
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("size", SIZES, ids=["small", "one", "large"])
@pytest.mark.parametrize("part", [0.1, 3.0], ids=["clipped", "within"])
def test_gradients_of_clipping(name, size, part):
    x, exact = _values(size)
    norm = np.linalg.norm(exact) / (3 if name == "average" else 1)
    limit = float(np.float32(norm * min(part, 3e38 / norm)))
    unit, clips = exact / np.linalg.norm(exact), limit < norm
    expected = limit / norm * (WEIGHTS - unit * (unit @ WEIGHTS)) if clips else WEIGHTS
    weights = jnp.asarray(WEIGHTS, jnp.float32)
    by_x, by_limit = jax.jit(jax.grad(lambda x, c: jnp.dot(weights, CLIPS[name](x, c)), (0, 1)))(
        x, jnp.float32(limit)
    )
    np.testing.assert_allclose(by_x, expected, rtol=3e-5)
    np.testing.assert_allclose(by_limit, exact @ WEIGHTS / norm if clips else 0, rtol=1e-4)


def test_derivatives_at_zero():
    zero = jnp.zeros(3)
    assert not jax.jit(jax.grad(jstep.global_norm))(zero).any()
    assert not jax.jit(jax.hessian(jstep.global_norm))(zero).any()
    for clip in CLIPS.values():
        np.testing.assert_array_equal(
            jax.jit(jax.grad(lambda x, clip=clip: clip(x, 1.0).sum()))(zero), jnp.ones(3)
        )


@pytest.mark.thorough
def test_complex_numbers():
    z = jnp.array([3 + 4j])
    np.testing.assert_allclose(
        jax.grad(jstep.global_norm)(z), jax.grad(lambda z: jnp.abs(z).sum())(z), rtol=1e-6
    )
    found = jax.grad(lambda z: jstep.clip_by_norm(z, 1.0).real.sum())(z)
    np.testing.assert_allclose(found, jax.grad(lambda z: (z.real / jnp.abs(z)).sum())(z), rtol=1e-5)


def test_bounds_are_broadcast_against_each_other():
    low, high = jnp.array([0.0, 1.0, 2.0]), jnp.array([[2.5], [3.0]])
    x = jnp.arange(-2.0, 4.0).reshape(2, 3)
    for clip in (jstep.clip_by_value, jax.jit(jstep.clip_by_value)):
        np.testing.assert_array_equal(clip(x, low, high), np.clip(x, low, high))
        with pytest.raises(ValueError, match="broadcast"):
            clip(jnp.ones(3), low, high)
        with pytest.raises(ValueError, match="broadcast"):
            clip(x, low, jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="must be ≤ max"):
        jstep.clip_by_value(x, low, jnp.array([[2.5], [1.5]]))


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("step", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "how", ["by_value", "by_norm", "by_average_norm", "by_global_norm", "adaptive"]
)
def test_a_limit_that_a_schedule_ends_at_0_is_the_same_by_hand_and_compiled(
    how: str, step: int
) -> None:
    clip = jstep.clip_gradients(**{how: jstep.linear(1.0, -0.5, 3)})
    optimizer = jstep.chain(clip, jstep.gradient_descent(1.0))
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer, global_step=step)
    by_hand = jstep.apply_gradients(state, {"w": jnp.full(3, 2.0)}, optimizer)
    compiled, _ = jstep.minimize(lambda params: jnp.sum(2.0 * params["w"]), optimizer)(state)
    np.testing.assert_array_equal(by_hand.params["w"], compiled.params["w"])

"""Elements of a chain, compared with Optax and with results computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from against_optax import GRADS, PARAMS, assert_close, run_jstep, run_optax

import jstep

PAIRS = {
    "adaptive": (jstep.clip_gradients(adaptive=0.1), optax.adaptive_grad_clip(0.1)),
    "centralize": (jstep.centralize_gradients(), optax.centralize()),
    "normalize": (jstep.normalize_gradients(), optax.normalize_by_update_norm()),
    "normalize to": (
        jstep.normalize_gradients(scale=3.0),
        optax.normalize_by_update_norm(scale_factor=3.0),
    ),
}


def with_descent(element):
    return jstep.chain(element, jstep.gradient_descent(1.0))


def after_one(optimizer, params, grads):
    """The parameters after one compiled update."""
    state = jstep.TrainState.create(params, optimizer)
    return jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))(
        state, grads
    ).params


@pytest.mark.thorough(except_for=["adaptive", "centralize"])
@pytest.mark.parametrize("name", PAIRS)
def test_elements_match_optax(name):
    element, transformation = PAIRS[name]
    assert_close(
        run_jstep(with_descent(element)).params,
        run_optax(optax.chain(transformation, optax.sgd(1.0)))[-1],
    )


def test_noise_decays_and_is_a_function_of_the_step():
    key, shape = jax.random.key(3), (20_000,)
    optimizer = with_descent(jstep.add_noise(0.04, 1.0, key))

    def noise_at(step, split=False):
        wrapped = optimizer
        if split:
            wrapped = jstep.partition(
                {"x": optimizer, "y": optimizer}, lambda path, leaf: "x" if path == "a" else "y"
            )
        params = {"a": jnp.zeros(shape), "b": jnp.zeros(shape)}
        state = jstep.TrainState.create(params, wrapped, step)
        return jstep.apply_gradients(state, jax.tree.map(jnp.zeros_like, params), wrapped).params

    first, again, later, partitioned = (
        noise_at(0),
        noise_at(0),
        noise_at(3),
        noise_at(0, split=True),
    )
    np.testing.assert_allclose(np.std(first["a"]), 0.2, rtol=0.03)
    np.testing.assert_allclose(np.std(later["a"]), 0.1, rtol=0.03)
    np.testing.assert_array_equal(first["a"], again["a"])
    # Leaves keep their indices inside a partition.
    np.testing.assert_array_equal(first["b"], partitioned["b"])
    assert abs(np.corrcoef(first["a"], first["b"])[0, 1]) < 0.05
    assert abs(np.corrcoef(first["a"], later["a"])[0, 1]) < 0.05
    folded = jax.random.fold_in(jax.random.fold_in(key, 3), 1)
    np.testing.assert_allclose(later["b"], -0.1 * jax.random.normal(folded, shape), rtol=1e-5)
    for wrong in (0, "key", None, jnp.ones(2)):
        with pytest.raises(TypeError, match="key"):
            jstep.add_noise(0.1, 0.5, wrong)
    with pytest.raises(ValueError, match="one key"):
        jstep.add_noise(0.1, 0.5, jax.random.split(key))


def test_cautious_decay():
    params, grads = {"w": jnp.array([1.0, -1.0, 2.0])}, {"w": jnp.array([1.0, 1.0, 0.0])}
    cautious = jstep.chain(jstep.gradient_descent(0.5), jstep.decay_weights(0.1, cautious=True))
    np.testing.assert_allclose(
        run_jstep(cautious, [grads], params).params["w"], [0.4, -1.5, 2.0], rtol=1e-6
    )


def test_the_first_matching_glob_determines_the_factor():
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    factors = {
        "w": 0.5,
        "[wc]": jstep.linear_warmup(jstep.constant(1.0), 4),
        "b": jstep.held("b", 0.0),
    }
    optimizer = jstep.chain(jstep.gradient_descent(1.0), jstep.scale_updates(factors))
    moved = jax.tree.map(
        lambda a, b: float((a - b).ravel()[0]), PARAMS, run_jstep(optimizer, [grads]).params
    )
    assert moved == pytest.approx({"w": 0.5, "c": 0.25, "b": 0.0, "k": 1.0, "r": 1.0}, rel=1e-5)
    assert set(optimizer.hyperparameters(0)) == {"learning_rate", "scale/w", "scale/[wc]"}
    by_depth = jstep.chain(
        jstep.gradient_descent(1.0), jstep.scale_updates(lambda path, leaf: 0.5**leaf.ndim)
    )
    moved = jax.tree.map(
        lambda a, b: float((a - b).ravel()[0]), PARAMS, run_jstep(by_depth, [grads]).params
    )
    assert moved == pytest.approx(
        {"w": 0.25, "c": 0.125, "b": 0.5, "k": 0.0625, "r": 0.25}, rel=1e-4
    )
    with pytest.raises(ValueError, match=r"factors: 'emb/.' matches no parameter"):
        run_jstep(jstep.scale_updates({"emb/*": 0.5}), [grads])
    for wrong, error in (
        (0.5, TypeError),
        ({"w": -1.0}, ValueError),
        ({"w": "x"}, TypeError),
        ({1: 1.0}, TypeError),
    ):
        with pytest.raises(error, match="factors"):
            jstep.scale_updates(wrong)


def test_cautious_scales_the_agreeing_updates():
    optimizer = jstep.cautious(
        jstep.stateless(lambda updates, params, step: {"w": jnp.array([-1.0, 1.0, -1.0, 0.0])})
    )
    new = run_jstep(
        optimizer, [{"w": jnp.array([2.0, 2.0, -2.0, 2.0])}], {"w": jnp.zeros(4)}
    ).params
    np.testing.assert_allclose(new["w"], [-4.0, 0.0, 0.0, 0.0])


@pytest.mark.thorough
def test_lookahead_matches_optax():
    transformation = optax.lookahead(optax.adam(1e-2), 2, 0.3)
    optimizer = jstep.lookahead(jstep.from_optax(optax.adam(1e-2)), 2, 0.3)
    with jax.numpy_dtype_promotion("standard"):
        params = optax.LookaheadParams.init_synced(PARAMS)
        opt_state = transformation.init(params)
        for g in GRADS:
            updates, opt_state = transformation.update(g, opt_state, params)
            params = optax.apply_updates(params, updates)
    state = run_jstep(optimizer)
    assert_close(state.params, params.fast)
    assert_close(jstep.slow_params(state), params.slow)


SLICES = jstep.IndexedSlices(
    jnp.array([[3.0, 0.0], [1.0, 4.0], [5.0, 0.0]]), jnp.array([2, 0, 2]), (4, 2)
)
"""Of which row 2 is named twice."""
TABLE = np.array([[1.0, 4.0], [0.0, 0.0], [8.0, 0.0], [0.0, 0.0]], np.float32)


@pytest.mark.thorough(except_for=["slices-True", "dense-False"])
@pytest.mark.parametrize("per_leaf", [False, True])
@pytest.mark.parametrize("grad", [SLICES, jnp.asarray(TABLE)], ids=["slices", "dense"])
def test_gradients_are_normalized_by_their_sums(grad, per_leaf):
    """Slices that name a row twice have the norm of the table; leaves are normalized together or
    each by itself."""
    optimizer = with_descent(jstep.normalize_gradients(2.0, per_leaf=per_leaf))
    new = after_one(
        optimizer, {"t": jnp.zeros((4, 2)), "w": jnp.zeros(1)}, {"t": grad, "w": jnp.array([2.0])}
    )
    of_table, of_other = (9.0, 2.0) if per_leaf else (np.sqrt(85.0),) * 2
    np.testing.assert_allclose(new["t"], -2 * TABLE / of_table, rtol=1e-5)
    np.testing.assert_allclose(new["w"], [-4 / of_other], rtol=1e-5)


@pytest.mark.parametrize("grad", [SLICES, jnp.asarray(TABLE)], ids=["slices", "dense"])
def test_the_trust_ratio_is_that_of_a_leaf_and_its_update(grad):
    optimizer = with_descent(jstep.scale_by_trust_ratio())
    params = {"n": jnp.int32(1), "t": jnp.full((4, 2), 2.0), "z": jnp.zeros(1, jnp.bfloat16)}
    new = after_one(optimizer, params, {"n": None, "t": grad, "z": jnp.array([3.0])})
    np.testing.assert_allclose(new["t"], 2 - TABLE * np.sqrt(32.0) / 9, rtol=1e-6)
    assert (float(new["z"][0]), new["z"].dtype, int(new["n"])) == (-3, jnp.bfloat16, 1)
    with pytest.raises(ValueError, match="has shape"):
        optimizer.update({"n": None, "t": jnp.ones(3), "z": None}, {}, params, 0)


@pytest.mark.thorough(except_for=["lars"])
@pytest.mark.parametrize(
    "optimizer",
    [with_descent(jstep.scale_by_trust_ratio()), jstep.lars(1.0), jstep.lamb(1.0, 0.0, 0.0)],
    ids=["scale_by_trust_ratio", "lars", "lamb"],
)
def test_the_trust_ratio_is_1_where_a_norm_is_0(optimizer):
    """So that a bias that begins at 0 is trained at the learning rate itself."""
    params = {"zero": jnp.zeros(2), "one": jnp.array([0.0, 1.0])}
    new = after_one(optimizer, params, {"zero": jnp.array([1.0, -1.0]), "one": jnp.zeros(2)})
    np.testing.assert_allclose(new["zero"], [-1, 1], rtol=1e-5)
    np.testing.assert_allclose(new["one"], [0, 1])


# Adaptive clipping by its equation at its borders: the least norms of a parameter and of a
# gradient.


@pytest.mark.parametrize(
    ("ratio", "of_p", "of_g", "expected"),
    [
        (0.01, 1.0, 0.01, 0.01),  # at the limit
        (0.01, 1.0, 0.1, 0.01),
        (0.01, 1e-4, 0.1, 1e-5),  # a parameter counts as 0.001 at least
        (0.01, 0.0, 1e-5, 1e-5),
        (1e-4, 0.0, 5e-7, 5e-8),  # a gradient as 1e-6 at least: 1e-7 / 1e-6 of it
        (1e-4, 0.0, 0.0, 0.0),
    ],
)
def test_the_norm_of_a_clipped_gradient(ratio, of_p, of_g, expected):
    unit = np.array([0.6, 0.0, 0.8, 0.0], np.float32)
    optimizer = jstep.chain(jstep.clip_gradients(adaptive=ratio), jstep.gradient_descent(1.0))
    params = {"w": jnp.asarray(of_p * unit[::-1].copy())}
    state = jstep.TrainState.create(params, optimizer)
    new = jstep.apply_gradients(state, {"w": jnp.asarray(of_g * unit)}, optimizer)
    moved = np.asarray(params["w"]) - np.asarray(new.params["w"])
    np.testing.assert_allclose(moved, expected * unit, rtol=2e-5 if of_p < 1 else 2e-4, atol=1e-12)

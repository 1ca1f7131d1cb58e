"""`gradients` of any function, and `compute_gradients` of a loss with the options of training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close

import jstep

PARAMS = {
    "encoder": {"kernel": jnp.array([1.0, 2.0]), "bias": jnp.float32(0.5)},
    "decoder": {"kernel": jnp.array([3.0, -1.0]), "bias": jnp.float32(-0.5)},
    "steps": jnp.arange(2),
    "none": None,
}
PATHS = ["decoder/bias", "decoder/kernel", "encoder/bias", "encoder/kernel"]
X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 2)), jnp.float32)


def loss_fn(params, x):
    h = jnp.tanh(x * params["encoder"]["kernel"][None] + params["encoder"]["bias"])
    return jnp.mean((h @ params["decoder"]["kernel"] + params["decoder"]["bias"]) ** 2)


close = functools.partial(assert_close, rtol=2e-5, atol=1e-6)


def leaf(tree, path):
    for key in path.split("/"):
        tree = tree[key]
    return tree


# gradients() and stop_gradient().


def test_gradients_of_scalars_vectors_and_trees():
    np.testing.assert_array_equal(
        jstep.gradients(lambda x: x**2, jnp.array([1.0, 2.0])), [2.0, 4.0]
    )
    found = jstep.gradients(
        lambda xs: {"p": xs["a"] * xs["b"], "q": [3 * xs["a"]]},
        {"a": jnp.array([1.0, 2.0]), "b": jnp.float32(5)},
    )
    np.testing.assert_array_equal(found["a"], [8.0, 8.0])
    assert float(found["b"]) == 3.0
    np.testing.assert_array_equal(
        jax.jit(lambda x: jstep.gradients(jnp.sin, x))(jnp.zeros(2)), [1.0, 1.0]
    )


def test_grad_ys_of_a_tree_with_integers():
    def fn(x):
        return {"n": jnp.argmax(x), "y": x**2}

    x = jnp.array([1.0, 3.0])
    np.testing.assert_array_equal(jstep.gradients(fn, x), [2.0, 6.0])
    np.testing.assert_array_equal(
        jstep.gradients(fn, x, grad_ys={"n": None, "y": np.array([1, 10])}), [2.0, 60.0]
    )
    with pytest.raises(TypeError, match=r"grad_ys: .*'y'"):
        jstep.gradients(fn, x, grad_ys={"n": None, "y": "x"})


def test_gradients_of_integers_are_none():
    found = jstep.gradients(
        lambda xs: xs["a"] * xs["n"].astype(jnp.float32), {"a": 2.0, "n": jnp.int32(3)}
    )
    assert found["n"] is None
    assert float(found["a"]) == 3.0
    # The gradient of an unused input is zero, not None.
    assert float(jstep.gradients(lambda xs: xs["a"] * 2, {"a": 1.0, "b": 1.0})["b"]) == 0.0


def test_stop_gradient():
    assert float(jax.grad(lambda x: x * jstep.stop_gradient(x))(3.0)) == 3.0
    tree = jstep.stop_gradient({"a": jnp.ones(2), "n": None, "i": 3})
    assert tree["n"] is None
    np.testing.assert_array_equal(tree["a"], 1.0)


# compute_gradients().


def test_aux_and_keyword_arguments():
    def with_aux(params, x, *, scale):
        return loss_fn(params, x) * scale, {"count": x.shape[0], "name": jnp.float32(1)}

    (loss, aux), grads = jax.jit(jstep.compute_gradients(with_aux, has_aux=True))(
        PARAMS, X, scale=2.0
    )
    plain, expected = jax.jit(jstep.compute_gradients(loss_fn))(PARAMS, X)
    np.testing.assert_allclose(loss, 2 * plain, rtol=1e-6)
    close(grads, jax.tree.map(lambda g: 2 * g, expected))
    assert int(aux["count"]) == 12


@pytest.mark.parametrize(
    ("var_list", "chosen"),
    [
        (None, PATHS),
        (lambda path, leaf: path.endswith("kernel"), ["decoder/kernel", "encoder/kernel"]),
        (["decoder/*"], ["decoder/bias", "decoder/kernel"]),
        (("decoder/bias", "encoder/k*"), ["decoder/bias", "encoder/kernel"]),
        ("decoder/*", ["decoder/bias", "decoder/kernel"]),
        (
            {
                "encoder": {"kernel": True, "bias": False},
                "decoder": {"kernel": False, "bias": True},
                "steps": False,
                "none": None,
            },
            ["encoder/kernel", "decoder/bias"],
        ),
    ],
)
def test_var_list(var_list, chosen):
    _, grads = jax.jit(jstep.compute_gradients(loss_fn, var_list=var_list))(PARAMS, X)
    _, all_grads = jax.jit(jstep.compute_gradients(loss_fn))(PARAMS, X)
    for path in PATHS:
        if path in chosen:
            np.testing.assert_allclose(leaf(grads, path), leaf(all_grads, path), rtol=1e-6)
        else:
            assert leaf(grads, path) is None


def test_excluded_parameters_are_not_differentiated():
    @jax.custom_vjp
    def undifferentiable(x):
        return x

    def backward(residual, g):
        raise AssertionError("differentiated")

    undifferentiable.defvjp(lambda x: (x, None), backward)

    def loss(params):
        return params["a"] * undifferentiable(params["b"])

    _, grads = jstep.compute_gradients(loss, var_list=["a"])(
        {"a": jnp.float32(2), "b": jnp.float32(3)}
    )
    assert float(grads["a"]) == 3.0
    assert grads["b"] is None


def barriers(gate):
    jaxpr = jax.make_jaxpr(jstep.compute_gradients(loss_fn, gate_gradients=gate))(PARAMS, X)
    return [len(e.invars) for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]


def test_gates_are_optimization_barriers():
    assert barriers(jstep.GATE_NONE) == []
    assert barriers(jstep.GATE_OP) == [1] * len(PATHS)
    assert barriers(jstep.GATE_GRAPH) == [len(PATHS)]


# Microbatches.


@pytest.mark.thorough(except_for=["3-AggregationMethod.ADD_N", "12-AggregationMethod.DEFAULT"])
@pytest.mark.parametrize("method", jstep.AggregationMethod)
@pytest.mark.parametrize("n", [1, 2, 3, 12])
def test_microbatches_match_the_full_batch(n, method):
    full = jax.jit(jstep.compute_gradients(loss_fn))(PARAMS, X)
    accumulated = jax.jit(
        jstep.compute_gradients(loss_fn, num_microbatches=n, aggregation_method=method)
    )(PARAMS, X)
    close(accumulated, full)


def test_a_narrow_integer_of_numpy_is_a_number_of_microbatches():
    narrow = jstep.compute_gradients(loss_fn, num_microbatches=np.uint8(200))(
        PARAMS, jnp.tile(X, (50, 1))
    )
    close(
        narrow, jstep.compute_gradients(loss_fn, num_microbatches=200)(PARAMS, jnp.tile(X, (50, 1)))
    )


@pytest.mark.parametrize("method", jstep.AggregationMethod)
def test_weighted_microbatches(method):
    """A mean over tokens, with different numbers per microbatch; one has none, so that its loss is
    NaN."""
    mask = jnp.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0], jnp.float32)

    def masked(params, x, mask):
        h = x @ params["w"]
        return jnp.sum(mask * h**2) / jnp.sum(mask)

    params = {"w": jnp.array([1.0, -2.0])}
    full = jax.jit(jstep.compute_gradients(masked))(params, X, mask)
    options = {
        "num_microbatches": 4,
        "weight_fn": lambda x, mask: jnp.sum(mask),
        "aggregation_method": method,
    }
    accumulated = jax.jit(jstep.compute_gradients(masked, **options))(params, X, mask)
    close(accumulated, full)


@pytest.mark.parametrize("method", jstep.AggregationMethod)
def test_low_precision_gradients_are_summed_in_float32(method):
    """A bfloat16 sum of ones is stuck at 256, so that the mean of 512 ones would be 0.5."""

    def loss(params, x):
        return jnp.sum(params["w"].astype(jnp.float32) * jnp.mean(x))

    compute = jax.jit(
        jstep.compute_gradients(loss, num_microbatches=512, aggregation_method=method)
    )
    _, grads = compute({"w": jnp.ones(1, jnp.bfloat16)}, jnp.ones(512))
    np.testing.assert_allclose(grads["w"].astype(jnp.float32), [1.0])


@pytest.mark.thorough
def test_add_n_stacks_gradients_and_default_sums_them():
    def scans(method):
        f = jstep.compute_gradients(
            lambda p, x: jnp.mean(x @ p["w"]), num_microbatches=4, aggregation_method=method
        )
        jaxpr = jax.make_jaxpr(f)({"w": jnp.ones((2, 7))}, X)
        (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
        return [v.aval.shape for v in scan.outvars]

    assert (4, 2, 7) in scans(jstep.AggregationMethod.ADD_N)
    assert (4, 2, 7) not in scans(jstep.AggregationMethod.DEFAULT)
    assert (2, 7) in scans(jstep.AggregationMethod.DEFAULT)


# Parameters that the loss does not depend on have no gradient and keep their values and slots.

PARAMS_OF_CONNECTED = {
    "w": jnp.array([1.0, 2.0]),
    "b": jnp.float32(0.5),
    "unused": jnp.ones(3),
    "n": jnp.arange(2),
    "none": None,
}
X_OF_CONNECTED = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2)), jnp.float32)


def loss_fn_of_connected(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def stopped(params, x):
    return loss_fn_of_connected({**params, "b": jax.lax.stop_gradient(params["b"])}, x)


def scanned(params, x):
    """The carry passes `unused` through, so differentiation treats it as used; `b` is not used."""
    (_, total), _ = jax.lax.scan(
        lambda c, row: ((c[0], c[1] + row @ params["w"] + 0 * c[0][0]), None),
        (params["unused"], 0.0),
        x,
    )
    return total


LOSSES = {
    "plain": (loss_fn_of_connected, {"w", "b"}),
    "stop_gradient": (stopped, {"w"}),
    "jit": (jax.jit(loss_fn_of_connected), {"w", "b"}),
    "remat": (jax.checkpoint(stopped), {"w"}),
    "scan": (scanned, {"w", "unused"}),
    "cond": (
        lambda p, x: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sum(p["w"]), lambda: p["b"]),
        {"w", "b"},
    ),
    "integers": (
        lambda p, x: (
            jnp.sum(p["w"] * p["n"].astype(jnp.float32))
            + jnp.argmax(p["unused"]).astype(jnp.float32)
        ),
        {"w"},
    ),
}


def connected(grads):
    return {name for name, grad in grads.items() if grad is not None}


@pytest.mark.thorough(
    except_for=["AggregationMethod.DEFAULT-1-integers", "AggregationMethod.ADD_N-2-stop_gradient"]
)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("method", jstep.AggregationMethod)
def test_gradients_of_connected_parameters(name, n, method):
    loss, want = LOSSES[name]
    compute = jstep.compute_gradients(loss, num_microbatches=n, aggregation_method=method)
    _, grads = jax.jit(compute)(PARAMS_OF_CONNECTED, X_OF_CONNECTED)
    assert connected(grads) == want
    if n == 1:
        _, eager = compute(PARAMS_OF_CONNECTED, X_OF_CONNECTED)
        assert connected(eager) == want
        plain = jax.grad(loss, allow_int=True)(PARAMS_OF_CONNECTED, X_OF_CONNECTED)
        for path in want:
            np.testing.assert_allclose(grads[path], plain[path], rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kwargs", [{}, {"num_microbatches": 2}, {"has_aux": True}, {"has_model_state": True}]
)
def test_unconnected_parameters_and_slots_do_not_change(kwargs):
    optimizer = jstep.adamw(0.1, weight_decay=0.5)

    def loss(params, *args):
        value = stopped(params, args[-1])
        if kwargs.get("has_model_state"):
            return value, {"seen": args[0]["seen"] + 1}
        return (value, {"aux": value}) if kwargs.get("has_aux") else value

    step = jstep.minimize(loss, optimizer, **kwargs)
    model_state = {"seen": jnp.int32(0)} if kwargs.get("has_model_state") else None
    state = jstep.TrainState.create(PARAMS_OF_CONNECTED, optimizer, model_state=model_state)
    state, _ = step(state, X_OF_CONNECTED)
    state, _ = jstep.scan_steps(step)(state, jnp.stack([X_OF_CONNECTED, X_OF_CONNECTED]))
    for path in ("b", "unused"):
        np.testing.assert_array_equal(state.params[path], PARAMS_OF_CONNECTED[path])
        np.testing.assert_array_equal(state.slots["m"][path], 0)
    assert float(state.params["w"][0]) != 1.0
    assert jstep.global_step(state) == 3


@pytest.mark.thorough
def test_under_other_transformations():
    compute = jstep.compute_gradients(stopped)
    batched = jax.vmap(lambda w: compute({**PARAMS_OF_CONNECTED, "w": w}, X_OF_CONNECTED))(
        jnp.ones((3, 2))
    )
    assert connected(batched[1]) == {"w"}
    meta = jax.grad(
        lambda w: jnp.sum(compute({**PARAMS_OF_CONNECTED, "w": w}, X_OF_CONNECTED)[1]["w"] ** 2)
    )(jnp.ones(2))
    assert np.all(np.isfinite(meta))
    hessian = jax.jacfwd(
        lambda w: compute({**PARAMS_OF_CONNECTED, "w": w}, X_OF_CONNECTED)[1]["w"]
    )(jnp.ones(2))
    np.testing.assert_allclose(hessian, 2 * X_OF_CONNECTED.T @ X_OF_CONNECTED / 4, rtol=1e-5)

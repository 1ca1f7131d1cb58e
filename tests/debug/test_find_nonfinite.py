"""`find_nonfinite`: the first operation that produces a NaN or infinity, its line, and its
context."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jstep
from jstep.look.arrays import array_range

X = np.float32([1.0, 0.0, 2.0])


def here(offset=0):
    frame = inspect.currentframe().f_back
    return f"test_find_nonfinite.py:{frame.f_lineno + offset}"


def check(found, primitive, line, where="", name=None):
    assert found is not None
    assert found.primitive == primitive
    assert found.source.startswith(line + " (")
    assert name is None or found.source.endswith(f"({name})")
    assert found.where == where
    assert primitive in str(found)
    assert found.source in str(found)


def test_operation_at_top_level():
    def loss_fn(params, x):
        return jnp.log(params["w"] * x).sum()

    found = jstep.find_nonfinite(loss_fn, {"w": X}, 2.0)
    check(found, "log", here(-3), name="loss_fn")
    assert [str(value) for value in found.inputs] == ["float32[3] from 0 to 4"]
    assert (found.inputs[0].low, found.inputs[0].high) == (0.0, 4.0)
    assert "1 infinite" in str(found.outputs[0])
    assert found.reaches


def test_finite_functions_return_none():
    assert jstep.find_nonfinite(lambda x: jnp.exp(x) / (x + 1), X) is None
    assert jstep.find_nonfinite(lambda i: i + 1, np.arange(3)) is None
    assert jstep.find_nonfinite(lambda: jnp.zeros(3)) is None


def test_jit_remat_and_jax_functions():
    @jax.jit
    def inner(x):
        return jax.checkpoint(lambda x: 1 / x)(x)

    found = jstep.find_nonfinite(inner, X)
    check(found, "div", here(-3), "jit(inner), remat", "<lambda>")
    found = jstep.find_nonfinite(lambda x: (x // 0.0).sum(), X)
    assert found.source.startswith(here(-1))
    assert found.where == "jit(floor_divide)"


def test_line_is_that_of_the_current_caller():
    """JAX's own compiled functions are traced once for all callers."""
    jax.make_jaxpr(lambda x: x % 0.0)(X)
    found = jstep.find_nonfinite(lambda x: x % 0.0, X)
    assert found.source.startswith(here(-1))


def test_line_of_functions_called_only_by_jax():
    found = jstep.find_nonfinite(
        jax.vmap(lambda x: jax.lax.cond(x > 0, jnp.log, jnp.sqrt, x)), X - 2
    )
    check(found, "sqrt", here(-2))


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_iteration_and_cond_branch(reverse):
    def body(carry, t):
        carry = jax.lax.cond(t == 2, lambda c: jnp.log(c - c), lambda c: c, carry)
        return carry, carry

    found = jstep.find_nonfinite(
        lambda x: jax.lax.scan(body, x, jnp.arange(5), reverse=reverse), X + 1
    )
    where = f"scan iteration 2{', backwards' if reverse else ''}, cond branch 1"
    check(found, "log", here(-7), where)
    assert str(found.inputs[0]) == "float32[3] all 0"


def test_while_loop_and_its_condition():
    def step(c):
        return 1 / (3.0 - c) * 0 + c + 1

    found = jstep.find_nonfinite(
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 100, step, x), np.zeros(2, np.float32)
    )
    check(found, "div", here(-5), "while iteration 3", "step")
    found = jstep.find_nonfinite(
        lambda x: jax.lax.while_loop(lambda c: jnp.log(2 - c) > -9, lambda c: c + 1, x),
        np.float32(0),
    )
    check(found, "log", here(-3), "while condition iteration 2")


def test_overflow_by_a_constant_in_a_loop():
    """XLA combines (c · a) · b into one product with a · b."""
    found = jstep.find_nonfinite(
        lambda x: jax.lax.scan(lambda c, _: (c * 3e37, None), x, None, length=2)[0], X
    )
    check(found, "mul", here(-2), "scan iteration 1")


@pytest.mark.thorough
def test_shard_map_inside_a_scan():
    mesh = jax.make_mesh((4,), ("data",))
    root = jax.shard_map(
        jnp.sqrt, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")
    )
    x = jax.device_put(np.float32([9, 9, 9, 1]), jax.NamedSharding(mesh, PartitionSpec("data")))
    found = jstep.find_nonfinite(
        lambda x: jax.lax.scan(lambda c, t: (root(c - t), None), x, jnp.arange(2.0) + 1)[0], x
    )
    check(found, "shard_map", here(-2), "scan iteration 1")
    assert [str(value) for value in found.inputs] == ["float32[4] from -2 to 0.828427"]


def test_custom_derivatives():
    @jax.custom_jvp
    def reciprocal(x):
        return 1 / x

    reciprocal.defjvp(
        lambda primals, tangents: (reciprocal(*primals), -tangents[0] / primals[0] ** 2)
    )

    @jax.custom_vjp
    def root(x):
        return jnp.sqrt(x)

    root.defvjp(lambda x: (root(x), x), lambda x, g: (g / x,))
    check(jstep.find_nonfinite(reciprocal, X), "div", here(-11), "custom_jvp", "reciprocal")
    check(jstep.find_nonfinite(root, X - 1), "sqrt", here(-4), "custom_vjp", "root")
    found = jstep.find_nonfinite(jax.grad(lambda x: root(x).sum()), X)
    assert found.primitive == "div"
    assert found.source.startswith(here(-2))


def test_nan_hidden_by_where_is_reported():
    found = jstep.find_nonfinite(lambda x: jnp.where(x > 0, jnp.log(x), 0.0), X)
    check(found, "log", here(-1))
    assert not found.reaches
    assert "selects other numbers" in str(found)


def make(loss_fn, optimizer, params):
    return jstep.minimize(loss_fn, optimizer), jstep.TrainState.create(params, optimizer)


def norm_loss(params, x):
    y = x @ params["w"]
    return jnp.sqrt(jnp.sum(y * y))


def test_gradient_of_a_step():
    line = f"test_find_nonfinite.py:{inspect.getsourcelines(norm_loss)[1] + 2}"
    step, state = make(norm_loss, jstep.gradient_descent(0.1), {"w": jnp.ones((3, 2))})
    batch = jnp.zeros(3)
    check(jstep.find_nonfinite(step, state, batch), "div", line, name="norm_loss")
    assert jstep.find_nonfinite(step, state, batch + 1) is None
    assert not state.params["w"].is_deleted()
    donated = step(jax.tree.map(jnp.copy, state), batch + 1)[0]
    step(donated, batch)
    with pytest.raises(RuntimeError, match="params/w' was donated to an earlier step"):
        jstep.find_nonfinite(step, donated, batch)
    stacked = jnp.stack([batch + 1, batch])
    check(
        jstep.find_nonfinite(jstep.scan_steps(step), state, stacked),
        "div",
        line,
        "scan iteration 1",
    )
    check(
        jstep.find_nonfinite(lambda state, x: step(state, x), state, batch),
        "div",
        line,
        "jit(train_step)",
    )


def test_python_arguments_are_not_traced():
    @functools.wraps(norm_loss)
    def loss(x, power, flag=True, name=None):
        assert isinstance(power, int)
        assert name is None
        return 1 / x**power if flag else x

    assert jstep.find_nonfinite(loss, X, 2).primitive == "div"
    assert jstep.find_nonfinite(loss, X, 2, False) is None
    assert jstep.find_nonfinite(functools.partial(loss, flag=False), X, 2) is None
    check(jstep.find_nonfinite(lambda x: jnp.log(x * 2), 0.0), "log", here())  # floats are


def test_under_jax_debug_settings():
    with jax.debug_nans(True), jax.disable_jit(), jax.transfer_guard("disallow"):
        assert jstep.find_nonfinite(jnp.log, X).primitive == "log"


def test_sharded_state():
    mesh = jax.make_mesh((8,), ("data",))
    optimizer = jstep.momentum(0.1, 0.9)
    step, state = make(
        lambda p, x: (x @ jnp.sqrt(p["w"])).sum(), optimizer, {"w": jnp.zeros((8, 2))}
    )
    state = jstep.shard_state(state, mesh, jax.sharding.PartitionSpec("data"))
    found = jstep.find_nonfinite(step, state, jstep.shard_batch(np.ones((8, 8), np.float32), mesh))
    assert found.primitive == "div"
    assert found.inputs[-1].shape == (8, 2)


# `find_nonfinite` with nonfinite constants: literals and arrays that a function closes over.

NAN = np.array([0, np.nan, 0], np.float32)
MASK = np.array([0, -np.inf, 0], np.float32)
X_OF_CONSTANTS = jnp.ones(3)


def test_constant_with_a_nan_in_a_step():
    optimizer = jstep.adam(0.1)
    state = jstep.TrainState.create({"a": jnp.ones(3)}, optimizer)

    def loss_fn(params, x):
        return jnp.sum((params["a"] * (x - NAN)) ** 2)

    found = jstep.find_nonfinite(jstep.minimize(loss_fn, optimizer), state, X_OF_CONSTANTS)
    assert found is not None
    assert found.constant is not None
    assert (found.primitive, found.constant.nans, found.constant.shape) == ("sub", 1, (3,))
    assert found.constant.dtype == "float32"
    assert found.reaches
    assert "test_find_nonfinite.py" in found.source
    assert "loss_fn" in found.source
    assert "a constant is not finite: float32[3] all 0, 1 NaN, first read by sub at" in str(found)


@jax.custom_vjp
def _poisoned(x):
    return x


_poisoned.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.float32(np.nan),))


def _while(x):
    return jax.lax.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + 1, jnp.where(s[0] == 3, s[1] * jnp.nan, s[1])), (0, x)
    )[1]


def _with_nan():
    xs = np.ones(6, np.float32)
    xs[4] = np.nan
    return xs


FUNCTIONS = {
    "literal": (lambda x: x * jnp.nan, "mul", ""),
    "scan, carried": (
        lambda x: jax.lax.scan(lambda c, y: ((c[1], c[0] * y), None), (x, x), _with_nan())[0],
        "mul",
        "scan iteration 4",
    ),
    "while": (_while, "mul", "while iteration 3"),
    "custom_vjp": (jax.grad(lambda x: (_poisoned(x) * 2).sum()), "mul", ""),
    "after one that is hidden": (lambda x: jnp.where(x < 9, x, jnp.nan) * NAN, "mul", ""),
    "after a mask": (lambda x: jax.nn.softmax(x + MASK) * NAN, "mul", ""),
}


@pytest.mark.thorough(except_for=["scan, carried"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_constant_is_found_where_it_is_read(name):
    fn, primitive, where = FUNCTIONS[name]
    found = jstep.find_nonfinite(fn, X_OF_CONSTANTS)
    assert found is not None
    assert found.constant is not None
    assert (found.primitive, found.where, found.constant.nans) == (primitive, where, 1)
    assert "test_find_nonfinite.py" in found.source


def test_operation_on_constants_only():
    key = jax.random.key(0)
    found = jstep.find_nonfinite(lambda x: x + jax.random.normal(key, (3,)) / 0, X_OF_CONSTANTS)
    assert found is not None
    assert found.constant is None
    assert (found.primitive, str(found.inputs[1])) == ("div", "float32[] 0")


@pytest.mark.thorough(except_for=["<lambda>0", "<lambda>3"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.softmax(x + MASK),
        lambda x: jnp.maximum(x, -jnp.inf),
        lambda x: (x, MASK),
        lambda x: (x, jnp.full(3, jnp.inf)),
        lambda x: jax.lax.scan(lambda c, y: (jnp.maximum(c, y), c.astype(int)), -jnp.inf, x)[0],
    ],
)
def test_infinite_bounds_and_masks_are_not_reported(fn):
    assert jstep.find_nonfinite(fn, X_OF_CONSTANTS) is None


def test_nan_returned_unchanged():
    found = jstep.find_nonfinite(lambda x: (x, np.float32(np.nan)), X_OF_CONSTANTS)
    assert found is not None
    assert found.constant is not None
    assert str(found) == "a constant is not finite, and is returned unchanged: float32[] 1 NaN"


def test_infinite_hyperparameters_are_not_reported():
    optimizer = jstep.prodigy()  # growth_rate=inf
    state = jstep.TrainState.create({"a": jnp.ones(3)}, optimizer)
    step = jstep.minimize(lambda p, x: jnp.sum((p["a"] * x) ** 2), optimizer)
    assert jstep.find_nonfinite(step, state, X_OF_CONSTANTS) is None


# Ranges of arrays in reports of tools.


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.float16([1, np.nan, np.inf, 3, -np.inf]), "float16[5] from 1 to 3, 1 NaN, 2 infinite"),
        (np.int8([[2, 2]]), "int8[1,2] all 2"),
        (np.float32(0.5), "float32[] 0.5"),
        (np.float32([np.nan]), "float32[1] 1 NaN"),
        (np.zeros((0, 2), np.uint8), "uint8[0,2] empty"),
        (np.complex64([3 + 4j, complex(np.inf, 0)]), "complex64[2] all 5, 1 infinite"),
    ],
)
def test_the_range_of_an_array_as_text(array, text):
    assert str(array_range(array)) == text

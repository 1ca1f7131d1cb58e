"""What every optimizer keeps to, alone and put together: one table, many promises."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_table import EMA, TABLE, Entry

import jstep

each = pytest.mark.parametrize("name", TABLE)


def mixed_params() -> Any:
    """Everything a tree of parameters may hold, from float16 to a PRNG key."""
    return {
        "a": jnp.array([1.0, -2.0, 3.0]),
        "b": {"a": jnp.array([[0.5, 0.25]], jnp.bfloat16), "none": None, "scalar": jnp.float32(2.0)},
        "count": jnp.array([3, 4]),
        "flags": jnp.array([True, False]),
        "half": jnp.array([1.5, -1.5], jnp.float16),
        "key": jax.random.key(3),
    }


def mixed_gradients(scale: float = 0.5) -> Any:
    params = mixed_params()
    return jax.tree.map(lambda p: jnp.full_like(p, scale) if jnp.issubdtype(p.dtype, jnp.floating) else None, params)


def kinds(tree: Any) -> list[tuple[Any, ...]]:
    return [(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(tree)]


def same(a: Any, b: Any) -> bool:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return bool(np.array_equal(a, b))


def of(name: str, rate: Any = None) -> jstep.Optimizer:
    return TABLE[name].make(TABLE[name].rate if rate is None else rate)


@each
def test_slots_have_the_contracts_names_and_initial_values(name: str) -> None:
    entry, params = TABLE[name], mixed_params()
    state = jstep.TrainState.create(params, of(name), 7)
    assert tuple(jstep.get_slot_names(state)) == entry.slots
    assert sorted(set(state.slots) - set(entry.slots)) == sorted(entry.scalars)
    for scalar in entry.scalars:
        assert state.slots[scalar].shape == ()
        assert state.slots[scalar].dtype == jnp.int32
        assert int(state.slots[scalar]) == 7
    for slot, initial in entry.initial.items():
        floats = {"a", "b/a", "b/scalar", "half"}
        seen = set()
        for path in ("a", "b/a", "b/scalar", "half", "count", "flags", "key", "b/none"):
            leaf = jstep.get_slot(state, slot, path)
            if path not in floats:
                assert leaf is None
                continue
            if leaf is None:  # another label's
                assert "/" in slot
                continue
            seen.add(path)
            param = functools.reduce(lambda t, k: t[k], path.split("/"), params)
            assert leaf.dtype == jnp.float32
            np.testing.assert_array_equal(
                leaf, param.astype(jnp.float32) if initial is None else np.full(param.shape, np.float32(initial))
            )
        assert seen == (floats if "/" not in slot or slot.startswith("fast") else seen)
        assert seen
        # The tree of a slot has the containers of params.
        is_leaf = lambda x: x is None or isinstance(x, jax.Array)  # noqa: E731
        assert jax.tree.structure(state.slots[slot], is_leaf=is_leaf) == jax.tree.structure(params, is_leaf=is_leaf)


@each
def test_structure_dtype_and_untrained_leaves_are_kept(name: str) -> None:
    optimizer = of(name)
    before = jstep.TrainState.create(mixed_params(), optimizer)
    after = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))(before, mixed_gradients())
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert kinds(before) == kinds(after)
    for path in ("count", "flags", "key"):
        assert same(before.params[path], after.params[path])
    for old, new in ((before.params["a"], after.params["a"]), (before.params["half"], after.params["half"])):
        assert not np.array_equal(old, new)
    assert int(after.global_step) == 1


@each
def test_update_is_pure_and_the_same_compiled_or_not(name: str) -> None:
    optimizer = of(name)
    before = jstep.TrainState.create(mixed_params(), optimizer)
    copy = jax.tree.map(lambda x: x.copy(), before)
    eager = jstep.apply_gradients(before, mixed_gradients(), optimizer)
    compiled = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))(before, mixed_gradients())
    assert jax.tree.all(jax.tree.map(same, before, copy))
    eager, compiled = (s.replace(params=s.params | {"key": None}) for s in (eager, compiled))
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-5)


@each
def test_a_leaf_without_gradient_keeps_value_and_slots(name: str) -> None:
    optimizer = of(name)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
    before = step(jstep.TrainState.create(mixed_params(), optimizer), mixed_gradients())
    grads = mixed_gradients(2.0)
    grads["a"] = grads["b"]["scalar"] = None
    after = step(before, grads)
    for path in ("a", "b/scalar"):
        pick = functools.partial(functools.reduce, lambda t, k: t[k], path.split("/"))
        assert same(pick(before.params), pick(after.params))
        for slot in jstep.get_slot_names(before):
            if slot in (EMA, "average"):  # averages go on averaging the value that stays
                continue
            old, new = jstep.get_slot(before, slot, path), jstep.get_slot(after, slot, path)
            assert (old is None and new is None) or same(old, new)
    assert not same(before.params["half"], after.params["half"])


@each
def test_no_gradient_at_all_is_an_error(name: str) -> None:
    optimizer = of(name)
    state = jstep.TrainState.create({"a": 1.0, "b": 2.0}, optimizer)
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        jstep.apply_gradients(state, {"a": None, "b": None}, optimizer)


@each
def test_hyperparameters_are_named_and_scheduled(name: str) -> None:
    entry = TABLE[name]
    optimizer = of(name, lambda step: 0.5 / (1.0 + jnp.asarray(step).astype(jnp.float32)))
    values = optimizer.hyperparameters(3)
    assert tuple(sorted(values)) == entry.hyper
    for key, value in values.items():
        assert np.shape(value) == ()
        assert np.asarray(value).dtype == np.float32
        if key.rsplit("/", 1)[-1] == "learning_rate":
            assert float(value) == 0.125
    np.testing.assert_array_equal(jax.jit(optimizer.hyperparameters)(3)[entry.hyper[-1]], values[entry.hyper[-1]])


@each
def test_one_compile(name: str, compilations: Any) -> None:
    traces = []

    def loss(params: Any, x: jax.Array) -> jax.Array:
        traces.append(1)
        return jnp.sum((params["a"] * x - params["b"]) ** 2)

    optimizer = of(name, jstep.exponential_decay(0.01, 10, 0.5))
    # Python numbers and NumPy arrays: their weak types must not cost a second compilation.
    state = jstep.TrainState.create({"a": np.ones(2, np.float32), "b": 2.0}, optimizer)
    step = jstep.minimize(loss, optimizer, metrics=("grad_norm", "update_norm", "param_norm"))
    x = jnp.ones(2)
    state, _ = step(state, x)
    with compilations() as seen:
        for _ in range(3):
            state, metrics = step(state, x)
    assert seen == []
    assert len(traces) == 1
    assert int(state.global_step) == 4
    assert all(value.shape == () for value in metrics.values())


def quadratic(params: Any) -> jax.Array:
    a, b = params["a"], params["b"]
    return 0.5 * jnp.sum(jnp.array([1.0, 3.0, 10.0]) * (a - jnp.array([1.0, -2.0, 0.5])) ** 2) + (b - 3.0) ** 2


def rosenbrock(params: Any) -> jax.Array:
    """A curved valley, less steep than Rosenbrock's, with its minimum 0 at (1, 1)."""
    x, y = params["x"], params["y"]
    return (1.0 - x) ** 2 + 5.0 * (y - x * x) ** 2


def trained(entry: Entry, loss: Any, params: Any, steps: int) -> jstep.TrainState:
    optimizer = entry.make(entry.rate)
    step = jstep.minimize(loss, optimizer, jit=False)
    state = jstep.TrainState.create(params, optimizer)
    return jax.jit(lambda s: jax.lax.scan(lambda s, _: step(s), s, length=steps)[0])(state)


@each
def test_converges_on_a_quadratic(name: str) -> None:
    entry = TABLE[name]
    state = trained(entry, quadratic, {"a": jnp.zeros(3), "b": jnp.float32(0)}, entry.steps)
    assert float(quadratic(state.params)) < 1e-3
    assert int(state.global_step) == entry.steps


@each
def test_converges_in_a_curved_valley(name: str) -> None:
    entry = TABLE[name]
    start = {"x": jnp.float32(-0.5), "y": jnp.float32(1.0)}
    state = trained(entry, rosenbrock, start, 2 * entry.steps)
    assert float(rosenbrock(start)) > 4
    assert float(rosenbrock(state.params)) < 1e-2


@each
def test_vmap_over_learning_rates(name: str) -> None:
    params, grads = (
        {"a": jnp.array([1.0, 2.0]), "b": jnp.float32(3)},
        {"a": jnp.array([0.5, -1.0]), "b": jnp.float32(2)},
    )

    def two_updates(rate: Any) -> Any:
        optimizer = of(name, rate)
        state = jstep.TrainState.create(params, optimizer)
        for _ in range(2):
            state = jstep.apply_gradients(state, grads, optimizer)
        return state

    rates = jnp.array([0.01, 0.1, 0.5])
    together = jax.jit(jax.vmap(two_updates))(rates)
    one = jax.jit(two_updates)
    for i, rate in enumerate(rates):
        alone = one(rate)
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-6)


@each
def test_scanned_steps_equal_single_ones(name: str) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((params["a"] @ x - params["b"]) ** 2)

    optimizer = of(name, jstep.inverse_time_decay(0.05, 2, 0.5))
    params = {"a": jnp.arange(3.0), "b": 1.0}
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 4)), jnp.float32)
    step = jstep.minimize(loss, optimizer)
    state = jstep.TrainState.create(params, optimizer)
    losses = []
    for x in xs:
        state, metrics = step(state, x)
        losses.append(metrics)
    scanned, stacked = jstep.scan_steps(step)(jstep.TrainState.create(params, optimizer), xs)
    assert int(scanned.global_step) == 5
    assert jax.tree.structure(scanned) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert stacked.keys() == losses[0].keys()
    for key, value in stacked.items():
        np.testing.assert_allclose(value, [m[key] for m in losses], rtol=2e-5, err_msg=key)


@pytest.mark.usefixtures("x64")
@each
def test_x64_keeps_float64_and_float32_apart(name: str) -> None:
    optimizer = of(name)
    params = {"a": np.array([1.0, 2.0]), "b": np.array([3.0], np.float32)}
    before = jstep.TrainState.create(params, optimizer)
    grads = {"a": np.array([0.1, 0.2]), "b": np.array([0.3], np.float32)}
    after = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))(before, grads)
    assert after.global_step.dtype == jnp.int64
    assert kinds(before) == kinds(after)
    assert after.params["a"].dtype == jnp.float64
    assert after.params["b"].dtype == jnp.float32
    for slot in jstep.get_slot_names(after):
        for path, dtype in (("a", jnp.float64), ("b", jnp.float32)):
            leaf = jstep.get_slot(after, slot, path)
            assert leaf is None or leaf.dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@each
def test_low_precision_params_are_updated_in_float32(name: str, dtype: Any) -> None:
    """One update of a low-precision leaf is the float32 update, rounded once."""
    optimizer = of(name)
    low, grad = jnp.array([1.0, -2.0, 0.375], dtype), jnp.array([0.5, 0.03125, -4.0], dtype)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
    state = step(jstep.TrainState.create({"a": low}, optimizer), {"a": grad})
    wide = step(jstep.TrainState.create({"a": low.astype(jnp.float32)}, optimizer), {"a": grad.astype(jnp.float32)})
    assert state.params["a"].dtype == dtype
    np.testing.assert_allclose(
        state.params["a"].astype(jnp.float32), wide.params["a"], rtol=float(jnp.finfo(dtype).eps)
    )
    for slot in jstep.get_slot_names(state):
        leaf = jstep.get_slot(state, slot, "a")
        if leaf is not None:
            assert leaf.dtype == jnp.float32
            # Averages follow the rounded parameter, all others the gradient alone.
            tolerance = 1e-5 if slot not in (EMA, "average") else float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(leaf, wide.slots[slot]["a"], rtol=tolerance)


@each
def test_gradients_of_another_precision_are_taken(name: str) -> None:
    optimizer = of(name)
    state = jstep.TrainState.create({"a": jnp.ones(2)}, optimizer)
    new = jstep.apply_gradients(state, {"a": jnp.ones(2, jnp.bfloat16)}, optimizer)
    assert kinds(new) == kinds(state)


@each
def test_learning_rate_can_be_differentiated(name: str) -> None:
    def after(rate: jax.Array) -> jax.Array:
        optimizer = of(name, rate)
        state = jstep.TrainState.create({"a": jnp.array([1.0, 2.0])}, optimizer)
        for g in (0.5, 0.25):
            state = jstep.apply_gradients(state, {"a": jnp.array([g, -g])}, optimizer)
        return state.params["a"][0]

    rate, h = 0.1, 1e-2
    slope = jax.jit(jax.grad(after))(jnp.float32(rate))
    one = jax.jit(after)
    numeric = (one(jnp.float32(rate + h)) - one(jnp.float32(rate - h))) / (2 * h)
    np.testing.assert_allclose(slope, numeric, rtol=2e-2, atol=1e-3)


LEAVES, LEAF = 16, (256, 256)
BYTES = LEAVES * 4 * 256 * 256
# skip_nonfinite around a moving average keeps one copy: the average is made from new parameters before it is known
# whether they are kept.
ONE_COPY = ("everything",)


def abstract(optimizer: jstep.Optimizer) -> tuple[Any, Any]:
    params = {f"{i}{'ab'[i % 2]}": jax.ShapeDtypeStruct(LEAF, jnp.float32) for i in range(LEAVES)}
    return jax.eval_shape(lambda p: jstep.TrainState.create(p, optimizer), params), params


def check_memory(lowered: Any, state: Any, temporaries: float) -> None:
    memory = lowered.compile().memory_analysis()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.999 * whole
    assert memory.temp_size_in_bytes <= temporaries * BYTES


def check_update_memory(name: str) -> None:
    optimizer = of(name)
    state, params = abstract(optimizer)
    update = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer), donate_argnums=0)
    check_memory(update.lower(state, params), state, 1.3 if name in ONE_COPY else 0.3)


@pytest.mark.parametrize("name", TABLE)
def test_donated_update_has_no_temporary_of_the_size_of_params(name: str) -> None:
    """Gradients are handed over, so that all that is left is what the update itself needs."""
    check_update_memory(name)


@each
def test_donated_step_holds_the_gradients_and_no_more(name: str) -> None:
    optimizer = of(name)
    state, params = abstract(optimizer)
    step = jstep.minimize(lambda p, xs: sum(jnp.sum(p[k] * xs[k]) for k in p), optimizer)
    check_memory(step.lower(state, params), state, 1.3)

"""`TrainState`, its step counter, and its slots."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep


def create(optimizer=None, **kwargs):
    return jstep.TrainState.create(
        {"dense": {"kernel": jnp.ones((2, 3))}}, optimizer or jstep.adam(), **kwargs
    )


def test_create_copies_params():
    params = {"w": jnp.ones(3), "v": np.ones(3, np.float32)}
    model_state = {"mean": jnp.zeros(3)}
    state = jstep.TrainState.create(params, jstep.momentum(0.1, 0.9), model_state=model_state)
    params["v"][:] = 7  # the caller may reuse its NumPy arrays
    step = jstep.minimize(
        lambda p, m, x: (jnp.sum(p["w"] * p["v"] * x), m),
        jstep.momentum(0.1, 0.9),
        has_model_state=True,
    )
    step(state, jnp.ones(3))
    np.testing.assert_array_equal(params["w"], 1.0)
    np.testing.assert_array_equal(model_state["mean"], 0.0)


def test_copy_false_keeps_arrays():
    params = {"w": jnp.ones(3)}
    assert jstep.TrainState.create(params, jstep.adam(), copy=False).params["w"] is params["w"]


def test_numbers_become_arrays_without_weak_types():
    state = jstep.TrainState.create(
        {"a": 1.0, "b": 2, "c": True, "d": np.float32(3), "e": None}, jstep.adam()
    )
    dtypes = {k: (v.dtype, v.weak_type) for k, v in state.params.items() if v is not None}
    assert dtypes == {
        "a": (jnp.float32, False),
        "b": (jnp.int32, False),
        "c": (jnp.bool_, False),
        "d": (jnp.float32, False),
    }
    assert state.params["e"] is None


def test_slots_by_name_and_path():
    state = create()
    assert jstep.get_slot(state, "m") is state.slots["m"]
    assert jstep.get_slot(state, "m", "dense/kernel") is state.slots["m"]["dense"]["kernel"]
    assert jstep.get_slot(state, "nothing") is None
    assert jstep.get_slot(state, "nothing", "dense/kernel") is None
    assert jstep.get_slot(state, "m", "dense") is None
    assert jstep.get_slot(state, "m", "dense/bias") is None
    lists = jstep.TrainState.create({"layers": [{"w": 1.0}, {"w": 2.0}]}, jstep.adagrad(0.1, 0.5))
    assert float(jstep.get_slot(lists, "accumulator", "layers/1/w")) == 0.5
    bare = jstep.TrainState.create(jnp.ones(2), jstep.adam())
    assert jstep.get_slot_names(bare) == ["m", "v"]
    assert jstep.get_slot(bare, "m", "") is bare.slots["m"]
    same_names = jstep.TrainState.create({"m": 1.0, "w": 2.0}, jstep.momentum(0.1, 0.9))
    # It is not TF's order, the parameter "w" in the slot "m" of Adam.
    assert jstep.get_slot(same_names, "m", "w") is None
    with pytest.raises(ValueError, match=r"use jstep.get_slot\(state, 'momentum', 'm'\)"):
        jstep.get_slot(same_names, "m", "momentum")
    assert jstep.get_slot(bare, "m", "w") is jstep.get_slot(lists, "accumulator", "") is None
    scalar = jstep.TrainState.create(1.0, jstep.adam())
    assert jstep.get_slot_names(scalar) == ["m", "v"]
    assert jstep.get_slot_names(create(jstep.gradient_descent(0.1))) == []


def test_repr_is_a_short_summary():
    slots = "m (24 B), start_step (4 B), v (24 B)"
    assert (
        repr(create(global_step=12))
        == f"TrainState(global_step=12, params: 6 numbers in 1 leaf (24 B), slots: {slots})"
    )
    big = jstep.TrainState.create({"w": jnp.ones((1000, 1000))}, jstep.adam())
    for one in (big, jax.eval_shape(lambda: big)):
        assert "params: 1,000,000 numbers in 1 leaf (3.81 MiB), slots: m (3.81 MiB)" in repr(one)
    assert "1 number in 1 leaf (4 B)" in repr(jstep.TrainState.create(1.0, jstep.adam()))
    # Made by hand, of a number.
    assert "1 number in 1 leaf (0 B)" in repr(jstep.TrainState({"w": 1.0}, {}, None))


def test_repr_survives_tracing_and_donation():
    assert "TrainState" in repr(jax.eval_shape(create))
    seen = []
    jax.jit(lambda s: seen.append(repr(s)))(create())
    assert "TrainState" in seen[0]
    state = create()
    jstep.minimize(lambda p: jnp.sum(p["dense"]["kernel"]), jstep.adam())(state)
    assert "TrainState" in repr(state)
    assert "TrainState" in repr(create().replace(global_step=None))


def test_states_compare_by_value():
    state = jstep.TrainState.create(
        {"w": jnp.array([1.0, jnp.nan]), "key": jax.random.key(0)}, jstep.adam(0.1)
    )
    same = jax.tree.map(jnp.copy, state)
    for other, expected in (
        (state, True),
        (same, True),
        (state.replace(global_step=jnp.int32(1)), False),
        (
            state.replace(global_step=jnp.int64(0) if jax.config.jax_enable_x64 else jnp.int16(0)),
            False,
        ),
        (state.replace(params=None), False),
        (state.replace(params={**state.params, "w": jnp.array([2.0, jnp.nan])}), False),
        (jax.eval_shape(lambda: state), False),
        (3, False),
        (None, False),
    ):
        assert (state == other) is expected
        assert (state != other) is not expected
    assert (jax.eval_shape(lambda: state) == jax.eval_shape(lambda: same)) is True
    with pytest.raises(TypeError, match="unhashable"):
        hash(state)


def test_traced_and_donated_states_cannot_be_compared():
    """A compiled function would keep a constant, and the values of a donated state are unknown."""
    state = jstep.TrainState.create({"w": jnp.ones((2, 3))}, jstep.adam(0.1))
    donated = jax.tree.map(jnp.copy, state)

    def compared(one, other):
        return jnp.asarray([one == other, one != one])

    for transformed in (
        jax.jit(compared),
        jax.vmap(compared, in_axes=(_axes(state), _axes(state))),
    ):
        with pytest.raises(
            TypeError,
            match=r"state == other: must not be traced.*jnp\.array_equal",
        ):
            transformed(state, donated)
    with pytest.raises(TypeError, match="must not be traced"):
        jstep.TrainStep(lambda state, x: (state, {"same": state == state}))(state, 1.0)
    jax.jit(lambda state: state, donate_argnums=0)(donated)
    for one, other in ((state, donated), (donated, state), (donated, donated)):
        with pytest.raises(RuntimeError, match="'params/w' was donated"):
            _ = one == other


def _axes(state):
    return state.replace(params=0, slots=dict.fromkeys(state.slots), global_step=None)


def test_slots_do_not_change_in_place():
    state = create()
    given = {"m": jnp.ones(2)}
    by_hand = jstep.TrainState({"w": jnp.ones(2)}, given, jnp.int32(0))
    other = state.replace(global_step=3)
    for changed in (state.slots, given, dict(state.slots), other.slots):
        changed["new"] = 1.0
    assert not any("new" in one.slots for one in (state, by_hand, other))
    assert type(state.slots) is dict
    assert jax.tree.structure(state.slots) == jax.tree.structure({**state.slots})
    assert jax.tree.map(jnp.copy, state) == state == state.replace(slots={**state.slots})
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.slots = {}


def test_model_state_is_read_and_replaced():
    state = create()
    assert state.model_state is None
    with_some = state.replace(model_state={"seen": 3})
    assert with_some.model_state == {"seen": 3}
    assert with_some.slots["model_state"] == {"seen": 3}
    assert with_some.replace(model_state=None).slots.keys() == state.slots.keys()
    both = with_some.replace(slots={}, model_state={"seen": 4})
    assert both.slots == {"model_state": {"seen": 4}}
    assert dict(with_some.roles) == dict(state.roles)
    with pytest.raises(TypeError, match="model_state: the leaf at 'name' is a str, 'bn'"):
        jstep.TrainState.create({"w": 1.0}, jstep.adam(0.1), model_state={"name": "bn"})
    tensor = types.SimpleNamespace(shape=(2,), dtype="torch.float32")  # of another library
    with pytest.raises(
        TypeError,
        match=r"params: the leaf at 'w' is of type SimpleNamespace, .* not an array",
    ):
        jstep.TrainState.create({"w": tensor}, jstep.adam(0.1))


def test_replaced_model_state_holds_arrays():
    """Numbers become arrays, as in `create`; shapes and shardings stay."""
    optimizer = jstep.gradient_descent(0.1)
    state = jstep.TrainState.create(
        {"w": 1.0}, optimizer, model_state={"seen": 0, "mean": 0.0, "on": False}
    )
    new = state.replace(model_state={"seen": 1, "mean": 2.0, "on": np.True_})
    kinds = {name: (leaf.dtype, leaf.weak_type) for name, leaf in new.model_state.items()}
    assert kinds == {name: (leaf.dtype, leaf.weak_type) for name, leaf in state.model_state.items()}
    assert np.any(np.array(jstep.fingerprint(new)) != np.array(jstep.fingerprint(state)))
    shapes = jax.eval_shape(lambda: state)
    assert shapes.replace(model_state=shapes.model_state).model_state["seen"].dtype == jnp.int32
    with jax.transfer_guard("disallow"):
        assert state.replace(model_state={"seen": 1}).model_state["seen"].dtype == jnp.int32


@pytest.mark.parametrize("how", ["tree", "mesh", "function", "function on a mesh", "numpy"])
def test_an_array_at_two_places_becomes_two_and_says_so(how, caplog):
    scale = np.ones(4, np.float32) if how == "numpy" else jnp.ones(4)
    optimizer = jstep.sgd(0.1)

    def make():
        one = jnp.ones(4) if "function" in how else scale
        return {"a": {"scale": one}, "b": one, "c": jnp.zeros(4), "d": jnp.ones(4)}

    mesh = jax.make_mesh((1,), ("data",)) if "mesh" in how else None
    state = jstep.TrainState.create(make if "function" in how else make(), optimizer, mesh=mesh)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "params: 'a/scale' and 'b' are the same array. The state stores a separate"
    )
    step = jstep.minimize(lambda p: jnp.sum(p["a"]["scale"]), optimizer)
    state, _ = step(state)
    np.testing.assert_allclose(state.params["a"]["scale"], 0.9)
    np.testing.assert_allclose(state.params["b"], 1.0)
    jstep.TrainState.create({"a": 1.0, "b": 1.0, "c": jnp.ones(2), "d": jnp.ones(2)}, optimizer)
    assert len(caplog.records) == 1


# Functions of the global step, for states and for steps, and overflow of the step.

LAST = 2**31 - 1
OPTIMIZER = jstep.gradient_descent(0.1)


def state(step=0):
    return jstep.TrainState.create({"w": 1.0}, OPTIMIZER, step)


@pytest.mark.parametrize("step", [7, np.int64(7), jnp.int32(7), jstep.create_global_step(7)])
def test_functions_accept_a_step(step):
    for get in (jstep.get_global_step, jstep.get_or_create_global_step):
        got = get(step)
        assert int(got) == 7
        assert got.dtype == jnp.int32
    assert jstep.global_step(step) == 7
    later = jstep.increment_global_step(step)
    assert int(later) == 8
    assert later.dtype == jnp.int32
    assert int(jstep.increment_global_step(step, 3)) == 10
    assert int(jax.jit(jstep.increment_global_step)(step)) == 8


def test_states_with_and_without_a_step():
    made = state(4)
    assert jstep.get_global_step(made) is jstep.get_or_create_global_step(made) is made.global_step
    assert type(jstep.global_step(made)) is int
    empty = made.replace(global_step=None)
    assert jstep.get_global_step(empty) is None
    created = jstep.get_or_create_global_step(empty)
    assert (int(created), created.dtype) == (0, jnp.int32)
    for function in (jstep.global_step, jstep.increment_global_step):
        with pytest.raises(ValueError, match=r"no global step: give it one with state\.replace"):
            function(empty)


def test_donated_step_raises():
    old = state()
    jstep.minimize(lambda p: p["w"] ** 2, OPTIMIZER)(old)
    with pytest.raises(RuntimeError, match="donated"):
        jstep.global_step(old)


def test_eager_overflow_raises():
    with pytest.raises(ValueError, match=r"does not fit int32; enable jax_enable_x64"):
        jstep.increment_global_step(jstep.create_global_step(LAST - 1), 2)
    unchanged = jstep.apply_gradients(
        state(LAST), {"w": jnp.float32(1)}, OPTIMIZER, increment_global_step=False
    )
    assert jstep.global_step(unchanged) == LAST


def test_compiled_overflow_saturates():
    step = jstep.minimize(lambda p: p["w"] ** 2, OPTIMIZER)
    current = state(LAST - 1)
    for _ in range(3):
        current, _ = step(current)
        assert jstep.global_step(current) == LAST
    assert int(jax.jit(jstep.increment_global_step)(jnp.int32(LAST), 5)) == LAST
    assert int(jax.jit(jstep.increment_global_step)(jnp.int32(LAST - 9), 5)) == LAST - 4


def test_steps_under_x64(x64):
    current = state(LAST)
    current, _ = jstep.minimize(lambda p: p["w"] ** 2, OPTIMIZER)(current)
    assert jstep.global_step(current) == LAST + 1
    assert jstep.create_global_step(2**40).dtype == jnp.int64
    assert jstep.global_step(jstep.increment_global_step(state(2**40))) == 2**40 + 1


# Copies of parameters in slots, boxed variables, and paths of several leaves.

SHARED_PATH = {"a": {"b": 1.0}, "a/b": 2.0, "c": 3.0}


def test_path_shared_by_two_leaves():
    state = jstep.TrainState.create(SHARED_PATH, jstep.adagrad(0.1))
    with pytest.raises(ValueError, match="get_slot: 2 leaves share the path 'a/b'"):
        jstep.get_slot(state, "accumulator", "a/b")
    assert float(jstep.get_slot(state, "accumulator", "c")) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="var_list: 2 leaves share the path 'a/b'"):
        jstep.compute_gradients(lambda p: p["c"], var_list=["a/b"])(state.params)
    _, grads = jstep.compute_gradients(lambda p: p["c"] + p["a/b"], var_list=["*"])(state.params)
    assert grads["a"]["b"] is None


def test_slots_initialized_with_parameters_are_copies():
    """A buffer can be donated only once."""
    base = jstep.gradient_descent(0.1)
    custom = base._replace(
        init=lambda params, global_step=0: {"start": params, "same": params},
        update=lambda u, slots, p, step: (base.update(u, {}, p, step)[0], slots),
    )
    step = jstep.minimize(lambda p: p["w"] ** 2, custom)
    for copy in (True, False):
        state = jstep.TrainState.create({"w": jnp.float32(1.0)}, custom, copy=copy)
        for _ in range(2):
            state, _ = step(state)
        assert float(state.slots["start"]["w"]) == float(state.slots["same"]["w"]) == 1.0


# Flax NNX, whose variables are boxed arrays.


@pytest.fixture
def nnx():
    return pytest.importorskip("flax.nnx")


def test_boxed_variables(nnx):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(2, 1, rngs=rngs)
            self.norm = nnx.BatchNorm(1, rngs=rngs)

    model = Model(nnx.Rngs(0))
    with pytest.raises(
        TypeError,
        match=r"the variable at 'norm/mean' is an nnx\.BatchStat, which is not trained",
    ):
        jstep.TrainState.create(model, jstep.adam())
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = jstep.momentum(0.1, 0.9)
    state = jstep.TrainState.create(params, optimizer, model_state=rest)
    for path in ("fc/kernel", "fc/kernel/value"):
        assert jstep.get_slot(state, "momentum", path).shape == (2, 1)

    def loss_fn(params, rest, x):
        model = nnx.merge(graphdef, params, rest, copy=True)
        loss = jnp.mean(model.norm(model.fc(x)) ** 2) + jnp.mean(model.fc(x))
        return loss, nnx.split(model, nnx.Param, ...)[2]

    step = jstep.minimize(loss_fn, optimizer, has_model_state=True, var_list=["fc/kernel"])
    new, _ = step(state, jnp.array([[1.0, 2.0], [3.0, 5.0]]))
    assert jstep.get_slot(new, "momentum", "fc/kernel").any()
    assert not jstep.get_slot(new, "momentum", "fc/bias").any()
    assert float(new.slots["model_state"]["norm"]["var"].get_value()[0]) != 1.0

"""`compact`: what is stored, what stays, what keeps its bits, and what it may be combined with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import for_each
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from optimizer_table import TABLE

import jstep
from jstep.optimizers import by_slices
from jstep.state.slots import master_params

SHAPES = {"w": (32, 256), "small": (16, 16), "b": (256,)}
LR = 1e-2


def params(dtype=jnp.bfloat16, shapes=SHAPES):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def gradients(like, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32).astype(p.dtype), like
    )


@functools.lru_cache(maxsize=2)
def step_of(optimizer):
    return jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer, scaled=True))


def after(optimizer, state, count=3, first=0):
    for i in range(first, first + count):
        state = step_of(optimizer)(state, gradients(state.params, i))
    return state


def create(optimizer, dtype=jnp.bfloat16, shapes=SHAPES, **kwargs):
    return jstep.TrainState.create(params(dtype, shapes), optimizer, **kwargs)


def shapes_of(optimizer, dtype=jnp.bfloat16, shapes=SHAPES, steps=0):
    """The shapes of a state, of a new one or after some steps."""
    return jax.eval_shape(lambda: after(optimizer, create(optimizer, dtype, shapes), steps))


def kinds(state):
    """The slots of the leaf `w`: name → dtype and shape."""
    named = {name: tree["w"] for name, tree in state.slots.items() if isinstance(tree, dict)}
    return {name: (str(leaf.dtype), leaf.shape) for name, leaf in named.items() if leaf is not None}


def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def close(one, other, within):
    """Whether updates that were computed from the same gradients are nearly the same."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.max(np.abs(np.float32(a) - np.float32(b))) < within


def test_adamw_takes_seven_bytes_a_parameter_with_its_gradient():
    shapes = {"w": (1024, 1024)}
    optimizer = jstep.compact(jstep.adamw(LR))
    state = shapes_of(optimizer, shapes=shapes)
    assert size((state, state.params)) / 2**20 < 7.07
    assert size(shapes_of(optimizer, jnp.float32, shapes)) / 2**20 < 6.07


def test_what_is_stored():
    state = shapes_of(jstep.compact(jstep.adamw(LR)))
    assert kinds(state) == {
        "m": ("int8", (32, 256)),
        "m/scale": ("float32", (32, 2)),
        "v": ("uint8", (32, 256)),
        "v/scale": ("float32", (32, 2)),
        "remainder": ("int8", (32, 256)),
    }
    assert state.slots["m"]["small"].dtype == state.slots["v"]["b"].dtype == jnp.float32
    assert state.slots["m/scale"]["small"] is None
    assert state.slots["remainder"]["small"].dtype == jnp.int8
    assert jstep.get_slot_names(state) == ["m", "v"]
    m, v = jax.eval_shape(
        lambda state: (jstep.get_slot(state, "m")["w"], jstep.get_slot(state, "v", "w")), state
    )
    assert m.dtype == v.dtype == jnp.float32
    assert "remainder" not in shapes_of(jstep.compact(jstep.adamw(LR)), jnp.float32).slots


def test_undeclared_slots_and_those_of_other_shapes_stay():
    def rule(g, p, slots, h):
        return -g, {name: slot + 1.0 for name, slot in slots.items()}

    slots = {"m": 0.0, "rows": jstep.Slot(shape=lambda path, leaf: leaf.shape[:1], holds="mean")}
    custom = jstep.leafwise(rule, hyper={"learning_rate": 0.1}, slots=slots)
    state = shapes_of(jstep.compact(custom), steps=1)
    assert kinds(state)["m"] == ("float32", (32, 256))
    assert kinds(state)["rows"] == ("float32", (32,))


def test_kept_parameters_have_float32_slots_and_a_remainder():
    optimizer = jstep.compact(jstep.adamw(LR), keep=["w"])
    state = shapes_of(optimizer, shapes={"w": (32, 256), "u": (32, 256)}, steps=1)
    for name, dtype in (("w", jnp.float32), ("u", jnp.int8)):
        assert state.slots["m"][name].dtype == dtype
        assert state.slots["remainder"][name].dtype == jnp.int8
    with pytest.raises(ValueError, match=r"keep.*'nothing'"):
        shapes_of(jstep.compact(jstep.adamw(LR), keep=["nothing"]))


def test_min_size_and_block():
    state = shapes_of(jstep.compact(jstep.adamw(LR), min_size=200, block=32), steps=1)
    assert {name: leaf.shape for name, leaf in state.slots["m/scale"].items()} == {
        "w": (32, 8),
        "small": (16, 1),
        "b": (8,),
    }
    assert (
        shapes_of(jstep.compact(jstep.adamw(LR), min_size=8193)).slots["m"]["w"].dtype
        == jnp.float32
    )


def test_a_bfloat16_parameter_is_its_masters_rounding_half_up():
    optimizer = jstep.compact(jstep.gradient_descent(2**-10))
    state = jstep.TrainState.create({"w": jnp.ones((), jnp.bfloat16)}, optimizer)
    seen = []
    for _ in range(8):
        state = jstep.apply_gradients(state, {"w": jnp.ones((), jnp.bfloat16)}, optimizer)
        seen.append((float(state.params["w"]), int(state.slots["remainder"]["w"])))
    # Masters of 1 − n/1024; numbers below 1 are 1/256 apart, and a remainder counts parts of
    # 1/65536.
    assert [p + r / 65536 for p, r in seen] == [1 - n / 1024 for n in range(1, 9)]
    assert seen[1] == (1 - 1 / 256, 128 - 256) or seen[1][0] == 1.0
    assert seen[3] == (1 - 1 / 256, 0)


@pytest.mark.thorough
def test_codes_keep_their_bits_without_a_gradient():
    optimizer = jstep.compact(jstep.adamw(LR, weight_decay=0.0))
    state = after(optimizer, create(optimizer))
    grads = {**gradients(state.params), "w": None}
    new = jax.jit(lambda state: jstep.apply_gradients(state, grads, optimizer, scaled=True))(state)
    for name in kinds(state):
        assert np.array_equal(new.slots[name]["w"], state.slots[name]["w"]), name
    assert np.array_equal(new.params["w"], state.params["w"])
    assert not np.array_equal(new.slots["m"]["b"], state.slots["m"]["b"])


GUARDS = {
    "around": lambda one: jstep.skip_nonfinite(jstep.compact(one)),
    "inside": lambda one: jstep.compact(jstep.skip_nonfinite(one)),
    "loss-scale-inside": lambda one: jstep.compact(jstep.dynamic_loss_scale(one)),
}


@pytest.mark.thorough(except_for=["around"])
@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_a_guard_leaves_every_code_as_it_was(guard):
    optimizer = guard(jstep.adamw(LR))
    state = after(optimizer, create(optimizer))
    bad = gradients(state.params)
    bad["w"] = bad["w"].at[3, 7].set(jnp.nan)
    new = jax.jit(lambda state: jstep.apply_gradients(state, bad, optimizer, scaled=True))(state)
    for name in kinds(state):
        assert jax.tree.all(jax.tree.map(np.array_equal, new.slots[name], state.slots[name])), name
    assert jax.tree.all(jax.tree.map(np.array_equal, new.params, state.params))
    assert after(optimizer, new, 1, first=7) != new


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rows_that_no_lookup_names_keep_their_bits(dtype):
    optimizer = jstep.compact(
        jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adagrad(0.1))
    )

    def loss(params, rows):
        return jnp.sum(jnp.square(jstep.lookup(params["table"], rows).astype(jnp.float32) - 1))

    start = {"table": params(dtype, {"w": (64, 128)})["w"]}
    state = jstep.TrainState.create(start, optimizer)
    step = jstep.minimize(loss, optimizer, donate=False)
    for rows in ([1, 5, 5], [5, 9, 30], [2, 3, 63]):
        new, _ = step(state, jnp.array(rows))
        others = np.setdiff1d(np.arange(64), rows)
        for name in (
            "accumulator",
            "accumulator/scale",
            *(["remainder"] if dtype == jnp.bfloat16 else []),
        ):
            old, made = np.asarray(state.slots[name]["table"]), np.asarray(new.slots[name]["table"])
            assert np.array_equal(made[others], old[others]), name
            assert not np.array_equal(made[rows], old[rows])
        assert np.array_equal(new.params["table"][others], state.params["table"][others])
        state = new


@pytest.mark.thorough
def test_functions_of_a_state_return_what_they_return_without():
    ema = jstep.ExponentialMovingAverage(0.5)
    for wrap, read in (
        (lambda one: jstep.with_moving_average(one, ema), jstep.averaged_params),
        (lambda one: jstep.lookahead(one, 2), jstep.slow_params),
        (lambda one: jstep.schedule_free_sgd(LR), jstep.schedule_free_params),
    ):
        plain = wrap(jstep.momentum(LR, 0.9))
        compact = jstep.compact(plain)
        for dtype in (jnp.float32, jnp.bfloat16):
            other = jstep.master_weights(plain)
            one = after(compact, create(compact, dtype))
            two = after(other, create(other, dtype))
            found = read(one)
            assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, one.params)
            close(found, read(two), 0.03 if dtype == jnp.bfloat16 else 3e-3)


def test_a_mesh_shards_codes_and_scales_like_their_parameters():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    optimizer, shapes = jstep.compact(jstep.adamw(LR)), jax.eval_shape(params)
    for spec, scales in (
        (P("data"), P("data", None)),
        (P(None, "model"), P(None, "model")),
        (P(None, "data"), P(None, None)),
    ):
        state = jstep.TrainState.create(shapes, optimizer, mesh=mesh, param_specs=[("w", spec)])
        for name in ("m", "v", "remainder"):
            assert state.slots[name]["w"].sharding.is_equivalent_to(state.params["w"].sharding, 2)
        sharding = jax.sharding.NamedSharding(mesh, scales)
        assert state.slots["m/scale"]["w"].sharding.is_equivalent_to(sharding, 2), spec
    split = jstep.TrainState.create(shapes, optimizer, mesh=mesh, slot_axis="data")
    # w is split along its last axis.
    assert split.slots["m/scale"]["w"].sharding.shard_shape((32, 2)) == (32, 2)
    assert split.slots["m"]["w"].sharding.shard_shape((32, 256)) == (32, 64)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["rows", "columns", "both", "zero1", "explicit", "host"])
@pytest.mark.parametrize("devices", [4, 8])
def test_the_bits_are_the_same_in_every_layout(layout, devices, request):
    if layout == "host":
        request.getfixturevalue("host_memory")
    ema = jstep.ExponentialMovingAverage(0.9)
    optimizer = jstep.compact(jstep.with_moving_average(jstep.ademamix(LR), ema))
    shapes = {"w": (32, 1024), "b": (256,)}
    types = jax.sharding.AxisType.Explicit if layout == "explicit" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((devices // 2, 2), ("data", "model"), axis_types=(types,) * 2)
    spec = {"columns": P(None, "data"), "both": P("data", "model"), "zero1": P()}.get(
        layout, P("data")
    )
    placed = {"slot_axis": "data"} if layout == "zero1" else {"param_specs": [("w", spec)]}
    placed |= {"slots_memory": "pinned_host"} if layout == "host" else {}

    def run(state):
        step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
        for i in range(3):
            grads = gradients(params(shapes=shapes), i)
            if state.params["w"].sharding.num_devices > 1:
                grads = jax.tree.map(
                    lambda g, p: jax.device_put(g, p.sharding), grads, state.params
                )
            state = step(state, grads)
        return jax.device_get(jax.tree.map(lambda x: x, state))

    alone = run(create(optimizer, shapes=shapes))
    split = run(create(optimizer, shapes=shapes, mesh=mesh, **placed))
    for name in alone.slots:
        same = jax.tree.map(np.array_equal, alone.slots[name], split.slots[name])
        assert jax.tree.all(same), name
    assert jax.tree.all(jax.tree.map(np.array_equal, alone.params, split.params))


# Every optimizer of the table in `compact`: nearly the same updates, and the same bits after a
# restart.

REFUSED = {"master_weights": "master_weights", "stochastic_rounding": "stochastic_rounding"}
ENTRIES = sorted(set(TABLE) - set(REFUSED))
NOT_COMPARED = {"soap"}
"""Optimizers whose first updates depend on a basis that rounding turns."""
SHAPES_OF_ENTRIES = {"a": (64, 128), "b": (128,)}


@for_each(ENTRIES, ["adam"])
def test_updates_are_nearly_those_of_float32_and_resume(name, tmp_path):
    optimizer = TABLE[name].make(1e-3)
    compact = jstep.compact(optimizer)
    fresh = create(compact, shapes=SHAPES_OF_ENTRIES)
    half = after(compact, fresh, 2)
    with jstep.Saver(tmp_path) as saver:
        saver.save(half)
        restored = saver.restore(fresh)
    state = after(compact, half, 2, first=2)
    assert after(compact, restored, 2, first=2) == state
    assert jstep.get_slot_names(state) == jstep.get_slot_names(
        create(optimizer, shapes=SHAPES_OF_ENTRIES)
    )
    if name not in NOT_COMPARED:
        before = params(jnp.float32, SHAPES_OF_ENTRIES)
        found, exact = (
            after(one, create(one, jnp.float32, SHAPES_OF_ENTRIES), 4).params
            for one in (compact, optimizer)
        )
        for key in before:
            way = np.mean(np.abs(exact[key] - before[key]))
            assert np.mean(np.abs(found[key] - exact[key])) <= 0.05 * way + 1e-7, key


# The loops in which TPUs update what `compact` stores make the values of the update by whole
# leaves.

EMA = jstep.ExponentialMovingAverage(0.9)
SHAPES_IN_SLICES = {
    "w": (64, 512),
    "layers": (4, 64, 3, 128),
    "row": (8192,),
    "odd": (96, 100),
    "b": (128,),
}


def labels(path, leaf):
    return "b" if path == "w" else "a"


INNER = {
    "adamw": jstep.adamw(LR),
    "clip": jstep.chain(
        jstep.clip_gradients(by_global_norm=1.0), jstep.with_moving_average(jstep.ademamix(LR), EMA)
    ),
    "adan": jstep.adan(LR),  # a slot of float32
    "prodigy": jstep.prodigy(),  # a slot that is only read, and sums over all leaves
    "lamb": jstep.lamb(LR),  # norms of leaves
    "labels": jstep.partition({"a": jstep.adamw(LR), "b": jstep.muon(LR)}, labels),
    "guard": jstep.skip_nonfinite(jstep.adamw(LR)),
    "projection": jstep.with_projection(
        jstep.lion(LR), lambda p: jax.tree.map(lambda x: jnp.clip(x, -1, 1), p)
    ),
}
OPTIMIZERS = {name: jstep.compact(inner) for name, inner in INNER.items()}
OPTIMIZERS["keep"] = jstep.compact(jstep.adamw(LR), keep=["w"])


@pytest.fixture
def in_slices(monkeypatch):
    """Compile for the CPU what is meant for TPUs, with small slices."""
    monkeypatch.setattr(by_slices, "LARGE", 4096)
    monkeypatch.setattr(by_slices, "SLICE", 8192)
    used = []

    def only_tpu(*args, tpu=None, default=None, **others):
        used.append(tpu)
        return (tpu or default)(*args)

    def use():
        monkeypatch.setattr(jax.lax, "platform_dependent", only_tpu)
        return used

    return use


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_make_the_same_values(name, dtype, in_slices):
    def trained():
        step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
        state = create(optimizer, dtype, SHAPES_IN_SLICES)
        for i in range(3):
            grads = gradients(state.params, i)
            state = step(state, {**grads, "b": None, "odd": None} if i == 1 else grads)
        return state

    # Muon's products of matrices amplify what differs, and the last bit of a norm differs for all
    # values.
    most = {"labels": 0.02, "clip": 0.005}.get(name, 0.002)
    optimizer = OPTIMIZERS[name]
    whole = trained()
    used = in_slices()
    sliced = trained()
    assert any(used)
    assert jax.tree.structure(sliced) == jax.tree.structure(whole)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(sliced), jax.tree.leaves(whole), strict=True
    ):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        # Kernels may differ in the last bits of a value, and so in a code that is at the border of
        # two.
        is_float = one.dtype == jnp.float32
        close = np.isclose(one, other, rtol=1e-6, atol=0) if is_float else np.asarray(one == other)
        if one.ndim:
            assert np.mean(~close) < (0.01 if is_float else most), jax.tree_util.keystr(path)
    for one, other in zip(
        jax.tree.leaves(values(sliced)), jax.tree.leaves(values(whole)), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=0.02 * np.max(np.abs(other)), rtol=1e-2)


def values(state):
    return master_params(state), {
        name: jstep.get_slot(state, name) for name in jstep.get_slot_names(state)
    }


def test_axes_that_a_mesh_splits_are_not_cut(monkeypatch):
    """With the layout unknown on several TPUs, no axis is."""
    from jstep.core.exceptions import setting
    from jstep.core.placement import LAYOUTS

    mesh = jax.make_mesh((4, 2), ("x", "y"))
    slice_shapes = {
        (): (1, 128, 4096),
        ("x",): (64, 32, 256),
        (None, "y"): (1, 4096, 128),
        ("x", "y"): (64, 4096, 128),
    }
    for spec, expected in slice_shapes.items():
        layouts = {"w": NamedSharding(mesh, PartitionSpec(*spec))}
        with setting(LAYOUTS, layouts):
            assert by_slices.slice_shape("w", (64, 4096, 4096), None) == expected, spec
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert by_slices.slice_shape("w", (64, 4096, 4096), None) == (64, 4096, 4096)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert by_slices.slice_shape("w", (64, 4096, 4096), None) == (1, 128, 4096)


@pytest.mark.thorough(except_for=["default"])
@pytest.mark.parametrize("platform", ["tpu", "cuda", "default"])
def test_conditions_of_an_update_reach_the_wrappers_around_it(platform, monkeypatch):
    """A projection leaves a parameter alone whose update is not due, whatever the platform."""
    monkeypatch.setattr(by_slices, "LARGE", 4096)
    optimizer = jstep.with_projection(
        jstep.compact(jstep.update_every(jstep.lion(LR), 2)),
        lambda p: jax.tree.map(lambda x: jnp.clip(x, 0, 0.5), p),
    )
    state = jstep.TrainState.create({"w": jnp.ones((64, 128), jnp.bfloat16)}, optimizer)
    monkeypatch.setattr(
        jax.lax,
        "platform_dependent",
        lambda *args, **ways: ways.get(platform, ways["default"])(*args),
    )
    step = jax.jit(lambda state: jstep.apply_gradients(state, state.params, optimizer))
    for expected in (1.0, 0.5):
        state = step(state)
        np.testing.assert_array_equal(state.params["w"], np.full((64, 128), expected, jnp.bfloat16))


def test_gpus_compute_a_leaf_twice_and_tpus_once(monkeypatch):
    """On GPUs the second kernel computes the values again, which are nowhere stored in float32."""
    monkeypatch.setattr(by_slices, "LARGE", 8192)
    programs = {}

    def traced(*args, default, **others):
        programs.update({name: jax.make_jaxpr(others[name])(*args) for name in others})
        return default(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", traced)
    optimizer = jstep.compact(jstep.adamw(LR))
    state = jstep.TrainState.create({"w": jnp.ones((64, 128), jnp.bfloat16)}, optimizer)
    jstep.apply_gradients(state, state.params, optimizer)
    roots = {name: str(program).count(" sqrt ") for name, program in programs.items()}
    assert roots["cuda"] > roots["tpu"] > 0  # each also has those of its codes

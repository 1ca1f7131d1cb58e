"""Models annotated for Explicit axes: every optimizer trains as on one device."""

import functools
import itertools
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_text import collectives
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS, assert_close, create, data, init, run, shardings
from optimizer_table import TABLE

import jstep


def annotated(layout):
    """The model of `layouts.loss_fn`, with an `out_sharding` for each ambiguous result."""
    hidden = P("data", "model" if layout == "model" else None)

    def dot(x, w, out):
        if layout == "fsdp":
            w = jax.sharding.reshard(w, P())  # gathered where it is used
        return jnp.einsum("bi,ij->bj", x, w, out_sharding=out)

    def loss_fn(params, x, y):
        mesh = jax.typeof(x).sharding.mesh
        assert mesh.empty or set(mesh.axis_types) == {AxisType.Explicit}
        if mesh.empty:  # on one device
            h = jnp.tanh(x @ params["a"] + params["bias"][None])
            out = jnp.tanh(h @ params["deep"]["x"]) @ params["deep"]["y"]
            return jnp.mean((params["scale"] * out - y) ** 2)
        bias = jax.sharding.reshard(params["bias"], P(hidden[1]))
        h = jnp.tanh(dot(x, params["a"], hidden) + bias[None])
        out = dot(jnp.tanh(dot(h, params["deep"]["x"], P("data"))), params["deep"]["y"], P("data"))
        return jnp.mean((params["scale"] * out - y) ** 2)

    return loss_fn


@functools.lru_cache(maxsize=1)
def trained_on_one_device(name, steps):
    """There no layout has a mesh, so that their losses are one program."""
    optimizer = TABLE[name].make(TABLE[name].rate)
    step = jstep.minimize(annotated("data"), optimizer, metrics=("grad_norm", "param_norm"))
    return run(step, jstep.TrainState.create(init(), optimizer), steps=steps)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "layout"), list(itertools.product(TABLE, LAYOUTS)))
def test_annotated_training_matches_one_device(name, layout, compilations, caplog):
    entry = TABLE[name]
    optimizer, steps = entry.make(entry.rate), min(entry.matching_steps or 6, 6)
    step = jstep.minimize(annotated(layout), optimizer, metrics=("grad_norm", "param_norm"))
    state = create(layout, optimizer)
    before, mesh = shardings(state), LAYOUTS[layout][0]
    with compilations() as seen, caplog.at_level("INFO", "jstep"):
        state, got = run(step, state, lambda batch: jstep.shard_batch(batch, mesh), steps)
    assert len(seen) == 1
    assert shardings(state) == before
    assert not [line for line in caplog.messages if "Auto axes" in line]
    if entry.matching_steps == 0:  # rounding errors change the eigenbases of SOAP
        assert np.isfinite(got["loss"])
        return
    want, metrics = trained_on_one_device(name, steps)
    assert_close((state.params, state.slots), (want.params, want.slots))
    assert_close(
        {key: got[key] for key in ("loss", "grad_norm")},
        {key: metrics[key] for key in ("loss", "grad_norm")},
    )


@pytest.mark.thorough
def test_one_reduction_for_all_microbatches():
    """Gradients of products are reduced once per step, except with `weight_fn`."""
    mesh = LAYOUTS["data"][0]
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), data())
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P("data"))
        ),
        batch,
    )

    def loss_fn(params, x, y):
        h = jnp.tanh(jnp.einsum("bi,ij->bj", x, params["a"], out_sharding=P("data")))
        h = jnp.tanh(jnp.einsum("bi,ij->bj", h, params["deep"]["x"], out_sharding=P("data")))
        return jnp.mean(
            (jnp.einsum("bi,ji->bj", h, params["deep"]["y"].T, out_sharding=P("data")) - y) ** 2
        )

    optimizer = jstep.gradient_descent(0.1)

    def reduced_bytes(n, loss=loss_fn, **kwargs):
        step = jstep.minimize(loss, optimizer, num_microbatches=n, **kwargs)
        return collectives(step.lower(create("data", optimizer), *batch).compile().as_text())[
            "all-reduce"
        ].bytes

    once = reduced_bytes(1)
    assert reduced_bytes(8) <= 1.1 * once
    weighted = reduced_bytes(8, weight_fn=lambda x, y: jnp.float32(1))
    assert 1.1 * once < weighted <= 9 * once


# Stages and changing batch sizes on a mesh are compiled ahead, once, for the shardings in use.


@pytest.mark.thorough(except_for=["4-AxisType.Explicit-True"])
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_stage_changes_do_not_compile_in_the_main_thread(kind, steps_per_call, fsdp):
    compiled, marks = [], []

    def listener(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(threading.current_thread().name)

    optimizer = jstep.adam(0.1)

    def make_step(scale, microbatches):
        loss = lambda params, x: scale * jnp.mean((x @ params["w"]) ** 2)  # noqa: E731
        return jstep.minimize(loss, optimizer, num_microbatches=microbatches)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    params = {"w": jnp.ones((16, 4))}
    specs = jstep.fsdp_specs(params, mesh, min_size=1) if fsdp else None
    state = jstep.shard_state(jstep.TrainState.create(params, optimizer), mesh, specs)
    rows = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
    data = jstep.batches(rows, {0: 16, 10: 32})
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        state = jstep.train(
            {0: make_step(1.0, 1), 20: make_step(2.0, 2)},
            state,
            data,
            30,
            hooks=[jstep.every(10, lambda step, *_: marks.append(len(compiled)))],
            batch_sharding=NamedSharding(mesh, PartitionSpec("data")),
            steps_per_call=steps_per_call,
            progress=False,
            log_steps=None,
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert jstep.global_step(state) == 30
    assert compiled.count("jstep-compile") == 3  # the first program, too
    assert "MainThread" not in compiled[marks[0] :]


# Functions of trees on Explicit axes: what they return is sharded like what they were given.

SPECS = {"a": P("data", None), "b": P(None, "data"), "c": P(None, None)}
EMA = jstep.ExponentialMovingAverage(0.5, num_updates=True)
DEBIASED = jstep.ExponentialMovingAverage(0.5, zero_debias=True)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("data",))  # Explicit axes


@pytest.fixture
def params(mesh):
    def placed(spec):
        return jax.device_put(jnp.full((8, 8), 2.0, jnp.float32), NamedSharding(mesh, spec))

    return {name: placed(spec) for name, spec in SPECS.items()}


def specs(tree):
    """Return the specs with one entry for each dimension, as JAX writes those of a program."""
    return jax.tree.map(
        lambda leaf: P(*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))), tree
    )


FUNCTIONS = {
    "clip_by_value": lambda tree: jstep.clip_by_value(tree, -1, 1),
    "clip_by_norm": lambda tree: jstep.clip_by_norm(clip_norm=1.0, t=tree),
    "clip_by_average_norm": lambda tree: jstep.clip_by_average_norm(clip_norm=0.1, t=tree),
    "clip_by_global_norm": lambda tree: jstep.clip_by_global_norm(clip_norm=1.0, tree=tree)[0],
    "apply_updates": lambda tree: jstep.apply_updates(updates=tree, params=tree),
    "init": lambda tree: EMA.init(tree),
    "init_from_zeros": lambda tree: DEBIASED.init(params=tree),
    "apply": lambda tree: EMA.apply(tree, tree, 3),
    "apply_to_averages_of_the_host": lambda tree: EMA.apply(jax.device_get(tree), tree, 3),
    "apply_to_averages_elsewhere": lambda tree: EMA.apply(
        jax.tree.map(jnp.asarray, jax.device_get(tree)), tree, 3
    ),
    "apply_by_names": lambda tree: DEBIASED.apply(num_updates=3, params=tree, averages=tree),
    "apply_updates_of_the_host": lambda tree: jstep.apply_updates(tree, jax.device_get(tree)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_sharded_like_the_tree(name, params):
    assert specs(FUNCTIONS[name](params)) == SPECS


def test_a_path_of_a_tree_is_not_one_of_its_result(params):
    """The clipped tree is the first of two results, whose paths are those of other leaves of this
    tree."""
    tree = ((params["a"], params["b"]), params["c"])
    assert specs(jstep.clip_by_global_norm(tree, 1.0)[0]) == ((SPECS["a"], SPECS["b"]), SPECS["c"])
    assert specs(jstep.clip_by_value(tree, -1, 1)) == ((SPECS["a"], SPECS["b"]), SPECS["c"])


def test_averages_keep_their_own_sharding(params):
    moved = {"a": params["b"], "b": params["a"], "c": params["c"]}
    assert specs(EMA.apply(moved, params, 3)) == specs(moved)


# Losses that JAX rejects on Explicit axes fall back to Auto axes, with one log line or JAX's error.

EXPLICIT = jax.make_mesh((4, 2), ("data", "model"))
MIXED = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
AUTO = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
IDS = np.arange(16, dtype=np.int32) % 5
OPTIMIZER = jstep.momentum(0.01, 0.9)


def create_of_auto(mesh=None):
    params = {"table": jnp.linspace(0.0, 1.0, 40).reshape(5, 8), "w": jnp.ones((8, 4))}
    state = jstep.TrainState.create(params, OPTIMIZER)
    return state if mesh is None else jstep.shard_state(state, mesh)


def gather(params, x, ids):
    return jnp.mean(((params["table"][ids] + x) @ params["w"]) ** 2)


@pytest.mark.thorough(except_for=["1-explicit"])
@pytest.mark.parametrize("mesh", [EXPLICIT, MIXED], ids=["explicit", "mixed"])
@pytest.mark.parametrize("n", [1, 2])
def test_fallback_to_auto_axes(mesh, n, caplog):
    calls, prints = [], []

    def loss(params, x, ids):
        calls.append(1)
        jax.debug.callback(lambda _: prints.append(1), jnp.sum(params["w"]))
        return gather(params, x, ids)

    caplog.set_level(logging.INFO, "jstep")
    step = jstep.minimize(loss, OPTIMIZER, num_microbatches=n)
    state, want = create_of_auto(mesh), create_of_auto()
    for _ in range(2):
        state, metrics = step(state, *jstep.shard_batch((X, IDS), mesh))
        want, want_metrics = jstep.minimize(gather, OPTIMIZER)(want, X, IDS)
    jax.effects_barrier()
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-5)
    assert len(calls) == 2
    assert len(prints) == 2 * n
    (line,) = [line for line in caplog.messages if "Auto axes" in line]
    assert "loss runs with Auto axes" in line
    assert "ShardingTypeError" in line


def branches(params, x, ids):
    return jnp.sum(params["w"]) if jnp.sum(x) > 0 else jnp.sum(params["table"])


def asserts(params, x, ids):
    assert x.shape == (3,), f"{x}"


def converts(params, x, ids):
    return jnp.sum(np.asarray(x) @ params["w"])


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("loss", [branches, asserts, converts])
@pytest.mark.parametrize("n", [1, 2])
def test_other_errors_do_not_mention_axes(loss, n):
    kinds = []
    for mesh in (EXPLICIT, AUTO):
        with pytest.raises(Exception) as caught:
            jstep.minimize(loss, OPTIMIZER, num_microbatches=n)(
                create_of_auto(mesh), *jstep.shard_batch((X, IDS), mesh)
            )
        kinds.append(caught.type)
        assert not [note for note in getattr(caught.value, "__notes__", []) if "axes" in note]
    assert kinds[0] is kinds[1]


def test_errors_on_both_axis_types_raise_the_first():
    def half_annotated(params, x, ids):
        rows = params["table"].at[ids].get(out_sharding=P("data"))
        return gather(params, rows, ids)

    batch = jstep.shard_batch((X, IDS), EXPLICIT)
    with pytest.raises(Exception, match="out_sharding=") as caught:
        jstep.minimize(half_annotated, OPTIMIZER)(create_of_auto(EXPLICIT), *batch)
    assert type(caught.value).__name__ == "ShardingTypeError"
    assert [note for note in caught.value.__notes__ if "Explicit axes" in note]


@pytest.mark.parametrize("gradients", [False, True], ids=["step", "gradients"])
def test_what_is_computed_on_auto_axes_is_sharded_like_the_state(gradients):
    """Replicated parameters, slots or gradients would not fit where the state is sharded."""
    specs = {"table": P(None, "model"), "w": P("data", None)}
    state = create_of_auto()
    state = jstep.shard_state(state, EXPLICIT, specs)
    if gradients:
        _, grads = jstep.compute_gradients(gather)(state.params, X, IDS)
        found = [grads]
    else:
        step = jstep.minimize(gather, OPTIMIZER, donate=False, jit=False)
        new, _ = step(state, X, IDS)
        found = [new.params, new.slots["momentum"]]
    for tree in found:
        assert {name: P(*(*leaf.sharding.spec, None)[:2]) for name, leaf in tree.items()} == specs

"""NumPy's arrays wherever they enter: masked ones are refused, byte orders are converted, scalars
are arrays."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
import jstep.summary

SGD = jstep.sgd(0.1)
STEP = jstep.minimize(lambda p, x: jnp.mean((p["w"] - x) ** 2), SGD)


def make(w=None):
    return jstep.TrainState.create({"w": jnp.ones(4) if w is None else w}, SGD)


def run(batches, last_step=1, **options):
    return jstep.train(STEP, make(), batches, last_step, progress=False, **options).params


class Items:
    """Rows of a dict, one at a time, or several at once."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i : i + 1]}


class Foreign:
    """An array of another library."""

    shape, dtype = (4,), np.float32

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return self.x


def queued(x):
    queue = jstep.FIFOQueue(4)
    queue.enqueue({"x": x})
    queue.enqueue({"x": x})
    return queue.dequeue_many(2)


def queued_rows(x):
    queue = jstep.FIFOQueue(4)
    queue.enqueue_many({"x": x})
    return queue.dequeue()


def saved(x):
    with jstep.Saver(tempfile.mkdtemp()) as saver:
        saver.save(jstep.TrainState({"w": x}, {}, jnp.int32(0)))
        return saver.restore(None)["params"]


def restored(x):
    with jstep.Saver(tempfile.mkdtemp()) as saver:
        saver.save(jstep.TrainState({"w": np.ones(4, np.float32)}, {}, jnp.int32(0)))
        return saver.restore(jstep.TrainState({"w": x}, {}, jnp.int32(0))).params


def weights(x):
    path = f"{tempfile.mkdtemp()}/model.safetensors"
    jstep.save_weights(path, {"w": x})
    return jstep.load_weights(path, {"w": jax.ShapeDtypeStruct((4,), jnp.float32)})


def loaded(x):
    path = f"{tempfile.mkdtemp()}/model.safetensors"
    jstep.save_weights(path, {"w": np.ones(4, np.float32)})
    return jstep.load_weights(path, {"w": x})


def hooked(state_of):
    return run(
        lambda n: np.ones(4, np.float32),
        2,
        hooks=[jstep.every(1, lambda n, state, m: state_of(state))],
    )


def one_device():
    return jax.make_mesh((1,), ("data",))


DOORS = {
    "create": lambda x: make({"a": [x]}).params,
    "create on a mesh": lambda x: jstep.TrainState.create({"w": x}, SGD, mesh=one_device()).params,
    "create of a function": lambda x: jstep.TrainState.create(lambda: {"w": x}, SGD).params,
    "create, model_state": lambda x: (
        jstep.TrainState.create({"w": 1.0}, SGD, model_state={"m": x}).model_state
    ),
    "replace": lambda x: make().replace(params={"w": x}).params,
    "with_params": lambda x: make().with_params({"w": x}).params,
    "a state by hand": lambda x: (
        STEP(jstep.TrainState({"w": x}, {}, jnp.int32(0)), np.float32(1))[0].params
    ),
    "shard_state": lambda x: (
        jstep.shard_state(jstep.TrainState({"w": x}, {}, jnp.int32(0)), one_device()).params
    ),
    "batches": lambda x: jstep.batches(x, 4, seed=0)[0],
    "batches of a list": lambda x: jstep.batches({"a": [x, x], "b": [1, 2]}, 2, seed=0)[0],
    "batches of nested lists": lambda x: jstep.batches([[x, x], [x, x]], 2, seed=0)[0],
    "batches of items": lambda x: jstep.batches(Items(x), 2, seed=0)[0],
    "mixture": lambda x: jstep.mixture(
        {"a": x, "b": np.arange(4, dtype=np.float32)}, 4, {"a": 1, "b": 1}
    )[0],
    "a step": lambda x: STEP(make(), x)[1]["loss"],
    "a step that is not compiled": lambda x: jstep.minimize(loss_of, SGD, jit=False)(make(), x)[1],
    "scan_steps": lambda x: jstep.scan_steps(STEP)(make(), x[None])[1]["loss"],
    "compute_gradients": lambda x: jstep.compute_gradients(loss_of)({"w": jnp.ones(4)}, x)[0],
    "train, function": lambda x: run(lambda n: x),
    "train, K": lambda x: run(lambda n: x, 4, steps_per_call=4),
    "train, another library": lambda x: run(lambda n: Foreign(x)),
    "train, from_state": lambda x: run(jstep.from_state(lambda n, state: x)),
    "prefetch": lambda x: next(iter(jstep.prefetch_to_device(iter([{"a": x}])))),
    "shard_batch": lambda x: jstep.shard_batch({"a": x}, one_device()),
    "evaluator": lambda x: jstep.evaluator(lambda p, x: {"m": x}, [x])(make()),
    "accuracy": lambda x: jstep.metrics.accuracy(
        np.eye(4, dtype=np.float32), np.arange(4), weights=x
    ).compute(),
    "f1": lambda x: jstep.metrics.f1(x, np.array([0, 1, 1, 0])).compute(),
    "auc": lambda x: jstep.metrics.auc(x, np.array([0, 1, 1, 0]), num_thresholds=2).compute(),
    "scalars": lambda x: str(jstep.summary.scalar(["a", "b", "c", "d"], x)),
    "histogram": lambda x: str(jstep.summary.histogram("h", x)),
    "zero_fraction": jstep.summary.zero_fraction,
    "apply_gradients": lambda x: jstep.apply_gradients(make(), {"w": x}, SGD).params,
    "clip_by_norm": lambda x: jstep.clip_by_norm(x, 1.0),
    "global_norm": lambda x: jstep.global_norm([x]),
    "lookup, table": lambda x: jstep.lookup(x[:, None], [0, 1]),
    "lookup, ids": lambda x: jstep.lookup(
        jnp.ones((5, 2)), x.astype(x.dtype.str.replace("f", "i"))
    ),
    "slices": lambda x: jstep.IndexedSlices(x[:, None], np.arange(4), (4, 1)).to_dense(),
    "layer_norms": lambda x: jstep.layer_norms({"a": x}),
    "fingerprint": lambda x: jstep.fingerprint({"w": x}),
    "find_nonfinite": lambda x: jstep.find_nonfinite(loss_of, {"w": jnp.ones(4)}, x) is None,
    "cost": lambda x: jstep.cost(STEP, make(), x).flops,
    "saver": saved,
    "saver, target": restored,
    "save_weights": weights,
    "load_weights, target": loaded,
    "queue": queued,
    "queue of rows": queued_rows,
    "a hook's state": lambda x: hooked(lambda state: state.replace(params={"w": x})),
    "a hook's state by hand": lambda x: hooked(
        lambda state: jstep.TrainState({"w": x}, state.slots, state.global_step)
    ),
}


def loss_of(params, x):
    return jnp.mean((params["w"] - x) ** 2)


X = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize("door", DOORS)
def test_a_masked_array_is_refused(door):
    masked = np.ma.array(X, mask=False)
    with pytest.raises(TypeError, match=r"masked array.*filled"):
        DOORS[door](masked)


def test_the_leaf_is_named():
    masked = np.ma.array(X, mask=False)
    with pytest.raises(TypeError, match=r"params: the leaf at 'w/a/0' is a masked array"):
        make({"a": [masked]})
    with pytest.raises(TypeError, match=r"batch: the leaf at 'x/y' is a masked array"):
        jstep.minimize(lambda p, b: jnp.sum(p["w"]), SGD)(make(), {"x": {"y": masked}})


@pytest.mark.thorough(except_for=["create", "batches", "train, K", "queue"])
@pytest.mark.parametrize("door", DOORS)
def test_another_byte_order_is_converted(door):
    swapped = X.astype(X.dtype.newbyteorder())
    found, wanted = DOORS[door](swapped), DOORS[door](X)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(one, np.ndarray) and door != "saver, target":
            # A NumPy target has the dtype that it has.
            assert one.dtype.isnative
        assert np.array_equal(one, other), (one, other)


SCALARS = [
    np.float64(0.1),
    np.complex128(1 + 2j),
    np.int64(2**40),
    np.float32(0.1),
    np.float16(0.5),
    np.uint8(3),
    np.bool_(True),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: type(value).__name__)
def test_a_scalar_of_numpy_is_an_array_of_its_dtype(value):
    state = jstep.TrainState({"w": jnp.ones(2), "x": value}, {}, jnp.int32(0))
    with jstep.Saver(tempfile.mkdtemp()) as saver:
        saver.save(state)
        for found in (saver.restore(None)["params"]["x"], saver.restore(state).params["x"]):
            assert (found.dtype, found.shape, found[()]) == (value.dtype, (), value)
    if value.dtype.kind != "c":
        path = f"{tempfile.mkdtemp()}/model.safetensors"
        jstep.save_weights(path, {"x": value})
        found = jstep.load_weights(path, {"x": value})["x"]
        assert (found.dtype, found[()]) == (value.dtype, value)


@pytest.mark.thorough(except_for=["step1"])
@pytest.mark.parametrize("step", [7, np.uint8(7), np.array(7).astype(">i8")])
def test_a_step_that_is_a_number_becomes_an_array(step):
    traces = []

    def loss_fn(params, x):
        traces.append(1)
        return jnp.mean((params["w"] - x) ** 2)

    train_step = jstep.minimize(loss_fn, jstep.adam(0.1))
    state = jstep.TrainState.create({"w": jnp.ones(4)}, jstep.adam(0.1)).replace(global_step=step)
    assert (state.global_step.dtype, int(state.global_step)) == (jnp.int32, 7)
    for _ in range(3):
        state, _ = train_step(state, X)
    assert (int(state.global_step), len(traces)) == (10, 1)
    mesh = jax.make_mesh((8,), ("data",))
    sharded = jstep.TrainState.create({"w": jnp.ones(8)}, SGD, mesh=mesh)
    assert sharded.replace(global_step=step).global_step.sharding == sharded.global_step.sharding

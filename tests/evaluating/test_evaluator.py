"""`evaluator`: exact results for all batch sizes, shardings and dtypes; endless batches."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import aligned
from evaluated_runs import in_batches
from fake_runs import FakeRun
from fellows import Fellows
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from positioned import Positioned

import jstep
from jstep.evaluating.evaluation_hook import _numbers_of_process_0

X = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
W = np.array([1.0, -2.0, 0.5], np.float32)


def make_state(optimizer=None, **kwargs):
    return jstep.TrainState.create({"w": W}, optimizer or jstep.gradient_descent(0.1), **kwargs)


def metrics(params, x):
    out = x @ params["w"]
    return {
        "each": out**2,
        "right": out > 0,
        "mean": jnp.mean(out**2),
        "pair": (jnp.sum(out), jnp.sum(out > 0)),
    }


OUT = X.astype(np.float64) @ W.astype(np.float64)
EXPECTED = {
    "each": np.mean(OUT**2),
    "right": np.mean(OUT > 0),
    "mean": np.mean(OUT**2),
    "pair": np.sum(OUT) / np.sum(OUT > 0),
}


def mesh_of(count):
    return jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])


@pytest.mark.thorough(except_for=["4", "5"])
@pytest.mark.parametrize("size", [1, 4, 5, 23])
def test_examples_have_equal_weight_for_all_batch_sizes(size):
    found = jstep.evaluator(metrics, in_batches(size, X))(make_state())
    assert list(found) == ["each", "right", "mean", "pair"]
    assert all(type(value) is float for value in found.values())
    assert found == pytest.approx(EXPECTED, rel=1e-6)
    assert found["right"] == EXPECTED["right"]  # counted in integers


@pytest.mark.thorough(except_for=["True-8"])
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("explicit", [False, True])
def test_rows_that_do_not_divide_over_the_mesh(count, explicit):
    mesh = mesh_of(count)
    state = jstep.shard_state(make_state(), mesh)
    batches = jstep.batches(X, 8, shuffle=False, num_epochs=1, drop_remainder=False)
    evaluate = jstep.evaluator(
        metrics, batches, batch_sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    unsharded = jstep.evaluator(metrics, batches)(make_state())
    if explicit:
        with jax.set_mesh(mesh):
            found = evaluate(state)
    else:
        found = evaluate(state)
    assert found == pytest.approx(unsharded, rel=1e-6)
    assert found["right"] == unsharded["right"]


def test_prefix_shardings_and_batches_of_several_arguments():
    mesh = mesh_of(4)
    rows, replicated = (
        NamedSharding(mesh, PartitionSpec("data")),
        NamedSharding(mesh, PartitionSpec()),
    )

    def metric_fn(params, x, y):
        return {"error": (x["a"] @ params["w"] - y) ** 2}

    batches = [
        ({"a": X[:8]}, OUT[:8].astype(np.float32)),
        ({"a": X[8:11]}, OUT[8:11].astype(np.float32)),
    ]
    for sharding in (rows, (rows, replicated), ({"a": rows}, rows)):
        found = jstep.evaluator(metric_fn, batches, batch_sharding=sharding)(
            jstep.shard_state(make_state(), mesh)
        )
        assert found["error"] == pytest.approx(0, abs=1e-10)


def test_it_compiles_once_per_batch_shape(compilations):
    evaluate = jstep.evaluator(metrics, in_batches(5, X))
    state = make_state()
    with compilations() as compiled:
        evaluate(state)
    assert len(compiled) == 2  # 5 rows, and the 3 of the last batch
    with compilations() as compiled:
        evaluate(state)
        evaluate(make_state())
    assert compiled == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_low_precision_metrics_are_exact(dtype):
    """A running sum in bfloat16 would stop growing at 256."""
    values = np.full(3000, 1.0, np.float32)
    found = jstep.evaluator(lambda params, x: {"one": x.astype(dtype)}, in_batches(100, values))(
        make_state()
    )
    assert found == {"one": 1.0}


def test_integer_sums_beyond_int32_are_exact():
    big = np.full(8, 2**31 - 1, np.int32)
    found = jstep.evaluator(
        lambda params, x: {
            "each": x,
            "mean": x[0],
            "pair": (x[0], jnp.int32(1)),
            "small": x.astype(jnp.uint8),
        },
        [big] * 5,
    )(make_state())
    assert found == {"each": 2**31 - 1, "mean": 2**31 - 1, "pair": 2**31 - 1, "small": 255}


def test_callbacks_of_all_processes_see_the_numbers_of_process_0(monkeypatch):
    three = Fellows(monkeypatch, 3)
    found = three.each(
        lambda i: _numbers_of_process_0(
            {"a": np.float32(0.1 + i), "b": i + 1e-17, "text": str(i), "c": jnp.int32(i)}
        )
    )
    assert found == 3 * [{"a": float(np.float32(0.1)), "b": 1e-17, "c": 0.0}]

    def seen(index):
        heard = []
        hook = jstep.EvaluationHook(
            lambda state: {"loss": 0.5 + index},
            every_n_steps=1,
            callbacks=[lambda *given: heard.append(given[2])],
        )
        FakeRun(hook, make_state()).after_step(1, make_state(), {})
        return hook.results, heard

    assert three.each(seen) == 3 * [({1: {"loss": 0.5}}, [{"loss": 0.5}])]


def test_zero_counts_nan_and_infinity():
    found = jstep.evaluator(
        lambda params, x: {"none": (jnp.sum(x) * 0, 0), "nan": x * jnp.nan, "inf": x * jnp.inf},
        [np.ones(3, np.float32)],
    )(make_state())
    assert np.isnan(found["none"])
    assert np.isnan(found["nan"])
    assert found["inf"] == np.inf


def test_a_mean_of_is_exact_and_ignores_the_total_of_an_empty_batch():
    def metric_fn(params, x):
        count = jnp.sum(x > 0)
        return {"mean": jstep.metrics.mean_of(jnp.where(count > 0, jnp.sum(x), jnp.nan), count)}

    batches = [np.float32([value, 0.0]) for value in (1e8, 0, *[1] * 50)]
    assert jstep.evaluator(metric_fn, batches)(make_state()) == {"mean": (1e8 + 50) / 51}


def test_has_model_state():
    def metric_fn(params, model_state, x):
        return {"mean": x[:, 0] - model_state["mean"]}

    state = make_state(model_state={"mean": jnp.float32(1.5)})
    found = jstep.evaluator(metric_fn, in_batches(4, X), has_model_state=True)(state)
    assert found["mean"] == pytest.approx(X[:, 0].astype(np.float64).mean() - 1.5, rel=1e-5)
    with pytest.raises(ValueError, match="has_model_state=True: the state has no model state"):
        jstep.evaluator(metric_fn, in_batches(4, X), has_model_state=True)(make_state())


def params_seen(state, **kwargs):
    found = jstep.evaluator(
        lambda params, x: {"w": (params["w"][0], 1)}, in_batches(23, X), **kwargs
    )(state)
    return found["w"]


def test_use_averages_with_schedule_free_parameters():
    optimizer = jstep.schedule_free_sgd(0.5)
    state = jstep.apply_gradients(make_state(optimizer), {"w": -jnp.ones(3)}, optimizer)
    state = jstep.apply_gradients(state, {"w": -jnp.ones(3)}, optimizer)
    assert params_seen(state, use_averages=True) == pytest.approx(
        float(jstep.schedule_free_params(state)["w"][0])
    )
    assert params_seen(state, use_averages=True) != params_seen(state)


# Batches


class Indexed:
    def __getitem__(self, number):
        return in_batches(5, X)[number]


class Loader:
    def __iter__(self):
        return iter(in_batches(5, X))


@pytest.mark.thorough(except_for=["Positioned", "ndarray"])
@pytest.mark.parametrize(
    "batches",
    [
        in_batches(5, X),
        tuple(in_batches(5, X)),
        Positioned(lambda n: X[n : n + 1], end=23),
        Indexed(),
        Loader(),
        X[:, None],
    ],
    ids=type,
)
def test_each_call_evaluates_all_batches_once(batches):
    evaluate = jstep.evaluator(metrics, batches)
    assert evaluate(make_state()) == evaluate(make_state())
    assert evaluate(make_state()) == pytest.approx(EXPECTED, rel=1e-6)


def test_a_generator_is_exhausted_by_the_first_evaluation():
    evaluate = jstep.evaluator(metrics, (x for x in in_batches(5, X)))
    assert evaluate(make_state()) == pytest.approx(EXPECTED, rel=1e-6)
    with pytest.raises(ValueError, match="an iterator that an evaluation has exhausted"):
        evaluate(make_state())


ENDLESS = jstep.batches(X, 4)

ENDLESS_BATCHES = [
    ENDLESS,
    iter(ENDLESS),
    ENDLESS[3:],
    itertools.repeat(X),
    itertools.count(),
    itertools.cycle([X]),
]


@pytest.mark.parametrize("batches", ENDLESS_BATCHES)
def test_endless_batches_are_rejected(batches):
    with pytest.raises(ValueError, match=r"has no end; .* jstep.batches\(…, num_epochs=1"):
        jstep.evaluator(metrics, batches)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            (3, [X]),
            TypeError,
            r"metric_fn=3: must be a function \(params, \*args\) -> {name: metric}",
        ),
        ((metrics, 3), TypeError, "batches=3: must be an iterable or a sequence of batches"),
        (
            (metrics, {"x": X}),
            TypeError,
            "batches: must be a source of batches, got a dict; for one batch give",
        ),
        ((metrics, lambda step: X), ValueError, "a function of the step has no end"),
        ((metrics, [X], {"use_averages": 3}), TypeError, "use_averages=3: must be True or False"),
        (
            (metrics, [X], {"has_model_state": "no"}),
            TypeError,
            "has_model_state='no': must be True or False",
        ),
        ((metrics, [X], {"batch_sharding": 3}), TypeError, "batch_sharding: 3"),
        (
            (metrics, [X], {"batch_sharding": PartitionSpec("data")}),
            ValueError,
            "batch_sharding: .* needs a mesh",
        ),
    ],
)
def test_bad_arguments(arguments, error, words):
    args, kwargs = arguments[:2], (arguments[2:] or ({},))[0]
    with pytest.raises(error, match=words):
        jstep.evaluator(*args, **kwargs)


# Sources of an evaluator: loaders that reuse memory, dropped rows, and averaged or schedule-free
# parameters.

ROWS = np.arange(40, dtype=np.float32).reshape(10, 4)


def make_state_of_sources(optimizer=None):
    return jstep.TrainState.create(
        {"w": np.ones(4, np.float32)}, optimizer or jstep.gradient_descent(0.1)
    )


class Refilling:
    """A loader that yields the same buffer for each batch."""

    def __init__(self, size, wrap=lambda buffer: buffer):
        self.buffer, self.wrap = aligned((size, 4)), wrap

    def __iter__(self):
        for i in range(0, 10, len(self.buffer)):
            self.buffer[:] = ROWS[i : i + len(self.buffer)]
            yield self.wrap(self.buffer)
            self.buffer[:] = np.nan


class Foreign:
    """An array type that JAX does not know; it converts by `__array__`."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype=None, copy=None):
        return self.array


def slow(params, x):
    """Compute metrics slowly, so that the next batch is fetched before they are finished."""
    y = jax.lax.fori_loop(0, 300, lambda i, y: jnp.tanh(y @ y.T) @ y, jnp.tile(x, (40, 1)) * 1e-3)
    return {"loss": x[:, 0] + 0.0 * jnp.sum(y), "all": jstep.metrics.auc(x[:, 0], x[:, 1] > 20)}


@pytest.mark.thorough(except_for=["2-False-Foreign"])
@pytest.mark.parametrize("wrap", [lambda b: b, lambda b: (b,), Foreign])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("size", [2, 5])
def test_a_loader_can_reuse_its_memory(size, sharded, wrap):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, PartitionSpec("data")) if sharded else None
    state = jstep.shard_state(make_state_of_sources(), mesh) if sharded else make_state_of_sources()
    found = jstep.evaluator(slow, Refilling(size, wrap), batch_sharding=rows)(state)
    assert found == {"loss": ROWS[:, 0].mean(), "all": 1.0}


class Tensor:
    """Like a bfloat16 tensor of PyTorch: `__array__` raises, `__dlpack__` works."""

    def __init__(self, array):
        self._array, self.shape = array, array.shape

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")

    def __dlpack__(self, **kwargs):
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_batches_are_accepted_as_in_train():
    def metrics(params, x):
        return {"loss": x[:, 0]}

    assert jstep.evaluator(metrics, Refilling(5, Tensor))(make_state_of_sources()) == {
        "loss": ROWS[:, 0].mean()
    }
    with pytest.raises(
        TypeError,
        match=r"at '1' must be a number or an array of numbers, got 'name'",
    ):
        jstep.evaluator(lambda params, x, name: metrics(params, x), [(ROWS, "name")])(
            make_state_of_sources()
        )


def test_an_out_of_range_error_ends_the_batches():
    class Closed:
        def __iter__(self):
            yield from (ROWS[:5], ROWS[5:])
            raise jstep.OutOfRangeError("no more")

    assert jstep.evaluator(first, Closed())(make_state_of_sources()) == {"x": ROWS[:, 0].mean()}


# Dropped rows


def first(params, x):
    return {"x": x[:, 0]}


@pytest.mark.parametrize(
    ("make", "dropped"),
    [
        (lambda: jstep.batches(ROWS, 4, num_epochs=1), 2),
        (lambda: jstep.batches(ROWS, 3, num_epochs=2, shuffle=False), 1),
        (lambda: jstep.batches(ROWS, 4)[:2], 2),
        (lambda: jstep.batches(ROWS, 4)[:1], 0),  # the user selected a slice
        (lambda: jstep.batches(ROWS, 4, num_epochs=1, drop_remainder=False), 0),
    ],
)
def test_dropped_rows_are_a_warning(make, dropped, caplog):
    evaluate = jstep.evaluator(first, make())
    evaluate(make_state_of_sources())
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == (dropped > 0)
    assert all(
        f"{dropped} of 10 rows are not evaluated" in line and "drop_remainder=False" in line
        for line in lines
    )


# Evaluations in lanes: each batch is evaluated as if its lanes were batches.

X_OF_LANES = np.random.default_rng(0).normal(size=(44, 4)).astype(np.float32)
STATE = jstep.TrainState.create({"w": jnp.linspace(0.1, 0.7, 4)}, jstep.adam())


def metrics_of_lanes(params, x):
    return metrics(params, x) | {"square of the mean": jnp.mean(x @ params["w"]) ** 2}


def with_object(params, x):
    return metrics_of_lanes(params, x) | {
        "auc": jstep.metrics.auc(jax.nn.sigmoid(x @ params["w"]), x[:, 0] > 0)
    }


def batches(*sizes):
    return [X_OF_LANES[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]


@pytest.mark.thorough
def test_lanes_count_as_batches():
    got = jstep.evaluator(with_object, batches(16, 16), lanes=4)(STATE)
    assert got == jstep.evaluator(with_object, batches(*[4] * 8))(STATE)
    got = jstep.evaluator(metrics_of_lanes, batches(16, 16, 8), lanes=4)(STATE)
    assert got == jstep.evaluator(metrics_of_lanes, batches(*[4] * 8, *[2] * 4))(STATE)
    # It is another mean of squared means.
    assert got != jstep.evaluator(metrics_of_lanes, batches(16, 16, 8))(STATE)


def test_a_batch_that_lanes_do_not_divide_is_whole():
    got = jstep.evaluator(metrics_of_lanes, batches(16, 6), lanes=4)(STATE)
    assert got == jstep.evaluator(metrics_of_lanes, batches(4, 4, 4, 4, 6))(STATE)


@pytest.mark.thorough(except_for=["AxisType.Explicit"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_same_on_any_number_of_devices(kind):
    want = jstep.evaluator(metrics_of_lanes, batches(16, 16, 12), lanes=8)(STATE)
    for n in (8,) if kind is AxisType.Explicit else (2, 8):
        mesh = jax.make_mesh((n,), ("data",), (kind,), devices=jax.devices()[:n])
        state = jstep.shard_state(STATE, mesh)
        evaluate = jstep.evaluator(
            metrics_of_lanes,
            batches(16, 16, 12),
            lanes=8,
            batch_sharding=NamedSharding(mesh, P("data")),
        )
        evaluate.check(state)
        assert evaluate(state) == want

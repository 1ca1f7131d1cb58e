"""Sources of an evaluator: loaders that reuse memory, dropped rows, and averaged or schedule-free parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import aligned
from jax.sharding import NamedSharding, PartitionSpec

import jstep

ROWS = np.arange(40, dtype=np.float32).reshape(10, 4)


def make_state(optimizer=None):
    return jstep.TrainState.create({"w": np.ones(4, np.float32)}, optimizer or jstep.gradient_descent(0.1))


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
    state = jstep.shard_state(make_state(), mesh) if sharded else make_state()
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

    assert jstep.evaluator(metrics, Refilling(5, Tensor))(make_state()) == {"loss": ROWS[:, 0].mean()}
    with pytest.raises(TypeError, match=r"at '1' must be a number or an array of numbers, got 'name'"):
        jstep.evaluator(lambda params, x, name: metrics(params, x), [(ROWS, "name")])(make_state())


def test_an_out_of_range_error_ends_the_batches():
    class Closed:
        def __iter__(self):
            yield from (ROWS[:5], ROWS[5:])
            raise jstep.OutOfRangeError("no more")

    assert jstep.evaluator(first, Closed())(make_state()) == {"x": ROWS[:, 0].mean()}


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
    evaluate(make_state())
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == (dropped > 0)
    assert all(f"{dropped} of 10 rows are not evaluated" in line and "drop_remainder=False" in line for line in lines)

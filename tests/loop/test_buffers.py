"""Loaders that reuse their buffers, tensors of other libraries, and ragged batches."""

import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import aligned
from doubles import Pair
from loop_runs import OPTIMIZER, train

import jstep
from jstep.data.batch_placement import copy_batch

STEP = jstep.minimize(lambda params, x: jnp.mean((params["a"] - x) ** 2), OPTIMIZER)


def make_state():
    return jstep.TrainState.create({"a": jnp.ones(1024)}, OPTIMIZER)


def reused_buffer(wait=0.0, offset=0, size=1024):
    buffer = aligned((size,), offset=4 * offset)
    for n in itertools.count():
        time.sleep(wait)
        buffer[:] = n
        yield buffer


def slow_step(*_):
    time.sleep(0.002)


@pytest.mark.thorough(except_for=["0-kwargs3-0"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    ("wait", "kwargs"),
    [
        (0, {}),
        (0.0005, {"hooks": [jstep.every(1, slow_step)]}),  # prefetched
        (0.0005, {"steps_per_call": 4}),
        (0, {"steps_per_call": 4, "hooks": [jstep.every(7, slow_step)]}),
    ],
)
def test_a_loader_can_reuse_its_buffer(wait, kwargs, offset):
    trained = train(60, map(np.copy, reused_buffer()), step=STEP, state=make_state())
    expected = trained.params["a"][0]
    state = train(60, reused_buffer(wait, offset), step=STEP, state=make_state(), **kwargs)
    np.testing.assert_allclose(state.params["a"][0], expected, rtol=1e-5)


@pytest.mark.parametrize("offset", [0, 1])
def test_prefetch_to_device_copies_reused_buffers(offset):
    last_read = threading.Event()

    def source():
        for n, buffer in enumerate(itertools.islice(reused_buffer(offset=offset), 8), 1):
            if n == 8:
                last_read.set()
            yield buffer

    items = jstep.prefetch_to_device(source(), size=8)
    assert last_read.wait(60)
    assert [float(item[0]) for item in items] == list(range(8))


class Tensor:
    """Like a tensor of PyTorch: it converts to NumPy by `numpy()`, or only by `__dlpack__`."""

    def __init__(self, array):
        self._array, self.shape = array, array.shape


class WithNumpy(Tensor):
    def numpy(self):
        return self._array


class WithDlpack(Tensor):
    def __dlpack__(self, **kwargs):
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class WithFailingNumpy(WithDlpack):
    """Like a tensor that requires a gradient or is bfloat16: `numpy()` raises."""

    def numpy(self):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad")


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("kind", [WithNumpy, WithDlpack, WithFailingNumpy])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_tensors_give_the_results_of_arrays(kind, steps_per_call):
    expected = train(6, lambda n: np.full(1024, n, np.float32), step=STEP, state=make_state())
    tensors = train(
        6,
        lambda n: kind(np.full(1024, n, np.float32)),
        step=STEP,
        state=make_state(),
        steps_per_call=steps_per_call,
    )
    np.testing.assert_allclose(tensors.params["a"], expected.params["a"], rtol=1e-6)


@pytest.mark.parametrize(
    "make", [lambda x: x, lambda x: (x, 1.5), lambda x: {"b": x, "a": x}, lambda x: Pair(x, [x])]
)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0),
        np.arange(6).reshape(2, 3).T,
        np.zeros((0, 3)),
        np.ones(3, jnp.bfloat16),
        np.arange(2**17, dtype=np.float32)[1:],
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_a_copy_has_the_values_and_the_structure_of_the_batch(make, array):
    batch = make(array)
    found = copy_batch(batch)
    assert type(found) is (np.ndarray if batch is array else type(batch))
    assert jax.tree.structure(found) == jax.tree.structure(batch)
    for copy, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(batch), strict=True):
        if leaf is array:
            assert type(copy) is np.ndarray
            assert not np.shares_memory(copy, array)
            assert copy.dtype == array.dtype
        assert np.array_equal(copy, leaf)
    fresh = copy_batch(batch, fresh=True)
    assert all(a is b for a, b in zip(jax.tree.leaves(fresh), jax.tree.leaves(batch), strict=True))


def test_a_copy_is_in_the_byte_order_of_this_machine():
    found = copy_batch({"x": np.arange(6).astype(">i4")}, fresh=True)["x"]
    assert found.dtype == np.dtype("=i4")
    assert found.tolist() == list(range(6))


def test_a_list_instead_of_a_tuple_gets_a_note():
    step = jstep.minimize(lambda params, x, y: jnp.mean((params["a"] * x - y) ** 2), OPTIMIZER)
    with pytest.raises(TypeError) as caught:
        train(3, lambda n: [np.ones(1024), np.ones(1024)], step=step, state=make_state())
    notes = "\n".join(caught.value.__notes__)
    assert "a list, which is one argument; a tuple is several" in notes
    assert "collate_fn=lambda rows: tuple(default_collate(rows))" in notes


def test_a_batch_function_that_returns_nothing_gets_a_note():
    step = jstep.minimize(lambda params, x: jnp.mean((params["a"] * x) ** 2), OPTIMIZER)
    with pytest.raises(TypeError) as caught:
        train(3, lambda n: None, step=step, state=make_state())
    assert "a function of the step must return the batch" in "\n".join(caught.value.__notes__)

"""Leaves of unusual kinds: each is saved and restored as it was, or refused with its path and what to do."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep


class Pair(typing.NamedTuple):
    a: typing.Any
    b: typing.Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    a: typing.Any
    b: typing.Any


@dataclasses.dataclass
class Unregistered:
    a: typing.Any


def saved_state(params):
    return jstep.TrainState(params, {}, jnp.int32(1))


@pytest.mark.parametrize(
    "params",
    [
        {"keys": jax.random.split(jax.random.key(1, impl="rbg"), 3)}, {"weak": jnp.asarray(2.0)}, jnp.ones(3), {}, None,
        Pair(jnp.ones(2), {"x": None}), Layer(jnp.ones(2), (jnp.zeros(1), [jnp.ones(1)])), {"a": 3, "b": 2.5},
        {"a": 1 + 2j}, {"a": jnp.zeros((0, 3)), "b": np.zeros((2, 0), np.int8)}, {"a": np.float32(2)},
        {"a": np.arange(3, dtype=">f4"), "b": np.arange(3, dtype=">i8")}, {0: jnp.ones(1), 1: jnp.zeros(1)},
        {"0": jnp.ones(1), "a.b": jnp.ones(1), "": jnp.zeros(1), "a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}},
        {"a": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))},
    ],
    ids=str,
)  # fmt: skip
def test_odd_leaves_are_restored_as_they_were(tmp_path, params):
    state = saved_state(params)
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
        back = saver.restore(state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert np.shape(after) == np.shape(before)
        dtype = before.dtype if hasattr(before, "dtype") else jnp.result_type(before)
        assert after.dtype == (dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype)
        if jnp.issubdtype(after.dtype, jax.dtypes.prng_key):
            before, after = jax.random.key_data(before), jax.random.key_data(after)
        assert np.array_equal(after, before)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.ma.array([1.0, 2.0], mask=[True, False]), r"masked array, and masks are not saved; pass leaf\.filled"),
        (2**40, r"is 1\.1e\+12, which int32 cannot hold; pass an array of another dtype, or enable jax_enable_x64"),
        (Unregistered(1), r"is Unregistered, which is not .*pass it as extra"),
        (np.array(["x"]), "is an array of <U1 and shape .*pass it as extra, or remove it from the state"),
        (np.zeros(2, [("x", "i4")]), "is an array of .*which is not an array of numbers"),
    ],
    ids=str,
)
def test_other_leaves_are_refused_with_what_to_do(tmp_path, leaf, message):
    with jstep.Saver(tmp_path) as saver, pytest.raises((TypeError, ValueError), match=f"state: 'params/a'.*{message}"):
        saver.save(saved_state({"a": leaf}))


@pytest.mark.parametrize("leaf", [np.ma.ones(2), 2**40], ids=["masked", "a large integer"])
def test_weights_refuse_them_too(tmp_path, leaf):
    pytest.importorskip("safetensors")
    with pytest.raises((TypeError, ValueError), match=r"params: 'a' is .*(masked array|cannot hold)"):
        jstep.save_weights(tmp_path / "w.safetensors", {"a": leaf})

"""`load_weights` finds the arrays of a checkpoint whose names are unusual, or refuses those that are ambiguous."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors_files import same

import jstep


def test_parameters_that_are_a_single_array(tmp_path):
    state = jstep.TrainState.create(jnp.arange(4.0), jstep.momentum(0.1, 0.9))
    with jstep.Saver(tmp_path) as saver:
        path = saver.save(state)
    for target in (jnp.zeros(4), jax.ShapeDtypeStruct((4,), np.float32)):
        assert same(jstep.load_weights(path, target), state.params)
        assert same(jstep.load_weights(path, target, lambda path: "slots/momentum"), jnp.zeros(4))
        assert same(jstep.load_weights(path, target, {"": ("params", np.negative)}), -state.params)
    assert same(jstep.load_weights(path, {"a": jnp.zeros(4)}, {"a": "params"})["a"], state.params)
    with pytest.raises(ValueError, match=r"mismatched \(1\): '' \(tensor 'params'\) is float32\[4\]"):
        jstep.load_weights(path, jnp.zeros(3))


def test_arrays_that_orbax_stored_in_one_place(tmp_path):
    params = {"a.b": jnp.arange(3.0), "a": {"b": jnp.ones(3), "c": jnp.arange(2.0)}, "a.c/d": jnp.ones(1)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", params)
    with pytest.raises(ValueError, match=r"stored 'a/b' and 'a\.b' in the same place, so that only one is there"):
        jstep.load_weights(tmp_path / "x", params)
    loaded = jstep.load_weights(tmp_path / "x", params, {"a.b": None, "a/b": None}, partial=True)
    assert loaded["a"]["c"].tolist() == [0, 1]

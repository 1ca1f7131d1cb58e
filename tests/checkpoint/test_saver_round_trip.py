"""Restored values are bitwise identical to the saved ones: dtypes, PRNG keys, containers and models."""

import asyncio
import dataclasses
import os
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import NO_SLOTS, as_bits, assert_same, files_of, state_at
from etils import epath
from flax import nnx

import jstep
from jstep.checkpoint.listing import COMMITTED
from jstep.checkpoint.saver import Saver


class Point(NamedTuple):
    x: jax.Array
    y: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: jax.Array
    bias: jax.Array | None


class TestRoundTrip:
    DTYPES = (
        *("bool", "int2", "int4", "uint2", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
        *("float16", "bfloat16", "float32", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn"),
        *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )

    def test_every_dtype_is_bitwise_identical(self, tmp_path):
        rng = np.random.default_rng(0)
        model_state = {
            name: jnp.asarray(rng.integers(0, 2, (3, 5)).astype(jnp.dtype(name))) for name in self.DTYPES
        } | {"complex": jnp.asarray(1j, jnp.complex64), "nan": jnp.asarray([np.nan, -0.0, np.inf, 1e-45], jnp.float32)}
        params = {"w": jnp.ones(2)}
        state = jstep.TrainState.create(params, jstep.adam()).replace(slots={"all": model_state})
        with Saver(tmp_path) as saver:
            saver.save(state)
            assert_same(saver.restore(state), state)
            loaded = saver.restore()
        for name, leaf in model_state.items():
            assert loaded["slots"]["all"][name].dtype == leaf.dtype
            assert as_bits(loaded["slots"]["all"][name]) == as_bits(leaf)

    def test_wide_dtypes(self, tmp_path, x64):
        state = jstep.TrainState.create({"w": jnp.arange(3.0), "n": jnp.arange(3)}, NO_SLOTS, global_step=2**40)
        assert state.params["w"].dtype == jnp.float64
        with Saver(tmp_path) as saver:
            assert saver.save(state).endswith(str(2**40))
            shapes = jax.eval_shape(lambda: state)
            assert_same(saver.restore(shapes), state)
            with jax.enable_x64(False), pytest.raises(ValueError, match=r"'params/[wn]'.*jax_enable_x64"):
                saver.restore(shapes)

    def test_prng_keys(self, tmp_path):
        keys = {
            "one": jax.random.key(1),
            "many": jax.random.split(jax.random.key(2), (2, 3)),
            "none": jax.random.split(jax.random.key(2), 0),
            "other": jax.random.key(3, impl="unsafe_rbg"),
        }
        state = state_at(1).replace(slots={"keys": keys})
        with Saver(tmp_path) as saver:
            saver.save(state)
            back = saver.restore(jax.eval_shape(lambda: state))
            assert_same(back, state)
            assert saver.restore()["slots"]["keys"]["many"].shape == (2, 3, 2)
            wrong = state.replace(slots={"keys": keys | {"one": jax.random.key(1, impl="rbg")}})
            with pytest.raises(ValueError, match=r"differing \(1\): 'slots/keys/one'"):
                saver.restore(wrong)
        draw = jax.random.normal(back.slots["keys"]["other"], 3)
        assert as_bits(draw) == as_bits(jax.random.normal(keys["other"], 3))

    def test_unusual_keys(self, tmp_path):
        params = {
            "a.b": 1.0,
            "a": {"b": 2.0, ".zarray": 3.0, "..": 4.0, "": 5.0},
            "a/b": 6.0,
            "é\n\"'\\ %2E#2": 7.0,
            "\ud800": 8.0,
            "0": {"0.0": 9.0},
            "m": {"": {"x": 11.0, "": {"": 12.0}}},
            "/n/": {"/": 13.0},
            "x" * 300: 10.0,
        }
        state = jstep.TrainState.create(params, NO_SLOTS)
        with Saver(tmp_path) as saver:
            saver.save(state)
            assert_same(saver.restore(state), state)
            assert jax.tree.map(float, saver.restore()["params"]) == params

    def test_containers(self, tmp_path):
        params = {
            "point": Point(jnp.ones(2), jnp.zeros(())),
            "layers": [Layer(jnp.ones((2, 2)), None), Layer(jnp.zeros((2, 2)), jnp.ones(2))],
            "pair": (jnp.arange(3), {}),
            "nothing": [],
            "none": None,
        }
        state = jstep.TrainState.create(params, jstep.adam(), model_state={"mean": jnp.ones((0, 3))})
        with Saver(tmp_path) as saver:
            saver.save(state)
            back = saver.restore(jax.eval_shape(lambda: state))
            assert_same(back, state)
            assert isinstance(back.params["point"], Point)
            # leaves are matched by path, so other containers are allowed
            other = state.replace(params=params | {"pair": [jnp.zeros(3, jnp.int32), ()]})
            assert saver.restore(other).params["pair"][0].tolist() == [0, 1, 2]

    @pytest.mark.parametrize("params", [{}, None, 3.0], ids=repr)
    def test_trees_with_at_most_one_leaf(self, tmp_path, params):
        state = jstep.TrainState.create(params, NO_SLOTS)
        with Saver(tmp_path) as saver:
            saver.save(state)
            assert_same(saver.restore(state), state)

    def test_equinox(self, tmp_path):
        model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
        arrays, static = eqx.partition(model, eqx.is_array)
        state = jstep.TrainState.create(arrays, jstep.adam())
        with Saver(tmp_path) as saver:
            saver.save(state)
            back = saver.restore(jax.eval_shape(lambda: state))
        assert_same(back, state)
        x = jnp.ones(2)
        assert as_bits(eqx.combine(back.params, static)(x)) == as_bits(model(x))

    def test_nnx(self, tmp_path):
        graph, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        state = jstep.TrainState.create(params, jstep.adam())
        with Saver(tmp_path) as saver:
            saver.save(state)
            back = saver.restore(jax.eval_shape(lambda: state))
        assert_same(back, state)
        assert nnx.merge(graph, back.params)(jnp.ones(2)).shape == (3,)

    def test_slots_with_none_and_scalars(self, tmp_path):
        optimizer = jstep.with_moving_average(jstep.adam(), jstep.ExponentialMovingAverage(0.9, zero_debias=True))
        state = jstep.TrainState.create({"w": jnp.ones(3), "n": jnp.arange(2)}, optimizer, global_step=5)
        assert state.slots["m"]["n"] is None
        with Saver(tmp_path) as saver:
            saver.save(state)
            back = saver.restore(jax.eval_shape(lambda: state))
        assert_same(back, state)
        assert back.slots["m"]["n"] is None

    def test_numbers_in_the_state(self, tmp_path):
        state = state_at(1).replace(params={"w": [0.5, 2], "flag": True})
        with Saver(tmp_path) as saver:
            saver.save(state)
            back = saver.restore(state)
        assert back.params["w"][0].dtype == jnp.float32
        assert jax.tree.map(lambda x: x.item(), back.params) == {"w": [0.5, 2], "flag": True}
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(back))

    @pytest.mark.parametrize(
        ("compress", "shrinks"), [(None, (True, False)), (True, (True,) * 2), (False, (False,) * 2)]
    )
    def test_compression(self, tmp_path, compress, shrinks):
        zeros, noise = jnp.zeros(200_000), jax.random.normal(jax.random.key(0), (200_000,))
        with Saver(tmp_path, compress=compress) as saver:
            for step, (leaf, small) in enumerate(zip((zeros, noise), shrinks, strict=True)):
                state = jstep.TrainState({"w": leaf, "b": np.ones(3), "e": jnp.zeros((0, 2))}, {}, jnp.int32(step))
                path = saver.save(state)
                saver.wait()
                size = sum(map(os.path.getsize, files_of(path)))
                assert (size < leaf.nbytes) == small
                assert_same(saver.restore(state), state)

    def test_orbax_reads_the_arrays(self, tmp_path):
        import orbax.checkpoint as ocp

        with Saver(tmp_path) as saver:
            path = saver.save(state_at(3, 7.0))
        names = ("params/w", "slots/momentum/w", "global_step")
        args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        restored = ocp.PyTreeCheckpointer().restore(path, restore_args=args)
        assert restored["params/w"].tolist() == [[7, 7]] * 3

    def test_orbax_takes_a_copy_in_a_bucket_for_complete(self, tmp_path):
        import orbax.checkpoint as ocp

        with Saver(tmp_path) as saver:
            path = epath.Path(saver.save(state_at(3)))
        in_bucket = ocp.path.atomicity.CommitFileTemporaryPath  # how Orbax writes to, and reads in, a bucket
        asyncio.run(in_bucket.validate_final(path))
        (path / COMMITTED).unlink()
        with pytest.raises(Exception, match=COMMITTED):
            asyncio.run(in_bucket.validate_final(path))

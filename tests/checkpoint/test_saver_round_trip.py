"""Restored values are bitwise identical to the saved ones: dtypes, PRNG keys, containers and
models."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import NO_SLOTS, as_bits, assert_same, state_at
from etils import epath

import jstep
from jstep.array_store.listing import ORBAX_COMMIT_FILE
from jstep.checkpoint.saver import Saver


class TestRoundTrip:
    DTYPES = (
        *(
            "bool", "int2", "int4", "uint2", "uint4", "int8", "uint8", "int16", "uint16", "int32",
            "uint32",
        ),
        *(
            "float16", "bfloat16", "float32", "float4_e2m1fn", "float8_e3m4", "float8_e4m3",
            "float8_e4m3fn",
        ),
        *(
            "float8_e4m3b11fnuz",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        ),
    )  # fmt: skip

    def test_every_dtype_is_bitwise_identical(self, tmp_path):
        rng = np.random.default_rng(0)
        model_state = {
            name: jnp.asarray(rng.integers(0, 2, (3, 5)).astype(jnp.dtype(name)))
            for name in self.DTYPES
        } | {
            "complex": jnp.asarray(1j, jnp.complex64),
            "nan": jnp.asarray([np.nan, -0.0, np.inf, 1e-45], jnp.float32),
        }
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
        state = jstep.TrainState.create(
            {"w": jnp.arange(3.0), "n": jnp.arange(3)}, NO_SLOTS, global_step=2**40
        )
        assert state.params["w"].dtype == jnp.float64
        with Saver(tmp_path) as saver:
            assert saver.save(state).endswith(str(2**40))
            shapes = jax.eval_shape(lambda: state)
            assert_same(saver.restore(shapes), state)
            with (
                jax.enable_x64(False),
                pytest.raises(ValueError, match=r"'params/[wn]'.*jax_enable_x64"),
            ):
                saver.restore(shapes)

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

    def test_orbax_takes_a_copy_in_a_bucket_for_complete(self, tmp_path):
        import orbax.checkpoint as ocp

        with Saver(tmp_path) as saver:
            path = epath.Path(saver.save(state_at(3)))
        # This is how Orbax writes to, and reads in, a bucket.
        in_bucket = ocp.path.atomicity.CommitFileTemporaryPath
        asyncio.run(in_bucket.validate_final(path))
        (path / ORBAX_COMMIT_FILE).unlink()
        with pytest.raises(Exception, match=ORBAX_COMMIT_FILE):
            asyncio.run(in_bucket.validate_final(path))

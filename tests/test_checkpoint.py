"""Saving, restoring, what is refused, what is kept. What kills a run is in test_checkpoint_survival.py."""

import dataclasses
import gc
import glob
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jstep
from jstep import checkpoint
from jstep.checkpoint import (
    CheckpointError,
    Saver,
    _orbax,
    _restored,
    _retention,
    checkpoint_name,
    latest_checkpoint,
)
from jstep.checkpoint import _directory as _checkpoint_dir
from jstep.checkpoint import manifest as _manifest


def state_at(step, value=0.0):
    params = {"w": jnp.full((3, 2), value, jnp.float32)}
    return jstep.TrainState.create(params, jstep.momentum(0.1, 0.9), global_step=step)


NO_SLOTS = jstep.gradient_descent(0.1)


def save_all(saver, steps):
    for step in steps:
        saver.save(state_at(step, step))
    saver.wait()


def as_bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert as_bits(x) == as_bits(y)


def listing(directory):
    return sorted(os.listdir(directory))


def files_of(path):
    return sorted(p for p in glob.glob(f"{path}/**", recursive=True) if os.path.isfile(p))


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


class TestNames:
    def test_name(self):
        assert checkpoint_name("my-model", 1000) == "my-model-1000"
        assert checkpoint_name("model", np.int64(3)) == checkpoint_name("model", jnp.int32(3)) == "model-3"

    @pytest.mark.parametrize("step", [1.5, "3", True, None])
    def test_step_must_be_an_integer(self, step):
        with pytest.raises(TypeError, match="step="):
            checkpoint_name("model", step)

    def test_refused(self):
        with pytest.raises(ValueError, match="step=-1"):
            checkpoint_name("model", -1)
        with pytest.raises(ValueError, match="prefix='a/b'"):
            checkpoint_name("a/b", 1)
        with pytest.raises(ValueError, match="prefix=''"):
            checkpoint_name("", 1)
        with pytest.raises(TypeError, match="prefix=3"):
            checkpoint_name(3, 1)

    def test_path_is_a_function_of_global_step(self, tmp_path):
        with Saver(tmp_path) as saver:
            assert saver.save(state_at(1000)) == str(tmp_path / "model-1000")
        assert listing(tmp_path) == ["model-1000"]

    def test_relative_directory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with Saver("here/there") as saver:
            path = saver.save(state_at(1))
        monkeypatch.chdir("/")
        assert os.path.isdir(path)

    def test_latest_checkpoint(self, tmp_path):
        assert latest_checkpoint(tmp_path / "none") is None
        assert latest_checkpoint(tmp_path) is None
        with Saver(tmp_path) as a, Saver(tmp_path, prefix="best") as b:
            save_all(a, [1, 10, 9])
            save_all(b, [12])
        assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "best-12")
        assert latest_checkpoint(tmp_path, prefix="model") == str(tmp_path / "model-10")
        assert latest_checkpoint(tmp_path, "mod") is None

    def test_any_object_with_a_global_step(self, tmp_path):
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Mine:
            global_step: jax.Array
            table: np.ndarray

        with Saver(tmp_path) as saver:
            assert saver.save(Mine(jnp.int32(7), np.arange(3.0))).endswith("model-7")
            back = saver.restore(Mine(jnp.int32(0), np.zeros(3)))
        assert isinstance(back.table, np.ndarray)  # NumPy where the target has NumPy
        assert back.table.dtype == np.float64
        assert back.table.tolist() == [0, 1, 2]


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

    def test_every_dtype_bit_for_bit(self, tmp_path):
        rng = np.random.default_rng(0)
        model_state = {
            name: jnp.asarray(rng.integers(0, 2, (3, 5)).astype(jnp.dtype(name))) for name in self.DTYPES
        } | {"complex": jnp.asarray(1j, jnp.complex64), "nan": jnp.asarray([np.nan, -0.0, np.inf, 1e-45], jnp.float32)}
        params = {"w": jnp.ones(2)}
        made = jstep.TrainState.create(params, jstep.adam()).replace(slots={"all": model_state})
        with Saver(tmp_path) as saver:
            saver.save(made)
            assert_same(saver.restore(made), made)
            looked = saver.restore()
        for name, leaf in model_state.items():
            assert looked["slots"]["all"][name].dtype == leaf.dtype
            assert as_bits(looked["slots"]["all"][name]) == as_bits(leaf)

    def test_wide_dtypes(self, tmp_path, x64):
        made = jstep.TrainState.create({"w": jnp.arange(3.0), "n": jnp.arange(3)}, NO_SLOTS, global_step=2**40)
        assert made.params["w"].dtype == jnp.float64
        with Saver(tmp_path) as saver:
            assert saver.save(made).endswith(str(2**40))
            shapes = jax.eval_shape(lambda: made)
            assert_same(saver.restore(shapes), made)
            with jax.enable_x64(False), pytest.raises(ValueError, match=r"'params/[wn]'.*jax_enable_x64"):
                saver.restore(shapes)

    def test_prng_keys(self, tmp_path):
        keys = {
            "one": jax.random.key(1),
            "many": jax.random.split(jax.random.key(2), (2, 3)),
            "none": jax.random.split(jax.random.key(2), 0),
            "other": jax.random.key(3, impl="unsafe_rbg"),
        }
        made = state_at(1).replace(slots={"keys": keys})
        with Saver(tmp_path) as saver:
            saver.save(made)
            back = saver.restore(jax.eval_shape(lambda: made))
            assert_same(back, made)
            assert saver.restore()["slots"]["keys"]["many"].shape == (2, 3, 2)
            wrong = made.replace(slots={"keys": keys | {"one": jax.random.key(1, impl="rbg")}})
            with pytest.raises(ValueError, match=r"differing \(1\): 'slots/keys/one'"):
                saver.restore(wrong)
        draw = jax.random.normal(back.slots["keys"]["other"], 3)
        assert as_bits(draw) == as_bits(jax.random.normal(keys["other"], 3))

    def test_odd_keys(self, tmp_path):
        params = {
            "a.b": 1.0,
            "a": {"b": 2.0, ".zarray": 3.0, "..": 4.0, "": 5.0},
            "a/b": 6.0,
            "é\n\"'\\ %2E#2": 7.0,
            "\ud800": 8.0,
            "0": {"0.0": 9.0},
            "x" * 300: 10.0,
        }
        made = jstep.TrainState.create(params, NO_SLOTS)
        with Saver(tmp_path) as saver:
            saver.save(made)
            assert_same(saver.restore(made), made)
            assert jax.tree.map(float, saver.restore()["params"]) == params

    def test_containers(self, tmp_path):
        params = {
            "point": Point(jnp.ones(2), jnp.zeros(())),
            "layers": [Layer(jnp.ones((2, 2)), None), Layer(jnp.zeros((2, 2)), jnp.ones(2))],
            "pair": (jnp.arange(3), {}),
            "nothing": [],
            "none": None,
        }
        made = jstep.TrainState.create(params, jstep.adam(), model_state={"mean": jnp.ones((0, 3))})
        with Saver(tmp_path) as saver:
            saver.save(made)
            back = saver.restore(jax.eval_shape(lambda: made))
            assert_same(back, made)
            assert isinstance(back.params["point"], Point)
            # by path: containers may be others
            other = made.replace(params=params | {"pair": [jnp.zeros(3, jnp.int32), ()]})
            assert saver.restore(other).params["pair"][0].tolist() == [0, 1, 2]

    @pytest.mark.parametrize("params", [{}, None, 3.0], ids=repr)
    def test_trees_of_no_leaf_or_one(self, tmp_path, params):
        made = jstep.TrainState.create(params, NO_SLOTS)
        with Saver(tmp_path) as saver:
            saver.save(made)
            assert_same(saver.restore(made), made)

    def test_equinox(self, tmp_path):
        model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
        arrays, static = eqx.partition(model, eqx.is_array)
        made = jstep.TrainState.create(arrays, jstep.adam())
        with Saver(tmp_path) as saver:
            saver.save(made)
            back = saver.restore(jax.eval_shape(lambda: made))
        assert_same(back, made)
        x = jnp.ones(2)
        assert as_bits(eqx.combine(back.params, static)(x)) == as_bits(model(x))

    def test_nnx(self, tmp_path):
        graph, params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        made = jstep.TrainState.create(params, jstep.adam())
        with Saver(tmp_path) as saver:
            saver.save(made)
            back = saver.restore(jax.eval_shape(lambda: made))
        assert_same(back, made)
        assert nnx.merge(graph, back.params)(jnp.ones(2)).shape == (3,)

    def test_slots_with_none_and_scalars(self, tmp_path):
        optimizer = jstep.with_moving_average(jstep.adam(), jstep.ExponentialMovingAverage(0.9, zero_debias=True))
        made = jstep.TrainState.create({"w": jnp.ones(3), "n": jnp.arange(2)}, optimizer, global_step=5)
        assert made.slots["m"]["n"] is None
        with Saver(tmp_path) as saver:
            saver.save(made)
            back = saver.restore(jax.eval_shape(lambda: made))
        assert_same(back, made)
        assert back.slots["m"]["n"] is None

    def test_numbers_in_the_state(self, tmp_path):
        made = state_at(1).replace(params={"w": [0.5, 2], "flag": True})
        with Saver(tmp_path) as saver:
            saver.save(made)
            back = saver.restore(made)
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
                made = jstep.TrainState({"w": leaf, "b": np.ones(3), "e": jnp.zeros((0, 2))}, {}, jnp.int32(step))
                path = saver.save(made)
                saver.wait()
                size = sum(map(os.path.getsize, files_of(path)))
                assert (size < leaf.nbytes) == small
                assert_same(saver.restore(made), made)

    def test_orbax_reads_the_arrays(self, tmp_path):
        import orbax.checkpoint as ocp

        with Saver(tmp_path) as saver:
            path = saver.save(state_at(3, 7.0))
        names = ("params/w", "slots/momentum/w", "global_step")
        args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        restored = ocp.PyTreeCheckpointer().restore(path, restore_args=args)
        assert restored["params/w"].tolist() == [[7, 7]] * 3


class TestTraining:
    def step(self):
        return jstep.minimize(
            lambda params, x: jnp.mean((x @ params["w"] + params["b"][None] - 1) ** 2),
            jstep.adam(0.05),
            metrics=("grad_norm",),
        )

    def fresh(self):
        params = {"w": jax.random.normal(jax.random.key(0), (4, 3)), "b": jnp.zeros(3)}
        return jstep.TrainState.create(params, jstep.adam(0.05))

    def batch(self, n):
        return jax.random.normal(jax.random.fold_in(jax.random.key(1), n), (5, 4))

    def run(self, step, state, start, stop):
        for n in range(start, stop):
            state, _ = step(state, self.batch(n))
        return state

    @pytest.mark.parametrize("target", ["state", "shapes", "stepped", "numpy"])
    def test_k_restore_k_is_2k_and_nothing_compiles_again(self, tmp_path, target):
        step = self.step()
        straight = self.run(step, self.fresh(), 0, 10)
        half = self.run(step, self.fresh(), 0, 5)
        targets = {
            "state": self.fresh,
            "shapes": lambda: jax.eval_shape(self.fresh),
            "stepped": lambda: straight,
            "numpy": lambda: jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, self.fresh())),
        }
        with Saver(tmp_path) as saver:
            saver.save(half)
            restored = saver.restore(targets[target]())
        assert not any(leaf.committed for leaf in jax.tree.leaves(restored))
        resumed = self.run(step, restored, 5, 10)
        assert_same(resumed, straight)
        assert step._cache_size() == 1

    def test_restored_arrays_have_memory_of_their_own(self, tmp_path):
        made = jstep.TrainState.create(
            {f"w{i}": jnp.zeros(1024) for i in range(8)} | {"n": jnp.zeros((), jnp.int32)}, jstep.adam()
        )
        with Saver(tmp_path) as saver:
            saver.save(made)
            restored = saver.restore(made)
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((made, restored))]
        assert len(set(pointers)) == len(pointers)
        # Donation really takes place: memory that NumPy lent would not be reused.
        bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
        before = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(restored.params)}
        after = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(bump(restored).params)}
        assert before == after

    @pytest.mark.parametrize("offset", [0, 4, 16, 32])
    def test_memory_numpy_lends_is_not_kept(self, offset):
        buffer = np.zeros(4096 + 64, np.uint8)
        start = -buffer.ctypes.data % 64 + offset
        array = buffer[start : start + 400].view(np.float32)
        made = _restored._own(array)
        assert made.unsafe_buffer_pointer() != array.ctypes.data
        assert not made.committed
        assert not made.weak_type

    def test_shared_scalars_are_told_apart(self, tmp_path):
        scalar = jnp.int32(4)
        made = jstep.TrainState({"w": jnp.ones(2)}, {"start_step": scalar}, scalar)
        with Saver(tmp_path) as saver:
            saver.save(made)
            restored = saver.restore(made)
        stepped = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(restored)
        assert int(stepped.slots["start_step"]) == int(stepped.global_step) == 5

    @pytest.mark.parametrize(("stage", "compress"), [(False, False), (False, True), (True, False)])
    def test_save_then_donate_under_load(self, tmp_path, stage, compress):
        """What is on disk is exactly the state at N: every number of it is N."""
        size, leaves, saves = 500_000, 12, 8
        made = jstep.TrainState({f"w{i}": jnp.zeros(size) for i in range(leaves)}, {}, jstep.create_global_step())
        step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
        busy = True

        def load():
            x = np.ones((400, 400))
            while busy:
                x @ x

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            with Saver(tmp_path, max_to_keep=None, stage=stage, compress=compress) as saver:
                for _ in range(saves):
                    saver.save(made)
                    for _ in range(4):
                        made = step(made)
                for number in saver.all_steps():
                    for leaf in jax.tree.leaves(saver.restore(step=number)):
                        assert (leaf == number).all()
                assert len(saver.all_steps()) == saves
        finally:
            busy = False
            for thread in threads:
                thread.join()

    def test_stage_follows_a_change_of_shapes(self, tmp_path):
        with Saver(tmp_path, stage=True) as saver:
            for step, size in enumerate([3, 3, 5, 3]):
                made = jstep.TrainState({"w": jnp.full(size, step), "n": np.arange(2)}, {}, jnp.int32(step))
                saver.save(made)
                assert saver.restore(step=step)["params"]["w"].tolist() == [step] * size

    def test_numpy_leaves_are_copied_at_save(self, tmp_path):
        table = np.zeros(2_000_000)
        with Saver(tmp_path) as saver:
            saver.save(state_at(1).replace(params={"t": table}))
            table[:] = 1
            assert saver.restore()["params"]["t"].max() == 0

    def test_nothing_is_held_after_wait(self, tmp_path):
        gc.collect()
        before = len(jax.live_arrays())
        with Saver(tmp_path) as saver:
            saver.save(state_at(1))
            saver.wait()
            gc.collect()
            assert len(jax.live_arrays()) == before


class TestRestore:
    def test_mismatch_lists_paths_and_touches_nothing(self, tmp_path):
        with Saver(tmp_path) as saver:
            saver.save(state_at(1))
            params = {"w": jnp.zeros((2, 3)), "new": jnp.zeros(2)}
            with pytest.raises(ValueError, match="target does not fit") as error:
                saver.restore(jstep.TrainState.create(params, NO_SLOTS))
        text = str(error.value)
        assert "missing in the checkpoint (1): 'params/new'" in text
        assert "extra in the checkpoint (1): 'slots/momentum/w'" in text
        assert "differing (1): 'params/w' (float32[3,2], and float32[2,3] in target)" in text
        assert "model-1" in text
        assert "partial=True" in text
        assert not params["w"].is_deleted()

    def test_dtype_is_part_of_it(self, tmp_path):
        with Saver(tmp_path) as saver:
            saver.save(state_at(1))
            half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, state_at(1))
            with pytest.raises(ValueError, match=r"'params/w' \(float32\[3,2\], and bfloat16\[3,2\] in target\)"):
                saver.restore(half)

    def test_lists_are_cut_at_twenty(self, tmp_path):
        with Saver(tmp_path) as saver:
            saver.save(state_at(1))
            many = jstep.TrainState.create({f"p{i:02}": 0.0 for i in range(30)}, NO_SLOTS)
            with pytest.raises(ValueError, match=r"missing in the checkpoint \(30\)") as error:
                saver.restore(many)
        assert "'params/p19', … and 10 more" in str(error.value)
        assert "p20" not in str(error.value)

    def test_partial(self, tmp_path):
        with Saver(tmp_path) as saver:
            saver.save(state_at(7, 2.0))
            params = {"w": jnp.zeros((3, 2)), "new": jnp.full(2, 5.0)}
            target = jstep.TrainState.create(params, jstep.adam())
            back = saver.restore(target, partial=True)
        assert back.params["w"].tolist() == [[2, 2]] * 3
        assert back.params["new"].tolist() == [5, 5]
        assert int(back.global_step) == 7
        assert set(back.slots) == {"m", "v", "start_step"}
        kept = (back.params["new"].unsafe_buffer_pointer(), target.params["new"].unsafe_buffer_pointer())
        assert kept[0] != kept[1]  # donating the one spares the other

    def test_partial_keeps_what_differs(self, tmp_path):
        with Saver(tmp_path) as saver:
            saver.save(state_at(7, 2.0))
            target = state_at(0).replace(params={"w": jnp.ones((4, 4))})
            assert saver.restore(target, partial=True).params["w"].tolist() == [[1] * 4] * 4

    def test_partial_of_a_part(self, tmp_path):
        with Saver(tmp_path) as saver:
            saver.save(state_at(7, 2.0))
            back = saver.restore({"params": {"w": jax.ShapeDtypeStruct((3, 2), jnp.float32)}}, partial=True)
            assert back["params"]["w"].tolist() == [[2, 2]] * 3

    def test_partial_needs_values_for_the_rest(self, tmp_path):
        with Saver(tmp_path) as saver:
            saver.save(state_at(7))
            target = jax.eval_shape(lambda: jstep.TrainState.create({"w": jnp.zeros((3, 2))}, jstep.adam()))
            with pytest.raises(ValueError, match="'slots/m/w' is not in the checkpoint"):
                saver.restore(target, partial=True)
            with pytest.raises(ValueError, match="nothing in common"):
                saver.restore({"v": jnp.zeros(3)}, partial=True)

    def averaged(self):
        ema = jstep.ExponentialMovingAverage(0.5)
        params = {"w": jnp.ones(3), "n": jnp.arange(2)}
        made = jstep.TrainState.create(params, jstep.with_moving_average(jstep.momentum(0.1, 0.9), ema))
        slots = made.slots | {ema.name: {"w": jnp.asarray([0.1, 0.2, 0.3]), "n": None}}
        return made.replace(params=params | {"w": jnp.ones(3, jnp.bfloat16)}, slots=slots)

    def test_averages(self, tmp_path):
        made = self.averaged()
        with Saver(tmp_path) as saver:
            saver.save(made)
            back = saver.restore(made, use_averages=True)
            assert_same(back.params, jstep.averaged_params(made))
            assert_same(back.slots, made.slots)
            # an evaluation needs no slot of averages
            plain = made.replace(slots={"momentum": made.slots["momentum"]})
            assert_same(saver.restore(plain, use_averages=True).params, back.params)
            with pytest.raises(ValueError, match="extra in the checkpoint"):
                saver.restore(plain)
            looked = saver.restore(use_averages=True)
            assert as_bits(looked["params"]["w"]) == as_bits(back.params["w"])
            assert looked["params"]["n"].tolist() == [0, 1]

    def test_averages_share_nothing_with_their_slot(self, tmp_path):
        made = self.averaged()
        made = made.replace(params=made.params | {"w": jnp.ones(3)})
        with Saver(tmp_path) as saver:
            saver.save(made)
            for target in (made, jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), made)):
                back = saver.restore(target, use_averages=True)
                jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(back)

    def test_averages_of_another_name(self, tmp_path):
        ema = jstep.ExponentialMovingAverage(0.5, name="shadow")
        made = jstep.TrainState.create({"w": 1.0}, jstep.with_moving_average(jstep.momentum(0.1, 0.9), ema))
        made = made.replace(slots=made.slots | {"shadow": {"w": jnp.float32(0.25)}})
        with Saver(tmp_path) as saver:
            saver.save(made)
            assert float(saver.restore(made, use_averages="shadow").params["w"]) == 0.25
            with pytest.raises(ValueError, match=r"no slot 'ExponentialMovingAverage'.*\['momentum', 'shadow'\]"):
                saver.restore(made, use_averages=True)
            with pytest.raises(TypeError, match="use_averages=3"):
                saver.restore(made, use_averages=3)

    def test_which_step(self, tmp_path):
        with Saver(tmp_path) as saver:
            with pytest.raises(FileNotFoundError, match="no checkpoint model-"):
                saver.restore(state_at(0))
            save_all(saver, [1, 2])
            assert int(saver.restore(state_at(0)).global_step) == 2
            assert int(saver.restore(state_at(0), step=1).global_step) == 1
            assert int(saver.restore(state_at(0), step=jnp.int32(1)).global_step) == 1
            with pytest.raises(FileNotFoundError, match=r"step=3.*\[1, 2\]"):
                saver.restore(state_at(0), step=3)
            with pytest.raises(TypeError, match="step='1'"):
                saver.restore(state_at(0), step="1")

    def test_target_must_say_what_it_wants(self, tmp_path):
        with Saver(tmp_path) as saver:
            saver.save(state_at(1))
            with pytest.raises(TypeError, match="'params/w' is str"):
                saver.restore(state_at(1).replace(params={"w": "x"}))

    def test_donated_target(self, tmp_path):
        target = state_at(0)
        with Saver(tmp_path) as saver:
            saver.save(state_at(1, 3.0))
            jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(target)
            assert saver.restore(target).params["w"].tolist() == [[3, 3]] * 3
            gone = jnp.zeros(2)
            gone.delete()
            with pytest.raises(ValueError, match="'params/x' is not in the checkpoint"):
                saver.restore(target.replace(params={"x": gone}), partial=True)

    def test_shardings_are_those_of_the_target(self, tmp_path):
        # several devices: test_checkpoint_survival.py
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        made = state_at(1).replace(slots={"key": jax.random.split(jax.random.key(0), 2), "zero": jnp.zeros((0, 2))})
        with Saver(tmp_path) as saver:
            saver.save(made)
            put = jax.tree.map(lambda x: jax.device_put(x, sharding), made)
            assert_same(saver.restore(put), made)
            assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(saver.restore(put)))

    def test_a_sharding_that_cannot_be(self, tmp_path):
        auto = (jax.sharding.AxisType.Auto,)
        abstract = jax.sharding.AbstractMesh((1,), ("x",), axis_types=auto)
        sharding = jax.sharding.NamedSharding(abstract, jax.sharding.PartitionSpec())
        with Saver(tmp_path) as saver:
            saver.save(state_at(1))
            bad = jax.ShapeDtypeStruct((3, 2), jnp.float32, sharding=sharding)
            with pytest.raises(ValueError, match="'params/w' is over an abstract mesh"):
                saver.restore(state_at(0).replace(params={"w": bad}))


class TestExtra:
    def test_comes_back(self, tmp_path):
        extra = {"epoch": 3, "loss": [0.5, None, float("inf")], "name": "é\n", "on": True, "deep": {"a": {"b": 2**70}}}
        with Saver(tmp_path) as saver:
            saver.save(state_at(1), extra=extra)
            extra["epoch"] = 4  # after save: not ours any more
            assert saver.extra() == extra | {"epoch": 3}
            saver.save(state_at(2))
            assert saver.extra() is None
            assert saver.extra(step=1)["epoch"] == 3
            with pytest.raises(FileNotFoundError, match="step=9"):
                saver.extra(9)

    @pytest.mark.parametrize(
        ("extra", "match"),
        [
            ({"a": {"b": np.float32(1)}}, r"extra\['a'\]\['b'\]: float32 is no JSON value; convert it with .tolist"),
            ({"a": [1, jnp.ones(2)]}, r"extra\['a'\]\[1\]: ArrayImpl"),
            ({"a": {1: 2}}, r"extra\['a'\]: the key 1 is int"),
            ({"a": b"x"}, r"extra\['a'\]: bytes"),
            ({"a": {1, 2}}, r"extra\['a'\]: set"),
            pytest.param(object(), "extra: object", id="object"),
        ],
        ids=repr,
    )
    def test_names_what_is_not_json(self, tmp_path, extra, match):
        with Saver(tmp_path) as saver:
            with pytest.raises(TypeError, match=match):
                saver.save(state_at(1), extra=extra)
            assert saver.all_steps() == []
        assert listing(tmp_path) == []


class TestManifest:
    def test_is_readable(self, tmp_path):
        with Saver(tmp_path, clock=lambda: 1000.0) as saver:
            path = saver.save(state_at(3), extra={"a": 1})
        with open(f"{path}/manifest.json") as file:
            loaded = json.load(file)
        assert loaded["format"] == 1
        assert loaded["jstep"] == jstep.__version__
        assert (loaded["step"], loaded["saved_at"], loaded["extra"], loaded["bytes"]) == (3, 1000.0, {"a": 1}, 52)
        assert loaded["leaves"][0] == {"path": "params/w", "shape": [3, 2], "dtype": "float32", "bytes": 24}
        assert [leaf["path"] for leaf in loaded["leaves"]] == ["params/w", "slots/momentum/w", "global_step"]
        on_disk = {os.path.relpath(file, path): os.path.getsize(file) for file in files_of(path)}
        del on_disk["manifest.json"]
        assert {name: record["bytes"] for name, record in loaded["files"].items()} == on_disk

    def test_a_later_format_is_refused(self, tmp_path, monkeypatch):
        with Saver(tmp_path) as saver:
            monkeypatch.setattr(_manifest, "FORMAT", 2)
            saver.save(state_at(3))
            saver.wait()
            monkeypatch.undo()
            with pytest.raises(CheckpointError, match="format 2, written by jstep"):
                saver.restore(state_at(0))

    def test_blocks(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_manifest, "BLOCK", 1000)
        made = jstep.TrainState.create({"w": jnp.arange(2500)}, NO_SLOTS)
        with Saver(tmp_path, compress=False) as saver:
            path = saver.save(made)
            assert_same(saver.restore(made), made)
            large = max(files_of(path), key=os.path.getsize)
            flip(large, 4321)
            with pytest.raises(CheckpointError, match=r"bytes \[4000, 5000\) differs"):
                saver.restore(made)


class TestDamage:
    @pytest.fixture
    def saved(self, tmp_path):
        saver = Saver(tmp_path)
        save_all(saver, [1, 2, 3])
        yield saver, str(tmp_path / "model-3")
        saver.close()

    def check(self, saver, path, file):
        for target in (state_at(0), None):
            with pytest.raises(CheckpointError) as error:
                saver.restore(target)
            assert path in str(error.value)
            assert os.path.relpath(file, path) in str(error.value)
            assert "newest step that is whole is 2" in str(error.value)
        assert saver.restore(state_at(0), step=2).params["w"].tolist() == [[2, 2]] * 3

    def test_any_flipped_byte(self, saved):
        saver, path = saved
        for file in files_of(path):
            size = os.path.getsize(file)
            for at in {0, 1, size // 3, size // 2, size - 2, size - 1}:
                flip(file, at)
                self.check(saver, path, file)
                flip(file, at)
        assert int(saver.restore(state_at(0)).global_step) == 3

    def test_every_byte_of_the_manifest(self, saved):
        _, path = saved
        file = f"{path}/manifest.json"
        with open(file, "rb") as opened:
            data = opened.read()
        for at in range(len(data)):
            with pytest.raises(CheckpointError, match="checksum differs"):
                _manifest.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(CheckpointError, match="checksum differs"):
                _manifest.decode(data[:at])

    def test_any_truncated_file(self, saved):
        saver, path = saved
        for file in files_of(path):
            with open(file, "rb") as opened:
                data = opened.read()
            for size in (0, len(data) // 2, len(data) - 1):
                with open(file, "wb") as opened:
                    opened.write(data[:size])
                self.check(saver, path, file)
            with open(file, "wb") as opened:
                opened.write(data)

    def test_a_longer_file(self, saved):
        saver, path = saved
        for file in files_of(path):
            with open(file, "ab") as opened:
                opened.write(b"\0")
            self.check(saver, path, file)
            os.truncate(file, os.path.getsize(file) - 1)

    def test_nothing_else_is_whole(self, tmp_path):
        with Saver(tmp_path) as saver:
            path = saver.save(state_at(1))
            saver.wait()
            flip(f"{path}/_METADATA", 5)
            with pytest.raises(CheckpointError, match=f"No other checkpoint model-\\* in {tmp_path} is whole"):
                saver.restore(state_at(0))

    def test_the_newest_whole_one_is_looked_for(self, saved):
        saver, path = saved
        for step in (2, 3):
            flip(max(files_of(path[:-1] + str(step)), key=os.path.getsize), 40)
        with pytest.raises(CheckpointError, match="newest step that is whole is 1"):
            saver.restore(state_at(0))

    def test_unverified(self, tmp_path):
        made = jstep.TrainState.create({"w": jnp.zeros(1000)}, NO_SLOTS)
        with Saver(tmp_path, verify=False, compress=False) as saver:
            path = saver.save(made)
            saver.wait()
            flip(max(files_of(path), key=os.path.getsize), 2000)
            assert np.count_nonzero(saver.restore(made).params["w"]) == 1  # what verify=False gives away
            os.truncate(max(files_of(path), key=os.path.getsize), 2000)
            with pytest.raises(CheckpointError, match=f"{path} could not be read"):
                saver.restore(made)

    def test_a_missing_file_is_a_half_deleted_step(self, saved, caplog):
        saver, path = saved
        for file in files_of(path):
            os.rename(file, file + ".gone")
            assert saver.latest_step() == 2
            assert int(saver.restore(state_at(0)).global_step) == 2
            os.rename(file + ".gone", file)
        assert "model-3 is ignored: it is incomplete" in caplog.text
        assert saver.latest_step() == 3


class TestDirectory:
    def test_foreign_and_half_written(self, tmp_path):
        with Saver(tmp_path) as saver:
            save_all(saver, [5])
            for name in (
                "model-9",
                "model-7/d",
                "model-10.orbax-checkpoint-tmp",
                "model",
                "model-x",
                "model--3",
                "other",
            ):
                os.makedirs(tmp_path / name)
            shutil.copytree(tmp_path / "model-5", tmp_path / "model-007")
            shutil.copytree(tmp_path / "model-5", tmp_path / "model-5-old")
            shutil.copytree(tmp_path / "model-5", tmp_path / "my-model-50")
            shutil.copytree(tmp_path / "model-5", tmp_path / "model-8", ignore=shutil.ignore_patterns("manifest.json"))
            (tmp_path / "model-12").mkdir()
            (tmp_path / "model-12" / "manifest.json").write_text('{"not": "ours"}')
            (tmp_path / "model-11").write_text("a file")
            (tmp_path / "notes.txt").write_text("a note")
            before = listing(tmp_path)
            assert saver.all_steps() == [5]
            assert saver.latest_step() == 5
            assert int(saver.restore(state_at(0)).global_step) == 5
            assert latest_checkpoint(tmp_path, "model") == str(tmp_path / "model-5")
            assert listing(tmp_path) == before

    def test_extra_files_in_a_checkpoint_do_no_harm(self, tmp_path):
        with Saver(tmp_path) as saver:
            path = saver.save(state_at(1))
            saver.wait()
            with open(f"{path}/NOTES", "w") as file:
                file.write("the good one")
            assert int(saver.restore(state_at(0)).global_step) == 1

    def test_what_stands_in_the_way(self, tmp_path, caplog):
        (tmp_path / "model-1").mkdir()
        (tmp_path / "model-1" / "thesis.tex").write_text("unique")
        (tmp_path / "model-2").write_text("a file")
        (tmp_path / "model-3").mkdir()
        (tmp_path / "model-4").mkdir()
        (tmp_path / "model-4" / "_METADATA").write_text("half a checkpoint")
        with Saver(tmp_path) as saver:
            save_all(saver, [1, 2, 3, 4])
            assert saver.all_steps() == [1, 2, 3, 4]
        # nobody's data is lost, remains of checkpoints are
        assert (tmp_path / "model-1.set-aside-0" / "thesis.tex").read_text() == "unique"
        assert (tmp_path / "model-2.set-aside-0").read_text() == "a file"
        assert len(listing(tmp_path)) == 6
        assert "moved to" in caplog.text

    def test_the_same_step_twice(self, tmp_path):
        with Saver(tmp_path) as saver:
            saver.save(state_at(3, 1.0), extra="one")
            assert saver.save(state_at(3, 2.0), extra="two") == str(tmp_path / "model-3")
            assert saver.restore(state_at(0)).params["w"][0, 0] == 2
            assert saver.extra() == "two"
            assert saver.all_steps() == [3]
        assert listing(tmp_path) == ["model-3"]

    def test_the_same_step_twice_and_the_second_fails(self, tmp_path, monkeypatch):
        with Saver(tmp_path) as saver:
            save_all(saver, [3])
            monkeypatch.setattr(_manifest, "write", fail)
            saver.save(state_at(3, 9.0))
            with pytest.raises(CheckpointError):
                saver.wait()
            assert saver.restore(state_at(0)).params["w"][0, 0] == 3
        assert listing(tmp_path) == ["model-3"]

    def test_two_prefixes(self, tmp_path):
        (tmp_path / "model-4.orbax-checkpoint-tmp").mkdir()
        (tmp_path / "best-4.orbax-checkpoint-tmp").mkdir()
        with Saver(tmp_path, max_to_keep=2) as a, Saver(tmp_path, "model-best", max_to_keep=1) as b:
            for step in range(4):
                a.save(state_at(step, 1.0))
                b.save(state_at(step + 10, 2.0))
            assert (a.all_steps(), b.all_steps()) == ([2, 3], [13])
            assert a.restore(state_at(0)).params["w"][0, 0] == 1
            assert b.restore(state_at(0)).params["w"][0, 0] == 2
        assert listing(tmp_path) == ["best-4.orbax-checkpoint-tmp", "model-2", "model-3", "model-best-13"]

    def test_leftovers_go_with_the_first_save(self, tmp_path):
        with Saver(tmp_path) as saver:
            save_all(saver, [1, 2])
        os.makedirs(tmp_path / "model-3.orbax-checkpoint-tmp" / "d")
        os.makedirs(tmp_path / "model-3.orbax-checkpoint-tmp-1712345")
        os.makedirs(tmp_path / "model-3.orbax-checkpoint-tmp.mine")
        shutil.copytree(tmp_path / "model-1", tmp_path / "model-0.jstep-deleted")
        shutil.copytree(tmp_path / "model-1", tmp_path / "model-1.jstep-replaced")
        os.rename(tmp_path / "model-2", tmp_path / "model-2.jstep-replaced")
        os.makedirs(tmp_path / "model-2")
        with Saver(tmp_path) as saver:
            # a reader changes nothing, and finds what a killed replacement left
            assert saver.all_steps() == [1, 2]
            assert int(saver.restore(state_at(0)).global_step) == 2
            assert latest_checkpoint(tmp_path) == str(tmp_path / "model-2.jstep-replaced")
            assert len(listing(tmp_path)) == 8
            saver.save(state_at(5))
            assert saver.all_steps() == [1, 2, 5]
            assert int(saver.restore(state_at(0), step=2).global_step) == 2
        assert listing(tmp_path) == ["model-1", "model-2", "model-3.orbax-checkpoint-tmp.mine", "model-5"]

    def test_another_savers_write_is_left_alone(self, tmp_path, monkeypatch):
        gate = threading.Event()
        write = _manifest.write
        monkeypatch.setattr(_manifest, "write", lambda *args: (gate.wait(60), write(*args)))
        with Saver(tmp_path) as a, Saver(tmp_path) as b:
            a.save(state_at(1))
            b.save(state_at(2))
            gate.set()
            a.wait()
            b.wait()
            assert a.all_steps() == b.all_steps() == [1, 2]

    def test_a_crash_at_any_moment_of_putting_in_place(self, tmp_path, monkeypatch):
        """Interrupted before any of its file operations, publishing leaves the old checkpoint or the new one."""

        class Crash(BaseException):
            pass

        def crash_at(number):
            calls = iter(range(1000))
            for name in ("rename", "unlink", "rmdir"):
                operation = getattr(os, name)

                def checked(*args, operation=operation, **kwargs):
                    if next(calls) == number:
                        raise Crash
                    return operation(*args, **kwargs)

                monkeypatch.setattr(os, name, checked)

        with Saver(tmp_path / "a") as saver:
            saver.save(state_at(3, 1.0))
        with Saver(tmp_path / "b") as saver:
            saver.save(state_at(3, 2.0))
        outcomes = []
        for number in range(100):
            directory = tmp_path / f"run-{number}"
            shutil.copytree(tmp_path / "a", directory)
            shutil.copytree(tmp_path / "b" / "model-3", directory / "model-3.orbax-checkpoint-tmp")
            crash_at(number)
            try:
                _checkpoint_dir.publish(str(directory / "model-3.orbax-checkpoint-tmp"), str(directory / "model-3"))
                crashed = False
            except Crash:
                crashed = True
            monkeypatch.undo()
            with Saver(directory) as saver:
                outcomes.append(saver.restore(state_at(0)).params["w"][0, 0].item())
                saver.save(state_at(4))
                saver.restore(state_at(0), step=3)
            assert listing(directory) == ["model-3", "model-4"]
            if not crashed:
                break
        assert outcomes[:2] == [1, 1]
        assert set(outcomes[2:]) == {2}
        assert len(outcomes) > 10


def fail(*args):
    raise OSError(28, "No space left on device")


class TestRetention:
    def test_max_to_keep(self, tmp_path):
        with Saver(tmp_path, max_to_keep=3) as saver:
            save_all(saver, range(1, 7))
            assert saver.all_steps() == [4, 5, 6]
            assert saver.last_checkpoints == [str(tmp_path / f"model-{step}") for step in (4, 5, 6)]
        assert listing(tmp_path) == ["model-4", "model-5", "model-6"]

    @pytest.mark.parametrize("max_to_keep", [None, 0])
    def test_keep_all(self, tmp_path, max_to_keep):
        with Saver(tmp_path, max_to_keep=max_to_keep) as saver:
            save_all(saver, range(8))
            assert saver.all_steps() == list(range(8))

    def test_after_a_restart(self, tmp_path):
        with Saver(tmp_path, max_to_keep=3) as saver:
            save_all(saver, [1, 2, 3])
        with Saver(tmp_path, max_to_keep=3) as saver:
            save_all(saver, [4, 5])
            assert saver.all_steps() == [3, 4, 5]
        with Saver(tmp_path, max_to_keep=1) as saver:
            save_all(saver, [6])
            assert saver.all_steps() == [6]

    def test_the_newest_and_the_just_saved_stay(self, tmp_path, caplog):
        with Saver(tmp_path, max_to_keep=1) as saver:
            save_all(saver, [10])
            assert not caplog.records
            save_all(saver, [5])
            assert saver.all_steps() == [5, 10]
            assert "step 5 was saved, and there is model-10" in caplog.text
            save_all(saver, [6])
            assert saver.all_steps() == [6, 10]
            save_all(saver, [11])
            assert saver.all_steps() == [11]

    def test_hours(self, tmp_path):
        now = [0.0]
        options = {"max_to_keep": 2, "keep_checkpoint_every_n_hours": 1.0, "clock": lambda: now[0]}

        def run(saver, steps):
            for step in steps:  # one every half hour
                now[0] = step * 1800.0
                saver.save(state_at(step))

        with Saver(tmp_path, **options) as saver:
            run(saver, range(1, 8))
            # 3 is the first saved more than an hour after the start, 5 the first more than two
            assert saver.all_steps() == [3, 5, 6, 7]
            assert saver.last_checkpoints == [str(tmp_path / "model-6"), str(tmp_path / "model-7")]
        now[0] = 0.0
        with Saver(tmp_path, **options) as saver:
            run(saver, range(8, 11))
            assert saver.all_steps() == [3, 5, 7, 9, 10]
        # kept for good means for good
        with Saver(tmp_path, max_to_keep=1) as saver:
            run(saver, [11])
            assert saver.all_steps() == [3, 5, 7, 11]
            assert saver.last_checkpoints == [str(tmp_path / "model-11")]

    def test_memory_survives_a_damaged_manifest(self, tmp_path):
        now = [0.0]
        with Saver(tmp_path, max_to_keep=1, keep_checkpoint_every_n_hours=1, clock=lambda: now[0]) as saver:
            for step in range(1, 5):
                now[0] = step * 4000.0
                saver.save(state_at(step))
            assert saver.all_steps() == [1, 2, 3, 4]
        flip(tmp_path / "model-4" / "manifest.json", 10)
        with Saver(tmp_path, max_to_keep=1) as saver:
            saver.save(state_at(5))
            assert {1, 2, 5} <= set(saver.all_steps())

    @settings(max_examples=200, deadline=None)
    @given(
        gaps=st.lists(st.floats(0.01, 0.99), max_size=40),
        max_to_keep=st.integers(1, 4),
        hours=st.sampled_from([1, 2, 5.5]),
    )
    def test_is_that_of_tf(self, gaps, max_to_keep, hours):
        """tf.train.Saver's bookkeeping, line by line, where saves come oftener than the hours."""
        last, kept_by_tf, next_time, now = [], [], hours * 3600, 0.0
        there, kept = {}, _retention.Kept(frozenset(), 0.0)
        for step, gap in enumerate(gaps):
            now += gap * hours * 3600
            last.append((step, now))
            if len(last) > max_to_keep:
                old = last.pop(0)
                if old[1] > next_time:
                    next_time += hours * 3600
                    kept_by_tf.append(old[0])
            there[step] = now
            victims, kept = _retention.evictions(there, step, kept, max_to_keep, hours)
            for victim in victims:
                del there[victim]
            assert sorted(kept.steps) == kept_by_tf
            assert sorted(there) == sorted(kept_by_tf + [step for step, _ in last])

    def test_a_pause_counts_once(self):
        hour = 3600.0
        there = {step: 100 * hour + step for step in range(5)}
        victims, kept = _retention.evictions(there, 4, _retention.Kept(frozenset(), 0.0), 1, 1.0)
        assert victims == [1, 2, 3]
        assert kept == _retention.Kept(frozenset({0}), 100 * hour)

    def test_what_is_deleted_is_not_half_there(self, tmp_path, monkeypatch):
        with Saver(tmp_path, max_to_keep=1) as saver:
            save_all(saver, [1])
            monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # killed while deleting
            save_all(saver, [2])
            monkeypatch.undo()
            assert saver.all_steps() == [2]
        assert listing(tmp_path) == ["model-1.jstep-deleted", "model-2"]

    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"max_to_keep": -1}, ValueError, "max_to_keep=-1"),
            ({"max_to_keep": 2.5}, TypeError, "max_to_keep=2.5"),
            ({"max_to_keep": True}, TypeError, "max_to_keep=True"),
            ({"keep_checkpoint_every_n_hours": 0}, ValueError, "keep_checkpoint_every_n_hours=0"),
            ({"keep_checkpoint_every_n_hours": float("nan")}, ValueError, "keep_checkpoint_every_n_hours=nan"),
            ({"keep_checkpoint_every_n_hours": "2"}, TypeError, "keep_checkpoint_every_n_hours='2'"),
            ({"prefix": "a/b"}, ValueError, "prefix='a/b'"),
            ({"clock": 3.0}, TypeError, "clock=3.0"),
        ],
        ids=repr,
    )
    def test_arguments(self, tmp_path, options, error, match):
        with pytest.raises(error, match=match):
            Saver(tmp_path, **options)


class TestErrors:
    def test_directory(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(NotADirectoryError, match="there is a file of that name"):
            Saver(tmp_path / "file")
        with pytest.raises(NotADirectoryError, match="there is a file of that name"):
            latest_checkpoint(tmp_path / "file")
        with pytest.raises(ValueError, match="must name a directory"):
            Saver("")
        with pytest.raises(ValueError, match="mounted file system"):
            Saver("gs://bucket/run")
        with pytest.raises(TypeError, match="directory=3: must be a string or a path"):
            Saver(3)
        saver = Saver(tmp_path / "file" / "below")
        with pytest.raises(NotADirectoryError, match="directory of checkpoints cannot be made"):
            saver.save(state_at(1))

    def test_what_cannot_be_saved(self, tmp_path):
        saver = Saver(tmp_path)
        with pytest.raises(TypeError, match="'params/w' is str"):
            saver.save(state_at(1).replace(params={"w": "x"}))
        with pytest.raises(TypeError, match="'params/w' is ShapeDtypeStruct"):
            saver.save(jax.eval_shape(lambda: state_at(1)))
        with pytest.raises(TypeError, match="'params/w' is traced"):
            jax.jit(saver.save)(state_at(1))
        donated = state_at(1)
        donated.params["w"].delete()
        with pytest.raises(ValueError, match="'params/w' was donated to a step"):
            saver.save(donated)
        with pytest.raises(ValueError, match="has no global step"):
            saver.save({"w": jnp.ones(2)})
        with pytest.raises(TypeError, match=r"global_step=.*1\.5.*must be an integer"):
            saver.save(state_at(1).replace(global_step=jnp.float32(1.5)))
        saver.close()
        assert listing(tmp_path) == []

    @pytest.mark.parametrize("call", ["save", "wait", "close", "restore", "extra", "all_steps", "latest_step", "last"])
    def test_background_failure_surfaces_at_the_next_call(self, tmp_path, monkeypatch, call):
        saver = Saver(tmp_path)
        save_all(saver, [1])
        monkeypatch.setattr(_manifest, "write", fail)
        saver.save(state_at(2))
        calls = {
            "save": lambda: saver.save(state_at(3)),
            "restore": lambda: saver.restore(state_at(0)),
            "last": lambda: saver.last_checkpoints,
        }
        with pytest.raises(
            CheckpointError, match=r"model-2 was not saved.*No space left.*newest is .*model-1"
        ) as error:
            calls.get(call, getattr(saver, call, None))()
        assert isinstance(error.value.__cause__, OSError)
        monkeypatch.undo()
        # said once; nothing half-written is left; it goes on
        assert listing(tmp_path) == ["model-1"]
        assert saver.all_steps() == [1]
        if call != "close":
            saver.save(state_at(4))
            assert saver.all_steps() == [1, 4]
        saver.close()

    def test_synchronous_failure(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_manifest, "write", fail)
        saver = Saver(tmp_path, async_save=False)
        with pytest.raises(CheckpointError, match=r"model-2 was not saved.*there are none yet"):
            saver.save(state_at(2))
        assert listing(tmp_path) == []

    def test_synchronous(self, tmp_path):
        saver = Saver(tmp_path, async_save=False)
        saver.save(state_at(2))
        assert listing(tmp_path) == ["model-2"]

    def test_the_error_under_way_is_the_one_to_see(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_manifest, "write", fail)
        with pytest.raises(KeyError, match="mine") as error, Saver(tmp_path) as saver:  # noqa: PT012
            saver.save(state_at(2))
            raise KeyError("mine")
        assert "model-2 was not saved" in error.value.__notes__[0]
        with pytest.raises(CheckpointError), Saver(tmp_path) as saver:
            saver.save(state_at(2))

    def test_closed(self, tmp_path):
        saver = Saver(tmp_path)
        saver.save(state_at(2))
        saver.close()
        saver.close()
        with pytest.raises(ValueError, match="closed"):
            saver.save(state_at(3))
        assert saver.latest_step() == 2
        assert int(saver.restore(state_at(0)).global_step) == 2

    def test_failure_in_a_saver_nobody_holds(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr(_manifest, "write", fail)
        Saver(tmp_path).save(state_at(2))
        gc.collect()
        assert len(_orbax.IN_FLIGHT) == 1
        _orbax._finish()
        assert "model-2 was not saved" in caplog.text
        assert not _orbax.IN_FLIGHT

    def test_an_interrupt_while_saving(self, tmp_path, monkeypatch):
        with Saver(tmp_path) as saver:
            save_all(saver, [1])

            def interrupted(*args):
                (tmp_path / "model-2.orbax-checkpoint-tmp").mkdir()
                raise KeyboardInterrupt

            monkeypatch.setattr(saver._checkpointer, "save", interrupted)
            with pytest.raises(KeyboardInterrupt):
                saver.save(state_at(2))
            monkeypatch.undo()
            save_all(saver, [3])
        assert listing(tmp_path) == ["model-1", "model-3"]

    def test_many_threads(self, tmp_path):
        with Saver(tmp_path, max_to_keep=None) as saver:
            threads = [threading.Thread(target=saver.save, args=(state_at(step, step),)) for step in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert saver.all_steps() == list(range(8))
            assert all(saver.restore(step=step)["params"]["w"][0, 0] == step for step in range(8))

    def test_repr(self, tmp_path):
        assert repr(Saver(tmp_path)) == f"<jstep.Saver {tmp_path}/model-*>"


def test_import_is_light():
    code = "import jstep.checkpoint, sys; assert not [m for m in sys.modules if m.startswith(('orbax', 'tensorstore'))]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_module_knows_orbax():
    found = [
        path.name
        for path in pathlib.Path(checkpoint.__file__).parent.rglob("*.py")
        if re.search(r"^\s*(import|from) (orbax|tensorstore)", path.read_text(), re.MULTILINE)
    ]
    assert found == ["_orbax.py"]


def test_save_returns_before_the_file_is_there(tmp_path, monkeypatch):
    gate = threading.Event()
    write = _manifest.write
    monkeypatch.setattr(_manifest, "write", lambda *args: (gate.wait(60), write(*args)))
    with Saver(tmp_path) as saver:
        path = saver.save(state_at(1))
        time.sleep(0.05)
        assert not os.path.exists(path)
        assert latest_checkpoint(tmp_path) is None
        gate.set()
        saver.wait()
        assert os.path.exists(path)

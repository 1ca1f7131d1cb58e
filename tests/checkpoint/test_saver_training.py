"""Saving between training steps: donation, memory, and bitwise resumption."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import assert_same, state_at

import jstep
from jstep.array_store import array_writer
from jstep.checkpoint.saver import Saver


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

    @pytest.mark.thorough(except_for=["shapes"])
    @pytest.mark.parametrize("target", ["state", "shapes", "stepped", "numpy"])
    def test_resume_is_bitwise_and_does_not_recompile(self, tmp_path, target):
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

    def test_restored_arrays_own_their_memory(self, tmp_path):
        state = jstep.TrainState.create(
            {f"w{i}": jnp.zeros(1024) for i in range(8)} | {"n": jnp.zeros((), jnp.int32)},
            jstep.adam(),
        )
        with Saver(tmp_path) as saver:
            saver.save(state)
            restored = saver.restore(state)
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state, restored))]
        assert len(set(pointers)) == len(pointers)
        # Donation reuses the buffers, which it would not do for memory owned by NumPy.
        bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
        before = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(restored.params)}
        after = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(bump(restored).params)}
        assert before == after

    @pytest.mark.parametrize("size", [5, 300_000])
    def test_the_saved_state_may_be_donated_before_it_is_written(self, tmp_path, monkeypatch, size):
        """Steps that donate the state run before any of it is written."""
        write, released = array_writer.write, threading.Event()
        monkeypatch.setattr(
            array_writer, "write", lambda *args, **to: released.wait(30) and write(*args, **to)
        )
        state = jstep.TrainState.create({"w": jnp.arange(size, dtype=jnp.float32)}, jstep.adam(1.0))
        step = jstep.minimize(lambda params: jnp.sum(params["w"] ** 2), jstep.adam(1.0))
        state, _ = step(state)
        before, slot = np.array(state.params["w"]), np.array(state.slots["m"]["w"])
        with Saver(tmp_path) as saver:
            saver.save(state)
            for _ in range(3):
                state, _ = step(state)
            jax.block_until_ready(state)
            released.set()
            back = saver.restore(jax.eval_shape(lambda: state))
            assert np.array_equal(back.params["w"], before)
            assert np.array_equal(back.slots["m"]["w"], slot)

    def test_numpy_leaves_are_copied_by_save(self, tmp_path):
        table = np.zeros(2_000_000)
        with Saver(tmp_path) as saver:
            saver.save(state_at(1).replace(params={"t": table}))
            table[:] = 1
            assert saver.restore()["params"]["t"].max() == 0

    def test_no_arrays_are_referenced_after_wait(self, tmp_path):
        gc.collect()
        before = len(jax.live_arrays())
        with Saver(tmp_path) as saver:
            saver.save(state_at(1))
            saver.wait()
            gc.collect()
            assert len(jax.live_arrays()) == before

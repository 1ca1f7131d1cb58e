"""`Saver.restore` into a target: mismatches, partial restores, averages and shardings."""

import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import NO_SLOTS, as_bits, assert_same, save_all, state_at

import jstep
from jstep.checkpoint.saver import Saver


class TestRestore:
    def test_mismatch_lists_paths_and_changes_nothing(self, tmp_path):
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
        kept = (
            back.params["new"].unsafe_buffer_pointer(),
            target.params["new"].unsafe_buffer_pointer(),
        )
        assert kept[0] != kept[1]  # donating one does not affect the other

    def averaged(self):
        ema = jstep.ExponentialMovingAverage(0.5)
        params = {"w": jnp.ones(3), "n": jnp.arange(2)}
        state = jstep.TrainState.create(
            params, jstep.with_moving_average(jstep.momentum(0.1, 0.9), ema)
        )
        slots = state.slots | {ema.name: {"w": jnp.asarray([0.1, 0.2, 0.3]), "n": None}}
        return state.replace(params=params | {"w": jnp.ones(3, jnp.bfloat16)}, slots=slots)

    def test_averages(self, tmp_path):
        state = self.averaged()
        with Saver(tmp_path) as saver:
            saver.save(state)
            back = saver.restore(state, use_averages=True)
            assert_same(back.params, jstep.averaged_params(state))
            assert_same(back.slots, state.slots)
            # the target of an evaluation does not need the slot of averages
            plain = state.replace(slots={"momentum": state.slots["momentum"]})
            assert_same(saver.restore(plain, use_averages=True).params, back.params)
            with pytest.raises(ValueError, match="extra in the checkpoint"):
                saver.restore(plain)
            loaded = saver.restore(use_averages=True)
            assert as_bits(loaded["params"]["w"]) == as_bits(back.params["w"])
            assert loaded["params"]["n"].tolist() == [0, 1]

    @pytest.mark.parametrize("of_model_state", [False, True])
    def test_averages_beside_a_raw_model_state(self, tmp_path, caplog, of_model_state):
        """One warning for each Saver; none for parameters alone, for counts, or if both are
        averaged."""
        optimizer = jstep.with_moving_average(
            jstep.momentum(0.1, 0.9),
            jstep.ExponentialMovingAverage(0.5, model_state=of_model_state),
        )
        model_state = {"mean": 1.0, "count": jnp.int32(3)}
        state = jstep.TrainState.create({"w": 1.0}, optimizer, model_state=model_state)
        plain = jstep.TrainState.create(
            {"w": 1.0}, jstep.momentum(0.1, 0.9), model_state=model_state
        )
        with Saver(tmp_path) as saver:
            saver.save(state)
            saver.restore(state)
            saver.restore_params(state.params, use_averages=True)
            assert caplog.messages == []
            for target in (state, plain):
                saver.restore(target, use_averages=True)
        assert len(caplog.messages) == (0 if of_model_state else 1)
        if not of_model_state:
            start = (
                f"use_averages: {tmp_path}/model-0 has averages of the parameters, "
                "and no averages of the model state"
            )
            assert caplog.messages[0].startswith(start)
            assert (
                "restored as it was (1): 'slots/model_state/mean'. Average both"
                in caplog.messages[0]
            )

    def test_selects_the_step(self, tmp_path):
        with Saver(tmp_path) as saver:
            with pytest.raises(
                FileNotFoundError,
                match=r"no complete checkpoint model-1 in .*which has no checkpoints",
            ):
                saver.restore(state_at(0), step=1)
            with pytest.raises(FileNotFoundError, match="no checkpoint model-"):
                saver.restore(state_at(0))
            save_all(saver, [1, 2])
            assert int(saver.restore(state_at(0)).global_step) == 2
            assert int(saver.restore(state_at(0), step=1).global_step) == 1
            assert int(saver.restore(state_at(0), step=jnp.int32(1)).global_step) == 1

    def test_a_donated_target(self, tmp_path):
        target = state_at(0)
        with Saver(tmp_path) as saver:
            saver.save(state_at(1, 3.0))
            jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(target)
            assert saver.restore(target).params["w"].tolist() == [[3, 3]] * 3
            deleted = jnp.zeros(2)
            deleted.delete()
            with pytest.raises(
                ValueError,
                match=r"'params/x' stays as it is.* got a shape or a deleted array",
            ):
                saver.restore(target.replace(params={"x": deleted}), partial=True)

    def test_abstract_shapes_use_the_current_mesh(self, tmp_path):
        """Under jax.set_mesh, jax.eval_shape returns abstract meshes, which refer to the mesh that
        is set."""

        def fresh():
            return jstep.TrainState.create({"w": jnp.ones((4, 2))}, jstep.adam())

        mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
        with Saver(tmp_path) as saver:
            with jax.set_mesh(mesh):
                state = fresh()
                saver.save(state)
                shapes = jax.eval_shape(fresh)
                back = saver.restore(shapes)
            assert_same(back, state)
            assert back.params["w"].sharding.is_equivalent_to(state.params["w"].sharding, 2)
            with pytest.raises(ValueError, match=r"abstract mesh.*jax.set_mesh\(mesh\)"):
                saver.restore(shapes)

    def test_under_a_transfer_guard(self, tmp_path):
        mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
        state = jstep.shard_state(state_at(1, 2.0), mesh, jax.sharding.PartitionSpec())
        with Saver(tmp_path) as saver:
            with jax.transfer_guard("disallow_explicit"):
                saver.save(state)
                with jax.set_mesh(mesh):
                    # Shapes of arrays on Explicit axes are over an abstract mesh.
                    shapes = jax.eval_shape(lambda: state)
                    back = [saver.restore(target) for target in (state, shapes)]
                back.append(saver.restore(state))
                saver.restore()
            for one in back:
                assert_same(one, state)

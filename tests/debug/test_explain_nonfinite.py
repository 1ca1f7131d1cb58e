"""`explain_nonfinite`: from a run to the update, operation and rows that made the first NaN."""

import jax.numpy as jnp
import numpy as np
import pytest

import jstep

OPTIMIZER = jstep.gradient_descent(0.25)


def loss_fn(params, x):
    return jnp.mean(jnp.sqrt(params["w"] * x))  # its gradient is infinite where x is 0


STEP = jstep.minimize(loss_fn, OPTIMIZER)


def make_state():
    return jstep.TrainState.create({"w": 4.0}, OPTIMIZER)


def batches(step):
    x = np.arange(1.0, 7.0, dtype=np.float32)
    return np.where((step == 5) & (x % 2 == 0), 0.0, x).astype(np.float32)


def train(where, last_step, data=batches, **options):
    options = {
        "save_checkpoint_steps": 2,
        "hooks": [jstep.NanLossHook()],
        "progress": False,
    } | options
    with pytest.raises(jstep.NanLossDuringTrainingError):
        jstep.train(STEP, make_state(), data, last_step, checkpoint_dir=where, **options)


def test_step_operation_and_rows(tmp_path):
    train(tmp_path, 20)
    found = jstep.explain_nonfinite(STEP, make_state(), batches, tmp_path)
    assert (found.step, found.rows) == (5, (1, 3, 5))
    assert "test_explain_nonfinite.py" in found.found.source
    words = "the update 5 → 6 is the first whose result is not finite: params/w contains NaN"
    assert words in str(found)
    assert "rows of the batch  1, 3, 5" in str(found)
    state, args = jstep.replay(STEP, make_state(), batches, tmp_path, found.step)
    assert np.isfinite(float(loss_fn(state.params, *args))), (
        "a finite loss with a gradient that is not"
    )


def test_without_a_checkpoint_and_without_a_record(tmp_path):
    found = jstep.explain_nonfinite(STEP, make_state(), batches, tmp_path, last_step=9)
    assert (found.step, found.rows) == (5, (1, 3, 5))
    with pytest.raises(FileNotFoundError, match="no run is there"):
        jstep.explain_nonfinite(STEP, make_state(), batches, tmp_path)


def test_the_prefix_of_a_saver(tmp_path):
    with jstep.Saver(tmp_path, prefix="mine") as saver:
        with pytest.raises(jstep.NanLossDuringTrainingError):
            jstep.train(
                STEP, make_state(), batches, 20, checkpoint_dir=saver, save_checkpoint_steps=2,
                hooks=[jstep.NanLossHook()], progress=False,
            )  # fmt: skip
        assert jstep.explain_nonfinite(STEP, make_state(), batches, saver).step == 5


def test_a_finite_run(tmp_path):
    def data(step):
        return np.ones(3, np.float32)

    jstep.train(STEP, make_state(), data, 3, checkpoint_dir=tmp_path, progress=False)
    assert jstep.explain_nonfinite(STEP, make_state(), data, tmp_path) is None


@pytest.mark.parametrize("last_step", [12, 6])
def test_updates_that_are_skipped(last_step, tmp_path):
    """The state and the loss stay finite; the first skipped update after the newest checkpoint is
    explained."""
    optimizer = jstep.skip_nonfinite(OPTIMIZER)
    step = jstep.minimize(loss_fn, optimizer)

    def state():
        return jstep.TrainState.create({"w": 4.0}, optimizer)

    def data(step):
        return batches(min(step, 5))  # from step 5 on, all have zeros

    jstep.train(
        step,
        state(),
        data,
        last_step,
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=4,
        progress=False,
    )
    found = jstep.explain_nonfinite(step, state(), data, tmp_path)
    assert (found.step, found.rows, found.is_skipped) == (last_step, (1, 3, 5), True)
    assert (
        f"the update {last_step} → {last_step + 1} is skipped, because its gradients are not finite"
        in str(found)
    )
    assert "test_explain_nonfinite.py" in found.found.source
    later = tmp_path / "other"
    jstep.train(
        step, state(), lambda step: batches(step + 6), 4, checkpoint_dir=later, progress=False
    )
    assert jstep.explain_nonfinite(step, state(), lambda step: batches(step + 6), later) is None


def test_a_checkpoint_that_is_not_finite_is_no_start(tmp_path):
    with jstep.Saver(tmp_path, allow_nonfinite=True) as saver:
        jstep.train(
            STEP,
            make_state(),
            batches,
            8,
            checkpoint_dir=saver,
            save_checkpoint_steps=2,
            progress=False,
        )
    assert jstep.latest_checkpoint(tmp_path).endswith("model-8")
    assert jstep.explain_nonfinite(STEP, make_state(), batches, tmp_path).step == 5


def test_rows_that_are_not_alone(tmp_path):
    def between(params, x):
        return jnp.mean(params["w"] * jnp.log(jnp.max(x) - jnp.min(x)))

    step = jstep.minimize(between, OPTIMIZER)

    def data(step):
        return np.array([1.0, 2.0 if step < 3 else 1.0], np.float32)

    found = jstep.explain_nonfinite(step, make_state(), data, tmp_path, last_step=9)
    assert (found.step, found.found.primitive) == (3, "log")

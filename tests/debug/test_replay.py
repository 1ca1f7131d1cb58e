"""`replay`: restore the state and batch of an earlier step of a run."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from positioned import Positioned

import jstep
from jstep.compiling import dispatch

OPTIMIZER = jstep.adam(0.1)
KEY = jax.random.key(7)


def loss_fn(params, x, rng):
    return ((params["w"] - x + 0.1 * jax.random.normal(rng, x.shape)) ** 2).sum()


STEP = jstep.minimize(loss_fn, OPTIMIZER, rng=KEY)


def make_state(step=0):
    return jstep.TrainState.create({"w": jnp.zeros(4)}, OPTIMIZER, global_step=step)


def batch(step):
    return np.random.default_rng(step).standard_normal(4).astype(np.float32)


class FingerprintRecorder(jstep.Hook):
    """A hook that records the fingerprint of each state."""

    def __init__(self):
        self.states = {}

    def begin(self, state):
        self.states[jstep.global_step(state)] = digest(state)

    def after_step(self, step, state, metrics):
        self.states[step] = digest(state)


def digest(tree):
    a, b = jstep.fingerprint(tree)
    return f"{a:08x}{b:08x}"


def run(last_step=10, batches=batch, **kwargs):
    recorder = FingerprintRecorder()
    jstep.train(STEP, make_state(), batches, last_step, hooks=[recorder], progress=False, **kwargs)
    return recorder.states


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Directory and fingerprints of a run of ten steps with checkpoints at 4, 8 and 10; replays
    write nothing."""
    directory = tmp_path_factory.mktemp("run")
    return directory, run(checkpoint_dir=directory, save_checkpoint_steps=4)


@pytest.mark.parametrize("step", [0, 3, 4, 5, 9])
def test_replay_from_the_newest_earlier_checkpoint(finished_run, step):
    directory, states = finished_run
    state, args = jstep.replay(STEP, make_state(), batch, directory, step)
    assert jstep.global_step(state) == step
    assert digest(state) == states[step]
    np.testing.assert_array_equal(args[0], batch(step))
    after, _ = STEP(state, *args)
    assert digest(after) == states[step + 1]


def test_checkpoints_take_precedence_over_the_state(finished_run):
    directory, states = finished_run
    other = make_state().replace(params={"w": jnp.ones(4)})
    assert digest(jstep.replay(STEP, other, batch, directory, 6).state) == states[6]


def test_replay_without_checkpoints(finished_run):
    _, states = finished_run
    replayed = jstep.replay(STEP, make_state(), batch, None, 7)
    assert digest(replayed.state) == states[7]
    assert isinstance(replayed, jstep.Replay)


def test_replay_with_a_saver_and_a_prefix(tmp_path):
    with jstep.Saver(tmp_path, prefix="mine") as saver:
        states = run(checkpoint_dir=saver, save_checkpoint_steps=4)
        assert digest(jstep.replay(STEP, make_state(), batch, saver, 5).state) == states[5]
    assert (
        digest(jstep.replay(STEP, make_state(), batch, tmp_path, 9, prefix="mine").state)
        == states[9]
    )


@pytest.mark.thorough
def test_replay_with_several_steps_per_call(tmp_path):
    states = run(steps_per_call=4, checkpoint_dir=tmp_path, save_checkpoint_steps=6)
    assert sorted(states) == [0, 4, 6, 10]
    for step in 0, 4, 6:
        state, args = jstep.replay(STEP, make_state(), batch, tmp_path, step, steps_per_call=4)
        assert digest(state) == states[step]
        np.testing.assert_array_equal(args[0], batch(step))


def test_iterator_position_is_restored(tmp_path):
    loader = Positioned(batch)
    states = run(batches=loader, checkpoint_dir=tmp_path, save_checkpoint_steps=4)
    state, args = jstep.replay(STEP, make_state(), loader, tmp_path, 6)
    assert digest(state) == states[6]
    np.testing.assert_array_equal(args[0], batch(6))


def test_no_state_before_the_step(finished_run, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"step=2: nothing lies before it: no checkpoint_dir.*state given is at step 5",
    ):
        jstep.replay(STEP, make_state(5), batch, None, 2)
    with pytest.raises(ValueError, match=r"are of \[\], and the state given is at step 5"):
        jstep.replay(STEP, make_state(5), batch, tmp_path, 2)
    with pytest.raises(ValueError, match=r"are of \[4, 8, 10\], and the state given is at step 5"):
        jstep.replay(STEP, make_state(5), batch, finished_run[0], 2)


def test_iterator_without_a_saved_position(finished_run):
    with pytest.raises(ValueError, match="the checkpoint of step 4 has no position"):
        # That run used a function of the step.
        jstep.replay(STEP, make_state(), Positioned(batch), finished_run[0], 6)


def test_batches_made_with_the_state_see_the_state_of_their_step():
    """`train` runs them one step a call, so that `replay` with its arguments must do so, too."""
    batches = jstep.from_state(lambda step, state: jnp.sin(3 * state.params["w"] + step))
    for _ in range(2):
        state, _ = jstep.replay(STEP, make_state(), batches, None, 9, steps_per_call="auto")
        assert digest(state) == run(9, batches, steps_per_call="auto")[9]
    with pytest.raises(ValueError, match=r"steps_per_call=3, batches=<jstep\.from_state"):
        jstep.replay(STEP, make_state(), batches, None, 9, steps_per_call=3)


def test_auto_never_stacks_batches_made_with_the_state(monkeypatch):
    """Also where the times of the first calls would choose many steps."""
    monkeypatch.setattr(dispatch, "choose_max_steps", lambda seconds: 4)
    monkeypatch.setattr(dispatch, "run_in_background", lambda call, name: call())
    batches = jstep.from_state(lambda step, state: jnp.sin(3 * state.params["w"] + step))
    state, _ = jstep.replay(STEP, make_state(), batches, None, 30, steps_per_call="auto")
    assert digest(state) == run(30, batches)[30]


def test_a_corrupted_checkpoint_is_skipped(tmp_path, caplog):
    states = run(checkpoint_dir=tmp_path, save_checkpoint_steps=4)
    corrupt(tmp_path / "model-8")
    found = jstep.replay(STEP, make_state(), batch, tmp_path, 8)
    assert digest(found.state) == states[8]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("replay: model-8 is skipped: ")
    for start in (3, 7):
        assert (
            digest(jstep.replay(STEP, make_state(), batch, tmp_path, 9, start=start).state)
            == states[9]
        )
    with pytest.raises(ValueError, match="start=-1"):
        jstep.replay(STEP, make_state(), batch, tmp_path, 9, start=-1)


class _OfALiveRun(jstep.Saver):
    """A Saver of a run that replaces its temporary checkpoint after the steps were listed."""

    def all_steps(self):
        steps = super().all_steps()
        shutil.rmtree(f"{self.directory}/model-8", ignore_errors=True)
        return steps


def test_a_checkpoint_that_is_gone_meanwhile_is_skipped(tmp_path, caplog):
    states = run(checkpoint_dir=tmp_path, save_checkpoint_steps=4)
    with _OfALiveRun(tmp_path) as saver:
        assert digest(jstep.replay(STEP, make_state(), batch, saver, 9).state) == states[9]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("replay: model-8 is skipped: ")


def corrupt(checkpoint):
    """Flip a bit of the arrays, not of a file that only Orbax reads."""
    path = max((checkpoint / "d").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("place", ["logdir", "checkpoint_dir"])
def test_a_replay_is_compared_with_fingerprints(place, tmp_path):
    logs = tmp_path / ("logs" if place == "logdir" else "run")
    hooks = [jstep.FingerprintHook(every_n_steps=3)]
    jstep.train(
        STEP,
        make_state(),
        batch,
        10,
        hooks=hooks,
        progress=False,
        checkpoint_dir=tmp_path / "run",
        logdir=logs,
    )
    for steps_per_call in (1, 4):
        jstep.replay(
            STEP, make_state(), batch, tmp_path / "run", 8, steps_per_call=steps_per_call, start=0
        )
    with pytest.raises(
        ValueError, match="the state at step 6 is not the one of the run: its fingerprint is"
    ):
        jstep.replay(
            STEP, make_state(), lambda step: batch(step + (step == 4)), tmp_path / "run", 8
        )


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("is_logged", [True, False])
def test_without_fingerprints_losses_are_compared(is_logged, steps_per_call, tmp_path, caplog):
    caplog.set_level("INFO", "jstep")
    logs = {"logdir": tmp_path / "run", "save_summaries_steps": 3} if is_logged else {}
    options = {"progress": False, "checkpoint_dir": tmp_path / "run", **logs}
    for last_step in (7, 10):
        jstep.train(STEP, make_state(), batch, last_step, **options)
    caplog.clear()

    def replayed(step, batches=batch):
        return jstep.replay(
            STEP,
            make_state(),
            batches,
            tmp_path / "run",
            step,
            start=0,
            steps_per_call=steps_per_call,
        )

    replayed(8)
    steps = "3, 6, 7" if is_logged else "7"
    assert caplog.messages[-1] == f"replay: compared with the run's losses at steps {steps}"
    replayed(2)
    assert caplog.messages[-1].startswith(
        "replay: compared with nothing: the run has recorded no fingerprint or loss"
    )
    first = 6 if is_logged else 7
    with pytest.raises(
        ValueError, match=f"the loss at step {first} is not the one of the run: it is "
    ):
        replayed(8, lambda step: batch(step + 20 * (step >= 3)))

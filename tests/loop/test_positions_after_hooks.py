"""What hooks tell the object that makes the batches is in the checkpoint of their step: 17 + 23
steps are 40."""

import functools
import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from points import Remembering

import jstep

OPTIMIZER = jstep.adam(1e-2)
X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
Y = X @ np.array([1, -1, 2, 0.5], np.float32)


def loss_fn(params, x, y):
    error = x @ params["w"] - y
    return jnp.mean(error**2), {"error": jnp.abs(error)}


STEP = jstep.minimize(loss_fn, OPTIMIZER, has_aux=True)


def make_state():
    return jstep.TrainState.create({"w": jnp.zeros(4)}, OPTIMIZER)


class Buffer(Remembering):
    """Prioritized replay: rows are drawn by their errors, which a hook tells."""

    def __init__(self):
        self.priority, self.rng, self.last = np.ones(64), np.random.default_rng(1), np.zeros(8, int)

    def __call__(self, step, state):
        self.last = self.rng.choice(64, 8, p=self.priority / self.priority.sum())
        return X[self.last], Y[self.last]

    def tell(self, step, state, metrics):
        self.priority[self.last] = np.asarray(metrics["error"]) + 1e-3


class UnknownAtFirst(Buffer):
    """A buffer that does not know its position before its first batch."""

    def state_dict(self):
        return vars(self) if self.last.any() else None


def run(buffer, last, directory, hooks=(), step=STEP, **kwargs):
    kwargs = {"progress": False, "log_steps": None, "save_checkpoint_secs": None} | kwargs
    hooks = [jstep.every(1, buffer.tell), *hooks]
    return jstep.train(
        step,
        make_state(),
        jstep.from_state(buffer),
        last,
        hooks=hooks,
        checkpoint_dir=directory,
        **kwargs,
    )


def by_hand(steps, buffer):
    state = make_state()
    for step in range(steps):
        state, metrics = STEP(state, *buffer(step, state))
        buffer.tell(step + 1, state, metrics)
    return state


@functools.cache
def whole():
    buffer = Buffer()
    return by_hand(40, buffer), buffer.priority


def assert_resumes(directory, kind=Buffer, last=40):
    """A run from the newest checkpoint ends as the loop by hand, and so does its buffer."""
    buffer, (end, priority) = kind(), whole()
    assert run(buffer, last, directory) == end
    np.testing.assert_array_equal(buffer.priority, priority)


@pytest.mark.thorough(except_for=["UnknownAtFirst"])
@pytest.mark.parametrize("kind", [Buffer, UnknownAtFirst])
def test_a_run_in_two_parts_is_a_whole_one(tmp_path, kind):
    assert run(kind(), 17, tmp_path) == by_hand(17, Buffer())
    assert_resumes(tmp_path, kind)
    found = jstep.replay(STEP, make_state(), jstep.from_state(kind()), tmp_path, 17)
    assert found.state == by_hand(17, Buffer())
    after = Buffer()
    by_hand(17, after)
    np.testing.assert_array_equal(found.args[0], after(17, found.state)[0])


def test_saves_on_their_cadence_hold_what_hooks_tell(tmp_path):
    run(Buffer(), 25, tmp_path, save_checkpoint_steps=10)
    for step in (10, 20):
        with jstep.Saver(tmp_path) as saver:
            names = {step: saver.extra(step)["batches"] for step in saver.all_steps()}
        other = tmp_path / str(step)
        run(Buffer(), step, other)
        assert jstep.Saver(other).extra()["batches"] == names[step]


class ToldError(Exception):
    """A failure of a hook, a step or a batch."""


def fail_at(step, when):

    def hook(n, state, metrics):
        if n == step:
            raise ToldError

    def train_step(state, *args):
        if jstep.global_step(state) == step:
            raise ToldError
        return STEP(state, *args)

    return {"hook": {"hooks": [jstep.every(1, hook)]}, "step": {"step": train_step}}[when]


@pytest.mark.parametrize("when", ["hook", "step"])
def test_an_error(tmp_path, when):
    """A batch whose step failed is made again; what hooks told after the last complete step is
    kept."""
    with pytest.raises(ToldError):
        run(Buffer(), 40, tmp_path, **fail_at(23, when))
    assert jstep.Saver(tmp_path).latest_step() == (None if when == "hook" else 23)
    assert_resumes(tmp_path)


class Breaks(Buffer):
    """A buffer that changes and then fails, is interrupted, or ends."""

    def __init__(self, how):
        super().__init__()
        self._how = how

    def __call__(self, step, state):
        batch = super().__call__(step, state)
        if step == 23:
            self._how()
        return batch

    def state_dict(self):
        return {name: value for name, value in vars(self).items() if name != "_how"}


def fail():
    raise ToldError


def end():
    raise StopIteration


def interrupt():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.thorough(except_for=["interrupt"])
@pytest.mark.parametrize("how", [fail, end, interrupt])
def test_a_batch_that_could_not_be_made(tmp_path, how):
    """A restart makes it again, from the position after the hooks of the step before."""
    if how is end:
        run(Breaks(how), None, tmp_path)
    else:
        with pytest.raises(jstep.Preempted if how is interrupt else ToldError):
            run(Breaks(how), 40, tmp_path)
    assert jstep.Saver(tmp_path).latest_step() == 23
    assert_resumes(tmp_path)


def test_a_signal_in_a_hook(tmp_path):
    def kill(step, state, metrics):
        if step == 23:
            os.kill(os.getpid(), signal.SIGTERM)

    for before in (True, False):  # before or after the hook that tells
        buffer, directory = Buffer(), tmp_path / str(before)
        hooks = [jstep.every(1, kill), jstep.every(1, buffer.tell)][:: 1 if before else -1]
        with pytest.raises(jstep.Preempted):
            jstep.train(
                STEP,
                make_state(),
                jstep.from_state(buffer),
                40,
                hooks=hooks,
                checkpoint_dir=directory,
            )
        assert_resumes(directory)


class Course:
    def __init__(self):
        self.level, self.rng = 1, np.random.default_rng(0)

    def __call__(self, step, state):
        x = self.level * self.rng.normal(size=(8, 4)).astype(np.float32)
        return x, x @ np.array([1, -1, 2, 0.5], np.float32)

    def raise_level(self, step, state, results):
        self.level += results["error"] < 6 / self.level

    def get_state(self):
        return {"level": int(self.level), "rng": self.rng}

    def set_state(self, position):
        self.level, self.rng = position["level"], position["rng"]


class Tells(jstep.Hook):
    def __init__(self, course):
        self.course = course

    def end(self, step, state):
        self.course.level = 9


def taught(directory, last, hooks=(), callbacks=(), **kwargs):
    course = Course()
    evaluation = jstep.EvaluationHook(
        lambda state: {"error": float(jnp.abs(state.params["w"]).sum())},
        every_n_steps=20,
        callbacks=[course.raise_level, *callbacks],
    )
    state = jstep.train(
        STEP,
        make_state(),
        jstep.from_state(course),
        last,
        hooks=[evaluation, *(hook(course) for hook in hooks)],
        checkpoint_dir=directory,
        progress=False,
        **kwargs,
    )
    return state, course.level


@pytest.mark.thorough(except_for=["50-50"])
@pytest.mark.parametrize(("stop", "saves"), [(40, None), (50, None), (50, 50), (60, 20)])
def test_an_evaluation_that_tells(tmp_path, stop, saves):
    """What an evaluation tells that is made only because the run ends (at 50) is not in the
    checkpoint."""
    best = [jstep.KeepBest(tmp_path / "best", "error")]
    whole = taught(None, 80)
    assert whole[1] > 2
    taught(tmp_path, stop, save_checkpoint_steps=saves, callbacks=best)
    assert taught(tmp_path, 80, callbacks=best) == whole
    assert taught(tmp_path, 80, callbacks=best)[0] == whole[0]  # a run that has ended


def test_what_a_hook_tells_at_the_end_is_saved_too(tmp_path):
    for saves in (None, 20):  # also if the step was saved before
        directory = tmp_path / str(saves)
        taught(directory, 40, hooks=[Tells], save_checkpoint_steps=saves)
        extra = jstep.Saver(directory).extra()
        assert extra["batches"]["value"]["level"] == 9
        course = Course()
        jstep.train(
            STEP,
            make_state(),
            jstep.from_state(course),
            41,
            checkpoint_dir=directory,
            progress=False,
        )
        assert course.level == 9


def test_a_step_is_saved_again_only_if_something_changed(tmp_path, monkeypatch):
    saved = []
    save = jstep.Saver.save
    monkeypatch.setattr(
        jstep.Saver,
        "save",
        lambda self, state, **kwargs: (
            saved.append(int(state.global_step)) or save(self, state, **kwargs)
        ),
    )
    run(Buffer(), 20, tmp_path, save_checkpoint_steps=10)
    assert saved == [10, 20]
    run(Buffer(), 20, tmp_path)
    assert saved == [10, 20]

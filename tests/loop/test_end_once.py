"""`end` of hooks is called once for each end of a run, and what it returned is in the checkpoint of
that step."""

import signal

import jax
import numpy as np
import pytest
from children import end, read_until, start
from loop_runs import DATA, STEP, make_state, train

import jstep
from jstep.loop import contents


class Doubles(jstep.Hook):
    """Doubles the parameters at the end, and counts."""

    def __init__(self):
        self.ends = []

    def end(self, step, state):
        self.ends.append(step)
        return state.replace(params=jax.tree.map(lambda leaf: 2 * leaf, state.params))


def w(state):
    return np.asarray(state.params["w"]).tolist()


@pytest.mark.thorough(except_for=["5"])
@pytest.mark.parametrize("saves", [None, 5])
def test_a_run_that_is_started_again_has_ended(saves, tmp_path):
    """Also if the last step was due, and saved before the hooks ended."""
    hook, plain = Doubles(), w(train(5))
    for _ in range(3):
        state = train(5, hooks=[hook], checkpoint_dir=tmp_path, save_checkpoint_steps=saves)
        assert w(state) == [2 * x for x in plain]
        assert w(jstep.Saver(tmp_path).restore(train(0))) == w(state)
    assert hook.ends == [5]


@pytest.mark.thorough
def test_a_run_that_is_continued_ends_again(tmp_path):
    hook = Doubles()
    ends = [
        (last, w(train(last, hooks=[hook], checkpoint_dir=tmp_path))) for last in (5, 5, 8, 8, 3)
    ]
    assert hook.ends == [5, 8]
    assert ends[0] == ends[1]
    assert ends[2][1] == ends[3][1] == ends[4][1]


def test_a_start_that_takes_no_step_saves_nothing(tmp_path):
    """Neither in the directory of the run nor in another one; and it evaluates nothing, a new hook
    included."""
    train(5, checkpoint_dir=tmp_path / "own")
    hook = jstep.EvaluationHook(
        lambda state: {"x": 1.0},
        every_n_steps=3,
        callbacks=[jstep.KeepBest(tmp_path / "best", "x", mode="max")],
    )
    doubles, other = Doubles(), jstep.CheckpointSaverHook(tmp_path / "other")
    state = train(5, hooks=[hook, doubles, other], checkpoint_dir=tmp_path / "own")
    assert hook.results == {}
    assert doubles.ends == []
    assert w(state) == w(train(5))
    assert [jstep.Saver(tmp_path / name).all_steps() for name in ("own", "other", "best")] == [
        [5],
        [],
        [],
    ]


class FailsOnce(Doubles):
    """Raises from its first `end`, after its work."""

    def end(self, step, state):
        found = super().end(step, state)
        if len(self.ends) == 1:
            raise ValueError("my end")
        return found


@pytest.mark.thorough(except_for=["5"])
@pytest.mark.parametrize("saves", [None, 5])
def test_a_hook_that_raises_in_end_undoes_those_before(saves, tmp_path):
    """What is saved is the state before all of them, as the next start calls all of them again."""
    hooks = [Doubles(), FailsOnce()]
    with pytest.raises(ValueError, match="my end") as caught:
        train(5, hooks=hooks, checkpoint_dir=tmp_path, save_checkpoint_steps=saves)
    plain = w(train(5))
    assert w(caught.value.state) == w(jstep.Saver(tmp_path).restore(train(0))) == plain
    for _ in range(2):
        assert w(train(5, hooks=hooks, checkpoint_dir=tmp_path)) == [4 * x for x in plain]
    assert [hook.ends for hook in hooks] == [[5, 5], [5, 5]]


def test_a_block_that_is_left_before_its_first_step_still_owes_the_ends(tmp_path):
    """It has steps to take, and makes none of them: a start without a step to take makes the
    `end`s."""
    hook = FailsOnce()
    with pytest.raises(ValueError, match="my end"):
        train(5, hooks=[hook], checkpoint_dir=tmp_path)
    with jstep.Run(
        STEP, make_state(), DATA, 8, hooks=[hook], checkpoint_dir=tmp_path, progress=False
    ) as run:
        pass
    assert run.step == 5
    assert hook.ends == [5]
    plain = w(train(5))
    assert w(run.state) == plain
    assert w(train(5, hooks=[hook], checkpoint_dir=tmp_path)) == [2 * x for x in plain]
    assert hook.ends == [5, 5]


@pytest.mark.thorough
def test_a_run_that_is_killed_in_its_end(tmp_path):
    """The next start calls `end`, and no later one."""
    script = """
class Doubles(jstep.Hook):
    def end(self, step, state):
        say("end", step)
        if sys.argv[2] == "hangs":
            time.sleep(1000)
        return state.replace(params=jax.tree.map(lambda leaf: 2 * leaf, state.params))
state = train(6, hooks=[Doubles()], checkpoint_dir=directory, save_checkpoint_steps=3)
say("same", digest(state.params) == digest(jax.tree.map(lambda leaf: 2 * leaf, train(6).params)))
"""
    process = start(script, tmp_path, "hangs")
    read_until(process, "end")
    process.kill()
    process.wait(60)
    outputs = [end(start(script, tmp_path, "ends"))[0].split("\n") for _ in range(2)]
    assert outputs == [["end 6", "same True", ""], ["same True", ""]]


def test_the_checkpoint_before_an_end_that_was_killed_is_a_checkpoint_like_any_other(tmp_path):
    """The next start reports it and keeps it, as no other save may ever replace it."""
    script = """
class Hangs(jstep.Hook):
    def end(self, step, state):
        say("end", step)
        if sys.argv[2] == "hangs":
            while not os.path.isdir(f"{directory}/model-{step}"):
                time.sleep(0.02)
            say("saved", step)
            time.sleep(1000)
    def saved(self, step, path):
        if sys.argv[2] != "hangs":
            say("told", step)
train(int(sys.argv[3]), hooks=[Hangs()], checkpoint_dir=directory, save_checkpoint_steps=3)
"""
    process = start(script, tmp_path, "hangs", "5")
    read_until(process, "saved")
    process.kill()
    process.wait(60)
    assert jstep.Saver(tmp_path).all_steps() == [3, 5]
    assert end(start(script, tmp_path, "ends", "8"))[0].split("\n") == [
        "told 5",
        "told 6",
        "end 8",
        "told 8",
        "",
    ]
    assert jstep.Saver(tmp_path).all_steps() == [3, 5, 6, 8]


class NotNow(jstep.Hook):
    def begin(self, state):
        return True


def stops(directory, at=5, last_step=8, batches=DATA):
    """Train until a signal at step `at`."""
    hook = jstep.every(at, lambda step, state, metrics: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(jstep.Preempted):
        train(last_step, batches, hooks=[hook], checkpoint_dir=directory)


@pytest.mark.parametrize(("last_step", "hooks"), [(8, [NotNow()]), (3, []), (3, [NotNow()])])
def test_a_start_that_takes_no_step_in_mid_run_makes_no_end(last_step, hooks, tmp_path):
    """It evaluates nothing, either, and a run that is continued after it is the run without it."""
    stops(tmp_path / "run")
    ends = Doubles()
    best = jstep.KeepBest(tmp_path / "best", "x", mode="max")
    evaluation = jstep.EvaluationHook(lambda state: {"x": 1.0}, every_n_steps=4, callbacks=[best])
    train(last_step, hooks=[ends, evaluation, *hooks], checkpoint_dir=tmp_path / "run")
    assert ends.ends == []
    assert evaluation.results == {}
    assert jstep.Saver(tmp_path / "best").all_steps() == []
    assert w(jstep.Saver(tmp_path / "run").restore(make_state())) == w(train(5))
    resumed = train(8, hooks=[ends], checkpoint_dir=tmp_path / "run")
    assert w(resumed) == [2 * x for x in w(train(8))]
    assert ends.ends == [8]


def fails_in_its_end(ending, directory):
    """Run a loop that ends at step 5 in one of several ways, and whose `end` then fails."""

    class Fails(jstep.Hook):
        def after_step(self, step, state, metrics):
            return ending == "a hook" and step == 5

        def end(self, step, state):
            raise ValueError("my end")

    last_step = 5 if ending == "last_step" else 8
    run = jstep.Run(
        STEP,
        make_state(),
        DATA,
        last_step,
        hooks=[Fails()],
        checkpoint_dir=directory,
        progress=False,
    )
    with run:
        for step in run:
            if ending == "break" and step == 5:
                break


@pytest.mark.parametrize("last_step", [8, 3])
@pytest.mark.parametrize("ending", ["a hook", "break", "last_step", "a signal"])
def test_a_start_that_takes_no_step_after_the_last_iteration_makes_the_end(
    ending, last_step, tmp_path
):
    """Whatever has ended the iterations, and whatever came before the end."""
    if ending == "a signal":
        stops(tmp_path, last_step=5)
    else:
        with pytest.raises(ValueError, match="my end"):
            fails_in_its_end(ending, tmp_path)
    ends = Doubles()
    state = train(last_step, hooks=[ends, NotNow()], checkpoint_dir=tmp_path)
    assert ends.ends == [5]
    assert w(state) == [2 * x for x in w(train(5))]


@pytest.mark.parametrize("is_of_today", [True, False])
def test_last_step_at_the_step_of_a_checkpoint_owes_its_end(is_of_today, tmp_path, monkeypatch):
    """Also at a checkpoint that cannot say whether the iterations were over, as earlier releases
    have saved them."""
    with monkeypatch.context() as patch:
        if is_of_today:
            patch.setattr(contents, "LAST_ITERATION", "unknown")
            stops(tmp_path, last_step=5)
        else:
            stops(tmp_path)
    ends = Doubles()
    train(8, hooks=[ends, NotNow()], checkpoint_dir=tmp_path)
    assert ends.ends == []
    for _ in range(2):
        assert w(train(5, hooks=[ends], checkpoint_dir=tmp_path)) == [2 * x for x in w(train(5))]
    assert ends.ends == [5]


def test_batches_that_are_used_up_at_a_checkpoint_owe_its_end(tmp_path):
    batches = [DATA[n] for n in range(5)]
    stops(tmp_path, last_step=None, batches=batches)
    ends = Doubles()
    for _ in range(2):
        state = train(None, batches, hooks=[ends], checkpoint_dir=tmp_path)
        assert w(state) == [2 * x for x in w(train(5))]
    assert ends.ends == [5]


def test_an_evaluation_that_was_owed_and_stops_the_run_owes_the_end(tmp_path):
    """A signal has abandoned it: it belongs to the last iteration, which is known only once it is
    made again."""
    signals = [signal.SIGTERM]

    def validation():
        yield np.ones(3, np.float32)
        while signals:
            signal.raise_signal(signals.pop())
        yield np.ones(3, np.float32)

    class Batches:
        def __iter__(self):
            return validation()

    def train_until_evaluated():
        evaluate = jstep.evaluator(lambda params, x: {"x": 1.0}, Batches())
        hook = jstep.EvaluationHook(
            evaluate, every_n_steps=5, callbacks=[lambda step, state, results: True]
        )
        return train(8, hooks=[ends, hook], checkpoint_dir=tmp_path)

    ends = Doubles()
    with pytest.raises(jstep.Preempted):
        train_until_evaluated()
    assert ends.ends == []
    assert w(train_until_evaluated()) == [2 * x for x in w(train(5))]
    assert ends.ends == [5]


class Notes(jstep.Hook):
    """Remembers the bodies of a run; its first `end` fails."""

    key = "notes"

    def __init__(self, fails):
        self.bodies, self.fails = [], fails

    def end(self, step, state):
        if self.fails:
            raise OSError("away")

    def get_state(self):
        return list(self.bodies)

    def set_state(self, value):
        self.bodies = list(value)


@pytest.mark.parametrize("leaves", [False, True], ids=["to its end", "by break"])
@pytest.mark.parametrize("save_steps", [1, None])
@pytest.mark.parametrize("ending", ["last_step", "batches"])
def test_the_body_of_an_end_that_failed_is_not_made_again(ending, save_steps, leaves, tmp_path):
    """The loop ends between two multiples, and its body follows: the next start makes the end
    without it."""

    def bodies(last_step, *, until=99, fails=False):
        hook = Notes(fails)

        def batches(n):
            if n >= until:
                raise jstep.OutOfRangeError("used up")
            return DATA[n]

        with jstep.Run(
            STEP, make_state(), batches, last_step, hooks=[hook], progress=False,
            checkpoint_dir=tmp_path, save_checkpoint_steps=save_steps,
        ) as run:  # fmt: skip
            for step in run.every(3):
                hook.bodies.append(step)
                if leaves and step == 8:
                    break
        return hook.bodies

    end = (11, 8) if ending == "batches" else (8, 99)
    with pytest.raises(OSError, match="away"):
        bodies(end[0], until=end[1], fails=True)
    assert bodies(end[0], until=end[1]) == [3, 6, 8]
    assert bodies(end[0], until=end[1]) == [3, 6, 8]
    leaves = False
    assert bodies(11) == [3, 6, 8, 9, 11]

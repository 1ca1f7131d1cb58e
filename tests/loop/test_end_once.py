"""`end` of hooks is called once for each end of a run, and what it returned is in the checkpoint of that step."""

import jax
import numpy as np
import pytest
from children import end, read_until, start
from loop_runs import DATA, STEP, make_state, train

import jstep


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
    ends = [(last, w(train(last, hooks=[hook], checkpoint_dir=tmp_path))) for last in (5, 5, 8, 8, 3)]
    assert hook.ends == [5, 8]
    assert ends[0] == ends[1]
    assert ends[2][1] == ends[3][1] == ends[4][1]


def test_a_start_that_takes_no_step_saves_nothing(tmp_path):
    """Neither in the directory of the run nor in another one; and it evaluates nothing, a new hook included."""
    train(5, checkpoint_dir=tmp_path / "own")
    hook = jstep.EvaluationHook(
        lambda state: {"x": 1.0}, every_n_steps=3, callbacks=[jstep.KeepBest(tmp_path / "best", "x", mode="max")]
    )
    doubles, other = Doubles(), jstep.CheckpointSaverHook(tmp_path / "other")
    state = train(5, hooks=[hook, doubles, other], checkpoint_dir=tmp_path / "own")
    assert hook.results == {}
    assert doubles.ends == []
    assert w(state) == w(train(5))
    assert [jstep.Saver(tmp_path / name).all_steps() for name in ("own", "other", "best")] == [[5], [], []]


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
    """It has steps to take, and makes none of them: a start without a step to take makes the `end`s."""
    hook = FailsOnce()
    with pytest.raises(ValueError, match="my end"):
        train(5, hooks=[hook], checkpoint_dir=tmp_path)
    with jstep.Run(STEP, make_state(), DATA, 8, hooks=[hook], checkpoint_dir=tmp_path, progress=False) as run:
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
    assert end(start(script, tmp_path, "ends", "8"))[0].split("\n") == ["told 5", "told 6", "end 8", "told 8", ""]
    assert jstep.Saver(tmp_path).all_steps() == [3, 5, 6, 8]


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
    """The loop ends between two multiples, and its body follows: the next start makes the end without it."""

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

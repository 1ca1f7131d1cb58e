"""One rule for `train` and `Run`: what ends an iteration saves nothing of it, and the end is one
transaction."""

import asyncio
import contextlib
import signal
import time

import jax
import numpy as np
import pytest
from loop_runs import DATA, by_hand, make_state, run_of, same, start_of, train

import jstep
from jstep.array_store.listing import read_manifest
from jstep.checkpoint.saver import engine_of
from jstep.record.starts import read_starts


def go(mode, last, directory, hooks=(), batches=DATA, **options):
    """Run a loop to a step, by `train` or by a `Run` with an empty body; return its state."""
    if mode == "train":
        return train(last, batches, hooks=hooks, checkpoint_dir=directory, **options)
    with run_of(last, batches, hooks=hooks, checkpoint_dir=directory, **options) as run:
        for _ in run:
            pass
    return run.state


def doubled(state):
    return state.replace(params=jax.tree.map(lambda leaf: 2 * leaf, state.params))


def steps_in(directory):
    return sorted(jstep.Saver(directory).all_steps())


def end_of(directory, number=-1):
    return read_starts(str(directory))["model"][number]["end"]


BOTH = pytest.mark.parametrize("mode", ["train", "run"])


class Counts(jstep.Hook):
    """Counts its calls, and remembers them; at its end it doubles the parameters."""

    key = "counts"

    def __init__(self):
        self.before = self.after = self.ends = 0

    def before_step(self, step, state):
        self.before += 1

    def after_step(self, step, state, metrics):
        self.after += 1

    def end(self, step, state):
        self.ends += 1
        return doubled(state)

    def get_state(self):
        return [self.before, self.after, self.ends]

    def set_state(self, value):
        self.before, self.after, self.ends = value


class Raises(jstep.Hook):
    """Raises an error, or lets a signal come, once in one method at a step."""

    def __init__(self, method, step, error):
        self._step, self._error = step, error
        setattr(self, method, self._raise)

    def _raise(self, step, *_):
        error, self._error = self._error, None if step == self._step else self._error
        if step != self._step or error is None:
            return
        if isinstance(error, int):
            signal.raise_signal(error)
        else:
            raise error


@pytest.mark.thorough(except_for="each value once")
@BOTH
@pytest.mark.parametrize(
    "error", [OSError("away"), SystemExit(1), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("method", ["before_step", "after_step"])
def test_the_memory_of_a_hook_before_the_one_that_raised_is_that_of_the_restored_step(
    mode, method, error, tmp_path
):
    with pytest.raises(type(error)) as caught:
        go(mode, 6, tmp_path, [Counts(), Raises(method, 3, error)], save_checkpoint_steps=1)
    assert steps_in(tmp_path) == ([1, 2, 3] if method == "before_step" else [1, 2])
    assert "is not saved, because the iteration has not ended; a restart" in "".join(
        caught.value.__notes__
    )
    assert end_of(tmp_path)[0] == "failed"
    counts = Counts()
    state = go(mode, 6, tmp_path, [counts])
    assert (counts.before, counts.after, counts.ends) == (6, 6, 1)
    assert same(state, doubled(by_hand(6)))


@BOTH
def test_an_evaluation_whose_callback_raises_is_made_again_with_all_callbacks(mode, tmp_path):
    def hooks(plot):
        stop = jstep.EarlyStopping("loss", patience=9)
        evaluation = jstep.EvaluationHook(
            lambda state: {"loss": 1.0}, every_n_steps=2, callbacks=[plot, stop]
        )
        return stop, evaluation

    def fails(step, state, results):
        if step == 4:
            raise OSError("no display")

    with pytest.raises(OSError, match="no display"):
        go(mode, 8, tmp_path, [hooks(fails)[1]], save_checkpoint_steps=1)
    assert steps_in(tmp_path) == [1, 2, 3]
    stop, evaluation = hooks(lambda *_: None)
    go(mode, 8, tmp_path, [evaluation])
    assert list(evaluation.results) == [4, 6, 8]
    assert stop.wait == 3  # of four evaluations, the first one was the best


@pytest.mark.thorough(except_for=["end-GeneratorExit-train", "batches-GeneratorExit-run"])
@BOTH
@pytest.mark.parametrize(
    "error", [GeneratorExit(), asyncio.CancelledError()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("method", ["before_step", "after_step", "end", "batches"])
def test_a_generator_exit_of_the_user_is_an_error_and_not_the_end_of_the_loop(
    mode, method, error, tmp_path
):
    """Only where a generator around the loop is closed outside of its body, it ends the run as
    `break` does."""
    left = [error]

    def batches(step):
        if method == "batches" and step == 3 and left:
            raise left.pop()
        return DATA[step]

    hooks = (
        [Counts()]
        if method == "batches"
        else [Counts(), Raises(method, 5 if method == "end" else 3, error)]
    )
    with pytest.raises(type(error)) as caught:
        go(mode, 5, tmp_path, hooks, batches=batches, save_checkpoint_steps=2)
    saved = {"before_step": 2, "after_step": 2, "end": 5, "batches": 3}[method]
    assert steps_in(tmp_path)[-1] == saved
    assert end_of(tmp_path) == ["failed", type(error).__name__]
    assert f"model-{saved}" in "".join(caught.value.__notes__)
    counts = Counts()
    state = go(mode, 5, tmp_path, [counts])
    assert (counts.before, counts.after, counts.ends) == (5, 5, 1)
    assert same(state, doubled(by_hand(5)))


@BOTH
def test_a_generator_exit_before_the_save_of_an_end_is_an_error(mode, tmp_path):
    class Exits(jstep.Hook):
        has_exited = False

        def before_save(self, step):
            if not Exits.has_exited:
                Exits.has_exited = True
                raise GeneratorExit

    with pytest.raises(GeneratorExit) as caught:
        go(mode, 5, tmp_path, [Counts(), Exits()], save_checkpoint_steps=None)
    assert steps_in(tmp_path) == [5]
    assert end_of(tmp_path) == ["failed", "GeneratorExit"]
    assert "is saved as model-5" in "".join(caught.value.__notes__)
    counts = Counts()
    assert same(go(mode, 5, tmp_path, [counts, Exits()]), doubled(by_hand(5)))
    assert counts.ends == 1


# The end.


@BOTH
@pytest.mark.parametrize(
    "error", [OSError("away"), SystemExit(1), KeyboardInterrupt(), signal.SIGTERM], ids=str
)
def test_the_whole_end_is_made_again(mode, error, tmp_path):
    """With the hooks' states of before; the checkpoint before it stays, and is reported before
    `failed`."""
    told = []

    class Tells(jstep.Hook):
        def saved(self, step, path):
            told.append(f"saved {step}")

        def failed(self, step, error):
            told.append("failed")

    kind = jstep.Preempted if isinstance(error, int) else type(error)
    # The signal leaves out the second `end` of `Counts`.
    hooks = (
        [Raises("end", 5, error), Counts(), Tells()]
        if isinstance(error, int)
        else [Counts(), Raises("end", 5, error)]
    )
    with pytest.raises(kind) as caught:
        go(mode, 5, tmp_path, [*hooks, Tells()] if Tells not in map(type, hooks) else hooks)
    assert same(caught.value.state, by_hand(5))
    assert told == ["saved 5", "failed"]
    assert same(jstep.Saver(tmp_path).restore(make_state()), by_hand(5))
    assert end_of(tmp_path)[0] == ("interrupted" if isinstance(error, int) else "failed")
    counts = Counts()
    state = go(mode, 5, tmp_path, [counts])
    assert counts.ends == 1
    assert same(state, doubled(by_hand(5)))
    assert end_of(tmp_path) == ["finished", ""]


@BOTH
def test_a_signal_in_the_last_end_leaves_a_run_that_is_finished(mode, tmp_path):
    counts = Counts()
    with pytest.raises(jstep.Preempted, match="after step 5, which is saved"):
        go(mode, 5, tmp_path, [counts, Raises("end", 5, signal.SIGTERM)])
    assert end_of(tmp_path) == ["finished", ""]
    assert same(go(mode, 5, tmp_path, [counts]), doubled(by_hand(5)))
    assert counts.ends == 1


@BOTH
def test_a_signal_at_the_last_step_does_not_finish_the_run(mode, tmp_path):
    with pytest.raises(jstep.Preempted):
        go(mode, 5, tmp_path, [Raises("after_step", 5, signal.SIGTERM)])
    assert end_of(tmp_path) == ["interrupted", "SIGTERM"]
    counts = Counts()
    assert same(go(mode, 5, tmp_path, [counts]), doubled(by_hand(5)))
    assert end_of(tmp_path) == ["finished", ""]


@BOTH
def test_the_checkpoint_before_the_ends_is_temporary(mode, tmp_path):
    """No hook is told of it, no other checkpoint is deleted for it, and the last save replaces
    it."""
    told, seen = [], []

    class Tells(jstep.Hook):
        def saved(self, step, path):
            told.append(step)

        def end(self, step, state):
            engine_of(saver).wait_until_finished()
            seen.append(
                [
                    (at, read_manifest(str(tmp_path / f"model-{at}")).temporary)
                    for at in steps_in(tmp_path)
                ]
            )
            return doubled(state)

    saver = jstep.Saver(tmp_path, max_to_keep=1)
    with saver:
        state = go(mode, 5, saver, [Tells()], save_checkpoint_steps=2)
    assert told == [2, 4, 5]
    assert seen == [[(4, False), (5, True)]]
    assert steps_in(tmp_path) == [5]
    assert same(jstep.Saver(tmp_path).restore(make_state()), state)


@BOTH
def test_the_last_checkpoint_appears_after_those_of_other_savers(mode, tmp_path):
    """If one of them fails, the end has no mark, and the next start saves it."""

    def other(broken):
        def check(step):
            if broken and step == 5:
                raise OSError("the other disk is full")

        return jstep.CheckpointSaverHook(tmp_path / "other", before_save=(check,))

    own = tmp_path / "own"
    with pytest.raises(OSError, match="the other disk is full"):
        go(mode, 5, own, [Counts(), other(True)])
    assert same(jstep.Saver(own).restore(make_state()), by_hand(5))
    counts = Counts()
    go(mode, 5, own, [counts, other(False)])
    assert counts.ends == 1
    assert same(jstep.Saver(tmp_path / "other").restore(make_state()), doubled(by_hand(5)))


@BOTH
@pytest.mark.parametrize("mean", [False, True])
def test_the_last_row_of_a_history_is_in_the_checkpoint_before_the_ends(mode, mean, tmp_path):
    with pytest.raises(OSError, match="away"):
        go(
            mode,
            5,
            tmp_path,
            [jstep.History(every_n_steps=3, mean=mean), Raises("end", 5, OSError("away"))],
        )
    history = jstep.History(every_n_steps=3, mean=mean)
    go(mode, 5, tmp_path, [history, Raises("end", 9, None)])
    assert history["loss"][0].tolist() == [3, 5]


@BOTH
def test_a_row_that_cannot_be_delivered_at_the_end(mode, tmp_path):
    """It is an error of a log: the other rows and the checkpoint are there, and no `end` was
    called."""

    def write(step, values):
        if step == 5:
            raise OSError("the tracker is down")

    counts, history = Counts(), jstep.History(every_n_steps=3)
    with pytest.raises(OSError, match="the tracker is down") as caught:
        go(mode, 5, tmp_path, [jstep.MetricsHook(write, every_n_steps=3), history, counts])
    assert "given the metrics of step 5" in "".join(caught.value.__notes__)
    assert counts.ends == 0
    assert steps_in(tmp_path) == [5]
    again = jstep.History(every_n_steps=3)
    assert same(go(mode, 5, tmp_path, [again, counts]), doubled(by_hand(5)))
    assert again["loss"][0].tolist() == [3, 5]


# A start that has nothing to do.


def everything(directory):
    return {
        path: path.stat().st_mtime_ns
        for path in sorted(directory.rglob("*"))
        if "starts" not in str(path)
    }


@BOTH
@pytest.mark.parametrize("batches", ["all", "used up"])
def test_a_finished_run_writes_nothing_but_the_file_of_its_start(mode, batches, tmp_path):
    calls = []

    class Calls(Counts):
        def begin(self, state):
            calls.append("begin")

        def closed(self):
            calls.append("closed")

        def set_state(self, value):
            calls.append("set_state")
            super().set_state(value)

    def hooks():
        evaluation = jstep.EvaluationHook(
            lambda state: {"w": float(np.sum(state.params["w"]))}, every_n_steps=3
        )
        return [jstep.History(every_n_steps=3), evaluation, Calls()]

    last = 5 if batches == "all" else 9
    data = DATA if batches == "all" else [DATA[step] for step in range(5)]
    first = hooks()
    options = {"logdir": tmp_path, "save_summaries_steps": 1}
    state = go(mode, last, tmp_path, first, data, **options)
    before = everything(tmp_path)
    calls.clear()
    second = hooks()
    assert same(go(mode, last, tmp_path, second, data, **options), state)
    assert calls == ["begin", "set_state", "closed"]
    assert (second[2].before, second[2].after, second[2].ends) == (5, 5, 1)
    assert second[1].results == {5: first[1].results[5]}
    assert everything(tmp_path).keys() == before.keys()
    assert end_of(tmp_path)[0] == "finished"


@BOTH
def test_a_signal_in_a_finished_run_lets_no_saver_save(mode, tmp_path):
    def start(signal_at_end):
        def batch(step, state):
            if step == 5:
                if signal_at_end:
                    signal.raise_signal(signal.SIGTERM)
                raise jstep.OutOfRangeError
            return DATA[step]

        hooks = [jstep.CheckpointSaverHook(str(tmp_path / "other"), save_steps=2)]
        go(mode, None, tmp_path / "run", hooks, batches=jstep.from_state(batch))

    def files():
        return {path: time for path, time in everything(tmp_path).items() if path.is_file()}

    start(False)
    before = files()
    with pytest.raises(jstep.Preempted, match="which is saved") as caught:
        start(True)
    assert caught.value.code == 143
    assert files() == before
    assert end_of(tmp_path / "run")[0] in ("interrupted", "finished")


# Signals in an evaluation.


@pytest.mark.parametrize("is_followed", [False, True])
def test_an_evaluation_that_a_hook_follows_which_changes_the_state_is_finished(
    is_followed, tmp_path
):
    class Validation:
        def __iter__(self):
            yield np.ones(2, np.float32)
            if armed:  # the second batch: when the run begins, the first one is read for its shapes
                armed.pop()
                signal.raise_signal(signal.SIGTERM)
            yield np.ones(2, np.float32)

    armed = [1]
    metric = jstep.evaluator(lambda params, x: {"w": x * params["w"].sum()}, Validation())
    evaluation = jstep.EvaluationHook(metric, every_n_steps=3)
    change = jstep.every(1, lambda step, state, metrics: doubled(state))
    hooks = [evaluation, change] if is_followed else [change, evaluation]
    with pytest.raises(jstep.Preempted):
        train(6, hooks=hooks, checkpoint_dir=tmp_path)
    assert steps_in(tmp_path) == [3]
    assert (3 in evaluation.results) == is_followed
    plain = jstep.EvaluationHook(metric, every_n_steps=3)
    train(6, hooks=[plain, change] if is_followed else [change, plain])
    again = jstep.EvaluationHook(metric, every_n_steps=3)
    train(6, hooks=[again, change] if is_followed else [change, again], checkpoint_dir=tmp_path)
    assert {**evaluation.results, **again.results} == plain.results


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("ending", ["batches", "last_step"])
def test_a_history_has_the_row_of_a_last_step_that_a_signal_interrupted(ending, mean, tmp_path):
    """Its metrics are not made again: the next start has no step to take."""

    def rows(directory, *others):
        history = jstep.History(every_n_steps=3, mean=mean)
        batches = DATA[:5] if ending == "batches" else DATA
        with contextlib.suppress(jstep.Preempted):
            train(
                5 if ending == "last_step" else None,
                batches,
                hooks=[history, *others],
                checkpoint_dir=directory,
            )
        return history.rows

    expected = rows(None)
    assert [row["step"] for row in expected] == [3, 5]
    interrupted = rows(tmp_path, Raises("before_step", 4, signal.SIGTERM))
    assert [row["step"] for row in interrupted] == [3]
    assert rows(tmp_path) == expected


# Time, and what is said too late.


def test_a_slow_save_after_break_counts_as_saving(tmp_path, monkeypatch):
    """The body ends with `break`, not when the run does: its generator stays at its `yield` until
    then."""
    save = jstep.Saver.save

    def slow(self, *args, **kwargs):
        time.sleep(0.3)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(jstep.Saver, "save", slow)
    with run_of(9, checkpoint_dir=tmp_path) as run:
        for step in run:
            if step == 3:
                break
    seconds = start_of(tmp_path)["seconds"]
    assert seconds["saving"] >= 0.3
    assert seconds.get("hooks", 0.0) < 0.3


def test_a_loader_that_cannot_tell_its_position_is_an_error_of_the_start(tmp_path):
    class Loader:
        def __iter__(self):
            return iter([DATA[step] for step in range(5)])

        def state_dict(self):
            raise KeyError("epoch")

        def load_state_dict(self, state):
            raise AssertionError

    with pytest.raises(KeyError, match="epoch") as caught:
        train(5, Loader(), checkpoint_dir=tmp_path)
    assert "their position before the first batch, which checkpoints need" in "".join(
        caught.value.__notes__
    )


def test_a_step_that_sometimes_does_not_advance_is_dated(tmp_path):
    plain = jstep.minimize(
        lambda params, x: ((params["w"] - 1) ** 2).sum(), jstep.gradient_descent(0.1)
    )
    state = jstep.TrainState.create({"w": np.zeros(2, np.float32)}, jstep.gradient_descent(0.1))

    def step_fn(state, x):
        stays = int(state.global_step) == 5
        new, metrics = plain(state, x)
        return (new.replace(global_step=new.global_step - 1) if stays else new), metrics

    with pytest.raises(
        ValueError, match="did so at least up to step 4, but not in each of the updates 4 → 8"
    ):
        jstep.train(
            step_fn,
            state,
            lambda n: 0.0,
            12,
            checkpoint_dir=tmp_path,
            save_checkpoint_steps=4,
            log_steps=None,
        )

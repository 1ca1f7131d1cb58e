"""Best checkpoints and those of the run: their order, failed ones, restarts, and which one is the
best."""

import json
import logging
import threading

import jax.numpy as jnp
import pytest
import waiting
from comparisons import same
from doubles import raising

import jstep
from jstep.array_store.directory_store import DirectoryStore
from jstep.checkpoint.saver import Saver, engine_of
from jstep.evaluating.callbacks import wait_until_finished

OPTIMIZER = jstep.gradient_descent(0.1)
STEP = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, OPTIMIZER)
LOSSES = {2: 5.0, 4: 4.0, 6: 1.0, 8: 3.0, 10: 2.0}


def make_state(step=0):
    return jstep.TrainState.create({"w": jnp.float32(step)}, OPTIMIZER, global_step=step)


class Raise(jstep.Hook):
    """Raises at one step, behind the evaluation."""

    def __init__(self, step):
        self.step = step

    def after_step(self, step, state, metrics):
        if step == self.step:
            raise OSError("a plot")


def evaluation(best, losses, every_n_steps=2, callbacks=()):
    return jstep.EvaluationHook(
        lambda state: {"loss": losses[int(state.global_step)]},
        every_n_steps=every_n_steps,
        callbacks=[best, *callbacks],
    )


def go(mode, directory, hooks, last_step=10, **options):
    options = {
        "checkpoint_dir": directory / "run",
        "save_checkpoint_steps": 1,
        "log_steps": None,
        **options,
    }
    arguments = STEP, make_state(), lambda step: jnp.float32(step), last_step
    if mode == "train":
        return jstep.train(*arguments, hooks=hooks, **options)
    with jstep.Run(*arguments, hooks=hooks, **options) as run:
        for _ in run:
            pass
    return run.state


def keep(directory, **options):
    return jstep.KeepBest(directory / "best", "loss", **options)


def kept(directory, prefix="best"):
    names = [
        path.name
        for path in directory.glob(f"{prefix}-*")
        if path.name.removeprefix(f"{prefix}-").isdigit()
    ]
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))


def fail_once(monkeypatch, step, where):
    """Let the save of a best checkpoint fail, in the loop's thread or in the background."""
    left = [step]

    def failing(fn, name_of):
        def call(*args, **kwargs):
            if left and name_of(*args) == f"best-{step}":
                left.clear()
                raise OSError("no space left")
            return fn(*args, **kwargs)

        return call

    if where == "loop":
        save = jstep.Saver.save
        monkeypatch.setattr(
            jstep.Saver,
            "save",
            failing(save, lambda saver, state: f"{saver.prefix}-{int(state.global_step)}"),
        )
    else:
        publish = DirectoryStore.publish
        monkeypatch.setattr(
            DirectoryStore,
            "publish",
            failing(publish, lambda store, tmp, final, manifest: final.rpartition("/")[2]),
        )


@pytest.mark.parametrize("mode", ["train", "run"])
@pytest.mark.parametrize("where", ["loop", "background"])
@pytest.mark.parametrize("max_to_keep", [1, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("steps_per_call", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_best_checkpoint_that_fails_is_made_again(
    mode, where, max_to_keep, steps_per_call, tmp_path, monkeypatch, caplog
):
    def start(directory):
        hooks = [evaluation(keep(directory, max_to_keep=max_to_keep), LOSSES)]
        return go(mode, directory, hooks, steps_per_call=steps_per_call)

    whole = start(tmp_path / "whole")
    fail_once(monkeypatch, 6, where)
    with pytest.raises((OSError, jstep.CheckpointError), match="no space left") as caught:
        start(tmp_path / "failed")
    # In the background, the next save of the run may be the first to find it.
    why = "is not saved, because a best checkpoint of an evaluation before it could not be saved"
    assert any(why in text for text in caught.value.__notes__)
    assert jstep.Saver(tmp_path / "failed/run").latest_step() in (4, 5)
    assert same(start(tmp_path / "failed"), whole)
    assert kept(tmp_path / "failed/best") == kept(tmp_path / "whole/best")


def test_without_checkpoints_of_the_run_the_error_is_raised_too(tmp_path, monkeypatch):
    fail_once(monkeypatch, 10, "background")
    losses = {**LOSSES, 10: 0.0}
    with pytest.raises(jstep.CheckpointError, match="no space left"):
        go("train", tmp_path, [evaluation(keep(tmp_path), losses)], checkpoint_dir=None)


def test_a_call_by_hand_after_a_run_is_none_of_that_run(tmp_path, monkeypatch):
    best = keep(tmp_path)
    averages = jstep.ExponentialMovingAverage(0.9)
    optimizer = jstep.with_moving_average(jstep.gradient_descent(0.1), averages)
    step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    evaluate = jstep.evaluator(
        lambda params, x: {"loss": x - params["w"]}, [jnp.ones(1)], use_averages=True
    )
    hook = jstep.EvaluationHook(evaluate, every_n_steps=1, callbacks=[best])
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    state = jstep.train(
        step, state, lambda n: jnp.float32(3), 2, hooks=[hook], checkpoint_dir=tmp_path / "run"
    )
    assert len(kept(tmp_path / "best")) == 1
    for n, loss in ((5, -3.0), (6, -4.0)):
        best(n, state.replace(global_step=n), {"loss": loss})
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", raising(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            best(7, state.replace(global_step=7), {"loss": -5.0})
    best.close()
    assert kept(tmp_path / "best") == ["best-6"]
    assert jstep.Saver(tmp_path / "best", prefix="best").extra() == {"loss": -4.0}


def test_a_checkpoint_of_the_run_appears_after_the_best_ones_up_to_it(tmp_path, monkeypatch):
    names, is_run_saved = [], threading.Event()
    publish, flush = DirectoryStore.publish, jstep.EvaluationHook.flush

    def slow(store, temporary, final, manifest):
        name = final.rpartition("/")[2]
        if name.startswith("best"):
            assert is_run_saved.wait(waiting.TIMEOUT)
        names.append(name)
        return publish(store, temporary, final, manifest)

    def flushed(hook):
        is_run_saved.set()  # all of the run's checkpoint is written, but for its manifest
        flush(hook)

    monkeypatch.setattr(DirectoryStore, "publish", slow)
    monkeypatch.setattr(jstep.EvaluationHook, "flush", flushed)
    go(
        "train",
        tmp_path,
        [evaluation(keep(tmp_path), {2: 5.0, 3: 9.0})],
        3,
        save_checkpoint_steps=2,
    )
    assert names[:2] == ["best-2", "model-2"]


def test_what_is_superseded_stays_until_a_checkpoint_of_the_run_has_seen_it(tmp_path):
    """At most as many again, and one that no checkpoint of the run has seen goes at once."""
    losses = {step: 10.0 - step for step in range(1, 9)}
    saver, seen = jstep.Saver(tmp_path / "run"), {}

    class Settle(jstep.Hook):
        def before_step(self, step, state):
            engine_of(saver).wait_until_finished()  # what is seen below is no luck

    best = keep(tmp_path)

    def look(step, state, results):
        wait_until_finished(best)
        seen[step] = kept(tmp_path / "best")

    hooks = [Settle(), evaluation(best, losses, 1, [look])]
    go("train", tmp_path, hooks, 8, checkpoint_dir=saver, save_checkpoint_steps=3)
    saver.close()
    # The run is saved after steps 3 and 6.
    assert seen == {
        1: ["best-1"],
        2: ["best-2"],
        3: ["best-3"],
        4: ["best-3", "best-4"],
        5: ["best-3", "best-5"],
        6: ["best-3", "best-6"],
        7: ["best-6", "best-7"],
        8: ["best-6", "best-8"],
    }
    assert kept(tmp_path / "best") == ["best-8"]
    assert best.values == {8: 2.0}


def test_without_checkpoints_of_the_run_what_is_superseded_goes_at_once(tmp_path):
    losses = {step: 10.0 - step for step in range(1, 5)}
    best, seen = keep(tmp_path), []

    def look(step, state, results):
        wait_until_finished(best)
        seen.append(kept(tmp_path / "best"))

    go("train", tmp_path, [evaluation(best, losses, 1, [look])], 4, checkpoint_dir=None)
    assert seen == [["best-1"], ["best-2"], ["best-3"], ["best-4"]]


@pytest.mark.parametrize("mode", ["train", "run"])
@pytest.mark.parametrize(
    ("again", "expected"),
    [
        ({6: 9.0, 10: 9.0}, ["best-8"]),  # worse than before: it does not win by what is lost
        ({6: 9.0, 8: 9.0, 10: 9.0}, ["best-4"]),
        ({6: 0.5}, ["best-6"]),
        ({}, ["best-6"]),  # the same again
    ],
)
def test_a_best_checkpoint_of_a_lost_part_counts_for_nothing_until_it_is_made_again(
    mode, again, expected, tmp_path
):
    """The run is ended between the evaluation of step 6 and the boundary there."""
    with pytest.raises(OSError, match="a plot"):
        go(mode, tmp_path, [evaluation(keep(tmp_path), LOSSES), Raise(6)])
    assert kept(tmp_path / "best")[-1] == "best-6"
    assert "best-4" in kept(tmp_path / "best")  # the best of what the next start resumes from
    best = keep(tmp_path)
    go(mode, tmp_path, [evaluation(best, {**LOSSES, **again})])
    assert kept(tmp_path / "best") == expected
    assert [f"best-{step}" for step in best.values] == expected


def test_a_best_checkpoint_that_is_not_made_again_goes_once_the_run_is_saved_beyond_it(tmp_path):
    with pytest.raises(OSError, match="a plot"):
        go("train", tmp_path, [evaluation(keep(tmp_path), LOSSES), Raise(6)])
    losses = {4: 4.0, 8: 9.0, 10: 9.0}
    go("train", tmp_path, [evaluation(keep(tmp_path), losses, every_n_steps=4)])
    assert kept(tmp_path / "best") == ["best-4"]


def test_evaluations_within_an_iteration_of_several_steps(tmp_path):
    """Steps 1 to 3 are the first iteration: its best checkpoints are made again with it."""
    losses = {1: 5.0, 2: 1.0, 3: 3.0, 4: 4.0, 5: 0.5, 6: 2.0}

    def start(fails_at=None):
        hooks = [evaluation(keep(tmp_path, max_to_keep=2), losses, 1)]
        directory = tmp_path / "run"
        with jstep.Run(
            STEP, make_state(), None, 6, hooks=hooks, checkpoint_dir=directory, log_steps=None
        ) as run:
            for _ in run:
                for _ in range(3):
                    run.train_step(jnp.float32(run.step))
                    if run.step == fails_at:
                        raise OSError("a plot")
        return run.state

    with pytest.raises(OSError, match="a plot"):
        start(fails_at=2)
    assert jstep.Saver(tmp_path / "run").latest_step() is None
    with pytest.raises(OSError, match="a plot"):
        start(fails_at=5)
    # The interval of saves has not passed.
    assert jstep.Saver(tmp_path / "run").latest_step() is None
    start()
    assert kept(tmp_path / "best") == ["best-2", "best-5"]


def test_a_lower_limit_and_leftovers_are_removed_at_the_next_start(tmp_path):
    go("train", tmp_path, [evaluation(keep(tmp_path, max_to_keep=3), LOSSES)])
    assert kept(tmp_path / "best") == ["best-6", "best-8", "best-10"]
    best = keep(tmp_path)
    go("train", tmp_path, [evaluation(best, {10: 2.0, 12: 9.0})], 12)
    assert kept(tmp_path / "best") == ["best-6"]
    assert best.values == {6: 1.0}


# Which one is the best.


def save_best(directory, values, metric="loss", mode="min", **options):
    best = jstep.KeepBest(directory, metric, mode=mode, max_to_keep=9, **options)
    for step, value in values.items():
        best(step, make_state(step), {metric: value})
    best.close()


@pytest.mark.parametrize(
    ("values", "mode", "expected"),
    [
        ({1: 3.0, 2: 1.0, 3: 2.0}, "min", 2),
        ({1: 3.0, 2: 1.0, 3: 2.0}, "max", 1),
        ({1: 1.0, 2: 1.0}, "min", 1),  # on a tie the earlier
        ({1: -2.0, 2: -1.0}, "max", 2),
    ],
)
def test_the_best_step(values, mode, expected, tmp_path):
    save_best(tmp_path, values, mode=mode)
    saver = jstep.Saver(tmp_path, prefix="best")
    assert saver.best_step() == expected
    assert float(saver.restore(make_state(), step=saver.best_step()).params["w"]) == expected
    manifest = json.loads((tmp_path / f"best-{expected}/manifest.json").read_bytes())
    assert manifest["best"] == {"metric": "loss", "value": values[expected], "mode": mode}


def test_the_best_step_is_of_those_that_were_kept_for_the_same(tmp_path):
    save_best(tmp_path, {1: 9.0, 2: 8.0}, metric="accuracy", mode="max")
    save_best(tmp_path, {3: 5.0, 4: 6.0}, metric="loss")
    assert jstep.Saver(tmp_path, prefix="best").best_step() == 3


def test_no_best_step(tmp_path):
    saver = jstep.Saver(tmp_path)
    assert saver.best_step() is None
    saver.save(make_state(7))
    with pytest.raises(
        ValueError,
        match=r"best_step: must have checkpoints of a KeepBest, got model-7 in .*best'\)",
    ):
        saver.best_step()


def test_a_branch_from_a_best_checkpoint_says_what_it_lacks(tmp_path, caplog):
    save_best(tmp_path, {4: 1.0})
    with caplog.at_level(logging.INFO, "jstep"):
        state = go("train", tmp_path, [], 6, start_from=tmp_path / "best-4")
    assert jstep.global_step(state) == 6
    (line,) = [line for line in caplog.messages if line.startswith("this run begins from")]
    assert "a best checkpoint: positions of loaders and states of hooks are not in it" in line


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jstep.KeepBest("best", "loss", keep=3), "max_to_keep"),
        (lambda: jstep.KeepBest("best", "loss", "min"), r"KeepBest\(directory, metric, mode=…\)"),
        (lambda: jstep.EarlyStopping("loss", 3), r"EarlyStopping\(metric, patience=…\)"),
        (
            lambda: jstep.ReduceOnPlateau("loss", "rate", 0.5),
            r"ReduceOnPlateau\(metric, name, factor=…\)",
        ),
    ],
)
def test_old_spellings_say_what_to_type(call, words):
    with pytest.raises(TypeError, match=words):
        call()


# Early stopping from a step on.


@pytest.mark.parametrize("cut", [None, 2, 3, 4, 6])
def test_evaluations_up_to_a_step_are_ignored_and_the_count_is_kept(cut, tmp_path):
    """Counted from step 4 on: 9.0 is the best, and two evaluations after it are worse."""
    losses = {1: 1.0, 2: 9.0, 3: 9.0, 4: 9.0, 5: 9.5, 6: 9.5, 7: 9.5, 8: 9.5}

    def start(last_step):
        stop = jstep.EarlyStopping("loss", patience=2, start_after=3)
        return go("train", tmp_path, [evaluation(stop, losses, 1)], last_step)

    if cut is not None:
        start(cut)
    assert jstep.global_step(start(8)) == 6
    assert jstep.global_step(start(8)) == 6

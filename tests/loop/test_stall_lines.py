"""`StallHook`: the line of each place in which a single process can hang."""

import json
import re
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from children import end, read_until, start
from hangs import STEP, data, hang, line_of, loss_fn, make_state, once_at, train
from scalar_points import read_scalars
from waiting import TIMEOUT, wait_until

import jstep
from jstep.checkpoint.saver import Saver, engine_of
from jstep.core.threads import Thread
from jstep.look.cli import main
from jstep.watching import stall_watch as stalls
from jstep.watching.stall_watch import StallWatch, Wait


def test_a_loader_that_hangs_is_named_until_it_continues(tmp_path, caplog):
    with hang() as stuck:

        def batch(step):
            if step == 12:
                stuck()
                wait_until(lambda: list((tmp_path / "stalls").glob("*.json")))
                fields.update(json.loads((tmp_path / "stalls" / "model.0.json").read_text()))
            return data(step)

        fields = {}
        state = train(batches=batch, checkpoint_dir=tmp_path)
    assert state.global_step == 20
    first, last = stuck.lines
    assert re.fullmatch(line_of("waiting for batch 12", r"hangs\.py:\d+ in __call__"), first)
    assert re.fullmatch(r".*waiting for batch 12, resumed after [\d.]+ s", last)
    assert (fields["process"], fields["step"], fields["what"]) == (0, 12, "waiting for batch 12")
    assert fields["part"] == "waiting"
    assert fields["host"] in first
    assert any("in __call__" in line for lines in fields["threads"].values() for line in lines)
    assert not list((tmp_path / "stalls").iterdir())
    found = jstep.goodput(tmp_path)
    assert found.stalled["waiting"] > 0.04
    assert found.parts["stalled"] == found.stalled["waiting"]
    recorded = json.loads((tmp_path / "starts" / "model.000001.json").read_text())
    # Nothing is counted twice.
    assert found.waiting + found.stalled["waiting"] == pytest.approx(recorded["seconds"]["waiting"])
    assert sum(found.parts.values()) == found.total
    assert "stalled" in str(found)


def test_stalls_have_the_prefix_of_the_saver(tmp_path):
    with hang() as stuck:

        def batch(step):
            if step == 12:
                stuck()
                wait_until(lambda: list((tmp_path / "stalls").glob("*.json")))
                names.extend(path.name for path in (tmp_path / "stalls").iterdir())
            return data(step)

        names = []
        with Saver(tmp_path, prefix="big") as saver:
            train(batches=batch, checkpoint_dir=saver)
    assert names == ["big.0.json"]


def test_a_stall_flushes_the_events(tmp_path, monkeypatch):
    """Ten events fill the queue of the writer; the last ones before a hang are in the file before
    it is killed."""
    monkeypatch.setattr("jstep.watching.event_file._FLUSH_SECS", 600.0)

    def logged():
        return [point.step for point in read_scalars(tmp_path).get("loss", ())]

    with hang() as stuck:

        def batch(step):
            if step == 16:
                stuck()
                wait_until(lambda: max(logged(), default=0) >= 15)
            return data(step)

        train(batches=batch, logdir=tmp_path, save_summaries_steps=1)
    assert max(logged()) == 20


def test_a_hook_that_hangs_is_named():
    with hang() as stuck:
        train(hooks=[jstep.every(1, lambda step, *_: stuck() if step == 9 else None)])
    place = r"hangs\.py:\d+ in __call__"
    name = r"every\(1, test_a_hook_that_hangs_is_named\.<locals>\.<lambda>\)"
    assert re.fullmatch(line_of(f"in the hook {name} at step 9", place), stuck.lines[0])


@pytest.mark.parametrize("makes_batches", [False, True])
def test_a_body_that_hangs_is_named_as_soon_as_a_hook(makes_batches):
    """Quick bodies are not recorded one by one, and one that makes its batches has stretches
    between its steps."""
    with hang() as stuck:
        batches = None if makes_batches else data
        hooks = [jstep.StallHook(warn_secs=0.3)]  # a first body may take ten times as long
        with jstep.Run(
            STEP, make_state(), batches, 20, hooks=hooks, log_steps=None, progress=False
        ) as run:
            for step in run:
                if step == 15:
                    stuck()
                if makes_batches:
                    run.train_step(data(step))
    assert re.fullmatch(
        line_of("in the body of the loop at step 15", r"hangs\.py:\d+ in __call__"), stuck.lines[0]
    )
    usual = float(re.search(r"usually (\S+) s", stuck.lines[0])[1])
    assert usual < 0.3


class Blocks:
    def __init__(self, stuck):
        self._stuck = stuck

    def __iter__(self):
        self._stuck()
        return iter([data(0)] * 30)


def slow_trace(stuck):
    def loss(params, x):
        y = jax.jit(jnp.cos)(x)  # traced before
        stuck()
        return loss_fn(params, x + 0 * y)

    return jstep.minimize(loss, jstep.adam(0.1))


def slow_second_trace(stuck):
    def loss(params, x):
        if x.shape == (4,):
            stuck()
        return loss_fn(params, x[:3])

    return jstep.minimize(loss, jstep.adam(0.1))


def slow_device(stuck):
    def loss(params, x):
        value = jax.pure_callback(
            lambda at: jnp.float32((at == 9 and stuck()) or 0), jax.ShapeDtypeStruct((), "f4"), x[0]
        )
        return loss_fn(params, x) + value

    return jstep.minimize(loss, jstep.adam(0.1))


def once(stuck, fn, at=1):
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(None)
        if len(calls) == at:
            stuck()
        return fn(*args, **kwargs)

    return wrapped


def evaluating(stuck):
    return [
        jstep.EvaluationHook(
            lambda state: {"x": (state.global_step == 12 and stuck()) or 0.0}, every_n_steps=3
        )
    ]


class Slow(jstep.Saver):
    """A Saver that hangs once, while it saves."""

    def __init__(self, directory, stuck):
        super().__init__(directory)
        self.save = once(stuck, self.save)


def slow_to_restore(directory, stuck):
    """Return a Saver of which a checkpoint that is opened hangs, while it is restored."""
    saver = jstep.Saver(directory)
    finder = engine_of(saver).finder
    open_checkpoint = finder.open

    def opened(step):
        checkpoint = open_checkpoint(step)
        checkpoint.restore = once(stuck, checkpoint.restore)
        return checkpoint

    finder.open = opened
    return saver


def saved(where):
    with Saver(where) as saver:
        saver.save(make_state().replace(global_step=jnp.int32(3)))
    return where


PLACES = {
    "loader in iter": (r"starting at step 0", lambda stuck, where: {"batches": Blocks(stuck)}),
    "compile": (r"compiling step 0's program", lambda stuck, where: {"step": slow_trace(stuck)}),
    "device": (
        r"in a call of steps? 9(?: to \d+)?",
        lambda stuck, where: {
            "step": slow_device(stuck),
            "batches": lambda step: jnp.full(3, float(step)),
        },
    ),
    "evaluation": (
        r"in an evaluation at step 12",
        lambda stuck, where: {"hooks": evaluating(stuck)},
    ),
    "numbers for a hook": (
        r"in the hook MetricsHook at step 12",
        lambda stuck, where: {
            "hooks": [jstep.MetricsHook(once(stuck, lambda *_: None, 4), every_n_steps=3)]
        },
    ),
    "restore": (
        "restoring step 3",
        lambda stuck, where: {"checkpoint_dir": slow_to_restore(saved(where), stuck)},
    ),
    "compile again": (
        r"compiling step 9's program",
        lambda stuck, where: {
            "step": slow_second_trace(stuck),
            "batches": lambda step: jnp.ones(3 + (step >= 9)),
        },
    ),
    "save": ("saving step 20", lambda stuck, where: {"checkpoint_dir": Slow(where, stuck)}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLACES)
def test_the_line_of_each_place(name, tmp_path):
    what, prepare = PLACES[name]
    with hang() as stuck:
        train(**{"checkpoint_dir": tmp_path} | prepare(stuck, tmp_path))
    assert stuck.lines
    assert re.fullmatch(line_of(what, r"hangs\.py:\d+ in __call__", usual="?"), stuck.lines[0])


def watch_of(**settings):
    watch = object.__new__(StallWatch)
    watch._hook = jstep.StallHook(**settings)
    watch._index, watch._name = 0, "process 0"
    return watch


@pytest.mark.parametrize(
    ("usual", "age", "expected"),
    [
        (0.0, 59.0, False),
        (0.0, 61.0, True),
        (1.0, 61.0, True),
        (5.0, 149.0, False),  # factor × usual
        (5.0, 151.0, True),
        (100.0, 699.0, False),  # usual + 10 × warn_secs
        (100.0, 701.0, True),
        (None, 599.0, False),  # what has no usual yet
        (None, 601.0, True),
    ],
)
def test_what_a_stall_is(monkeypatch, usual, age, expected):
    watch = watch_of(warn_secs=60.0, factor=30.0)
    monkeypatch.setattr(StallWatch, "_usual", lambda self, wait: usual)
    assert watch._is_stall(Wait("hook", "in a hook", age=age, idle=age)) is expected


def test_time_in_which_a_first_compilation_computes_counts_a_tenth(monkeypatch):
    watch = watch_of(warn_secs=60.0)
    monkeypatch.setattr(StallWatch, "_usual", lambda self, wait: None)
    assert not watch._is_stall(Wait("compile", "", age=5000.0, idle=500.0))


def test_a_watch_that_is_interrupted_as_it_starts_ends(monkeypatch):
    """Otherwise it would call a run a stall that has not begun, and `exit_secs` would end the
    process."""
    watches = []

    class Interrupted(Thread):
        def start(self):
            super().start()
            watches.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(stalls.threads, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        train()
    (watch,) = watches
    watch.join(TIMEOUT)
    assert not watch.is_alive()


def test_a_run_that_is_not_watched_starts_no_thread(tmp_path):
    names = []
    train(
        3,
        warn_secs=None,
        hooks=[jstep.every(1, lambda *_: names.extend(t.name for t in threading.enumerate()))],
    )
    assert not [name for name in names if name.startswith("jstep-stall")]


def test_a_directory_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "stalls").write_text("not a folder")
    with hang(2) as stuck:
        train(batches=once_at(stuck, 9), checkpoint_dir=tmp_path)
    assert (
        sum("the stall cannot be written" in record.getMessage() for record in caplog.records) == 1
    )
    first, second = (
        float(re.search(r"waiting for batch 9 for ([\d.]+) s", line)[1]) for line in stuck.lines[:2]
    )
    assert second >= 2 * first - 0.1, "a line at twice the age of the last one"


# `StallHook(exit_secs=…)`: exit code 75, the stacks, and the state that is saved; and what is not a
# stall.

HANG = """
import threading
def stuck():
    say("stuck")
    threading.Event().wait()
hooks = [jstep.StallHook(warn_secs=1.0, exit_secs=1.2)]
"""


def ended(script, directory):
    process = start(HANG + script, directory)
    return end(process, 75)[1]


def test_it_ends_with_75_and_saves(tmp_path):
    script = (
        "train(30, lambda step: DATA[step] if step < 8 else stuck(), hooks=hooks, "
        "checkpoint_dir=directory)"
    )
    errors = ended(script, tmp_path)
    assert re.search(
        r"process 0 of 1 \(host \S+\) has been waiting for batch 8 for [\d.]+ s",
        errors,
    )
    assert "ends with exit code 75" in errors
    assert "most recent call first" in errors  # faulthandler
    assert "step 8 is saved as model-8" in errors
    saver = Saver(tmp_path)
    assert saver.latest_step() == 8
    kept = json.loads((tmp_path / "stalls" / "model.0.json").read_text())
    assert kept["exit_code"] == 75
    assert any("in stuck" in line for lines in kept["threads"].values() for line in lines)
    assert main(["stalls", str(tmp_path)]) == 0, "its process is gone"
    (run,) = jstep.runs(tmp_path)
    assert run.status == "killed"
    assert re.match(r"process 0 hung at step \d+: waiting for batch", run.reason)


@pytest.mark.thorough
def test_the_loader_continues_where_it_was(tmp_path):
    script = """
class Stuck(Counted):
    def __next__(self):
        return super().__next__() if self.at < 8 else stuck()
train(30, Stuck(), hooks=hooks, checkpoint_dir=directory, save_checkpoint_secs=None)
"""
    ended(script, tmp_path)
    assert (tmp_path / "stalls" / "model.0.json").exists()
    same = (
        "say(digest(train(30, Counted(), "
        "checkpoint_dir=directory)) == digest(train(30, Counted())))"
    )
    assert end(start(same, tmp_path))[0] == "True\n"
    assert not (tmp_path / "stalls" / "model.0.json").exists()


@pytest.mark.thorough
def test_a_stopped_process_does_not_stall(tmp_path):
    script = """
for part in range(3):
    def tell(step, state, metrics):
        say("step", step)
        time.sleep(0.02)
    train(100, hooks=[jstep.StallHook(warn_secs=0.3), jstep.every(1, tell)])
"""
    process = start(script, tmp_path)
    for _ in range(3):
        read_until(process, "step 50")
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
    assert "has been" not in end(process)[1]

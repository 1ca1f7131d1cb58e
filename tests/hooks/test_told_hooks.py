"""What a hook is told: `before_save`, `saved`, `failed`, `closed`."""

import logging
import os
import signal
import threading
import time

import jax.numpy as jnp
import pytest
from doubles import raising
from points import number

import jstep
from jstep.hooks.run_hook import RunHook
from jstep.loop.background import BackgroundHooks

optimizer, train_step = number()


def train(last_step, *hooks, batches=None, **options):
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    options = {"log_steps": None} | options
    return jstep.train(
        train_step,
        state,
        batches or (lambda step: jnp.float32(1.0)),
        last_step,
        hooks=hooks,
        **options,
    )


def saving(tmp_path, every=5, **options):
    saver = jstep.Saver(tmp_path / "run", **options) if options else tmp_path / "run"
    return {"checkpoint_dir": saver, "save_checkpoint_steps": every, "save_checkpoint_secs": None}


class Told(jstep.Hook):
    def __init__(self, saved=None, failed=None, closed=None):
        self.calls, self._fns = [], {"saved": saved, "failed": failed, "closed": closed}

    def _called(self, name, *args):
        self.calls.append((name, *args))
        if self._fns[name] is not None:
            self._fns[name](*args)

    def saved(self, step, path):
        self._called("saved", step, path)

    def failed(self, step, error):
        self._called("failed", step, error)

    def closed(self):
        self._called("closed")

    @property
    def steps(self):
        return [call[1] for call in self.calls if call[0] == "saved"]


def test_each_kept_checkpoint_is_told_when_it_is_there(tmp_path):
    seen = []

    def look(step, path):
        with jstep.Saver(os.path.dirname(path)) as saver:
            seen.append(
                (
                    step,
                    int(
                        saver.restore(
                            jstep.TrainState.create({"w": 0.0}, optimizer), step
                        ).global_step
                    ),
                )
            )

    hook = Told(look)
    train(12, hook, **saving(tmp_path))
    assert seen == [(5, 5), (10, 10), (12, 12)]
    assert hook.calls[0] == ("saved", 5, str(tmp_path / "run" / "model-5"))
    assert hook.calls[-1] == ("closed",)


@pytest.mark.parametrize("method", ["all_steps", "wait", "extra"])
def test_a_hook_does_not_wait_for_the_save_that_waits_for_it(tmp_path, method):
    options = saving(tmp_path, max_to_keep=1)
    hook = Told(lambda step, path: getattr(options["checkpoint_dir"], method)())
    with pytest.raises(RuntimeError, match=r"read checkpoints with another one, jstep\.Saver\("):
        train(12, hook, **options)
    assert hook.steps == [5, 10, 12]


def test_no_checkpoint_is_evicted_before_its_word_has_returned(tmp_path):
    found = []

    def slowly(step, path):
        time.sleep(0.05)
        found.append(os.path.isdir(path))

    hook = Told(slowly)
    train(5, hook, **saving(tmp_path, 1, max_to_keep=1))
    assert hook.steps[:4] == list(range(1, 5))
    assert all(found)


def test_only_reports_in_progress_are_held():
    hook = Told()
    background = BackgroundHooks([hook])
    for step in range(30):
        background.saved(step, f"model-{step}")
        background.wait()
    assert hook.steps == list(range(30))
    assert list(background._calls) == ["model-29"]


def test_a_report_is_awaited_while_another_one_begins():
    hook, waits = Told(), []
    background = BackgroundHooks([hook])

    class Call:
        result = staticmethod(lambda: None)

        def done(self):  # `saved` looks at each call while another thread waits for one of them
            if not waits:
                waits.append(threading.Thread(target=background.wait, args=("model-2",)))
                waits[0].start()
                waits[0].join(0.2)
            return False

    background._calls = {"model-1": Call(), "model-2": Call()}
    background.saved(3, "model-3")
    waits[0].join(60)
    background.wait()
    assert hook.steps == [3]
    assert list(background._calls) == ["model-1", "model-3"]


def test_keep_best_waits_and_tells(tmp_path):
    found = []

    def slowly(step, path):
        time.sleep(0.05)
        found.append((step, os.path.basename(path), os.path.isdir(path)))

    best = jstep.KeepBest(tmp_path / "best", "w", mode="max")
    evaluation = jstep.EvaluationHook(
        lambda state: {"w": float(state.params["w"])}, every_n_steps=2, callbacks=[best]
    )
    train(6, Told(slowly), evaluation)
    assert found == [(2, "best-2", True), (4, "best-4", True), (6, "best-6", True)]


def test_a_checkpoint_saver_hook_tells_and_a_users_saver_does_not_after_the_run(tmp_path):
    hook, saver = Told(), jstep.Saver(tmp_path / "own", prefix="own")
    state = train(4, hook, jstep.CheckpointSaverHook(saver, save_steps=2))
    assert {os.path.basename(path) for _, _, path in hook.calls[:-1]} == {"own-2", "own-4"}
    count = len(hook.calls)
    saver.save(jstep.increment_global_step(state))
    saver.close()
    assert len(hook.calls) == count


def test_steps_do_not_wait(tmp_path):
    free, steps = threading.Event(), []

    def hold(step, path):
        assert free.wait(60)

    def look(step, state, metrics):
        steps.append(step)
        if step == 15:
            free.set()

    train(20, Told(hold), jstep.every(1, look), **saving(tmp_path, 10))
    assert steps == list(range(1, 21))


@pytest.mark.thorough(except_for=["ValueError"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_gets_the_very_exception_when_all_is_saved(error, tmp_path):
    def fail(step, state, metrics):
        if step == 7:
            raise error("stop")

    seen = []

    def look(step, found):
        seen.append(
            (
                list(found.__notes__),
                int(found.state.global_step),
                os.path.isdir(tmp_path / "run" / "model-5"),
            )
        )

    hook = Told(failed=look)
    with pytest.raises(error) as found:
        train(20, hook, jstep.every(1, fail), **saving(tmp_path))
    # Nothing of the iteration is saved.
    assert [call[0] for call in hook.calls] == ["saved", "failed", "closed"]
    assert hook.calls[1] == ("failed", 7, found.value)
    assert seen[0][1:] == (7, True)
    assert seen[0][0]
    assert not os.path.isdir(tmp_path / "run" / "model-7")


@pytest.mark.thorough(except_for=["ValueError"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_gets_the_very_exception_of_a_loader_when_all_is_saved(error, tmp_path):
    def batches():
        for _ in range(7):
            yield jnp.float32(1.0)
        raise error("stop")

    seen = []

    def look(step, found):
        seen.append(
            (
                list(found.__notes__),
                int(found.state.global_step),
                os.path.isdir(tmp_path / "run" / "model-7"),
            )
        )

    hook = Told(failed=look)
    with pytest.raises(error) as found:
        train(20, hook, batches=batches(), **saving(tmp_path))
    assert [call[0] for call in hook.calls] == ["saved", "saved", "failed", "closed"]
    assert hook.calls[2] == ("failed", 7, found.value)
    assert seen[0][1:] == (7, True)
    assert seen[0][0]


def test_a_signal_is_told_and_the_last_checkpoint_before_it(tmp_path):
    def stop(step, state, metrics):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    hook = Told(lambda step, path: time.sleep(0.2))
    with pytest.raises(jstep.Preempted) as found:
        train(20, hook, jstep.every(1, stop), **saving(tmp_path))
    assert hook.steps[-1] in (7, 8)
    assert hook.calls[-2:] == [("failed", hook.steps[-1], found.value), ("closed",)]


def test_hooks_are_closed_in_reverse_also_where_begin_was_not_called(tmp_path):
    order = []
    hooks = [Told(closed=lambda name=name: order.append(name)) for name in "abc"]
    train(1, *hooks)
    assert order == ["c", "b", "a"]

    refuse = type("Refuse", (jstep.Hook,), {"begin": raising(RuntimeError("no"))})()
    with pytest.raises(RuntimeError, match="no"):
        train(1, refuse, *hooks)
    assert order == ["c", "b", "a"] * 2
    with pytest.raises(TypeError):
        train("x", *hooks)
    assert len(order) == 6


def test_what_saved_raises_ends_no_run(tmp_path, caplog):
    def fail(step, path):
        raise OSError(f"no bucket at {step}")

    with (
        caplog.at_level(logging.WARNING, "jstep"),
        pytest.raises(OSError, match="no bucket at 10") as found,
    ):
        train(10, Told(fail), **saving(tmp_path))
    assert int(found.value.state.global_step) == 10
    assert "Told.saved(5, " in caplog.text
    assert os.path.isdir(tmp_path / "run" / "model-10")

    def fail_once(step, path):
        if step == 15:
            raise OSError("once")

    train(20, Told(fail_once), **saving(tmp_path))


def failing(kind, text):
    """As `raising`, with another error each time."""

    def fail(*_):
        raise kind(text)

    return fail


def test_where_a_run_fails_its_error_stays(tmp_path):
    names = ["saved", "failed", "closed"]
    hook, stop = (
        Told(*(failing(OSError, name) for name in names)),
        jstep.every(6, raising(ValueError("stop"))),
    )
    with pytest.raises(ValueError, match="stop") as found:
        train(10, hook, stop, **saving(tmp_path))
    notes = [note for note in found.value.__notes__ if note.startswith("Additionally")]
    assert notes == [f"Additionally, OSError: {name}\njstep: in Told.{name}" for name in names]


def test_after_success_the_first_error_of_closed_is_raised():
    hooks = [Told(closed=raising(ValueError(name))) for name in "ab"]
    with pytest.raises(ValueError, match="b") as found:
        train(3, *hooks)
    assert found.value.__notes__ == [
        "jstep: in Told.closed",
        "Additionally, ValueError: a\njstep: in Told.closed",
    ]
    assert int(found.value.state.global_step) == 3
    assert [hook.calls for hook in hooks] == [[("closed",)]] * 2


@pytest.mark.parametrize("exit_of_hook", [SystemExit(0), KeyboardInterrupt("mine")])
def test_an_exit_of_a_hook_that_closes_reaches_all_hooks_and_hides_no_error(exit_of_hook, tmp_path):
    other, leaving = Told(failing(OSError, "the upload failed")), Told(closed=raising(exit_of_hook))
    with pytest.raises(OSError, match="the upload failed") as found:
        train(10, other, leaving, **saving(tmp_path))
    assert other.calls[-1] == ("closed",)
    assert any(
        note.startswith(f"Additionally, {type(exit_of_hook).__name__}")
        for note in found.value.__notes__
    )
    first, leaving = Told(), Told(failed=raising(exit_of_hook))
    with pytest.raises(ValueError, match="stop"):
        train(10, leaving, first, jstep.every(6, raising(ValueError("stop"))))
    assert [call[0] for call in first.calls] == ["failed", "closed"]
    with pytest.raises(type(exit_of_hook)):  # without another error it leaves as asked
        train(3, Told(closed=raising(exit_of_hook)))


def test_a_hook_may_have_one_of_them_alone(tmp_path):
    class Closed:
        def closed(self):
            self.is_closed = True

    hook = Closed()
    train(1, hook)
    assert hook.is_closed
    with pytest.raises(TypeError, match="must be a hook"):
        train(1, object())


class Log(jstep.Hook):
    def __init__(self, directory):
        self.calls, self._directory = [], directory

    def after_step(self, step, state, metrics):
        self.calls.append(step)

    def flush(self):
        self.calls.append(
            (
                "flush",
                sorted(name for name in os.listdir(self._directory) if name.startswith("model-")),
            )
        )

    def closed(self):
        self.calls.append("closed")

    def close(self):
        self.calls.append("close")


def test_flush_comes_before_each_checkpoint_and_close_at_the_end(tmp_path):
    hook = Log(tmp_path / "run")
    train(4, hook, **saving(tmp_path, 2))
    flushes = [call for call in hook.calls if isinstance(call, tuple)]
    older = [[name for name in names if name in ("model-2", "model-4")] for _, names in flushes]
    assert [len(names) for names in older] == [0, 1]
    assert hook.calls[-2:] == ["closed", "close"]
    hook = Log(tmp_path / "run")
    with pytest.raises(RuntimeError, match="gone"):
        train(8, hook, batches=raising(RuntimeError("gone")), **saving(tmp_path, 2))
    assert hook.calls == ["closed", "close"]


def test_an_error_of_a_users_flush_is_one_of_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr(Log.flush, "__module__", "jstep.mine")
    hook = Log(tmp_path / "nowhere")
    with pytest.raises(jstep.CheckpointError, match=r"model-2 was not saved.*nowhere"):
        train(4, hook, **saving(tmp_path, 2))
    assert hook.calls[-2:] == ["closed", "close"]


@pytest.mark.thorough(except_for=["flush", "closed"])
@pytest.mark.parametrize("method", ["flush", "before_save", "saved", "closed", "close"])
def test_an_error_of_a_hook_names_it(method, tmp_path):
    """Also where it is noted on another error; and what is noted of it ends with one period."""

    hook = type("Mine", (jstep.Hook,), {method: failing(ValueError, "disk full")})()
    with pytest.raises((ValueError, jstep.CheckpointError), match="disk full") as found:
        train(4, hook, **saving(tmp_path, 2))
    notes = found.value.__notes__
    assert f"jstep: in Mine.{method}" in notes
    assert not any(".." in line for line in notes)
    with pytest.raises(KeyError) as found:
        train(4, hook, jstep.every(1, lambda *_: {}["x"]), **saving(tmp_path / "other", 1))
    if method in ("closed", "close"):
        assert (
            f"Additionally, ValueError: disk full\njstep: in Mine.{method}" in found.value.__notes__
        )


def test_the_order_of_what_is_called_last():
    calls = []

    def method(name):
        return lambda self: calls.append(f"{type(self).__name__} {name}")

    methods = {name: method(name) for name in ("closed", "close")}
    train(
        2,
        *(
            type(name, (base,), methods)()
            for name, base in {"A": jstep.Hook, "B": RunHook, "C": jstep.Hook}.items()
        ),
    )
    assert calls == ["B close", "C closed", "C close", "B closed", "A closed", "A close"]

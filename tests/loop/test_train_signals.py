"""`train` and signals: the current step is completed, the state is saved, and the program exits."""

import signal

import pytest
from children import end, read_until, release, signalled, start

from jstep.checkpoint.saver import Saver


@pytest.mark.thorough(except_for=["15"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_current_step(number, tmp_path):
    script = """
class Slow(jstep.Hook):
    def after_step(self, step, state, metrics):
        say("step", step)
        if step == 5:
            wait()
        say("over", step)
    def end(self, step, state):
        say("end")
try:
    train(100, Counted(), hooks=[Slow()], checkpoint_dir=directory, progress=None, log_steps=None)
except BaseException as error:
    say("left", type(error).__name__, getattr(error, "code", None), jstep.Saver(directory).latest_step())
    raise
"""
    process = signalled(script, tmp_path, "step 5", number)
    release(process)
    out, err = end(process, 143 if number == signal.SIGTERM else -signal.SIGINT)
    assert "over 5" in out  # the current step was completed
    assert "step 6" not in out
    assert "end" not in out
    name, code = ("Preempted", "143") if number == signal.SIGTERM else ("KeyboardInterrupt", "None")
    assert f"left {name} {code} 5" in out
    assert f"{number.name} stopped the run after step 5, which is saved; start the run again to resume" in err
    assert Saver(tmp_path).extra()["batches"] == {"base64": "NQ=="}
    script = """
say(digest(train(30, Counted(), checkpoint_dir=directory)) == digest(train(30, Counted())))
"""
    assert end(start(script, tmp_path))[0] == "True\n"


@pytest.mark.thorough
def test_sigterm_without_a_checkpoint_dir(tmp_path):
    script = 'train(16_000, hooks=[jstep.EvaluationHook(lambda s: say("here") or {}, every_n_steps=100)])'
    process = signalled(script, tmp_path, "here")
    _, err = end(process, 143)
    assert err == ""


@pytest.mark.thorough(except_for=["15-True-Counted"])
@pytest.mark.parametrize(
    ("number", "quick", "kind"),
    [
        (signal.SIGTERM, True, "Counted"),
        (signal.SIGINT, True, "object"),
        (signal.SIGTERM, False, "object"),
        (signal.SIGINT, False, "Counted"),
    ],
)
def test_a_signal_while_the_loop_waits_for_a_batch(number, quick, kind, tmp_path):
    script = f"""
class Hangs({kind}):
    def __iter__(self):
        return self
    def __next__(self):
        time.sleep({0 if quick else 0.001})
        n = self.at = getattr(self, "at", 0) + 1
        if n == 13:
            while last < 12:
                time.sleep(0.001)
            say("hangs")
            time.sleep(1000)
        return DATA[n - 1]
last = 0
def count(step, state, metrics):
    global last
    last = step
train(100, Hangs(), hooks=[jstep.every(1, count)], checkpoint_dir=directory)
"""
    # the steps before have ended; the loop waits, or is about to
    process = signalled(script, tmp_path, "hangs", number)
    _, err = end(process, 143 if number == signal.SIGTERM else -signal.SIGINT)
    assert "The batches ended" not in err
    saver = Saver(tmp_path)
    assert saver.latest_step() == 12
    assert saver.extra().get("batches") == ({"base64": "MTI="} if kind == "Counted" else None)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_first_batch_is_read(number, tmp_path):
    script = """
class Rows:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        say("hangs")
        time.sleep(1000)
train(100, jstep.batches(Rows(), 8), checkpoint_dir=directory)
"""
    process = signalled(script, tmp_path, "hangs", number)
    end(process, 143 if number == signal.SIGTERM else -signal.SIGINT)


@pytest.mark.thorough
def test_a_signal_that_does_not_interrupt_the_wait_is_handled(tmp_path):
    # Like a signal that arrives just before the wait; here, another thread receives it.
    script = """
import threading
def is_waiting():
    return sys._current_frames()[threading.main_thread().ident].f_code.co_name == "wait"
class Rows:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if threading.current_thread().name == "jstep-first-batch":
            seen = 0
            while seen < 20:  # consecutive, to ignore earlier short waits
                time.sleep(0.01)
                seen = seen + 1 if is_waiting() else 0
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        time.sleep(1000)
train(100, jstep.batches(Rows(), 8), checkpoint_dir=directory)
"""
    end(start(script, tmp_path), 143)


def test_a_second_sigint_exits_immediately(tmp_path):
    script = """
class Stuck(jstep.Hook):
    def after_step(self, step, state, metrics):
        if step == 5:
            say("stuck")
            for _ in range(10_000):
                time.sleep(0.02)
                say("still")
try:
    train(100, hooks=[Stuck()], checkpoint_dir=directory, save_checkpoint_steps=3)
except KeyboardInterrupt:
    say("left")
"""
    process = signalled(script, tmp_path, "stuck", signal.SIGINT)
    for _ in range(5):
        read_until(process, "still")  # the run continues after the first signal
    process.send_signal(signal.SIGINT)
    assert end(process)[0].endswith("left\n")
    assert Saver(tmp_path).all_steps() == [3]


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_signal_before_or_after_the_steps(where, tmp_path):
    """Before the first step nothing is saved; after the last step the run is completed."""
    script = f"""
class Slow(jstep.Hook):
    def {where}(self, *args):
        say("here")
        wait()
        say("over")
train(6, hooks=[Slow()], checkpoint_dir=directory)
say("not reached")
"""
    process = signalled(script, tmp_path, "here")
    if where == "end":
        release(process)
    out, _ = end(process, 143)
    assert out == ("over\n" if where == "end" else "")
    assert Saver(tmp_path).all_steps() == ([6] if where == "end" else [])


def test_a_nan_is_not_saved_by_a_signal(tmp_path):
    script = """
class Slow(jstep.Hook):
    def after_step(self, step, state, metrics):
        say("step", step)
        time.sleep(0.1)
train(100, lambda n: {"x": np.full((8, 8), np.nan if n == 3 else 1, np.float32)},
      hooks=[jstep.NanLossHook(every_n_steps=50), Slow()], checkpoint_dir=directory, save_checkpoint_steps=3)
"""
    process = signalled(script, tmp_path, "step 5")
    _, err = end(process, 1)
    assert "NanLossDuringTrainingError: the loss is nan at step 4" in err
    assert Saver(tmp_path).all_steps() == [3]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_the_state_and_writes_all_metrics(number, tmp_path):
    script = """
rows = []
def report(step, state, metrics):
    say("step", step)
    time.sleep(0.02)
try:
    train(1000, hooks=[jstep.every(1, report), jstep.MetricsHook(lambda *row: rows.append(row), every_n_steps=100)])
except BaseException as error:
    assert jstep.global_step(error.state) == rows[-1][0], (error.state, rows)
    assert np.isfinite(np.asarray(error.state.params["w"])).all()
    (note,) = error.__notes__
    assert "the state after step" in note, note
    say("left", type(error).__name__)
"""
    process = signalled(script, tmp_path, "step 5", number)
    out, _ = end(process)
    assert out.endswith("left Preempted\n" if number == signal.SIGTERM else "left KeyboardInterrupt\n")


def test_an_ignored_sigint_stays_ignored(tmp_path):
    """SIGINT is ignored under nohup, or in a background job of a shell script."""
    script = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
def interrupt(step, state, metrics):
    os.kill(os.getpid(), signal.SIGINT)
state = train(6, hooks=[jstep.every(2, interrupt)], checkpoint_dir=directory)
assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
say("end", state.global_step)
"""
    out, _ = end(start(script, tmp_path))
    assert out == "end 6\n"


@pytest.mark.thorough
def test_a_second_sigint_during_a_save_has_a_short_traceback(tmp_path):
    script = """
def interrupt(step, state, metrics):
    os.kill(os.getpid(), signal.SIGINT)
def save(self, state, extra=None):
    def deep(n):
        if n:
            return deep(n - 1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    deep(200)
jstep.Saver.save = save
train(100, hooks=[jstep.every(5, interrupt)], checkpoint_dir=directory)
"""
    _, err = end(start(script, tmp_path), -signal.SIGINT)
    assert "KeyboardInterrupt: SIGINT came twice: the run was left at once, at step 5" in err
    assert len(err.splitlines()) < 40
    assert "deep" not in err


def test_a_save_in_progress_ends_after_a_second_sigint(tmp_path):
    script = """
class Interrupts(jstep.Hook):
    def after_step(self, step, state, metrics):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
import threading
left = threading.Event()
saver = jstep.Saver(directory)
with saver.flushing(lambda: left.wait(60)):  # the disk is slow
    try:
        train(10, hooks=[Interrupts()], checkpoint_dir=saver, save_checkpoint_steps=2)
    except KeyboardInterrupt as error:
        say("left", error)
    left.set()
    saver.wait()
say(saver.all_steps())
"""
    out, _ = end(start(script, tmp_path))
    assert "the run was left at once, at step 3" in out
    assert out.endswith("[2]\n")

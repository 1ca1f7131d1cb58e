"""What a run survives: kills at any instant, signals, a loader that hangs. All in subprocesses."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from jstep.checkpoint import Saver

IMPORTS = """
import json, os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
import jstep

# It may be ignored in what runs the tests, as in jobs of a shell script; programs in a terminal have it.
signal.signal(signal.SIGINT, signal.default_int_handler)
directory = sys.argv[1]

def say(*words):
    print(*words, flush=True)
"""

MODEL = """
DATA = jstep.batches({"x": np.random.default_rng(0).normal(size=(64, 8)).astype("f")}, batch_size=8, seed=1)
OPTIMIZER = jstep.with_moving_average(
    jstep.adam(jstep.exponential_decay(0.05, 20, 0.9)), jstep.ExponentialMovingAverage(0.9))

def loss_fn(params, batch, rng):
    x = batch["x"] + 0.1 * jax.random.normal(rng, batch["x"].shape)
    return jnp.mean((jnp.tanh(x @ params["w"]) - x) ** 2)

STEP = jstep.minimize(loss_fn, OPTIMIZER, rng=jax.random.key(7))

def make_state():
    return jstep.TrainState.create({"w": jnp.eye(8)}, OPTIMIZER)

def digest(state):
    import hashlib
    leaves = jax.tree.leaves(state)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()

class Counted:
    at = 0
    def __next__(self):
        self.at += 1
        return DATA[self.at - 1]
    def get_state(self):
        return b"%d" % self.at
    def set_state(self, state):
        self.at = int(state)

def train(last_step, batches=DATA, state=None, **kwargs):
    kwargs.setdefault("progress", False)
    return jstep.train(STEP, make_state() if state is None else state, batches, last_step, **kwargs)
"""

ENV = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


def start(script, directory, prelude=IMPORTS + MODEL, **kwargs):
    process = subprocess.Popen(
        [sys.executable, "-c", prelude + script, str(directory)],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=kwargs.pop("stderr", subprocess.PIPE),
        text=True,
        **kwargs,
    )
    STARTED.append(process)
    return process


STARTED = []


@pytest.fixture(autouse=True)
def nothing_runs_on():
    yield
    while STARTED:
        with STARTED.pop() as process:  # closes its pipes
            process.kill()


def until(process, word):
    """Reads what it says up to a line that begins so."""
    for line in process.stdout:
        if line.startswith(word):
            return line.split()
    raise AssertionError(process.stderr.read()[-3000:])


def end(process, code=0, timeout=60):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, err[-3000:]
    return out, err


def test_sigkill_at_twenty_random_instants(tmp_path):
    """One program, forked again and again before it uses JAX, so that a restart costs no import."""
    script = """
import random
import orbax.checkpoint

STEPS = 600
def child(write, every):
    code = 1
    try:
        exec(MODEL, globals())
        class Look(jstep.Hook):
            def begin(self, state):
                os.write(write, b"%4d" % jstep.global_step(state))
            def after_step(self, step, state, metrics):
                os.write(write, b"!")
        keeps = {"checkpoint_dir": directory, "save_checkpoint_steps": every, "hooks": [Look()]} if write else {}
        state = train(STEPS, Counted(), **keeps)
        if write is None:
            open(directory + "/reference", "w").write(digest(state))
        code = 0 if digest(state) == open(directory + "/reference").read() else 3
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(code)

def fork(write, every=1):
    child_id = os.fork()
    if child_id == 0:
        child(write, every)
    return child_id

assert os.waitpid(fork(None), 0)[1] == 0
rng = random.Random(1)
kills, found = 0, []
while True:
    read, write = os.pipe()
    child_id = fork(write, 1 if kills < 20 else 50)
    os.close(write)
    where = os.read(read, 4)
    if kills < 20:
        # After some steps, however slow the machine is, and then at any instant; or before the first of them.
        for _ in range(rng.choice([0, 1, 3, 10, 30])):
            os.read(read, 1)
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(child_id, signal.SIGKILL)
    _, status = os.waitpid(child_id, 0)
    os.close(read)
    found.append(int(where or -1))
    kills += os.WIFSIGNALED(status)
    if not os.WIFSIGNALED(status):
        say("done", os.waitstatus_to_exitcode(status), kills, json.dumps(found))
        break
"""
    cached = f"import os; os.environ['JAX_COMPILATION_CACHE_DIR'] = {str(tmp_path / 'compiled')!r}\n"
    cached += "os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'\n"
    out, err = end(start(script, tmp_path, prelude=cached + IMPORTS + f"MODEL = {MODEL!r}\n"), timeout=150)
    _, code, kills, found = out.strip().split(" ", 3)
    assert (code, kills) == ("0", "20"), f"{out}\n{err[-3000:]}"
    found = json.loads(found)
    assert found == sorted(found)  # no restart falls back behind an earlier one
    assert len(set(found)) > 5
    assert Saver(tmp_path).latest_step() == 600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_in_flight(number, tmp_path):
    script = """
class Slow(jstep.Hook):
    def after_step(self, step, state, metrics):
        say("step", step)
        time.sleep(0.05)
        say("over", step)
    def end(self, step, state):
        say("end")
try:
    train(100, Counted(), hooks=[Slow()], checkpoint_dir=directory, progress=None, log_steps=None)
except BaseException as error:
    say("left", type(error).__name__, getattr(error, "code", None), jstep.Saver(directory).latest_step())
    raise
"""
    process = start(script, tmp_path)
    until(process, "step 5")
    process.send_signal(number)
    out, err = end(process, 143 if number == signal.SIGTERM else -signal.SIGINT)
    assert "over 5" in out  # what was under way went on to its end
    assert "step 6" not in out
    assert "end" not in out
    name, code = ("Preempted", "143") if number == signal.SIGTERM else ("KeyboardInterrupt", "None")
    assert f"left {name} {code} 5" in out
    assert f"{number.name} stopped the run after step 5, which is saved; start the run again to go on" in err
    assert Saver(tmp_path).extra() == {"batches": {"base64": "NQ=="}}
    script = """
say(digest(train(30, Counted(), checkpoint_dir=directory)) == digest(train(30, Counted())))
"""
    assert end(start(script, tmp_path))[0] == "True\n"


def test_sigterm_without_a_checkpoint_dir(tmp_path):
    process = start('train(10**9, hooks=[jstep.EvaluationHook(lambda s: say("here") or {}, 100)])', tmp_path)
    until(process, "here")
    process.terminate()
    _, err = end(process, 143)
    assert err == ""


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
            say("hangs")
            time.sleep(1000)
        return DATA[n - 1]
train(100, Hangs(), checkpoint_dir=directory)
"""
    process = start(script, tmp_path)
    until(process, "hangs")
    time.sleep(0.2)  # the steps before are over, the loop waits
    process.send_signal(number)
    end(process, 143 if number == signal.SIGTERM else -signal.SIGINT)
    saver = Saver(tmp_path)
    assert saver.latest_step() == 12
    assert saver.extra() == ({"batches": {"base64": "MTI="}} if kind == "Counted" else {})


def test_a_second_sigint_leaves_at_once(tmp_path):
    script = """
class Stuck(jstep.Hook):
    def after_step(self, step, state, metrics):
        if step == 5:
            say("stuck")
            time.sleep(1000)
try:
    train(100, hooks=[Stuck()], checkpoint_dir=directory, save_checkpoint_steps=3)
except KeyboardInterrupt:
    say("left")
"""
    process = start(script, tmp_path)
    until(process, "stuck")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert end(process)[0] == "left\n"
    assert Saver(tmp_path).all_steps() == [3]


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_signal_around_the_steps(where, tmp_path):
    """Before the first step there is nothing to save; after the last one the run is not called off."""
    script = f"""
class Slow(jstep.Hook):
    def {where}(self, *args):
        say("here")
        for _ in range(50):
            time.sleep(0.02)
        say("over")
train(6, hooks=[Slow()], checkpoint_dir=directory)
say("not reached")
"""
    process = start(script, tmp_path)
    until(process, "here")
    process.terminate()
    out, _ = end(process, 143)
    assert out == ("over\n" if where == "end" else "")
    assert Saver(tmp_path).all_steps() == ([6] if where == "end" else [])


def test_a_nan_is_not_saved_by_a_signal_either(tmp_path):
    script = """
class Slow(jstep.Hook):
    def after_step(self, step, state, metrics):
        say("step", step)
        time.sleep(0.1)
train(100, lambda n: {"x": np.full((8, 8), np.nan if n == 3 else 1, np.float32)},
      hooks=[jstep.NanLossHook(50), Slow()], checkpoint_dir=directory, save_checkpoint_steps=3)
"""
    process = start(script, tmp_path)
    until(process, "step 5")
    process.terminate()
    _, err = end(process, 1)
    assert "NanLossDuringTrainingError: the loss is nan at step 4" in err
    assert Saver(tmp_path).all_steps() == [3]


def test_lines_where_there_is_no_terminal(tmp_path):
    script = """
train(30, log_steps=10, progress=False)
print("now", file=sys.stderr)
train(30, log_steps=10, progress=None)
"""
    out, err = end(start(script, tmp_path))
    assert out == ""
    assert [line.split("  ")[0] for line in err.splitlines()] == ["now", "step 10", "step 20", "step 30"]


def on_terminal(script, directory):
    """What a program shows on a terminal."""
    ours, theirs = pty.openpty()
    process = start(script, directory, stderr=theirs)
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([ours], [], [], 1)[0]:
            continue
        data = b""
        with contextlib.suppress(OSError):  # Linux says so where the other end is closed
            data = os.read(ours, 4096)
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown[-3000:].decode()
    return shown.decode()


def test_one_line_on_a_terminal(tmp_path):
    pytest.importorskip("tqdm")
    shown = on_terminal("train(30, log_steps=10, progress=False)", tmp_path)
    assert shown == ""
    shown = on_terminal("train(30, log_steps=10, progress=None)", tmp_path)
    assert "30/30" in shown  # though the terminal does not say how wide it is
    assert "loss 0." in shown
    assert "step/s" in shown
    assert shown.count("\n") == 1

"""`train` resumes after SIGKILL at any time."""

import json

import pytest
from children import IMPORTS, MODEL, end, start

from jstep.checkpoint.saver import Saver


@pytest.mark.thorough
def test_sigkill_at_twenty_random_times(tmp_path):
    """One program is forked repeatedly before it uses JAX, so that a restart does not import again."""
    script = """
import random
import orbax.checkpoint

STEPS = 400
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
        # Before the first step, or after some steps (on any machine) and a random delay.
        for _ in range(rng.choice([0, 1, 2, 5, 12])):
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
    out, err = end(start(script, tmp_path, prelude=IMPORTS + f"MODEL = {MODEL!r}\n"), timeout=150)
    _, code, kills, found = out.strip().split(" ", 3)
    assert (code, kills) == ("0", "20"), f"{out}\n{err[-3000:]}"
    found = json.loads(found)
    assert found == sorted(found)  # no restart resumes from an earlier step than the previous one
    assert len(set(found)) > 5
    assert Saver(tmp_path).latest_step() == 400


WITH_CALLBACKS = """
optimizer = jstep.adam(jstep.held("learning_rate", 0.05))
step = jstep.minimize(loss_fn, optimizer, rng=jax.random.key(7))

def run_with_callbacks(directory, kill_at):
    def evaluate(state):
        n = jstep.global_step(state) // 2
        return {"loss": 1.0 / min(n, 4) if n != 2 else float("nan")}
    then = [jstep.ReduceOnPlateau("loss", "learning_rate", 0.5, patience=1), jstep.EarlyStopping("loss", 6),
            jstep.KeepBest(directory + "/best", "loss")]
    def kill(n, state, metrics):
        if n == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    state = jstep.train(
        step, jstep.TrainState.create({"w": jnp.eye(8)}, optimizer), DATA, 100, progress=False,
        hooks=[jstep.EvaluationHook(evaluate, every_n_steps=2, then=then), jstep.every(1, kill)],
        checkpoint_dir=directory, save_checkpoint_steps=1)
    with jstep.Saver(directory + "/best", prefix="best") as saver:
        rate = jstep.get_hyperparameter(state, "learning_rate")
        return digest(state), jstep.global_step(state), saver.all_steps(), round(rate, 5)
"""


@pytest.mark.thorough
def test_evaluation_callbacks_survive_sigkill(tmp_path):
    """After several kills, the run stops at the same step with an identical state, and stays stopped."""
    script = """
for kill_at in (3, 8, 13, None):
    if os.fork() == 0:
        exec(MODEL)
        exec(WITH_CALLBACKS)
        found = run_with_callbacks(directory + "/killed", kill_at)
        expected = run_with_callbacks(directory + "/uninterrupted", None)
        say(found == expected, run_with_callbacks(directory + "/killed", None) == expected, *expected[1:])
        os._exit(0)
    say(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    prelude = IMPORTS + f"MODEL = {MODEL!r}\nWITH_CALLBACKS = {WITH_CALLBACKS!r}\n"
    out, _ = end(start(script, tmp_path, prelude=prelude), timeout=150)
    assert out.splitlines() == ["-9", "-9", "-9", "True True 20 [8] 0.00625", "0"]

"""Runs whose step, batch size, rows and mixture change, killed at each stage boundary and within each stage.

They end with the fingerprint of an uninterrupted run.
"""

import json
import re
import signal

import pytest
from children import IMPORTS, end, start
from processes import run as run_all
from processes import start as start_all
from processes import wait_for

SCORE = """
def near(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) - x) ** 2)

def far(params, x):
    return jnp.mean(jnp.abs(jnp.tanh(x @ params["w"]) + x))

optimizer = jstep.with_moving_average(
    jstep.adam(jstep.exponential_decay(0.05, 20, 0.9)), jstep.ExponentialMovingAverage(0.9))
stages = {0: jstep.minimize(near, optimizer), 9: jstep.minimize(far, optimizer)}
table = np.random.default_rng(0).normal(size=(90, 8)).astype("f")
batches = jstep.mixture(
    {"one": table[:50], "other": table[50:]}, batch_size={0: 8, 18: 12}, seed=1,
    weights={0: {"one": 3, "other": 1}, 40: {"one": 1, "other": 2}},
).skip(27, 31)  # from where the weights change at 36
assert batches.batch_size_at(17) == 8 and batches.batch_size_at(18) == 12

class Kill(jstep.Hook):
    '''Saves a step, waits until it is on disk, and kills this process, immediately or at a later call.'''
    def __init__(self, saver, at, lost, dies):
        self.saver, self.at, self.lost, self.dies = saver, at, lost, dies
    def begin(self, state):
        print("began", jstep.global_step(state), flush=True)
    def next_due(self, step):
        return min((due for due in (self.at, self.at + self.lost) if due > step), default=2**62)
    def after_step(self, step, state, metrics):
        if step == self.at:
            self.saver.save(state)
            self.saver.wait()
        self.die(step)
    def before_step(self, step, state):
        self.die(step)
    def die(self, step):
        if self.dies and self.at < 2**62 and step >= self.at + self.lost:
            os.kill(os.getpid(), signal.SIGKILL)

def run(directory, steps_per_call, state, at=2**62, lost=0, dies=True, **kwargs):
    with jstep.Saver(directory) as saver:
        state = jstep.train(
            stages, state, batches, 44, hooks=[Kill(saver, at, lost, dies)], checkpoint_dir=saver,
            save_checkpoint_secs=None, steps_per_call=steps_per_call, progress=False, **kwargs)
    report("ended", state)

def run_by_hand(state):
    for n in range(44):
        state, _ = stages[0 if n < 9 else 9](state, batches[n])
    report("by hand", state)

def report(what, state):
    found = jax.jit(jstep.fingerprint)(state).tolist()
    print(what, int(state.global_step), "{:08x}{:08x}".format(*found), flush=True)
"""

ALONE = """
def forked(directory, *kill):
    if (child := os.fork()) == 0:
        code = 1
        try:
            exec(SCORE, globals())
            state = jstep.TrainState.create({"w": jnp.eye(8)}, optimizer)
            run(directory, steps_per_call, state, *kill) if directory else run_by_hand(state)
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (-signal.SIGKILL if kill else 0), (code, directory, kill)

steps_per_call, runs = map(json.loads, sys.argv[2:])
if steps_per_call == 1:
    forked(None)
for i, kills in enumerate(runs):
    for kill in [*kills, ()]:
        forked(f"{directory}/{i}", *kill)
"""

TOGETHER = """
state = jstep.TrainState.create(lambda: {"w": jnp.eye(8)}, optimizer, mesh=mesh, slot_axis="data")
kill = map(int, sys.argv[6:])
run(directory, int(sys.argv[5]), state, *kill, dies=process == 0, batch_sharding=rows)
"""

BOUNDARIES = 9, 18, 27, 36
LOST = 2
"""The minimum number of steps that are run after a checkpoint and lost."""

# A run crosses or reaches a stage boundary between two of these.
NEXT_TO_BOUNDARIES = [(boundary + i, 0) for boundary in BOUNDARIES for i in (-1, 1)]
AFTER_BOUNDARIES = [(4, LOST), *((boundary + i, LOST) for boundary in BOUNDARIES for i in (0, 4))]


def values_of(out, what):
    return re.findall(rf"^{what} (.+)$", out, re.MULTILINE)


@pytest.mark.thorough
@pytest.mark.parametrize("steps_per_call", [1, 7])
def test_killed_on_one_process(steps_per_call, tmp_path):
    """One program is forked repeatedly before it uses JAX, so that a restart does not import again."""
    prelude = IMPORTS + f"SCORE = {SCORE!r}\n"
    runs = [[], NEXT_TO_BOUNDARIES, AFTER_BOUNDARIES]
    out, _ = end(start(ALONE, tmp_path, steps_per_call, json.dumps(runs), prelude=prelude), timeout=150)
    assert values_of(out, "began") == [str(at) for kills in runs for at in (0, *(at for at, _ in kills))]
    uninterrupted, next_to, after = values_of(out, "ended")
    assert uninterrupted.startswith("44 ")
    assert next_to == uninterrupted
    assert after == uninterrupted
    if steps_per_call == 1:  # a scan of several steps may be rounded differently
        assert values_of(out, "by hand") == [uninterrupted]


@pytest.mark.thorough
def test_killed_on_two_processes(tmp_path):
    """One process dies and the other is killed while waiting for it; calls have one or seven steps."""
    script = SCORE + TOGETHER
    (uninterrupted,) = {
        one for out in run_all(script, 2, tmp_path / "uninterrupted", 7) for one in values_of("\n".join(out), "ended")
    }
    began = []
    for steps_per_call, at, lost in ((7, 8, 0), (1, 18, LOST), (7, 28, LOST)):
        both = start_all(script, 2, tmp_path / "killed", steps_per_call, at, lost)
        try:
            assert both[0].wait(60) == -signal.SIGKILL
        finally:
            for process in both:
                process.kill()
        began += values_of(wait_for(both)[0].out, "began")
    outs = ["\n".join(out) for out in run_all(script, 2, tmp_path / "killed", 1)]
    assert [*began, *values_of(outs[0], "began")] == ["0", "8", "18", "28"]
    assert [values_of(out, "ended") for out in outs] == [[uninterrupted]] * 2

"""`jstep.Run` on two processes: all iterate alike, stop after the same iteration, and resume each
with its objects."""

import re

import pytest
from processes import printed, run

import jstep
from jstep.record.process_files import read_process

SCRIPT = """
import signal

directory, last_step, stops_at = sys.argv[5], int(sys.argv[6]), int(sys.argv[7])
step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P())
killed = []
rng, seen = np.random.default_rng(process), {"steps": []}
options = dict(checkpoint_dir=directory, save_checkpoint_steps=4, batch_sharding=rows, progress=False)
try:
    with jstep.Run(step, state, jstep.from_loop(rng=rng, seen=seen), last_step, **options) as loop:
        for at in loop:
            time.sleep(0.3 if at >= stops_at > 0 else 0.0)  # JAX checks for signals once a second
            if at >= stops_at > 0 and process == 1 and not killed:
                killed.append(at)
                signal.raise_signal(signal.SIGTERM)
            seen["steps"].append(at)
            for _ in range(2):
                loop.train_step(rng.permutation(data)[:8])
except jstep.Preempted as error:
    print("stopped", error.code)
print("drawn", process, rng.integers(10**6), seen["steps"][-1], len(seen["steps"]))
print("state", jstep.global_step(loop.state), jstep.fingerprint(loop.state).addressable_data(0))
print("done", flush=True)
"""  # noqa: E501


def lines_of(both, word):
    return [[line for line in ended if line.startswith(word)] for ended in both]


@pytest.mark.thorough
def test_two_processes_stop_after_one_iteration_and_resume_bitwise(tmp_path):
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = run(SCRIPT, 2, tmp_path, tmp_path / "whole", "60", "-1")
    stopped = run(SCRIPT, 2, tmp_path, tmp_path / "stopped", "60", "6")
    assert lines_of(stopped, "stopped") == [["stopped 143"]] * 2
    (found,) = jstep.runs(tmp_path / "stopped")
    assert re.fullmatch(r"SIGTERM at process 1 of 2 \(20\d\d-.* UTC\)", found.reason)
    assert read_process(str(tmp_path / "stopped"), "model", 1)["signal"][0] == "SIGTERM"
    assert lines_of(stopped, "state")[0] == lines_of(stopped, "state")[1]
    resumed = run(SCRIPT, 2, tmp_path, tmp_path / "stopped", "60", "-1")
    assert lines_of(resumed, "state") == lines_of(whole, "state")
    assert lines_of(resumed, "drawn") == lines_of(whole, "drawn")
    assert lines_of(whole, "drawn")[0] != lines_of(whole, "drawn")[1]


END = """
import signal

directory, is_sent = sys.argv[5], sys.argv[6] == "sent"
step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P())
ends = []


class Ends(jstep.Hook):
    def __init__(self, number):
        self.key, self.number, self.count = f"ends {number}", number, 0

    def end(self, at, state):
        self.count += 1
        ends.append(self.number)
        if is_sent and self.number == 0:
            if process == 1:
                signal.raise_signal(signal.SIGTERM)
            time.sleep(3.0)  # JAX checks for signals once a second
        return state.replace(params=jax.tree.map(lambda leaf: leaf * (2 + self.count), state.params))

    def get_state(self):
        return self.count

    def set_state(self, value):
        self.count = value


hooks = [Ends(0), Ends(1)]
code = 0
try:
    options = dict(checkpoint_dir=directory, batch_sharding=rows, progress=False)
    state = jstep.train(step, state, batches, 6, hooks=hooks, **options)
except jstep.Preempted as error:
    code, state = error.code, error.state
print("ends", code, ends, [hook.count for hook in hooks])
print("state", jstep.fingerprint(state).addressable_data(0))
print("done", flush=True)
"""  # noqa: E501


@pytest.mark.thorough
def test_two_processes_agree_on_a_signal_between_two_ends(tmp_path):
    """Both leave out the second one; the next start makes both, with the memories of before."""
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = run(END, 2, tmp_path, tmp_path / "whole", "")
    assert lines_of(whole, "ends") == [["ends 0 [0, 1] [1, 1]"]] * 2
    stopped = run(END, 2, tmp_path, tmp_path / "stopped", "sent")
    assert lines_of(stopped, "ends") == [["ends 143 [0] [1, 0]"]] * 2
    resumed = run(END, 2, tmp_path, tmp_path / "stopped", "")
    assert lines_of(resumed, "ends") == [["ends 0 [0, 1] [1, 1]"]] * 2
    assert lines_of(resumed, "state") == lines_of(whole, "state")


FAILING_LOG = """
directory, place = sys.argv[5], sys.argv[6]
step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P())


def write(at, values):
    if at >= 3 if place == "loop" else at == 60:
        raise OSError("the tracker is down")


def slow(at, state, metrics):
    time.sleep(0.2 if at >= 3 else 0.0)  # JAX checks for requests to stop once a second


hooks = [jstep.every(1, slow), jstep.MetricsHook(write, every_n_steps=1)]
last_step = 60 if place == "loop" else 4
if place == "end":
    write = lambda at, values: 1 / 0
    hooks = [jstep.MetricsHook(write, every_n_steps=50)]
try:
    options = dict(checkpoint_dir=directory, save_checkpoint_steps=2, batch_sharding=rows, progress=False)
    jstep.train(step, state, batches, last_step, hooks=hooks, **options)
except Exception as error:
    print("raised", type(error).__name__, error)
    print("note", jstep.global_step(error.state), " ".join(error.__notes__).replace("\\n", " "))
print("done", flush=True)
"""  # noqa: E501


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["loop", "end"])
def test_processes_end_together_after_the_error_of_a_log_of_one(place, tmp_path):
    (tmp_path / "run").mkdir()
    first, second = run(FAILING_LOG, 2, tmp_path, tmp_path / "run", place)
    kind = (
        "OSError the tracker is down" if place == "loop" else ("ZeroDivisionError division by zero")
    )
    assert printed(first, "raised") == kind
    assert printed(second, "raised").startswith(
        "RuntimeError process 0 of 2 could not write a log, "
    )
    saved = jstep.Saver(tmp_path / "run").latest_step()
    assert 3 < saved < 60
    for lines in (first, second):
        assert f"is saved as model-{saved}" in printed(lines, "note")
        assert printed(lines, "note").startswith(f"{saved} ")


APART = """
kind = sys.argv[5]
step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P())
options = dict(checkpoint_dir=directory, save_checkpoint_steps=4, batch_sharding=rows, progress=False)
try:
    with jstep.Run(step, state, jstep.from_loop() if kind == "skips" else batches, 12, **options) as loop:
        for number, at in enumerate(loop):
            if process == 1 and kind == "replaces" and number == 1:
                loop.state = loop.state.replace(params=jax.tree.map(lambda leaf: leaf * 2, loop.state.params))
            if process == 1 and kind == "breaks" and number == 3:
                break
            if kind == "skips" and (process, number) != (1, 1):
                loop.train_step(batches[at])
except RuntimeError as error:
    print("raised", error)
print("saved", jstep.Saver(directory).latest_step())
"""  # noqa: E501
FOUND = {
    "replaces": "step 4 on process 0; step 4, its state replaced 1× on process 1",
    "breaks": "numbers of process 0, int32[2, 2] on process 0; numbers, bool[1] on process 1",
    "skips": "step 4, iteration 4 on process 0; step 4, iteration 5 on process 1",
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", FOUND)
def test_processes_that_do_not_iterate_alike_are_named_and_not_saved(kind, tmp_path):
    for lines in run(APART, 2, tmp_path, kind):
        # One that has left its loop makes the end, and exchanges something else.
        rest = (
            "different exchanges: {}. Branch"
            if kind == "breaks"
            else ("at this save: {}. Nothing is saved")
        )
        text = (
            "the processes of this run must run the same iterations, got "
            f"{rest.format(FOUND[kind])}"
        )
        assert printed(lines, "raised").startswith(text)
        assert printed(lines, "saved") == "None"


SLOW = """
step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P())
options = dict(checkpoint_dir=directory, save_checkpoint_steps=100, batch_sharding=rows, progress=False)
with jstep.Run(step, state, batches, 20, **options) as loop:
    for at in loop:
        time.sleep(0.05 * process)
"""  # noqa: E501


@pytest.mark.thorough
def test_goodput_names_the_slow_process(tmp_path):
    run(SLOW, 2, tmp_path)
    found = jstep.goodput(tmp_path)
    assert (found.processes, [slow.process for slow in found.slow if slow.part == "hooks"]) == (
        2,
        [1],
    )


MEMORIES = """
import signal


class Counts(jstep.Hook):
    # Its memory changes on process 0 alone, as that of a hook whose `flush` or `saved` are called there.
    count = 0

    def after_step(self, at, state, metrics):
        if at == 3 and process == 1:
            signal.raise_signal(signal.SIGTERM)
        time.sleep(0.3 if at >= 3 else 0.0)  # JAX checks for signals once a second

    def get_state(self):
        self.count += process == 0
        return self.count

    def set_state(self, value):
        self.count = value


step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P())
options = dict(checkpoint_dir=sys.argv[5], save_checkpoint_steps=1, batch_sharding=rows, progress=False)
try:
    jstep.train(step, state, batches, 60, hooks=[Counts()], **options)
except jstep.Preempted as error:
    print("stopped", error.code, error)
print("done", flush=True)
"""  # noqa: E501


@pytest.mark.thorough
def test_processes_save_again_together_if_a_memory_has_changed_on_one(tmp_path):
    (tmp_path / "run").mkdir()
    first, second = run(MEMORIES, 2, tmp_path, tmp_path / "run")
    assert "is saved; start the run again to resume" in printed(first, "stopped")
    assert printed(first, "stopped") == printed(second, "stopped")


AUTO = """
import functools, itertools, logging
from jstep.compiling import dispatch

# By the clock of process 0, each call takes 0.3 ms, and by that of process 1, 0.9 ms.
ticks = itertools.count()
clock = lambda: 0.3e-3 * (1 + 2 * process) * next(ticks)
dispatch.AutoSteps = functools.partial(dispatch.AutoSteps, clock=clock)
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("jstep").addHandler(handler)
logging.getLogger("jstep").setLevel(logging.INFO)
step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P())
steps_per_call = "auto" if sys.argv[5] == "auto" else 2
state = jstep.train(step, state, batches, 700, batch_sharding=rows, progress=False, steps_per_call=steps_per_call)
print("choice", [line for line in lines if line.startswith("steps_per_call")])
print("state", jstep.global_step(state), jstep.fingerprint(state).addressable_data(0))
print("done", flush=True)
"""  # noqa: E501


@pytest.mark.thorough
def test_two_processes_choose_the_same_steps_per_call(tmp_path):
    """Each times its own calls, and a call of other steps than the other process's would wait for
    it for ever."""
    auto = run(AUTO, 2, tmp_path, "auto")
    two = run(AUTO, 2, tmp_path, "two")
    choice = 'steps_per_call="auto": up to 64 steps per call (one step takes 0.0141 ms)'
    assert lines_of(auto, "choice") == [[f"choice {[choice]}"]] * 2
    assert lines_of(two, "choice") == [["choice []"]] * 2
    assert lines_of(auto, "state") == lines_of(two, "state")

"""Training with several processes on this machine: if one of them fails or gets a signal, all of
them end."""

import re
import signal
import textwrap
import time

import numpy as np
import pytest
from processes import free_address, printed, python, run, start, wait_for

import jstep

TRAIN = """
mode = sys.argv[5]
layout = dict(param_specs=P("data")) if "fsdp" in sys.argv else dict(slot_axis="data")
state = jstep.TrainState.create(init, optimizer, mesh=mesh, **layout)
step = jstep.minimize(loss_fn, optimizer)
saved = []
from jstep.hooks.run_hook import RunHook

class Watch(RunHook):
    def after_step(self, step, state, metrics):
        if mode in ("term", "int", "die"):
            time.sleep(0.01 if step < 30 or mode == "die" else 0.15)  # JAX checks for signals once a second
        if mode in ("term", "int") and step == 30 and process == count - 1:
            os.kill(os.getpid(), signal.SIGTERM if mode == "term" else signal.SIGINT)
        if mode == "die" and step == 30 and process == count - 1:
            print("dies", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "raise" and step == 30 and process == count - 1:
            raise OSError("the disk of process 1 is gone")
    def before_save(self, step):
        saved.append(step)

try:
    state = jstep.train(
        step, state, batches, 60, hooks=[Watch()], checkpoint_dir=directory, logdir=directory + "/log", log_steps=10,
        save_checkpoint_steps=20, save_checkpoint_secs=None, batch_sharding=rows,
        steps_per_call=7 if mode == "scan" else 1, save_summaries_steps=20,
    )
    print("step", int(state.global_step))
    print("weights", weights(state))
except BaseException as error:
    print("raised", type(error).__name__, error)
    raise
finally:
    print("saved", *saved, flush=True)
"""  # noqa: E501


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """An uninterrupted run of 60 steps on 2 processes."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    ended = wait_for(start(TRAIN, 2, directory, "none"))
    assert [one.code for one in ended] == [0, 0], ended[0].err[-3000:] + ended[1].err[-3000:]
    return directory, ended


def test_process_0_logs_and_all_processes_save(uninterrupted):
    directory, ended = uninterrupted
    first, second = ended
    assert re.search(r"^step 60  loss", first.err, re.MULTILINE)
    assert "loss" not in second.err
    assert len(list((directory / "log").iterdir())) == 1
    assert (
        printed(first.out.split("\n"), "saved")
        == printed(second.out.split("\n"), "saved")
        == "20 40 60"
    )
    assert printed(first.out.split("\n"), "weights") == printed(second.out.split("\n"), "weights")
    assert jstep.Saver(directory).all_steps() == [20, 40, 60]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["term", "int"])
def test_a_signal_stops_all_processes_at_the_same_step(tmp_path, uninterrupted, mode):
    """All processes save that step and exit; the resumed run is bitwise identical."""
    ended = wait_for(start(TRAIN, 2, tmp_path, mode))
    lines = [one.out.split("\n") for one in ended]
    raised = [printed(one, "raised") for one in lines]
    assert printed(lines[0], "saved") == printed(lines[1], "saved")
    last = int(printed(lines[0], "saved").split()[-1])
    assert 30 <= last < 60
    assert jstep.Saver(tmp_path).latest_step() == last
    assert all(f"stopped the run after step {last}, which is saved" in one for one in raised)
    if mode == "term":
        assert [one.code for one in ended] == [143, 143]
        assert all(one.startswith("Preempted SIGTERM") for one in raised)
    resumed = run(TRAIN, 2, tmp_path, "none")
    assert printed(resumed[0], "weights") == printed(uninterrupted[1][0].out.split("\n"), "weights")


@pytest.mark.thorough
def test_a_killed_process_ends_the_others_and_a_restart_resumes(tmp_path, uninterrupted):
    processes = start(TRAIN, 2, tmp_path, "die")
    assert processes[1].wait(60) == -signal.SIGKILL
    died = time.monotonic()
    survivor, _ = wait_for(processes, timeout=60)
    assert survivor.code not in (0, 143)
    assert survivor.at - died < 40  # missing heartbeats are detected after 10 s
    assert jstep.Saver(tmp_path).latest_step() == 20
    resumed = run(TRAIN, 2, tmp_path, "scan")  # several steps per call give the same weights
    assert printed(resumed[0], "saved") == "40 60"
    assert printed(resumed[0], "weights") == printed(uninterrupted[1][0].out.split("\n"), "weights")


@pytest.mark.thorough
def test_an_error_in_one_process_ends_the_others(tmp_path):
    ended = wait_for(start(TRAIN, 2, tmp_path, "raise"), timeout=60)
    assert ended[1].code not in (0, 143)
    assert "OSError: the disk of process 1 is gone" in ended[1].err
    assert ended[0].code not in (0, 143)


@pytest.mark.thorough
def test_a_run_resumes_on_another_number_of_processes(tmp_path, uninterrupted):
    """With 2, then 1, then 4 processes, the batches are the same, and the weights up to
    rounding."""
    script = TRAIN.replace("batches, 60", "batches, int(sys.argv[6])")
    for count, last_step in ((2, 20), (1, 40), (4, 60)):
        lines = run(script, count, tmp_path, "none", last_step, *(["fsdp"] if count == 1 else []))
        assert {printed(one, "step") for one in lines} == {str(last_step)}
    actual, expected = (
        np.frombuffer(bytes.fromhex("".join(printed(one, "weights").split())), np.float32)
        for one in (lines[0], uninterrupted[1][0].out.split("\n"))
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_process_0_alone_reads_the_earlier_starts_and_each_once(tmp_path):
    """Of 50 starts on 256 hosts, each process would read 50 files before its first step."""
    script = """
    from collections import Counter
    from jstep.record import starts
    state = jstep.TrainState.create(init, optimizer, mesh=mesh)
    step = jstep.minimize(loss_fn, optimizer)
    for last_step in (2, 4, 6):
        read = Counter()
        load = starts._load
        starts._load = lambda path, load=load: read.update([os.path.basename(path)]) or load(path)
        jstep.train(step, state, batches, last_step, checkpoint_dir=directory, batch_sharding=rows, log_steps=None)
        starts._load = load
    # Its setup is read in the background, of the start that saved the checkpoint alone.
    print("read", sorted(item for item in read.items() if ".card." not in item[0]))
    """  # noqa: E501
    first, second = run(script, 2, tmp_path)
    assert printed(first, "read") == "[('model.000001.json', 1), ('model.000002.json', 1)]"
    assert printed(second, "read") == "[]"


@pytest.mark.thorough
def test_time_based_saves_happen_at_the_same_steps(tmp_path):
    """A step takes 1 s by the clock of process 0, which decides, and 3 s by the clock of process
    1."""
    script = """
    state = jstep.TrainState.create(init, optimizer, mesh=mesh)
    from jstep.hooks.run_hook import RunHook
    class Steps(RunHook):
        done = 0
        def after_step(self, step, state, metrics):
            self.done = step
    steps = Steps()
    clock = lambda: float(steps.done * (1 + 2 * process))
    saved = []
    saves = jstep.CheckpointSaverHook(directory, save_secs=10, before_save=(saved.append,), clock=clock)
    evaluations = jstep.EvaluationHook(lambda s: {"norm": jstep.global_norm(s.params)}, every_n_secs=7, clock=clock)
    jstep.train(
        jstep.minimize(loss_fn, optimizer), state, batches, 30, hooks=[steps, evaluations, saves],
        batch_sharding=rows, progress=False,
    )
    print("saved", *saved)
    print("evaluated", *evaluations.results)
    """  # noqa: E501
    for lines in run(script, 2, tmp_path):
        assert printed(lines, "saved") == "10 20 30"
        assert printed(lines, "evaluated") == "7 14 21 28 30"


@pytest.mark.thorough
def test_states_and_batches_over_processes(tmp_path):
    """States, batches, errors and checkpoints with arrays that span two processes."""
    script = """
    # A local state with PRNG keys that is then sharded equals one that is created sharded.
    extra = {"key": jax.random.key(7), "n": np.arange(3)}
    local = jstep.TrainState.create(init(), optimizer, model_state=extra)
    moved = jstep.shard_state(local, mesh, P("data"))
    created = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P("data"), model_state=extra)
    given = jstep.TrainState.create(init(), optimizer, mesh=mesh, param_specs=P("data"), model_state=extra)
    again = jstep.TrainState.create(created.params, optimizer, mesh=mesh, param_specs=P("data"), model_state=extra)
    other = jstep.shard_state(created, mesh)
    for state in (moved, given, again):
        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, created)
    assert weights(moved) == weights(given)
    assert weights(created) == weights(again) == weights(other)  # compiled code may round differently
    assert jax.random.key_data(moved.slots["model_state"]["key"]).tolist() == [0, 7]

    # Global batches from the rows of each process: NumPy or JAX arrays, with shard_batch, the loop, prefetch_to_device.
    local_rows = batches[3]
    assert local_rows.shape == (8, 8)
    step = jstep.minimize(loss_fn, optimizer, num_microbatches=2)
    results = []
    for batch in (
        jstep.shard_batch(local_rows, mesh),
        jstep.shard_batch(jnp.asarray(local_rows), mesh),
        *jstep.prefetch_to_device([local_rows, jnp.asarray(local_rows)], sharding=rows),
    ):
        assert batch.shape == (16, 8) and batch.sharding.spec == P("data")
        state = jstep.TrainState.create(init, optimizer, mesh=mesh)
        results.append(float(step(state, batch)[1]["loss"]))
    print("losses", *results)

    def message(f):
        try:
            f()
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace(chr(10), " ")
    print("rows", message(lambda: jstep.shard_batch(np.ones((7, 2)), mesh)))
    print("split", message(lambda: jstep.batches(data, 15)[0]))
    print("loop", message(lambda: jstep.train(
        step, created, [np.ones((7, 8), np.float32)] * 3, 3, batch_sharding=rows, progress=False)))
    with jstep.Saver(directory) as saver:
        print("alone", message(lambda: saver.save(local)))
        saver.save(created)
    """  # noqa: E501
    first, second = run(script, 2, tmp_path)
    losses = printed(first, "losses").split()
    assert len(losses) == 4
    assert set(losses) == set(printed(second, "losses").split())
    assert len(set(losses)) == 1
    assert "has 7 rows" in printed(first, "rows")
    assert "multiple of 2" in printed(first, "rows")
    assert "batch_size=15" in printed(first, "split")
    assert "2, the number of processes" in printed(first, "split")
    assert "the dimension size is 14" in printed(first, "loop")
    assert "jstep.shard_state" in printed(first, "alone")
    # Saved by two processes, restored by one.
    assert jstep.Saver(tmp_path).restore()["params"]["w"].shape == (8, 8)


# --- joining -------------------------------------------------------------------------------------


def test_one_process_needs_no_coordinator():
    jstep.distributed.initialize()
    jstep.distributed.initialize(num_processes=1)
    jstep.distributed.initialize("localhost:1", 1, 0)


@pytest.mark.thorough
def test_an_unreachable_coordinator_raises_a_timeout():
    address = free_address()
    code = f"""
    import jstep
    try:
        jstep.distributed.initialize({address!r}, 2, 1, initialization_timeout_secs=2)
    except TimeoutError as error:
        print("TimeoutError", error)
    for arguments in (({address!r}, 2), (None, 2, 0)):
        try:
            jstep.distributed.initialize(*arguments)
        except ValueError as error:
            print("ValueError", error)
    jstep.distributed.initialize()
    print("alone")
    """
    first, second, third, fourth = python("-c", textwrap.dedent(code), timeout=60).splitlines()
    assert first.startswith(
        f"TimeoutError coordinator_address={address!r} could not be reached within 2 s"
    )
    assert "process id of the current process" in second
    assert "all three" in second
    assert "coordinator_address should be defined" in third
    assert fourth == "alone"


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("localhost", 2, 0), ValueError, "coordinator_address='localhost': must be 'host:port'"),
        (("localhost:99999", 2, 0), ValueError, "coordinator_address='localhost:99999'"),
        ((1234, 2, 0), TypeError, "coordinator_address=1234"),
        (("localhost:1234", 0, 0), ValueError, "num_processes=0: must be ≥ 1"),
        (("localhost:1234", 2, 2), ValueError, "process_id=2: must be < num_processes=2"),
        (("localhost:1234", 2, -1), ValueError, "process_id=-1"),
        (("localhost:1234", 2.0, 0), TypeError, r"num_processes=2\.0: must be an integer"),
        (("localhost:1234", 2, True), TypeError, "process_id=True: must be an integer"),
    ],
)
def test_bad_arguments_raise(arguments, kind, words, monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    with pytest.raises(kind, match=words):
        jstep.distributed.initialize(*arguments)


def test_initialize_after_jax_is_used_raises():
    np.asarray(jstep.create_global_step())
    with pytest.raises(RuntimeError, match="before"):
        jstep.distributed.initialize(free_address(), 2, 0, initialization_timeout_secs=2)

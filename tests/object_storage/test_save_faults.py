"""A save that fails, or whose process dies, at each of its requests: what readers see, and what the next save does."""

import functools
import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.stores import objects
from jstep.summary.read.series import read_scalars


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(objects, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})


@functools.cache
def state_at(step):
    state = jstep.TrainState.create({"w": np.full((4, 3), float(step), np.float32)}, jstep.gradient_descent(0.1))
    return state.replace(global_step=jnp.int32(step))


def whole(run):
    """The steps a reader finds, each of which it can restore."""
    reader = jstep.Saver(run)
    steps = reader.all_steps()
    for step in steps:
        assert reader.restore(step=step)["params"]["w"][0, 0] == step
    return steps


def strangers(store, steps):
    """Data that no checkpoint consists of."""
    return [key for key in store.keys("run/model-") if int(key.split("-")[1].split("/")[0]) not in steps]


def save(run, *steps):
    with jstep.Saver(run, max_to_keep=2) as saver:
        for step in steps:
            saver.save(state_at(step))
            saver.wait()


def failed(ask):
    try:
        ask()
    except (jstep.CheckpointError, OSError) as error:
        return str(error)
    return "bkt: nothing"


def requests_of_a_save(store):
    """How many requests the third save of a run takes, with all that is deleted; and the bucket before it."""
    save(store.run, 1, 2)
    before, bucket = len(store.seen), dict(store.objects["bkt"])
    save(store.run, 3)
    return len(store.seen) - before, bucket


@pytest.mark.parametrize("status", [503, 403, 401, 404, -2, 0])
def test_a_fault_at_each_request_and_all_after_it(store, status):
    """Of status 0 each is done and its answer lost; -2 is one such answer, and then silence."""
    store.page = 1000
    count, bucket = requests_of_a_save(store)
    assert 12 <= count <= 25
    for n in range(count):
        store.objects["bkt"] = dict(bucket)
        after = max(status, 0) if status != -2 else 503
        first = [("", "", None, n), ("", "", 0, 1)] if status == -2 else [("", "", None, n)]
        store.fail = [*first, ("", "", after, 10**6)]
        said = failed(lambda: save(store.run, 3))
        assert "bkt" in said
        assert "secret" not in said
        store.fail = []
        steps = whole(store.run)
        assert steps in ([1, 2], [1, 2, 3], [2, 3], [1, 3]), (n, steps)
        save(store.run, 4)
        steps = whole(store.run)
        assert steps[-1] == 4
        assert strangers(store, steps) == [], n


@pytest.mark.parametrize("status", [503, 429, 0])
def test_one_fault_at_each_request_is_survived(store, status):
    store.page = 1000
    count, bucket = requests_of_a_save(store)
    for n in range(count):
        store.objects["bkt"] = dict(bucket)
        store.fail = [("", "", None, n), ("", "", status, 1)]
        save(store.run, 3)
        store.fail = []
        assert whole(store.run) == [2, 3]
        assert store.keys("run/~") == ["run/~jstep"]


CHILD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np, tensorstore, jstep
jstep.Saver  # loaded before the forks, each of which starts at once
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        with jstep.Saver("gs://bkt/run", max_to_keep=2) as saver:
            saver.save({"global_step": np.int32(3), "params": {"w": np.full((4, 3), 3, np.float32)}})
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_process_that_is_killed_at_each_request_of_a_save(gcs):
    """What it has asked for last is done all the same."""
    gcs.page, gcs.run = 1000, "gs://bkt/run"
    count, bucket = requests_of_a_save(gcs)
    code = [sys.executable, "-W", "ignore", "-c", CHILD]
    parent = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    seen = set()
    try:
        for n in range(1, count + 1):
            gcs.objects["bkt"] = dict(bucket)
            assert killed_at(gcs, len(gcs.seen) + n, parent) == -signal.SIGKILL
            steps = whole(gcs.run)
            assert steps in ([1, 2], [1, 2, 3], [2, 3]), (n, steps)
            seen.add(tuple(steps))
            save(gcs.run, 4)  # the claim of the dead one is no obstacle
            steps = whole(gcs.run)
            assert steps[-1] == 4
            assert strangers(gcs, steps) == [], n
    finally:
        parent.communicate("", timeout=60)
    assert parent.returncode == 0
    assert len(seen) == 3


def killed_at(store, nth, parent):
    pid, known = [], threading.Event()

    def kill(number):
        if number == nth and known.wait(60):
            os.kill(pid[0], signal.SIGKILL)

    store.watch = kill
    parent.stdin.write("\n")
    parent.stdin.flush()
    pid.append(int(parent.stdout.readline()))
    known.set()
    code = int(parent.stdout.readline())
    store.watch = None
    return code


# Damage.


def test_a_flipped_byte_of_any_object_is_found(store):
    with jstep.Saver(store.run) as saver:
        for step in (1, 2):
            saver.save(state_at(step))
    for key in store.keys("run/model-2/"):
        generation, data = store.objects["bkt"][key]
        for at in (0, len(data) // 2, len(data) - 1):
            flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            for damaged in (flipped, data[:at]):
                store.objects["bkt"][key] = generation, damaged
                with pytest.raises(jstep.CheckpointError, match=r"model-2/.*intact checkpoint is step 1"):
                    jstep.Saver(store.run).restore(state_at(0))
        del store.objects["bkt"][key]
        with pytest.raises((jstep.CheckpointError, FileNotFoundError)):
            jstep.Saver(store.run).restore(state_at(0), step=2)
        store.objects["bkt"][key] = generation, data
    assert whole(store.run) == [1, 2]


def test_a_copied_run_is_read_and_gone_on_with(store):
    save(store.run, 1, 2)
    with store.lock:
        for key in store.keys("run/model-"):
            store.put("bkt", "copy" + key.removeprefix("run"), store.data(key))
    copy = store.run.removesuffix("run") + "copy"
    assert whole(copy) == [1, 2]
    assert jstep.latest_checkpoint(copy) == f"{copy}/model-2"
    save(copy, 3)
    assert whole(copy) == [2, 3]


# What a run is told.


def run(url, **options):
    optimizer = jstep.gradient_descent(0.1)
    train_step = jstep.minimize(lambda params, x: jnp.mean((params["w"][None] - x) ** 2), optimizer)
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    batches = jstep.batches(np.arange(24, dtype=np.float32).reshape(8, 3), 2, seed=0)
    return jstep.train(train_step, state, batches, progress=False, **{"last_step": 20, "checkpoint_dir": url} | options)


def test_a_run_whose_token_has_expired_does_not_start_again(store):
    run(store.run, save_checkpoint_steps=10)
    for status in (401, 403):
        store.fail = [("", "", status, 10**6)]
        with pytest.raises(PermissionError):
            run(store.run, last_step=30)
        store.fail = [("GET", "(/o|/bkt/?)$", status, 10**6)]  # the list alone
        with pytest.raises(PermissionError):
            run(store.run, last_step=30)
        store.fail = [("POST|PUT", "", status, 10**6)]  # writing alone
        with pytest.raises(PermissionError):
            run(store.run, last_step=30)
    store.fail = []
    assert int(run(store.run, last_step=30).global_step) == 30


def test_no_bucket_is_said_before_the_first_step(store):
    made = []
    with pytest.raises(FileNotFoundError, match="no bucket 'nope'"):
        run(store.run.replace("bkt", "nope"), hooks=[jstep.every(1, lambda step, state, metrics: made.append(step))])
    assert not made


def test_k_and_k_are_2k(store):
    whole_run = run(None, last_step=20)
    run(store.run, last_step=7, logdir=f"{store.run}/logs", save_checkpoint_steps=3, save_summaries_steps=1)
    again = run(store.run, last_step=20, logdir=f"{store.run}/logs", save_summaries_steps=1)
    assert jnp.array_equal(again.params["w"], whole_run.params["w"])

    assert [point.step for point in read_scalars(f"{store.run}/logs")["loss"]] == list(range(1, 21))
    assert not os.path.exists("gs:")
    assert not os.path.exists("s3:")
    assert jax.tree.leaves(again)


def test_what_is_under_way_is_finished_when_the_interpreter_ends(gcs, s3):
    code = """
import signal; signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np, jstep
from jstep.summary import SummaryWriter, scalar
writer = SummaryWriter("gs://bkt/logs")
writer.add_summary(scalar("loss", 1.0), 1)
savers = [jstep.Saver(f"{scheme}://bkt/run") for scheme in ("gs", "s3")]
for saver in savers:
    saver.save({"global_step": np.int32(9), "params": {"w": np.full((4, 3), 9, np.float32)}})
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    assert whole("gs://bkt/run") == whole("s3://bkt/run") == [9]
    assert [(point.step, point.value) for point in read_scalars("gs://bkt/logs")["loss"]] == [(1, 1.0)]

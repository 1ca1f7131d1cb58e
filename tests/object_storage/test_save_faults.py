"""Saves and reads with a fault at each request: complete checkpoints or errors, and the next save
succeeds."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from object_states import state_at
from scalar_points import read_scalars

import jstep
from jstep.array_store.listing import ORBAX_ONLY

pytestmark = pytest.mark.usefixtures("one_retry")


def restorable_steps(run):
    reader = jstep.Saver(run)
    steps = reader.all_steps()
    for step in steps:
        assert reader.restore(step=step)["params"]["w"][0, 0] == step
    return steps


def orphaned_keys(store, steps):
    return [
        key for key in store.keys("run/model-") if int(key.split("-")[1].split("/")[0]) not in steps
    ]


def save(run, *steps):
    with jstep.Saver(run, max_to_keep=2) as saver:
        for step in steps:
            saver.save(state_at(step))
            saver.wait()


def error_of(call):
    try:
        call()
    except (jstep.CheckpointError, OSError) as error:
        return str(error)
    return "bkt: nothing"


def requests_of_a_save(store):
    """Return the number of requests of the third save of a run, including its deletions, and the
    bucket before it."""
    save(store.run, 1, 2)
    before, bucket = len(store.seen), dict(store.objects["bkt"])
    save(store.run, 3)
    return len(store.seen) - before, bucket


@pytest.mark.thorough
@pytest.mark.parametrize("status", [503, 403, 401, 404, -2, 0])
def test_persistent_fault_from_each_request_on(each_store, status):
    """With status 0 requests are executed and all responses lost; with -2 one response is lost,
    then 503 follow."""
    each_store.page = 1000
    count, bucket = requests_of_a_save(each_store)
    assert 12 <= count <= 40
    for n in range(count):
        each_store.objects["bkt"] = dict(bucket)
        after = max(status, 0) if status != -2 else 503
        first = [("", "", None, n), ("", "", 0, 1)] if status == -2 else [("", "", None, n)]
        each_store.fail = [*first, ("", "", after, 10**6)]
        message = error_of(lambda: save(each_store.run, 3))
        assert "bkt" in message
        assert "secret" not in message
        each_store.fail = []
        steps = restorable_steps(each_store.run)
        assert steps in ([1, 2], [1, 2, 3], [2, 3], [1, 3]), (n, steps)
        save(each_store.run, 4)
        steps = restorable_steps(each_store.run)
        assert steps[-1] == 4
        assert orphaned_keys(each_store, steps) == [], n


@pytest.mark.thorough
@pytest.mark.parametrize("status", [503, 429, 0])
def test_a_single_fault_at_each_request_is_retried(each_store, status):
    each_store.page = 1000
    count, bucket = requests_of_a_save(each_store)
    for n in range(count):
        each_store.objects["bkt"] = dict(bucket)
        each_store.fail = [("", "", None, n), ("", "", status, 1)]
        save(each_store.run, 3)
        each_store.fail = []
        assert restorable_steps(each_store.run) == [2, 3]
        assert not each_store.keys("run/~claims/")


# Corruption.


@pytest.mark.thorough
def test_corruption_of_any_object_is_detected(store):
    with jstep.Saver(store.run) as saver:
        for step in (1, 2):
            saver.save(state_at(step))
    for key in store.keys("run/model-2/"):
        if key.rpartition("/")[2] in ORBAX_ONLY:
            continue
        generation, data = store.objects["bkt"][key]
        for at in (0, len(data) // 2, len(data) - 1):
            flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            for corrupted in (flipped, data[:at]):
                store.objects["bkt"][key] = generation, corrupted
                with pytest.raises(
                    jstep.CheckpointError,
                    match=r"model-2.*intact checkpoint is step 1",
                ):
                    jstep.Saver(store.run).restore(state_at(0))
        del store.objects["bkt"][key]
        with pytest.raises((jstep.CheckpointError, FileNotFoundError)):
            jstep.Saver(store.run).restore(state_at(0), step=2)
        store.objects["bkt"][key] = generation, data
    assert restorable_steps(store.run) == [1, 2]


# Errors and resumption of a training run.


def run(url, **options):
    optimizer = jstep.gradient_descent(0.1)
    train_step = jstep.minimize(lambda params, x: jnp.mean((params["w"][None] - x) ** 2), optimizer)
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    batches = jstep.batches(np.arange(24, dtype=np.float32).reshape(8, 3), 2, seed=0)
    return jstep.train(
        train_step,
        state,
        batches,
        progress=False,
        **{"last_step": 20, "checkpoint_dir": url} | options,
    )


def test_expired_credentials_do_not_restart_from_scratch(store):
    run(store.run, save_checkpoint_steps=10)
    for status in (401, 403):
        store.fail = [("", "", status, 10**6)]
        with pytest.raises(PermissionError):
            run(store.run, last_step=30)
        store.fail = [("GET", "(/o|/bkt/?)$", status, 10**6)]  # only lists
        with pytest.raises(PermissionError):
            run(store.run, last_step=30)
        store.fail = [("POST|PUT", "", status, 10**6)]  # only writes
        with pytest.raises(PermissionError):
            run(store.run, last_step=30)
    store.fail = []
    assert int(run(store.run, last_step=30).global_step) == 30


def test_resume_is_bitwise_on_objects(store):
    uninterrupted = run(None, last_step=20)
    run(
        store.run,
        last_step=7,
        logdir=f"{store.run}/logs",
        save_checkpoint_steps=3,
        save_summaries_steps=1,
    )
    resumed = run(store.run, last_step=20, logdir=f"{store.run}/logs", save_summaries_steps=1)
    assert jnp.array_equal(resumed.params["w"], uninterrupted.params["w"])

    assert [point.step for point in read_scalars(f"{store.run}/logs")["loss"]] == list(range(1, 21))
    assert not os.path.exists("gs:")
    assert not os.path.exists("s3:")
    assert jax.tree.leaves(resumed)


def read(url):
    reader = jstep.Saver(url)
    back = reader.restore(state_at(0))
    return (
        jstep.latest_checkpoint(url),
        reader.latest_step(),
        reader.all_steps(),
        reader.extra(),
        int(back.global_step),
        np.asarray(back.params["w"]).tolist(),
    )


@pytest.mark.thorough(except_for=["gs-503-True", "s3-403-False"])
@pytest.mark.parametrize("lasts", [True, False])
@pytest.mark.parametrize("status", [503, 403, 401, 404, 0])
def test_a_fault_at_each_request(each_store, status, lasts):
    each_store.page = 1000
    with jstep.Saver(each_store.run) as saver:
        for step in (1, 2):
            saver.save(state_at(step), extra=step)
    before = len(each_store.seen)
    expected = read(each_store.run)
    assert expected[1:5] == (2, [1, 2], 2, 2)
    count = len(each_store.seen) - before
    wrong = []
    for n in range(count):
        each_store.fail = [("", "", None, n), ("", "", status, 10**6 if lasts else 1)]
        try:
            result = read(each_store.run)
        except (OSError, jstep.CheckpointError) as error:
            assert "bkt" in str(error)  # noqa: PT017
            assert "secret" not in str(error)  # noqa: PT017
            assert lasts or status in (403, 401, 404)
        else:
            wrong += [n] if result != expected else []
    each_store.fail = []
    # A single 404 is taken as a missing object, except for lists.
    assert status == 404 or not wrong

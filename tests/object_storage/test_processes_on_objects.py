"""Two processes that write one checkpoint to an object store, each its shards, and restores by
other processes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from fellows import Fellows
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jstep
from jstep.array_store.object_store import ObjectStorage
from jstep.checkpoint.peers import process_key
from jstep.checkpoint.shared_directory import check_shared
from jstep.stores.objects import Bucket, Objects

SAVE = """
from jstep.array_store import array_writer
array_writer.MAX_CHUNK_BYTES = 64
state = jstep.TrainState.create(init(), optimizer)
state = jstep.shard_state(state, mesh, [("w", P("data")), ("*", P())])

def state_at(step):
    return state.replace(global_step=state.global_step + step)

with jstep.Saver(directory) as saver:
    for step in (1, 2):
        path = saver.save(state_at(step))
    back = saver.restore(state)
    print("STEP", int(back.global_step.addressable_data(0)), weights(back) == weights(state))
    saver.save(back)
    saver.wait()
    write = array_writer.write
    for which in (0, 1):
        def broken(*args, **options):
            if process == which:
                raise OSError("the disk of this one is on fire")
            return write(*args, **options)
        array_writer.write = broken
        saver.save(state_at(3))
        try:
            saver.wait()
        except jstep.CheckpointError as error:
            print("FAILED", which, "on fire" in str(error), flush=True)
    array_writer.write = write
    saver.save(state_at(4))
array_writer.MAX_CHUNK_BYTES = 2**20
"""


TRAIN = """
state = jstep.TrainState.create(init(), optimizer)
state = jstep.shard_state(state, mesh, P())
train_step = jstep.minimize(loss_fn, optimizer)
state = jstep.train(train_step, state, batches, last_step=6, checkpoint_dir="gs://bkt/train",
                    logdir="gs://bkt/train/logs", save_checkpoint_steps=4, batch_sharding=rows, progress=False)
print("WEIGHTS", weights(state))
"""  # noqa: E501


@pytest.mark.thorough
def test_each_writes_its_shards_and_failures_are_shared(gcs):
    first, second = processes.run(SAVE + TRAIN, 2, "gs://bkt/run")
    assert {"STEP 2 True", "FAILED 0 True", "FAILED 1 True"} <= set(first) & set(second)
    weights = [line for line in first if line.startswith("WEIGHTS")]
    assert weights == [line for line in second if line.startswith("WEIGHTS")]
    assert len(weights) == 1
    assert jstep.Saver("gs://bkt/run").all_steps() == [1, 2, 4]
    assert gcs.keys("run/model-3/") == [], "the next save has deleted its objects"
    last = gcs.keys("run/model-1/")
    parts = {
        re.sub(r"run/model-1/(data[^/]*/)?(.*?)(/d/.*|\.data\..*)?$", r"\2", key) for key in last
    }
    assert parts >= {f"ocdbt.process_{i}{name}" for i in (0, 1) for name in ("", "/manifest.ocdbt")}
    assert sum(part.startswith("parts/") for part in parts) == 2
    assert parts >= {
        "manifest.json",
        "manifest.ocdbt",
        "_METADATA",
        "_CHECKPOINT_METADATA",
        "commit_success.txt",
    }
    params = {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}
    optimizer = jstep.with_moving_average(jstep.adam(0.02), jstep.ExponentialMovingAverage(0.9))
    rows = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    target = jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows if x.ndim else None), target
    )
    back = jstep.Saver("gs://bkt/run").restore(target)
    assert np.array_equal(back.params["w"], jnp.linspace(-1.0, 1.0, 64).reshape(8, 8))
    assert back.params["w"].sharding == rows
    assert not gcs.keys("run/~claims/")

    # One process resumes the run of two processes.
    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"] + params["b"][None]) - x) ** 2)

    assert jstep.Saver("gs://bkt/train").latest_step() == 6
    state = jstep.TrainState.create(params, optimizer)
    batches = jstep.batches(
        np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32), 16, seed=1
    )
    locations = {"checkpoint_dir": "gs://bkt/train", "logdir": "gs://bkt/train/logs"}
    jstep.train(
        jstep.minimize(loss_fn, optimizer), state, batches, last_step=8, **locations, progress=False
    )
    assert jstep.Saver("gs://bkt/train").latest_step() == 8
    assert len(gcs.keys("train/logs/")) == 2, "only process 0 writes event files"


def test_processes_with_the_urls_of_two_runs(each_store, monkeypatch):
    two = Fellows(monkeypatch)
    assert two.each(lambda i: check_shared(each_store.run, "checkpoint_dir")) == [None, None]
    urls = [f"{each_store.run}/a", f"{each_store.run}/b"]
    for error in two.each(lambda i: check_shared(urls[i], "checkpoint_dir")):
        assert f"checkpoint_dir='{urls[1]}': must be the directory of process 0" in str(error)
        assert f"'{urls[0]}/~directory/" in str(error)
    assert not Objects(each_store.run).list()  # what was written is removed


def test_the_progress_of_many_processes_is_one_list(gcs):
    """One request for each of 256 processes, one after the other, delayed the end of each save by
    seconds."""
    objects = Bucket("gs://bkt/run")
    storage = ObjectStorage(objects, "model-1/data.1-2")
    for key in (
        "ocdbt.process_1/d/a",
        "ocdbt.process_1/d/b",
        "ocdbt.process_10/d/c",
        "ocdbt.process_2/d/d",
        "parts/1",
    ):
        storage.write(key, b"1")
    gcs.page = 1000
    gcs.seen.clear()
    keys = [process_key(process) for process in (2, 1, 3)]
    assert storage.progress(keys) == [1, 2, 0]
    assert len(gcs.seen) == 1

"""`Saver` in object stores: round trips, shardings, retention, cleanup, and numbers of requests."""

import logging
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from object_states import same, state_at
from waiting import interrupt, wait_until

import jstep
from jstep.array_store import array_reader, array_writer
from jstep.checkpoint.saver import engine_of

pytestmark = pytest.mark.usefixtures("fast_retries")


def names(store, start="run/model"):
    return sorted({"/".join(key.split("/")[1:3]).split(".1")[0] for key in store.keys(start)})


def test_round_trip(store):
    with jstep.Saver(store.run + "/") as saver:
        assert saver.directory == store.run
        path = saver.save(state_at(7), extra={"epoch": 3})
        assert path == f"{store.run}/model-7"
        assert saver.extra() == {"epoch": 3}
        assert same(saver.restore(state_at(0)), state_at(7))
    assert jstep.latest_checkpoint(store.run) == path
    assert jstep.latest_checkpoint(store.run, "other") is None
    reader = jstep.Saver(store.run)
    assert reader.latest_step() == 7
    assert reader.restore()["params"]["w"].tolist() == np.full((4, 3), 7.0).tolist()
    assert names(store) == ["model-7/data", "model-7/manifest.json"]
    assert not store.keys("run/~claims/"), "the claim is released"


def test_an_index_of_a_later_version_is_refused_and_is_not_taken_for_a_copy(store):
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(7))
    (mark,) = store.keys("run/~jstep")
    assert store.data(mark).decode() == jstep.__version__
    said = (
        r"the index of this bucket has format 3, "
        r"which .*\) does not know.*intact.*written by jstep 7\.8\.9: install"
    )
    for is_beside in (True, False):  # the later version may also leave the mark of this one
        store.put("bkt", "run/~jstep.3", b"7.8.9")
        if not is_beside:
            with store.lock:
                del store.objects["bkt"][mark]
        with pytest.raises(jstep.UnsupportedFormatError, match=said):
            jstep.Saver(store.run).restore(state_at(0))
        with (
            jstep.Saver(store.run) as saver,
            pytest.raises(jstep.UnsupportedFormatError, match=said),
        ):
            saver.save(state_at(8))
        with pytest.raises(jstep.UnsupportedFormatError, match=said):
            jstep.latest_checkpoint(store.run)


@pytest.fixture
def interrupted(gcs):
    """A Saver whose second save is in progress until `released` is set, after Ctrl-C in `wait`."""
    released = threading.Event()

    def hold(number):
        if "model-2" in gcs.seen[number - 1] and "data." in gcs.seen[number - 1]:
            released.wait(30)

    saver = jstep.Saver("gs://bkt/run")
    saver.save(state_at(1))
    saver.wait()
    gcs.watch = hold
    saver.save(state_at(2))
    interrupt(saver.wait)
    yield saver, released
    released.set()
    saver.close()


@pytest.mark.parametrize("call", [jstep.Saver.wait, jstep.Saver.latest_step, jstep.Saver.close])
def test_the_call_after_ctrl_c_waits_for_the_save_in_progress(interrupted, gcs, call):
    saver, released = interrupted
    there = []
    threading.Timer(0.2, lambda: (there.extend(gcs.keys()), released.set())).start()
    call(saver)
    assert "run/~claims/model" in there, "the claim is held while the save is in progress"
    assert "run/model-2/manifest.json" not in there
    assert gcs.keys("run/model-2/manifest.json")


@pytest.mark.thorough
def test_sharded_states_are_restored_onto_any_mesh(store, monkeypatch):
    monkeypatch.setattr(array_writer, "MAX_CHUNK_BYTES", 300)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    value = jnp.arange(16 * 24, dtype=jnp.float32).reshape(16, 24)
    layouts = [P(), P("data", "model"), P(None, ("data", "model"))]
    saved = {
        str(i): jax.device_put(value + i, NamedSharding(mesh, spec))
        for i, spec in enumerate(layouts)
    }
    with jstep.Saver(store.run) as saver:
        saver.save(jstep.TrainState(saved, {}, jnp.int32(1)))
        for spec in layouts:
            other = NamedSharding(jax.make_mesh((2, 4), ("data", "model")), spec)
            target = jax.tree.map(
                lambda x, s=other: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), saved
            )
            back = saver.restore(jstep.TrainState(target, {}, jnp.int32(0)))
            for i in range(len(layouts)):
                assert back.params[str(i)].sharding == other
                assert jnp.array_equal(back.params[str(i)], value + i)


def test_a_checkpoint_that_was_replaced_meanwhile_is_not_deleted(gcs):
    with jstep.Saver("gs://bkt/run", max_to_keep=1) as saver:
        saver.save(state_at(1))
        saver.wait()
        other = gcs.data("run/model-1/manifest.json").replace(b'"step": 1', b'"step": 1 ')

        def replace(number):
            if gcs.seen[-1].startswith("DELETE") and "manifest" in gcs.seen[-1]:
                with gcs.lock:
                    gcs.put("bkt", "run/model-1/manifest.json", other)

        gcs.watch = replace
        saver.save(state_at(2))
        saver.wait()
        assert saver.all_steps() == [1, 2]
        assert gcs.data("run/model-1/manifest.json") == other
        assert any("/d/" in key for key in gcs.keys("run/model-1/"))


def test_retention_deletes_only_objects_of_checkpoints(store):
    with jstep.Saver(store.run, max_to_keep=2) as saver:
        for step in range(5):
            with store.lock:
                store.put("bkt", f"run/model-{step}/notes.txt", b"mine")
            saver.save(state_at(step))
        assert saver.all_steps() == [3, 4]
        assert saver.last_checkpoints == [f"{store.run}/model-3", f"{store.run}/model-4"]
    for step in range(3):
        assert store.keys(f"run/model-{step}/") == [f"run/model-{step}/notes.txt"]


def test_saving_a_step_again_replaces_its_objects(store, monkeypatch):
    now = [1_700_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(7, 1))
        saver.save(state_at(7, 2))
        assert same(saver.restore(state_at(0)), state_at(7, 2))
        attempts = {key.split("/")[2] for key in store.keys("run/model-7/data")}
        assert len(attempts) == 2, "a reader may still read the old one"
        now[0] += 3601
        saver.save(state_at(8))
        saver.wait()
        wait_until(lambda: len({key.split("/")[2] for key in store.keys("run/model-7/data")}) == 1)
        assert same(saver.restore(state_at(0), step=7), state_at(7, 2))
        now[0] += 3601
        saver.save(state_at(7, 3))
        saver.wait()
        # the old one is two hours old
        wait_until(lambda: len({key.split("/")[2] for key in store.keys("run/model-7/data")}) == 1)
        assert same(saver.restore(state_at(0), step=7), state_at(7, 3))


def test_the_next_save_deletes_leftovers(store):
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(1))
    with store.lock:
        for key in (
            "~attempts/model-5/data.123-ab",
            "model-5/data.123-ab/d/0",
            "~attempts/other-5/data.123-ab",
            "other-5/data.123-ab/d/0",
            "model-5/data/x",
            "model-x/data.1-a/p",
        ):
            store.put("bkt", f"run/{key}", b"")
    with jstep.Saver(store.run) as saver:
        assert saver.all_steps() == [1]
        saver.save(state_at(2))
        saver.wait()
    assert store.keys("run/model-5/") == ["run/model-5/data/x"]
    assert store.keys("run/other-5/")
    assert store.keys("run/model-x/")


def test_saves_succeed_without_permission_to_delete(store, caplog):
    store.fail = [("DELETE", "", 403, 999)]
    with caplog.at_level(logging.WARNING, "jstep"), jstep.Saver(store.run, max_to_keep=1) as saver:
        for step in range(4):
            saver.save(state_at(step))
        saver.wait()
        assert saver.all_steps() == [0, 1, 2, 3]
    assert sum(line.startswith("DELETE") for line in store.seen) == 2, (
        "one for the first checkpoint, one for the claim"
    )
    messages = [record.message for record in caplog.records if "stay" in record.message]
    assert len(messages) == 1
    assert "grant the right to delete in 'bkt'" in messages[0]


def test_number_of_requests_for_100_leaves(store, monkeypatch):
    # Reads that begin within this time are one request: how many do so in 2 ms depends on the load
    # of the machine.
    monkeypatch.setitem(array_reader._TOGETHER, "experimental_read_coalescing_interval", "200ms")
    store.page = 1000
    params = {f"layer{i}": {"w": jnp.full((50, 50), i, jnp.float32)} for i in range(33)}
    state = jstep.TrainState.create(params, jstep.adam())
    with jstep.Saver(store.run, max_to_keep=2) as saver:
        for step in range(4):
            saver.save(state.replace(global_step=jnp.int32(step)))
    assert len(store.seen) <= 4 * 25
    with jstep.Saver(store.run) as saver:
        store.seen.clear()
        assert same(saver.restore(jax.eval_shape(lambda: state)).params, state.params)
    assert len(store.seen) <= 12
    lists = [line for line in store.seen if "prefix=" in line or "Offset=" in line]
    assert lists
    assert not [line for line in lists if "~" not in line], "no list passes through the data"


def test_the_next_save_does_not_wait_for_deletions(gcs):
    released = threading.Event()

    def hold(number):
        if gcs.seen[number - 1].startswith("DELETE") and "/d" in gcs.seen[number - 1]:
            released.wait(30)

    with jstep.Saver("gs://bkt/run", max_to_keep=1) as saver:
        gcs.watch = hold
        for step in range(4):
            saver.save(state_at(step))
            saver.wait()
        assert saver.all_steps() == [3]
        assert engine_of(saver).write_secs is None, "the deletions count"
        released.set()
        wait_until(lambda: engine_of(saver).write_secs is not None)
    assert {key.split("/")[1] for key in gcs.keys("run/model")} == {"model-3"}

"""`all_steps` and `best_step` in a bucket: what exists, without a request for each checkpoint."""

import functools
import threading

import pytest
from object_states import state_at

import jstep
from jstep.array_store import object_store
from jstep.array_store.best_record import BestRecord
from jstep.array_store.manifest import as_checkpoint_extra
from jstep.checkpoint.names import open_store
from jstep.checkpoint.saver import engine_of

pytestmark = pytest.mark.usefixtures("fast_retries")


def save(url, steps, prefix="model"):
    with jstep.Saver(url, prefix=prefix, max_to_keep=None) as saver:
        for step in steps:
            saver.save(state_at(step))


def remove(store, start):
    for key in store.keys(f"run/{start}"):
        del store.objects["bkt"][key]


def requests_of(store, call):
    store.seen.clear()
    result = call()
    return len(store.seen), result


def test_requests_do_not_grow_with_checkpoints(store):
    store.page = 1000
    reader = jstep.Saver(store.run)
    assert requests_of(store, reader.all_steps)[1] == []
    counts = []
    for steps in (range(4), range(4, 10), range(10, 20)):
        save(store.run, steps)
        count, found = requests_of(store, reader.all_steps)
        assert found == list(range(steps.stop))
        counts.append(count)
    assert max(counts) <= 5
    assert len(set(counts)) == 1
    assert requests_of(store, reader.latest_step) == (3, 19)


def test_requests_of_a_claim_and_a_save_do_not_grow_with_checkpoints(store):
    """A claim with a request for each checkpoint would exceed its time limit one day: the run could
    not start again."""
    store.page = 1000
    claims, saves = [], []
    for steps in (range(5), range(5, 12), range(12, 30)):
        save(store.run, steps)
        with jstep.Saver(store.run, max_to_keep=None, async_save=False) as saver:
            claims.append(requests_of(store, saver.claim)[0])
            saves.append(requests_of(store, functools.partial(saver.save, state_at(steps.stop)))[0])
    assert len(set(claims)) == 1
    assert len(set(saves)) == 1


@pytest.mark.parametrize("has_long_lists", [False, True])
def test_only_what_exists_is_listed(store, has_long_lists, monkeypatch):
    """Deleted by hand, by a Saver, not finished, of another prefix, or no checkpoint at all."""
    if has_long_lists:
        monkeypatch.setattr(object_store, "_KEYS_OF_PAGE", 1)
    save(store.run, range(8))
    save(store.run, (3, 50, 60), prefix="model-2")
    remove(store, "model-3/")
    remove(store, "model-5/manifest.json")
    with jstep.Saver(store.run, max_to_keep=None) as saver:
        saver.delete(6)
    store.objects["bkt"]["run/model-90/notes/manifest.json"] = store.objects["bkt"][
        "run/model-4/manifest.json"
    ]
    store.objects["bkt"]["run/model-04/manifest.json"] = store.objects["bkt"][
        "run/model-4/manifest.json"
    ]
    assert jstep.Saver(store.run).all_steps() == [0, 1, 2, 4, 7]
    assert jstep.Saver(store.run, prefix="model-2").all_steps() == [3, 50, 60]


def test_the_best_step_reads_manifests_at_once(store, monkeypatch):
    with jstep.Saver(store.run, max_to_keep=None) as saver:
        for step, value in enumerate((3.0, 1.0, 2.0)):
            extra = as_checkpoint_extra(None)
            engine_of(saver).save(
                state_at(step), extra._replace(best=BestRecord("loss", value, "min"))
            )
    barrier, read = threading.Barrier(3, timeout=30), object_store.ObjectStore.manifest

    def read_together(self, path):
        barrier.wait()
        return read(self, path)

    reader = jstep.Saver(store.run)
    monkeypatch.setattr(object_store.ObjectStore, "manifest", read_together)
    assert reader.best_step() == 1


def test_a_checkpoint_that_goes_while_the_best_is_sought(store, monkeypatch):
    with jstep.Saver(store.run, max_to_keep=None) as saver:
        for step, value in enumerate((3.0, 1.0, 2.0)):
            extra = as_checkpoint_extra(None)
            engine_of(saver).save(
                state_at(step), extra._replace(best=BestRecord("loss", value, "min"))
            )
    reader = jstep.Saver(store.run)
    steps = reader.all_steps()
    remove(store, "model-1/")
    monkeypatch.setattr(engine_of(reader), "all_steps", lambda: steps)
    assert reader.best_step() == 2


def test_the_newest_of_each_prefix_is_found_by_one_list(store):
    store.page = 1000
    for prefix in ("a", "b", "c"):
        save(store.run, (3, 10), prefix=prefix)
    checkpoints = open_store(store.run)
    counts = []
    checkpoints.list_once()
    for prefix in ("a", "b", "c"):
        count, newest = requests_of(
            store, lambda prefix=prefix: next(checkpoints.newest_first(prefix))
        )
        assert newest == (10, f"{store.run}/{prefix}-10")
        counts.append(count)
        assert not any("list-type" in request or "Offset" in request for request in store.seen)
    assert next(checkpoints.newest_first("d"), None) is None
    assert len(set(counts)) == 1


def test_a_list_that_is_outdated_is_made_again(store):
    save(store.run, (3,), prefix="a")
    checkpoints = open_store(store.run)
    checkpoints.list_once()
    save(store.run, (4,), prefix="a")
    with jstep.Saver(store.run, prefix="a") as saver:
        saver.delete(3)
    assert [step for step, _ in checkpoints.newest_first("a")] == [4]

"""A bucket whose index is lost, or a part of it: the checkpoints are found by one list, and nothing
is overwritten."""

import pytest
from object_states import state_at

from jstep.checkpoint.names import latest_checkpoint
from jstep.checkpoint.saver import Saver

pytestmark = pytest.mark.usefixtures("fast_retries")


def save(url, *steps):
    with Saver(url, max_to_keep=None) as saver:
        for step in steps:
            saver.save(state_at(step))


def lose(store, chosen):
    for key in store.keys("run/~attempts/"):
        if chosen in key:
            del store.objects["bkt"][key]


def test_entries_are_not_empty(store):
    save(store.run, 4)
    assert all(store.data(key) for key in store.keys("run/~attempts/"))


@pytest.mark.parametrize("lost", ["~attempts/", "model-8/", "model-4/"])
def test_the_newest_is_found(store, lost, caplog):
    save(store.run, 4, 8)
    lose(store, lost)
    assert latest_checkpoint(store.run) == f"{store.run}/model-8"
    reader = Saver(store.run)
    assert reader.latest_step() == 8
    assert int(reader.restore(state_at(0)).global_step) == 8
    assert ("the index" in caplog.text) is (lost != "model-4/")
    save(store.run, 12)
    caplog.clear()
    with Saver(store.run) as saver:
        assert saver.latest_step() == 12
        assert saver.all_steps() == ([8, 12] if lost == "model-4/" else [4, 8, 12])
    assert "the index" not in caplog.text


def test_a_newest_that_was_deleted_is_not_missed(store):
    save(store.run, 4, 8)
    with Saver(store.run) as saver:
        saver.delete(8)
        assert saver.latest_step() == 4
    save(store.run, 6)
    assert Saver(store.run).all_steps() == [4, 6]


def test_an_empty_bucket_with_a_mark_is_listed_once(store):
    save(store.run, 1)
    with Saver(store.run, prefix="other") as other:
        assert other.latest_step() is None
        before = len(store.seen)
        assert other.latest_step() is None
        assert len(store.seen) - before <= 8

"""Reads with a fault at each request return the expected values or raise; unusual prefixes and kinds of leaves."""

import numpy as np
import pytest
from object_states import state_at

import jstep

pytestmark = pytest.mark.usefixtures("one_retry")


def read(url):
    """Return the results of all read operations."""
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


@pytest.mark.parametrize("prefix", ["my model%25", "a+b&c=d;?#", "модель", "~~", "model-1"])
def test_unusual_prefixes(store, prefix):
    """A prefix that sorts after the marker object has a marker of its own."""
    store.page = 1000
    with jstep.Saver(store.run, prefix=prefix, max_to_keep=2) as saver:
        for step in (1, 2, 3):
            path = saver.save(state_at(step))
        assert saver.all_steps() == [2, 3]
        assert path == f"{store.run}/{prefix}-3"
        assert saver.restore(state_at(0)).params["w"][0, 0] == 3
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(1))
    assert jstep.latest_checkpoint(store.run) == path
    assert jstep.latest_checkpoint(store.run, "model") == f"{store.run}/model-1"
    assert jstep.Saver(store.run, prefix=prefix).all_steps() == [2, 3]

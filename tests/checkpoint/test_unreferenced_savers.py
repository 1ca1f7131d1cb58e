"""Savers that are garbage-collected without `close`: their saves are completed and their claims released."""

import contextlib
import gc
import threading

from checkpoint_states import save_all, state_at
from file_operations import before, disk_is_full, until

from jstep.checkpoint.saver import Saver


def test_an_unreferenced_saver_releases_its_claim(tmp_path):
    saver = Saver(tmp_path)
    save_all(saver, [1])
    del saver
    with Saver(tmp_path) as other:
        save_all(other, [2])
        assert other.all_steps() == [1, 2]


@contextlib.contextmanager
def save_in_progress(directory, end=lambda path: None):
    """Begin a save of an unreferenced Saver; another Saver's attempt to lock the prefix in the block lets it end."""
    attempted = threading.Event()

    def hold(path):
        until(attempted)(path)
        end(path)

    with before("open", f"{directory}/*/manifest.json*", hold, mode="w", times=1):
        Saver(directory).save(state_at(1))
        with before("fcntl.flock", f"{directory}/*", lambda path: attempted.set()):
            try:
                yield
                assert attempted.is_set()
            finally:
                attempted.set()


def test_the_next_saver_waits_for_a_save_in_progress(tmp_path):
    with save_in_progress(tmp_path), Saver(tmp_path) as other:
        save_all(other, [2])
        assert other.all_steps() == [1, 2]


def test_a_failed_save_is_logged(tmp_path, caplog):
    with save_in_progress(tmp_path, disk_is_full), Saver(tmp_path) as other:
        other.claim()
        assert "was not saved" in caplog.text
        save_all(other, [2])
        assert other.all_steps() == [2]


def test_savers_in_reference_cycles_release_their_claims(tmp_path):
    for _ in range(3):
        saver = Saver(tmp_path)
        saver.claim()
        saver.cycle = saver
    gc.collect()

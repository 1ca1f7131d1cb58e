"""Retention: `max_to_keep` and `keep_checkpoint_every_n_hours`."""

import errno
import itertools
import math
import os
import time

import pytest
from checkpoint_states import assert_same, edit_manifest, flip, save_all, state_at
from file_operations import before, failing
from hypothesis import given, settings
from hypothesis import strategies as st

from jstep.array_store import directory_store, listing
from jstep.array_store.manifest import CheckpointExtra
from jstep.checkpoint import retention
from jstep.checkpoint.saver import Saver, engine_of


@pytest.fixture
def now(monkeypatch):
    """The time in seconds since 1970, in a list."""
    found = [0.0]
    monkeypatch.setattr(time, "time", lambda: found[0])
    return found


class TestRetention:
    def test_the_newest_and_the_last_saved_are_kept(self, tmp_path):
        with Saver(tmp_path, max_to_keep=1) as saver:
            save_all(saver, [10])
            save_all(saver, [5])
            assert saver.all_steps() == [5, 10]
            save_all(saver, [6])
            assert saver.all_steps() == [6, 10]
            save_all(saver, [11])
            assert saver.all_steps() == [11]

    @pytest.mark.parametrize("kept", [3, 12])
    def test_a_save_reads_few_manifests_whatever_is_kept(self, kept, tmp_path, monkeypatch):
        with Saver(tmp_path, max_to_keep=None) as saver:
            save_all(saver, range(kept))
        reads, read = [], listing.read_manifest
        monkeypatch.setattr(listing, "read_manifest", lambda path: reads.append(path) or read(path))
        with Saver(tmp_path, max_to_keep=None) as saver:
            for n in range(5):
                reads.clear()
                saver.save(state_at(kept + n), CheckpointExtra(None, {}, True, 600.0))
                saver.wait()
                assert len(reads) <= (6 if n == 0 else 2)

    def test_the_newest_finite_checkpoint_is_kept(self, tmp_path):
        def save(saver, *steps, value):
            for step in steps:
                saver.save(state_at(step, value))
            saver.wait()

        with Saver(tmp_path, max_to_keep=2) as saver:
            save(saver, 1, 2, value=1.0)
            save(saver, 3, 4, 5, value=math.nan)
            assert saver.all_steps() == [2, 5]
        with Saver(tmp_path, max_to_keep=1) as saver:  # which reads the manifests
            save(saver, 6, 7, value=math.inf)
            assert saver.all_steps() == [2, 7]
            save(saver, 8, value=0.0)
            assert saver.all_steps() == [8]
            save(saver, 8, value=math.nan)  # again, and not finite now
            save(saver, 9, value=math.nan)
            assert saver.all_steps() == [9]

    def test_a_checkpoint_of_a_version_that_did_not_record_it_counts_as_finite(self, tmp_path):
        with Saver(tmp_path) as saver:
            save_all(saver, [1])
        edit_manifest(
            tmp_path / "model-1", lambda data: {key: data[key] for key in data if key != "finite"}
        )
        with Saver(tmp_path, max_to_keep=1) as saver:
            for step in (2, 3):
                saver.save(state_at(step, math.nan))
            saver.wait()
            assert saver.all_steps() == [1, 3]
            assert_same(saver.restore(state_at(0), step=1), state_at(1, 1))

    def test_one_per_interval_is_kept_permanently(self, tmp_path, now):
        options = {"max_to_keep": 2, "keep_checkpoint_every_n_hours": 1.0}

        def run(saver, steps):
            for step in steps:  # one per half hour
                now[0] = step * 1800.0
                saver.save(state_at(step))

        with Saver(tmp_path, **options) as saver:
            run(saver, range(1, 8))
            # 3 is the first one saved more than an hour after the start, and 5 the first after more
            # than two
            assert saver.all_steps() == [3, 5, 6, 7]
            assert saver.last_checkpoints == [str(tmp_path / "model-6"), str(tmp_path / "model-7")]
        now[0] = 0.0
        with Saver(tmp_path, **options) as saver:
            run(saver, range(8, 11))
            assert saver.all_steps() == [3, 5, 7, 9, 10]
        # they stay permanently, also with other settings
        with Saver(tmp_path, max_to_keep=1) as saver:
            run(saver, [11])
            assert saver.all_steps() == [3, 5, 7, 11]
            assert saver.last_checkpoints == [str(tmp_path / "model-11")]

    def test_temporary_checkpoints_are_not_among_the_last(self, tmp_path):
        names = [str(tmp_path / f"model-{step}") for step in range(6)]
        with Saver(tmp_path, max_to_keep=2) as saver, Saver(tmp_path) as reader:
            save_all(saver, [1, 2, 3])
            saver.save(state_at(4), CheckpointExtra(None, {}, True, retention.ALWAYS_TEMPORARY))
            assert saver.all_steps() == [2, 3, 4]
            assert saver.last_checkpoints == reader.last_checkpoints == names[2:4]
            # The temporary one becomes permanent, under the same name.
            save_all(saver, [4])
            assert saver.last_checkpoints == reader.last_checkpoints == names[3:5]
            saver.save(state_at(5), CheckpointExtra(None, {}, True, retention.ALWAYS_TEMPORARY))
            assert saver.last_checkpoints == reader.last_checkpoints == names[3:5]

    def test_a_temporary_checkpoint_whose_deletion_is_missed_is_deleted_by_the_next_save(
        self, tmp_path
    ):
        temporary = CheckpointExtra(None, {}, permanent_every_secs=1e9)
        with Saver(tmp_path, max_to_keep=2) as saver:
            save_all(saver, [1])
            saver.save(state_at(2), temporary)
            saver.wait()
            # As after a kill between the renaming of model-3 and the deletion of model-2.
            with before("os.rename", f"{tmp_path}/model-2", failing(errno.EIO)):
                saver.save(state_at(3), temporary)
                saver.wait()
        with Saver(tmp_path, max_to_keep=2) as saver:
            assert saver.all_steps() == [1, 2, 3]
            assert [os.path.basename(path) for path in saver.last_checkpoints] == ["model-1"]
            save_all(saver, [4])
            assert saver.all_steps() == [1, 4]

    def test_a_temporary_checkpoint_that_stays_because_it_is_finite_takes_no_place(self, tmp_path):
        with Saver(tmp_path, max_to_keep=2) as saver:
            save_all(saver, [1])
            saver.save(state_at(2), CheckpointExtra(None, {}, True, retention.ALWAYS_TEMPORARY))
            saver.save(state_at(3, math.nan))
            assert saver.all_steps() == [1, 2, 3]
            saver.save(state_at(4, math.nan))
            assert saver.all_steps() == [2, 3, 4]

    def test_the_deletion_of_a_replaced_checkpoint_counts_once(self, tmp_path, monkeypatch):
        lost_secs = [0]
        monotonic = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + lost_secs[0])
        remove = directory_store.remove

        def slow_remove(path):
            lost_secs[0] += 10_000 * os.path.lexists(path)
            remove(path)

        monkeypatch.setattr(directory_store, "remove", slow_remove)
        with Saver(tmp_path) as saver:
            save_all(saver, [1, 1])
            assert round(engine_of(saver).write_secs, -4) == 10_000

    def test_permanent_steps_survive_a_corrupted_manifest(self, tmp_path, now):
        with Saver(tmp_path, max_to_keep=1, keep_checkpoint_every_n_hours=1) as saver:
            for step in range(1, 5):
                now[0] = step * 4000.0
                saver.save(state_at(step))
            assert saver.all_steps() == [1, 2, 3, 4]
        flip(tmp_path / "model-4" / "manifest.json", 10)
        with Saver(tmp_path, max_to_keep=1) as saver:
            saver.save(state_at(5))
            assert {1, 2, 5} <= set(saver.all_steps())

    @pytest.mark.parametrize("days", [0, 10, -10])
    def test_a_clock_that_was_wrong_for_an_hour_costs_no_later_checkpoint(self, days):
        """A save each quarter of an hour, four of them by a clock that is wrong; two are kept, and
        one each hour."""
        existing, kept, now = {}, retention.RetainedSteps(frozenset(), 0.0), 0.0
        for step in range(1, 97):
            now += 900
            existing[step] = now + days * 86_400 * (8 <= step < 12)
            victims, kept = retention.plan_evictions(existing, step, kept, 2, 1.0)
            for victim in victims:
                del existing[victim]
        assert 24 <= len(existing) <= 25
        late = [step for step in existing if step >= 16]
        assert all(after - before <= 5 for before, after in itertools.pairwise(late)), late

    @pytest.mark.thorough
    @settings(max_examples=200, deadline=None)
    @given(
        gaps=st.lists(st.floats(0.01, 0.99), max_size=40),
        max_to_keep=st.integers(1, 4),
        hours=st.sampled_from([1, 2, 5.5]),
    )
    def test_agrees_with_tf_train_saver(self, gaps, max_to_keep, hours):
        """The reference is the bookkeeping of tf.train.Saver, with more than one save per
        interval."""
        last, kept_by_tf, next_time, now = [], [], hours * 3600, 0.0
        existing, kept = {}, retention.RetainedSteps(frozenset(), 0.0)
        for step, gap in enumerate(gaps):
            now += gap * hours * 3600
            last.append((step, now))
            if len(last) > max_to_keep:
                old = last.pop(0)
                if old[1] > next_time:
                    next_time += hours * 3600
                    kept_by_tf.append(old[0])
            existing[step] = now
            victims, kept = retention.plan_evictions(existing, step, kept, max_to_keep, hours)
            for victim in victims:
                del existing[victim]
            assert sorted(kept.kept) == kept_by_tf
            assert sorted(existing) == sorted(kept_by_tf + [step for step, _ in last])

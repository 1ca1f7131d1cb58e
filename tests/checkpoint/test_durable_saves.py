"""What a save has acknowledged is on the disk, and an error of flushing it is an error of the
save."""

import contextlib
import errno
import logging
import os
import threading

import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import files_of, flip, listing, save_all, state_at
from file_operations import before, failing, held

import jstep
from jstep.array_store.listing import ORBAX_ONLY
from jstep.array_store.manifest import CheckpointError, CheckpointExtra
from jstep.checkpoint.saver import Saver
from jstep.stores.tagged_json import ExternalBytes


@pytest.fixture
def flushed(monkeypatch):
    """The paths that were flushed, in order, and renames as (old, new)."""
    found, lock = [], threading.Lock()

    def recording(function, names):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            with lock:
                found.append(names(*args))
            return result

        return call

    for name in ("fsync", "fdatasync"):
        path_of = lambda handle: os.readlink(f"/proc/self/fd/{handle}")  # noqa: E731
        monkeypatch.setattr(os, name, recording(getattr(os, name), path_of))
    monkeypatch.setattr(os, "rename", recording(os.rename, lambda old, new: (old, new)))
    return found


@contextlib.contextmanager
def failing_flush(monkeypatch, path, number, times=1):
    real, left = os.fsync, [times]

    def fsync(handle):
        if left[0] and os.readlink(f"/proc/self/fd/{handle}").endswith(path):
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield
    assert left[0] == 0, "it was never flushed"


def save(saver, state):
    saver.save(state)
    saver.wait()


def test_files_then_manifest_then_folder_then_name_then_directory(tmp_path, flushed):
    with Saver(tmp_path, max_to_keep=1) as saver:
        save_all(saver, [1])
        flushed.clear()
        save_all(saver, [2])
    temporary, final = f"{tmp_path}/model-2.orbax-checkpoint-tmp", f"{tmp_path}/model-2"
    names = {os.path.relpath(path, final) for path in files_of(final)}
    # tensorstore flushes the others itself, which `tests/powercut` sees.
    of_orbax = ORBAX_ONLY & names
    assert of_orbax == ORBAX_ONLY
    order = [
        max(flushed.index(f"{temporary}/{name}") for name in [*of_orbax, "d"]),
        flushed.index(f"{temporary}/manifest.json"),
        len(flushed) - 1 - flushed[::-1].index(temporary),
        flushed.index((temporary, final)),
        flushed.index(str(tmp_path)),
        flushed.index((f"{tmp_path}/model-1", f"{tmp_path}/model-1.jstep-deleted")),
    ]
    assert order == sorted(order)


def test_files_of_an_extra_are_in_the_database(tmp_path, monkeypatch):
    def save_with_file(step):
        file = ExternalBytes(b"a" * 100_000)
        saver.save(
            state_at(step),
            extra=CheckpointExtra(
                {"a": {"$file": "position.process_0.0"}}, {"position.process_0.0": file}
            ),
        )
        saver.wait()

    with Saver(tmp_path, max_to_keep=1) as saver:
        save_with_file(1)
        full = pytest.raises(CheckpointError, match="No space left on device")
        with failing_flush(monkeypatch, "/_METADATA", errno.ENOSPC), full:
            save_with_file(2)
        assert listing(tmp_path) == ["model-1"]
        assert saver.read_file("position.process_0.0", 1) == b"a" * 100_000
        with pytest.raises(
            CheckpointError,
            match=r"model-1 is corrupted: the file 'position.process_1.0' is missing",
        ):
            saver.read_file("position.process_1.0", 1)


def test_new_folders_above_the_checkpoints_are_flushed(tmp_path, flushed):
    with Saver(tmp_path / "runs" / "a") as saver:
        save_all(saver, [1])
    assert flushed[:2] == [str(tmp_path), str(tmp_path / "runs")]


@pytest.mark.thorough(except_for=["manifest.json-30", "_METADATA-122"])
@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE]
)
@pytest.mark.parametrize(
    "place", ["model-2.orbax-checkpoint-tmp", "run", "_METADATA", "manifest.json"]
)
def test_an_error_of_flushing_is_an_error_of_the_save(tmp_path, monkeypatch, place, number):
    with Saver(tmp_path / "run", max_to_keep=1) as saver:
        save_all(saver, [1])
        with (
            failing_flush(monkeypatch, f"/{place}", number),
            pytest.raises(CheckpointError) as error,
        ):
            save_all(saver, [2])
        assert f"{tmp_path}/run/model-2 was not saved: " in str(error.value)
        assert os.strerror(number) in str(error.value)
        assert listing(tmp_path / "run") == ["model-1"], (
            "nothing of it is left, and nothing was deleted for it"
        )
        assert saver.restore(state_at(0)).params["w"].tolist() == [[1, 1]] * 3
        save_all(saver, [2])
        assert listing(tmp_path / "run") == ["model-2"]


def test_systems_that_cannot_flush_folders(tmp_path, monkeypatch):
    for number in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF):
        with Saver(tmp_path / "run") as saver, failing_flush(monkeypatch, "/run", number):
            save(saver, state_at(number))


def test_what_is_flushed_with_checkpoints_is_never_older(tmp_path):
    calls = []
    with Saver(tmp_path) as saver:
        with saver.flushing(lambda: calls.append(os.path.exists(tmp_path / "model-1"))):
            save_all(saver, [1])
        save_all(saver, [2])
        with (
            saver.flushing(lambda: 1 / 0),
            pytest.raises(CheckpointError, match="model-3 was not saved: ZeroDiv"),
        ):
            save_all(saver, [3])
    assert calls == [False]


OPTIMIZER = jstep.gradient_descent(0.1)


def run(directory, best, last_step, **options):
    train_step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), OPTIMIZER)
    keep = jstep.KeepBest(best, "value", mode="max")
    results = iter([{"value": 1.0}, {"value": 0.0}])
    evaluation = jstep.EvaluationHook(
        lambda state: next(results), every_n_steps=2, callbacks=[keep]
    )
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER)
    batches = [jnp.ones(4)] * 4
    options = {
        "hooks": [evaluation],
        "checkpoint_dir": directory,
        "save_checkpoint_steps": 2,
        "log_steps": None,
    } | options
    return jstep.train(train_step, state, batches, last_step=last_step, **options)


def test_a_checkpoint_waits_for_the_best_one_of_its_step(tmp_path):
    """Otherwise a run that is killed between the two resumes from it, and never evaluates its step
    again."""
    with held("open", f"{tmp_path}/best/*/manifest.json*", mode="w") as released:
        thread = threading.Thread(target=run, args=(tmp_path / "run", tmp_path / "best", 2))
        thread.start()
        with held("os.rename", f"{tmp_path}/run/model-2.*") as may_rename:
            thread.join(timeout=1.5)
            assert not os.path.exists(tmp_path / "run" / "model-2" / "manifest.json")
            assert not os.path.exists(
                tmp_path / "run" / "model-2.orbax-checkpoint-tmp" / "manifest.json"
            )
            may_rename.set()
        released.set()
        thread.join(timeout=60)
    assert jstep.Saver(tmp_path / "best", "best").all_steps() == [2]
    assert jstep.Saver(tmp_path / "run").all_steps() == [2]


def test_events_and_times_are_on_the_disk_before_a_checkpoint(tmp_path, flushed):
    run(tmp_path / "run", tmp_path / "best", 4, logdir=tmp_path / "logs", save_summaries_steps=1)
    events = next(
        str(tmp_path / "logs" / name)
        for name in os.listdir(tmp_path / "logs")
        if "tfevents" in name
    )
    manifest = flushed.index(f"{tmp_path}/run/model-2.orbax-checkpoint-tmp/manifest.json")
    for path in (events, f"{tmp_path}/logs"):
        assert flushed.index(path) < manifest, path
    assert any(str(path).startswith(f"{tmp_path}/run/starts/") for path in flushed[:manifest])


def test_a_writer_flushes_to_the_disk(tmp_path, flushed):
    with jstep.summary.SummaryWriter(tmp_path / "new" / "logs") as writer:
        writer.add_summary(jstep.summary.scalar("loss", 1.0), 1)
        writer.flush()
        assert flushed == [
            str(tmp_path),
            str(tmp_path / "new"),
            writer.path,
            str(tmp_path / "new" / "logs"),
        ]
        writer.flush()
        assert flushed[4:] == [writer.path], "the name is on the disk already"


class TestFilesThatNothingReads:
    """Files in which Orbax describes a checkpoint: jstep 0.3 and earlier did not flush them."""

    @pytest.fixture
    def saved(self, tmp_path):
        with Saver(tmp_path) as saver:
            save_all(saver, [1, 2])
        return tmp_path

    @pytest.mark.thorough(except_for=["gone-names0", "zeros-names2"])
    @pytest.mark.parametrize(
        "names", [["_METADATA"], ["_CHECKPOINT_METADATA"], ["_METADATA", "_CHECKPOINT_METADATA"]]
    )
    @pytest.mark.parametrize("damage", ["empty", "half", "zeros", "gone"])
    def test_a_checkpoint_is_intact_without_them(self, saved, caplog, names, damage):
        for name in names:
            path = saved / "model-2" / name
            data = path.read_bytes()
            os.remove(path)
            if damage != "gone":
                path.write_bytes(
                    {"empty": b"", "half": data[: len(data) // 2], "zeros": bytes(len(data))}[
                        damage
                    ]
                )
        with caplog.at_level(logging.WARNING), Saver(saved) as saver:
            assert saver.all_steps() == [1, 2]
            assert saver.restore(state_at(0)).params["w"].tolist() == [[2, 2]] * 3
            (record,) = caplog.records
            assert record.levelname == "WARNING"
            assert all(name in record.getMessage() for name in names)
            save_all(saver, [3])
        loaded = jstep.load_weights(saved / "model-2", state_at(0).params)
        assert loaded["w"].tolist() == [[2, 2]] * 3

    def test_a_checkpoint_restores_if_one_of_them_cannot_be_opened(self, saved, caplog):
        with (
            before("open", f"{saved}/model-2/_METADATA", failing(errno.EACCES)),
            Saver(saved) as saver,
        ):
            assert saver.restore(state_at(0)).params["w"].tolist() == [[2, 2]] * 3
        assert "_METADATA (cannot be read: Permission denied)" in caplog.text


def test_what_can_be_read_of_a_corrupted_checkpoint(tmp_path):
    """A flipped bit is an error of the leaf that has it; parameters are restored if only slots are
    corrupted."""
    params = {"a": jnp.arange(4000.0), "b": jnp.ones(3)}
    with Saver(tmp_path) as saver:
        state = jstep.TrainState.create(params, jstep.momentum(0.1, 0.9), global_step=3)
        state = state.replace(slots={"momentum": {"a": jnp.full(4000, 7.0), "b": jnp.ones(3)}})
        path = saver.save(state)
        saver.wait()
        largest = max(files_of(path), key=os.path.getsize)
        with open(largest, "rb") as file:
            at = file.read().index(b"\0\0\xe0\x40" * 100)  # 7.0
        flip(largest, at + 40)
        zeros = {"a": jnp.zeros(4000), "b": jnp.zeros(3)}
        with pytest.raises(
            CheckpointError, match="the array of 'slots/momentum/a' has another checksum"
        ):
            saver.restore(state)
        restored = saver.restore_params(zeros)
        assert (restored["a"] == params["a"]).all()
        assert (jstep.load_weights(path, zeros)["a"] == params["a"]).all()
        back = saver.restore({"params": {"b": zeros["b"]}}, 3, partial=True)
        assert back["params"]["b"].tolist() == [1, 1, 1]
        flip(largest, at + 40)
        with open(largest, "rb") as file:
            at = file.read().index(params["a"].tobytes()[400:800])
        flip(largest, at)
        with pytest.raises(CheckpointError, match="the array of 'params/a' has another checksum"):
            saver.restore_params(zeros)
        with pytest.raises(CheckpointError, match="the array of 'params/a' has another checksum"):
            jstep.load_weights(path, zeros)


def test_a_full_disk_says_what_it_lacks(tmp_path, monkeypatch):
    with Saver(tmp_path) as saver:
        with (
            failing_flush(monkeypatch, "/_METADATA", errno.ENOSPC),
            pytest.raises(
                CheckpointError,
                match=r"No space left on device \(52 B needed, .* free\)",
            ),
        ):
            save_all(saver, [1])
        save_all(saver, [1])


def test_what_it_lacks_counts_all_shards(tmp_path, monkeypatch):
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = {"w": jax.device_put(jnp.zeros((len(devices), 25), jnp.float32), sharding)}
    state = jstep.TrainState(params, {}, jnp.int32(1))
    nbytes = 100 * len(devices) + 4
    with (
        Saver(tmp_path, async_save=False) as saver,
        failing_flush(monkeypatch, "/_METADATA", errno.ENOSPC),
        pytest.raises(CheckpointError, match=rf"\({nbytes} B needed, "),
    ):
        saver.save(state)

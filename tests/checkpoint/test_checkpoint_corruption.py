"""Any corruption of a checkpoint is detected."""

import os
import re
import shutil
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import NO_SLOTS, files_of, flip, read_files_of, save_all, state_at

import jstep
from jstep.checkpoint import manifest as _manifest
from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.names import latest_checkpoint
from jstep.checkpoint.saver import Saver

MOVED = "`mv %s %s.aside.0`"


class TestCorruption:
    @pytest.fixture
    def saved(self, tmp_path):
        saver = Saver(tmp_path)
        save_all(saver, [1, 2, 3])
        yield saver, str(tmp_path / "model-3")
        saver.close()

    def assert_detected(self, saver, path, file):
        for target in (state_at(0), None):
            with pytest.raises(CheckpointError) as error:
                saver.restore(target)
            assert path in str(error.value)
            assert os.path.relpath(file, path) in str(error.value)
            assert "newest intact checkpoint is step 2" in str(error.value)

    def test_any_flipped_byte_is_detected(self, saved):
        saver, path = saved
        for file in read_files_of(path):
            size = os.path.getsize(file)
            for at in {0, 1, size // 3, size // 2, size - 2, size - 1}:
                flip(file, at)
                self.assert_detected(saver, path, file)
                flip(file, at)
        assert int(saver.restore(state_at(0)).global_step) == 3
        assert saver.restore(state_at(0), step=2).params["w"].tolist() == [[2, 2]] * 3

    def test_every_byte_of_the_manifest_is_verified(self, saved):
        _, path = saved
        file = f"{path}/manifest.json"
        with open(file, "rb") as opened:
            data = opened.read()
        for at in range(len(data)):
            with pytest.raises(CheckpointError, match="checksum differs"):
                _manifest.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(CheckpointError, match="checksum differs"):
                _manifest.decode(data[:at])

    def test_any_truncated_file_is_detected(self, saved):
        saver, path = saved
        for file in read_files_of(path):
            with open(file, "rb") as opened:
                data = opened.read()
            for size in (0, len(data) // 2, len(data) - 1):
                with open(file, "wb") as opened:
                    opened.write(data[:size])
                self.assert_detected(saver, path, file)
            with open(file, "wb") as opened:
                opened.write(data)

    def test_appended_bytes_are_detected(self, saved):
        saver, path = saved
        for file in read_files_of(path):
            with open(file, "ab") as opened:
                opened.write(b"\0")
            self.assert_detected(saver, path, file)
            os.truncate(file, os.path.getsize(file) - 1)

    def test_error_if_no_other_checkpoint_is_intact(self, tmp_path):
        with Saver(tmp_path) as saver:
            path = saver.save(state_at(1))
            saver.wait()
            flip(f"{path}/manifest.ocdbt", 5)
            with pytest.raises(CheckpointError) as error:
                saver.restore(state_at(0))
            command = f"`mv {path} {path}.aside.0`."
            assert str(error.value).endswith(
                f"No other checkpoint model-* in {tmp_path} is intact; to start from scratch, set aside what cannot be "
                f"used: {command}"
            )

    def test_error_names_the_newest_intact_checkpoint(self, saved):
        saver, path = saved
        for step in (2, 3):
            flip(max(files_of(path[:-1] + str(step)), key=os.path.getsize), 40)
        with pytest.raises(CheckpointError, match="newest intact checkpoint is step 1"):
            saver.restore(state_at(0))

    def test_verify_false_detects_only_unreadable_files(self, tmp_path):
        state = jstep.TrainState.create({"w": jnp.zeros(1000)}, NO_SLOTS)
        with Saver(tmp_path, verify=False, compress=False) as saver:
            path = saver.save(state)
            saver.wait()
            flip(max(files_of(path), key=os.path.getsize), 2000)
            assert np.count_nonzero(saver.restore(state).params["w"]) == 1  # the flipped byte is not detected
            os.truncate(max(files_of(path), key=os.path.getsize), 2000)
            with pytest.raises(CheckpointError, match=f"{path} could not be read"):
                saver.restore(state)

    def test_a_missing_file_is_an_error(self, saved, caplog):
        """A crash never leaves a checkpoint without one of its files, so a missing file was deleted by a user."""
        saver, path = saved
        for file in read_files_of(path):
            os.rename(file, file + ".gone")
            for target in (state_at(0), None):
                with pytest.raises(CheckpointError, match="newest intact checkpoint is step 2") as error:
                    saver.restore(target)
                assert f"{path} is corrupted: {os.path.relpath(file, path)} is missing" in str(error.value)
                assert str(error.value).endswith(
                    f"to resume from it, set aside what cannot be used: {MOVED % (path, path)}."
                )
            with pytest.raises(CheckpointError):
                saver.extra()
            assert saver.latest_step() == 2
            assert latest_checkpoint(os.path.dirname(path)) == path[:-1] + "2"
            assert int(saver.restore(state_at(0), step=2).global_step) == 2
            os.rename(file + ".gone", file)
        assert "model-3 is ignored: it is incomplete" in caplog.text
        assert saver.latest_step() == 3

    def test_the_command_of_the_error_is_all_that_a_run_needs(self, saved):
        """It moves all that are newer than the newest intact one, and deletes nothing."""
        saver, path = saved
        save_all(saver, [4, 5])
        directory = os.path.dirname(path)
        flip(f"{directory}/model-5/manifest.ocdbt", 3)
        os.remove(f"{directory}/model-4/manifest.ocdbt")
        flip(f"{path}/manifest.json", 9)
        with pytest.raises(CheckpointError) as error:
            saver.restore(state_at(0))
        message = str(error.value)
        assert "model-2)" in message
        assert "delete" not in message
        (command,) = re.findall("`(mv .*)`", message)
        before = {step: len(files_of(f"{directory}/model-{step}")) for step in (3, 4, 5)}
        subprocess.run(command, shell=True, check=True, timeout=60)
        for step in (3, 4, 5):
            assert len(files_of(f"{directory}/model-{step}.aside.0")) == before[step]
        assert int(saver.restore(state_at(0)).global_step) == 2
        saver.save(state_at(6))
        saver.wait()
        assert len(files_of(f"{directory}/model-5.aside.0")) == before[5], "the next save does not remove it"
        with pytest.raises(FileNotFoundError):
            saver.restore(state_at(0), step=5)

    def test_a_name_that_contradicts_the_manifest_is_an_error(self, saved):
        saver, path = saved
        directory = os.path.dirname(path)
        shutil.copytree(path, f"{directory}/model-90")
        for step in (None, 90):
            with pytest.raises(
                CheckpointError, match=r"model-90 cannot be .*: its name says step 90, .* step 3"
            ) as error:
                saver.restore(state_at(0), step=step)
            assert "delete" not in str(error.value), "it is intact"
            with pytest.raises(
                CheckpointError, match=r"newest intact checkpoint is step 3 .*`mv .*/model-90 .*/model-90\.aside\.0`"
            ):
                saver.extra(step)
        shutil.rmtree(f"{directory}/model-90")
        assert int(saver.restore(state_at(0)).global_step) == 3

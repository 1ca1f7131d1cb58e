"""The interception of file operations that the tests of this folder use."""

import contextlib
import errno
import fcntl
import os
import shutil
import threading

import pytest
from file_operations import before, disk_is_full, failing, held, killed_at


def write(path, text="x"):
    with open(path, "w") as file:
        file.write(text)


def test_an_operation_fails_within_the_block(tmp_path):
    with before("open", "*/full*", disk_is_full, mode="w") as seen:
        write(tmp_path / "other")
        with pytest.raises(OSError, match=r"No space left on device: .*/full"):
            write(tmp_path / "full")
        with pytest.raises(OSError, match="No space left"):
            os.open(tmp_path / "full", os.O_RDWR | os.O_CREAT)
    assert seen.paths == [str(tmp_path / "full")] * 2
    write(tmp_path / "full")


@pytest.mark.parametrize("mode", ["r", "rb", "w", "a", "r+b"])
def test_modes(tmp_path, mode):
    write(tmp_path / "file")
    fails, passes = ("r", "w") if mode.startswith("r") and "+" not in mode else ("w", "r")
    with before("open", "*/file", disk_is_full, mode=passes), open(tmp_path / "file", mode):
        pass
    with before("open", "*/file", disk_is_full, mode=fails), pytest.raises(OSError, match="No space"):  # noqa: SIM117
        with open(tmp_path / "file", mode):
            pass


def test_paths_relative_to_an_open_folder(tmp_path):
    """`shutil.rmtree` deletes files relative to the descriptor of their folder."""
    os.makedirs(tmp_path / "a" / "b")
    write(tmp_path / "a" / "b" / "file")
    with before(("os.remove", "os.rmdir"), f"{tmp_path}/a*", lambda path: None) as seen:
        shutil.rmtree(tmp_path / "a")
    assert seen.paths == [f"{tmp_path}/a/b/file", f"{tmp_path}/a/b", f"{tmp_path}/a"]


def test_descriptors(tmp_path):
    with open(tmp_path / "file", "w") as file:
        with before("fcntl.flock", f"{tmp_path}/file", failing(errno.ENOLCK)), pytest.raises(OSError, match="lock"):
            fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_EX)


def test_an_action_is_not_intercepted_and_runs_a_limited_number_of_times(tmp_path):
    with before("open", f"{tmp_path}/*", write, times=2) as seen:
        for _ in range(3):
            write(tmp_path / "file")
    assert len(seen.paths) == 2


def test_other_threads_wait_for_an_action(tmp_path):
    write(tmp_path / "file")
    started, order = threading.Event(), []

    def read(name):
        started.set()
        with open(tmp_path / "file"):
            order.append(name)

    thread = threading.Thread(target=read, args=["thread"])

    def act(path):
        thread.start()
        started.wait(60)
        order.append("action")

    with before("open", f"{tmp_path}/file", act, times=1):
        read("test")
        thread.join(60)
    assert order[0] == "action"
    assert sorted(order[1:]) == ["test", "thread"]


def test_held_operations_continue_at_the_end(tmp_path):
    thread = threading.Thread(target=write, args=[tmp_path / "file"])
    with held("open", f"{tmp_path}/file"):
        thread.start()
        assert not os.path.exists(tmp_path / "file")
    thread.join(60)
    assert os.path.exists(tmp_path / "file")


def test_a_killed_process_changes_nothing(tmp_path):
    for name in "abc":
        write(tmp_path / name)
    with killed_at(1, tmp_path) as killed:
        os.remove(tmp_path / "a")
        write(tmp_path / "d")
        assert not killed.is_set()
        for change in (lambda: os.rename(tmp_path / "b", tmp_path / "e"), lambda: write(tmp_path / "c", "y")):
            with pytest.raises(OSError, match="Read-only"):
                change()
        assert killed.is_set()
        with contextlib.suppress(OSError):
            os.mkdir(tmp_path / "f")
    assert sorted(os.listdir(tmp_path)) == ["b", "c", "d"]

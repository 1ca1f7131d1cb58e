"""Claims: one Saver at a time writes a prefix in a directory, until it is closed or its process
ends."""

import errno
import os
import signal
import socket

import pytest
from checkpoint_scripts import run, start
from checkpoint_states import listing, save_all, state_at
from doubles import raising
from file_operations import before, failing

from jstep.array_store.manifest import CheckpointError
from jstep.checkpoint.saver import Saver


def no_locks(directory):
    """Return a context in which the file system of a directory has no locks."""
    return before("fcntl.flock", f"{directory}/*", failing(errno.ENOLCK))


def claim_file_of(directory):
    """Return the path of the claim file of a Saver, which has deleted it again."""
    with Saver(directory) as saver:
        saver.claim()
        (name,) = set(os.listdir(directory)) - set(listing(directory))
    return os.path.join(directory, name)


def test_a_second_saver_of_the_process_is_refused(tmp_path):
    with Saver(tmp_path) as first:
        save_all(first, [1])
        second = Saver(tmp_path)
        with pytest.raises(CheckpointError, match="one writer at a time") as error:
            second.save(state_at(2))
        message = str(error.value)
        assert f"process {os.getpid()} on {socket.gethostname()}, which is this one" in message
        assert str(tmp_path) in message
        with pytest.raises(CheckpointError, match="one writer at a time"):
            second.claim()
        # the second Saver may still restore, and the first continues to save
        assert int(second.restore(state_at(0)).global_step) == 1
        save_all(first, [2])
        assert first.all_steps() == second.all_steps() == [1, 2]
    save_all(second, [3])
    assert second.all_steps() == [1, 2, 3]
    second.close()
    assert sorted(os.listdir(tmp_path)) == listing(tmp_path)  # the claim file is deleted


def test_a_claim_that_cannot_be_touched_is_the_error_of_the_file_system(tmp_path, monkeypatch):
    with Saver(tmp_path) as saver:
        save_all(saver, [1])
        with monkeypatch.context() as patch:
            patch.setattr(os, "utime", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
            with pytest.raises(OSError, match=r"Input/output error: .*jstep-writer"):
                saver.save(state_at(2))
        save_all(saver, [2])
        assert saver.all_steps() == [1, 2]


def test_a_linked_directory_has_the_same_claim(tmp_path):
    os.symlink(tmp_path, tmp_path / "link")
    with Saver(tmp_path) as saver, Saver(tmp_path / "link") as other:
        saver.claim()
        with pytest.raises(CheckpointError, match="one writer"):
            other.claim()


def test_a_refused_saver_keeps_temporary_folders(tmp_path):
    with Saver(tmp_path) as saver:
        saver.claim()
        (tmp_path / "model-9.orbax-checkpoint-tmp").mkdir()
        with Saver(tmp_path) as other, pytest.raises(CheckpointError):
            other.save(state_at(1))
        assert listing(tmp_path) == ["model-9.orbax-checkpoint-tmp"]


def test_close_without_wait_releases_the_claim(tmp_path):
    saver = Saver(tmp_path)
    saver.save(state_at(1))
    saver.close(wait=False)
    with Saver(tmp_path) as other:
        other.claim()
    saver.wait()
    assert saver.all_steps() == [1]  # the save in progress was completed


@pytest.mark.thorough
def test_sigkill_releases_the_claim(tmp_path):
    """The claim ends with its process, also if its children live on, and also on file systems
    without locks."""
    script = """
    import errno, subprocess
    saver = Saver(directory)
    saver.claim()
    unlocked = Saver(os.path.join(directory, "unlocked"))
    with file_operations.before("fcntl.flock", "*", file_operations.failing(errno.ENOLCK)):
        unlocked.claim()
    started = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], close_fds=False)
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    print(started.pid, pid, flush=True)
    time.sleep(600)
    """  # noqa: E501
    process = start(script, tmp_path, PYTHONWARNINGS="ignore")
    children = [int(pid) for pid in process.stdout.readline().split()]
    try:
        assert len(children) == 2, process.communicate(timeout=60)
        unlocked = tmp_path / "unlocked"
        with Saver(tmp_path) as saver, no_locks(unlocked), Saver(unlocked) as other:
            for refused in (saver, saver, other):
                with pytest.raises(
                    CheckpointError, match=f"process {process.pid} on {socket.gethostname()}:"
                ):
                    refused.save(state_at(7))
            assert saver.all_steps() == other.all_steps() == []
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=60)
            for released in (saver, other):
                save_all(released, [7])
                assert released.all_steps() == [7]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.thorough
def test_a_forked_process_does_not_own_the_claim(tmp_path):
    script = """
    import threading, weakref

    def end():
        signal.alarm(60)
        # What the interpreter runs at exit, except for tensorstore's handler, which waits for locks of its threads.
        threading._shutdown()
        weakref.finalize._exitfunc()
        os._exit(0)

    with Saver(directory) as saver:
        saver.save(state_at(1, 1.0))
        saver.wait()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                Saver(directory).claim()
                os.write(writing, b"claimed")
            except CheckpointError as error:
                os.write(writing, b"refused" if str(os.getppid()) in str(error) else str(error).encode())
            end()
        print(os.read(reading, 1000).decode())
        assert os.waitpid(pid, 0)[1] == 0
        saver.save(state_at(2, 1.0, 4_000_000))
        pid = os.fork()
        if pid == 0:
            end()
        assert os.waitpid(pid, 0)[1] == 0
        assert saver.all_steps() == [1, 2]
        try:
            Saver(directory).claim()
        except CheckpointError:
            print("held")
    """  # noqa: E501
    assert run(script, tmp_path, PYTHONWARNINGS="ignore") == ["refused", "held"]


class TestWithoutLocks:
    """File systems without locks, on which the content of the claim file decides."""

    @pytest.fixture(autouse=True)
    def without_locks(self, tmp_path):
        with no_locks(tmp_path) as attempts:
            yield
        assert attempts.paths

    def test_a_stale_claim_of_another_host_expires(self, tmp_path):
        path = claim_file_of(tmp_path)
        with open(path, "w") as file:
            file.write('{"host": "elsewhere", "pid": 1, "started": "1"}')
        with Saver(tmp_path) as saver:
            with pytest.raises(CheckpointError, match="process 1 on elsewhere"):
                saver.claim()
            os.utime(path, (0, 0))
            saver.claim()
            with open(path) as file:
                assert socket.gethostname() in file.read()

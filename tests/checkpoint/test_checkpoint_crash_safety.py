"""Checkpoints after SIGKILL, interpreter exit, a full disk, and without write permission."""

import contextlib
import os
import resource
import tempfile
import textwrap

import forked
import jax.numpy as jnp
import pytest
from checkpoint_scripts import PRELUDE, TESTS
from checkpoint_states import listing, save_all, state_at

from jstep.array_store.manifest import CheckpointError
from jstep.checkpoint.saver import Saver


@pytest.mark.thorough(except_for=["raise KeyError('mine')-KeyError: 'mine'"])
@pytest.mark.parametrize(
    ("ending", "stderr"),
    [
        ("os.chdir('/'); del saver; raise SystemExit(0)", ""),
        ("raise KeyError('mine')", "KeyError: 'mine'"),
    ],
)
def test_interpreter_exit_without_close_finishes_the_saves(tmp_path, ending, stderr):
    """A save that fails at the exit is logged, since no call can raise its error."""
    script = f"""
    saver = Saver(directory)
    saver.save(state_at(3, 1.0, 4_000_000))
    full = file_operations.before("open", "*/failing/*/manifest.json*", file_operations.disk_is_full, mode="w")
    full.__enter__()  # until the interpreter has ended
    Saver(sys.argv[2]).save(state_at(4, 1.0))
    {ending}
    """  # noqa: E501
    code = f"import sys; sys.path.insert(0, {TESTS!r})\n{PRELUDE}{textwrap.dedent(script)}"
    process = forked.start(code, tmp_path / "run", tmp_path / "failing")
    err = process.communicate(timeout=60)[1]
    assert stderr in err
    assert f"{tmp_path}/failing/model-4 was not saved" in err
    assert "run/model-3" not in err
    assert process.returncode == bool(stderr), err
    assert os.listdir(tmp_path / "run") == ["model-3"]
    with Saver(tmp_path / "run") as saver:
        assert saver.restore()["params"]["w"].min() == 1


def test_interpreter_exit_after_close_without_wait(tmp_path):
    """The write is left as after a kill: the exit does not wait for it."""
    script = """
    saver = Saver(directory)
    hanging = file_operations.before("open", "*/manifest.json*", lambda path: time.sleep(600), mode="w")
    hanging.__enter__()  # until the interpreter has ended
    saver.save(state_at(3, 1.0))
    saver.close(wait=False)
    """  # noqa: E501
    code = f"import sys; sys.path.insert(0, {TESTS!r})\n{PRELUDE}{textwrap.dedent(script)}"
    process = forked.start(code, tmp_path)
    try:
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert listing(tmp_path) == ["model-3.orbax-checkpoint-tmp"]
    with Saver(tmp_path) as saver:
        save_all(saver, [3])
        assert listing(tmp_path) == ["model-3"]


def fill(directory, reasons):
    saver = Saver(directory, max_to_keep=None)
    saved = []
    step, failure = 0, None
    while failure is None:
        try:
            saver.save(
                {"global_step": step, "w": jnp.full(250_000 * (1 if step < 3 else 16), float(step))}
            )
            saver.wait()
            saved.append(step)
            step += 1
        except CheckpointError as error:
            failure = error
    text = str(failure)
    assert f"model-{step} was not saved" in text
    assert any(reason in text for reason in reasons), text
    assert listing(directory) == [f"model-{step}" for step in saved]
    assert saver.all_steps() == saved
    assert len(saved) >= 3
    for step in saved:
        assert (saver.restore(step=step)["w"] == step).all()
    saver.save({"global_step": 200, "w": jnp.zeros(1000)})
    assert saver.latest_step() == 200
    saver.close()
    return text


@contextlib.contextmanager
def file_size_limit(size):
    """Like a full disk, but it needs no permission to mount one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_size_limit(tmp_path):
    with file_size_limit(8_000_000):
        fill(tmp_path, ["No space left", "File too large", "RESOURCE_EXHAUSTED"])


@pytest.fixture
def unprivileged():

    @contextlib.contextmanager
    def entered():
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            yield
        finally:
            if is_root:
                os.seteuid(0)

    return entered


def test_a_read_only_directory(unprivileged):
    with tempfile.TemporaryDirectory() as above:  # other users cannot access tmp_path
        os.chmod(above, 0o755)
        directory = os.path.join(above, "run")
        with Saver(directory) as saver:
            save_all(saver, [1])
            saver.restore()  # trigger the lazy imports now
        os.chmod(directory, 0o555)
        with unprivileged():
            saver = Saver(directory)
            with pytest.raises(PermissionError, match=f"Permission denied.*{directory}"):
                saver.save(state_at(2, 2.0))
            assert saver.all_steps() == [1]
            assert (saver.restore()["params"]["w"] == 1).all()
            with pytest.raises(PermissionError, match="Permission denied"):
                Saver(os.path.join(directory, "below")).save(state_at(2, 2.0))
        os.chmod(directory, 0o755)


def test_unreadable_arrays_are_not_called_corrupted(unprivileged):
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o755)
        with Saver(os.path.join(above, "run")) as saver:
            save_all(saver, [1])
            saver.restore()
        os.chmod(os.path.join(above, "run", "model-1", "manifest.ocdbt"), 0)
        with (
            unprivileged(),
            pytest.raises(
                CheckpointError,
                match=r"model-1 could not be read: .*PERMISSION_DENIED",
            ),
        ):
            Saver(os.path.join(above, "run")).restore()

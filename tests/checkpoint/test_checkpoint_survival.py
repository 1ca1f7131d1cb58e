"""What a checkpoint survives: kills, full disks, no permission, other devices. All in subprocesses."""

import os
import subprocess
import tempfile
import textwrap

import pytest
from checkpoint_scripts import run, start

from jstep.checkpoint import Saver


def test_sigkill_at_ten_random_instants(tmp_path):
    """Each restart finds a whole checkpoint, and in the end all is as if nothing had happened."""
    script = """
    import random, signal
    import orbax.checkpoint  # before the forks: each child starts at once
    from jstep.checkpoint.reading import is_intact
    from jstep.checkpoint.store.open import open_store

    store = open_store(directory)

    optimizer = jstep.with_moving_average(jstep.adam(1e-2), jstep.ExponentialMovingAverage(0.9))
    step = jstep.minimize(lambda p, x: jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"] - x) ** 2), optimizer)

    def fresh():
        random = np.random.default_rng(0)
        shapes = {"w1": (64, 512), "w2": (512, 64)}
        return jstep.TrainState.create({k: random.normal(size=s).astype("f") for k, s in shapes.items()}, optimizer)

    def train(state, last_step, saver=None, told=lambda: None):
        for n in range(int(state.global_step), last_step):
            state, _ = step(state, np.random.default_rng(n).normal(size=(8, 64)).astype("f"))
            if saver is not None:
                saver.save(state, extra={"position": n + 1})
                told()
        return state

    def run(ready, last_step):
        train(fresh(), 1)  # compiles
        with Saver(directory, max_to_keep=2) as saver:
            state = fresh()
            if saver.latest_step() is not None:
                state = saver.restore(state)
                assert saver.extra() == {"position": int(state.global_step)}
            train(state, last_step, saver, lambda: os.write(ready, b"!"))

    def child(last_step, saves):
        # Starts a run, and returns when it has begun so many saves, each of which waits for the one before.
        # The parent uses no device before the last fork: JAX has no threads there yet.
        readable, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run(ready, last_step)
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            os._exit(code)
        os.close(ready)
        for _ in range(saves):
            assert os.read(readable, 1) == b"!"
        return pid, readable

    newest = 0
    for _ in range(10):
        pid, readable = child(10**6, random.randrange(1, 6))
        time.sleep(random.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        os.close(readable)
        path = latest_checkpoint(directory)
        assert path is not None or newest == 0
        assert path is None or (is_intact(store, path) and int(path.rsplit("-", 1)[1]) >= newest)
        newest = int(path.rsplit("-", 1)[1]) if path else 0
    last_step = newest + 3
    assert os.waitpid(child(last_step, 3)[0], 0)[1] == 0

    undisturbed = jax.tree.leaves(train(fresh(), last_step))
    restored = jax.tree.leaves(Saver(directory).restore(jax.eval_shape(fresh)))
    for a, b in zip(undisturbed, restored, strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    print(last_step, *os.listdir(directory))
    """
    last, *left = run(script, tmp_path, PYTHONWARNINGS="ignore")
    assert int(last) > 3
    assert sorted(left) == sorted([f"model-{int(last) - 1}", f"model-{last}"])


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "del saver", "os.chdir('/')"])
def test_the_interpreter_ends_without_close(tmp_path, ending):
    script = f"""
    saver = Saver(directory, compress=False)
    saver.save(state_at(3, 1.0, 4_000_000))
    {ending}
    """
    run(script, tmp_path)
    assert os.listdir(tmp_path) == ["model-3"]
    with Saver(tmp_path) as saver:
        assert saver.restore()["params"]["w"].min() == 1


def test_an_error_nobody_catches(tmp_path):
    process = start(
        "Saver(directory, compress=False).save(state_at(3, 1.0, 4_000_000)); raise KeyError('mine')", tmp_path
    )
    assert "KeyError: 'mine'" in process.communicate(timeout=60)[1]
    assert os.listdir(tmp_path) == ["model-3"]


FULL = """
saver = Saver(directory, max_to_keep=None, compress=False)
saved = []
failure = None
for step in range(100):
    try:
        saver.save(state_at(step, step, 250_000 * (1 if step < 3 else 16)))
        saver.wait()
        saved.append(step)
    except CheckpointError as error:
        failure = error
        break
assert failure is not None
text = str(failure)
assert f"model-{step} was not saved" in text and f"newest is {directory}/model-{step - 1}" in text, text
assert any(why in text for why in ("No space left", "File too large", "RESOURCE_EXHAUSTED")), text
left = sorted(name for name in os.listdir(directory) if not name.startswith('.'))
assert left == [f"model-{step}" for step in saved], left
assert saver.all_steps() == saved and len(saved) >= 3
for step in saved:
    assert (saver.restore(step=step)["params"]["w"] == step).all()
saver.save(state_at(200, 200))  # what is small enough can be saved again
assert saver.latest_step() == 200
saver.close()
print("done")
"""


QUIET = """
import logging
logging.basicConfig(level=logging.INFO)
saver = Saver(directory, compress=False)
saver.save(state_at(1, 1.0))
saver.restore()
many = {f"w{i}": jnp.ones(100_000) for i in range(20)} | {f"n{i}": np.ones(100_000, "f") for i in range(20)}
saver.save({"global_step": 2, **many})  # when the first of them fails, the others are still being written
try:
    saver.close()
except CheckpointError as error:
    assert "the disk is full (16.0 MB needed, " in str(error), error
    assert [name for name in os.listdir(directory) if not name.startswith(".")] == ["model-1"]
    print("done")
"""


def test_disk_full(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {mounted.stderr.strip()}")
    try:
        full = (
            FULL
            + """
assert "the disk is full (16.0 MB needed, " in text and " MB free" in text and "Errno" not in text, text
"""
        )
        assert run(full, tmp_path) == ["done"]
        # where the path is long, too; and besides the error nothing is said, by those that write on either
        process = start(QUIET, tmp_path / ("x" * 200))
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "done\n"), err
        assert err == ""
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_file_that_may_not_grow(tmp_path):
    """As a full disk, without the right to mount one."""
    limit = """
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000_000, 8_000_000))
    """
    assert run(textwrap.dedent(limit) + FULL, tmp_path) == ["done"]


def test_read_only_directory():
    script = """
    outside = os.path.join(directory, "outside")
    directory = os.path.join(directory, "run")
    with Saver(directory) as saver, Saver(outside) as warm:
        saver.save(state_at(1, 1.0))
        warm.save(state_at(1, 1.0))
    os.chmod(directory, 0o555)
    if os.geteuid() == 0:  # nothing is forbidden to root
        os.seteuid(65534)
    saver = Saver(directory)
    try:
        saver.save(state_at(2, 2.0))
    except PermissionError as error:
        assert "directory of checkpoints cannot be written" in str(error) and directory in str(error), error
        print("refused")
    assert saver.all_steps() == [1] and (saver.restore()["params"]["w"] == 1).all()
    try:
        Saver(os.path.join(directory, "below")).save(state_at(2, 2.0))
    except PermissionError as error:
        assert "directory of checkpoints cannot be made" in str(error), error
        print("refused")
    """
    with tempfile.TemporaryDirectory() as directory:  # pytest's own are closed to others
        os.chmod(directory, 0o755)
        assert run(script, directory) == ["refused", "refused"]
        os.chmod(f"{directory}/run", 0o755)


def test_a_directory_that_goes_away(tmp_path):
    script = """
    import shutil
    saver = Saver(directory + "/run")
    saver.save(state_at(1, 1.0))
    saver.wait()
    shutil.rmtree(directory + "/run")
    assert saver.all_steps() == [] and saver.latest_step() is None and latest_checkpoint(directory + "/run") is None
    saver.save(state_at(2, 2.0))
    print(*saver.all_steps())
    """
    assert run(script, tmp_path) == ["2"]


def test_a_fork_may_end_as_it_likes(tmp_path):
    script = """
    with Saver(directory, compress=False) as saver:
        saver.save(state_at(1, 1.0, 4_000_000))
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # runs what runs at exit; nothing to wait for here
        assert os.waitpid(pid, 0)[1] == 0
        assert saver.all_steps() == [1]
        print("done")
    """
    assert run(script, tmp_path, PYTHONWARNINGS="ignore") == ["done"]

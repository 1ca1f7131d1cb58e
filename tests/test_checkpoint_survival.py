"""What a checkpoint survives: kills, full disks, no permission, other devices. All in subprocesses."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap

import jax
import jax.numpy as jnp
import pytest

import jstep
from jstep.checkpoint import Saver, latest_checkpoint

PRELUDE = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
import jstep
from jstep.checkpoint import CheckpointError, Saver, latest_checkpoint

directory = sys.argv[1]

def state_at(step, value, size=1000):
    params = {"w": jnp.full(size, value, jnp.float32)}
    return jstep.TrainState.create(params, jstep.gradient_descent(0.1), global_step=step)
"""


def start(script, *args, **env):
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:  # tracebacks show its lines
        file.write(PRELUDE + textwrap.dedent(script))
    command = [sys.executable, file.name, *map(str, args)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **env}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process, timeout=120):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err[-3000:]
    return out.split()


def run(script, *args, **env):
    return end(start(script, *args, **env))


def test_sigkill_at_twenty_random_instants(tmp_path):
    """Each restart finds a whole checkpoint, and in the end all is as if nothing had happened."""
    script = """
    import random, signal
    import orbax.checkpoint  # before the forks: each child starts at once
    from jstep.checkpoint.manifest import is_intact

    optimizer = jstep.with_moving_average(jstep.adam(1e-2), jstep.ExponentialMovingAverage(0.9))
    step = jstep.minimize(lambda p, x: jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"] - x) ** 2), optimizer)

    def fresh():
        random = np.random.default_rng(0)
        shapes = {"w1": (64, 512), "w2": (512, 64)}
        return jstep.TrainState.create({k: random.normal(size=s).astype("f") for k, s in shapes.items()}, optimizer)

    def train(state, last_step, saver=None):
        for n in range(int(state.global_step), last_step):
            state, _ = step(state, np.random.default_rng(n).normal(size=(8, 64)).astype("f"))
            if saver is not None:
                saver.save(state, extra={"position": n + 1})
        return state

    def run(ready, last_step):
        train(fresh(), 1)  # compiles
        os.write(ready, b"!")
        with Saver(directory, max_to_keep=2) as saver:
            state = fresh()
            if saver.latest_step() is not None:
                state = saver.restore(state)
                assert saver.extra() == {"position": int(state.global_step)}
            train(state, last_step, saver)

    def child(last_step):
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
        os.read(readable, 1)
        os.close(readable)
        return pid

    newest = 0
    for _ in range(20):
        pid = child(10**6)
        time.sleep(random.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        path = latest_checkpoint(directory)
        assert path is not None or newest == 0
        assert path is None or (is_intact(path) and int(path.rsplit("-", 1)[1]) >= newest)
        newest = int(path.rsplit("-", 1)[1]) if path else 0
    last_step = newest + 3
    assert os.waitpid(child(last_step), 0)[1] == 0

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
assert sorted(os.listdir(directory)) == [f"model-{step}" for step in saved], os.listdir(directory)
assert saver.all_steps() == saved and len(saved) >= 3
for step in saved:
    assert (saver.restore(step=step)["params"]["w"] == step).all()
saver.save(state_at(200, 200))  # what is small enough can be saved again
assert saver.latest_step() == 200
saver.close()
print("done")
"""


def test_disk_full(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {mounted.stderr.strip()}")
    try:
        assert run(FULL, tmp_path) == ["done"]
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


def test_other_devices(tmp_path):
    """Arrays come back as the target's shardings say, whatever they were saved with."""
    params = {"w": jnp.arange(64.0).reshape(8, 8), "b": jnp.arange(8.0), "key": jax.random.split(jax.random.key(0), 8)}
    made = jstep.TrainState.create(params, jstep.gradient_descent(0.1), global_step=1)
    made = made.replace(slots={"m": {"w": made.params["w"] + 1, "none": jnp.zeros((0, 8))}})
    with Saver(tmp_path) as saver:
        saver.save(made)
    script = """
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    def placed(tree, specs, shape, names):
        mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
        shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, specs.get(leaf.shape, P())), tree)
        shapes = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)
        return shapes, shardings

    def bits(tree):
        raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return [np.asarray(raw(leaf)).tobytes() for leaf in jax.tree.leaves((tree.params, tree.slots))]

    saver = Saver(directory)
    keys = jax.random.split(jax.random.key(0), 8)
    shapes = {"params": {"w": (8, 8), "b": (8,)}, "slots": {"m": {"w": (8, 8), "none": (0, 8)}}}
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda x: type(x) is tuple)
    abstract["params"]["key"] = jax.ShapeDtypeStruct((8,), keys.dtype)
    abstract["global_step"] = jax.ShapeDtypeStruct((), jnp.int32)
    target = jstep.TrainState(**abstract)
    plain = saver.restore(target)
    assert np.asarray(plain.params["w"]).tolist() == np.arange(64.0).reshape(8, 8).tolist()
    step = 1
    for specs, *mesh in [
        ({(8, 8): P("x", "y"), (8,): P(("x", "y"))}, (4, 2), ("x", "y")),
        ({(8, 8): P(None, "x"), (8,): P("x"), (0, 8): P(None, "x")}, (8,), ("x",)),
        ({(8, 8): P("x")}, (2,), ("x",)),  # fewer devices, and replicas
        ({}, (8,), ("x",)),
    ]:
        wanted, shardings = placed(target, specs, *mesh)
        restored = saver.restore(wanted)  # from what other shardings wrote
        assert bits(restored) == bits(plain)
        for leaf, sharding in zip(jax.tree.leaves(restored), jax.tree.leaves(shardings), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.sharding, sharding, leaf.shape)
        # donation spares everyone else's memory, replicas included
        held = bits(restored)
        bump = jax.jit(lambda t: t.replace(params=t.params | {"w": t.params["w"] + 1}), donate_argnums=0)
        stepped = bump(restored)
        assert (np.asarray(stepped.params["w"]) == np.asarray(plain.params["w"]) + 1).all()
        assert all((np.asarray(s.data) == np.asarray(plain.params["w"])[s.index] + 1).all()
                   for s in stepped.params["w"].addressable_shards)
        step += 1
        saver.save(saver.restore(wanted).replace(global_step=jax.device_put(jnp.int32(step), shardings.global_step)))
        assert bits(saver.restore(target)) == bits(plain)
    # averages and their slot, from one array on disk to two places
    both = target.replace(slots={"ExponentialMovingAverage": {"w": target.params["w"]}})
    saver.save(both.replace(params=plain.params, global_step=jnp.int32(99),
                            slots={"ExponentialMovingAverage": {"w": plain.params["w"] * 2}}))
    wanted, shardings = placed(both, {(8, 8): P("x")}, (8,), ("x",))
    mixed = wanted.replace(slots=both.slots)
    for shapes in (wanted, mixed):
        back = saver.restore(shapes, use_averages=True)
        for leaf in (back.params["w"], back.slots["ExponentialMovingAverage"]["w"]):
            assert (np.asarray(leaf) == np.asarray(plain.params["w"]) * 2).all()
        back.params["w"].delete()
        assert not back.slots["ExponentialMovingAverage"]["w"].is_deleted()
    saver.save(jstep.TrainState({"b": jnp.ones(3)}, {}, jnp.int32(100)))
    uneven = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=wanted.params["w"].sharding.update(spec=P("x")))
    try:
        saver.restore(jstep.TrainState({"b": uneven}, {}, jnp.int32(0)))
    except ValueError as error:
        assert "'params/b' cannot be sharded as asked" in str(error), error
        print("done")
    """
    assert run(script, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=8") == ["done"]


def test_two_processes(tmp_path):
    """All take part, each with its shards; one keeps the directory; damage is found by all."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    script = """
    import glob
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    process, port = int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def everywhere(array, spec):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    def state(step):
        params = {"w": everywhere(np.arange(8.0, dtype=np.float32) + step, P("x")), "b": everywhere(np.ones(3), P())}
        return jstep.TrainState(params, {}, everywhere(np.int32(step), P()))

    saver = Saver(directory, max_to_keep=2)
    try:
        saver.save(state(0).replace(global_step=jnp.int32(0)))
    except ValueError as error:
        assert "'global_step' lies on one of 2 processes alone" in str(error), error
    for step in range(4):
        saver.save(state(step), extra={"step": step})
    assert saver.all_steps() == [2, 3] and saver.extra() == {"step": 3}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    back = saver.restore(shapes)
    own = back.params["w"].addressable_shards[0]
    assert np.asarray(own.data).tolist() == [3 + 4 * process + i for i in range(4)]
    assert saver.restore()["params"]["w"].tolist() == [3 + i for i in range(8)]
    multihost_utils.sync_global_devices("read")
    if process == 0:
        path = max(glob.glob(directory + "/model-3/ocdbt.process_1/d/*"), key=os.path.getsize)
        data = bytearray(open(path, "rb").read())
        data[len(data) // 2] ^= 1
        open(path, "wb").write(data)
    multihost_utils.sync_global_devices("damaged")
    try:
        saver.restore(shapes)
    except CheckpointError as error:
        assert "model-3" in str(error) and "newest step that is whole is 2" in str(error), error
        print("found")
    saver.close()
    """
    processes = [start(script, tmp_path, process, port) for process in range(2)]
    outputs = [end(process) for process in processes]
    assert [out[-1] for out in outputs] == ["found", "found"]
    assert sorted(os.listdir(tmp_path)) == ["model-2", "model-3"]
    with Saver(tmp_path) as saver:  # one process goes on with what two wrote
        assert saver.restore(step=2)["params"]["w"].tolist() == [2 + i for i in range(8)]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model-3")

"""Restoring onto other devices and shardings, and checkpoints of several processes."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_scripts import end, start
from checkpoint_states import as_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import free_address

import jstep
from jstep.array_store import array_writer
from jstep.checkpoint.names import latest_checkpoint
from jstep.checkpoint.saver import Saver


def shapes_and_shardings(tree, specs, shape, names):
    devices = jax.devices()[: np.prod(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, specs.get(leaf.shape, P())), tree)
    shapes = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings
    )
    return shapes, shardings


def bits(tree):
    return [as_bits(leaf) for leaf in jax.tree.leaves((tree.params, tree.slots))]


def test_restore_uses_the_shardings_of_the_target(tmp_path):
    keys = jax.random.split(jax.random.key(0), 8)
    params = {"w": jnp.arange(64.0).reshape(8, 8), "b": jnp.arange(8.0), "key": keys}
    state = jstep.TrainState.create(params, jstep.gradient_descent(0.1), global_step=1)
    state = state.replace(slots={"m": {"w": state.params["w"] + 1, "none": jnp.zeros((0, 8))}})
    with Saver(tmp_path) as saver:
        saver.save(state)
    saver = Saver(tmp_path)
    shapes = {"params": {"w": (8, 8), "b": (8,)}, "slots": {"m": {"w": (8, 8), "none": (0, 8)}}}
    abstract = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda x: type(x) is tuple
    )
    abstract["params"]["key"] = jax.ShapeDtypeStruct((8,), keys.dtype)
    abstract["global_step"] = jax.ShapeDtypeStruct((), jnp.int32)
    target = jstep.TrainState(**abstract)
    plain = saver.restore(target)
    assert np.asarray(plain.params["w"]).tolist() == np.arange(64.0).reshape(8, 8).tolist()
    step = 1
    for specs, *mesh in [
        ({(8, 8): P("x", "y"), (8,): P(("x", "y")), (0, 8): P(None, "x")}, (4, 2), ("x", "y")),
        ({(8, 8): P("x")}, (2,), ("x",)),  # fewer devices, and replicas
    ]:
        wanted, shardings = shapes_and_shardings(target, specs, *mesh)
        restored = saver.restore(wanted)  # saved with other shardings
        assert bits(restored) == bits(plain)
        for leaf, sharding in zip(
            jax.tree.leaves(restored), jax.tree.leaves(shardings), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (
                leaf.sharding,
                sharding,
                leaf.shape,
            )
        # arrays can really be donated, replicas included
        bump = jax.jit(
            lambda t: t.replace(params=t.params | {"w": t.params["w"] + 1}), donate_argnums=0
        )
        stepped = bump(restored)
        assert (np.asarray(stepped.params["w"]) == np.asarray(plain.params["w"]) + 1).all()
        assert all(
            (np.asarray(s.data) == np.asarray(plain.params["w"])[s.index] + 1).all()
            for s in stepped.params["w"].addressable_shards
        )
        step += 1
        saver.save(
            saver.restore(wanted).replace(
                global_step=jax.device_put(jnp.int32(step), shardings.global_step)
            )
        )
        assert bits(saver.restore(target)) == bits(plain)
    # parameters and the slot of averages are both read from one array on disk
    both = target.replace(slots={"ExponentialMovingAverage": {"w": target.params["w"]}})
    saver.save(
        both.replace(
            params=plain.params,
            global_step=jnp.int32(99),
            slots={"ExponentialMovingAverage": {"w": plain.params["w"] * 2}},
        )
    )
    wanted, shardings = shapes_and_shardings(both, {(8, 8): P("x")}, (8,), ("x",))
    mixed = wanted.replace(slots=both.slots)
    for shapes in (wanted, mixed):
        back = saver.restore(shapes, use_averages=True)
        for leaf in (back.params["w"], back.slots["ExponentialMovingAverage"]["w"]):
            assert (np.asarray(leaf) == np.asarray(plain.params["w"]) * 2).all()
        back.params["w"].delete()
        assert not back.slots["ExponentialMovingAverage"]["w"].is_deleted()
    saver.save(jstep.TrainState({"b": jnp.ones(3)}, {}, jnp.int32(100)))
    uneven = jax.ShapeDtypeStruct(
        (3,), jnp.float32, sharding=wanted.params["w"].sharding.update(spec=P("x"))
    )
    with pytest.raises(ValueError, match="'params/b' cannot be sharded as requested"):
        saver.restore(jstep.TrainState({"b": uneven}, {}, jnp.int32(0)))
    saver.close()


@pytest.fixture
def small_parts(monkeypatch):
    """Arrays are divided between replicas like those of 1 MiB and more."""
    monkeypatch.setattr(array_writer, "MIN_PART_BYTES", 32)
    array_writer._division.cache_clear()
    yield
    array_writer._division.cache_clear()


def test_what_is_small_is_not_divided_between_replicas(tmp_path):
    mesh = jax.make_mesh((8,), ("x",))
    sharding = NamedSharding(mesh, P())
    values = {f"w{i}": jax.device_put(jnp.ones((4, 1024)) * i, sharding) for i in range(20)}
    values["large"] = jax.device_put(jnp.ones((8, 2**18)), sharding)
    parts = {part.name: (part.part, len(part.values)) for part in array_writer.take(values)}
    assert parts == dict.fromkeys(values, ((4, 1024), 1)) | {"large": ((1, 2**18), 8)}


@pytest.mark.thorough(except_for=["AxisType.Explicit"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_chunks_are_those_of_orbax(tmp_path, kind, small_parts):
    """Shards are chunks, and replicas share the writing of theirs, also while the mesh is the
    current one."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    specs = {"replicated": P(), "rows": P("x"), "columns": P(None, "y"), "both": P("x", "y")}
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    state = {
        name: jax.device_put(values, NamedSharding(mesh, spec)) for name, spec in specs.items()
    }
    state["odd"] = jax.device_put(values.ravel()[:9], NamedSharding(mesh, P()))
    state["host"] = values
    state["global_step"] = jax.device_put(np.int32(1), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh), Saver(tmp_path) as saver:
        path = saver.save(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state)
    with ocp.StandardCheckpointer() as checkpointer:
        written, expected = (
            checkpointer.metadata(at).item_metadata.tree for at in (path, tmp_path / "orbax")
        )
    chunks = {name: leaf.storage.chunk_shape for name, leaf in written.items()}
    assert chunks == {name: leaf.storage.chunk_shape for name, leaf in expected.items()}
    assert chunks["replicated"] == (1, 8)
    restored = Saver(tmp_path).restore()
    assert all((restored[name] == np.asarray(leaf)).all() for name, leaf in state.items())


TWO = """
    import glob
    from jax.experimental import multihost_utils
    from jstep.array_store.array_reader import ArrayReader
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    process, address = int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, process)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def everywhere(array, spec):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    def state(step):
        params = {"w": everywhere(np.arange(8.0, dtype=np.float32) + step, P("x")), "b": everywhere(np.ones(3), P())}
        params["shared"] = everywhere(np.arange(4.0), P())  # each process writes a half
        params["large"] = everywhere(np.ones(8000), P("x"))  # not within a node of the database
        params["whole"] = everywhere(np.ones(2**19, np.float32), P())  # each process reads a half
        return jstep.TrainState(params, {}, everywhere(np.int32(step), P()))
"""  # noqa: E501


FAILS = """
    # A save that fails on one process fails on all: none hangs, nothing is published, and the next save succeeds.
    import contextlib
    from jstep.array_store import array_writer

    @contextlib.contextmanager
    def full(step):
        # The disk is full for the first process at the last file of a save, and for the second one at its arrays.
        if process == 0:
            pattern = f"*/model-{step}.*/manifest.json"
            with file_operations.before("open", pattern, file_operations.disk_is_full, mode="w"):
                yield
            return
        write = array_writer.write

        def failing(base, *args, **options):
            if f"model-{step}." in base["path"]:
                raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device")
            write(base, *args, **options)

        array_writer.write = failing
        yield
        array_writer.write = write

    directory = os.path.join(directory, "fails")
    saver = Saver(directory, max_to_keep=None)
    saver.save(state(1))
    for step, broken in ((2, 1), (4, 0)):
        saver.wait()
        try:
            with full(step) if process == broken else contextlib.nullcontext():
                saver.save(state(step))
                saver.save(state(step + 1))
        except CheckpointError as error:
            message = str(error)
            assert "No space left on device" in message and " needed, " in message, message
            assert process == broken or f"process {broken}: " in message, message
            print(step)
        saver.save(state(step + 1))
    assert saver.all_steps() == [1, 3, 5], saver.all_steps()
    saver.close()
"""  # noqa: E501


@pytest.mark.thorough
def test_two_processes(tmp_path):
    tmp_path = tmp_path / "lr=[0.1] **"
    tmp_path.mkdir()
    """Each process writes its shards, the first manages the directory, and all detect corruption
    and failures."""
    address = free_address()
    script = (
        TWO
        + """
    saver = Saver(directory, max_to_keep=2)
    try:
        saver.save(state(0).replace(global_step=jnp.int32(0)))
    except ValueError as error:
        assert "'global_step' is on only one of 2 processes" in str(error), error
    for step in range(4):
        saver.save(state(step), extra={"step": step})
    assert saver.all_steps() == [2, 3] and saver.extra() == {"step": 3}
    second = Saver(directory)
    for call in (lambda: second.save(state(9)), second.claim):
        try:
            call()
        except CheckpointError as error:  # on both processes, otherwise one would wait for the other
            assert ("one writer at a time" if process == 0 else "see the error of") in str(error), error
            print("refused")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    newest = state(3)
    with jax.transfer_guard("disallow"):  # the guards of the caller do not apply to jstep's own transfers
        saver.save(newest, extra={"step": 3})
        reads, read = [], ArrayReader.read
        ArrayReader.read = lambda reader, shardings: reads.append(shardings) or read(reader, shardings)
        back = saver.restore(shapes)
        ArrayReader.read = read
    assert reads[0]["params/whole"].shard_shape((2**19,)) == (2**18,)
    assert back.params["whole"].is_fully_replicated and np.asarray(back.params["whole"]).sum() == 2**19
    own = back.params["w"].addressable_shards[0]
    assert np.asarray(own.data).tolist() == [3 + 4 * process + i for i in range(4)]
    assert saver.restore()["params"]["w"].tolist() == [3 + i for i in range(8)]
    multihost_utils.sync_global_devices("read")
    if process == 0:
        path = max(glob.glob(glob.escape(directory) + "/model-3/ocdbt.process_1/d/*"), key=os.path.getsize)
        data = bytearray(open(path, "rb").read())
        data[len(data) // 2] ^= 1
        open(path, "wb").write(data)
    multihost_utils.sync_global_devices("corrupted")
    try:
        saver.restore(shapes)
    except CheckpointError as error:
        assert "model-3" in str(error) and "newest intact checkpoint is step 2" in str(error), error
        print("detected")
    saver.delete(3)
    assert saver.all_steps() == [2]
    print("deleted")
    saver.close()
    """  # noqa: E501
        + FAILS
    )
    processes = [start(script, tmp_path, process, address) for process in range(2)]
    outputs = [end(process) for process in processes]
    expected = ["refused", "refused", "detected", "deleted", "2", "4"]
    assert [out[-6:] for out in outputs] == [expected] * 2
    assert sorted(os.listdir(tmp_path)) == ["fails", "model-2"]
    assert sorted(os.listdir(tmp_path / "fails")) == ["model-1", "model-3", "model-5"]
    with Saver(tmp_path) as saver:  # one process restores what two saved
        assert saver.restore(step=2)["params"]["w"].tolist() == [2 + i for i in range(8)]
        assert saver.restore(step=2)["params"]["shared"].tolist() == [0, 1, 2, 3]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "model-2")


def test_arrays_that_are_not_read_in_place(tmp_path, monkeypatch, small_parts):
    """As on accelerators: replicas are divided on the devices, and copied to pinned memory; the
    state is donated."""
    monkeypatch.setattr(array_writer, "is_read_in_place", lambda sharding: False)
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    values = {
        name: jax.device_put(jnp.arange(64.0).reshape(8, 8) + i, NamedSharding(mesh, spec))
        for i, (name, spec) in enumerate({"all": P(), "rows": P("x"), "both": P("x", "y")}.items())
    }
    values["pinned"] = jax.device_put(
        values["rows"], values["rows"].sharding.with_memory_kind("pinned_host")
    )
    values["odd"] = jax.device_put(jnp.arange(7.0), NamedSharding(mesh, P()))
    values["one"] = jnp.arange(5.0)
    expected = {name: np.array(value) for name, value in values.items()}
    parts = {part.name: part.part for part in array_writer.take(values)}
    assert parts == {
        "all": (1, 8),
        "rows": (1, 8),
        "both": (2, 4),
        "pinned": (2, 8),
        "odd": (7,),
        "one": (5,),
    }
    with Saver(tmp_path) as saver:
        saver.save({"global_step": np.int32(1), **values})
        for value in values.values():
            value.delete()
        restored = saver.restore()
    assert all((restored[name] == value).all() for name, value in expected.items())

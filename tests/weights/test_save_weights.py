"""`save_weights`: names, transforms, shards, and atomic replacement of earlier files."""

import json
import os
import pathlib
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors_files import is_known, same

import jstep
from jstep.stores.owners import new_token, temporary_path
from jstep.weights import save, tensors
from jstep.weights.tensors import read_header

OLD = {name: np.full((4, 4), 1, np.float32) for name in "abc"}
NEW = {name: np.full((4, 4), 2, np.float32) for name in "abc"}


def listed(folder):
    return sorted(os.listdir(folder))


def shards(count, stem="model"):
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def loaded_values(folder):
    """Return the set of all values that a reader loads; raise if the files are inconsistent."""
    loaded = jstep.load_weights(folder, OLD)
    return {float(x) for leaf in loaded.values() for x in leaf.ravel()}


def metadata_of(path):
    with safe_open(path, framework="numpy") as file:
        return file.metadata()


def test_names_and_metadata(tmp_path):
    params = {
        "w": np.arange(6.0).reshape(2, 3),
        "b": jnp.ones(2, jnp.bfloat16),
        "cache": jnp.zeros(3),
    }
    names = {"w": ("layer.weight", np.transpose), "cache": None}
    path = jstep.save_weights(tmp_path / "m.safetensors", params, names)
    assert metadata_of(path) == {"format": "pt"}
    assert {name: (t.code, t.shape) for name, t in read_header(path).items()} == {
        "layer.weight": ("F64", (3, 2)),
        "b": ("BF16", (2,)),
    }
    assert path == str(tmp_path / "m.safetensors")
    assert os.path.getsize(path) % 8 == (-2 * 2) % 8
    jstep.save_weights(path, params, names, {"format": "np", "übung": "✓"})
    assert metadata_of(path) == {"format": "np", "übung": "✓"}
    jstep.save_weights(path, params, names, {})
    assert not metadata_of(path)


def test_a_save_that_is_refused_leaves_nothing(tmp_path):
    for names, metadata in (({"b": "a"}, None), (None, {"a": 1})):
        with pytest.raises((TypeError, ValueError)):
            jstep.save_weights(tmp_path / "x", OLD, names, metadata)
    assert listed(tmp_path) == []


def test_a_transform_makes_a_leaf_one_that_can_be_stored(tmp_path):
    jstep.save_weights(
        tmp_path / "x", {"a": jnp.ones(3, jnp.int4)}, {"a": ("a", lambda x: x.astype(np.int8))}
    )
    assert jstep.load_weights(tmp_path / "x", {"a": np.zeros(3, np.int8)})["a"].tolist() == [
        1,
        1,
        1,
    ]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_params(tmp_path, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    w = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    specs = {"a": P("data"), "b": P(None, "model"), "c": P(("data", "model")), "d": P()}
    params = {
        name: jax.device_put(w + i, NamedSharding(mesh, spec))
        for i, (name, spec) in enumerate(specs.items())
    }
    for context in (jax.set_mesh(mesh), jax.numpy_dtype_promotion("strict")):
        with context:
            jstep.save_weights(tmp_path / "x", params, {"a": ("t", np.transpose)})
            loaded = jstep.load_weights(tmp_path / "x", params, {"a": ("t", np.transpose)})
        for i, name in enumerate(specs):
            assert same(loaded[name], w + i)
            assert loaded[name].sharding == params[name].sharding


# Shards.


def test_shards_are_named_like_those_of_hugging_face(tmp_path):
    params = {
        "a": np.zeros(10, np.float32),
        "b": np.zeros(100, np.float32),
        "c": np.zeros(5, np.float32),
        "d": 1,
    }
    path = jstep.save_weights(tmp_path / "model.safetensors", params, max_shard_bytes=64)
    assert listed(tmp_path) == [*shards(3), "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 464}
    one, two, three = shards(3)
    assert index["weight_map"] == {"a": one, "b": two, "c": three, "d": three}
    assert path == str(tmp_path / "model.safetensors.index.json")
    for location in (path, tmp_path, tmp_path / "model.safetensors"):
        loaded = jstep.load_weights(location, params)
        assert all(same(loaded[name], params[name]) for name in "abc")
    for wrong in (0, -1, "5GB", 2.5, None, True):
        with pytest.raises((TypeError, ValueError), match="max_shard_bytes="):
            jstep.save_weights(tmp_path / "x", params, max_shard_bytes=wrong)


KINDS = {"one": 10**9, "two": 128, "three": 64}


@pytest.mark.thorough(except_for=["two-two"])
@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_a_failed_save_keeps_the_earlier_one(tmp_path, before, after, monkeypatch):
    path = tmp_path / "model.safetensors"
    jstep.save_weights(path, OLD, max_shard_bytes=KINDS[before])
    files = listed(tmp_path)
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        for fails_at in range(1, 12):
            calls = []

            def failing(*args, real=real, calls=calls, fails_at=fails_at):
                calls.append(args)
                if len(calls) == fails_at:
                    raise OSError(28, "No space left on device")
                return real(*args)

            with monkeypatch.context() as patch:
                patch.setattr(os, name, failing)
                try:
                    jstep.save_weights(path, NEW, max_shard_bytes=KINDS[after])
                except OSError:
                    if loaded_values(tmp_path) == {1.0}:
                        assert listed(tmp_path) == files
                        continue
            # Once the index refers to the new files, they are the weights, whatever their names.
            assert loaded_values(tmp_path) == {2.0}
            jstep.save_weights(path, OLD, max_shard_bytes=KINDS[before])
            assert listed(tmp_path) == files


@pytest.mark.parametrize("size", [10**9, 64])
def test_a_first_save_that_fails_leaves_nothing(tmp_path, size, monkeypatch):
    """Also if only the flush of the folder fails, when all files have their names."""
    counts = []
    for fails_at in range(10):
        calls = []

        def flush(folder, calls=calls, fails_at=fails_at):
            calls.append((folder, len(listed(folder))))
            if len(calls) == fails_at + 1:
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(save, "sync_directory", flush)
        try:
            jstep.save_weights(tmp_path / "model.safetensors", NEW, max_shard_bytes=size)
        except OSError:
            assert listed(tmp_path) == []
            counts.append(calls[-1][1])
            continue
        break
    assert counts == ([1] if size > 64 else [4, 4])
    assert loaded_values(tmp_path) == {2.0}


def test_a_reader_never_loads_a_mix_of_two_saves(tmp_path, monkeypatch):
    """This holds between any two file operations, wherever the process may be killed."""
    loaded = []

    def look():
        # If both saves are complete, the folder is ambiguous, but an index or a file is not.
        for location in ("model.safetensors.index.json", "model.safetensors"):
            if (tmp_path / location).exists():
                loaded.append(loaded_values(tmp_path / location))
        assert loaded or not any(name.endswith(".json") for name in listed(tmp_path))

    for name in ("replace", "remove"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real: (look(), real(*args), look()))
    for before in KINDS:
        for after in KINDS:
            for params, size in ((OLD, before), (NEW, after)):
                jstep.save_weights(
                    tmp_path / "model.safetensors", params, max_shard_bytes=KINDS[size]
                )
    assert len(loaded) > 50
    assert {1.0} in loaded
    assert {2.0} in loaded
    assert {1.0, 2.0} not in loaded


def test_temporary_files_of_dead_processes_are_removed(tmp_path):
    place, pid, _, end = new_token().split("-")
    dead = f"{place}-{pid}-1-{end}"  # of a process that had the same PID
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        *shards(2),
        "other.safetensors",
    ):
        pathlib.Path(temporary_path(str(tmp_path / name), dead)).touch()
    jstep.save_weights(tmp_path / "model.safetensors", OLD)
    assert listed(tmp_path) == [f".other.safetensors.{dead}.tmp", "model.safetensors"]


def test_file_modes_follow_the_umask(tmp_path):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try:
            jstep.save_weights(tmp_path / "model.safetensors", OLD, max_shard_bytes=64)
        finally:
            os.umask(before)
        modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in listed(tmp_path)}
        assert modes == {mode}
        for path in tmp_path.iterdir():  # one that is replaced keeps its permissions
            path.unlink()


def test_paths(tmp_path, monkeypatch):
    jstep.save_weights(tmp_path / "new" / "folder" / "x.safetensors", OLD)
    assert listed(tmp_path / "new" / "folder") == ["x.safetensors"]
    with pytest.raises(IsADirectoryError, match="must be a file"):
        jstep.save_weights(tmp_path, OLD)
    with pytest.raises(ValueError, match="must be a file for tensors"):
        jstep.save_weights(tmp_path / "model.safetensors.index.json", OLD)
    monkeypatch.chdir(tmp_path)
    assert jstep.save_weights("here.safetensors", OLD) == "here.safetensors"
    assert loaded_values("here.safetensors") == {1.0}
    os.symlink("here.safetensors", "link.safetensors")
    jstep.save_weights("link.safetensors", NEW)
    assert os.path.islink("link.safetensors")
    assert loaded_values("here.safetensors") == loaded_values("link.safetensors") == {2.0}


# Round trips of every dtype, bitwise, with jstep, the safetensors package, and PyTorch.

FLOATS = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2]
FLOATS += [jnp.float8_e8m0fnu, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz]
INTEGERS = [jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.uint16, jnp.uint32]
ALL = [*FLOATS, *INTEGERS, jnp.complex64]
WIDE = [np.int64, np.uint64, np.float64]
KNOWN = [dtype for dtype in ALL if is_known(dtype)]


def random_bits(dtype, shape):
    """Return an array of random bits, which include NaNs with any payload, infinities and
    subnormals."""
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(0).integers(
        0, 256, np.prod(shape, dtype=int) * dtype.itemsize, np.uint8
    )
    return bits.view(dtype).reshape(shape)


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("dtype", KNOWN, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (8, 24), (0, 3)], ids=str)
def test_round_trips_are_bitwise(tmp_path, dtype, shape):
    array = random_bits(dtype, shape)
    mesh = jax.make_mesh((8,), ("data",))
    specs = [P(), P("data"), P(None, "data")] if shape == (8, 24) else [P()]
    for spec in specs:
        placed = jax.device_put(array, NamedSharding(mesh, spec))
        path = jstep.save_weights(tmp_path / "model.safetensors", {"x": placed, "n": np.int8(3)})
        assert same(jstep.load_weights(path, {"x": placed, "n": np.int8(0)})["x"], array)
        shapes = {"x": jax.ShapeDtypeStruct(shape, dtype), "n": jax.ShapeDtypeStruct((), np.int8)}
        loaded = jstep.load_weights(path, shapes)
        assert same(loaded["x"], array)
        assert same(loaded["n"], np.int8(3))


def test_dtypes_that_the_package_lacks_are_not_written(tmp_path, monkeypatch):
    """Safetensors 0.5, the lowest version, lacks four; the newest one has all, so it is given a
    code that none has."""
    assert {np.dtype(dtype).itemsize for dtype in set(ALL) - set(KNOWN)} <= {1, 8}
    lacking = [random_bits(dtype, (2,)) for dtype in set(ALL) - set(KNOWN)]
    monkeypatch.setattr(
        tensors, "_DTYPES", {**tensors._DTYPES, "F32": np.dtype(">f2"), "F99": np.dtype("float32")}
    )
    for array in [*lacking, np.ones(2, np.float32)]:
        with pytest.raises(ValueError, match=r"newer versions know more dtypes"):
            jstep.save_weights(tmp_path / "model.safetensors", {"x": array})
    assert listed(tmp_path) == []


@pytest.mark.parametrize("dtype", [bool, *WIDE], ids=lambda dtype: np.dtype(dtype).name)
def test_round_trips_of_bools_and_64_bits(tmp_path, dtype):
    array = (
        random_bits(np.uint8, (3, 16)).view(np.int64).astype(bool)
        if dtype is bool
        else random_bits(dtype, (3, 2))
    )
    path = jstep.save_weights(tmp_path / "x", {"x": array})
    assert same(jstep.load_weights(path, {"x": array})["x"], array)
    with jax.enable_x64(True):
        target = {"x": jax.ShapeDtypeStruct(array.shape, array.dtype)}
        loaded = jstep.load_weights(path, target)["x"]
        assert same(loaded, array)
        assert same(
            jstep.load_weights(jstep.save_weights(path, {"x": loaded}), {"x": array})["x"], array
        )


def test_safetensors_reads_files_of_jstep(tmp_path):
    arrays = {f"layer.{np.dtype(dtype).name}": random_bits(dtype, (3, 5)) for dtype in KNOWN}
    path = jstep.save_weights(tmp_path / "model.safetensors", arrays, max_shard_bytes=10**6)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(arrays)
        for name, array in arrays.items():
            assert tuple(file.get_slice(name).get_shape()) == array.shape
    raw = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    assert all(bytes(raw[name]["data"]) == array.tobytes() for name, array in arrays.items())


def test_jstep_reads_files_of_safetensors(tmp_path):
    arrays = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "n": np.array(5),
        "mask": np.array([True, False, True]),
        "half": np.ones((2, 2), np.float16),
        "é/ü": np.zeros((0, 2), np.uint8),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", {"epoch": "3"})
    loaded = jstep.load_weights(tmp_path, arrays)
    assert all(same(loaded[name], array) for name, array in arrays.items())


@pytest.mark.thorough
def test_round_trips_of_float8_and_bfloat16_with_torch(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    kinds = {
        "bfloat16": jnp.bfloat16,
        "float8_e4m3fn": jnp.float8_e4m3fn,
        "float8_e5m2": jnp.float8_e5m2,
    }
    tensors = {
        name: torch.linspace(-3, 3, 24).reshape(4, 6).to(getattr(torch, name)) for name in kinds
    }
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    shapes = {name: jax.ShapeDtypeStruct((4, 6), dtype) for name, dtype in kinds.items()}
    loaded = jstep.load_weights(tmp_path / "theirs.safetensors", shapes)
    reloaded = load_file(jstep.save_weights(tmp_path / "ours.safetensors", loaded))
    for name, tensor in tensors.items():
        assert np.asarray(loaded[name]).tobytes() == tensor.view(torch.uint8).numpy().tobytes()
        assert torch.equal(reloaded[name].view(torch.uint8), tensor.view(torch.uint8))
    as_floats = jstep.load_weights(tmp_path / "theirs.safetensors", shapes, dtype=np.float32)
    assert all(
        (np.asarray(as_floats[name]) == tensor.float().numpy()).all()
        for name, tensor in tensors.items()
    )

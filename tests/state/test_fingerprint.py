"""`fingerprint` of a tree: what changes it, what does not, and where it can be computed."""

import collections
import contextlib
import functools
import json
import sys

import golden_fingerprints
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_fingerprints import hexadecimal, texts
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jstep
from jstep.state import fingerprints
from jstep.state.fingerprints import LeafFingerprints, as_hexadecimal, stacked_words

PLAIN = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "complex64"]
LOW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int4", "uint4", "int2"]
DTYPES = [*map(np.dtype, PLAIN), *(np.dtype(getattr(ml_dtypes, name)) for name in LOW)]
WIDE = [np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")]


def text(tree, **kwargs):
    return as_hexadecimal(jstep.fingerprint(tree, **kwargs))


def array(dtype, shape=(3, 4, 5), seed=0):
    values = np.random.default_rng(seed).integers(0, 2 if dtype.name in ("bool", "int2") else 6, shape)
    return values.astype(np.float32).astype(dtype)


def leaves(tree):
    return {path: as_hexadecimal(pair) for path, pair in jstep.fingerprint(tree, per_leaf=True).items()}


def in_jit(tree):
    return {
        path: as_hexadecimal(pair)
        for path, pair in jax.jit(lambda x: jstep.fingerprint(x, per_leaf=True))(tree).items()
    }


def test_known_fingerprints():
    """Runs of different releases are compared by them."""
    tree = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "é": {"b": np.int8([-1, 2])}}
    assert np.asarray(jstep.fingerprint(tree)).tolist() == [2259091519, 2756746476]
    by_leaf = {path: np.asarray(pair).tolist() for path, pair in jstep.fingerprint(tree, per_leaf=True).items()}
    assert by_leaf == {"w": [349441056, 1413406919], "é/b": [1909650463, 1343339557]}


@pytest.mark.thorough(except_for=["few"])
@pytest.mark.parametrize("dtypes", [DTYPES, [DTYPES[i] for i in (0, 5, 8, 10, 14)]], ids=["all", "few"])
def test_numpy_jax_and_jit_agree(dtypes):
    arrays = {str(dtype): array(dtype) for dtype in dtypes}
    on_device = jax.tree.map(jnp.asarray, arrays)
    assert leaves(arrays) == leaves(on_device) == in_jit(on_device)


def test_64_bits_agree_with_and_without_x64(x64):
    arrays = {str(one): array(one) / one.type(7) if one.kind in "fc" else array(one) for one in WIDE}
    on_device = jax.tree.map(jnp.asarray, arrays)
    assert leaves(arrays) == leaves(on_device) == in_jit(on_device)
    with jax.enable_x64(False):
        assert leaves(on_device) == leaves(arrays)


def test_depends_on_paths_shapes_dtypes_and_values_only():
    w, b = np.arange(6, dtype=np.float32), np.zeros((0, 3), np.int32)
    tree = {"w": w, "b": b}
    Pair = collections.namedtuple("Pair", "w b")
    assert text(tree) == text({"b": b, "w": w}) == text(Pair(jnp.asarray(w), b)) == text(collections.OrderedDict(tree))
    assert text(tree) == text({"w": w.astype(">f4"), "b": b, "none": None})
    different = [
        {"w": w.reshape(2, 3), "b": b},
        {"v": w, "b": b},
        {"w": w.view(np.int32), "b": b},
        {"w": w[::-1], "b": b},
        {"w": w, "b": b.reshape(3, 0)},
        {"w": w},
        {"w": np.where(w == 0, np.float32(-0.0), w), "b": b},
    ]
    assert len({text(one) for one in [tree, *different]}) == len(different) + 1
    assert text({}) == text(None) == "0" * 16


def test_prng_keys_differ_by_implementation_and_value():
    fry, rbg = jax.random.key(0), jax.random.key(0, impl="rbg")
    assert len({text(fry), text(rbg), text(jax.random.key(1)), text(jax.random.key_data(fry))}) == 4


def test_shards_are_not_gathered():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    program = jax.jit(jstep.fingerprint).lower({"x": x}).compile().as_text()
    assert "f32[1024,64]" not in program


def test_leaves_on_two_meshes_of_the_same_devices():
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    auto = (AxisType.Auto,)
    meshes = jax.make_mesh((4, 2), ("a", "b"), axis_types=2 * auto), jax.make_mesh((8,), ("c",), axis_types=auto)
    tree = {"a": jax.device_put(x, NamedSharding(meshes[0], PartitionSpec("b")))}
    tree |= {"c": jax.device_put(x + 1, NamedSharding(meshes[1], PartitionSpec("c")))}
    expected = {"a": x, "c": x + 1}
    assert text(tree) == text(expected)
    found, of_host = jstep.fingerprint(tree, per_leaf=True), jstep.fingerprint(expected, per_leaf=True)
    assert {path: as_hexadecimal(pair) for path, pair in found.items()} == {
        p: as_hexadecimal(pair) for p, pair in of_host.items()
    }


def test_large_host_arrays_are_processed_in_chunks():
    x = np.random.default_rng(0).integers(0, 2**16, 2**15 * 2 + 3).astype(np.uint16)
    assert text(x) == text(jnp.asarray(x))


def test_huge_arrays_are_indexed_by_row(monkeypatch):
    def split_at(shape):
        return shape[-1]

    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    unsplit = text(x)
    monkeypatch.setattr(fingerprints, "indexable_size", split_at)
    assert text(x) == as_hexadecimal(jax.jit(jstep.fingerprint)(x)) != unsplit


def test_a_donated_tree():
    x = jnp.arange(3.0)
    x.delete()
    with pytest.raises(RuntimeError, match="'x' was donated"):
        jstep.fingerprint({"x": x})


# The programs of fingerprints: how many are compiled, what they hold, and their bits.

KNOWN = json.loads(golden_fingerprints.PATH.read_text())


def on_devices(tree, place=jnp.asarray):
    return jax.tree.map(place, tree)


def test_recorded_fingerprints_in_host_memory():
    assert {name: texts(tree) for name, tree in golden_fingerprints.trees().items()} == {
        name: KNOWN[name] for name in golden_fingerprints.trees()
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [*golden_fingerprints.PLAIN, *golden_fingerprints.LOW, *golden_fingerprints.NARROW, "state"]
)
def test_recorded_fingerprints_of_jax_arrays(name):
    tree = on_devices(golden_fingerprints.trees()[name])
    assert texts(tree) == KNOWN[name]
    assert hexadecimal(jax.jit(jstep.fingerprint)(tree)) == KNOWN[name][""]
    committed = on_devices(tree, lambda leaf: jax.device_put(leaf, jax.devices()[3]))
    assert texts(committed) == KNOWN[name]


@pytest.mark.thorough
def test_recorded_fingerprints_of_64_bits(x64):
    for name in golden_fingerprints.WIDE:
        assert texts(jax.tree.map(jnp.asarray, golden_fingerprints.trees()[name])) == KNOWN[name]


@pytest.mark.thorough
def test_recorded_fingerprints_of_keys():
    for name, tree in golden_fingerprints.key_trees().items():
        assert texts(tree) == KNOWN[name]


@pytest.mark.thorough
def test_small_leaves_of_a_shape_are_read_together(monkeypatch):
    """A call costs more than reading them; the last group of a shape overlaps the one before."""
    host = {f"w{i}": np.full((i % 2 + 2, 5), i + 1, np.float32) for i in range(90)} | {"n": np.float32(np.nan)}
    tree, calls = on_devices(host), []
    computing_on = fingerprints.computing_on

    @contextlib.contextmanager
    def counting(mesh):
        with computing_on(mesh) as compiled:
            yield lambda fn: lambda *args: calls.append(fn) or compiled(fn)(*args)

    monkeypatch.setattr(fingerprints, "computing_on", counting)
    assert hexadecimal(jstep.fingerprint(tree)) == hexadecimal(jstep.fingerprint(host))
    assert len(calls) == 2 * 3 + 1 + 1
    monkeypatch.undo()
    assert texts(tree) == texts(host)


def test_fingerprints_of_one_state_after_another(request):
    """What is computed once follows their structure, shapes, dtypes and placement; few calls are made for each leaf."""
    request.addfinalizer(functools.partial(sys.setprofile, sys.getprofile()))
    mesh, one = (jax.make_mesh((size,), ("a",), axis_types=(AxisType.Explicit,)) for size in (4, 1))
    host = {f"w{i}": np.full((8, 3), i, np.float32) for i in range(100)}
    states = [on_devices(host), on_devices({name: array + 1 for name, array in host.items()})]
    states += [jax.device_put(host, NamedSharding(where, PartitionSpec("a"))) for where in (mesh, one)]
    states += [jax.device_put(host, jax.devices()[3]), on_devices(host | {"w0": np.ones(5, np.int8)})]
    states += [on_devices(host | {"more": np.ones(5)}), host, on_devices(host)]
    hashes = LeafFingerprints(states[0])
    for state in states:
        started = hashes.start(state)
        found = dict(zip(started.paths, fingerprints.all_as_hexadecimal(stacked_words(started.groups)), strict=True))
        assert found == leaves(state)
    calls = []
    sys.setprofile(lambda _, event, __: calls.append(event))
    hashes.start(states[-1])
    sys.setprofile(None)
    assert sum(event in ("call", "c_call") for event in calls) < 5 * len(host)
    states[-1]["w3"].delete()
    with pytest.raises(RuntimeError, match="'w3' was donated"):
        hashes.start(states[-1])


def on_mesh(kind):
    """A tree on a mesh: specs, dtypes and ranks of all kinds, leaves of the same shape placed otherwise, and keys."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    random = np.random.default_rng(0)
    P = PartitionSpec
    specs = [P(), P("a"), P(None, "b"), P(("a", "b")), P("b", "a"), P(("b", "a"), None), P(None, ("a", "b"))]
    dtypes = [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64, jnp.uint16, jnp.float8_e4m3fn]
    tree = {
        f"{i}": jax.device_put(jnp.asarray(random.normal(size=(16, 8 + 8 * (i % 2)))).astype(dtypes[i % 7]), place)
        for i in range(21)
        for place in [NamedSharding(mesh, specs[i // 3])]
    }
    tree |= {
        f"deep/{i}": jax.device_put(random.normal(size=(3, 8, 2)).astype("f"), NamedSharding(mesh, P(None, "a", "b")))
        for i in range(20)
    }
    tree["keys"] = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("a")))
    tree["scalar"] = jax.device_put(jnp.float32(3), NamedSharding(mesh, P()))
    tree["empty"] = jax.device_put(jnp.zeros((0, 8)), NamedSharding(mesh, P(None, "a")))
    tree["large"] = jax.device_put(jnp.arange(2.0**16).reshape(256, 256), NamedSharding(mesh, P("b", "a")))
    return mesh, tree | {"anywhere": jnp.arange(4.0), "host": np.arange(5)}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh_the_bits_are_those_of_one_device(kind):
    _, tree = on_mesh(kind)
    one_device = {
        name: leaf if isinstance(leaf, np.ndarray) else jax.device_put(leaf, jax.devices()[0])
        for name, leaf in tree.items()
    }
    assert texts(tree) == texts(one_device)
    assert {
        path: hexadecimal(one) for path, one in jax.jit(lambda: jstep.fingerprint(one_device, per_leaf=True))().items()
    } == {path: text for path, text in texts(tree).items() if path}

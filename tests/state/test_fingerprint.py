"""`fingerprint` of a tree: what changes it, what does not, and where it can be computed."""

import collections
import contextlib
import functools
import json
import sys

import golden_fingerprints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_fingerprints import hexadecimal, texts
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jstep
from jstep.state import fingerprints
from jstep.state.fingerprints import LeafFingerprints, stacked_words


def text(tree):
    return hexadecimal(jstep.fingerprint(tree))


def leaves(tree, transform=lambda fn: fn):
    found = transform(lambda tree: jstep.fingerprint(tree, per_leaf=True))(tree)
    return {path: hexadecimal(pair) for path, pair in found.items()}


def arrays_of(*dtypes):
    return {name: golden_fingerprints.array(name, (3, 4, 5)) for name in dtypes}


def test_known_fingerprints():
    """Runs of different releases are compared by them."""
    tree = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "é": {"b": np.int8([-1, 2])}}
    assert np.asarray(jstep.fingerprint(tree)).tolist() == [2259091519, 2756746476]
    by_leaf = {
        path: np.asarray(pair).tolist()
        for path, pair in jstep.fingerprint(tree, per_leaf=True).items()
    }
    assert by_leaf == {"w": [349441056, 1413406919], "é/b": [1909650463, 1343339557]}


def test_numpy_jax_and_jit_agree():
    arrays = arrays_of("bool", "int32", "float32", "bfloat16", "int4")
    on_device = jax.tree.map(jnp.asarray, arrays)
    assert leaves(arrays) == leaves(on_device) == leaves(on_device, jax.jit)


def test_64_bits_agree_with_and_without_x64(x64):
    arrays = arrays_of(*golden_fingerprints.WIDE)
    on_device = jax.tree.map(jnp.asarray, arrays)
    assert leaves(arrays) == leaves(on_device) == leaves(on_device, jax.jit)
    with jax.enable_x64(False):
        assert leaves(on_device) == leaves(arrays)


def test_depends_on_paths_shapes_dtypes_and_values_only():
    w, b = np.arange(6, dtype=np.float32), np.zeros((0, 3), np.int32)
    tree = {"w": w, "b": b}
    Pair = collections.namedtuple("Pair", "w b")
    assert (
        text(tree)
        == text({"b": b, "w": w})
        == text(Pair(jnp.asarray(w), b))
        == text(collections.OrderedDict(tree))
    )
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
    x = jax.ShapeDtypeStruct(
        (1024, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    program = jax.jit(jstep.fingerprint).lower({"x": x}).compile().as_text()
    assert "f32[1024,64]" not in program


def test_leaves_on_two_meshes_of_the_same_devices():
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    auto = (AxisType.Auto,)
    meshes = (
        jax.make_mesh((4, 2), ("a", "b"), axis_types=2 * auto),
        jax.make_mesh((8,), ("c",), axis_types=auto),
    )
    tree = {"a": jax.device_put(x, NamedSharding(meshes[0], PartitionSpec("b")))}
    tree |= {"c": jax.device_put(x + 1, NamedSharding(meshes[1], PartitionSpec("c")))}
    expected = {"a": x, "c": x + 1}
    assert text(tree) == text(expected)
    assert leaves(tree) == leaves(expected)


def test_huge_arrays_are_indexed_by_row(monkeypatch):
    def split_at(shape):
        return shape[-1]

    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    unsplit = text(x)
    monkeypatch.setattr(fingerprints, "indexable_size", split_at)
    assert text(x) == hexadecimal(jax.jit(jstep.fingerprint)(x)) != unsplit


def test_a_donated_tree():
    x = jnp.arange(3.0)
    x.delete()
    with pytest.raises(RuntimeError, match="'x' was donated"):
        jstep.fingerprint({"x": x})


# The programs of fingerprints: how many are compiled, what they hold, and their bits.

KNOWN = json.loads(golden_fingerprints.PATH.read_text())


def test_recorded_fingerprints_in_host_memory():
    assert {name: texts(tree) for name, tree in golden_fingerprints.trees().items()} == {
        name: KNOWN[name] for name in golden_fingerprints.trees()
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [*golden_fingerprints.PLAIN, *golden_fingerprints.LOW, *golden_fingerprints.NARROW, "state"],
)
def test_recorded_fingerprints_of_jax_arrays(name):
    tree = jax.tree.map(jnp.asarray, golden_fingerprints.trees()[name])
    assert texts(tree) == KNOWN[name]
    assert hexadecimal(jax.jit(jstep.fingerprint)(tree)) == KNOWN[name][""]
    assert texts(jax.device_put(tree, jax.devices()[3])) == KNOWN[name]


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
    host = {f"w{i}": np.full((i % 2 + 2, 5), i + 1, np.float32) for i in range(90)} | {
        "n": np.float32(np.nan)
    }
    tree, calls = jax.tree.map(jnp.asarray, host), []
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
    """What is computed once follows their structure, shapes, dtypes and placement; few calls are
    made for each leaf."""
    request.addfinalizer(functools.partial(sys.setprofile, sys.getprofile()))
    mesh, one = (jax.make_mesh((size,), ("a",), axis_types=(AxisType.Explicit,)) for size in (4, 1))
    host = {f"w{i}": np.full((8, 3), i, np.float32) for i in range(100)}
    states = [{name: jnp.asarray(array + i) for name, array in host.items()} for i in range(2)]
    states += [
        jax.device_put(host, NamedSharding(where, PartitionSpec("a"))) for where in (mesh, one)
    ]
    states += [jax.device_put(host, jax.devices()[3]), states[0] | {"w0": jnp.ones(5, jnp.int8)}]
    states += [states[0] | {"more": jnp.ones(5)}, host, jax.tree.map(jnp.copy, states[0])]
    hashes = LeafFingerprints(states[0])
    for state in states:
        started = hashes.start(state)
        found = dict(
            zip(
                started.paths,
                fingerprints.all_as_hexadecimal(stacked_words(started.groups)),
                strict=True,
            )
        )
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
    """A tree on a mesh: specs, dtypes and ranks of all kinds, leaves of the same shape placed
    otherwise, and keys."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    random = np.random.default_rng(0)
    P = PartitionSpec
    specs = [
        P(), P("a"), P(None, "b"), P(("a", "b")), P("b", "a"), P(("b", "a"), None),
        P(None, ("a", "b")),
    ]  # fmt: skip
    dtypes = [
        jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64, jnp.uint16,
        jnp.float8_e4m3fn,
    ]  # fmt: skip
    tree = {
        f"{i}": jax.device_put(
            jnp.asarray(random.normal(size=(16, 8 + 8 * (i % 2)))).astype(dtypes[i % 7]), place
        )
        for i in range(21)
        for place in [NamedSharding(mesh, specs[i // 3])]
    }
    tree |= {
        f"deep/{i}": jax.device_put(
            random.normal(size=(3, 8, 2)).astype("f"), NamedSharding(mesh, P(None, "a", "b"))
        )
        for i in range(20)
    }
    tree["keys"] = jax.device_put(
        jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("a"))
    )
    tree["scalar"] = jax.device_put(jnp.float32(3), NamedSharding(mesh, P()))
    tree["empty"] = jax.device_put(jnp.zeros((0, 8)), NamedSharding(mesh, P(None, "a")))
    tree["large"] = jax.device_put(
        jnp.arange(2.0**16).reshape(256, 256), NamedSharding(mesh, P("b", "a"))
    )
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
    in_jit = jax.jit(lambda: jstep.fingerprint(one_device, per_leaf=True))()
    assert {path: hexadecimal(pair) for path, pair in in_jit.items()} == leaves(tree)

"""The programs of fingerprints: how many are compiled, what they hold, and their bits."""

import json

import golden_fingerprints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_fingerprints import hexadecimal, texts
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jstep
from jstep.state import fingerprints

KNOWN = json.loads(golden_fingerprints.PATH.read_text())


def on_devices(tree, place=jnp.asarray):
    return jax.tree.map(place, tree)


def test_recorded_fingerprints_in_host_memory():
    assert {name: texts(tree) for name, tree in golden_fingerprints.trees().items()} == {
        name: KNOWN[name] for name in golden_fingerprints.trees()
    }


@pytest.mark.thorough(except_for=["state"])
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


def test_small_leaves_of_a_shape_are_read_together(monkeypatch):
    """A call costs more than reading them; the last group of a shape overlaps the one before."""
    host = {f"w{i}": np.full((i % 2 + 2, 5), i + 1, np.float32) for i in range(90)} | {"n": np.float32(np.nan)}
    tree, calls = on_devices(host), []
    compute_on = fingerprints.compute_on
    monkeypatch.setattr(fingerprints, "compute_on", lambda *args: calls.append(args) or compute_on(*args))
    assert hexadecimal(jstep.fingerprint(tree)) == hexadecimal(jstep.fingerprint(host))
    assert len(calls) == 2 * 3 + 1 + 2
    monkeypatch.undo()
    assert texts(tree) == texts(host)


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


def test_on_a_mesh_each_device_reads_its_own_copy():
    """A copy that differs changes the fingerprint of its device alone; parts are summed over the axes that split."""
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    place = NamedSharding(mesh, PartitionSpec("a"))
    copies = [jax.device_put(np.full(2, 1.0 + (i == 5), "f"), device) for i, device in enumerate(mesh.devices.flat)]
    tree = {
        "w": jax.make_array_from_single_device_arrays((8,), place, copies),
        "v": jax.device_put(np.ones(8, "f"), place),
    }
    words = fingerprints.by_device(tree).words()
    values = [tuple(map(tuple, words[device])) for device in mesh.devices.flat]
    assert len({one[0] for one in values}) == 1  # v
    column = [one[1] for one in values]
    assert len(set(column[1::2])) == len(set(column[::2])) == 1
    assert column[0] != column[1]

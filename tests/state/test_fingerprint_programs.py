"""The programs of fingerprints: how many are compiled, what they hold, and their bits."""

import json

import golden_fingerprints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_fingerprints import hexadecimal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jstep
from jstep.state import fingerprints

KNOWN = json.loads(golden_fingerprints.PATH.read_text())


def texts(tree):
    leaves = jstep.fingerprint(tree, per_leaf=True)
    return {"": hexadecimal(jstep.fingerprint(tree)), **{path: hexadecimal(one) for path, one in leaves.items()}}


def on_devices(tree, place=jnp.asarray):
    return jax.tree.map(place, tree)


def test_recorded_fingerprints_in_host_memory():
    assert {name: texts(tree) for name, tree in golden_fingerprints.trees().items()} == {
        name: KNOWN[name] for name in golden_fingerprints.trees()
    }


@pytest.mark.parametrize(
    "names",
    [
        ["int8", "state"],
        pytest.param(
            [*golden_fingerprints.PLAIN, *golden_fingerprints.LOW, *golden_fingerprints.NARROW],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["few", "all"],
)
def test_recorded_fingerprints_of_jax_arrays(names):
    for name in names:
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
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "state"])
def test_recorded_fingerprints_on_a_mesh(kind, name):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    whole = PartitionSpec()

    def place(leaf):
        spec = PartitionSpec("model", "data") if np.shape(leaf) in ((8, 16), (16, 8)) else whole
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    assert texts(on_devices(golden_fingerprints.trees()[name], place)) == KNOWN[name]


def test_a_first_fingerprint_compiles_a_program_for_each_shape(compilations):
    tree = {f"w{i}": jnp.ones((i % 2 + 2, 17)) for i in range(30)}
    with compilations() as seen:
        total = jstep.fingerprint(tree)
    assert len(seen) == 3
    with compilations() as seen:
        leaves = jstep.fingerprint(tree, per_leaf=True)
    assert len(seen) <= 2
    assert hexadecimal(total) == hexadecimal(sum(np.asarray(pair, np.uint64) for pair in leaves.values()) % 2**32)
    with compilations() as seen:
        jstep.fingerprint(tree, per_leaf=True)
    assert seen == []


def test_small_leaves_of_a_shape_are_read_together(monkeypatch):
    """A call costs more than reading them; the last group of a shape overlaps the one before."""
    host = {f"w{i}": np.full((i % 2 + 2, 5), i + 1, np.float32) for i in range(90)} | {"n": np.float32(np.nan)}
    tree, calls = on_devices(host), []
    compute_on = fingerprints.compute_on
    monkeypatch.setattr(fingerprints, "compute_on", lambda *args: calls.append(args) or compute_on(*args))
    assert hexadecimal(jstep.fingerprint(tree)) == hexadecimal(jstep.fingerprint(host))
    assert len(calls) == 2 * 3 + 1 + 1
    monkeypatch.undo()
    assert texts(tree) == texts(host)


def test_keys_of_positions_are_not_stored_as_constants():
    """They would be as large as the array, computed eagerly and kept in the program."""
    before = {id(one) for one in jax.live_arrays()}
    x = jnp.ones((1000, 37))
    jax.block_until_ready(jax.jit(lambda: jstep.fingerprint({"x": x}))())
    new = [one for one in jax.live_arrays() if id(one) not in before and one is not x]
    assert sum(one.nbytes for one in new) < x.nbytes / 4

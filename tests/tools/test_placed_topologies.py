"""Steps placed on a topology, whose devices are CPUs here: meshes, shapes, the table of `cost`, its compilers."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jstep
from jstep.tools import topologies
from jstep.tools.topologies import parse_topology


class Slice:
    """A device of a TPU slice."""

    device_kind, platform = "a device", "cpu"

    def __init__(self, number: int, slice_index: int) -> None:
        self.number, self.slice_index = number, slice_index


@pytest.fixture
def on_cpus(monkeypatch: Any) -> list[Any]:
    """Topologies are made of the CPU devices; the names that were asked for."""
    asked: list[Any] = []
    monkeypatch.setattr(topologies, "compile_only_devices", lambda name: asked.append(name) or jax.devices())
    return asked


def test_the_mesh_of_a_slice_is_that_of_make_mesh(on_cpus: list[Any]) -> None:
    axes = {"data": 2, "model": 4}
    mesh = jstep.topology("v5e:2x4", axes)
    assert (mesh.axis_names, dict(mesh.shape)) == (("data", "model"), axes)
    assert mesh.devices.tolist() == jax.make_mesh((2, 4), ("data", "model")).devices.tolist()
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert jstep.topology("v5e:2x4").axis_names == ("data",)
    explicit = jstep.topology("v5e:2x4", axis_types=(jax.sharding.AxisType.Explicit,))
    assert explicit.axis_types == (jax.sharding.AxisType.Explicit,)
    assert list(map(str, on_cpus)) == ["v5e:2x4"] * 3


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"data": 8}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"data": 2, "model": 4}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"model": 1, "data": 8}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"data": 4, "model": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_the_first_axis_that_they_divide_spans_the_slices(monkeypatch: Any, axes: Any, expected: Any) -> None:
    """The devices of a slice stay together along all other axes, in whatever order the slices are listed."""
    found = [Slice(number, number // 4) for number in (4, 5, 6, 7, 0, 1, 2, 3)]
    monkeypatch.setattr(topologies, "compile_only_devices", lambda name: found)
    monkeypatch.setattr(topologies, "Mesh", lambda devices, names, axis_types: (devices, names, axis_types))
    devices, names, _ = jstep.topology("v5e:2x2*2", axes)  # type: ignore[misc]
    assert np.vectorize(lambda one: one.number)(devices).tolist() == expected
    assert names == tuple(axes)


OPTIMIZER = jstep.momentum(0.1, 0.9)
STEP = jstep.minimize(lambda params, x: jnp.sum((x["rows"] @ params["w"]) ** 2) * x["factor"], OPTIMIZER)


def state() -> jstep.TrainState:
    return jstep.TrainState.create({"w": jnp.ones((4, 4))}, OPTIMIZER)


def test_state_and_batch_are_placed_for_data_parallel_training(on_cpus: list[Any]) -> None:
    """The axis of the steps of a call, and scalars, are not split; what is no array stays."""
    codes = jax.ShapeDtypeStruct((8,), jnp.int8)
    batch = {"rows": np.ones((16, 4), np.float64), "factor": jnp.float32(2), "codes": codes}
    placed, (shapes, name) = topologies.on_topology("v5e:2x4", STEP, state(), (batch, "a name"))
    assert name == "a name"
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(placed)} == {PartitionSpec()}
    assert {key: (one.shape, str(one.dtype), one.sharding.spec) for key, one in shapes.items()} == {
        "rows": ((16, 4), "float32", PartitionSpec("data")),
        "factor": ((), "float32", PartitionSpec()),
        "codes": ((8,), "int8", PartitionSpec("data")),
    }
    batches = {"rows": np.ones((3, 16, 4)), "n": np.ones(3)}
    _, (shapes,) = topologies.on_topology("v5e:2x4", jstep.scan_steps(STEP), state(), (batches,))
    assert (shapes["rows"].sharding.spec, shapes["n"].sharding.spec) == (PartitionSpec(None, "data"), PartitionSpec())
    with pytest.raises(ValueError) as error:
        topologies.on_topology("v5e:2x4", STEP, state(), ({"rows": np.ones((12, 4))},))
    assert str(error.value) == ("topology='v5e:2x4': the batch's leaf '0/rows' must have a multiple of 8 rows, got 12")
    with pytest.raises(ValueError, match="topology='v5e:2x4': state and batch are on a mesh already"):
        topologies.on_topology("v5e:2x4", STEP, placed, (batch,))


def test_the_table_of_a_topology_names_it_and_its_compiler(on_cpus: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(topologies, "versions", lambda kind: {"jax": "1.2", "libtpu": "3.4"} if kind == "v5e" else {})
    monkeypatch.setattr(topologies, "topology_name", lambda device: parse_topology("v5e:2x4"))
    batch = {"rows": jax.ShapeDtypeStruct((16, 4), jnp.float32), "factor": jnp.float32(2)}
    cost = jstep.cost(STEP, state(), batch, topology="v5e:2x4")
    assert (cost.topology, cost.devices, cost.params_bytes, cost.slots_bytes) == ("v5e:2x4", 8, 64, 64)
    title, *rows = str(cost).splitlines()
    assert title == "a step on each of 8 devices, v5e:2x4 (compiled, not run; jax 1.2, libtpu 3.4)"
    assert [re.split(r" {2,}", row)[1] for row in rows] == [
        *("operations", "memory traffic", "parameters", "slots", "arguments", "results", "temporaries", "at its peak"),
        "compiled in",
    ]


def test_arrays_elsewhere_are_shapes_for_devices_that_only_compile(monkeypatch: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    placed, x = jstep.shard_state(state(), mesh), jnp.ones(4)
    assert topologies.refuse_other_devices(placed, (x,)) == (placed, (x,))
    monkeypatch.setattr(topologies, "compiles_only", lambda mesh: True)
    same, (shape, number) = topologies.refuse_other_devices(placed, (x, 3))
    assert same.params["w"] is placed.params["w"]
    assert (type(shape), shape.shape, str(shape.dtype), number) == (jax.ShapeDtypeStruct, (4,), "float32", 3)


def test_versions_are_those_of_installed_packages(monkeypatch: Any) -> None:
    installed = {"jax": "1", "libtpu": "2", "jax-cuda13-plugin": "3", "other": "4"}

    def version(package: str) -> str:
        if package not in installed:
            raise topologies.importlib.metadata.PackageNotFoundError
        return installed[package]

    monkeypatch.setattr(topologies.importlib.metadata, "version", version)
    assert topologies.versions("v5e") == {"jax": "1", "libtpu": "2"}
    assert topologies.versions("h100") == {"jax": "1", "jax-cuda13-plugin": "3"}

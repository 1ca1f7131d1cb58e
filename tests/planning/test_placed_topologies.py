"""Steps placed on a topology, whose devices are CPUs here: meshes, shapes, the table of `cost`, its
compilers."""

import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import raising
from jax.sharding import PartitionSpec

import jstep
from jstep.planning import topologies
from jstep.planning.topologies import GPUS, TPUS, parse_topology, target_config


class Slice:
    """A device of a TPU slice."""

    device_kind, platform = "a device", "cpu"

    def __init__(self, number, slice_index):
        self.number, self.slice_index = number, slice_index


@pytest.fixture
def on_cpus(monkeypatch):
    """Topologies are made of the CPU devices; the names that were asked for."""
    asked = []
    monkeypatch.setattr(
        topologies, "compile_only_devices", lambda name: asked.append(name) or jax.devices()
    )
    return asked


def test_the_mesh_of_a_slice_is_that_of_make_mesh(on_cpus):
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
def test_the_first_axis_that_they_divide_spans_the_slices(monkeypatch, axes, expected):
    """The devices of a slice stay together along all other axes, in whatever order the slices are
    listed."""
    found = [Slice(number, number // 4) for number in (4, 5, 6, 7, 0, 1, 2, 3)]
    monkeypatch.setattr(topologies, "compile_only_devices", lambda name: found)
    monkeypatch.setattr(
        topologies, "Mesh", lambda devices, names, axis_types: (devices, names, axis_types)
    )
    devices, names, _ = jstep.topology("v5e:2x2*2", axes)
    assert np.vectorize(lambda one: one.number)(devices).tolist() == expected
    assert names == tuple(axes)


OPTIMIZER = jstep.momentum(0.1, 0.9)
STEP = jstep.minimize(
    lambda params, x: jnp.sum((x["rows"] @ params["w"]) ** 2) * x["factor"], OPTIMIZER
)


def state():
    return jstep.TrainState.create({"w": jnp.ones((4, 4))}, OPTIMIZER)


def test_state_and_batch_are_placed_for_data_parallel_training(on_cpus):
    """The axis of the steps of a call, and scalars, are not split; what is no array stays."""
    codes = jax.ShapeDtypeStruct((8,), jnp.int8)
    batch = {"rows": np.ones((16, 4), np.float64), "factor": jnp.float32(2), "codes": codes}
    placed, (shapes, name) = topologies.place("v5e:2x4", STEP, state(), (batch, "a name"))
    assert name == "a name"
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(placed)} == {PartitionSpec()}
    assert {key: (one.shape, str(one.dtype), one.sharding.spec) for key, one in shapes.items()} == {
        "rows": ((16, 4), "float32", PartitionSpec("data")),
        "factor": ((), "float32", PartitionSpec()),
        "codes": ((8,), "int8", PartitionSpec("data")),
    }
    batches = {"rows": np.ones((3, 16, 4)), "n": np.ones(3)}
    _, (shapes,) = topologies.place("v5e:2x4", jstep.scan_steps(STEP), state(), (batches,))
    assert (shapes["rows"].sharding.spec, shapes["n"].sharding.spec) == (
        PartitionSpec(None, "data"),
        PartitionSpec(),
    )
    with pytest.raises(ValueError) as error:
        topologies.place("v5e:2x4", STEP, state(), ({"rows": np.ones((12, 4))},))
    assert str(error.value) == (
        "topology='v5e:2x4': the batch's leaf '0/rows' must have a multiple of 8 rows, got 12"
    )
    with pytest.raises(
        ValueError, match="topology='v5e:2x4': state and batch are on a mesh already"
    ):
        topologies.place("v5e:2x4", STEP, placed, (batch,))


def test_the_table_of_a_topology_names_it(on_cpus, monkeypatch):
    monkeypatch.setattr(topologies, "topology_name", lambda device: parse_topology("v5e:2x4"))
    batch = {"rows": jax.ShapeDtypeStruct((16, 4), jnp.float32), "factor": jnp.float32(2)}
    cost = jstep.cost(STEP, state(), batch, topology="v5e:2x4")
    assert (cost.topology, cost.devices, cost.params_bytes, cost.slots_bytes) == (
        "v5e:2x4",
        8,
        64,
        64,
    )
    title, *rows = str(cost).splitlines()
    assert title == "a step on each of 8 devices, v5e:2x4 (compiled, not run)"
    assert [re.split(r" {2,}", row)[1] for row in rows] == [
        *(
            "operations", "memory traffic", "parameters", "slots", "arguments", "results",
            "temporaries", "at its peak",
        ),
        "compiled in",
    ]  # fmt: skip


def test_arrays_elsewhere_are_shapes_for_devices_that_only_compile(monkeypatch):
    mesh = jax.make_mesh((8,), ("data",))
    placed, x = jstep.shard_state(state(), mesh), jnp.ones(4)
    assert topologies.shapes_if_elsewhere(placed, (x,)) == (placed, (x,))
    monkeypatch.setattr(topologies, "compiles_only", lambda mesh: True)
    same, (shape, number) = topologies.shapes_if_elsewhere(placed, (x, 3))
    assert same.params["w"] is placed.params["w"]
    assert (type(shape), shape.shape, str(shape.dtype), number) == (
        jax.ShapeDtypeStruct,
        (4,),
        "float32",
        3,
    )


# Validation of topology names before a compiler is called: libtpu aborts the process for some
# sizes.


@pytest.mark.parametrize(
    ("name", "kind", "sizes", "slices"),
    [
        ("v5e:2x4", "v5e", (2, 4), 1),
        ("v5e:4x4*2", "v5e", (4, 4), 2),
        ("v4:2x2x1", "v4", (2, 2, 1), 1),
        ("v5p:16x16x24", "v5p", (16, 16, 24), 1),
        ("tpu7x:2x2x1", "tpu7x", (2, 2, 1), 1),
        ("h100:8", "h100", (1, 8), 1),
        ("h100:4x8", "h100", (4, 8), 1),
    ],
)
def test_names_are_parsed(name, kind, sizes, slices):
    found = parse_topology(name)
    assert found == (kind, sizes, slices)
    assert parse_topology(str(found)) == found
    assert str(found) == name


def test_equal_topologies_have_equal_names():
    assert parse_topology("h100:1x8") == parse_topology("h100:8")
    assert parse_topology("v5e:04x4*1") == parse_topology("v5e:4x4")


@pytest.mark.parametrize(
    ("name", "axes", "words"),
    [
        ("v5e:2x4", {"data": 4}, "must multiply to 8, the devices of v5e:2x4"),
        # A chip has two devices.
        ("v3:2x4", {"data": 8}, "must multiply to 16, the devices of v3:2x4"),
        ("tpu7x:2x2x1", {"data": 4}, "must multiply to 8, the devices of tpu7x:2x2x1"),
        ("v4:2x2x1*3", {"data": 4}, r"12, the devices of v4:2x2x1\*3"),
        ("v5e:4x4*6", {"data": 4, "model": 24}, None),
        (
            "v5e:4x4*6",
            {"data": 32, "model": 3},
            "one axis must be a multiple of the 6 slices of v5e:4x4",
        ),
        ("h100:4x8", {"data": 8}, "must multiply to 32, the devices of h100:4x8"),
        ("b200:8", {"data": 3}, "must multiply to 8, the devices of b200:8"),
    ],
)
def test_axes_are_checked_before_a_compiler_is_looked_for(monkeypatch, name, axes, words):
    class ReachedError(Exception):
        pass

    monkeypatch.setattr("jstep.planning.topologies.compile_only_devices", raising(ReachedError()))
    with pytest.raises(ValueError, match=words) if words else pytest.raises(ReachedError):
        jstep.topology(name, axes)


def test_missing_packages_are_reported_before_anything_is_loaded(monkeypatch, tmp_path):
    """A plugin without NVIDIA's compiler is not loaded either, and no variable of the environment
    is set."""
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").write_text(
        "raise AssertionError('loaded')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for variable in ("CUDA_HOME", "CUDA_PATH", "TPU_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("jstep.planning.topologies._has_cuda_compiler", lambda: False)
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.setattr(
        "jstep.planning.topologies.topologies.get_topology_desc", lambda *_, **__: 1 / 0
    )
    before = dict(os.environ)
    with pytest.raises(
        ImportError,
        match=r"h100:8: NVIDIA's compiler .*run: pip install 'jstep\[aot-cuda\]'",
    ):
        jstep.topology("h100:8", {"data": 8})
    with pytest.raises(ImportError, match=r"v5e:2x4: libtpu .*run: pip install 'jstep\[tpu\]'"):
        jstep.topology("v5e:2x4", {"data": 8})
    assert dict(os.environ) == before


def fake_cuda(root):
    """Write NVIDIA's compiler and a plugin that does nothing."""
    for folder in ("bin", "nvvm/libdevice", "jax_plugins/xla_cuda13"):
        (root / folder).mkdir(parents=True)
    (root / "jax_plugins/xla_cuda13/__init__.py").write_text("def initialize():\n    pass\n")
    (root / "bin/ptxas").write_text("")


@pytest.mark.parametrize(
    "error", [OSError("libcudart.so.13: cannot open"), AttributeError("initialize"), RuntimeError()]
)
@pytest.mark.parametrize(
    ("name", "words", "extra"),
    [
        ("h100:8", r"the CUDA plugin of JAX \(jax_plugins.xla_cuda13\)", "aot-cuda"),
        ("v5e:2x2", "libtpu", "tpu"),
    ],
)
def test_compiler_that_does_not_load(monkeypatch, tmp_path, name, words, extra, error):
    fake_cuda(tmp_path)
    (tmp_path / "libtpu.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("jstep.planning.topologies._cuda_roots", lambda: [str(tmp_path)])
    monkeypatch.setattr("jstep.planning.topologies.topologies.get_topology_desc", raising(error))
    monkeypatch.setattr("jstep.planning.topologies.prepare", lambda: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    found = (
        rf"{name}: {words} is installed, but does not work \({type(error).__name__}: "
        rf"{error}.*'jstep\[{extra}\]'"
    )
    with pytest.raises(ImportError, match=found) as raised:
        jstep.topology(name)
    assert raised.value.__cause__ is error


def test_device_tables_are_plausible():
    assert len({tpu.device_kind for tpu in TPUS.values()}) == len(TPUS)
    assert all(7 * 2**30 < tpu.memory < 2**37 for tpu in TPUS.values())
    for name, gpu in GPUS.items():
        text = target_config(name)
        assert text.count("{") == text.count("}") == 3
        assert f"device_memory_size: {gpu.memory}\n" in text
        assert f'device_description_str: "{gpu.description}"\n' in text
        assert 0.75 * gpu.memory > 55 * 2**30

"""Validation of topology names before a compiler is called: libtpu aborts the process for some sizes."""

import os
import sys
import types

import jax
import pytest
from doubles import raising

import jstep
from jstep.tools.cost import compile_cost
from jstep.tools.topologies import GPUS, TPUS, parse_topology, require_working, target_config


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
        ("v3:2x4", {"data": 8}, "must multiply to 16, the devices of v3:2x4"),  # two devices per chip
        ("tpu7x:2x2x1", {"data": 4}, "must multiply to 8, the devices of tpu7x:2x2x1"),
        ("v4:2x2x1*3", {"data": 4}, r"12, the devices of v4:2x2x1\*3"),
        ("v5e:4x4*6", {"data": 4, "model": 24}, None),
        ("v5e:4x4*6", {"data": 32, "model": 3}, "one axis must be a multiple of the 6 slices of v5e:4x4"),
        ("h100:4x8", {"data": 8}, "must multiply to 32, the devices of h100:4x8"),
        ("b200:8", {"data": 3}, "must multiply to 8, the devices of b200:8"),
    ],
)
def test_axes_are_checked_before_a_compiler_is_looked_for(monkeypatch, name, axes, words):
    class ReachedError(Exception):
        pass

    monkeypatch.setattr("jstep.tools.topologies.compile_only_devices", raising(ReachedError()))
    with pytest.raises(ValueError, match=words) if words else pytest.raises(ReachedError):
        jstep.topology(name, axes)


def test_missing_packages_are_reported_before_anything_is_loaded(monkeypatch, tmp_path):
    """A plugin without NVIDIA's compiler is not loaded either, and no variable of the environment is set."""
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").write_text("raise AssertionError('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    for variable in ("CUDA_HOME", "CUDA_PATH", "TPU_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("jstep.tools.topologies._has_cuda_compiler", lambda: False)
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.setattr("jstep.tools.topologies.topologies.get_topology_desc", lambda *_, **__: 1 / 0)
    before = dict(os.environ)
    with pytest.raises(ImportError, match=r"h100:8: NVIDIA's compiler .*run: pip install 'jstep\[aot-cuda\]'"):
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
    monkeypatch.setattr("jstep.tools.topologies._cuda_roots", lambda: [str(tmp_path)])
    monkeypatch.setattr("jstep.tools.topologies.topologies.get_topology_desc", raising(error))
    monkeypatch.setattr("jstep.tools.topologies.prepare", lambda: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    found = rf"{name}: {words} is installed, but does not work \({type(error).__name__}: {error}.*'jstep\[{extra}\]'"
    with pytest.raises(ImportError, match=found) as raised:
        jstep.topology(name)
    assert raised.value.__cause__ is error


def test_compiler_that_fails_for_every_program(monkeypatch):
    """An error of a compiler that cannot compile a small program either is one of the compiler, not of the step."""
    name = parse_topology("h100:8")

    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: ptxas exited with non-zero error code 65280")

    class Step:
        def trace(self, *args):
            return jax.jit(lambda x: x + 1).trace(1.0)

        def lower(self, *args):
            return Lowered()

    monkeypatch.setattr("jstep.tools.topologies.topology_name", lambda device: name)
    state = jstep.TrainState.create({"w": 1.0}, jstep.sgd(0.1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="65280"):  # the CPU's compiler works
        compile_cost(Step(), state, ())
    monkeypatch.setattr(jax, "jit", lambda fn: types.SimpleNamespace(lower=lambda *_: Lowered()))
    with pytest.raises(ImportError, match=r"h100:8: NVIDIA's compiler .*65280.*; run: pip install 'jstep\[aot-cuda\]'"):
        require_working(name, jax.devices()[0])


def test_device_tables_are_plausible():
    assert len({tpu.device_kind for tpu in TPUS.values()}) == len(TPUS)
    assert all(7 * 2**30 < tpu.memory < 2**37 for tpu in TPUS.values())
    for name, gpu in GPUS.items():
        text = target_config(name)
        assert text.count("{") == text.count("}") == 3
        assert f"device_memory_size: {gpu.memory}\n" in text
        assert f'device_description_str: "{gpu.description}"\n' in text
        assert 0.75 * gpu.memory > 55 * 2**30

"""Compile-only meshes with real compilers: shape, refused operations and memory estimates."""

import contextlib
import subprocess
import sys
import threading

import compiled_steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import batch, check, compiled, loss, params, state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

OPTIMIZER = jstep.adam(1e-3)

PROGRAM = """
import {first}
import jstep
mesh = jstep.topology({name!r})
state = jstep.TrainState.create({{"w": 1.0}}, jstep.adam(), mesh=mesh)
import jax.numpy as jnp
step = jstep.minimize(lambda params: params["w"] ** 2, jstep.adam())
print(jstep.cost(step, state).fits, jnp.ones(2).sum())
"""


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("name", "count", "hosts"),
    [
        *[
            ("v2:2x2", 8, 1),
            ("v3:2x2", 8, 1),
            ("v4:2x2x2", 8, 2),
            ("v5e:1x1", 1, 1),
            ("v5e:2x4", 8, 2),
        ],
        *[
            ("v5p:4x4x4", 64, 16),
            ("v6e:16x16", 256, 64),
            ("tpu7x:2x2x1", 8, 1),
            ("v5e:4x4*2", 32, 8),
        ],
        *[("v4:1x1x1", 1, 1), ("v5p:1x1x1", 1, 1)],
    ],
)
def test_meshes_of_tpu_slices(name, count, hosts):
    mesh = jstep.topology(name)
    assert dict(mesh.shape) == {"data": count}
    assert mesh == jstep.topology(name, {"data": count})
    assert len({device.process_index for device in mesh.devices.flat}) == hosts
    assert mesh.axis_types == (AxisType.Auto,)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("name", "count", "hosts"),
    [
        ("a100:16", 16, 1),
        ("h100:8", 8, 1),
        ("h100:4x8", 32, 4),
        ("h200:2x8", 16, 2),
        ("b200:1", 1, 1),
    ],
)
def test_meshes_of_gpu_clusters(name, count, hosts):
    mesh = jstep.topology(name)
    assert mesh.size == count
    assert mesh == jstep.topology(name)
    assert len({device.process_index for device in mesh.devices.flat}) == hosts
    shapes = state(OPTIMIZER, mesh, "replicated")
    cost = jstep.cost(jstep.minimize(loss, OPTIMIZER), shapes, *batch(mesh))
    assert (cost.fits, cost.topology) == (True, name)
    assert cost.memory_bytes > 55 * 2**30
    assert cost.flops == pytest.approx(2 * 2 * 64 * (512 * 256 * 1 + 256 * 1024 * 1.5), rel=0.05)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("first", ["jstep", "jax"])
@pytest.mark.parametrize("platforms", ["cpu", ""])
def test_stderr_is_empty(first, platforms, monkeypatch):
    _check_stderr("v5e:2x2", first, platforms, monkeypatch)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("platforms", ["cpu", ""])
def test_stderr_is_empty_for_gpus(platforms, monkeypatch):
    _check_stderr("h100:2", "jstep", platforms, monkeypatch)


def _check_stderr(name, first, platforms, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    for variable in ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    code = PROGRAM.format(first=first, name=name)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["True", "2.0"]


@pytest.mark.tpu_compiler
def test_two_processes_at_once():
    code = PROGRAM.format(first="jstep", name="v5e:2x2") + "input()"
    command = [sys.executable, "-c", code]
    with contextlib.ExitStack() as stack:
        pipe = subprocess.PIPE
        both = [
            stack.enter_context(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            )
            for _ in range(2)
        ]
        stack.callback(lambda: [process.kill() for process in both])
        # Both have compiled and are still running before either one is released.
        assert [process.stdout.readline().split() for process in both] == [["True", "2.0"]] * 2
        assert [process.communicate("\n", timeout=60)[1] for process in both] == ["", ""]


@pytest.mark.tpu_compiler
def test_threads_get_equal_meshes():
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(jstep.topology("v5e:4x4"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_set", [False, True])
def test_operations_that_only_trace_or_compile(types, is_set):
    mesh = jstep.topology("v5e:2x4", axis_types=(types,))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        shapes = state(OPTIMIZER, mesh, "zero1")
        shapes_of_params = jax.eval_shape(compiled_steps.params)
        again = jstep.TrainState.create(shapes_of_params, OPTIMIZER, mesh=mesh, slot_axis="data")
        assert jax.tree.leaves(again) == jax.tree.leaves(shapes)
        abstract = jax.eval_shape(lambda: jstep.TrainState.create(params(), OPTIMIZER))
        sharded = jstep.shard_state(abstract, mesh, slot_axis="data")
        assert jax.tree.leaves(sharded) == jax.tree.leaves(shapes)
        inside = jax.eval_shape(
            lambda: jstep.TrainState.create(params, OPTIMIZER, mesh=mesh, slot_axis="data")
        )
        assert inside.params["a"].shape == (512, 256)
        rows = jstep.shard_batch(
            [jax.ShapeDtypeStruct((512, 512), jnp.float32), np.zeros((512, 1024), np.float32)], mesh
        )
        assert [one.sharding for one in rows] == [NamedSharding(mesh, P("data"))] * 2
        assert jstep.fsdp_specs(shapes.params, mesh, min_size=1024)["a"] == P("data")
        step = jstep.minimize(loss, OPTIMIZER)
        new, _ = step.eval_shape(shapes, *rows)
        assert jax.tree.leaves(new) == jax.tree.leaves(shapes)
        assert step.trace(shapes, *rows).jaxpr
        check(compiled(step, shapes, *rows), shapes)
        cost = jstep.cost(step, shapes, *rows)
    assert (cost.topology, cost.fits, cost.devices) == ("v5e:2x4", True, 8)
    assert cost.memory_bytes == int(15.75 * 2**30)
    assert str(cost).startswith("a step on each of 8 devices, v5e:2x4 (compiled, not run)")


@pytest.mark.tpu_compiler
def test_operations_that_would_run_raise(tmp_path):
    mesh = jstep.topology("v5e:2x4")
    shapes, rows = state(OPTIMIZER, mesh, "replicated"), batch(mesh)
    step = jstep.minimize(loss, OPTIMIZER)
    data = jstep.batches((np.zeros((64, 512), np.float32), np.zeros((64, 1024), np.float32)), 8)
    real = jstep.TrainState.create(params(), OPTIMIZER)
    sharding = NamedSharding(mesh, P("data"))
    for run in (
        lambda: step(shapes, *rows),
        lambda: step(real, *rows),
        lambda: jstep.scan_steps(step, 2)(shapes, *batch(mesh, 2)),
        lambda: step.__wrapped__(shapes, *rows),
        lambda: jstep.train(step, shapes, data, 4, checkpoint_dir=tmp_path / "run"),
        lambda: jstep.train(
            step, real, data, 4, checkpoint_dir=tmp_path / "run", batch_sharding=sharding
        ),
        lambda: jstep.prefetch_to_device(iter([np.zeros((8, 2))]), sharding=sharding),
        lambda: jstep.apply_gradients(shapes, shapes.params, OPTIMIZER),
        lambda: jstep.evaluator(lambda *args: {"loss": loss(*args)}, [(1, 2)])(shapes),
        lambda: jstep.find_nonfinite(step, shapes, *rows),
        lambda: jstep.verify_resume(lambda: shapes, step, data, 2, 4),
        lambda: jstep.replay(step, shapes, data, tmp_path, 2),
        lambda: jstep.fingerprint(shapes),
        lambda: jstep.Saver(tmp_path / "saver").save(shapes),
        lambda: jstep.Saver(tmp_path / "saver").restore(shapes),
    ):
        with pytest.raises(ValueError, match="devices only compile"):
            run()
    assert not (tmp_path / "run").exists()


@pytest.mark.tpu_compiler
def test_a_state_without_a_mesh():
    step = jstep.minimize(loss, OPTIMIZER)
    abstract = jax.eval_shape(lambda: jstep.TrainState.create(params(), OPTIMIZER))
    rows = [jax.ShapeDtypeStruct((512, width), jnp.float32) for width in (512, 1024)]
    mesh = jstep.topology("v5e:2x4")
    bare = jstep.cost(step, abstract, *rows, topology="v5e:2x4")
    placed = jstep.cost(step, state(OPTIMIZER, mesh, "replicated"), *jstep.shard_batch(rows, mesh))
    assert (bare.flops, bare.peak_bytes) == (placed.flops, placed.peak_bytes)
    arrays = jstep.cost(
        step, jstep.TrainState.create(params(), OPTIMIZER), *rows, topology="v5e:2x4"
    )
    assert (arrays.flops, arrays.peak_bytes) == (bare.flops, bare.peak_bytes)
    stacked = [jax.ShapeDtypeStruct((3, *one.shape), one.dtype) for one in rows]
    many = jstep.cost(jstep.scan_steps(step), abstract, *stacked, topology="v5e:2x4")
    assert many.flops == pytest.approx(3 * bare.flops, rel=0.05)
    other = jstep.shard_batch(rows, jstep.topology("v5e:4x4"))
    with pytest.raises(
        ValueError,
        match=r"on different meshes\. Put all of them on one mesh object",
    ):
        jstep.cost(step, state(OPTIMIZER, mesh, "replicated"), *other)

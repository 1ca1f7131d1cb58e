"""A run with `max_rows_per_device`, preempted and resumed on other numbers of devices."""

import os
import textwrap

import forked
import numpy as np
import pytest
from processes import wait_for

PROGRAM = """
import os, signal, sys
directory, devices, stop_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import jax, jax.numpy as jnp, numpy as np, jstep
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

assert jax.device_count() == devices
types = (AxisType.Explicit if len(sys.argv) > 4 else AxisType.Auto,)
mesh = jax.make_mesh((devices,), ("data",), axis_types=types)
rows = set()

def loss_fn(params, x):
    rows.add(x.shape[0])
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"][None]) - x) ** 2)

def init():
    return {"w": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), "b": jnp.zeros(8)}

optimizer = jstep.adam(0.02)
data = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)

def after(step, state, metrics):
    print("loss", step, float(metrics["loss"]))
    if step == stop_at:
        os.kill(os.getpid(), signal.SIGTERM)

try:
    jstep.train(
        jstep.minimize(loss_fn, optimizer, max_rows_per_device=4),
        jstep.TrainState.create(init, optimizer, mesh=mesh),
        jstep.batches(data, 64, seed=1),
        30,
        hooks=[jstep.every(1, after)],
        checkpoint_dir=directory,
        batch_sharding=NamedSharding(mesh, P("data")),
        progress=False,
    )
finally:
    print("rows", *rows)
"""


def run(directory, devices, stop_at, *args):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    started = forked.start(textwrap.dedent(PROGRAM), directory, devices, stop_at, *args, env={"XLA_FLAGS": flags})
    (process,) = wait_for([started])
    assert process.code == (143 if stop_at else 0), process.err[-4000:]
    lines = [line.split() for line in process.out.splitlines()]
    assert [int(line[1]) for line in lines if line[0] == "rows"] == [4 * devices]
    return {int(line[1]): float(line[2]) for line in lines if line[0] == "loss"}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [(), ("explicit",)], ids=["auto", "explicit"])
def test_preempted_run_resumes_on_fewer_devices(tmp_path, kind):
    want = run(tmp_path / "uninterrupted", 8, 0, *kind)
    assert sorted(want) == list(range(1, 31))
    got = {}
    for devices, stop_at in ((8, 9), (4, 17), (1, 0)):
        part = run(tmp_path / "resumed", devices, stop_at, *kind)
        assert not set(part) & set(got)
        got |= part
    assert sorted(got) == sorted(want)
    np.testing.assert_allclose([got[step] for step in want], list(want.values()), rtol=1e-5)

"""Muon on 8 virtual devices: matrices distributed over the devices, compared with each device
updating all of them. The eight devices share the cores of a CPU, and exchange updates in its
memory: the ratio is that of the work, and says nothing of devices whose exchange takes time.

    python benchmarks/bench_muon.py
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")  # threads for collectives of 8 devices

import jax
import jax.numpy as jnp
from _timing import interleaved, report, runner
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

MATRICES, SIZE = 16, 256


def contender(mesh, *, distribute):
    optimizer = jstep.muon(1e-3, distribute=distribute)
    keys = jax.random.split(jax.random.key(0), MATRICES)
    params = {f"w{i}": jax.random.normal(key, (SIZE, SIZE)) for i, key in enumerate(keys)}
    params = jax.device_put(params, NamedSharding(mesh, P()))
    step = jstep.minimize(lambda params: sum(jnp.sum(w**2) for w in params.values()), optimizer)
    return runner(lambda state: step(state)[0], jstep.TrainState.create(params, optimizer))


def main():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    contenders = {
        "each matrix on one device": contender(mesh, distribute=True),
        "each device updates all": contender(mesh, distribute=False),
    }
    times = interleaved(contenders, calls=5, rounds=9)
    title = f"{MATRICES} replicated matrices of {SIZE} × {SIZE}, 8 virtual devices, a step"
    return report(
        title, times, {("each matrix on one device", "each device updates all"): 0.3}, unit=1e3
    )


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)

"""`TrainState.create` in a fresh process, with 40 leaves of 40 shapes, beside Optax's `init`.

    python benchmarks/bench_create.py [rounds]

A start pays this before its first step. Each call runs in a process of its own, because JAX keeps
compiled programs; the processes of the contenders take turns. What counts is the CPU time of all
threads, which other processes disturb less than the wall time.
"""

import os
import statistics
import subprocess
import sys

from _timing import report_ratio

BOUND = 0.5
CODE = """
import os, sys, time
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax, numpy as np, optax
import jstep

random = np.random.default_rng(0)
params = {f"layer{i:02}": random.standard_normal((16 + i, 64)).astype(np.float32) for i in range(40)}
if sys.argv[2] == "arrays of JAX":
    params = jax.block_until_ready(jax.device_put(params))
optimizer, transformation = jstep.adamw(1e-3), optax.adamw(1e-3)
began, wall = time.process_time(), time.perf_counter()
if sys.argv[1] == "jstep":
    made = jstep.TrainState.create(params, optimizer)
else:
    made = transformation.init(params)
jax.block_until_ready(made)
print(time.process_time() - began, time.perf_counter() - wall)
"""  # noqa: E501
CONTENDERS = {"TrainState.create": "jstep", "optax.adamw.init": "optax"}


def seconds_of(contender: str, kind: str) -> tuple[float, float]:
    """Return the CPU seconds and the seconds of one call in a fresh process."""
    command = [sys.executable, "-c", CODE, contender, kind]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(printed[0]), float(printed[1])


def main(rounds: int) -> bool:
    is_good = True
    for kind in ("arrays of JAX", "arrays of NumPy"):
        times = {name: [] for name in CONTENDERS}
        for _ in range(rounds):
            for name, contender in CONTENDERS.items():
                times[name].append(seconds_of(contender, kind))
        print(f"\nThe state of a start: CPU time of 40 leaves of 40 shapes, {kind}")
        for name, found in times.items():
            cpu = statistics.median(cpu for cpu, _ in found)
            wall = statistics.median(wall for _, wall in found)
            print(f"  {name:34s} {cpu * 1e3:10.1f} ms  (wall {wall * 1e3:.1f} ms)")
        ours, peer = times["TrainState.create"], times["optax.adamw.init"]
        ratio = statistics.median(a / b for (a, _), (b, _) in zip(ours, peer, strict=True))
        is_good = report_ratio("TrainState.create", "optax.adamw.init", ratio, BOUND) and is_good
    return is_good


if __name__ == "__main__":
    quick = 1 if os.environ.get("JSTEP_QUICK_BENCHMARKS") else 5
    sys.exit(not main(int(sys.argv[1]) if len(sys.argv) > 1 else quick))

"""The part memory: peak bytes of steps beside what `cost` says, bytes of state a parameter, batches
on the device.

Each row is measured in a process of its own, because a device counts its peak from the start of the
process.
"""

import json
import os
import subprocess
import sys
from typing import Any

from part_report import QUICK, PartReport, last_line, run_child, seconds_left

SIDE, LAYERS, ROWS = (64, 2, 32) if QUICK else (4096, 4, 4096)
OPTIMIZERS = ("adamw", "compact(adamw)", "lion", "sgd", "muon")
CASES = [
    *(f"step: {name}" for name in OPTIMIZERS),
    "step: adamw, bfloat16 parameters",
    "loop: batches in flight",
]


def measure(case: str) -> dict[str, Any]:
    """Return the row of a case; the only function that uses a device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jstep

    device = jax.devices()[0]

    def peak() -> int | None:
        return (device.memory_stats() or {}).get("peak_bytes_in_use")

    def loss_fn(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w.astype(jnp.bfloat16))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    make = {
        "adamw": lambda: jstep.adamw(1e-3),
        "compact(adamw)": lambda: jstep.compact(jstep.adamw(1e-3)),
        "lion": lambda: jstep.lion(1e-4),
        "sgd": lambda: jstep.sgd(0.1, 0.9),
        "muon": lambda: jstep.muon(1e-2),
    }
    kind, _, name = case.partition(": ")
    dtype = jnp.bfloat16 if "bfloat16" in name else jnp.float32
    optimizer = make.get(name, make["adamw"])()
    train_step = jstep.minimize(loss_fn, optimizer)

    def create() -> Any:
        return jstep.TrainState.create(
            [jnp.full((SIDE, SIDE), 0.01, dtype) for _ in range(LAYERS)], optimizer
        )

    if kind == "loop":
        x = np.ones((ROWS, SIDE), np.float16)
        jstep.train(train_step, create(), lambda step: x.astype(np.float32), 3, progress=False)
        one = peak()
        jstep.train(
            train_step,
            create(),
            lambda step: x.astype(np.float32),
            20 if QUICK else 200,
            progress=False,
        )
        batch = ROWS * SIDE * 4
        return {
            "batch MB": batch / 1e6,
            "batches at the peak": None if one is None else ((peak() or 0) - one) / batch,
        }
    x = jnp.ones((ROWS, SIDE), jnp.bfloat16)
    shapes = jax.eval_shape(create)
    said = jstep.cost(train_step, shapes, jax.ShapeDtypeStruct(x.shape, x.dtype))
    state = create()
    before = peak()
    for _ in range(3):
        state, _ = train_step(state, x)
    jax.block_until_ready(state)
    parameters = LAYERS * SIDE * SIDE
    seen = None if before is None else (peak() or 0) / 1e6
    share = (
        {} if seen is None or not said.peak_bytes else {"seen / said": seen * 1e6 / said.peak_bytes}
    )
    return {
        "state bytes a parameter": sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / parameters,
        "peak MB, as cost says": (said.peak_bytes or 0) / 1e6,
        "peak MB, seen": seen,
        **share,
    }


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
        return 0
    report, failed = PartReport("memory"), 0
    wanted = [case for case in CASES if not sys.argv[1:] or case.startswith(sys.argv[1])]
    if not wanted:
        report.say(f"  {sys.argv[1]}: must be the beginning of one of {', '.join(CASES)}")
        return 2
    for case in wanted:
        if seconds_left() < 10:
            report.left_out(case, f"no time is left: benchmarks/accelerator.sh 'memory:{case}'")
            continue
        try:
            done = run_child(
                [sys.executable, __file__, "--measure", case], dict(os.environ), seconds_left()
            )
        except subprocess.TimeoutExpired:
            report.left_out(
                case, f"no time was left for all of it: benchmarks/accelerator.sh 'memory:{case}'"
            )
            continue
        if done.returncode:
            failed += 1
            report.row(case, failed=last_line(done.stderr))
            continue
        values = json.loads(done.stdout.splitlines()[-1])
        report.row(
            case,
            **{key: "not counted by this device" if x is None else x for key, x in values.items()},
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

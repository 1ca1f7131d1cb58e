"""One process of the part bits: trains a network in several ways, and writes the fingerprints of all states.

    python bits_runs.py NETWORK DTYPE (all | again | killed) DIRECTORY RESULT.json

The result is {way: {step: {path of a leaf: fingerprint}}}; `killed` kills itself in the middle and is started again.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_networks import BATCH, network

import jstep

STEPS = 30 if os.environ.get("ACCELERATOR_QUICK") else 300
CUT = STEPS * 9 // 20
"""The step at which runs are stopped or killed: no multiple of the intervals of hooks and saves."""


class Runs:
    """The runs of a network."""

    def __init__(self, name: str, dtype: str) -> None:
        self.network = network(name, dtype)
        self.recorded: dict[str, dict[int, Any]] = {}
        self.errors: list[str] = []

    def run(self, way: str, **options: Any) -> None:
        """Train in a way; one that fails does not end the others."""
        try:
            self.recorded[way] = self._states(**options)
        except Exception as error:
            self.errors.append(f"{way}: {type(error).__name__}: {str(error)[:200]}")

    def _states(
        self,
        *,
        every: int = 1,
        cut: bool = False,
        lanes: int | None = None,
        compact: bool = False,
        mesh: Any = None,
        fsdp: bool = False,
        hooks: tuple[Any, ...] = (),
        **options: Any,
    ) -> dict[int, Any]:
        """Train from scratch, by a step that is compiled anew, and record each state that a hook sees."""
        optimizer = jstep.chain(
            jstep.clip_gradients(by_global_norm=1.0),
            jstep.adamw(jstep.warmup_cosine_decay(3e-3, warmup_steps=10, decay_steps=STEPS)),
        )
        optimizer = jstep.compact(optimizer) if compact else optimizer
        states: dict[int, Any] = {}

        def record(step: int, state: Any, metrics: Any) -> None:
            states[step] = jstep.fingerprint(state, per_leaf=True)

        for last_step in [CUT, STEPS] if cut else [STEPS]:
            state = jstep.TrainState.create(jax.tree.map(np.array, self.network.params), optimizer)
            if mesh is not None:
                specs = jstep.fsdp_specs(state.params, mesh, min_size=1) if fsdp else None
                state = jstep.shard_state(state, mesh, specs)
                options["batch_sharding"] = NamedSharding(mesh, P("data"))
            jstep.train(
                jstep.minimize(self.network.loss_fn, optimizer, lanes=lanes), state,
                jstep.batches(self.network.examples, batch_size=BATCH, seed=0), last_step,
                hooks=[*hooks, jstep.every(every, record)], progress=False, **options,
            )  # fmt: skip
        return {step: as_text(found) for step, found in states.items()}


def as_text(found: dict[str, Any]) -> dict[str, str]:
    return {path: "{:08x}{:08x}".format(*np.asarray(value)) for path, value in found.items()}


def every_way(runs: Runs, directory: Path) -> None:
    """Train in each way of the table that needs no other process."""
    runs.run("reference")
    runs.run("again, same process")
    runs.run("cut and resumed", cut=True, checkpoint_dir=directory / "cut")
    runs.run("other hooks and saves", hooks=(jstep.every(7, lambda *_: None),), log_steps=3,
             checkpoint_dir=directory / "hooks", save_checkpoint_steps=11)  # fmt: skip
    runs.run("K=10", every=10, steps_per_call=10)
    runs.run("K=10, cut and resumed", every=10, steps_per_call=10, cut=True, checkpoint_dir=directory / "cut10")
    runs.run("K=10, other hooks", every=10, steps_per_call=10, hooks=(jstep.every(14, lambda *_: None),))
    runs.run("K=auto", every=10, steps_per_call="auto")
    runs.run("compact", compact=True)
    runs.run("compact, cut and resumed", compact=True, cut=True, checkpoint_dir=directory / "compact")
    runs.run("lanes=8, one device", lanes=8)
    runs.run("lanes=8, K=10", lanes=8, every=10, steps_per_call=10)
    devices = jax.devices()
    count = max(n for n in (1, 2, 4, 8) if n <= len(devices))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((count,), ("data",), axis_types=(kind,), devices=devices[:count])
        runs.run(f"{kind.name} axes", mesh=mesh)
        runs.run(f"lanes=8, {kind.name} axes", mesh=mesh, lanes=8)
        if count > 1:
            runs.run(f"lanes=8, {kind.name} axes, FSDP", mesh=mesh, lanes=8, fsdp=True)


def killed(runs: Runs, directory: Path) -> None:
    """Train, killed by SIGKILL in the first start; the second one resumes from the last checkpoint."""

    def kill(step: int, state: Any, metrics: Any) -> None:
        if step == CUT and jstep.latest_checkpoint(directory / "killed") and not (directory / "was_killed").exists():
            (directory / "was_killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    runs.run("killed and resumed", hooks=(jstep.every(1, kill),), checkpoint_dir=directory / "killed",
             save_checkpoint_steps=5)  # fmt: skip


def main() -> None:
    name, dtype, what, directory, result = sys.argv[1:]
    runs = Runs(name, dtype)
    with contextlib.suppress(OSError):
        Path(directory).mkdir(parents=True)
    try:
        if what == "killed":
            killed(runs, Path(directory))
        elif what == "again":
            runs.run("again, another process")
        else:
            every_way(runs, Path(directory))
    finally:
        Path(result).write_text(json.dumps(runs.recorded | {"errors": runs.errors}), encoding="utf-8")


if __name__ == "__main__":
    main()

"""One process of the part bits: trains a network in several ways, and writes the fingerprints of
all states.

    python bits_runs.py NETWORK DTYPE (first | killed | others) DIRECTORY RESULT.json

The result is {way: {step: {path of a leaf: fingerprint}}}, written after each way, because the
process may be stopped: each way compiles its programs anew, which takes seconds on a GPU and more
on a TPU. No way begins after BITS_UNTIL. `killed` kills itself in the middle and is started again.
"""

import json
import os
import signal
import sys
import time
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

    def __init__(self, name: str, dtype: str, result: Path) -> None:
        self.network = network(name, dtype)
        self.recorded: dict[str, dict[int, Any]] = {}
        self.errors: list[str] = []
        self.left_out: list[str] = []
        self._result = result
        self._until = float(os.environ.get("BITS_UNTIL", "inf"))

    def run(self, way: str, **options: Any) -> None:
        """Train in a way; one that fails does not end the others."""
        if time.time() > self._until:
            self.left_out.append(way)
        else:
            try:
                self.recorded[way] = self._states(**options)
            except Exception as error:
                self.errors.append(f"{way}: {type(error).__name__}: {str(error)[:200]}")
        new = self._result.with_suffix(".new")
        found = {"ways": self.recorded, "errors": self.errors, "left_out": self.left_out}
        new.write_text(json.dumps(found), encoding="utf-8")
        new.replace(self._result)

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
        """Train from scratch, by a step that is compiled anew, and record each state that a hook
        sees."""
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


def first(runs: Runs, directory: Path) -> None:
    """Train in the ways that the other processes are compared with, or that need no other one."""
    runs.run("reference")
    runs.run("again, same process")
    runs.run("cut and resumed", cut=True, checkpoint_dir=directory / "cut")


def others(runs: Runs, directory: Path) -> None:
    """Train in the other ways of the table, the most telling ones first."""
    runs.run("again, another process")
    runs.run("lanes=8, one device", lanes=8)
    devices = jax.devices()
    count = max(n for n in (1, 2, 4, 8) if n <= len(devices))
    meshes = {
        kind.name: jax.make_mesh((count,), ("data",), axis_types=(kind,), devices=devices[:count])
        for kind in (AxisType.Auto, AxisType.Explicit)
    }
    for kind, mesh in meshes.items():
        runs.run(f"lanes=8, {kind} axes", mesh=mesh, lanes=8)
    runs.run("K=10", every=10, steps_per_call=10)
    runs.run("other hooks and saves", hooks=(jstep.every(7, lambda *_: None),), log_steps=3,
             checkpoint_dir=directory / "hooks", save_checkpoint_steps=11)  # fmt: skip
    runs.run("compact", compact=True)
    runs.run(
        "compact, cut and resumed", compact=True, cut=True, checkpoint_dir=directory / "compact"
    )
    runs.run(
        "K=10, cut and resumed",
        every=10,
        steps_per_call=10,
        cut=True,
        checkpoint_dir=directory / "cut10",
    )
    runs.run("lanes=8, K=10", lanes=8, every=10, steps_per_call=10)
    runs.run("K=auto", every=10, steps_per_call="auto")
    for kind, mesh in meshes.items():
        runs.run(f"{kind} axes", mesh=mesh)
        if count > 1:
            runs.run(f"lanes=8, {kind} axes, FSDP", mesh=mesh, lanes=8, fsdp=True)
    runs.run(
        "K=10, other hooks", every=10, steps_per_call=10, hooks=(jstep.every(14, lambda *_: None),)
    )


def killed(runs: Runs, directory: Path) -> None:
    """Train, killed by SIGKILL in the first start; the second one resumes from the last
    checkpoint."""

    def kill(step: int, state: Any, metrics: Any) -> None:
        if (
            step == CUT
            and jstep.latest_checkpoint(directory / "killed")
            and not (directory / "was_killed").exists()
        ):
            (directory / "was_killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    runs.run("killed and resumed", hooks=(jstep.every(1, kill),),
             checkpoint_dir=directory / "killed", save_checkpoint_steps=5)  # fmt: skip


def main() -> None:
    name, dtype, what, directory, result = sys.argv[1:]
    runs = Runs(name, dtype, Path(result))
    Path(directory).mkdir(parents=True, exist_ok=True)
    {"first": first, "killed": killed, "others": others}[what](runs, Path(directory))


if __name__ == "__main__":
    main()

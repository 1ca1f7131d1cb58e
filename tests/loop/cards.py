"""Runs whose cards are looked at."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np

import jstep
from jstep.loop.options import Options
from jstep.loop.run import Run
from jstep.loop.stages import stages_of

TABLE = np.arange(12.0, dtype=np.float32).reshape(3, 4)
"""A constant of a program, in an array."""

DEFAULTS = {
    "last_step": 3,
    "hooks": (),
    "checkpoint_dir": None,
    "checkpoint_prefix": "model",
    "save_checkpoint_secs": 600,
    "save_checkpoint_steps": None,
    "logdir": None,
    "save_summaries_steps": 100,
    "log_steps": 100,
    "steps_per_call": 1,
    "progress": False,
    "batch_sharding": None,
    "unroll": None,
}


def loss(params, x):
    return jnp.mean((x.astype(params["w"].dtype) @ params["w"]) ** 2)


def loss_of_a_table(params, x):
    return loss(params, x) + jnp.mean(TABLE @ params["w"].astype(TABLE.dtype))


def merged(lines):
    """The card of a start."""
    found = {}
    for line in lines:
        programs = [*found.get("programs", ()), *line["programs"]]
        found = {**found, **line, "programs": programs}
    return found


def card_of(
    *,
    seed=1,
    rows=64,
    batch_size=8,
    skip=None,
    dtype=jnp.float32,
    optimizer=None,
    loss_fn=loss,
    step=None,
    later=False,
    batches=None,
    place=lambda state: state,
    is_recorded=True,
    write=None,
    **options,
):
    """The card of a small run, as its timeline would hold it."""
    optimizer = jstep.adam(0.01) if optimizer is None else optimizer
    state = place(jstep.TrainState.create({"w": jnp.ones((4, 2), dtype)}, optimizer))
    data = jstep.batches(np.ones((rows, 4), np.float32), batch_size, seed=seed) if batches is None else batches
    data = data if skip is None else data.skip(*skip)
    step = jstep.minimize(loss_fn, optimizer) if step is None else step
    steps = {0: step, 2: jstep.minimize(loss_fn, optimizer)} if later else step
    lines = []

    def kept(kind, /, **fields):
        assert kind == "card"
        lines.append(json.loads(json.dumps(fields, allow_nan=False)))

    given = Options(**{field.name: (DEFAULTS | options)[field.name] for field in dataclasses.fields(Options)})
    Run(given, stages_of(steps), state, (write or kept) if is_recorded else None).go(data)
    return merged(lines)

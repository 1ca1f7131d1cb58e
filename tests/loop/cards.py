"""Small training runs, and the run cards that they record."""

import json
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np

import jstep

TABLE = np.arange(12.0, dtype=np.float32).reshape(3, 4)
"""A large constant that a traced program contains."""


def loss(params, x):
    return jnp.mean((x.astype(params["w"].dtype) @ params["w"]) ** 2)


def loss_of_a_table(params, x):
    return loss(params, x) + jnp.mean(TABLE @ params["w"].astype(TABLE.dtype))


def merged(lines):
    """Return the card of one start, merged from its lines in the timeline."""
    found = {}
    for line in lines:
        programs = [*found.get("programs", ()), *line["programs"]]
        found = {**found, **line, "programs": programs}
    return found


def card_of(
    *,
    batch_size=8,
    dtype=jnp.float32,
    optimizer=None,
    loss_fn=loss,
    step=None,
    later=False,
    place=lambda state: state,
    is_recorded=True,
    **options,
):
    """Return the card of a small training run, as recorded in its timeline."""
    optimizer = jstep.adam(0.01) if optimizer is None else optimizer
    state = place(jstep.TrainState.create({"w": jnp.ones((4, 2), dtype)}, optimizer))
    data = jstep.batches(np.ones((64, 4), np.float32), batch_size, seed=1)
    step = jstep.minimize(loss_fn, optimizer) if step is None else step
    steps = {0: step, 2: jstep.minimize(loss_fn, optimizer)} if later else step
    options = {"last_step": 3, "progress": False} | options
    with tempfile.TemporaryDirectory() as directory:
        where = options.pop("checkpoint_dir", directory) if is_recorded else None
        jstep.train(steps, state, data, checkpoint_dir=where, **options)
        found = merged(recorded(where)) if is_recorded else {}
    if found and where == directory:
        found["arguments"]["checkpoint_dir"] = None  # a different temporary directory each time
    return found


def recorded(directory):
    """Return the lines of kind "card" in the timeline of a run."""
    lines = [json.loads(line) for line in (pathlib.Path(directory) / "timeline.jsonl").read_text().splitlines()]
    extra = {"kind", "prefix", "start"}
    return [{name: line[name] for name in line if name not in extra} for line in lines if line["kind"] == "card"]

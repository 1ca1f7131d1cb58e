"""Small training runs, and the run cards that they record."""

import tempfile

import jax.numpy as jnp
import numpy as np

import jstep
from jstep.stores.starts import read_starts, with_card


def loss(params, x):
    return jnp.mean((x.astype(params["w"].dtype) @ params["w"]) ** 2)


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
    optimizer = jstep.adam(0.01) if optimizer is None else optimizer
    state = place(jstep.TrainState.create({"w": jnp.ones((4, 2), dtype)}, optimizer))
    data = jstep.batches(np.ones((64, 4), np.float32), batch_size, seed=1)
    step = jstep.minimize(loss_fn, optimizer) if step is None else step
    steps = {0: step, 2: jstep.minimize(loss_fn, optimizer)} if later else step
    options = {"last_step": 3, "progress": False} | options
    with tempfile.TemporaryDirectory() as directory:
        where = options.pop("checkpoint_dir", directory) if is_recorded else None
        jstep.train(steps, state, data, checkpoint_dir=where, **options)
        found = recorded(where)[-1] if is_recorded else {}
    if found and where == directory:
        found["arguments"]["checkpoint_dir"] = None  # a different temporary directory each time
    return found


def recorded(directory):
    where = str(directory)
    return [with_card(where, start)["card"] for start in read_starts(where)["model"]]

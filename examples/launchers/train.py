"""The program of all launchers: it joins the other processes, saves on SIGTERM, and resumes.

    python train.py --steps 2000 --checkpoint-dir runs/launched

Started directly, it runs as one process. `jstep.distributed.initialize` reads the environment that
a launcher sets.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jstep


def init():
    keys = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(keys[0], (8, 64)) / 3,
        "w2": jax.random.normal(keys[1], (64, 1)) / 8,
    }


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def main(steps, checkpoint_dir, save_secs, exit_secs=1800):
    jstep.distributed.initialize()
    x = np.random.default_rng(0).normal(size=(4096, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    optimizer = jstep.adam(jstep.exponential_decay(0.01, 1000, 0.9))
    # The same loss curve on any number of devices: microbatches limit the rows per device.
    train_step = jstep.minimize(loss_fn, optimizer, max_rows_per_device=32)
    state = jstep.TrainState.create(init, optimizer, mesh=mesh)
    state = jstep.train(
        train_step,
        state,
        jstep.batches((x, y), 64, seed=1),
        last_step=steps,
        checkpoint_dir=checkpoint_dir,
        save_checkpoint_secs=save_secs,
        batch_sharding=NamedSharding(mesh, PartitionSpec("data")),
        # A run that hangs ends with exit code 75, and the launcher starts it again.
        hooks=[jstep.StallHook(exit_secs=exit_secs)],
    )
    if jax.process_index() == 0:
        print(f"trained {int(state.global_step)} steps on {jax.process_count()} processes")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="the last step (default 2000)")
    parser.add_argument(
        "--checkpoint-dir", default="runs/launched", help="a path, gs://… or s3://…"
    )
    parser.add_argument(
        "--save-secs", type=float, default=60, help="seconds between checkpoints (default 60)"
    )
    parser.add_argument(
        "--exit-secs", type=float, default=1800, help="seconds of a hang that end it (default 1800)"
    )
    return vars(parser.parse_args())


if __name__ == "__main__":
    main(**arguments())

"""Multi-process training: one of two processes is killed, and the restarted run ends the same.

    python examples/multi_process.py

On a cluster each host runs one process. Here both processes run on this machine and communicate
over loopback:

1. an uninterrupted run with 2 processes;
2. the same run in another directory, in which process 1 is killed (SIGKILL): process 0 detects the
   missing heartbeat and ends with an error, instead of waiting forever;
3. the same command again: both processes restore the newest checkpoint and finish.

The final weights of 1 and 3 are bitwise identical, because the checkpoint holds the step and Adam's
slots, and learning rates and batches are functions of the step. Each process runs `work`; two of
its lines concern scaling.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time


def work(args):
    """Train in one of the processes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import jstep

    # Under SLURM, Open MPI or on a TPU slice this needs no arguments.
    jstep.distributed.initialize(
        args.coordinator, 2, args.process, heartbeat_timeout_secs=args.heartbeat
    )

    def init():
        keys = jax.random.split(jax.random.key(0))
        return {
            "w1": jax.random.normal(keys[0], (8, 64)) / 3,
            "w2": jax.random.normal(keys[1], (64, 1)) / 8,
        }

    def loss_fn(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)

    random = np.random.default_rng(0)
    x = random.normal(size=(4096, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))
    optimizer = jstep.adam(jstep.exponential_decay(0.01, 100, 0.9))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    # Scaling, line 1: place the state on the mesh, and shard Adam's slots over it (ZeRO-1).
    state = jstep.TrainState.create(init, optimizer, mesh=mesh, slot_axis="data")

    every = args.steps // 8

    class Pace(jstep.Hook):
        """Slow down the steps, as for a large model, so that the process is killed in the run."""

        def after_step(self, step, state, metrics):
            time.sleep(0.01)
            if jax.process_index() == 1 and step == args.die_at:
                # Wait for the last checkpoint, written in the background, so that the number of
                # lost steps is known.
                while (jstep.latest_checkpoint(args.dir) or "") != os.path.join(
                    args.dir, f"model-{step // every * every}"
                ):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

    state = jstep.train(
        jstep.minimize(loss_fn, optimizer),
        state,
        jstep.batches((x, y), 64, seed=1),
        last_step=args.steps,
        hooks=[Pace()],
        checkpoint_dir=args.dir,
        save_checkpoint_steps=every,
        log_steps=args.steps // 4,
        # Scaling, line 2: the rows of each process become its part of the global batch.
        batch_sharding=NamedSharding(mesh, PartitionSpec("data")),
    )
    if jax.process_index() == 0:
        print(f"weights {np.asarray(state.params['w1'].addressable_data(0)).tobytes().hex()}")


def run(args, directory, die_at=0):
    """Start two processes, wait for them; return their exit codes, the final weights or None."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for process in range(2):
        command = [
            sys.executable, __file__, "--process", process, "--coordinator", coordinator,
            "--dir", directory,
        ]  # fmt: skip
        command += ["--die-at", die_at, "--steps", args.steps, "--heartbeat", args.heartbeat]
        processes.append(
            subprocess.Popen(
                [str(part) for part in command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ended = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for line in ended[0][1].splitlines():
        if line.startswith(("step ", "restored ")):
            print("   process 0:", line)
    weights = [line.split()[1] for line in ended[0][0].splitlines() if line.startswith("weights ")]
    codes = [process.returncode for process in processes]
    if not die_at and codes != [0, 0]:
        sys.exit("".join(error for _, error in ended))
    return codes, weights[0] if weights else None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--heartbeat",
        type=int,
        default=10,
        help="seconds after which an unresponsive process is considered dead",
    )
    for name, kind in (("process", int), ("coordinator", str), ("dir", str), ("die-at", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        return work(args)

    with tempfile.TemporaryDirectory() as directory:
        print(f"1. Two processes, {args.steps} steps, uninterrupted.")
        _, undisturbed = run(args, os.path.join(directory, "undisturbed"))

        killed_at = args.steps * 5 // 8 + args.steps // 20
        print(f"2. The same run; process 1 is killed at step {killed_at}.")
        began = time.monotonic()
        codes, _ = run(args, os.path.join(directory, "killed"), killed_at)
        print(
            f"   exit codes {codes} after {time.monotonic() - began:.0f} s: "
            "process 0 did not wait forever."
        )
        if 0 in codes:
            sys.exit("a process exited with code 0 although process 1 was killed")

        print("3. The same command again.")
        _, restarted = run(args, os.path.join(directory, "killed"))

    equal = undisturbed == restarted
    print("The final weights", "match" if equal else "DO NOT match", "an undisturbed run bitwise.")
    sys.exit(not equal)


if __name__ == "__main__":
    main()

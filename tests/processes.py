"""Start the processes of a multi-process run on this machine, on loopback, and wait for them."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time

import forked

PRELUDE = """
import os, signal, sys, time
process, count, address, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
import jstep
timeouts = dict(initialization_timeout_secs=60, heartbeat_timeout_secs=10, shutdown_timeout_secs=patience)
jstep.distributed.initialize(address, count, process, **timeouts)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("data",))
rows = NamedSharding(mesh, P("data"))

def init():
    return {"w": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), "b": jnp.zeros(8)}

def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"][None]) - x) ** 2)

optimizer = jstep.with_moving_average(jstep.adam(0.02), jstep.ExponentialMovingAverage(0.9))
data = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
batches = jstep.batches(data, 16, seed=1)

def weights(state):
    replicated = jax.tree.map(lambda leaf: NamedSharding(leaf.sharding.mesh, P()), state.params)
    gathered = jax.jit(lambda params: params, out_shardings=replicated)(state.params)
    return " ".join(np.asarray(leaf.addressable_data(0)).tobytes().hex() for leaf in jax.tree.leaves(gathered))
"""  # noqa: E501


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process that has finished: exit code, output, and the time at which it finished."""

    code: int
    out: str
    err: str
    at: float


_reserved = []
"""Sockets that hold the ports of `free_address` until the tests end; they do not listen."""


def free_address():
    """Return an address for a coordinator that no other process gets from the kernel.

    gRPC binds with SO_REUSEPORT, so that a coordinator shares the port with the socket that holds
    it, and two coordinators on the same port would not notice each other.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    _reserved.append(held)
    return f"127.0.0.1:{held.getsockname()[1]}"


def start(script, count, directory, *args, devices=4, patience=5):
    """Start `count` processes with `devices` devices in total; the script may use the names that
    PRELUDE defines.

    One that ends waits for the others for `patience` seconds, and is aborted after them.
    """
    address = free_address()
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices // count}"
    env = {"XLA_FLAGS": flags}
    code = f"patience = {patience}\n{PRELUDE}{textwrap.dedent(script)}"
    return [forked.start(code, i, count, address, directory, *args, env=env) for i in range(count)]


def wait_for(processes, timeout=120):
    """Wait for all processes, and kill those that do not end in time."""
    until = time.monotonic() + timeout
    finished = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1, until - time.monotonic()))
            finished.append(Finished(process.returncode, out, err, time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return finished


def run(script, count, directory, *args, devices=4):
    """Run the processes and return the lines that each one printed; all of them must exit with
    0."""
    finished = wait_for(start(script, count, directory, *args, devices=devices, patience=60))
    for one in finished:
        assert one.code == 0, one.err[-4000:]
    return [one.out.split("\n") for one in finished]


def printed(lines, name):
    """Return what a process printed after `name`, or None."""
    return next(
        (line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")), None
    )


def all_printed(lines, name):
    """Return all that a process printed after `name`, in order."""
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


@contextlib.contextmanager
def running_program(program, *args, timeout=60):
    """Start a program whose output can be read while it runs; it is killed after `timeout`
    seconds."""
    with forked.start(textwrap.dedent(program), *args) as process:
        limit = threading.Timer(timeout, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()


def run_program(program, *args, timeout=60):
    """Run a program and return its exit code, stdout and stderr."""
    (one,) = wait_for([forked.start(textwrap.dedent(program), *args)], timeout)
    return one.code, one.out, one.err


def python(*arguments, code=0, timeout=300, cwd=None, **env):
    """Run a Python that is not forked and has changes to its environment; return what it printed if
    it exits so."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | env,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout

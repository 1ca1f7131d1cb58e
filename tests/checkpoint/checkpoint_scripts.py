"""Scripts that save and restore in a separate process, which a test may kill."""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap

TESTS = str(pathlib.Path(__file__).parents[1])
PRELUDE = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
import jax, jax.numpy as jnp, numpy as np
import file_operations, jstep
from jstep.array_store.manifest import CheckpointError
from jstep.checkpoint.saver import Saver
from jstep.checkpoint.names import latest_checkpoint

directory = sys.argv[1]

def state_at(step, value, size=1000):
    return {"global_step": step, "params": {"w": jnp.full(size, value, jnp.float32)}}
"""


def start(script, *args, **env):
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        # A file, for the source lines in tracebacks.
        file.write(PRELUDE + textwrap.dedent(script))
    command = [sys.executable, file.name, *map(str, args)]
    path = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **env}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process, timeout=120):
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return out.split()


def run(script, *args, **env):
    return end(start(script, *args, **env))

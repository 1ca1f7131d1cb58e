"""Programs of examples/, as a user runs them."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}
AS_IN_A_TERMINAL = """
import pathlib, runpy, signal, sys
# It may be ignored in what runs the tests, as under nohup or in a background job of a script.
signal.signal(signal.SIGINT, signal.default_int_handler)
del sys.argv[0]
sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(script, args):
    return [sys.executable, "-c", AS_IN_A_TERMINAL, str(ROOT / "examples" / script), *map(str, args)]


def finished(script, *args, env=ENVIRONMENT, timeout=300):
    return subprocess.run(command(script, args), capture_output=True, text=True, env=env, timeout=timeout, check=False)


def run(script, *args):
    done = finished(script, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout

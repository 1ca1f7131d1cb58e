"""Programs of examples/, as a user runs them."""

import pathlib
import subprocess

import forked

ROOT = pathlib.Path(__file__).parents[2]
AS_IN_A_TERMINAL = """
import pathlib, runpy, signal, sys
# It may be ignored in what runs the tests, as under nohup or in a background job of a script.
signal.signal(signal.SIGINT, signal.default_int_handler)
del sys.argv[0]
sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(script, *args, env=None):
    return forked.start(AS_IN_A_TERMINAL, ROOT / "examples" / script, *args, env=env)


def finished(script, *args, env=None, timeout=300):
    program = start(script, *args, env=env)
    try:
        out, err = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(args, program.returncode, out, err)


def run(script, *args):
    done = finished(script, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout

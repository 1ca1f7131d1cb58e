"""Run the programs of examples/ as a user does."""

import pathlib
import re
import subprocess

import forked

ROOT = pathlib.Path(__file__).parents[2]
RUN_SCRIPT = """
import pathlib, runpy, signal, sys
# SIGINT may be ignored in the process that runs the tests, for example under nohup or in a background job.
signal.signal(signal.SIGINT, signal.default_int_handler)
del sys.argv[0]
sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # noqa: E501


def start(script, *args, env=None):
    return forked.start(RUN_SCRIPT, ROOT / "examples" / script, *args, env=env)


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


def fingerprint(out):
    return re.search(r"fingerprint of the state.*: (\w{16})", out)[1]

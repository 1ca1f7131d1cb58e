"""Kill programs that train, once they have a checkpoint."""

import random
import re
import signal
import time

import forked

import jstep


def newest_step(directory):
    """Return the step of the newest checkpoint, 0 if there is none."""
    latest = jstep.latest_checkpoint(directory)
    return int(latest.rpartition("-")[2]) if latest else 0


def kill_after(program, directory, step):
    """Send SIGKILL at a random time after the checkpoint of a step."""
    try:
        while program.poll() is None and newest_step(directory) < step:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
    finally:
        program.kill()
    _, errors = program.communicate(60)
    assert program.returncode == -signal.SIGKILL, (
        f"the program ended before it was killed: {errors}"
    )


def assert_same_bits_after_kills(program, directory):
    """Check that a program, killed three times, prints the fingerprint of one that was not killed.

    Args:
        program: Its code; it saves in `sys.argv[1]` every 10 steps, takes 120, and prints
            `jstep.fingerprint(state)`.
        directory: Where both runs save.
    """
    killed = directory / "killed"
    for step in (10, 40, 80):
        kill_after(forked.start(program, killed), killed, step)
    fingerprints = []
    for run in (killed, directory / "whole"):
        last = forked.start(program, run)
        out, errors = last.communicate(300)
        assert last.returncode == 0, errors
        fingerprints.append(re.findall(r"\d{6,}", out))
    assert len(fingerprints[0]) == 2
    assert fingerprints[0] == fingerprints[1]

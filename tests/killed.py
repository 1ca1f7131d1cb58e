"""Kill programs that train, once they have a checkpoint."""

import os
import random
import signal
import time

import forked

import jstep


def newest_step(directory: str | os.PathLike[str]) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    latest = jstep.latest_checkpoint(directory)
    return int(latest.rpartition("-")[2]) if latest else 0


def kill_after(program: forked.Program, directory: str | os.PathLike[str], step: int) -> None:
    """Send SIGKILL at a random time after the checkpoint of a step."""
    try:
        while program.poll() is None and newest_step(directory) < step:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
    finally:
        program.kill()
    _, errors = program.communicate(60)
    assert program.returncode == -signal.SIGKILL, f"the program ended before it was killed: {errors}"

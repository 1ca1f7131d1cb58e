"""Power cuts by the kernel: a file system on a loop device, after which nothing more reaches the disk.

The kernel simulates them for tests of file systems: FS_IOC_SHUTDOWN without a flush of the log. What the disk then has
is what the file system makes of it when it is mounted again.

    PYTHONPATH=. python tests/powercut/kernel_cuts.py [trials] [ext4|xfs] [seed]

cuts a training run with everything on, starts it again, and compares its end with that of a run without a cut.
"""

import contextlib
import errno
import fcntl
import functools
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import forked  # noqa: E402

_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
_BYTES = {"ext4": 2**26, "xfs": 320 * 2**20, "btrfs": 2**28}
TIMEOUT = 120
LAST = 60
"""Steps of the run, with a checkpoint every second one."""
_PROGRAM = """
import sys
sys.path.insert(0, {here!r})
import cut_runs
state = cut_runs.train(sys.argv[1], {last}, tell=lambda text: print(text, flush=True))
print("end", cut_runs.digest(sys.argv[1], state), flush=True)
"""


class Trial(NamedTuple):
    """A run that was cut and started again.

    Attributes:
        acknowledged: The newest step that was acknowledged before the cut; 0 for none.
        restored: The newest step after it; 0 for none.
        ended: What the restarted run printed about its end; "" if it failed.
        error: The end of its errors.
    """

    acknowledged: int
    restored: int
    ended: str
    error: str


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout


@contextlib.contextmanager
def device(kind: str) -> Iterator[tuple[str, str]]:
    """A new file system; yields the loop device and a folder to mount it at. Both are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="jstep-cut-") as above:
        image, folder = os.path.join(above, "image"), os.path.join(above, "mounted")
        with open(image, "wb") as file:
            file.truncate(_BYTES[kind])
        _run(f"mkfs.{kind}", "-q", image)
        os.mkdir(folder)
        loop = _run("losetup", "--find", "--show", image).strip()
        try:
            yield loop, folder
        finally:
            _run("losetup", "--detach", loop)


@contextlib.contextmanager
def mounted(loop: str, folder: str) -> Iterator[None]:
    """Within the block, a device is mounted."""
    _run("mount", loop, folder)
    try:
        yield
    finally:
        _unmount(folder)


def _unmount(folder: str) -> None:
    for _ in range(50):
        if subprocess.run(["umount", folder], capture_output=True, timeout=TIMEOUT, check=False).returncode == 0:
            return
        time.sleep(0.1)
    _run("umount", folder)


def cut(folder: str) -> None:
    """Cut the power of a mounted file system: from now on all its calls fail, and nothing reaches the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(handle, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(handle)


@functools.cache
def unavailable(kind: str = "ext4") -> str:
    """Return why no power can be cut on this machine; "" if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "only root can mount a loop device, on Linux"
    lacks = [name for name in (f"mkfs.{kind}", "losetup", "mount", "umount") if shutil.which(name) is None]
    if lacks:
        return f"there is no {lacks[0]}"
    try:
        with device(kind) as (loop, folder):
            with mounted(loop, folder):
                pathlib.Path(folder, "lost").write_text("x")
                cut(folder)
            with mounted(loop, folder):
                if os.path.exists(os.path.join(folder, "lost")) and os.path.getsize(os.path.join(folder, "lost")):
                    return f"{kind} loses nothing when it is shut down"
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]} does not work here: {error.stderr.strip()[-200:]}"
    except OSError as error:
        return f"{kind} cannot be shut down here: {errno.errorcode.get(error.errno or 0)} {error}"
    return ""


def _start(folder: str) -> forked.Program:
    program = forked.start(_PROGRAM.format(here=str(HERE), last=LAST), folder)
    limit = threading.Timer(TIMEOUT, program.kill)
    limit.daemon = True
    limit.start()
    return program


def uninterrupted() -> str:
    """Return what a run without a cut prints about its end."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = _start(folder).communicate(TIMEOUT)
        last = out.rpartition("end ")
        assert last[1], err[-3000:]
        return "end " + last[2].strip()


def trial(kind: str, rng: random.Random) -> Trial:
    """Cut a run at a random moment, and start it again."""
    with device(kind) as (loop, folder):
        with mounted(loop, folder):
            acknowledged = _cut_run(folder, rng)
        with mounted(loop, folder):
            restored = _newest(folder)
            out, err = _start(folder).communicate(TIMEOUT)
        last = out.rpartition("end ")
        ended = "end " + last[2].strip() if last[1] else ""
        return Trial(acknowledged, restored, ended, "" if ended else err[-1500:])


def _cut_run(folder: str, rng: random.Random) -> int:
    """Run until a random moment; return the newest step that was acknowledged before it."""
    wanted, delay = rng.choice((0, 1, 1, 2, 3, 5, 8)), rng.uniform(0.0, 0.1)
    program = _start(folder)
    newest = 0
    if wanted == 0:
        time.sleep(rng.uniform(0.3, 3.0))
    else:
        for _ in range(wanted):
            line = program.stdout.readline()
            newest = int(line.split()[1]) if line.startswith("acknowledged") else newest
        time.sleep(delay)
    cut(folder)
    program.kill()
    program.communicate(TIMEOUT)
    return newest


def _newest(folder: str) -> int:
    import jstep

    latest = jstep.latest_checkpoint(os.path.join(folder, "runs", "a"))
    return int(latest.rpartition("-")[2]) if latest else 0


def main(trials: int = 50, kind: str = "ext4", seed: int = 0) -> int:
    """Print a line for each trial, and return how many of them did not end as a run without a cut."""
    if reason := unavailable(kind):
        print(reason)
        return 0
    expected, rng, failed = uninterrupted(), random.Random(seed), 0
    for number in range(trials):
        found = trial(kind, rng)
        is_good = found.ended == expected and found.restored >= found.acknowledged
        failed += not is_good
        words = "the same end" if is_good else f"FAILED: {found.ended or found.error[-600:]}"
        print(f"{number}: acknowledged {found.acknowledged}, restored {found.restored}: {words}", flush=True)
    print(f"{kind}: {trials - failed} of {trials} runs ended with the bits of a run without a cut")
    return failed


if __name__ == "__main__":
    sys.exit(main(*(int(one) if one.isdigit() else one for one in sys.argv[1:])) > 0)

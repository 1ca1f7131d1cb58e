"""Writes the golden runs of a release to `tests/golden/VERSION`: `.venv/bin/python dev/golden.py`,
once a release.

The programs, `tests/golden_runs.py`, run in a directory, on a host and at a time that say nothing
of this machine. `tests/test_golden.py` restores and continues the runs of each release. A directory
that exists is never written again: what a release wrote is what later ones have to read.
"""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
PLACE = pathlib.Path("/tmp/golden")
"""Where the runs are while they are written; their records have this path."""
MAX_BYTES = 200_000
"""The maximum bytes of a run."""
NEUTRAL = """
import os, socket, sys, time
began = time.monotonic()
socket.gethostname = lambda: "golden"
time.time = lambda: 1_767_225_600.0 + float(os.environ["GOLDEN_SECS"]) + time.monotonic() - began
del sys.argv[0]
import golden_runs
from jstep.stores import owners
owners.space = lambda: "golden"  # else a number of this machine
"""
"""The beginning of each program: at the start of 2026, on a host named golden."""
IN_BUCKET = """
from fake_gcs import FakeGCS
store = FakeGCS()
os.environ.update(store.environment())
for last_step in (4, 6):
    golden_runs.bucket("gs://bkt/run", last_step)
for key in store.keys("run/"):
    path = os.path.join("bucket", key.removeprefix("run/"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(store.data(key))
store.close()
"""


def environment(secs: int, devices: int) -> dict[str, str]:
    paths = [ROOT, ROOT / "tests", ROOT / "tests" / "object_storage"]
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(PLACE / "home"),
        "USER": "golden",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 "
        f"--xla_force_host_platform_device_count={devices}",
        "GOLDEN_SECS": str(secs),
    }


def start(code: str, *words: object, secs: int, devices: int = 1) -> subprocess.Popen[bytes]:
    program = PLACE / "train.py"
    program.write_text(NEUTRAL + code)
    return subprocess.Popen(
        [sys.executable, str(program), "train.py", *map(str, words)],
        cwd=PLACE,
        env=environment(secs, devices),
    )


def wait(*running: subprocess.Popen[bytes]) -> None:
    codes = [process.wait(300) for process in running]
    if any(codes):
        raise SystemExit(f"a golden run failed: exit codes {codes}")


def write_runs() -> None:
    """Let all programs run at `PLACE`, each in two starts."""
    names = ["everything", "from_loop", "generator", "lanes", "odd_values", "mixed"]
    for secs, last_step in ((0, 4), (3600, 6)):
        for name in names:
            program = "golden_runs.main(*sys.argv[1:])"
            devices = 4 if name == "lanes" else 1
            wait(start(program, name, PLACE / name, last_step, secs=secs, devices=devices))
        for name in ("processes", "odd_processes"):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{free.getsockname()[1]}"
            words = [(name, PLACE / name, last_step, process, 2, address) for process in range(2)]
            wait(*[start(program, *some, secs=secs) for some in words])
    for path in PLACE.glob("*/stalls/*.json"):
        # The stacks of the threads name files of this machine.
        text = path.read_text()
        for prefix, name in (
            (str(ROOT), "/jstep"),
            (sys.prefix, "/python"),
            (sys.base_prefix, "/python"),
        ):
            text = text.replace(prefix, name)
        path.write_text(text)
    wait(start("golden_runs.main(*sys.argv[1:])", "branch", PLACE / "branch", 8, secs=7200))
    wait(start(IN_BUCKET, secs=0))


HASHES = """
import glob, json, jstep
hashes = {}
for path in sorted(glob.glob("*/model-*/manifest.json") + glob.glob("*/best/*-*/manifest.json")):
    directory, name = path.removesuffix("/manifest.json").rsplit("/", 1)
    prefix, step = name.rsplit("-", 1)
    with jstep.Saver(directory, prefix) as saver:
        restored = saver.restore(step=int(step))
        leaves = jstep.fingerprint(restored, per_leaf=True)
        hashes[f"{directory}/{name}"] = {path: f"{a:08x}{b:08x}" for path, (a, b) in leaves.items()}
json.dump(hashes, open("hashes.json", "w"), indent=1, sort_keys=True)
"""
"""The hashes of what is restored from each checkpoint."""


def main() -> None:
    sys.path.insert(0, str(ROOT))
    import jstep

    target = GOLDEN / jstep.__version__
    if target.exists():
        raise SystemExit(f"{target} exists: golden runs are written once")
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    try:
        write_runs()
        wait(start(HASHES, secs=0))
        runs = [path for path in PLACE.iterdir() if path.is_dir() and path.name != "home"]
        for run in sorted(runs):
            size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
            print(f"{run.name}: {size} bytes")
            if size > MAX_BYTES:
                raise SystemExit(f"{run.name} has {size} bytes, more than {MAX_BYTES}")
            shutil.copytree(run, target / run.name)
        hashes = json.loads((PLACE / "hashes.json").read_text())
        shutil.copy(ROOT / "tests" / "formats.txt", target)
        (target / "hashes.json").write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")
    finally:
        shutil.rmtree(PLACE, ignore_errors=True)


if __name__ == "__main__":
    main()

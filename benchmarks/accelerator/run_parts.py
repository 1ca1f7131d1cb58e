"""Runs the parts of benchmarks/accelerator.sh, each in processes of its own, with a time limit.

This process never initializes a device: JAX takes most of a GPU's memory in the first process that
does.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from part_report import describe, last_line

HERE = Path(__file__).parent
PARTS = {
    "bits": "bits_on_device.py",
    "tests": "tests_on_device.py",
    "speed": "speed_on_device.py",
    "memory": "memory_on_device.py",
}
LIMIT = 480
"""Seconds of a part at most."""
RESERVE = 30
"""Of these, the seconds in which a part begins nothing new."""

PROBE = """
import json, jax, jaxlib
if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 10):
    raise SystemExit(f"JAX {jax.__version__} is too old: 0.10 is needed")
import jstep
jstep.minimize, jstep.Saver  # with what jstep itself needs, such as Orbax
devices = jax.devices()
memory = devices[0].memory_stats() or {}
print(json.dumps({
    "backend": jax.default_backend(), "kind": devices[0].device_kind, "count": len(devices),
    "jax": jax.__version__, "jaxlib": jaxlib.__version__, "platform_version": devices[0].client.platform_version,
    "bytes_limit": memory.get("bytes_limit"),
}))
"""  # noqa: E501


def environment(quick: bool) -> dict[str, str]:
    """Return the environment of all processes that use devices."""
    # A part may start a second process, and others may use the device, too.
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    if quick:
        variables |= {"ACCELERATOR_QUICK": "1"}
        if "JAX_PLATFORMS" not in os.environ:
            # Two virtual devices on a CPU. For `--quick` on a GPU: JAX_PLATFORMS=cuda
            variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "NPROC": "64"}
    return variables


def driver() -> str:
    """Return the version of NVIDIA's driver, or that there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "no NVIDIA driver"
    return f"driver {done.stdout.split()[0]}" if done.stdout.split() else "no NVIDIA driver"


def probe(variables: dict[str, str]) -> dict[str, Any]:
    """Return what JAX says of the devices, in a process that ends before others start."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = "another process may hold the device, or JAX waits for the other hosts of a TPU slice"
        sys.exit(refused(f"JAX found no device within 300 s: {why}."))
    if done.returncode:
        last = last_line(done.stderr)
        sys.exit(
            refused(
                f"{sys.executable} cannot use JAX: {last}; "
                "set PYTHON to the interpreter that has it."
            )
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    keep = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION",
            "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
            "XLA_PYTHON_CLIENT_ALLOCATOR", "CUDA_VISIBLE_DEVICES")  # fmt: skip
    return found | {
        "driver": driver(),
        "python": sys.version.split()[0],
        "flags": {name: variables[name] for name in keep if name in variables},
    }


def refused(why: str) -> int:
    """Say in a sentence why nothing is run; the exit code."""
    print(f"accelerator: {why}", file=sys.stderr)
    return 2


def run_part(part: str, variables: dict[str, str]) -> int | None:
    """Run a part to its end or to its limit; return its exit code, None if it was stopped."""
    name, _, only = part.partition(":")
    command = [sys.executable, str(HERE / PARTS[name]), *([only] if only else [])]
    began, code = time.monotonic(), None
    # Checkpoints are large and /tmp may be small; and what a killed process leaves is deleted with
    # the folder.
    scratch = tempfile.mkdtemp(prefix="scratch-", dir=variables["ACCELERATOR_OUT"])
    more = {
        "ACCELERATOR_DEADLINE": str(time.time() + LIMIT - RESERVE),
        "ACCELERATOR_FILE": re.sub(r"[^\w.=-]+", "-", part).strip("-"),
        "TMPDIR": scratch,
    }
    process = subprocess.Popen(
        command, env=variables | more, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        code = process.wait(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        pass
    finally:  # with all that it started, also after Ctrl-C, and if it ended before them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(scratch, ignore_errors=True)
    ended = {0: "ended well", None: f"was stopped after {LIMIT} s; its rows so far are kept"}.get(
        code, "FAILED"
    )
    print(f"{part}: {ended} ({time.monotonic() - began:.0f} s)", flush=True)
    return code


def stop(number: int, frame: Any) -> None:
    """End as after Ctrl-C: a part must not outlive the terminal or the job, with the device in its
    hands."""
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/accelerator.sh", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", default=[], metavar="PART", help=f"{', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--out", default="accelerator-out", help="folder for text and JSON")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, on CPU devices unless JAX_PLATFORMS is set",
    )
    given = parser.parse_args()
    parts = given.parts or list(PARTS)
    if unknown := [part for part in parts if part.partition(":")[0] not in PARTS]:
        return refused(f"PART={unknown[0]}: must be one of {', '.join(PARTS)}.")
    variables = environment(given.quick)
    device = probe(variables)
    if device["backend"] == "cpu" and not given.quick:
        return refused(
            "JAX finds no accelerator here, only the CPU; "
            "--quick tries the scripts on it, without figures."
        )
    out = Path(given.out).absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "device.json").write_text(json.dumps(device, indent=1), encoding="utf-8")
    except OSError as error:
        return refused(f"--out {out}: must be a folder that can be written: {error}.")
    print(describe(device), flush=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    variables |= {"ACCELERATOR_OUT": str(out), "ACCELERATOR_DEVICE": json.dumps(device)}
    codes = {part: run_part(part, variables) for part in parts}
    bad = [part for part, code in codes.items() if code != 0]
    print(f"written to {out}" + (f"; not well: {', '.join(bad)}" if bad else ""))
    return 2 if 2 in codes.values() else 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs the parts of tests/accelerator.sh, each in processes of its own, with a time limit.

This process never initializes a device: JAX takes most of a GPU's memory in the first process that does.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from part_report import describe

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
devices = jax.devices()
memory = devices[0].memory_stats() or {}
print(json.dumps({
    "backend": jax.default_backend(), "kind": devices[0].device_kind, "count": len(devices),
    "jax": jax.__version__, "jaxlib": jaxlib.__version__, "platform_version": devices[0].client.platform_version,
    "bytes_limit": memory.get("bytes_limit"),
}))
"""


def environment(quick: bool) -> dict[str, str]:
    """Return the environment of all processes that use devices."""
    variables = dict(os.environ)
    if quick:
        variables |= {"ACCELERATOR_QUICK": "1"}
        if "JAX_PLATFORMS" not in os.environ:  # two virtual devices on a CPU; `--quick` on a GPU: JAX_PLATFORMS=cuda
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
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        sys.exit(refused(f"{sys.executable} cannot use JAX: {last}; set PYTHON to the interpreter that has it."))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    keep = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    return found | {
        "driver": driver(),
        "python": sys.version.split()[0],
        "flags": {name: os.environ[name] for name in keep if name in os.environ},
    }


def refused(why: str) -> int:
    """Say in a sentence why nothing is run; the exit code."""
    print(f"accelerator: {why}", file=sys.stderr)
    return 2


def run_part(part: str, variables: dict[str, str]) -> bool:
    """Run a part to its end or to its limit; return whether all went well."""
    name, _, only = part.partition(":")
    deadline = {"ACCELERATOR_DEADLINE": str(time.time() + LIMIT - RESERVE)}
    command = [sys.executable, str(HERE / PARTS[name]), *([only] if only else [])]
    began = time.monotonic()
    process = subprocess.Popen(command, env=variables | deadline, start_new_session=True)
    try:
        code = process.wait(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        code = None
    finally:  # with all that it started, also after Ctrl-C
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ended = {0: "ended well", None: f"was stopped after {LIMIT} s; its rows so far are kept"}.get(code, "FAILED")
    print(f"{part}: {ended} ({time.monotonic() - began:.0f} s)", flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/accelerator.sh", description=__doc__)
    parser.add_argument("parts", nargs="*", default=[], metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", default="accelerator-out", help="folder for text and JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes, on CPU devices unless JAX_PLATFORMS is set")
    given = parser.parse_args()
    parts = given.parts or list(PARTS)
    if unknown := [part for part in parts if part.partition(":")[0] not in PARTS]:
        return refused(f"PART={unknown[0]}: must be one of {', '.join(PARTS)}.")
    variables = environment(given.quick)
    device = probe(variables)
    if device["backend"] == "cpu" and not given.quick:
        return refused("JAX finds no accelerator here, only the CPU; --quick tries the scripts on it, without figures.")
    out = Path(given.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    (out / "device.json").write_text(json.dumps(device, indent=1), encoding="utf-8")
    print(describe(device), flush=True)
    variables |= {"ACCELERATOR_OUT": str(out), "ACCELERATOR_DEVICE": json.dumps(device)}
    results = {part: run_part(part, variables) for part in parts}
    bad = [part for part, is_good in results.items() if not is_good]
    print(f"written to {out}" + (f"; not well: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

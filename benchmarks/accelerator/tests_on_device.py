"""The part tests: the quick tests of the rooms that put arrays on a device, on this one.

Folders run one after the other, the most telling first: on GPUs in two processes where pytest-xdist
is installed, on TPUs, which one process takes for itself, in one. Tests that need more devices than
there are count as skipped. Products of float32 are computed in float32, which is no GPU default.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from part_report import QUICK, PartReport, installed, run_child, seconds_left

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "state optimizers differentiate training loop sharding core schedules "
    "metrics evaluating composition data hooks"
)
QUICK_FILES = ["tests/schedules/test_schedule_compositions.py", "tests/optimizers/test_leafwise.py"]


def main() -> int:
    report = PartReport("tests")
    if not (installed(report, "pytest") and installed(report, "hypothesis")):
        report.left_out("all tests", "pytest or hypothesis is not installed")
        return 0
    is_parallel = report.backend == "gpu" and not QUICK and installed(report, "xdist")
    targets = sys.argv[1:] or (
        QUICK_FILES if QUICK else [f"tests/{folder}" for folder in FOLDERS.split()]
    )
    variables = os.environ | {
        # tests/conftest.py chooses CPUs only if it is unset.
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        # Its directory is not in the checkout.
        "HYPOTHESIS_STORAGE_DIRECTORY": os.path.join(tempfile.gettempdir(), "hypothesis"),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    failed = False
    for target in targets:
        if seconds_left() < 15:
            report.left_out(target, f"no time is left: benchmarks/accelerator.sh tests:{target}")
            continue
        # A JAX that nobody has seen may deprecate what jstep uses: that is no failure on this
        # device.
        command = [sys.executable, "-m", "pytest", target, "-p", "few_devices",
                   "-p", "no:cacheprovider", "-rfE", "-W", "default::DeprecationWarning",
                   "--tb=line", *(["-n", "2"] if is_parallel else [])]  # fmt: skip
        began = time.monotonic()
        try:
            done = run_child(command, variables, seconds_left(), cwd=ROOT)
        except subprocess.TimeoutExpired:
            report.left_out(
                target, f"no time was left for all of it: benchmarks/accelerator.sh tests:{target}"
            )
            continue
        lines = (
            done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
        )
        report.row(target, result=lines[-1].strip("= "), seconds=round(time.monotonic() - began))
        for line in lines:
            if line.startswith(("FAILED", "ERROR")):
                report.say(f"    {line[:200]}")
        failed |= done.returncode not in (0, 5)  # 5: no test was selected
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

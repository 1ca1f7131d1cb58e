"""The part tests: the quick tests of the rooms that put arrays on a device, on this one.

Folders run one after the other, the most telling first, in two processes where pytest-xdist is installed. Tests that
need more devices than there are count as skipped. Products of float32 are computed in float32, which is no GPU default.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from part_report import QUICK, PartReport, installed, seconds_left

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "state optimizers differentiate training loop sharding core schedules metrics evaluating composition data hooks"
)
QUICK_FILES = ["tests/schedules/test_schedule_compositions.py", "tests/optimizers/test_directions.py"]


def main() -> int:
    report = PartReport("tests")
    if not (installed(report, "pytest") and installed(report, "hypothesis")):
        return 1
    has_xdist = installed(report, "xdist")
    targets = sys.argv[1:] or (QUICK_FILES if QUICK else [f"tests/{folder}" for folder in FOLDERS.split()])
    variables = os.environ | {
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""),  # tests/conftest.py chooses CPUs only if it is unset
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    failed = False
    for target in targets:
        if seconds_left() < 15:
            report.left_out(target, f"no time is left: tests/accelerator.sh tests:{target}")
            continue
        command = [sys.executable, "-m", "pytest", target, "-p", "few_devices", "-p", "no:cacheprovider", "-rf",
                   "--tb=line", *(["-n", "2"] if has_xdist and not QUICK else [])]  # fmt: skip
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=seconds_left()
            )
        except subprocess.TimeoutExpired:
            report.left_out(target, f"no time was left for all of it: tests/accelerator.sh tests:{target}")
            continue
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
        report.row(target, result=lines[-1].strip("= "), seconds=round(time.monotonic() - began))
        for line in lines:
            if line.startswith(("FAILED", "ERROR")):
                report.say(f"    {line[:200]}")
        failed |= done.returncode not in (0, 5)  # 5: no test was selected
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

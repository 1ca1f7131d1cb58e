"""The part bits: which promises of docs/how/bits.md hold on this device, and under which flags of XLA.

Each network is trained in several processes (bits_runs.py), and the fingerprints of all leaves are compared at each
step that two runs recorded. A network in which a promise does not hold is trained again with XLA's flags for
deterministic programs, one after the other. This process uses no device.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from part_report import QUICK, PartReport, seconds_left

HERE = Path(__file__).parent
NETWORKS = ("dense", "attention", "convolutions")
DTYPES = ("float32", "bfloat16")
LANES = "lanes=8, one device"
PROMISES = {
    # way: (compared with, what is promised, whether it is)
    "again, same process": ("reference", "the same run again", True),
    "again, another process": ("reference", "the same run in another process", True),
    "cut and resumed": ("reference", "cut and resumed", True),
    "killed and resumed": ("reference", "killed by SIGKILL and resumed", True),
    "other hooks and saves": ("reference", "other cadences of hooks and saves", True),
    "K=10": ("reference", "K=10 beside K=1, without lanes", False),
    "K=10, cut and resumed": ("K=10", "K=10, cut and resumed", True),
    "K=10, other hooks": ("K=10", "K=10, other cadences of hooks", True),
    "K=auto": ("K=10", 'K="auto" beside K=10', True),
    "compact, cut and resumed": ("compact", "compact, cut and resumed", True),
    "Auto axes": ("reference", "on all devices beside one, without lanes", False),
    "Explicit axes": ("Auto axes", "Explicit beside Auto axes, without lanes", False),
    "lanes=8, K=10": (LANES, "lanes=8: K=10 beside K=1", True),
    "lanes=8, Auto axes": (LANES, "lanes=8: all devices beside one", True),
    "lanes=8, Explicit axes": (LANES, "lanes=8: all devices, Explicit axes", True),
    "lanes=8, Auto axes, FSDP": (LANES, "lanes=8: FSDP", True),
    "lanes=8, Explicit axes, FSDP": (LANES, "lanes=8: FSDP, Explicit axes", True),
}
FLAGS = {"gpu": ["--xla_gpu_autotune_level=0", "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"]}
"""Backend → the flags that are tried one after the other, until all promises hold."""


def first_difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """Return the first step, and its first leaf, in which two runs differ; None if they do not."""
    for step in sorted(a.keys() & b.keys(), key=int):
        for path in sorted(a[step].keys() | b[step].keys()):
            if a[step].get(path) != b[step].get(path):
                return f"step {step}: {path}"
    return None


def recorded(name: str, dtype: str, flags: str) -> dict[str, Any]:
    """Train a network in all ways; return what was recorded, and under the key "errors" what failed."""
    found: dict[str, Any] = {}
    errors = []
    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if flags:
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    directory = Path(tempfile.mkdtemp(prefix="jstep-bits-"))
    try:
        for what, number in (("all", 0), ("again", 0), ("killed", 0), ("killed", 1)):
            result = directory / f"{what}{number}.json"
            command = [
                sys.executable,
                str(HERE / "bits_runs.py"),
                name,
                dtype,
                what,
                str(directory / what),
                str(result),
            ]
            try:
                done = subprocess.run(
                    command, env=variables, timeout=max(1, seconds_left()), capture_output=True, text=True, check=False
                )
            except subprocess.TimeoutExpired:
                errors.append(f"{what}: no time was left")
                break
            if result.exists():
                ways = json.loads(result.read_text(encoding="utf-8"))
                errors += ways.pop("errors")
                found |= ways
            # The first start of `killed` is to be killed.
            if done.returncode != (-9 if (what, number) == ("killed", 0) else 0):
                errors.append(
                    f"{what}: exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}"
                )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return found | {"errors": errors}


def compare(report: PartReport, title: str, found: dict[str, Any], flags: str) -> list[str]:
    """Add a row for each promise; return those that do not hold."""
    broken = []
    for way, (other, what, is_promised) in PROMISES.items():
        if way not in found or other not in found:
            continue
        difference = first_difference(found[other], found[way])
        steps = len(found[other].keys() & found[way].keys())
        seen = "the same bits" if difference is None else f"differs from {difference}"
        report.row(f"{title}: {what}", promised="yes" if is_promised else "no", seen=seen, states=steps,
                   flags=flags or "none")  # fmt: skip
        if is_promised and difference is not None:
            broken.append(what)
    for error in found["errors"]:
        report.row(f"{title}: a process", failed=error, flags=flags or "none")
    return broken


def main() -> int:
    report = PartReport("bits")
    chosen = sys.argv[1:] or [f"{name}-{dtype}" for dtype, name in itertools.product(DTYPES, NETWORKS)]
    if QUICK and not sys.argv[1:]:
        chosen = chosen[:1]
    failed, table = False, {}
    for title in chosen:
        name, _, dtype = title.partition("-")
        if name not in NETWORKS or dtype not in DTYPES:
            report.say(f"  {title}: must be one of {NETWORKS} and one of {DTYPES}, as dense-float32")
            return 2
        if seconds_left() < 60:
            report.left_out(title, f"no time is left: tests/accelerator.sh bits:{title}")
            continue
        for flags in ["", *FLAGS.get(report.backend, [])]:
            found = recorded(name, dtype, flags)
            broken = compare(report, title, found, flags)
            table[title, flags] = broken
            failed |= bool(found["errors"])
            if not broken or seconds_left() < 60:
                break
        failed |= bool(broken)
    report.say("\n| network | flags | promises that do not hold |\n|---|---|---|")
    for (title, flags), broken in table.items():
        report.say(f"| {title} | {flags or 'none'} | {', '.join(broken) or 'all hold'} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

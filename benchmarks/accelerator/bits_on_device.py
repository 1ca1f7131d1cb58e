"""The part bits: which promises of docs/how/bits.md hold on this device, and under which flags of
XLA.

Each network is trained in several processes (bits_runs.py), and the fingerprints of all leaves are
compared at each step that two runs recorded. Each network has an equal share of the time, since
compiling some thirty programs may take minutes. Networks in which a promise does not hold are then
trained again with XLA's flags for deterministic programs. This process uses no device.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from part_report import QUICK, PartReport, last_line, run_child, seconds_left

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
FLAGS = {
    "gpu": [
        "--xla_gpu_autotune_level=0",
        "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true",
    ]
}
"""Backend → the flags that are tried one after the other, until all promises hold."""


def first_difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """Return the first step, and its first leaf, in which two runs differ; None if they do not."""
    for step in sorted(a.keys() & b.keys(), key=int):
        for path in sorted(a[step].keys() | b[step].keys()):
            if a[step].get(path) != b[step].get(path):
                return f"step {step}: {path}"
    return None


def recorded(name: str, dtype: str, flags: str, share: float) -> dict[str, Any]:
    """Train a network in all ways, in some seconds; return {"ways": …, "errors": …, "left_out": …}.

    What there is no time for is among the last ways of the last process.
    """
    found: dict[str, Any] = {"ways": {}, "errors": [], "left_out": []}
    variables = dict(os.environ)
    if flags:
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    directory, began = Path(tempfile.mkdtemp(prefix="jstep-bits-")), time.time()
    try:
        for what, number in (("first", 0), ("killed", 0), ("killed", 1), ("others", 0)):
            result = directory / f"{what}{number}.json"
            command = [sys.executable, str(HERE / "bits_runs.py"), name, dtype, what,
                       str(directory / what), str(result)]  # fmt: skip
            try:
                code = run_child(
                    command, variables | {"BITS_UNTIL": str(began + share)}, seconds_left()
                )
            except subprocess.TimeoutExpired:
                code = None
            if result.exists():
                one = json.loads(result.read_text(encoding="utf-8"))
                found = {"ways": found["ways"] | one["ways"],
                         "errors": found["errors"] + one["errors"],
                         "left_out": found["left_out"] + one["left_out"]}  # fmt: skip
            # The first start of `killed` is to be killed.
            expected = -9 if (what, number) == ("killed", 0) and not found["left_out"] else 0
            if code is None:
                found["left_out"].append(f"the rest of the process {what!r}")
            elif code.returncode != expected:
                found["errors"].append(
                    f"{what}: exit code {code.returncode}: {last_line(code.stderr)}"
                )
            if found["left_out"]:
                found["left_out"] += ["the processes after it"] if what != "others" else []
                break
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return found


def compare(report: PartReport, title: str, found: dict[str, Any], flags: str) -> list[str]:
    """Add a row for each promise; return those that do not hold."""
    broken, ways = [], found["ways"]
    for way, (other, what, is_promised) in PROMISES.items():
        if way not in ways or other not in ways:
            continue
        difference = first_difference(ways[other], ways[way])
        steps = len(ways[other].keys() & ways[way].keys())
        seen = "the same bits" if difference is None else f"differs from {difference}"
        seen = seen if steps else "no state in common"
        report.row(f"{title}: {what}", promised="yes" if is_promised else "no", seen=seen,
                   states=steps, flags=flags or "none")  # fmt: skip
        if is_promised and (difference is not None or not steps):
            broken.append(what)
    for error in found["errors"]:
        report.row(f"{title}: a process", failed=error, flags=flags or "none")
    if found["left_out"]:
        report.left_out(
            f"{title}: {', '.join(found['left_out'])}",
            f"no time: benchmarks/accelerator.sh bits:{title}",
        )
    return broken


def main() -> int:
    report = PartReport("bits")
    chosen = sys.argv[1:] or [
        f"{name}-{dtype}" for dtype, name in itertools.product(DTYPES, NETWORKS)
    ]
    if QUICK and not sys.argv[1:]:
        chosen = chosen[:1]
    if wrong := [
        title
        for title in chosen
        if title.partition("-")[::2] not in itertools.product(NETWORKS, DTYPES)
    ]:
        report.say(f"  {wrong[0]}: must be one of {NETWORKS} and one of {DTYPES}, as dense-float32")
        return 2
    failed, table = False, {}
    for flags in ["", *FLAGS.get(report.backend, [])]:
        for i, title in enumerate(chosen):
            if seconds_left() < 20:
                report.left_out(
                    title,
                    f"no time is left for flags {flags or 'none'}: "
                    f"benchmarks/accelerator.sh bits:{title}",
                )
                continue
            name, _, dtype = title.partition("-")
            found = recorded(name, dtype, flags, seconds_left() / (len(chosen) - i))
            table[title, flags] = broken = compare(report, title, found, flags)
            failed |= bool(found["errors"] or (broken and not flags))
        chosen = [title for title in chosen if table.get((title, flags))]
    report.say("\n| network | flags | promises that do not hold |\n|---|---|---|")
    for (title, flags), broken in table.items():
        report.say(f"| {title} | {flags or 'none'} | {', '.join(broken) or 'all hold'} |")
    return 1 if failed or not table else 0


if __name__ == "__main__":
    sys.exit(main())

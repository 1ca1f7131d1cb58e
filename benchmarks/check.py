"""Run the benchmarks with bounds (`bounds.toml`); fail if a ratio is too large when idle.

    python benchmarks/check.py               # those of all benchmarks in bounds.toml
    python benchmarks/check.py --only feed   # bench_feed.py alone

A busy machine changes ratios, so each run is judged together with what other processes did
meanwhile: the cores that they used, and the time that the hypervisor took (steal). A benchmark with
a ratio that is too large is repeated. The ratio is "OVER" if it is too large in all runs of an idle
machine; if there was no such run, it is "not judged". The exit code is 1 if a ratio is over, or was
not measured.

A bound is what was asked. Some are not reached, for a reason that `bounds.toml` gives: these have a
limit as well. Up to it they are "above the bound, as known", and above it they have become worse:
"OVER".
"""

import argparse
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bounds import BOUNDS, LIMITS
from report import ratios_in, run

OTHERS, STEAL = 0.15, 0.02
"""The cores that other processes may use on an idle machine, and the share of the time that may be
stolen from it."""
OK = "ok"
KNOWN = "above the bound, as known"
OVER = "OVER"
MISSING = "not measured"
NOT_JUDGED = "not judged: the machine was busy"
Pair = tuple[str, str]


class Sample(NamedTuple):
    """The time of a clock, and the seconds since the start of the machine, summed over its cores.

    Attributes:
        at: The time.
        used: The seconds that all processes used.
        stolen: The seconds that the hypervisor took.
        own: The seconds that this process and its children used, which have ended.
    """

    at: float
    used: float
    stolen: float
    own: float


class Load(NamedTuple):
    """How busy a machine was.

    Attributes:
        others: The cores that other processes used, on average.
        steal: The share of the time that the hypervisor took.
    """

    others: float
    steal: float

    @property
    def is_idle(self) -> bool:
        """Whether ratios can be judged."""
        return self.others <= OTHERS and self.steal <= STEAL

    def __str__(self) -> str:
        return f"other processes used {self.others:.2f} cores, steal {self.steal:.1%}"


class Attempt(NamedTuple):
    """One run of a benchmark.

    Attributes:
        ratios: What was measured.
        load: How busy the machine was.
    """

    ratios: Mapping[Pair, float]
    load: Load


def load_between(before: Sample, after: Sample, cores: int) -> Load:
    """How busy the machine was between two samples."""
    seconds = max(after.at - before.at, 1e-9)
    others = (after.used - before.used) - (after.own - before.own)
    return Load(max(0.0, others) / seconds, (after.stolen - before.stolen) / (seconds * cores))


def sample_of(stat: str, ticks: int, own: float, at: float) -> Sample:
    """The sample for the text of `/proc/stat`, which counts in ticks per second."""
    user, nice, system, _, _, irq, softirq, steal = (
        int(x) / ticks for x in stat.splitlines()[0].split()[1:9]
    )
    return Sample(at, user + nice + system + irq + softirq, steal, own)


def judged(
    pair: Pair, bound: float, attempts: Sequence[Attempt], limit: float | None = None
) -> str:
    """The verdict on a ratio; `limit` is the largest one that is known, if the bound is not
    reached."""
    found = [(one.ratios[pair], one.load.is_idle) for one in attempts if pair in one.ratios]
    if not found:
        return MISSING
    idle = [ratio for ratio, is_idle in found if is_idle]
    least = min(idle or (ratio for ratio, _ in found))
    if least <= bound:
        return OK
    if limit is not None and least <= limit:
        return KNOWN
    return OVER if idle else NOT_JUDGED


def is_settled(
    bounds: Mapping[Pair, float],
    attempts: Sequence[Attempt],
    limits: Mapping[Pair, float] | None = None,
) -> bool:
    """Whether no repetition is needed: all ratios are within their bounds, or known."""
    limits = limits or {}
    return all(
        judged(pair, bound, attempts, limits.get(pair)) in (OK, KNOWN)
        for pair, bound in bounds.items()
    )


def _sample() -> Sample:
    own = sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    stat = Path("/proc/stat").read_text(encoding="ascii")
    return sample_of(stat, os.sysconf("SC_CLK_TCK"), own, time.monotonic())


def _wait_until_idle(limit: float) -> Load:
    """Wait until the machine is idle, at most so many seconds; return how busy it is."""
    end = time.monotonic() + limit
    while True:
        before = _sample()
        time.sleep(5)
        load = load_between(before, _sample(), os.cpu_count() or 1)
        if load.is_idle or time.monotonic() >= end:
            return load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks, print verdicts; return 1 if a ratio is over or was not measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=sorted(BOUNDS), metavar="NAME", help="repeatable"
    )
    parser.add_argument(
        "--attempts", type=int, default=3, help="runs of a benchmark at most (default: 3)"
    )
    parser.add_argument(
        "--wait", type=float, default=600, help="seconds to wait for an idle machine (default: 600)"
    )
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds for one run (default: 3600)"
    )
    given = parser.parse_args(argv)
    failed = False
    for name in given.only or sorted(BOUNDS):
        attempts: list[Attempt] = []
        limits = LIMITS.get(name, {})
        for _ in range(given.attempts):
            print(
                f"{name}: before it, {_wait_until_idle(given.wait)}; "
                f"load average {os.getloadavg()[0]:.2f}",
                flush=True,
            )
            before = _sample()
            output, failure = run(name, False, given.limit)
            load = load_between(before, _sample(), os.cpu_count() or 1)
            print(
                output if failure is None else f"{output}\n{name}: {failure}",
                f"\n{name}: {load}",
                flush=True,
            )
            attempts.append(
                Attempt({(one.ours, one.peer): one.ratio for one in ratios_in(output)}, load)
            )
            if is_settled(BOUNDS[name], attempts, limits):
                break
        for (ours, peer), bound in BOUNDS[name].items():
            verdict = judged((ours, peer), bound, attempts, limits.get((ours, peer)))
            ratios = ", ".join(
                f"{one.ratios[ours, peer]:.3f}" for one in attempts if (ours, peer) in one.ratios
            )
            print(
                f"{name}: {ours} / {peer}: {ratios or '-'} (bound {bound:g}): {verdict}", flush=True
            )
            failed |= verdict in (OVER, MISSING)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Interleaved timing: contenders take turns in shuffled order, so that slow phases of the machine affect all alike."""

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping

import jax


def interleaved(contenders: Mapping[str, Callable[[int], object]], calls: int, rounds: int = 15) -> dict[str, list]:
    """Return the seconds per call of each contender, one value per round.

    If `JSTEP_QUICK_BENCHMARKS` is set in the environment, there are at most three rounds, enough to check that the
    benchmark runs.

    Args:
        contenders: Name → `run(calls)`, which makes that many calls and returns arrays to wait for.
        calls: Number of calls per turn.
        rounds: Number of turns of each contender.
    """
    if os.environ.get("JSTEP_QUICK_BENCHMARKS"):
        rounds = min(rounds, 3)
    for run in contenders.values():
        jax.block_until_ready(run(max(3, calls // 10)))
    times: dict[str, list] = {name: [] for name in contenders}
    names, shuffled = list(contenders), random.Random(0)
    for _ in range(rounds):
        # In a fixed order the same contender would always run after a heavy one: after a scan of 100 steps, the next
        # thousand calls of any contender take about 10 µs longer.
        shuffled.shuffle(names)
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(contenders[name](calls))
            times[name].append((time.perf_counter() - start) / calls)
    return times


def report(title: str, times: Mapping[str, list], bounds: Mapping[tuple[str, str], float], unit: float = 1e6) -> bool:
    """Print medians and ratios; return whether all bounds hold.

    A ratio is the median of the ratios of the rounds, which varies less than the ratio of the medians.
    """
    name_of_unit = {1e6: "µs", 1e3: "ms", 1.0: "s"}[unit]
    print(f"\n{title}")
    for name, seconds in times.items():
        print(
            f"  {name:34s} {statistics.median(seconds) * unit:10.2f} {name_of_unit}  (best {min(seconds) * unit:.2f})"
        )
    good = True
    for (ours, peer), bound in bounds.items():
        ratio = statistics.median(a / b for a, b in zip(times[ours], times[peer], strict=True))
        good &= report_ratio(ours, peer, ratio, bound)
    return good


def report_ratio(ours: str, peer: str, ratio: float, bound: float | None = None) -> bool:
    """Print a ratio in the format that `report.py` parses, below a title; return whether its bound holds."""
    if bound is None:
        print(f"  {ours} / {peer}: {ratio:.3f}")
        return True
    print(f"  {ours} / {peer}: {ratio:.3f}  (bound {bound}) {'ok' if ratio <= bound else 'OVER'}")
    return ratio <= bound

"""Interleaved timing: contenders take turns, in an order drawn anew, so that a slow spell hits all alike."""

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping

import jax


def interleaved(contenders: Mapping[str, Callable[[int], object]], calls: int, rounds: int = 15) -> dict[str, list]:
    """Seconds per call of each contender, one figure a round.

    With the environment variable `JSTEP_QUICK_BENCHMARKS` there are three rounds: to see that all of it runs.

    Args:
        contenders: Name → `run(calls)`, which makes that many calls and returns arrays to wait for.
        calls: How many calls a turn.
        rounds: How many turns each.
    """
    if os.environ.get("JSTEP_QUICK_BENCHMARKS"):
        rounds = min(rounds, 3)
    for run in contenders.values():
        jax.block_until_ready(run(max(3, calls // 10)))
    times: dict[str, list] = {name: [] for name in contenders}
    names, shuffled = list(contenders), random.Random(0)
    for _ in range(rounds):
        # In one fixed order the same one would always follow a heavy neighbour: after a scan of 100 steps the next
        # thousand calls of any contender take some 10 µs longer.
        shuffled.shuffle(names)
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(contenders[name](calls))
            times[name].append((time.perf_counter() - start) / calls)
    return times


def report(title: str, times: Mapping[str, list], bounds: Mapping[tuple[str, str], float], unit: float = 1e6) -> bool:
    """Prints medians and the ratios that have a bound; returns whether all hold.

    A ratio is the median of the ratios of the rounds, which is steadier than the ratio of medians.
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
    """Prints a ratio in the form that `report.py` reads, below a title; returns whether its bound holds."""
    if bound is None:
        print(f"  {ours} / {peer}: {ratio:.3f}")
        return True
    print(f"  {ours} / {peer}: {ratio:.3f}  (bound {bound}) {'ok' if ratio <= bound else 'OVER'}")
    return ratio <= bound

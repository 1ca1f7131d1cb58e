"""Interleaved timing: contenders take turns in shuffled order, so that slow phases of the machine
affect all alike."""

import compileall
import io
import itertools
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax

import jstep

T = TypeVar("T")

# With PYTHONDONTWRITEBYTECODE=1, each process that a benchmark starts would compile an editable
# jstep again, but not the packages that it is compared with, which pip compiled.
compileall.compile_dir(os.path.dirname(jstep.__file__), quiet=1)


def interleaved(
    contenders: Mapping[str, Callable[[int], object]], calls: int, rounds: int = 15
) -> dict[str, list]:
    """Return the seconds per call of each contender, one value per round.

    If `JSTEP_QUICK_BENCHMARKS` is set in the environment, there are at most three rounds, enough to
    check that the benchmark runs.

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
        # In a fixed order the same contender would always run after a heavy one: after a scan of
        # 100 steps, the next thousand calls of any contender take about 10 µs longer.
        shuffled.shuffle(names)
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(contenders[name](calls))
            times[name].append((time.perf_counter() - start) / calls)
    return times


def in_turn(
    contenders: Mapping[str, Callable[[int], T]], calls: int, rounds: int, warm_up: int
) -> dict[str, list[T]]:
    """Return what `run(calls)` of each contender returns, one value per round, in a fixed order.

    With `JSTEP_QUICK_BENCHMARKS` there are three rounds.
    """
    if os.environ.get("JSTEP_QUICK_BENCHMARKS"):
        rounds = 3
    for run in contenders.values():
        run(warm_up)
    times: dict[str, list[T]] = {name: [] for name in contenders}
    for _, (name, run) in itertools.product(range(rounds), contenders.items()):
        times[name].append(run(calls))
    return times


class ThreadTimes(NamedTuple):
    """Seconds of one thread, from any moment on.

    Attributes:
        wall: The time of the clock.
        cpu: The time on a core.
        delay: The time in which the thread was ready to run, and all cores were taken; 0 except on
            Linux.
    """

    wall: float
    cpu: float
    delay: float

    @classmethod
    def now(cls) -> "ThreadTimes":
        """The times of the calling thread."""
        try:
            with open("/proc/thread-self/schedstat") as file:
                _, delay, _ = file.read().split()
        except OSError:
            delay = "0"
        return cls(time.perf_counter(), time.thread_time(), int(delay) * 1e-9)

    def per_step(self, began: "ThreadTimes", steps: int) -> "ThreadTimes":
        """The times from `began` to these, for each of so many steps."""
        return ThreadTimes(*((end - start) / steps for end, start in zip(self, began, strict=True)))

    @property
    def delay_share(self) -> float:
        """The delay as a share of the time of the clock."""
        return self.delay / self.wall


class Timer(jstep.Hook):
    """Times all steps but the first ones, excluding opening and closing files at both ends.

    Args:
        untimed: Number of steps that are not timed; the first call never is, because it compiles.
        pause: Seconds to wait in each step that is timed.

    Attributes:
        times: Those of the thread of the loop, per step.
        taken: The seconds of the clock, per step.
    """

    def __init__(self, untimed=1, pause=0):
        self.untimed, self.pause, self.started = untimed, pause, None

    def after_step(self, step, state, metrics):
        if self.started is None:
            if step >= self.untimed:
                self.started, self.first = ThreadTimes.now(), step
        elif self.pause:
            time.sleep(self.pause)

    def end(self, step, state):
        jax.block_until_ready(state)
        self.times = ThreadTimes.now().per_step(self.started, step - self.first)
        self.taken = self.times.wall

    def next_due(self, step):
        return step + 1 if self.pause or self.started is None else 2**62


def format_log_lines_unseen():
    """Format the lines of the log, as in a program that shows them, but do not show them."""
    logger = logging.getLogger("jstep")
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def runner(step, state, *args):
    """Return a contender of `interleaved`, which continues from the state of its last turn."""
    held = [state]

    def run(calls):
        for _ in range(calls):
            held[0] = step(held[0], *args)
        return held[0]

    return run


def optax_step(transformation):
    """Return the update of a transformation of Optax: from (params, slots) and gradients to
    (params, slots)."""
    import optax

    def step(state, grads):
        params, slots = state
        updates, slots = transformation.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots

    return step


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call and of what it starts."""
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def report(
    title: str,
    times: Mapping[str, list],
    bounds: Mapping[tuple[str, str], float],
    unit: float = 1e6,
) -> bool:
    """Print medians and ratios; return whether all bounds hold.

    A ratio is the median of the ratios of the rounds, which varies less than the ratio of the
    medians.
    """
    name_of_unit = {1e6: "µs", 1e3: "ms", 1.0: "s"}[unit]
    print(f"\n{title}")
    for name, seconds in times.items():
        print(
            f"  {name:34s} {statistics.median(seconds) * unit:10.2f} {name_of_unit}  (best "
            f"{min(seconds) * unit:.2f})"
        )
    good = True
    for (ours, peer), bound in bounds.items():
        ratio = statistics.median(a / b for a, b in zip(times[ours], times[peer], strict=True))
        good &= report_ratio(ours, peer, ratio, bound)
    return good


def report_ratio(
    ours: str, peer: str, ratio: float, bound: float | None = None, beside: str = ""
) -> bool:
    """Print a ratio as `report.py` parses it, below a title; return whether its bound holds.

    `beside` follows on the same line, in brackets.
    """
    line = f"  {ours} / {peer}: {ratio:.3f}"
    if bound is not None:
        line += f"  (bound {bound}) {'ok' if ratio <= bound else 'OVER'}"
    print(f"{line}  [{beside}]" if beside else line)
    return bound is None or ratio <= bound

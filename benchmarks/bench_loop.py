"""Overhead of `train` with its default hooks, compared with a bare `for` loop of the same calls.

    python benchmarks/bench_loop.py

The batch lies on the device, and steps take about 35 µs (those of bench_step.py), so the loop
dominates the measurement; steps of 8 layers take about a millisecond, and those of the transformer
more than ten. bench_feed.py has batches of NumPy arrays. `train` counts steps, logs, writes
summaries and saves checkpoints; each run resumes where the previous one ended. A loop of 100 steps
per call stacks its batches by one compiled call, as `train` does.

A step needs two cores, one for the thread of the loop and one for XLA's. If another process takes
one of them, both share the other, and the times of the clock grow by tens of microseconds that
nobody has spent. So small steps that are called one by one, whose loop is slower than XLA, are
compared by the CPU time of the loop's thread, and all others by the clock. Beside each ratio stands
the run delay of that thread, in which it was ready and had no core; rounds in which it was above 5
% are dropped, if there are others.
"""

import shutil
import statistics
import sys
import tempfile

import jax
import jax.numpy as jnp
from _timing import ThreadTimes, Timer, format_log_lines_unseen, in_turn, report_ratio
from bench_step import NETWORKS
from bounds import BOUNDS

import jstep

CALLS, ROUNDS, K = 5_000, 41, 100
LARGER = {"8 layers": (200, 11), "transformer": (50, 7)}
"""Larger networks of bench_step.py → the steps of a run, and the rounds."""
MAX_DELAY = 0.05
"""The share of run delay above which a round is dropped."""


class Loops:
    """Loops over one network, each with a state of its own, from which its next run continues."""

    def __init__(self, network):
        self.network = network
        schedule = jstep.exponential_decay(1e-3, 1000, 0.96, staircase=True)
        self.optimizer = jstep.adam(schedule)
        self.step = jstep.minimize(network.loss, self.optimizer)
        self.several = jstep.scan_steps(self.step)
        self.stack = jax.jit(
            lambda *batches: jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        )
        self.held = {}

    def state(self, name):
        """The state that a loop continues from."""
        if name not in self.held:
            self.held[name] = jstep.TrainState.create(
                self.network.init(jax.random.key(0)), self.optimizer
            )
        return self.held[name]

    def batches(self, step):
        """The batch of a step."""
        return self.network.batch

    def bare(self, calls):
        """Return the times of a loop of single steps, per step."""
        state = self.state("bare")
        start = jstep.global_step(state)
        started = ThreadTimes.now()
        for n in range(start, start + calls):
            state, _ = self.step(state, *self.batches(n))
        jax.block_until_ready(state)
        times = ThreadTimes.now().per_step(started, calls)
        self.held["bare"] = state
        return times

    def bare_several(self, calls):
        """Return the times of a loop of K steps per call, per step."""
        state = self.state("bare, several")
        start = jstep.global_step(state)
        started = ThreadTimes.now()
        for n in range(start, start + calls, K):
            state, _ = self.several(state, *self.stack(*map(self.batches, range(n, n + K))))
        jax.block_until_ready(state)
        times = ThreadTimes.now().per_step(started, calls)
        self.held["bare, several"] = state
        return times

    def train(self, name, calls, steps_per_call=1, *hooks):
        """Return the times of `train`, per step."""
        directory, hook, state = tempfile.mkdtemp(), Timer(), self.state(name)
        self.held[name] = jstep.train(
            self.step, state, self.batches, jstep.global_step(state) + calls, hooks=[hook, *hooks],
            checkpoint_dir=directory + "/checkpoints", logdir=directory + "/logs",
            steps_per_call=steps_per_call,
        )  # fmt: skip
        shutil.rmtree(directory)
        return hook.times

    def own(self, name, calls, *, makes_batches=False):
        """Return the times of a loop of one's own, which takes its batches or makes them, per
        step."""
        directory, hook, state = tempfile.mkdtemp(), Timer(), self.state(name)
        with jstep.Run(
            self.step, state, None if makes_batches else self.batches,
            jstep.global_step(state) + calls, hooks=[hook],
            checkpoint_dir=directory + "/checkpoints", logdir=directory + "/logs",
        ) as run:  # fmt: skip
            for step in run:
                if makes_batches:
                    run.train_step(*self.batches(step))
        self.held[name] = run.state
        shutil.rmtree(directory)
        return hook.times


def write(step, values):
    """Take what a MetricsHook gives."""


def measured(contenders, calls, rounds):
    """Return the times a step of each contender, one value per round."""
    return in_turn(contenders, calls, rounds, max(calls // 5, K))


def report_loops(title, times, bounds, of):
    """Print medians, and ratios of one of the times; return whether all bounds hold."""
    print(f"\n{title}")
    for name, rounds in times.items():
        wall, cpu = (
            1e6 * statistics.median(getattr(one, each) for one in rounds)
            for each in ("wall", "cpu")
        )
        print(
            f"  {name:34s} {cpu:10.2f} µs of CPU, {wall:10.2f} of the clock, "
            f"run delay {delay_of(rounds):.1%}"
        )
    good = True
    for (ours, peer), bound in bounds.items():
        rounds = list(zip(times[ours], times[peer], strict=True))
        quiet = [(a, b) for a, b in rounds if max(a.delay_share, b.delay_share) <= MAX_DELAY]
        ratio = statistics.median(getattr(a, of) / getattr(b, of) for a, b in quiet or rounds)
        delays = " and ".join(
            f"{delay_of(column):.1%}" for column in zip(*quiet or rounds, strict=True)
        )
        beside = f"run delay {delays}; {len(quiet)} of {len(rounds)} rounds are quiet"
        good &= report_ratio(ours, peer, ratio, bound, beside)
    return good


def delay_of(rounds):
    """The median share of run delay."""
    return statistics.median(one.delay_share for one in rounds)


def main():
    format_log_lines_unseen()
    small = Loops(NETWORKS["2 layers"])
    contenders = {
        "bare loop": small.bare,
        f"bare loop, {K} per call": small.bare_several,
        "train, four hooks": lambda calls: small.train("train", calls),
        "for step in run": lambda calls: small.own("own", calls),
        "run.train_step": lambda calls: small.own("made", calls, makes_batches=True),
        "train, not watched": lambda calls: small.train(
            "unwatched", calls, 1, jstep.StallHook(warn_secs=None)
        ),
        "train, MetricsHook": lambda calls: small.train(
            "metrics", calls, 1, jstep.MetricsHook(write)
        ),
        "train, MetricsHook, mean": lambda calls: small.train(
            "mean", calls, 1, jstep.MetricsHook(write, mean=True)
        ),
        f"train, steps_per_call={K}": lambda calls: small.train("several", calls, K),
        "train, steps_per_call=auto": lambda calls: small.train("auto", calls, "auto"),
    }
    title = "counter, logging, summaries, checkpoints; per step"
    times = measured(contenders, CALLS, ROUNDS)
    several = {
        name: rounds for name, rounds in times.items() if "per call" in name or "per_call" in name
    }
    single = {name: rounds for name, rounds in times.items() if name not in several}
    title_of_cpu = f"{CALLS} steps of 2 layers, CPU of the loop's thread: {title}"
    good = report_loops(title_of_cpu, single, pairs(single), "cpu")
    good &= report_loops(
        f"{CALLS} steps of 2 layers, several per call: {title}", several, pairs(several), "wall"
    )
    times = {name: times[name] for name in ("bare loop", "train, steps_per_call=auto")}
    two_features = {("train, steps_per_call=auto", "bare loop"): None}
    report_loops(
        "Two features, many steps per call compared with one: steps of 2 layers",
        times,
        two_features,
        "wall",
    )
    for name, (calls, rounds) in LARGER.items():
        loops = Loops(NETWORKS[name])
        both = {
            f"bare loop, {name}": loops.bare,
            f"train, {name}": lambda calls, loops=loops: loops.train("t", calls),
        }
        times = measured(both, calls, rounds)
        good &= report_loops(f"{calls} steps of {name}: {title}", times, pairs(times), "wall")
    return good


def pairs(times):
    """The bounds of those that were measured."""
    return {pair: bound for pair, bound in BOUNDS["loop"].items() if pair[0] in times}


if __name__ == "__main__":
    sys.exit(not main())

"""Measure steps per second and FLOP/s utilization."""

import time
from collections import deque
from typing import Any, NamedTuple

import jax

from jstep.core import trees
from jstep.hooks.cadence import UNSET, CadencedHook, cadence
from jstep.hooks.dispatched_steps import Steps
from jstep.hooks.hook import Clock, Metrics, RunInfo
from jstep.hooks.utilization import Utilization, UtilizationMeter
from jstep.hooks.writers import check_writer
from jstep.state import TrainState, get_global_step

TAG = "global_step/sec"
_HISTORY = 1000
"""The number of measurements kept for lines that are delivered late."""


class _UnfinishedInterval(NamedTuple):
    step: int
    markers: list[Any]
    since: float
    """All later steps were dispatched after this time."""
    dispatched: Steps | None
    """The steps dispatched so far."""


class _Figure(NamedTuple):
    step: int
    rate: float
    examples: float | None
    utilization: Utilization | None


class StepCounterHook(CadencedHook):
    """A hook that measures `global_step/sec` and FLOP/s utilization, counting steps that the device has finished.

    The loop may be many steps ahead of the device, so a step counts only once its metrics are ready; the hook checks
    this after every call while it waits for them. A measurement is the mean over an interval, or over several if the
    device was behind, and never higher than the device's rate. The first interval begins after the first step, which
    excludes compilation.

    If the peak of the device is known, the hook also measures the model FLOP/s utilization:

        mfu = operations of a step · steps per second / (peak of a device · number of devices)

    which is shown in log lines, the progress line and TensorBoard. The operations are those of the traced step as
    counted by `jstep.cost`, for each stage and each shape of the batch. Loops count as often as they run, except those
    whose length depends on values, which count once. A Pallas kernel counts by its `cost_estimate`, or without one as
    one operation for each element of its results. A step that recomputes (`jax.checkpoint`) performs more operations
    than the model requires, so the name is then `hfu` (hardware FLOP/s utilization). The peak is the dense peak for the
    formats of the step's matrix products: float32 means TF32 on an A100 and bfloat16 on a TPU, unless their `precision`
    is set. It is tabulated for TPUs v2 to tpu7x and NVIDIA's data-center GPUs from V100 to GB200. For other devices,
    such as a CPU, and for a step that is not compiled, nothing is shown unless `peak_flops` and `flops_per_step` are
    given as needed.

    Args:
        every_n_steps: Interval in steps.
        every_n_secs: Interval in seconds. If both are given, whichever comes first.
        summary_writer: Any object with `add_summary(summary, global_step)`; receives the scalar `global_step/sec`. None
            for the one that `train` opens in its `logdir`, if any.
        peak_flops: Peak operations per second of one device; None to look it up in the table.
        flops_per_step: Operations of a whole step over all devices, such as 6 · parameters · tokens; None to count
            those of the traced step. If given, the name is always `mfu`.
        clock: Returns seconds; replaced in tests.

    Attributes:
        steps_per_sec: The latest rate in steps per second; None before the first measurement.
        examples_per_sec: The latest rate in examples per second; None if the size of a batch is not known.
        mfu: The latest utilization, a fraction; None if it is not known, or if it is reported as `hfu`.
        hfu: The latest utilization of a step that recomputes; None otherwise.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An interval, `peak_flops` or `flops_per_step` is not positive.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> counter = jstep.StepCounterHook(every_n_steps=2, peak_flops=50e9)
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": jnp.ones((8, 8))}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: jnp.mean((x @ params["w"]) ** 2), optimizer)
        >>> state = jstep.train(train_step, state, [jnp.ones((4, 8))] * 6, 6, hooks=[counter])
        >>> counter.mfu > 0
        True

    Source: `tf.train.StepCounterHook`, which includes compilation. MFU and HFU: Chowdhery et al., "PaLM" (2022),
    appendix B. If passed to `train` in hooks, it replaces the stock one.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = UNSET,
        every_n_secs: float | None = None,
        summary_writer: Any = None,
        peak_flops: float | None = None,
        flops_per_step: float | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__(
            cadence(steps=("every_n_steps", every_n_steps), secs=("every_n_secs", every_n_secs), clock=clock)
        )
        self._writer, self._clock = check_writer(summary_writer), clock
        self._takes_writer = summary_writer is None
        self._meter = UtilizationMeter(peak_flops, flops_per_step)
        self._forget()

    def _forget(self) -> None:
        self._since: tuple[int, float, Steps | None] | None = None
        self._compiled = 0
        self._unfinished: deque[_UnfinishedInterval] = deque()
        self._unfinished_at = 0.0
        self._figures: deque[_Figure] = deque(maxlen=_HISTORY)
        self._sizes: list[tuple[int, int | None]] = []  # (step, rows of a batch from that step)
        self._examples_per_sec: float | None = None
        self.steps_per_sec: float | None = None
        self.utilization: Utilization | None = None

    @property
    def examples_per_sec(self) -> float | None:
        """The latest rate in examples per second; None if the size of a batch is not known."""
        return self._examples_per_sec

    @property
    def mfu(self) -> float | None:
        """The latest model FLOP/s utilization, or None."""
        return self._share("mfu")

    @property
    def hfu(self) -> float | None:
        """The latest hardware FLOP/s utilization, or None."""
        return self._share("hfu")

    def _share(self, name: str) -> float | None:
        return None if self.utilization is None or self.utilization.name != name else self.utilization.value

    def _examples(self, first: int, last: int) -> int | None:
        """The number of examples in the steps after `first` up to `last`; None if the size of a batch is not known."""
        stops = [step for step, _ in self._sizes[1:]] + [last]
        total = 0
        for (step, rows), stop in zip(self._sizes, stops, strict=True):
            steps = min(stop, last) - max(step, first)
            if steps > 0:
                if rows is None:
                    return None
                total += steps * rows
        return total or None

    def rates_at(self, step: int) -> tuple[float | None, float | None]:
        """The rates in steps and examples per second at a step; the latest ones if it has no earlier measurement."""
        figure = self._figure_at(step)
        return (self.steps_per_sec, self._examples_per_sec) if figure is None else (figure.rate, figure.examples)

    def utilization_at(self, step: int) -> Utilization | None:
        """The utilization at a step; the latest one if it has no earlier measurement."""
        figure = self._figure_at(step)
        return self.utilization if figure is None else figure.utilization

    def _figure_at(self, step: int) -> _Figure | None:
        return next((figure for figure in reversed(self._figures) if figure.step <= step), None)

    def use_run(self, run: RunInfo) -> None:
        """Use the writer of `train` by default."""
        super().use_run(run)
        if self._takes_writer:
            self._writer = run.writer

    def begin(self, state: TrainState) -> bool | None:
        """Reset the hook; refuse a state without a global step.

        Raises:
            RuntimeError: The state has no global step.
        """
        if get_global_step(state) is None:
            raise RuntimeError("Global step should be created to use StepCounterHook.")
        self._forget()
        self._meter.begin(None if self.run is None else self.run.dispatched, state)
        return super().begin(state)

    def started(self, steps: range, metrics: Metrics, rows: int | None) -> None:
        """Begin the first interval, after compilation."""
        self._sizes, self._compiled = [(steps[0] - 1, rows)], steps[-1]
        finished = all(marker.is_ready() for marker in _markers(metrics))
        # A first call of several steps that is still running is part of the interval.
        counts = not finished and len(steps) > 1
        dispatched = self._meter.steps()
        if counts and dispatched is not None:
            dispatched = {}
        self._since = (steps[0] - 1 if counts else steps[-1], self._clock(), dispatched)
        self._every.start()

    def batch_size_changed(self, step: int, rows: int | None) -> None:
        """Record the new number of rows of a batch."""
        self._sizes.append((step, rows))

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, begins a measurement; completes earlier ones that the device has finished."""
        if self._since is None:
            self.started(range(step, step + 1), metrics, None)
        elif self._every.due(step):
            self._every.done()
            self._unfinished.append(_UnfinishedInterval(step, _markers(metrics), self._clock(), self._meter.steps()))
        self.look()

    @property
    def timer(self) -> None:
        """None: the hook must also be called while it waits for the device."""

    def next_due(self, step: int) -> int | None:
        """The next multiple; None while it waits for the device."""
        return None if self._unfinished else super().next_due(step)

    def after_last(self, step: int, metrics: Metrics) -> None:
        """Wait for the device and complete all measurements."""
        for held in tuple(self._unfinished):
            jax.block_until_ready(held.markers)
            self.look()

    def look(self) -> None:
        """Complete the measurements whose steps the device has finished."""
        if not self._unfinished:
            return
        before, finished = self._clock(), []
        while self._unfinished and all(marker.is_ready() for marker in self._unfinished[0].markers):
            finished.append(self._unfinished.popleft())
        if finished and self._since is not None and finished[-1].step > self._since[0]:
            self._count(finished, self._since, self._clock())
        if self._unfinished:
            self._unfinished_at = before

    def _count(self, finished: list[_UnfinishedInterval], since: tuple[int, float, Steps | None], now: float) -> None:
        (first, then, before), last = since, finished[-1]
        # Later steps finish after this time, so the next rate is not higher than the device's.
        self._since = (last.step, max(last.since, self._unfinished_at), last.dispatched)
        if last.step <= self._compiled:
            return  # the call that included compilation is not measured
        seconds = max(now - then, 1e-9)
        self.steps_per_sec = rate = (last.step - first) / seconds
        examples = self._examples(first, last.step)
        self._examples_per_sec = in_examples = None if examples is None else examples / seconds
        while len(self._sizes) > 1 and self._sizes[1][0] <= last.step:
            self._sizes.pop(0)
        self.utilization = share = self._meter.between(before, last.dispatched, seconds)
        for held in finished:
            if held.step > max(first, self._compiled):
                self._figures.append(_Figure(held.step, rate, in_examples, share))
                self._write({TAG: rate} if share is None else {TAG: rate, share.name: share.value}, held.step)

    def _write(self, values: dict[str, float], step: int) -> None:
        if self._writer is not None:
            from jstep.hooks.summaries import scalar

            for tag, value in values.items():
                self._writer.add_summary(scalar(tag, value), step)


def _markers(metrics: Metrics) -> list[Any]:
    """Arrays that are ready when a step is finished: its loss, or all of its metrics."""
    loss = metrics.get("loss")
    if isinstance(loss, jax.Array):
        return [loss]
    arrays = [value for value in jax.tree.leaves(dict(metrics)) if isinstance(value, jax.Array)]
    return [trees.key_data(value) for value in arrays]  # a PRNG key itself has no is_ready

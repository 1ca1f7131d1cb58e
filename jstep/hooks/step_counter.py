"""Measure steps per second, and the share of the device's peak that they reach."""

import time
from collections import deque
from typing import Any, NamedTuple

import jax

from jstep.hooks.cadence import UNSET, CadencedHook, cadence
from jstep.hooks.dispatched_steps import Steps
from jstep.hooks.hook import Clock, Metrics, RunInfo
from jstep.hooks.utilization import Utilization, UtilizationMeter
from jstep.hooks.writers import check_writer
from jstep.state import TrainState, get_global_step

TAG = "global_step/sec"
_KEPT = 1000
"""How many figures are kept for lines that come late."""


class _UnfinishedInterval(NamedTuple):
    step: int
    markers: list[Any]
    since: float
    """The steps after it were handed out later than this."""
    dispatched: Steps | None
    """The steps handed out up to it."""


class _Figure(NamedTuple):
    step: int
    rate: float
    examples: float | None
    utilization: Utilization | None


class StepCounterHook(CadencedHook):
    """Measures `global_step/sec` between the steps at which it is due: steps that the device has finished.

    The loop may be many steps ahead of the device. So a step counts from when its metrics are there, which the hook
    looks at after every call as long as it waits for them: a figure is the mean over the interval, or over several if
    the device was behind, and never higher than the device's rate. The first interval begins after the first step, so
    that compilation is left out.

    Where the peak of the device is known, it also measures how much of it `train` reaches (model FLOP/s utilization):

        mfu = operations of a step · steps per second / (peak of a device · number of devices)

    in log lines, progress line and TensorBoard. The operations are those of the traced step, as `jstep.cost` counts
    them: of each stage, of each shape of the batch; loops as often as they run, but for those whose length depends on
    values, which count once; a kernel of Pallas by its `cost_estimate`, else one for each element of its results. A
    step that recomputes (`jax.checkpoint`) does more than the model asks for, so that the name is `hfu` (hardware
    FLOP/s utilization). The peak is that of the formats of the step's matrix products, dense: float32 is TF32 on an
    A100 and bfloat16 on a TPU, unless their `precision` says otherwise. A table has it for TPUs v2 to tpu7x and for
    NVIDIA's data-center GPUs from V100 to GB200. For other devices, such as a CPU, and for a step that is not compiled,
    nothing is shown unless the arguments below say what it takes.

    Args:
        every_n_steps: How often, in steps.
        every_n_secs: How often, in seconds, instead; or as well, whichever comes first.
        summary_writer: Any object with `add_summary(summary, global_step)`; gets the scalar `global_step/sec`. None
            for the one that `train` opens in its `logdir`, if any.
        peak_flops: Operations a second of one device at its peak; None for the table's.
        flops_per_step: Operations of a whole step over all devices, such as 6 · parameters · tokens; None for those of
            the traced step. With it, the name is always `mfu`.
        clock: Seconds; for tests.

    Attributes:
        steps_per_sec: The last figure, None before there is one.
        examples_per_sec: The same in examples, where the size of a batch is known.
        mfu: The share of the peak, a fraction; None where it is not known, or called `hfu`.
        hfu: The same of a step that recomputes; else None.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A cadence, `peak_flops` or `flops_per_step` is not positive.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> counter = jstep.StepCounterHook(every_n_steps=2, peak_flops=50e9)
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": jnp.ones((8, 8))}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: jnp.mean((x @ params["w"]) ** 2), optimizer)
        >>> state = jstep.train(train_step, state, [jnp.ones((4, 8))] * 6, 6, hooks=[counter], progress=False)
        >>> counter.mfu > 0
        True

    Source: `tf.train.StepCounterHook`, which counts compilation in. MFU and HFU: Chowdhery et al., "PaLM" (2022),
    appendix B. Among the hooks of `train`, it takes the place of the stock one.
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
        self._figures: deque[_Figure] = deque(maxlen=_KEPT)
        self._sizes: list[tuple[int, int | None]] = []  # the rows of a batch from each step on
        self._examples_per_sec: float | None = None
        self.steps_per_sec: float | None = None
        self.utilization: Utilization | None = None

    @property
    def examples_per_sec(self) -> float | None:
        """The last figure in examples; None where there is none, or the size of a batch is not known."""
        return self._examples_per_sec

    @property
    def mfu(self) -> float | None:
        """The last share of the peak, as model FLOP/s utilization."""
        return self._share("mfu")

    @property
    def hfu(self) -> float | None:
        """The last share of the peak, as hardware FLOP/s utilization."""
        return self._share("hfu")

    def _share(self, name: str) -> float | None:
        return None if self.utilization is None or self.utilization.name != name else self.utilization.value

    def _examples(self, first: int, last: int) -> int | None:
        """The number of examples of the steps after `first` up to `last`; None where a batch has no known size."""
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
        """The figure of the interval that a step belongs to, in steps and in examples; else the last one before it."""
        figure = self._figure_at(step)
        return (self.steps_per_sec, self._examples_per_sec) if figure is None else (figure.rate, figure.examples)

    def utilization_at(self, step: int) -> Utilization | None:
        """Likewise the share of the peak."""
        figure = self._figure_at(step)
        return self.utilization if figure is None else figure.utilization

    def _figure_at(self, step: int) -> _Figure | None:
        return next((figure for figure in reversed(self._figures) if figure.step <= step), None)

    def use_run(self, run: RunInfo) -> None:
        """Takes the writer of `train`, where the hook was made without one."""
        super().use_run(run)
        if self._takes_writer:
            self._writer = run.writer

    def begin(self, state: TrainState) -> bool | None:
        """Refuses a state without a step.

        Raises:
            RuntimeError: The state has no global step.
        """
        if get_global_step(state) is None:
            raise RuntimeError("Global step should be created to use StepCounterHook.")
        self._forget()
        self._meter.begin(None if self.run is None else self.run.dispatched, state)
        return super().begin(state)

    def started(self, steps: range, metrics: Metrics, rows: int | None) -> None:
        """The first interval begins: what had to be compiled is compiled."""
        self._sizes, self._compiled = [(steps[0] - 1, rows)], steps[-1]
        finished = all(marker.is_ready() for marker in _markers(metrics))
        # A first call of several steps that has hardly begun is part of the interval.
        counts = not finished and len(steps) > 1
        dispatched = self._meter.steps()
        if counts and dispatched is not None:
            dispatched = {}
        self._since = (steps[0] - 1 if counts else steps[-1], self._clock(), dispatched)
        self._every.start()

    def batch_size_changed(self, step: int, rows: int | None) -> None:
        """Examples count from here by another number of rows."""
        self._sizes.append((step, rows))

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, notes the step; looks how far the device is as long as it is behind."""
        if self._since is None:
            self.started(range(step, step + 1), metrics, None)
        elif self._every.due(step):
            self._every.done()
            self._unfinished.append(_UnfinishedInterval(step, _markers(metrics), self._clock(), self._meter.steps()))
        self.look()

    @property
    def timer(self) -> None:
        """None: it looks how far the device is, too."""

    def next_due(self, step: int) -> int | None:
        """The next multiple; None as long as it waits for the device."""
        return None if self._unfinished else super().next_due(step)

    def after_last(self, step: int, metrics: Metrics) -> None:
        """Waits for the device and takes the last figures."""
        for held in tuple(self._unfinished):
            jax.block_until_ready(held.markers)
            self.look()

    def look(self) -> None:
        """Counts the steps that the device has finished since the last look."""
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
        # The steps after it end later than all of this: so the next figure is not higher than the device's rate.
        self._since = (last.step, max(last.since, self._unfinished_at), last.dispatched)
        if last.step <= self._compiled:
            return  # a call that was compiled has no figure
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
    """Arrays that are there when a step is finished: its loss, or all of its metrics."""
    loss = metrics.get("loss")
    if isinstance(loss, jax.Array):
        return [loss]
    return [value for value in jax.tree.leaves(dict(metrics)) if isinstance(value, jax.Array)]

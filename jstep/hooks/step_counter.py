"""Steps per second."""

import time
from collections import deque
from typing import Any

import jax

from jstep.hooks.cadence import UNSAID, CadencedHook, cadence
from jstep.hooks.hook import Clock, Metrics
from jstep.hooks.writers import check_writer
from jstep.state import TrainState, get_global_step

TAG = "global_step/sec"


class StepCounterHook(CadencedHook):
    """Measures `global_step/sec` between the steps at which it is due: steps that the device has finished.

    The loop may be many steps ahead of the device. So a step counts from when its metrics are there, which is looked
    at when due and at the end: a figure is the mean over the interval, or over several where the device was behind.
    The first interval begins after the first step, so that compilation is left out.

    Args:
        every_n_steps: How often, in steps.
        every_n_secs: How often, in seconds, instead; or as well, whichever comes first.
        summary_writer: Any object with `add_summary(summary, global_step)`; gets the scalar `global_step/sec`. None
            for the one that `train` opens in its `logdir`, if any.
        clock: Seconds; for tests.

    Attributes:
        steps_per_sec: The last figure, None before there is one.
        examples_per_sec: The same in examples, where the size of a batch is known.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is not positive, or none is given.

    Source: `tf.train.StepCounterHook`, which counts compilation in. Among the hooks of `train`, it takes the place of
    the stock one.
    """

    def __init__(
        self,
        every_n_steps: int | None = UNSAID,
        every_n_secs: float | None = None,
        summary_writer: Any = None,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__(
            cadence(steps=("every_n_steps", every_n_steps), secs=("every_n_secs", every_n_secs), clock=clock)
        )
        self._writer, self._clock = check_writer(summary_writer), clock
        self._takes_writer = summary_writer is None
        self._since: tuple[int, float] | None = None
        self._compiled = 0
        self._held: deque[tuple[int, list[Any]]] = deque()
        self._rows: int | None = None
        self.steps_per_sec: float | None = None

    @property
    def examples_per_sec(self) -> float | None:
        """The last figure in examples; None where there is none, or the size of a batch is not known."""
        return None if self.steps_per_sec is None or self._rows is None else self.steps_per_sec * self._rows

    def use_writer(self, summary_writer: Any, leave_out: Any) -> None:
        """Takes the writer of `train`, where the hook was made without one."""
        if self._takes_writer:
            self._writer = summary_writer

    def begin(self, state: TrainState) -> None:
        """Refuses a state without a step.

        Raises:
            RuntimeError: The state has no global step.
        """
        if get_global_step(state) is None:
            raise RuntimeError("Global step should be created to use StepCounterHook.")
        self._since, self._rows, self.steps_per_sec = None, None, None
        self._held.clear()
        super().begin(state)

    def after_first_call(self, step: int) -> None:
        """The first interval begins here: what had to be compiled is compiled."""
        self._since, self._compiled = (step, self._clock()), step
        self._every.start()

    def started(self, steps: range, metrics: Metrics, rows: int | None) -> None:
        """As `after_first_call`, where the loop can say more: the first call's steps may not even have begun."""
        self._rows = rows
        finished = all(marker.is_ready() for marker in _markers(metrics))
        self.after_first_call(steps[-1])
        if not finished:
            self._since = (steps[0] - 1, self._clock())

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """When due, notes the step and looks how far the device is."""
        if self._since is None:
            self.after_first_call(step)
        elif self._every.due(step):
            self._every.done()
            self._held.append((step, _markers(metrics)))
            self.look()
        elif self._held:
            self.look()

    def after_last(self, step: int, metrics: Metrics) -> None:
        """Waits for the device and takes the last figures."""
        for _, markers in self._held:
            jax.block_until_ready(markers)
        self.look()

    def look(self) -> None:
        """Counts the steps that the device has finished since the last look; who shows the figure looks first."""
        finished = []
        while self._held and all(marker.is_ready() for marker in self._held[0][1]):
            finished.append(self._held.popleft()[0])
        if self._since is None or not finished or finished[-1] <= self._since[0]:
            return
        (first, then), now = self._since, self._clock()
        if finished[-1] <= self._compiled:
            self._since = (finished[-1], now)  # of a call that was compiled there is no figure
            return
        self.steps_per_sec = (finished[-1] - first) / max(now - then, 1e-9)
        self._since = (finished[-1], now)
        if self._writer is not None:
            from jstep.hooks.summaries import scalar

            for step in finished:
                if step > max(first, self._compiled):
                    self._writer.add_summary(scalar(TAG, self.steps_per_sec), step)


def _markers(metrics: Metrics) -> list[Any]:
    """Arrays that are there when a step is finished: its loss, or all of its metrics."""
    loss = metrics.get("loss")
    if isinstance(loss, jax.Array):
        return [loss]
    return [value for value in jax.tree.leaves(dict(metrics)) if isinstance(value, jax.Array)]

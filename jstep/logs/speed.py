"""The hook that measures steps per second and FLOP/s utilization."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from jstep import summary
from jstep.core.checks import as_function, as_int, as_number
from jstep.core.stopwatch import STEPPING
from jstep.hooks.cadence import UNSET, Clock, make_cadence
from jstep.hooks.run_hook import RunHook
from jstep.state.global_step import get_global_step
from jstep.state.train_state import TrainState
from jstep.summary.run_writer import as_writer, writer_of
from jstep.training.metrics import Metrics

TAG = "global_step/sec"


class MeterMaker(NamedTuple):
    """A function that makes a meter of the utilization; it returns None if that is unknown.

    Its arguments are a state, `peak_flops` and `flops_per_step`.
    """

    make: Callable[[TrainState, float | None, float | None], Any]


class _Count(NamedTuple):
    """The counts up to a step, at which an interval begins or ends.

    Attributes:
        began: A time; all later steps finish after it.
        dispatched: The meter's count; None without one.
        examples: As `RunInfo.examples`.
    """

    step: int
    began: float
    dispatched: Any
    examples: tuple[int, int]


class StepCounterHook(RunHook):
    """A hook that measures `global_step/sec` and FLOP/s utilization.

    It counts steps that the device has finished. A measurement is the mean over an interval, or
    over several if the device was behind. The first one begins after the first step, which excludes
    compilation.

    If the peak of the device is known, the hook also measures the model FLOP/s utilization:

        mfu = operations of a step · steps per second / (peak of a device · number of devices)

    The operations are those of `jstep.cost`; a Pallas kernel counts by its `cost_estimate`. The
    name is `hfu` (hardware FLOP/s utilization) for a step that recomputes (`jax.checkpoint`). The
    peak is the dense peak for the formats of the step's matrix products: float32 means TF32 on an
    A100 and bfloat16 on a TPU, unless their `precision` is set. For devices other than TPUs v2 to
    tpu7x and NVIDIA's data-center GPUs from V100 to GB200, and for a step that is not compiled,
    nothing is shown unless `peak_flops` and `flops_per_step` are given.

    Args:
        every_n_steps: Interval in steps.
        every_n_secs: Interval in seconds. If both are given, whichever comes first.
        summary_writer: Any object with `add_summary(summary, global_step)`, for the scalar
            `global_step/sec`; None for the writer of `train`'s `logdir`.
        peak_flops: Peak operations per second of one device; None to look it up in the table.
        flops_per_step: Operations of a whole step over all devices, such as 6 · parameters ·
            tokens; None to count them. If given, the name is always `mfu`.
        examples: The number of examples in a batch: a number, or `examples(*args) -> int` of the
            shapes of the step's arguments, such as `lambda x, y: x.shape[0] * x.shape[1]` for
            batches of shape `[workers, rows, ...]`. None if it is the leading axis of each array.
        clock: Returns seconds; replaced in tests.

    Attributes:
        steps_per_sec: The latest rate in steps per second; None before the first measurement.
        examples_per_sec: The latest rate in examples per second; None if the size of a batch is
            unknown.
        mfu: The latest utilization, a fraction; None if it is unknown, or reported as `hfu`.
        hfu: The latest utilization of a step that recomputes; None otherwise.

    Raises:
        ValueError: An interval, `peak_flops` or `flops_per_step` is not positive.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> counter = jstep.StepCounterHook(every_n_steps=2, peak_flops=50e9)
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": jnp.ones((8, 8))}, optimizer)
        >>> train_step = jstep.minimize(
        ...     lambda params, x: jnp.mean((x @ params["w"]) ** 2), optimizer
        ... )
        >>> state = jstep.train(train_step, state, [jnp.ones((4, 8))] * 6, 6, hooks=[counter])
        >>> counter.mfu > 0
        True

    Source: `tf.train.StepCounterHook`. MFU and HFU: Chowdhery et al., "PaLM" (2022), appendix B.
    """

    _counts_examples = True
    _without_step = "Global step should be created to use StepCounterHook. "
    _instead = "divide steps by the seconds of a clock, read after jax.block_until_ready(state)"

    def __init__(
        self,
        *,
        every_n_steps: int | None = UNSET,
        every_n_secs: float | None = None,
        summary_writer: object = None,
        peak_flops: float | None = None,
        flops_per_step: float | None = None,
        examples: int | Callable[..., int] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._cadence = make_cadence(
            steps=("every_n_steps", every_n_steps), secs=("every_n_secs", every_n_secs), clock=clock
        )
        self._given_writer = as_writer(summary_writer)
        self._clock = clock
        self._peak = _positive(peak_flops, "peak_flops", "operations per second of one device")
        self._flops = _positive(
            flops_per_step, "flops_per_step", "operations of a step, all devices together"
        )
        self._examples = _check_examples(examples)
        self._meter: Any = None
        self._reset()

    def _reset(self) -> None:
        self._first: _Count | None = None  # the beginning of the interval that is measured next
        # Ends of intervals that the device had not reached yet at `_unfinished_at`, the time of the
        # latest poll.
        self._unfinished: deque[_Count] = deque()
        self._unfinished_at = 0.0
        self.steps_per_sec: float | None = None
        self.examples_per_sec: float | None = None
        self._utilization: Any = None

    def _count_examples(self, rows: int | None, args: tuple[Any, ...]) -> int | None:
        """Return the number of examples in a batch.

        Args:
            rows: The size of the leading axis of each array; None if they differ.
            args: The shapes of the step's arguments besides the state.
        """
        if self._examples is None:
            return rows
        if not callable(self._examples):
            return self._examples
        return as_int(self._examples(*args), "examples: its result", 0, "a number of examples")

    @property
    def _writer(self) -> Any:
        if self._given_writer is not None:
            return self._given_writer
        return writer_of(self._run)

    @property
    def mfu(self) -> float | None:
        return self._share("mfu")

    @property
    def hfu(self) -> float | None:
        return self._share("hfu")

    def _share(self, name: str) -> float | None:
        # Read once: the record reads it in another thread than the one that measures it.
        share = self._utilization
        if share is None or share.name != name:
            return None
        return float(share.value)

    def begin(self, state: TrainState) -> None:
        if get_global_step(state) is None:
            raise RuntimeError(self._without_step.rstrip())
        super().begin(state)
        self._reset()
        maker: MeterMaker | None = self._run.shared.get(MeterMaker)
        self._meter = None if maker is None else maker.make(state, self._peak, self._flops)
        self._run.poll(self, self._begin_interval)

    def _begin_interval(self, *, wait: bool = False) -> None:
        self._first = self._count_at(self._run.step)

    def _count_at(self, step: int) -> _Count:
        counted = None if self._meter is None else self._meter.steps()
        return _Count(step, self._clock(), counted, self._run.examples)

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """End an interval; the measurement follows when the device has finished it."""
        is_pending = bool(self._unfinished)
        self._unfinished.append(self._count_at(step))
        if self._measure_finished() and not is_pending:
            self._run.poll(self, self._measure_finished)

    def _measure_finished(self, *, wait: bool = False) -> bool:
        """Complete measurements whose steps the device finished; return whether others remain."""
        flight = self._run.in_flight
        if wait:
            for count in tuple(self._unfinished):
                with self._run.watch.phase(STEPPING):
                    flight.wait_for(count.step)
                self._measure_finished()
        polled_at = self._clock()  # before the poll: steps that it finds unfinished finish later
        finished: list[_Count] = []
        flight.drop_finished()
        while self._unfinished and self._unfinished[0].step <= flight.finished:
            finished.append(self._unfinished.popleft())
        if finished and self._first is not None:
            self._measure(finished, self._first, self._clock())
        if self._unfinished:
            self._unfinished_at = polled_at
        return bool(self._unfinished)

    def _measure(self, finished: list[_Count], first: _Count, measured_at: float) -> None:
        last = finished[-1]
        # Later steps finish after this time, so the next rate is not higher than the device's.
        self._first = last._replace(began=max(last.began, self._unfinished_at))
        if last.step <= first.step:
            return  # the first interval begins with this count
        seconds = max(measured_at - first.began, 1e-9)
        rate = (last.step - first.step) / seconds
        self.steps_per_sec = rate
        counted = last.examples[0] - first.examples[0]
        unknown = last.examples[1] - first.examples[1]
        # The rate of an interval with a batch of unknown size is unknown.
        is_known = counted > 0 and unknown == 0
        self.examples_per_sec = counted / seconds if is_known else None
        values = {TAG: rate}
        share = None
        if first.dispatched is not None and last.dispatched is not None:
            share = self._meter.utilization(first.dispatched, last.dispatched, seconds)
        self._utilization = share
        if share is not None:
            values[share.name] = share.value
        if self._writer is None:
            return
        for count in finished:
            if count.step <= first.step:
                continue
            for tag, value in values.items():
                self._writer.add_summary(summary.scalar(tag, value, collections=()), count.step)


# Functions for log lines and bars.


def measure_finished(counter: StepCounterHook, *, wait: bool = False) -> bool:
    return counter._measure_finished(wait=wait)


def format_utilization(counter: StepCounterHook) -> list[str]:
    """Return the utilization as log lines and the bar show it; an empty list if it is unknown."""
    share = counter._utilization
    if share is None:
        return []
    return [f"{share.name} {share.value:.3g}"]


def _check_examples(examples: Any) -> int | Callable[..., int] | None:
    if examples is None:
        return None
    if callable(examples):
        return as_function(
            examples, "examples", "(*args) -> int, of the shapes of the step's arguments"
        )
    return as_int(examples, "examples", 1, "the number of examples in a batch")


def _positive(value: object, argument: str, meaning: str) -> float | None:
    return None if value is None else as_number(value, argument, low=0, above=True, meaning=meaning)

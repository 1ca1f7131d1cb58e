"""Stock hooks that count, save, profile, stop, and call functions of the user."""

import contextlib
import contextvars
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jstep.checkpoint.saver import Saver
from jstep.core import trees
from jstep.core.checks import as_function, as_int, as_number, kind, setting, shown
from jstep.core.meshes import internal_transfers
from jstep.hooks import hook
from jstep.hooks.base import RunHook, check_writer, scalar
from jstep.hooks.cadence import UNSET, cadence
from jstep.hooks.hook import NEVER, Clock, Hook, Metrics, StopWith, step_of
from jstep.hooks.timeline import SAVING, STEPPING
from jstep.state.global_step import get_global_step, require_alive
from jstep.state.train_state import TrainState
from jstep.stores.objects import is_url, location

# Steps per second, and the utilization that they are.

TAG = "global_step/sec"
_HISTORY = 1000
"""The number of measurements kept for lines that are delivered late."""


class _Count(NamedTuple):
    """The work that was dispatched up to a step."""

    step: int
    since: float
    """All later steps were dispatched, and finish, after this time."""
    dispatched: Any
    """What the meter had counted."""
    examples: tuple[int, int]
    markers: Sequence[Any] = ()
    """Arrays that are ready when the device has finished it."""


class _Figure(NamedTuple):
    step: int
    steps_per_sec: float | None
    examples_per_sec: float | None
    utilization: Any


class StepCounterHook(RunHook):
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
        steps, secs = ("every_n_steps", every_n_steps), ("every_n_secs", every_n_secs)
        self.cadence = cadence(steps=steps, secs=secs, clock=clock)
        self._given_writer, self._clock = check_writer(summary_writer), clock
        self._peak = _positive(peak_flops, "peak_flops", "operations a second of one device")
        self._flops = _positive(flops_per_step, "flops_per_step", "operations of a step, all devices together")
        self._meter: Any = None
        self._reset()

    def _reset(self) -> None:
        self._since: _Count | None = None
        self._unfinished: deque[_Count] = deque()
        self._unfinished_at = 0.0
        self._figures: deque[_Figure] = deque(maxlen=_HISTORY)
        self.steps_per_sec: float | None = None
        self.examples_per_sec: float | None = None
        self.utilization: Any = None

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

    def figure_at(self, step: int) -> _Figure:
        """The rates and the utilization at a step; the latest ones if it has no earlier measurement."""
        latest = _Figure(step, self.steps_per_sec, self.examples_per_sec, self.utilization)
        return next((figure for figure in reversed(self._figures) if figure.step <= step), latest)

    def begin(self, state: TrainState) -> None:
        """Reset the hook; refuse a state without a global step.

        Raises:
            RuntimeError: The state has no global step.
        """
        if get_global_step(state) is None:
            raise RuntimeError("Global step should be created to use StepCounterHook.")
        super().begin(state)
        self._reset()
        self._meter = None if self.run.meter is None else self.run.meter(state, self._peak, self._flops)
        self.run.pending.append((self, self._begin_interval))

    def _begin_interval(self, *, wait: bool = False) -> bool:
        """Begin the first interval after the first call, which compiles."""
        self._since = self._count_at(self.run.step)
        return True

    def _count_at(self, step: int, markers: Sequence[Any] = ()) -> _Count:
        counted = None if self._meter is None else self._meter.steps()
        return _Count(step, self._clock(), counted, self.run.examples, markers)

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """End an interval; the measurement follows when the device has finished it."""
        if self._since is None:  # `begin` was not called
            self._begin_interval()
        is_pending = bool(self._unfinished)
        self._unfinished.append(self._count_at(step, _markers(metrics)))
        if not self.look() and not is_pending:
            self.run.pending.append((self, self.look))

    def look(self, *, wait: bool = False) -> bool:
        """Complete the measurements whose steps the device has finished; return whether that is all of them."""
        for one in tuple(self._unfinished) if wait else ():
            with self.run.watch.part(STEPPING):
                jax.block_until_ready(one.markers)
            self.look()
        before, finished = self._clock(), []
        while self._unfinished and all(marker.is_ready() for marker in self._unfinished[0].markers):
            finished.append(self._unfinished.popleft())
        if finished and self._since is not None:
            self._measure(finished, self._since, self._clock())
        if self._unfinished:
            self._unfinished_at = before
        return not self._unfinished

    def _measure(self, finished: list[_Count], since: _Count, now: float) -> None:
        last = finished[-1]
        # Later steps finish after this time, so the next rate is not higher than the device's.
        self._since = last._replace(since=max(last.since, self._unfinished_at), markers=())
        if last.step <= since.step:
            return  # the first interval begins with it
        seconds = max(now - since.since, 1e-9)
        self.steps_per_sec = rate = (last.step - since.step) / seconds
        known, unknown = (after - before for after, before in zip(last.examples, since.examples, strict=True))
        self.examples_per_sec = examples = known / seconds if known and not unknown else None
        share = None
        if since.dispatched is not None and last.dispatched is not None:
            share = self._meter.between(since.dispatched, last.dispatched, seconds)
        self.utilization = share
        for count in finished:
            if count.step > since.step:
                self._figures.append(_Figure(count.step, rate, examples, share))
                self._write({TAG: rate} if share is None else {TAG: rate, share.name: share.value}, count.step)

    def _write(self, values: dict[str, float], step: int) -> None:
        if self._writer is not None:
            for tag, value in values.items():
                self._writer.add_summary(scalar(tag, value), step)


def _markers(metrics: Metrics) -> list[Any]:
    """Arrays that are ready when a step is finished: its loss, or all of its metrics."""
    loss = metrics.get("loss")
    if isinstance(loss, jax.Array):
        return [loss]
    arrays = [value for value in jax.tree.leaves(dict(metrics)) if isinstance(value, jax.Array)]
    return [trees.key_data(value) for value in arrays]  # a PRNG key itself has no is_ready


def shown_share(share: Any) -> list[str]:
    """The utilization as shown in log lines, such as "mfu 0.412", in a list; empty if it is not known."""
    return [] if share is None else [f"{share.name} {share.value:.3g}"]


def _positive(value: Any, argument: str, meaning: str) -> float | None:
    return None if value is None else as_number(value, argument, low=0, above=True, meaning=meaning)


# Save checkpoints periodically.


class CheckpointSaverHook(RunHook):
    """A hook that saves checkpoints at intervals of seconds or steps, and at the end.

    Args:
        saver: A `Saver`, or a directory.
        save_secs: Interval in seconds of the host's clock.
        save_steps: Interval in steps; due at its multiples.
        extra: A function of no arguments whose JSON-serializable result is saved with each checkpoint, such as the
            position of a loader.
        before_save: Functions of the step, called before every save. One that raises or returns True prevents the
            save.
        clock: Returns seconds; replaced in tests.

    Attributes:
        prefix: The prefix of the checkpoints' names.

    Source: `tf.train.CheckpointSaverHook`, which also saves at the first step.
    """

    part = SAVING
    _passing_secs: float | None = None

    def __init__(
        self,
        saver: Saver | str | os.PathLike[str],
        *,
        save_secs: float | None = None,
        save_steps: int | None = None,
        extra: Callable[[], Any] | None = None,
        before_save: tuple[Callable[[int], bool | None], ...] = (),
        clock: Clock = time.monotonic,
    ) -> None:
        steps, secs = ("save_steps", save_steps), ("save_secs", save_secs)
        self.cadence = cadence(steps=steps, secs=secs, clock=clock, required=False, together=True)
        self._extra = as_function(extra, "extra", "() -> values", optional=True)
        self._before_save = _functions(before_save, "before_save", "of the step")
        self._directory = None if isinstance(saver, Saver) else saver
        self._saver: Saver | None = saver if isinstance(saver, Saver) else Saver(saver)
        self.prefix = self._saver.prefix
        self._saved: tuple[int, Callable[[], TrainState | None]] | None = None

    def begin(self, state: TrainState) -> None:
        """Start to count seconds."""
        super().begin(state)
        self._saved = None

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Save."""
        self.save(step, state)

    def end(self, step: int, state: TrainState) -> None:
        """Save the last state, and wait until it is on disk."""
        self.save(step, state, wait=True)

    def close(self) -> None:
        """Wait for pending writes, and close the `Saver` if the hook created it."""
        super().close()
        if self._directory is not None and self._saver is not None:
            saver, self._saver = self._saver, None
            saver.close()

    def is_saved(self, step: int, state: TrainState) -> None:
        """Record that a checkpoint of this step holds this state, such as the restored one."""
        self._saved = step, _weakly(state)

    @property
    def allows_nonfinite(self) -> bool:
        """Whether its Saver saves parameters that became NaN or infinite."""
        return self._saver is not None and self._saver.allow_nonfinite

    def has_saved(self, step: int, state: TrainState) -> bool:
        """Whether a checkpoint of this step holds this state, not changed by a hook since."""
        return self._saved is not None and self._saved[0] == step and self._saved[1]() is state

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> bool:
        """Save, unless this state is saved already.

        Args:
            step: The current step of the loop.
            state: The state at that step.
            wait: Whether to wait until the checkpoint is on disk.

        Returns:
            Whether there is a checkpoint of this step; False if a function in `before_save` prevented it.

        Raises:
            CheckpointError: The checkpoint could not be written.
            NanLossDuringTrainingError: A parameter became NaN or infinite since the run began, and the Saver does not
                allow them.
            RuntimeError: The state was donated, by a hook, say.
            ValueError: The state is at another step.
        """
        if not self.has_saved(step, state):
            require_alive(state)
            checks = (self.run.before_save, *self._before_save)
            prevented = [bool(check(step)) for check in checks]  # a list: each must be called
            if any(prevented):
                return False
            hook.check_step(step, state)
            if self._saver is None:  # closed at the end of an earlier run
                self._saver = Saver(self._directory or "")
            nonfinite = self.run.nonfinite
            if nonfinite is not None and not self._saver.allow_nonfinite:
                raise nonfinite
            extra = self._extra() if self._extra else None
            with internal_transfers(), self._saver.knowing(nonfinite is None, self._passing_secs):
                self._saver.save(state, extra=extra)
            self.is_saved(step, state)
        if wait and self._saver is not None:
            try:
                self._saver.wait()
            except Exception:
                self._saved = None  # another try saves it again, and does not say that it is there
                raise
        return True


def _weakly(state: Any) -> Callable[[], Any]:
    """A weak reference to the state, or the state itself if it cannot be weakly referenced."""
    try:
        return weakref.ref(state)
    except TypeError:  # a NamedTuple with a global step
        return lambda: state


def _functions(functions: Any, argument: str, form: str) -> tuple[Any, ...]:
    """Return functions as a tuple; refuse anything but a sequence of them."""
    try:
        if callable(functions):
            raise TypeError
        given = tuple(functions)
    except TypeError:
        what = f"{argument}: must be a sequence of functions {form}, got {kind(functions)}"
        raise TypeError(f"{what}; give a list: {argument}=[…]") from None
    for i, function in enumerate(given):
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"{argument}[{i}]={shown(function)}: must be a function {form}, got {kind(function)}")
    return given


# Profile some steps.


class ProfilerHook(RunHook):
    """A hook that traces the updates start_step → start_step + 1, …, stop_step − 1 → stop_step with `jax.profiler`.

    Args:
        logdir: The directory of the trace, for TensorBoard's profile plugin or Perfetto.
        start_step: The first traced step, ≥ 0. Skip the first steps of a run, which compile.
        stop_step: The step at which the trace ends, > start_step.

    Source: `tf.train.ProfilerHook`.
    """

    def __init__(self, logdir: str | os.PathLike[str], *, start_step: int, stop_step: int) -> None:
        start_step, stop_step = as_int(start_step, "start_step"), as_int(stop_step, "stop_step")
        if not 0 <= start_step < stop_step:
            raise ValueError(f"start_step={start_step}, stop_step={stop_step}: must be 0 ≤ start_step < stop_step")
        self._logdir, self._start, self._stop = location(logdir, "logdir"), start_step, stop_step
        if is_url(self._logdir):
            raise ValueError(
                f"logdir={self._logdir!r}: must be on a file system, because JAX's profiler writes to it; give a "
                "local directory and copy it when the run has ended"
            )
        self._running = False

    def begin(self, state: TrainState) -> None:
        """Start the trace at once if the run begins within the steps."""
        self._running = False
        self.after_step(step_of(state), state, {})

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Start or end the trace."""
        if self._running and step >= self._stop:
            self.end(step, state)
        elif not self._running and self._start <= step < self._stop:
            jax.profiler.start_trace(self._logdir)
            self._running = True

    def end(self, step: int, state: TrainState) -> None:
        """End a trace that is still running at the end of the run."""
        if self._running:
            jax.block_until_ready(state)  # the device may be behind, and its work belongs in the trace
            self.close()

    def close(self) -> None:
        """End a trace that is still running after an error."""
        super().close()
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def next_due(self, step: int) -> int:
        """The next of start_step and stop_step."""
        return min((at for at in (self._start, self._stop) if at > step), default=NEVER)


# Stop a run at a step.


class StopAtStepHook(Hook):
    """A hook that stops the run at a step, given relative to the start of the run or as a global step.

    Args:
        num_steps: The number of steps after the start of the run.
        last_step: The global step. Exactly one of the two must be given.

    Source: `tf.train.StopAtStepHook`.
    """

    def __init__(self, *, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError(f"num_steps={num_steps}, last_step={last_step}: give exactly one of them")
        self._num_steps = None if num_steps is None else as_int(num_steps, "num_steps", 1, "a number of steps")
        self._last_step = None if last_step is None else as_int(last_step, "last_step", 1, "a number of steps")

    def begin(self, state: TrainState) -> bool:
        """Count num_steps from here; return True if the state is already at last_step."""
        step = step_of(state)
        if self._num_steps is not None:
            self._last_step = step + self._num_steps
        return step >= (self._last_step or 0)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        """Return True at the step or past it."""
        return self._last_step is not None and step >= self._last_step

    def next_due(self, step: int) -> int:
        """The step to stop at, or the next step if the run has reached it."""
        return max(step + 1, self._last_step or 0)


# Wrap a function as a hook.


def every(n: int, fn: Callable[[int, TrainState, Metrics], "bool | TrainState | None"]) -> Hook:
    """Return a hook that calls a function at the multiples of n steps.

    Args:
        n: Interval in steps, ≥ 1.
        fn: `fn(step, state, metrics)`. Its result has the meaning of `Hook.after_step`'s: None continues the run, True
            stops it after this step, and a `TrainState` replaces the state. A run that it stopped and that is started
            again calls it only after another step; see `Hook.after_step` for a hook that keeps the run stopped.

    Returns:
        A hook for `train`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> tell = jstep.every(2, lambda step, state, metrics: print("after update", step))
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 4, last_step=4, hooks=[tell])
        after update 2
        after update 4
    """
    return _Every(as_int(n, "n", 1, "a number of steps"), as_function(fn, "fn", "(step, state, metrics)"))


class _Every(Hook):
    def __init__(self, n: int, fn: Callable[..., Any]) -> None:
        self._n, self._fn = n, fn
        self.name = f"every({n}, {getattr(fn, '__qualname__', type(fn).__name__)})"

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """When due, calls the function and returns its result."""
        if step % self._n == 0:
            return self._fn(step, state, metrics)
        return None

    def next_due(self, step: int) -> int:
        """The next multiple."""
        return (step // self._n + 1) * self._n

    def __repr__(self) -> str:
        return f"<jstep.{self.name}>"


# Interrupt an evaluation between two batches when a signal stops the run.

_stop_requested: contextvars.ContextVar[Callable[[], bool] | None] = contextvars.ContextVar(
    "stop_requested", default=None
)


class EvaluationAbandoned(BaseException):
    """Raised between two batches of an evaluation when the run stops; the evaluation hook catches it.

    It is not an Exception, so that user code around the evaluator, such as a retry, does not catch it.
    """


def interruptible(stop_requested: Callable[[], bool]) -> contextlib.AbstractContextManager[Callable[[], bool]]:
    """Make evaluators that are called inside interruptible.

    Args:
        stop_requested: Returns whether the run is stopping; must be called equally often on all processes.
    """
    return setting(_stop_requested, stop_requested)


def raise_if_stop_requested() -> None:
    """Raise if the run is stopping; called between batches. Outside of `interruptible` it does nothing.

    Raises:
        EvaluationAbandoned: The run is stopping.
    """
    stop_requested = _stop_requested.get()
    if stop_requested is not None and stop_requested():
        raise EvaluationAbandoned


# Callbacks on the results of an evaluation.

EvaluationCallback = Callable[[int, TrainState, Mapping[str, Any]], "bool | TrainState | None"]


class Callbacks:
    """Functions `(step, state, results)`, called in order.

    Args:
        functions: The functions.
        argument: The name of the argument, for errors.

    Attributes:
        stopped_by: The key of the callback that stopped the run, or None.

    Raises:
        TypeError: The argument is not a sequence of functions.
    """

    def __init__(self, functions: Sequence[EvaluationCallback], argument: str) -> None:
        self._functions = _functions(functions, argument, "(step, state, results)")
        self._argument, self._where = argument, f"EvaluationHook({argument}=…)"
        self.stopped_by: str | None = None

    def __len__(self) -> int:
        return len(self._functions)

    @property
    def why(self) -> str | None:
        """The `why` of a callback that ends the run before any step, or None."""
        return next((one.why for one in self._functions if isinstance(getattr(one, "why", None), str)), None)

    def begin(self, state: TrainState) -> bool:
        """Call `begin` of the callbacks; return whether one of them ends the run before any step.

        Raises:
            TypeError: A callback has `get_state` without `set_state`.
            ValueError: Two callbacks have the same `key`.
        """
        hook.check_owners(self._functions, self._where)
        self.stopped_by = None
        return any(self.each("begin", state))

    def get_state(self) -> Any:
        """Return the states of the callbacks."""
        return hook.get_states(self._functions, self._where)

    def set_state(self, value: Any) -> bool:
        """Restore the states; return whether one of the callbacks ends the run."""
        return hook.set_states(self._functions, value, self._where)

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any], *, on_cadence: bool) -> Any:
        """Call the callbacks and combine their results: one may stop the run while another replaces the state.

        Args:
            step: The step.
            state: The evaluated state.
            results: The results of the evaluation.
            on_cadence: Whether the evaluation was due; if not, callbacks with a true `on_cadence_only` are skipped.
        """
        given, stop = state, False
        for function in self._functions:
            if not on_cadence and getattr(function, "on_cadence_only", False):
                continue
            result = function(step, given, results)
            stop_now, given = hook.check_hook_result(result, given, step, f"{self._argument}: {hook.name_of(function)}")
            if stop_now and self.stopped_by is None:
                self.stopped_by = hook.key_of(function)
            stop = stop or stop_now
        if given is state:
            return stop or None
        return StopWith(given) if stop else given

    def each(self, method: str, *args: Any) -> list[bool]:
        """Call a method of all callbacks that have it."""
        return [bool(getattr(one, method)(*args)) for one in self._functions if hasattr(one, method)]

"""The arguments of `train`, validated, and the record of one run."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core import trees
from jstep.core.checks import as_bool, as_int, as_number, kind, shown
from jstep.core.placement import refuse_compile_only
from jstep.core.stopwatch import STEPPING, Stopwatch
from jstep.data.sequence import StateBatches
from jstep.data.to_devices import placement
from jstep.hooks.cadence import cadence
from jstep.hooks.hook import RunInfo, list_of_hooks
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.numbers import TransferQueue
from jstep.hooks.speed import StepCounterHook
from jstep.hooks.stock import CheckpointSaverHook
from jstep.loop.calls import AUTO
from jstep.loop.compiler import StartTimes
from jstep.loop.feeder import BatchFeeder, FetchCounter
from jstep.loop.in_flight import InFlight
from jstep.loop.programs import Programs
from jstep.loop.signals import StopSignals, StopWaiting
from jstep.loop.stages import TrainSteps
from jstep.state.global_step import get_global_step
from jstep.state.train_state import TrainState, require_state
from jstep.stores.timeline import Timeline

# The arguments of `train`, validated.

LARGEST_STEP = int(np.iinfo(np.int32).max)
_NO_END = "or None if the batches, a hook or a signal end the run"
_KEPT_SECS = 600.0
"""The interval between checkpoints in seconds where only the one in steps is given."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `train`, without the step, the state and the batches; validated when created."""

    last_step: Any
    hooks: Sequence[Any]
    checkpoint_dir: str | os.PathLike[str] | Saver | None
    checkpoint_prefix: str
    save_checkpoint_secs: float | str | None
    save_checkpoint_steps: int | None
    logdir: str | os.PathLike[str] | None
    save_summaries_steps: int | None
    log_steps: int | None
    steps_per_call: int | str
    progress: bool | None
    batch_sharding: Any
    compile_cache: str | os.PathLike[str] | bool | None
    stop_secs: float | None

    @property
    def end(self) -> int | None:
        """The step at which the run ends; None if the batches, a hook or a signal end it."""
        return None if self.last_step == LARGEST_STEP else int(self.last_step)

    def for_batches(self, batches: Any) -> "Options":
        """The options for these batches: those that are made with the state allow one step a call.

        Raises:
            ValueError: `batches` are made with the state, and a call would take several steps.
        """
        steps = as_steps_per_call(self.steps_per_call, batches)
        return self if steps == self.steps_per_call else dataclasses.replace(self, steps_per_call=steps)

    def __post_init__(self) -> None:
        checked = {
            "hooks": list_of_hooks(self.hooks),
            "last_step": LARGEST_STEP if self.last_step is None else as_int(self.last_step, "last_step", 0, _NO_END),
            "steps_per_call": as_steps_per_call(self.steps_per_call),
            "progress": None if self.progress is None else as_bool(self.progress, "progress"),
            "stop_secs": None
            if self.stop_secs is None
            else as_number(self.stop_secs, "stop_secs", low=0, above=True, expected="a number of seconds"),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.save_checkpoint_secs == AUTO and self.save_checkpoint_steps is not None:
            object.__setattr__(self, "save_checkpoint_secs", _KEPT_SECS)
        if isinstance(self.save_checkpoint_secs, str) and self.save_checkpoint_secs != AUTO:
            raise ValueError(
                f"save_checkpoint_secs={self.save_checkpoint_secs!r}: must be a number of seconds, None (by "
                "steps alone), or 'auto'"
            )
        secs = None if self.save_checkpoint_secs == AUTO else self.save_checkpoint_secs
        steps = ("save_checkpoint_steps", self.save_checkpoint_steps)
        cadence(steps=steps, secs=("save_checkpoint_secs", secs), required=False)
        for name in ("save_summaries_steps", "log_steps"):
            cadence(steps=(name, getattr(self, name)), required=False)
        check_locations(self.checkpoint_dir, self.checkpoint_prefix, self.logdir, self.batch_sharding)


def as_steps_per_call(value: Any, batches: Any = None) -> int | str:
    """Return `steps_per_call`, an integer ≥ 1 or "auto"; refuse anything else.

    Batches that are made with the state allow one step a call, and "auto" means 1 for them.
    """
    if isinstance(value, str):
        if value != AUTO:
            raise ValueError(f"steps_per_call={value!r}: must be an integer ≥ 1, or 'auto'")
        return 1 if isinstance(batches, StateBatches) else AUTO
    steps = as_int(value, "steps_per_call", 1)
    if steps > 1 and isinstance(batches, StateBatches):
        raise ValueError(
            f"steps_per_call={steps}, batches={batches!r}: batches of jstep.from_state are made with the state before "
            "each step; use steps_per_call=1"
        )
    return steps


def check_locations(checkpoint_dir: Any, checkpoint_prefix: str, logdir: Any, batch_sharding: Any) -> None:
    """Refuse invalid directories, prefixes and shardings, without opening anything."""
    if not isinstance(checkpoint_dir, Saver | str | os.PathLike | None):
        raise TypeError(
            f"checkpoint_dir={shown(checkpoint_dir)}: must be a directory, a URL or a Saver, got {kind(checkpoint_dir)}"
        )
    if not isinstance(logdir, str | os.PathLike | None):
        raise TypeError(f"logdir={shown(logdir)}: must be a directory or a URL, got {kind(logdir)}")
    for name, place in (("checkpoint_dir", checkpoint_dir), ("logdir", logdir)):
        if isinstance(place, str) and not place.strip():
            raise ValueError(f"{name}={place!r}: must be a directory or a URL, got an empty string; use None for none")
    try:
        checkpoint_name(checkpoint_prefix, 0)
    except (TypeError, ValueError) as error:
        raise type(error)(f"checkpoint_{error}") from None
    if isinstance(checkpoint_dir, Saver) and checkpoint_prefix not in ("model", checkpoint_dir.prefix):
        raise ValueError(
            f"checkpoint_prefix={checkpoint_prefix!r}: checkpoint_dir is a Saver, whose own prefix is "
            f"{checkpoint_dir.prefix!r}; make the Saver with the prefix"
        )
    if batch_sharding is not None:
        try:
            placement(batch_sharding)
        except (TypeError, ValueError) as error:
            raise type(error)(f"batch_{error}") from None


def check(state: Any, last_step: int) -> None:
    """Refuse a state without a scalar global step, or a last_step that its dtype cannot hold.

    Raises:
        RuntimeError: The state has no global step.
    """
    refuse_compile_only(require_state(state), "state")
    if np.ndim(state.global_step):
        raise ValueError(
            f"state: its global_step has shape {np.shape(state.global_step)}, must be a scalar: a population "
            "under train shares one step. Map all other leaves: axes = jax.tree.map(lambda _: 0, "
            "jax.eval_shape(create, seed)).replace(global_step=None), states = jax.vmap(create, out_axes=axes)(seeds), "
            "and in jstep.TrainStep the step jax.vmap(step, in_axes=(axes, None), out_axes=(axes, 0)); see the recipe "
            "'Hyperparameter sweeps with vmap'. Members at different steps need a custom loop, and a Saver"
        )
    step = get_global_step(state)
    if step is None:
        # Raises the error of StepCounterHook, which every run has.
        StepCounterHook().begin(state)
        return
    last = np.iinfo(step.dtype).max
    if last_step > last:
        raise ValueError(
            f"last_step={last_step}: must be at most {last}, the last step that {step.dtype} can hold; under "
            "jax_enable_x64 steps are int64"
        )


# The record of one run of `train`, which all parts of the loop share.

STARTING, RUNNING, ENDING = "starting", "running", "ending"
"""The phases of a run: before its first call, while it takes steps, and after its last call."""


@dataclasses.dataclass(kw_only=True)
class Run(RunInfo):
    """One run of `train`: all that its parts know of it, besides what `RunInfo` tells the hooks.

    Attributes:
        options: The arguments of `train`.
        stages: The training steps.
        programs: Runs the steps.
        times: Measures the start.
        closing: Closes what the run opens.
        signals: Receives SIGTERM and SIGINT.
        phase: One of the phases above.
        start: The step at which the run begins; None until it is known.
        resumed: What it resumes from.
        is_begun: Whether the state was restored, or is the given one.
        hooks: All hooks, the user's before the stock ones.
        runner: Calls the hooks, a `HookRunner`; None until they are known.
        logs_lines: Whether progress is reported by log lines.
        observers: What watches the run.
        timeline: The file of lines about the run; None if none is open.
        feeder: The calls of the run; None if it takes no step.
        fetched: Counts the batches that were fetched.
        in_flight: The calls that the device has not finished.
        calling: The hook and the method that is being called, or that raised; None if none is.
        is_checking: Whether the first state of a stage is being checked.
        is_interrupted: Whether a signal ended the run.
    """

    options: Options
    stages: TrainSteps
    programs: Programs
    times: StartTimes
    closing: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    signals: StopSignals
    phase: str = STARTING
    start: int | None = None
    resumed: "Resumed" = dataclasses.field(default_factory=lambda: Resumed())
    is_begun: bool = False
    hooks: list[Any] = dataclasses.field(default_factory=list)
    runner: Any = None
    logs_lines: bool = False
    observers: list["Observer"] = dataclasses.field(default_factory=list)
    timeline: Timeline | None = None
    feeder: BatchFeeder | None = None
    fetched: FetchCounter = dataclasses.field(default_factory=FetchCounter)
    in_flight: InFlight = dataclasses.field(default_factory=InFlight)
    calling: tuple[Any, str] | None = None
    is_checking: bool = False
    is_interrupted: bool = False

    @property
    def savers(self) -> list[CheckpointSaverHook]:
        """All hooks that save, the run's own first."""
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]

    def write_line(self, kind: str, **fields: Any) -> None:
        """Write a line about the run, from any thread, if a file is open."""
        if self.timeline is not None:
            self.timeline.write(kind, **fields)

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Make a meter of the utilization, before the first step; None if no observer measures it."""
        meters = (one.meter(state, peak_flops, flops_per_step) for one in self.observers)
        return next((meter for meter in meters if meter is not None), None)

    def begin_at(self, step: int) -> None:
        """Begin the run at a step."""
        self.start = self.first = self.step = step

    def may_leave_call(self) -> bool:
        """Whether the run is stopping, and need not run the call that was fetched: its batches will be made again."""
        feeder = self.feeder
        is_lost = feeder is not None and feeder.is_position_lost(self.step - self.first)
        return self.signals.is_stopping and not is_lost

    def on_signal(self) -> None:
        """Leave at once before the first step, and while waiting for a batch or a program; for the first signal."""
        if self.phase == STARTING:
            raise self.signals.stopped("before its first step")
        is_waiting = self.feeder is not None and self.feeder.may_be_interrupted
        if self.phase == RUNNING and (is_waiting or (self.programs.may_be_left and self.may_leave_call())):
            raise StopWaiting

    def release(self) -> None:
        """Drop references to the run's parts: hooks and signal handlers must not keep its state alive."""
        self.state = self.metrics = None
        self.phase, self.feeder, self.runner, self.hooks = ENDING, None, None, []
        self.signals.on_first = lambda: None
        self.in_flight.clear()
        self.programs.release()


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a run resumes from.

    Attributes:
        latest: The newest checkpoint, known before it is restored, or None.
        given: The step of the given state; None if it is abstract or was donated.
        held: Name → initial value of the held hyperparameters.
        extra: The `extra` of the checkpoint.
    """

    latest: int | None = None
    given: int | None = None
    held: dict[str, float] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Observer(contextlib.AbstractContextManager["Observer"]):
    """What watches a run until its very end: a context, which the run tells of itself by these methods, in this order.

    Args:
        run: The run, before it begins.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        return None

    def opened(self) -> None:
        """Called once the run may write to its directory, before the state is restored."""

    def restored(self, batches: Any) -> None:
        """Called when the state is restored, or is the given one, with the argument `batches` of `train`."""

    def reporter(self) -> Any:
        """Return the hook that shows the progress, in place of log lines; None for these."""
        return None

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Return a meter of the utilization, before the first step; None if it measures none."""
        return None

    def before_save(self) -> None:
        """Called when a save is certain, before it."""

    def past(self, step: int) -> dict[str, Any]:
        """Return what the checkpoint of a step keeps in its `extra`, by names of its own."""
        return {}


def new_run(options: Options, stages: TrainSteps, state: TrainState, times: StartTimes, watch: Stopwatch) -> Run:
    """The record of a run that has not begun."""
    limits = [hook.max_skipped_steps for hook in options.hooks if isinstance(hook, NanLossHook)]
    sums = MetricSums(limit for limit in limits if limit is not None)
    signals = StopSignals(options.stop_secs if options.stop_secs is None else times.left(options.stop_secs))
    programs = Programs(
        stages,
        options.steps_per_call,
        state=state,
        sums=sums,
        first_call=times.compiling,
        watch=watch,
    )
    run = Run(
        last_step=options.end,
        sums=sums,
        transfers=TransferQueue(functools.partial(watch.part, STEPPING)),
        state=trees.owned(state),
        logdir=options.logdir,
        constant_metrics=lambda: programs.constants.values.keys(),
        stop_requested=signals.to_stop,
        watch=watch,
        options=options,
        stages=stages,
        programs=programs,
        times=times,
        signals=signals,
    )
    signals.on_first = run.on_signal
    programs.may_leave_call = run.may_leave_call
    return run

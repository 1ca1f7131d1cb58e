"""The training loop: restore, run, save."""

import contextlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jstep import _feed
from jstep._signals import Preempted, StopSignals, StopWaiting
from jstep.checkpoint import Saver, checkpoint_name
from jstep.hooks import (
    CheckpointSaverHook,
    Hook,
    LoggingHook,
    ProgressHook,
    StepCounterHook,
    SummarySaverHook,
)
from jstep.state import TrainState, get_global_step, global_step
from jstep.training import last_of, scan_steps

_logger = logging.getLogger("jstep")
_POSITION = "batches"
NEVER = 2**63


def train(
    train_step: Callable[..., tuple[TrainState, Any]],
    state: TrainState,
    batches: Any,
    last_step: int,
    hooks: Sequence[Any] = (),
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_prefix: str = "model",
    save_checkpoint_secs: float | None = 600,
    save_checkpoint_steps: int | None = None,
    logdir: str | os.PathLike[str] | None = None,
    save_summaries_steps: int | None = 100,
    log_steps: int | None = 100,
    steps_per_call: int = 1,
    progress: bool | None = None,
    batch_sharding: Any = None,
) -> TrainState:
    """Trains up to a step: restores the newest checkpoint, runs, saves.

    A run that was stopped, killed or preempted and is started again goes on as if nothing had happened: the step,
    and with it the rates, the averages, the random numbers and the batches, come from the checkpoint.

    Args:
        train_step: What `minimize` returned, or any function `(state, *args) -> (state, metrics)` that advances
            `global_step` by one.
        state: Where to start; where a checkpoint is restored, the structure and the place of what it holds.
            A compiled step takes over its memory.
        batches: An object with `batches[N]` (`jstep.batches`), a function of the step, an iterator with `get_state`
            and `set_state`, whose position is kept with the checkpoint, or any iterable. A tuple is passed as
            `*args`, anything else as one argument. Where it ends, the run ends.
        last_step: The global step at which the run ends, absolute: a run restored at it has nothing to do.
        hooks: What happens around the steps; see `Hook`. They come before the stock ones.
        checkpoint_dir: Where checkpoints are; None keeps none.
        checkpoint_prefix: Before the step in their names: `model-1000`.
        save_checkpoint_secs: How often to save, in seconds; None for steps alone.
        save_checkpoint_steps: How often to save, in steps. The last step is always saved.
        logdir: Where TensorBoard's event files go; None writes none.
        save_summaries_steps: How often to write summaries, in steps; None for never. A `SummarySaverHook` among the
            hooks that was made without a writer says so itself.
        log_steps: How often to log, in steps; None for never.
        steps_per_call: How many steps to make in one call, scanned over stacked batches. A call is made shorter
            so as to end on the next step at which a hook is due.
        progress: None for one line on a terminal and log lines elsewhere, True for the line, False for silence.
        batch_sharding: Where batches go, a sharding or a tree of them: each process's rows become its part of one
            global array.

    Returns:
        The state after the last step.

    Raises:
        Preempted: SIGTERM arrived; the step in flight is saved. A SystemExit with code 143.
        KeyboardInterrupt: SIGINT arrived; likewise. A second SIGINT leaves at once.
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range, or the checkpoint does not fit the state.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.train(train_step, state, lambda step: jnp.ones(()), last_step=10, progress=False)
        >>> print(round(float(state.params["w"]), 4), state.global_step)
        0.999 10

    Source: `tf.train.MonitoredTrainingSession`.
    """
    _check(train_step, state, last_step, steps_per_call, hooks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_visible_logging(progress is not False and jax.process_index() == 0))
        saver, position = None, None
        if checkpoint_dir is not None:
            saver = Saver(checkpoint_dir, prefix=checkpoint_prefix)
            newest = saver.latest_step()
            if newest is not None:
                state = saver.restore(state, step=newest)
                position = (saver.extra(newest) or {}).get(_POSITION)
                _logger.info("restored %s", checkpoint_name(checkpoint_prefix, newest))
        start = global_step(state)
        feed_source = _feed.source_of(batches, start, last_step, position)
        feed: _feed.Feed | None = None

        def stop_waiting() -> None:
            if feed is not None and feed.waiting:
                raise StopWaiting

        def where() -> dict[str, Any]:
            assert feed is not None
            at = feed.position
            return {} if at is None else {_POSITION: at}

        signals = stack.enter_context(StopSignals(stop_waiting))
        writer = _open_writer(stack, logdir, start)
        counter = StepCounterHook(log_steps or save_summaries_steps or 100, summary_writer=writer)
        call = train_step if steps_per_call == 1 else scan_steps(train_step)
        checks = tuple(hook.before_save for hook in hooks if hasattr(hook, "before_save"))
        saving = None
        if saver is not None:
            saving = CheckpointSaverHook(
                saver, save_checkpoint_secs, save_checkpoint_steps, extra=where, before_save=checks
            )

        def constants() -> Any:
            return getattr(call, "constant_metrics", ())

        reporting = _reporting(progress, log_steps, last_step, counter, constants)
        every_hook = [*hooks, counter, *reporting]
        _each(every_hook, "use_writer", writer, constants)
        replaced = any(isinstance(hook, SummarySaverHook) and hook.takes_writer for hook in hooks)
        if writer is not None and save_summaries_steps is not None and not replaced:
            every_hook.append(SummarySaverHook(writer, save_summaries_steps, leave_out=constants))
        if saving:
            every_hook.append(saving)
        for hook in every_hook:
            if hasattr(hook, "close"):
                stack.callback(hook.close)
        if saver is not None:
            # Waits for what is being written, also after an error; a second Ctrl-C does not wait.
            stack.callback(lambda: None if signals.at_once else saver.close())

        _each(every_hook, "begin", state)
        lengths = None if steps_per_call == 1 else _lengths(every_hook, start, last_step, steps_per_call)
        feed = _feed.Feed(feed_source, _feed.calls(feed_source, lengths, batch_sharding))
        stack.callback(feed.close)
        step, state = _run(call, state, feed, start, last_step, every_hook, signals, steps_per_call)
        if signals.received is not None:
            _leave(signals, saving, step, state)
        _each(every_hook, "end", step, state)
        if global_step(state) != step:
            raise ValueError(
                f"train_step advanced global_step from {start} to {global_step(state)} in {step - start} steps; it "
                "must advance it by one (minimize(..., increment_global_step=True))"
            )
        return state


def _run(
    call: Callable[..., Any],
    state: TrainState,
    feed: _feed.Feed,
    step: int,
    last_step: int,
    hooks: list[Any],
    signals: StopSignals,
    steps_per_call: int,
) -> tuple[int, TrainState]:
    """The loop itself; nothing in it waits for the device."""
    dues = [_due(hook, step) for hook in hooks]
    next_due = min(dues, default=NEVER)
    start = step
    if step >= last_step:
        return step, state
    with contextlib.suppress(StopWaiting):
        for one in feed:
            state, metrics = call(state, *one.args)
            first, step = step, step + one.steps
            if first == start:
                _each(hooks, "after_first_call", step)
            if steps_per_call > 1:
                _each(hooks, "after_call", range(first + 1, step + 1), metrics)
                metrics = last_of(metrics) if step >= next_due else None
            if step >= next_due:
                stop = False
                for i, hook in enumerate(hooks):
                    if dues[i] <= step:
                        stop = bool(hook.after_step(step, state, metrics)) or stop
                        dues[i] = _due(hook, step)
                if stop:
                    signals.to_stop()
                    break
                next_due = min(dues)
            if signals.to_stop() or step >= last_step:
                break
    return step, state


def _due(hook: Any, step: int) -> int:
    """The next step at which the loop calls a hook: the next one where the hook does not say."""
    if not hasattr(hook, "after_step"):
        return NEVER
    due = hook.next_due(step) if hasattr(hook, "next_due") else None
    return step + 1 if due is None else int(due)


def _lengths(hooks: list[Any], step: int, last_step: int, steps_per_call: int) -> Iterator[int]:
    """How many steps each call makes: no hook that says when it is due is passed over."""
    known = [getattr(hook, name) for hook in hooks for name in ("next_due", "next_multiple") if hasattr(hook, name)]
    while step < last_step:
        dues = [next_due(step) for next_due in known]
        end = min([step + steps_per_call, last_step, *(due for due in dues if due is not None)])
        yield end - step
        step = end


def _each(hooks: list[Any], method: str, *args: Any) -> None:
    for hook in hooks:
        if hasattr(hook, method):
            getattr(hook, method)(*args)


def _leave(signals: StopSignals, saving: CheckpointSaverHook | None, step: int, state: TrainState) -> None:
    saved = ""
    if saving is not None:
        saving.save(step, state)
        saved = ", which is saved; start the run again to go on"
    message = f"{signals.received.name if signals.received else ''} stopped the run after step {step}{saved}"
    _logger.info(message)
    if signals.received == signal.SIGTERM:
        raise Preempted(message)
    raise KeyboardInterrupt(message)


def _check(train_step: Any, state: Any, last_step: Any, steps_per_call: Any, hooks: Any) -> None:
    if not callable(train_step):
        raise TypeError(f"train_step={train_step!r}: must be a function (state, *args) -> (state, metrics)")
    if not isinstance(state, TrainState):
        raise TypeError(f"state: must be a TrainState, got {type(state).__name__}; make one with TrainState.create")
    for name, value, low in (("last_step", last_step, 0), ("steps_per_call", steps_per_call, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: must be an integer, got {type(value).__name__}")
        if value < low:
            raise ValueError(f"{name}={value}: must be ≥ {low}")
    for i, hook in enumerate(hooks):
        if isinstance(hook, type):
            raise TypeError(f"hooks[{i}]={hook.__name__} is a class; give an instance: {hook.__name__}(...)")
        if not any(hasattr(hook, method) for method in ("begin", "after_step", "end")):
            raise TypeError(f"hooks[{i}]={hook!r}: has none of begin, after_step and end; see jstep.Hook")
    if get_global_step(state) is None:
        # The words of StepCounterHook, which every run has.
        StepCounterHook().begin(state)


def _reporting(
    progress: bool | None, log_steps: int | None, last_step: int, counter: StepCounterHook, constants: Any
) -> list[Hook]:
    """The line on a terminal, or log lines, or nothing."""
    if progress is False or jax.process_index() != 0:
        return []
    if progress or (sys.stderr.isatty() and importlib.util.find_spec("tqdm")):
        return [ProgressHook(last_step)]
    return [LoggingHook(log_steps, counter=counter, leave_out=constants)] if log_steps else []


class _AboveTheBar(logging.StreamHandler[Any]):
    """Writes lines of their own: a progress bar that stands there is drawn again below them."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:
            super().emit(record)
        else:
            tqdm.tqdm.write(self.format(record), file=self.stream)


@contextlib.contextmanager
def _visible_logging(wanted: bool) -> Iterator[None]:
    """Shows what the logger `jstep` says on standard error, where nobody has set up logging for it.

    That the root logger has a handler says little: some libraries give it one, for warnings, when first used.
    """
    if not wanted or _logger.handlers or (_logger.hasHandlers() and _logger.isEnabledFor(logging.INFO)):
        yield
        return
    handler, level = _AboveTheBar(sys.stderr), _logger.level
    _logger.propagate = False  # or the lines come twice where the root logger gets a handler meanwhile
    handler.setFormatter(logging.Formatter("%(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.propagate = True
        _logger.removeHandler(handler)
        _logger.setLevel(level)


def _open_writer(stack: contextlib.ExitStack, logdir: Any, start: int) -> Any:
    if logdir is None:
        return None
    from jstep.summary import SummaryWriter

    writer = stack.enter_context(SummaryWriter(logdir))
    # TensorBoard drops what earlier runs wrote at this step and later ones, so nothing is shown twice.
    writer.add_session_log("START", start + 1)
    return writer

"""The training loop: restore, run, save."""

import contextlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax

from jstep.checkpoint import Saver, checkpoint_name
from jstep.core.checks import as_int
from jstep.hooks import (
    CheckpointSaverHook,
    Hook,
    LoggingHook,
    ProgressHook,
    StepCounterHook,
    SummarySaverHook,
)
from jstep.hooks.hook import NEVER, CadencedHook, check_step
from jstep.hooks.visible import visible_logging
from jstep.loop import feed as _feed
from jstep.loop.checks import check, check_alive, check_result, list_of_hooks
from jstep.loop.signals import Preempted, StopSignals, StopWaiting
from jstep.state import TrainState, global_step
from jstep.training import TrainStep, last_of, scan_steps

_logger = logging.getLogger("jstep")
_POSITION = "batches"


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
        RuntimeError: The state has no global step, or was donated to an earlier step.
        TypeError: An argument is of the wrong type, or train_step returns something else than a state and metrics.
        ValueError: An argument is out of range, the checkpoint does not fit the state, or train_step does not advance
            the step by one.

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
    hooks = list_of_hooks(hooks)
    last_step = as_int(last_step, "last_step", 0)
    steps_per_call = as_int(steps_per_call, "steps_per_call", 1)
    check(
        train_step,
        state,
        save_checkpoint_secs=save_checkpoint_secs,
        save_checkpoint_steps=save_checkpoint_steps,
        save_summaries_steps=save_summaries_steps,
        log_steps=log_steps,
    )
    with contextlib.ExitStack() as stack:
        if progress is not False and jax.process_index() == 0:
            stack.enter_context(visible_logging())
        feed: _feed.Feed | None = None

        def on_signal() -> None:
            if feed is None:
                raise _stopped(signals.received, "before its first step")
            if feed.waiting:
                raise StopWaiting

        signals = stack.enter_context(StopSignals(on_signal))
        saver, position, restored = None, None, None
        if checkpoint_dir is not None:
            saver = Saver(checkpoint_dir, prefix=checkpoint_prefix)
            # Waits for what is being written, also after an error; a second Ctrl-C does not wait.
            stack.push(_unless(lambda: signals.at_once, saver.__exit__))
            restored = saver.latest_step()
            if restored is not None:
                state = saver.restore(state, step=restored)
                kept = saver.extra(restored)
                position = kept.get(_POSITION) if isinstance(kept, dict) else None
                _logger.info("restored %s", checkpoint_name(checkpoint_prefix, restored))
        if restored is None:
            check_alive(state)
        start = global_step(state)
        source = _feed.source_of(batches, start, last_step, position)
        if saver is None:
            source = source._replace(position=None)  # nobody asks

        writer = _open_writer(stack, logdir, start)
        counter = StepCounterHook(log_steps or save_summaries_steps or 100, summary_writer=writer)
        call = train_step if steps_per_call == 1 else _scanned(train_step)

        def constants() -> Any:
            return getattr(call, "constant_metrics", ())

        every_hook = [*hooks, counter, *_reporting(progress, log_steps, last_step, counter, constants)]
        _each(every_hook, "use_writer", writer, constants)
        replaced = any(isinstance(hook, SummarySaverHook) and hook.takes_writer for hook in hooks)
        if writer is not None and save_summaries_steps is not None and not replaced:
            every_hook.append(SummarySaverHook(writer, save_summaries_steps, leave_out=constants))
        if saver is not None:
            checks = [hook.before_save for hook in hooks if hasattr(hook, "before_save")]
            if writer is not None:
                # A run that goes on from this checkpoint does not write these points again.
                checks.append(lambda step: writer.flush())
            saving = CheckpointSaverHook(
                saver,
                save_checkpoint_secs,
                save_checkpoint_steps,
                extra=lambda: {} if feed is None or feed.position is None else {_POSITION: feed.position},
                before_save=tuple(checks),
            )
            every_hook.append(saving)
        for hook in every_hook:
            if hasattr(hook, "close"):
                stack.callback(hook.close)

        done = any(_each(every_hook, "begin", state)) or start >= last_step
        if saver is not None and restored is not None:
            saving.is_saved(restored)
        if done:
            _logger.info("the run is at step %d already: no step is made", start)
        lengths = None if steps_per_call == 1 else _lengths(every_hook, start, last_step, steps_per_call)
        made = _feed.calls(source, lengths, batch_sharding, on_device=call is train_step and not _is_compiled(call))
        feed = _feed.Feed(source, made, stopping=lambda: signals.interrupts)
        stack.callback(feed.close)
        step, stopped = start, False
        if not done:
            step, state, stopped = _run(
                call, state, feed, start, last_step, every_hook, signals, stacked=lengths is not None
            )
        check_step(step, state)
        if not stopped:
            _each(every_hook, "end", step, state)
        if signals.received is not None:  # also where it came meanwhile
            _leave(signals, every_hook, step, state)
        return state


def _run(
    call: Callable[..., Any],
    state: TrainState,
    feed: _feed.Feed,
    start: int,
    last_step: int,
    hooks: list[Any],
    signals: StopSignals,
    *,
    stacked: bool,
) -> tuple[int, TrainState, bool]:
    """The loop itself; nothing in it waits for the device.

    Returns:
        Where it ended, and whether a signal ended it: on several processes the same on all.
    """
    step, stopped = start, False
    acting = [hook for hook in hooks if hasattr(hook, "after_step")]
    actions = [(hook.after_step, _due_of(hook)) for hook in acting]
    dues = [due_of(step) for _, due_of in actions]
    next_due = min(dues, default=NEVER)
    with contextlib.suppress(StopWaiting):
        for one in feed:
            first, step, result = step, step + one.steps, call(state, *one.args)
            state, metrics = check_result(result) if first == start else result
            if first == start:
                _each(hooks, "after_first_call", step)
            if stacked:
                _each(hooks, "after_call", range(first + 1, step + 1), metrics)
                metrics = last_of(metrics) if step >= next_due else None
            stop = False
            if step >= next_due:
                for i, (after_step, due_of) in enumerate(actions):
                    if dues[i] <= step:
                        stop = bool(after_step(step, state, metrics)) or stop
                        dues[i] = due_of(step)
                next_due = min(dues)
            stopped = signals.to_stop()
            if stopped or stop or step >= last_step:
                break
        return step, state, stopped
    return step, state, True


def _due_of(hook: Any) -> Callable[[int], int]:
    """From a step to the next one at which the loop calls a hook: the very next where the hook does not say."""
    next_due = getattr(hook, "next_due", None)
    if next_due is None or (isinstance(hook, CadencedHook) and hook.asks_clock):
        return lambda step: step + 1

    def due_of(step: int) -> int:
        due = _checked(next_due, step)
        return step + 1 if due is None else due

    return due_of


def _checked(next_due: Callable[[int], int | None], step: int) -> int | None:
    due = next_due(step)
    if due is not None and due <= step:
        name = getattr(next_due, "__qualname__", repr(next_due))
        raise ValueError(f"{name}({step}) returned {due}: must be a later step, or None")
    return due


def _lengths(hooks: list[Any], step: int, last_step: int, steps_per_call: int) -> Iterator[int]:
    """How many steps each call makes: no hook that says when it is due is passed over."""
    known = [getattr(hook, name) for hook in hooks for name in ("next_due", "next_multiple") if hasattr(hook, name)]
    while step < last_step:
        dues = [_checked(next_due, step) for next_due in known]
        end = min([step + steps_per_call, last_step, *(due for due in dues if due is not None)])
        yield end - step
        step = end


def _scanned(train_step: Any) -> Any:
    """Several steps in one call, compiled; the same function for the same step, so that it is compiled once."""
    found = getattr(train_step, "_jstep_scanned", None)
    if found is None:
        found = scan_steps(train_step)
        if not isinstance(found, TrainStep):
            # Not donated: of a plain function nobody expects that it takes over the memory of the state.
            found = TrainStep(found, donate=False)
        with contextlib.suppress(AttributeError):
            train_step._jstep_scanned = found
    return found


def _is_compiled(step: Any) -> bool:
    return isinstance(step, TrainStep) or hasattr(step, "lower")


def _unless(condition: Callable[[], bool], leave: Callable[..., None]) -> Callable[..., None]:
    return lambda *error: None if condition() else leave(*error)


def _each(hooks: list[Any], method: str, *args: Any) -> list[bool]:
    return [bool(getattr(hook, method)(*args)) for hook in hooks if hasattr(hook, method)]


def _leave(signals: StopSignals, hooks: list[Any], step: int, state: TrainState) -> NoReturn:
    saving = [hook for hook in hooks if isinstance(hook, CheckpointSaverHook)]
    saved = [hook.save(step, state, wait=True) for hook in saving]
    if not saved:
        raise _stopped(signals.received, f"after step {step}")
    outcome = "is saved; start the run again to go on" if all(saved) else "is not saved, as a hook demands"
    raise _stopped(signals.received, f"after step {step}, which {outcome}")


def _stopped(received: signal.Signals | None, when: str) -> BaseException:
    assert received is not None
    message = f"{received.name} stopped the run {when}"
    _logger.info(message)
    return Preempted(message) if received == signal.SIGTERM else KeyboardInterrupt(message)


def _reporting(
    progress: bool | None, log_steps: int | None, last_step: int, counter: StepCounterHook, constants: Any
) -> list[Hook]:
    """The line on a terminal, or log lines, or nothing."""
    if progress is False or jax.process_index() != 0:
        return []
    if progress or (sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("tqdm")):
        return [ProgressHook(last_step)]
    return [LoggingHook(log_steps, counter=counter, leave_out=constants)] if log_steps else []


def _open_writer(stack: contextlib.ExitStack, logdir: Any, start: int) -> Any:
    if logdir is None:
        return None
    from jstep.summary import SummaryWriter

    writer = stack.enter_context(SummaryWriter(logdir))
    # TensorBoard drops what earlier runs wrote at this step and later ones, so nothing is shown twice.
    writer.add_session_log("START", start + 1)
    return writer

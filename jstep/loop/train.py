"""The training loop, `jstep.train`."""

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jstep.checkpoint.saver import Saver
from jstep.core import interactive
from jstep.core.annotations import P, Tree
from jstep.core.exceptions import setting
from jstep.core.interactive import is_notebook
from jstep.core.logs import WARNED, log_to_stderr
from jstep.core.meshes import mesh_of, overriding_mesh
from jstep.core.stopwatch import SAVING
from jstep.data.batch_placement import over_axes
from jstep.data.loaders import check_batches
from jstep.distributed import processes
from jstep.hooks.hook import check_step
from jstep.loop.arguments import Options, as_steps_per_call, cache_directory, check, explains_arguments
from jstep.loop.hook_runner import close_hooks
from jstep.loop.loop_state import CLOSING, ENDING, LEAVING, RUNNING, At
from jstep.loop.observer import Observer, Observers
from jstep.loop.programs import Chunk, as_stages
from jstep.loop.progress import Progress
from jstep.loop.recorder import Recorder
from jstep.loop.run import Run
from jstep.loop.setup import Setup, new_setup
from jstep.loop.signals import StopWaiting
from jstep.loop.stalls import StallWatch
from jstep.loop.start import begin, open_run
from jstep.loop.start_times import StartTimes
from jstep.loop.stopping import (
    exit_on_signal,
    keep_state,
    leave_after_closing,
    leave_at_once,
    note_closing,
    report_early_end,
    rescue,
)
from jstep.loop.utilization import Meters
from jstep.state.train_state import TrainState
from jstep.stores.compile_cache import persistent_cache

OBSERVERS: tuple[type[Observer], ...] = (
    Progress,
    Recorder,
    StallWatch,
    Meters,
)
"""The observers of a run, in the order in which they are called; they exit in reverse order, so that `Progress` shows
what the others log until then. If a line and its file are deleted, only the output of that observer is missing."""


@explains_arguments
def train(
    train_step: Callable[..., tuple[TrainState, Any]] | Mapping[int, Callable[..., tuple[TrainState, Any]]],
    state: TrainState[P],
    batches: Callable[[int], Tree] | Tree,
    last_step: int | None,
    *,
    hooks: Sequence[Any] = (),
    checkpoint_dir: str | os.PathLike[str] | Saver | None = None,
    checkpoint_prefix: str = "model",
    save_checkpoint_secs: float | str | None = "auto",
    save_checkpoint_steps: int | None = None,
    logdir: str | os.PathLike[str] | None = None,
    save_summaries_steps: int | None = 100,
    log_steps: int | None = 100,
    steps_per_call: int | str = 1,
    progress: bool | None = None,
    batch_sharding: object = None,
    compile_cache: str | os.PathLike[str] | bool | None = None,
    stop_secs: float | None = None,
    config: object = None,
    start_from: str | os.PathLike[str] | None = None,
) -> TrainState[P]:
    """Train up to `last_step`: restore the newest checkpoint, run the steps and save checkpoints.

    A run that was stopped, killed or preempted resumes when it is started again, as if it had never stopped: the step,
    and with it the schedules, averages, random numbers and batches, is restored from the checkpoint.

    A run that ends early (by a signal, an error in the data loader or in a hook, or a batch of the wrong shape) does
    not lose its state. The last complete state is in the exception's `state` attribute. If there is a checkpoint_dir,
    it is also saved, unless its loss or a parameter is not finite, or there are several processes (these save only
    after a signal, which reaches all of them). A note on the exception names the step and the batch. If a step fails
    while it runs on the device (out of memory, a host callback that raises), the state was already donated to it and is
    lost: the run resumes from the last checkpoint.

    Args:
        train_step: The step that `minimize` returned, or any function `(state, *args) -> (state, metrics)` that
            advances `global_step` by one. A mapping `{0: step_a, 1000: step_b}` defines stages: step_a before step
            1000, step_b from there on. All stages share one structure of the state; later stages are compiled in the
            background.
        state: The initial state. If a checkpoint is restored, the state is only a template for structure, shapes,
            dtypes and sharding, and may be abstract. It is donated to a compiled step.
        batches: An object with `batches[N]` (`jstep.batches`), a function of the step, `jstep.from_state(fn)` for
            batches that are made with the state, or any iterable. The position of an iterator with `get_state` and
            `set_state`, or of a loader or iterator with `state_dict` and `load_state_dict`, is saved with each
            checkpoint, for every process. A plain tuple is passed as `*args`; anything else, including a list or a
            NamedTuple, is one argument; for a step without a batch, pass `lambda step: ()`. Each batch is copied before
            the next one is fetched, so a loader may reuse its buffers. If the batches end before last_step, including
            by the `OutOfRangeError` of a closed queue, the run ends with a warning.
        last_step: The global step at which the run ends. It is absolute: a run restored at last_step takes no step.
            None if the batches, a hook or a signal end the run.
        hooks: Hooks to call around the steps; see `Hook`, and `every` to wrap a function. They are called before the
            built-in hooks, and each `CheckpointSaverHook` among them after the others. A `StepCounterHook` among them
            replaces the built-in one.
        checkpoint_dir: Where to save checkpoints: a directory, a URL, or a `Saver`, which has its own prefix and is
            left open. If None, no checkpoints are saved. The run ends if a checkpoint is due and parameters became NaN
            or infinite, unless the Saver has `allow_nonfinite=True`.
        checkpoint_prefix: Prefix of checkpoint names: `model` gives `model-1000`.
        save_checkpoint_secs: Interval between checkpoints, in seconds; None to save by step count only. "auto" saves as
            often as possible at a cost of at most 1 % of the time: every 10 seconds (60 in a bucket) to every 600. Of
            these checkpoints, one every 600 seconds is kept; the others are *temporary*: each is replaced by the next,
            and counts neither in `max_to_keep` nor in `keep_checkpoint_every_n_hours`. With save_checkpoint_steps,
            "auto" means 600.
        save_checkpoint_steps: Interval between checkpoints, in steps. The last step is always saved.
        logdir: Where to write TensorBoard event files, a directory or a URL; None to write none.
        save_summaries_steps: Interval between summaries, in steps; None for never. The last step is written only if it
            is a multiple. A `SummarySaverHook` made without a writer, passed in hooks, replaces the built-in one and
            has its own interval.
        log_steps: Interval between log lines, in steps; None for never. The last step is always logged.
        steps_per_call: The maximum number of steps of a call, K. One compiled program loops over the stacked batches of
            a call, as many as there are until a hook is due or the shapes of the batches change, so that hooks and
            restarts change no bit. If XLA runs a loop much slower than single steps (convolutions on a CPU), a call
            takes one step. "auto" chooses K from the times of the first calls, so that a call takes about 5 ms: at most
            64, or 1 for longer steps; the choice changes no bit.
        progress: None for a progress line on a terminal and log lines elsewhere, True for the progress line, False for
            no output.
        batch_sharding: Sharding of the batches, or a tree of shardings: the rows of each process become its part of one
            global array. The name of an axis of the state's mesh, or a tuple of names, splits the rows over it:
            `"data"` is `NamedSharding(mesh, P("data"))`.
        compile_cache: A local directory for JAX's persistent compilation cache, or True for `compile_cache` in
            checkpoint_dir. A run that is started again finds its programs there; whoever can write to that directory
            can thus run programs in this process. JAX's cache settings are global to the process; they are restored
            when the run ends.
        stop_secs: Seconds, counted from this call, after which the run saves and leaves as after SIGTERM, on all
            processes at one step; choose it somewhat below a scheduler's limit. None for no limit.
        config: The program's own options: a mapping, a dataclass instance or an `argparse.Namespace`. They are saved
            with the run and with each checkpoint, without secrets, and compared at a restart.
        start_from: A checkpoint of another run, or its directory (the newest one), from which this run begins if its
            checkpoint_dir has none yet: with the state, positions of loaders and states of hooks with which that run
            would have continued. Its own checkpoint of that step is saved first; from then on start_from is not read.
            Nothing is written to the other run's directory. A state passed at the step of that checkpoint, if not 0,
            replaces the checkpoint's state, with other values or shapes.

    Returns:
        The state after the last step.

    Raises:
        Preempted: SIGTERM, SIGUSR1 or SIGHUP was received, or `stop_secs` has elapsed, and the step in flight is
            finished. A SystemExit with code 128 + signal, 143 for SIGTERM and `stop_secs`. SIGUSR1 and SIGHUP are left
            alone if they are ignored or have a handler when the run starts.
        KeyboardInterrupt: SIGINT was received, and the step in flight is saved. A second SIGINT stops immediately. If
            SIGINT is ignored when the run starts (`nohup`, a background job), it stays ignored.
        NanLossDuringTrainingError: A checkpoint is due, or a signal was received, and parameters have become NaN or
            infinite since the run began. Nothing is saved.
        RuntimeError: The state has no global step, or was donated to an earlier step.
        TypeError: train_step does not return a state and metrics, or a hook returns a value that `Hook` does not allow.
        ValueError: The checkpoint does not fit the state, start_from is neither at the step of the state passed nor is
            that 0, train_step does not advance the step by one, there is no batch for the first step, the shapes of a
            batch differ between processes, or a hook returns a state that does not fit.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.train(train_step, state, lambda step: jnp.ones(()), last_step=10)
        >>> print(round(float(state.params["w"]), 4), state.global_step)
        0.999 10

    Source: `tf.train.MonitoredTrainingSession`.
    """
    times = StartTimes()
    options = Options(
        batch_sharding=over_axes(batch_sharding, state),
        steps_per_call=as_steps_per_call(steps_per_call, batches),
        last_step=last_step,
        hooks=hooks,
        checkpoint_dir=checkpoint_dir,
        checkpoint_prefix=checkpoint_prefix,
        save_checkpoint_secs=save_checkpoint_secs,
        save_checkpoint_steps=save_checkpoint_steps,
        logdir=logdir,
        save_summaries_steps=save_summaries_steps,
        log_steps=log_steps,
        progress=progress,
        compile_cache=compile_cache,
        stop_secs=stop_secs,
        config=config,
        start_from=start_from,
    )
    stages = as_stages(train_step)
    check(state, options.stop_step)
    processes.refuse_another_run()
    check_batches(batches)
    cached_in = cache_directory(options.compile_cache, options.checkpoint_dir)
    with times.part("devices"):
        jax.devices()
    # The progress bar of a notebook shows the rest.
    least = logging.WARNING if progress is None and is_notebook() else logging.NOTSET
    log = log_to_stderr(least) if progress is not False and jax.process_index() == 0 else contextlib.nullcontext()
    # Hooks and evaluations run under the mesh of the state, even if another mesh is set.
    with overriding_mesh(mesh_of(state)), log, persistent_cache(cached_in), setting(WARNED, set()):
        return _train(new_setup(options, stages, state, batches, times))


def _train(setup: Setup) -> TrainState:
    try:
        state = _run_to_its_end(setup)
    except BaseException as error:
        close_hooks(setup, error)
        raise
    try:
        close_hooks(setup, None)
    except Exception as error:
        error.state = state  # type: ignore[attr-defined]
        raise
    interactive.forget()
    return state


def _run_to_its_end(setup: Setup) -> TrainState:
    state, is_handled, signals = None, False, setup.signals
    try:
        with contextlib.ExitStack() as stack:
            observers: Observers = ()
            for make_observer in OBSERVERS:
                observers = (*observers, stack.enter_context(make_observer(setup)))
            stack.callback(signals.end)
            stack.callback(lambda: None if signals.received_twice else setup.background.wait())
            stack.enter_context(setup.closing)
            run = None
            try:
                signals.begin()
                run = open_run(setup, observers)
                _finish(run, is_stopped=begin(run) and _take_steps(run))
                state = run.state
            except BaseException as error:
                signals.finish()
                is_handled = signals.received is not None
                setup.loop.phase = ENDING
                if run is None:
                    keep_state(setup, error)
                else:
                    rescue(run, error)
                state = getattr(error, "state", None)
                if signals.received_twice and isinstance(error, KeyboardInterrupt):
                    leave_at_once(setup.loop.at.step, error)
                raise
            finally:
                for observer in observers:
                    observer.before_close()
                setup.watch.switch(SAVING)  # only pending writes are left
                # Hooks and signal handlers must not keep the state alive.
                setup.loop.at, setup.loop.calling = At(setup.loop.at.step, None), None
                setup.loop.phase = CLOSING
                setup.in_flight.clear()
        signals.agree_at_end()
    except Exception as error:
        if not hasattr(error, "state") and state is not None:
            note_closing(setup, error, state)
        raise
    finally:
        if signals.received is not None and not is_handled:
            leave_after_closing(setup, state)
    return state


def _take_steps(run: Run) -> bool:
    """Run the chunks and hooks until the run ends; return whether a signal ended it."""
    loop, signals, runner, in_flight = run.setup.loop, run.setup.signals, run.runner, run.setup.in_flight
    last_step = run.setup.options.stop_step
    signals.finish(run.feeder.interrupted)
    loop.phase = RUNNING
    run_chunk = runner.with_before_step(run.dispatch)
    try:
        for chunk in fetch_by_all(run.feeder):
            in_flight.make_room()
            if signals.received is not None and not chunk.must_run:
                signals.check()  # it arrived meanwhile
            loop.at = At._make((chunk.first + chunk.steps, *run_chunk(loop.at.state, chunk), chunk.program.rows))
            in_flight.add(chunk.first, *loop.at[:3])
            is_over = runner.after(chunk.first)
            if (signals.received is not None or not signals.is_alone) and signals.to_stop():
                return True
            if is_over or loop.at.step >= last_step:
                break
    except StopWaiting:
        return True
    if loop.at.step < last_step and loop.stopped_by is None:
        loop.phase = ENDING
        report_early_end(run)
    return False


def fetch_by_all(chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """Return the chunks once all processes have fetched the first one; an error in one is raised in all."""
    if processes.is_single_process():
        return chunks
    rest = iter(chunks)
    first = processes.on_all_processes(lambda: next(rest, None), "batches: the first one cannot be fetched")
    if processes.any_process(first is None) and first is not None:
        raise ValueError("batches: another process has no batch at all; give each process a part")
    return rest if first is None else itertools.chain([first], rest)


def _finish(run: Run, *, is_stopped: bool) -> None:
    """End the hooks, which save the last state, or leave if a signal was received."""
    run.setup.signals.finish()
    run.setup.loop.phase = LEAVING if is_stopped else ENDING
    run.runner.last()
    check_step(run.step, run.state)
    if not is_stopped:
        run.runner.end()
    if is_stopped or run.setup.signals.to_stop():  # also during the hooks above
        exit_on_signal(run)
    run.runner.settle()

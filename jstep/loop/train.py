"""The training loop: restore, run, save."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jstep.checkpoint import Saver
from jstep.core.meshes import mesh_of, overriding_mesh
from jstep.hooks.log_handler import log_to_stderr
from jstep.loop.checks import check
from jstep.loop.compile_cache import persistent_cache
from jstep.loop.options import Options
from jstep.loop.run import Run
from jstep.loop.sources import check_batches
from jstep.loop.stages import stages_of
from jstep.loop.start_times import StartTimes
from jstep.state import TrainState


def train(
    train_step: Callable[..., tuple[TrainState, Any]] | Mapping[int, Callable[..., tuple[TrainState, Any]]],
    state: TrainState,
    batches: Any,
    last_step: int,
    *,
    hooks: Sequence[Any] = (),
    checkpoint_dir: str | os.PathLike[str] | Saver | None = None,
    checkpoint_prefix: str = "model",
    save_checkpoint_secs: float | None = 600,
    save_checkpoint_steps: int | None = None,
    logdir: str | os.PathLike[str] | None = None,
    save_summaries_steps: int | None = 100,
    log_steps: int | None = 100,
    steps_per_call: int = 1,
    progress: bool | None = None,
    batch_sharding: Any = None,
    unroll: int | bool | None = None,
    compile_cache: str | os.PathLike[str] | bool | None = None,
) -> TrainState:
    """Trains up to a step: restores the newest checkpoint, runs, saves.

    A run that was stopped, killed or preempted and is started again goes on as if nothing had happened: the step,
    and with it the rates, the averages, the random numbers and the batches, come from the checkpoint.

    Whatever ends a run early (a signal, the batches, a hook, a batch of a wrong shape) loses no state: the last whole
    one is in the exception's `state` attribute, and saved if there is a checkpoint_dir, unless its loss is not finite,
    or there are several processes (then only for signals, which all of them see). A note of the exception names step
    and batch. A step that fails while it runs on the device (out of memory, a host callback that raises) is the
    exception: the state was donated to it and is lost, and the run resumes from the last checkpoint.

    Args:
        train_step: What `minimize` returned, or any function `(state, *args) -> (state, metrics)` that advances
            `global_step` by one. A mapping `{0: step_a, 1000: step_b}` gives stages: step_a before step 1000, step_b
            from it on. All share one structure of the state; a later stage is compiled in the background.
        state: Where to start. If a checkpoint is restored, the state is a template: it gives structure, shapes, dtypes
            and sharding, and may be abstract. It is donated to a compiled step.
        batches: An object with `batches[N]` (`jstep.batches`), a function of the step, any iterable, or one whose
            position is kept with the checkpoint, that of each process: an iterator with `get_state` and `set_state`, or
            a loader or iterator with `state_dict` and `load_state_dict`. A tuple is passed as `*args`, anything else
            (a list, too) as one argument. What it returns is copied before the next batch is asked for: a loader may
            reuse its buffers. If it ends, the run ends, with a warning.
        last_step: The global step at which the run ends, absolute: a run restored at it has nothing to do.
        hooks: What happens around the steps; see `Hook`, and `every` for functions. They come before the stock ones,
            each `CheckpointSaverHook` behind the others. A `StepCounterHook` among them takes the place of the stock
            one.
        checkpoint_dir: Where checkpoints are: a directory, a URL, or a `Saver` of one's own, which has its own prefix
            and is not closed. None keeps none.
        checkpoint_prefix: Before the step in their names: `model-1000`.
        save_checkpoint_secs: How often to save, in seconds; None for steps alone.
        save_checkpoint_steps: How often to save, in steps. The last step is always saved.
        logdir: Where TensorBoard's event files go, a directory or a URL; None writes none.
        save_summaries_steps: How often to write summaries, in steps; None for never. A `SummarySaverHook` among the
            hooks that was made without a writer says so itself.
        log_steps: How often to log, in steps; None for never. The last step is always logged.
        steps_per_call: How many steps to take in one call, scanned over stacked batches. If a hook is due before such
            a call would end, or the shapes of batches differ, steps are taken one at a time: there are two compiled
            programs, whatever the cadences, and each compilation is logged with its reason.
        progress: None for one line on a terminal and log lines elsewhere, True for the line, False for silence.
        batch_sharding: Where batches go, a sharding or a tree of them: each process's rows become its part of one
            global array.
        unroll: With steps_per_call > 1, as in `scan_steps`.
        compile_cache: A local directory for JAX's persistent compilation cache, True for `compile_cache` in the
            checkpoint_dir: a run that is started again finds its programs there. JAX's settings, which are those of the
            process, are restored when the run ends.

    Returns:
        The state after the last step.

    Raises:
        Preempted: SIGTERM arrived; the step in flight is saved. A SystemExit with code 143.
        KeyboardInterrupt: SIGINT arrived; likewise. A second SIGINT leaves at once. Where SIGINT is ignored when the
            run starts (`nohup`, a background job), it stays ignored.
        RuntimeError: The state has no global step, or was donated to an earlier step.
        TypeError: train_step returns something else than a state and metrics, or a hook something else than `Hook`
            says.
        ValueError: The checkpoint does not fit the state, train_step does not advance the step by one, there is no
            batch for the first step, or a hook returns a state that does not fit.

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
    given = locals()
    options = Options(**{field.name: given[field.name] for field in dataclasses.fields(Options)})
    stages = stages_of(train_step)
    check(state, options.last_step)
    check_batches(batches)
    times = StartTimes()
    with times.part("devices"):
        jax.devices()
    log = log_to_stderr() if progress is not False and jax.process_index() == 0 else contextlib.nullcontext()
    # If another mesh is set, hooks and evaluations compute with that of the state all the same.
    with overriding_mesh(mesh_of(state)), log, persistent_cache(options.cache_directory):
        return Run(options, stages, state, times).go(batches)

"""The training loop, `jstep.train`: a `Run` whose body is empty."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jstep.checkpoint.saver import Saver
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import P, Tree
from jstep.data.loop_batches import LoopBatches
from jstep.origin.arguments import Step
from jstep.running.run import Run
from jstep.state.train_state import TrainState


class _RunWithoutBody(Run[P]):
    """A run whose steps have no body after their hooks, so that a signal may abandon an evaluation.

    It is a subclass, as an argument of `Run` would be public.
    """

    _has_body = False


@shortens_tracebacks
def train(
    train_step: Step | Mapping[int, Step],
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
    batch_sharding: Any = None,
    compile_cache: str | os.PathLike[str] | bool | None = None,
    stop_secs: float | None = None,
    config: Any = None,
    start_from: str | os.PathLike[str] | None = None,
) -> TrainState[P]:
    """Train up to `last_step`: restore the newest checkpoint, run the steps and save checkpoints.

    If the process is killed or preempted, make the same call again: the run resumes from its newest
    checkpoint, which contains the state and the positions of the batches.

    After an exception, its attribute `state` holds the last complete state, and a note names the
    checkpoint that a restart resumes from. If the exception came from between two steps, such as
    from a loader, the state is also saved in checkpoint_dir, unless its loss or a parameter is not
    finite, or there are several processes (these save only after a signal). If the exception came
    from a hook, nothing of that step is saved, and a restart takes the step again. If a step fails
    on the device, the state that was donated to it is lost.

    Args:
        train_step: The step that `minimize` returned, or any function
            `(state, *args) -> (state, metrics)` that advances `global_step` by one. A mapping
            `{0: step_a, 1000: step_b}` defines stages: step_a is used before step 1000, and step_b
            from there on. All stages share one structure of the state.
        state: The initial state. If a checkpoint is restored, it is only a template, and may be
            abstract. It is donated to a compiled step.
        batches: An object with `batches[N]` (`jstep.batches`), a function of the step,
            `jstep.from_state(fn)`, or any iterable. The position of an iterator or loader with
            `get_state` and `set_state`, or `state_dict` and `load_state_dict`, is saved with each
            checkpoint, for every process. A plain tuple is passed as `*args`; anything else,
            including a list or a NamedTuple, is one argument. For a step without a batch, pass
            `lambda step: ()`. Each batch is copied before the next one is fetched. If the batches
            end before last_step, the run ends with a warning.
        last_step: The global step at which the run ends: a run restored at last_step takes no step.
            If None, the batches, a hook or a signal end the run.
        hooks: Hooks to call around the steps: see `Hook`, and `every` to wrap a function. They are
            called before the built-in hooks, except that a `CheckpointSaverHook` is called after
            all others. A `StepCounterHook` replaces the built-in one.
        checkpoint_dir: Where to save checkpoints: a directory, a URL, or a `Saver`, which has its
            own prefix and is not closed by the run. If None, no checkpoints are saved.
        checkpoint_prefix: Prefix of checkpoint names: `model` gives `model-1000`.
        save_checkpoint_secs: Interval between checkpoints, in seconds; None to save by step count
            only. "auto" saves as often as possible while saving takes at most 1 % of the time, at
            intervals of 10 seconds (60 in a bucket) to 600 seconds. One checkpoint every 600
            seconds is permanent; the others are *temporary*: each is replaced by the next. With
            save_checkpoint_steps, "auto" means 600.
        save_checkpoint_steps: Interval between checkpoints, in steps. The last step is always
            saved.
        logdir: Where to write TensorBoard event files, a directory or a URL; None to write none.
        save_summaries_steps: Interval between summaries, in steps; None for never. A
            `SummarySaverHook` made without a writer, passed in hooks, replaces the built-in one and
            has its own interval.
        log_steps: Interval between log lines, in steps; None for never. The last step is always
            logged.
        steps_per_call: The maximum number of steps of a call, K. A call ends where a hook is due or
            the shapes of the batches change. The results are bitwise identical for all K > 1; with
            K = 1, they may be rounded differently. "auto" chooses K so that a call takes about
            5 ms: at most 64, or 1 for longer steps.
        progress: None for a progress line on a terminal and log lines elsewhere, True for the
            progress line, False for no output.
        batch_sharding: Sharding of the batches, or a tree of shardings: the rows of each process
            become its part of one global array. The name of an axis of the state's mesh, or a tuple
            of names, splits the rows over it: `"data"` is `NamedSharding(mesh, P("data"))`.
        compile_cache: A local directory for JAX's persistent compilation cache, or True for
            `compile_cache` in checkpoint_dir. Anybody who can write there can run programs in this
            process. JAX's cache settings are restored when the run ends. It begins in this call, so
            that it does not reach what the program has compiled before, such as random data and
            `TrainState.create`; JAX's own environment variables do.
        stop_secs: Seconds, counted from this call, after which the run saves and exits as after
            SIGTERM, on all processes at the same step. Choose a number somewhat below the
            scheduler's time limit. None for no limit.
        config: The program's own options: a mapping, a dataclass instance or an
            `argparse.Namespace`. They are saved with each checkpoint, without secrets, and compared
            at a restart.
        start_from: A checkpoint of another run, or the directory of that run (for its newest
            checkpoint). If this run has no checkpoint in checkpoint_dir yet, it begins from that
            one, with its state, positions of loaders and states of hooks. If the state that you
            pass is at the step of that checkpoint (and not at 0), it replaces the checkpoint's
            state.

    Returns:
        The state after the last step.

    Raises:
        CheckpointError: Another run writes to checkpoint_dir, the newest checkpoint is corrupted,
            or a save failed.
        FileNotFoundError: There is no checkpoint at start_from.
        OSError: A directory cannot be read or written.
        Preempted: SIGTERM, SIGUSR1 or SIGHUP was received, or `stop_secs` has elapsed, and the
            current step was finished and saved. SIGUSR1 and SIGHUP are not handled if they are
            ignored or have a handler when the run starts.
        KeyboardInterrupt: SIGINT was received, and the current step was finished and saved. A
            second SIGINT stops immediately. If SIGINT is ignored when the run starts, it stays
            ignored.
        NanLossDuringTrainingError: A checkpoint is due, or a signal was received, and parameters
            have become NaN or infinite since the run began. Nothing is saved.
        RuntimeError: The state has no global step, or was donated to an earlier step.
        TypeError: train_step does not return a state and metrics, or a hook returns a value that
            `Hook` does not allow.
        ValueError: The checkpoint does not fit the state, the state that you pass is neither at
            step 0 nor at the step of start_from, train_step does not advance the step by one, there
            is no batch for the first step, the shapes of a batch differ between processes, or a
            hook returns a state that does not fit.

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
    arguments = dict(locals())  # first, while there are no other local names
    if batches is None or isinstance(batches, LoopBatches):
        raise TypeError(
            f"batches={batches}: train has no body that makes them; write the loop with jstep.Run. "
            "For a step without arguments, give lambda step: ()"
        )
    run = _RunWithoutBody(**arguments)
    with run:
        for _ in run:
            pass
    return run.state

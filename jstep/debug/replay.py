"""`replay`: a run's state before a step, and that step's arguments, compared with its record."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jstep.array_store.manifest import CheckpointError
from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver, engine_of
from jstep.compiling.chunks import ProgramChanges, make_chunks
from jstep.compiling.dispatch import Dispatch
from jstep.compiling.programs import Program, ProgramTable
from jstep.compiling.stages import as_stages
from jstep.core import trees
from jstep.core.checks import as_int, format_list, format_value
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Tree
from jstep.data.batch_placement import make_placer, shardings_of_axes
from jstep.data.loaders import check_batches, open_source
from jstep.data.positions import saved_position
from jstep.hooks.cadence import NEVER
from jstep.look.run_folder import logged_states, run_folder
from jstep.loop.feeder import BatchReader
from jstep.metering.numbers import read_value
from jstep.origin.arguments import as_steps_per_call, check_checkpoints, check_state
from jstep.origin.find_origin import load_extra
from jstep.state.fingerprints import as_hexadecimal, fingerprint
from jstep.state.global_step import check_step, global_step
from jstep.state.nonfinite import StateContents
from jstep.state.train_state import TrainState
from jstep.stores.urls import absolute, location
from jstep.training.metrics import LOSS


class Replay(NamedTuple):
    """State and arguments of update `step` → step + 1, which `train_step(state, *args)` repeats.

    Attributes:
        state: The state before the update.
        args: The other arguments of the step: the batch.
    """

    state: TrainState
    args: tuple[Any, ...]


@shortens_tracebacks
def replay(
    train_step: Callable[..., tuple[TrainState, Any]]
    | Mapping[int, Callable[..., tuple[TrainState, Any]]],
    state: TrainState,
    batches: Tree,
    checkpoint_dir: str | os.PathLike[str] | Saver | None,
    step: int,
    *,
    prefix: str = "model",
    steps_per_call: int | str = 1,
    batch_sharding: object = None,
    start: int | None = None,
) -> Replay:
    """Return state and arguments before update `step` → step + 1 of an earlier run, bit for bit.

    The newest intact checkpoint up to that step, or up to `start`, is restored, or else `state` is
    taken, and the steps after it are run again. Nothing is written. States are compared with the
    run's fingerprints (`FingerprintHook`), or else losses with those that it recorded; a difference
    is an error.

    For a loss that is NaN at step 7310, replay 7309; `find_nonfinite(train_step, state, *args)`
    finds the operation.

    Changes that hooks such as `ReduceOnPlateau` made to the state after that checkpoint are not
    replayed. The position of a loader is changed; reset the loader before another use.

    Args:
        train_step: As given to `train`.
        state: As given to `train`. It is donated.
        batches: As given to `train`: an object with `batches[N]`, a function of the step, or a
            loader whose position is saved.
        checkpoint_dir: As given to `train`.
        step: The number of updates before the one to replay, ≥ 0.
        prefix: The prefix of the checkpoints.
        steps_per_call: As given to `train`.
        batch_sharding: As given to `train`.
        start: The newest step from whose checkpoint to start; None for any. A corrupted checkpoint
            is skipped with a warning.

    Returns:
        A `Replay`: `state`, whose global_step is `step`, and `args`.

    Raises:
        ValueError: There is no intact checkpoint or state before the step, the batches cannot be
            set to it, or a state or a loss is not the one that the run has recorded.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> def make_state():
        ...     return jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> directory = tempfile.mkdtemp()
        >>> batches = [jnp.float32(n) for n in range(9)]
        >>> state = jstep.train(train_step, make_state(), batches, 9, checkpoint_dir=directory)
        >>> state, args = jstep.replay(train_step, make_state(), batches, directory, 5)
        >>> print(state.global_step, state.params["w"], *args)
        5 3.0625 5.0
    """
    step = as_int(step, "step", 0, "the number of updates before the one to replay")
    newest = (
        step if start is None else min(step, as_int(start, "start", 0, "the step of a checkpoint"))
    )
    run = RunArguments(train_step, batches, checkpoint_dir, prefix, steps_per_call, batch_sharding)
    for call in replay_calls(run, state, step, newest=newest, read_next_batch=True):
        last = call
    return Replay(last.state, last.args)


class RunArguments(NamedTuple):
    """The arguments of `train` that a replay needs, as they were given to it."""

    train_step: Any
    batches: Tree
    checkpoint_dir: Any
    prefix: str = "model"
    steps_per_call: int | str = 1
    batch_sharding: object = None


class ReplayedCall(NamedTuple):
    """The state after a call, or at the checkpoint of a replay; `args` are of the next update."""

    step: int
    state: TrainState
    metrics: Any = None
    args: tuple[Any, ...] = ()


def loss_in(metrics: Any) -> np.ndarray[Any, Any] | None:
    """The loss among the metrics of a step, one a member in a population."""
    loss = metrics.get(LOSS) if isinstance(metrics, Mapping) else None
    with internal_transfers():
        return None if loss is None else read_value(loss).astype(np.float64)


def prefix_of(checkpoint_dir: Any, prefix: str) -> str:
    """Return the prefix of a run: the `Saver`'s, unless the user has given another one."""
    if isinstance(checkpoint_dir, Saver) and prefix == "model":
        return checkpoint_dir.prefix
    return prefix


def replay_calls(
    run: RunArguments,
    state: TrainState,
    step: int,
    *,
    newest: int,
    read_next_batch: bool = False,
    is_finite: bool = False,
) -> Iterator[ReplayedCall]:
    """Yield the state of a run at a checkpoint, and after each call up to a step.

    Args:
        run: The run.
        state: The state that `train` was given, which is donated.
        step: The last step.
        newest: The step up to which checkpoints are restored.
        read_next_batch: Whether to yield the last state once more, with the arguments of the next
            update.
        is_finite: Whether to start from a checkpoint only if its parameters are finite.
    """
    batches = run.batches
    steps_per_call = as_steps_per_call(run.steps_per_call, batches)
    stages = as_stages(run.train_step)
    check_state(state, step)
    batch_sharding = shardings_of_axes(run.batch_sharding, state)
    prefix = prefix_of(run.checkpoint_dir, run.prefix)
    check_checkpoints(run.checkpoint_dir, prefix)
    make_placer(batch_sharding, "batch_sharding")

    origin = _restore_newest(state, run.checkpoint_dir, prefix, step, newest, is_finite=is_finite)
    if origin is None:
        origin = _given_state(state, run.checkpoint_dir, prefix, step)
    start = origin.step
    recorded = _RecordedNumbers(_run_directory(run.checkpoint_dir), prefix, start, step)
    current = ReplayedCall(start, origin.state)
    yield current
    check_batches(batches)
    last_batch = step + 1 if read_next_batch else step
    source = open_source(batches, start, last_batch, origin.position, state=lambda: current.state)
    is_lost = source.has_position and origin.position is None and start > 0
    if is_lost or not source.is_seekable:
        why = "they have no position to set"
        if is_lost:
            why = f"the checkpoint of step {start} has no position for them"
        raise ValueError(
            f"batches={format_value(batches)}: must be able to go to step {start}, and {why}; give "
            "jstep.batches, a list, a function of the step, or a loader with get_state and "
            "set_state"
        )
    items = iter(BatchReader(source))
    table = ProgramTable(stages, steps_per_call, state=origin.state)
    dispatch = Dispatch(table)
    # Calls end at the steps of which the run has recorded something, too.
    ends = ProgramChanges(stages, source.next_change).end_steps(start, step, recorded.next_step)
    chunks = functools.partial(
        make_chunks, items, sharding=batch_sharding, on_device=table.on_device
    )
    for chunk in chunks(start, table.program_for, ends=ends):
        new_state, metrics, *_ = dispatch(current.state, chunk)
        current = ReplayedCall(chunk.first + chunk.steps, new_state, metrics)
        recorded.check(current)
        yield current
    args: tuple[Any, ...] | None = None
    if read_next_batch:
        # Not `table.program_for`, which may trace a loop: the chunk is not run.
        next_chunk = next(chunks(step, lambda first, *_: Program(table.stage_of(first))), None)
        if current.step < step or next_chunk is None:
            raise ValueError(
                f"step={step}: the batches end after {current.step} of the {step + 1} that it "
                "needs; give those of that run"
            )
        args = next_chunk.args
    check_step(current.step, current.state, start if current.step > start else None)
    recorded.log()
    if args is not None:
        yield current._replace(args=args)


# What the run has recorded.


def _run_directory(checkpoint_dir: Any) -> str | None:
    if isinstance(checkpoint_dir, Saver):
        checkpoint_dir = checkpoint_dir.directory
    return None if checkpoint_dir is None else absolute(location(checkpoint_dir, "checkpoint_dir"))


class _RecordedNumbers:
    """A run's recorded fingerprints, or else losses, for the steps (start, stop] of a replay."""

    def __init__(self, directory: str | None, prefix: str, start: int, stop: int) -> None:
        self._start = start
        self._stop = stop
        self._fingerprints: dict[int, str] = {}
        self._losses: dict[int, float] = {}
        # A directory that cannot be read has recorded nothing.
        with contextlib.suppress(OSError):
            if directory is not None:
                folder = run_folder(directory, prefix)
                self._fingerprints = self._replayed(logged_states(directory, [folder]))
                # Equal fingerprints prove more than losses, which may differ a little.
                if not self._fingerprints:
                    self._losses = self._replayed(folder.losses())
        self._steps = sorted({*self._fingerprints, *self._losses})

    def _replayed(self, values: Mapping[int, Any]) -> dict[int, Any]:
        return {step: value for step, value in values.items() if self._start < step <= self._stop}

    def next_step(self, step: int) -> int:
        """Return the next step of which something is recorded."""
        return next((recorded for recorded in self._steps if recorded > step), NEVER)

    def check(self, call: ReplayedCall) -> None:
        expected = self._fingerprints.get(call.step)
        if expected is not None:
            with internal_transfers():
                found = as_hexadecimal(fingerprint(call.state))
            if found != expected:
                raise self._error("state", call.step, f"its fingerprint is {found}", expected)
        recorded = self._losses.get(call.step)
        if recorded is None:
            return
        loss = loss_in(call.metrics)
        # Each member of a population has a loss, which is not recorded.
        if loss is not None and loss.size == 1:
            is_close = bool(np.isclose(loss, recorded, rtol=_CLOSE, equal_nan=True).all())
            if not is_close:
                raise self._error("loss", call.step, f"it is {loss.item():.6g}", f"{recorded:.6g}")

    def _error(self, what: str, step: int, found: str, expected: str) -> ValueError:
        return ValueError(
            f"replay: the {what} at step {step} is not the one of the run: {found}, that of the "
            f"run {expected}. From step {self._start} on, train_step, the batches (the state of "
            "the loader, its data) or what hooks changed differ; find the first step with "
            "jstep.replay of earlier ones"
        )

    def log(self) -> None:
        kind = "fingerprints (fingerprints.jsonl)" if self._fingerprints else "losses"
        if self._steps:
            steps = format_list([str(step) for step in self._steps], 8)
            logger.info("replay: compared with the run's %s at steps %s", kind, steps)
        elif self._start < self._stop:
            text = (
                "replay: compared with nothing: the run has recorded no fingerprint or loss of "
                "steps %d to %d"
            )
            logger.info(text, self._start + 1, self._stop)


_CLOSE = 1e-4
"""The relative difference of two losses that other devices or calls of other lengths may make."""


# Where the replay starts.


class _Origin(NamedTuple):
    step: int
    state: TrainState
    position: Any


def _open_saver(checkpoint_dir: Any, prefix: str) -> contextlib.AbstractContextManager[Saver]:
    """Open a directory; a `Saver` of the user is not closed."""
    if isinstance(checkpoint_dir, Saver):
        return contextlib.nullcontext(checkpoint_dir)
    return Saver(checkpoint_dir, prefix=prefix)


def _restore_newest(
    state: TrainState, checkpoint_dir: Any, prefix: str, step: int, newest: int, *, is_finite: bool
) -> _Origin | None:
    """Restore the newest intact checkpoint up to a step, if `is_finite` with finite parameters."""
    if checkpoint_dir is None:
        return None
    with _open_saver(checkpoint_dir, prefix) as saver:
        steps = [saved for saved in saver.all_steps() if saved <= newest]
        for start in sorted(steps, reverse=True):
            name = checkpoint_name(saver.prefix, start)
            try:
                with internal_transfers():
                    checkpoint = engine_of(saver).open(start)
                    restored = checkpoint.restore(state)
                    position = saved_position(load_extra(checkpoint), name)
            except (CheckpointError, FileNotFoundError) as error:
                # It is corrupted, or was replaced by a run that is alive.
                logger.warning("replay: %s is skipped: %s", name, error)
                continue
            if is_finite and not StateContents(restored, params_only=True).are_finite():
                continue
            logger.info("replay: from %s, %d steps", name, step - start)
            return _Origin(start, restored, position)
    return None


def _given_state(state: TrainState, checkpoint_dir: Any, prefix: str, step: int) -> _Origin:
    """Return the user's state as the origin; raise an error if it cannot be one."""
    with internal_transfers():
        start = global_step(state) if trees.find_donated(state) is None else None
    if start is not None and start <= step:
        logger.info("replay: from the given state (step %d), %d steps", start, step - start)
        return _Origin(start, state, None)
    where = "no checkpoint_dir was given"
    if checkpoint_dir is not None:
        with _open_saver(checkpoint_dir, prefix) as saver:
            directory = (
                saver.directory if isinstance(checkpoint_dir, Saver) else os.fspath(checkpoint_dir)
            )
            where = f"the checkpoints in {directory} are of {saver.all_steps()}"
    problem = "was donated" if start is None else f"is at step {start}"
    raise ValueError(
        f"step={step}: nothing lies before it: {where}, and the state given {problem}; give the "
        "state that the run started from, or a later step"
    )

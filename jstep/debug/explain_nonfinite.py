"""`explain_nonfinite`: a run's first non-finite update, its operation and the rows behind it."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.saver import Saver
from jstep.compiling.stages import as_stages
from jstep.core.checks import as_int, format_list
from jstep.core.meshes import internal_transfers
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Tree
from jstep.debug.find_nonfinite import NonFinite, find_nonfinite
from jstep.debug.replay import Replay, ReplayedCall, RunArguments, prefix_of, replay, replay_calls
from jstep.metering.numbers import read_value, real_parts
from jstep.record.stall_files import format_ranges
from jstep.record.starts import find_starts, last_trained
from jstep.slots.roles import Role, roles_in
from jstep.state.nonfinite import StateContents, describe_contents
from jstep.state.train_state import TrainState
from jstep.stores.urls import absolute, location
from jstep.training.metrics import losses_in
from jstep.training.step import TrainStep

_MAX_ROWS = 65_536


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFiniteUpdate:
    """The first update of a run whose result is not finite, found by `explain_nonfinite`.

    Attributes:
        step: The number of updates before it: the update `step` → `step + 1`.
        leaves: Path → whether it contains NaN (2) or only infinity (1), of parameters and slots
            after the update.
        found: The operation that made the first number that is not finite; None if a repetition is
            finite.
        rows: The rows of the batch that alone make the update not finite; None if the step does not
            take single rows.
        is_skipped: Whether `skip_nonfinite` or a loss scale skips the update, so that the state
            stays finite.
    """

    step: int
    leaves: Mapping[str, int]
    found: NonFinite | None = None
    rows: tuple[int, ...] | None = None
    is_skipped: bool = False

    def __str__(self) -> str:
        if self.is_skipped:
            what = "is skipped, because its gradients are not finite"
        else:
            result = describe_contents(self.leaves) or "the loss is not finite"
            what = f"is the first whose result is not finite: {result}"
        lines = [f"the update {self.step} → {self.step + 1} {what}"]
        if self.found is not None:
            lines.append(str(self.found))
        if self.rows:
            lines.append(f"  rows of the batch  {format_list(format_ranges(self.rows), 20)}")
        elif self.rows is not None:
            lines.append("  No single row causes it: it depends on several rows, or on the state.")
        return "\n".join(lines)


@shortens_tracebacks
def explain_nonfinite(
    train_step: Callable[..., tuple[TrainState, Any]]
    | Mapping[int, Callable[..., tuple[TrainState, Any]]],
    state: TrainState,
    batches: Tree,
    checkpoint_dir: str | os.PathLike[str] | Saver,
    *,
    last_step: int | None = None,
    prefix: str = "model",
    batch_sharding: object = None,
) -> NonFiniteUpdate | None:
    """Explain a run's first update whose result is not finite, after its newest finite checkpoint.

    The steps are repeated as by `replay`, until the loss, a parameter or a slot is not finite; then
    the update is searched by `find_nonfinite`, and repeated with each row of its batch alone. If
    all is finite because the latest updates are skipped, as by `skip_nonfinite`, the first of these
    is explained.

    Args:
        train_step: As given to `train`.
        state: As given to `train`; it is donated.
        batches: As given to `train`, and able to go to a step.
        checkpoint_dir: As given to `train`.
        last_step: The step at which to give up; None for the step after the last one in the record
            of the run.
        prefix: The prefix of the checkpoints.
        batch_sharding: As given to `train`.

    Returns:
        A `NonFiniteUpdate`, whose `str()` is a report; None if all is finite up to that step.

    Raises:
        ValueError: As from `replay`, or last_step is not known.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> def loss_fn(params, x):
        ...     return jnp.mean(jnp.sqrt(params["w"] * x))
        >>> def batches(step):
        ...     return jnp.array([1.0, 2.0, 0.0 if step == 2 else 3.0])
        >>> def make_state():
        ...     return jstep.TrainState.create({"w": 4.0}, optimizer)
        >>> train_step = jstep.minimize(loss_fn, optimizer)
        >>> run = tempfile.mkdtemp()
        >>> state = jstep.train(train_step, make_state(), batches, 2, checkpoint_dir=run)
        >>> found = jstep.explain_nonfinite(train_step, make_state(), batches, run, last_step=9)
        >>> found.step, found.rows
        (2, (2,))
    """
    if last_step is None:
        last_step = _recorded_last_step(checkpoint_dir, prefix) + 1
    last_step = as_int(last_step, "last_step", 0, "the step at which to give up")
    run = RunArguments(train_step, batches, checkpoint_dir, prefix, batch_sharding=batch_sharding)
    # A copy, as the steps are repeated twice: all, and then those before the update.
    calls = replay_calls(run, _copy(state), last_step, newest=last_step, is_finite=True)
    update = _first_nonfinite(calls)
    if update is None:
        return None
    step = update.step
    found = replay(
        train_step,
        state,
        batches,
        checkpoint_dir,
        step,
        prefix=prefix,
        batch_sharding=batch_sharding,
    )
    stage = as_stages(train_step).value_at(step)
    operation = find_nonfinite(stage, found.state, *found.args)
    return dataclasses.replace(update, found=operation, rows=_rows(stage, found))


def _recorded_last_step(checkpoint_dir: str | os.PathLike[str] | Saver, prefix: str) -> int:
    directory = checkpoint_dir.directory if isinstance(checkpoint_dir, Saver) else checkpoint_dir
    starts = find_starts(absolute(location(directory, "checkpoint_dir")))
    start = last_trained(starts.get(prefix_of(checkpoint_dir, prefix), ()))
    if start is None or start["step"] is None:
        raise ValueError(
            "last_step=None: the record of the run has no step; give the step at which to give up"
        )
    return start["step"][1]


def _first_nonfinite(calls: Iterator[ReplayedCall]) -> NonFiniteUpdate | None:
    """Return the first update whose result is not finite, without its operation and rows.

    If all are finite, it is the first of the latest updates that were skipped; None if there is
    none.
    """
    initial = StateContents(next(calls).state)
    skipped: int | None = None
    for call in calls:
        leaves = StateContents(call.state).worse_since(initial)[0]
        if leaves or not _is_finite(call.metrics):
            return NonFiniteUpdate(step=call.step - 1, leaves=leaves)
        if not _is_skipped(call.state):
            skipped = None
        elif skipped is None:
            skipped = call.step - 1
    if skipped is None:
        return None
    return NonFiniteUpdate(step=skipped, leaves={}, is_skipped=True)


def _is_skipped(state: TrainState) -> bool:
    steps = [
        state.slots[name]
        for name in roles_in(state).names_with(Role.LAST_FINITE)
        if name in state.slots
    ]
    with internal_transfers():
        return any(int(step) < int(state.global_step) for step in steps)


def _copy(state: TrainState) -> TrainState:
    with internal_transfers():
        return jax.tree.map(
            lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, state
        )


def _is_finite(metrics: Any) -> bool:
    with internal_transfers():
        parts = [read_value(part) for part in real_parts(losses_in(metrics).values())]
    return all(np.isfinite(part.astype(np.float64)).all() for part in parts)


def _rows(step: Any, found: Replay) -> tuple[int, ...] | None:
    """Return rows that alone make the update non-finite; None if the step takes no single rows."""
    sizes = {np.shape(leaf)[0] for leaf in jax.tree.leaves(found.args) if np.ndim(leaf)}
    if len(sizes) != 1:
        return None
    (count,) = sizes
    if count > _MAX_ROWS:
        return None
    # Compiled once for all rows, and without the donation of a `TrainStep`, as each begins from the
    # same state.
    update = jax.jit(step.__wrapped__ if isinstance(step, TrainStep) else step)
    initial = StateContents(found.state)
    bad: list[int] = []
    try:
        for row in range(count):
            args = jax.tree.map(
                lambda leaf, row=row: leaf[row : row + 1] if np.ndim(leaf) else leaf, found.args
            )
            state, metrics = update(found.state, *args)
            is_worse = bool(StateContents(state).worse_since(initial)[0])
            if is_worse or not _is_finite(metrics) or _is_skipped(state):
                bad.append(row)
    except Exception:
        # A user's step may need whole batches.
        return None
    return tuple(bad)

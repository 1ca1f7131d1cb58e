"""`explain_nonfinite`: the first update of a run whose result is not finite, its operation, and the rows behind it."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.saver import Saver
from jstep.core.checks import as_int, format_list
from jstep.core.meshes import internal_transfers
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Tree
from jstep.debug.find_nonfinite import NonFinite, find_nonfinite
from jstep.debug.replay import Replay, ReplayedCall, prefix_of, replay, replayed
from jstep.loop.stages import as_stages
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
        leaves: Path → whether it contains NaN (2) or only infinity (1), of parameters and slots after the update.
        found: The operation that made the first number that is not finite; None if a repetition is finite.
        rows: The rows of the batch that alone make the update not finite; None if the step does not take single rows.
        is_skipped: Whether `skip_nonfinite` or a loss scale skips the update, so that the state stays finite.
    """

    step: int
    leaves: Mapping[str, int]
    found: NonFinite | None = None
    rows: tuple[int, ...] | None = None
    is_skipped: bool = False

    def __str__(self) -> str:
        what = f"is the first whose result is not finite: {describe_contents(self.leaves) or 'the loss is not finite'}"
        what = "is skipped, because its gradients are not finite" if self.is_skipped else what
        lines = [f"the update {self.step} → {self.step + 1} {what}"]
        lines += [] if self.found is None else [str(self.found)]
        if self.rows:
            lines.append(f"  rows of the batch  {format_list(format_ranges(self.rows), 20)}")
        elif self.rows is not None:
            lines.append("  No single row causes it: it depends on several rows, or on the state.")
        return "\n".join(lines)


@shortens_tracebacks
def explain_nonfinite(
    train_step: Callable[..., tuple[TrainState, Any]] | Mapping[int, Callable[..., tuple[TrainState, Any]]],
    state: TrainState,
    batches: Tree,
    checkpoint_dir: str | os.PathLike[str] | Saver,
    *,
    last_step: int | None = None,
    prefix: str = "model",
    batch_sharding: object = None,
) -> NonFiniteUpdate | None:
    """Find the first update of a run whose result is not finite, after its newest finite checkpoint, and explain it.

    The steps are repeated as by `replay`, until the loss, a parameter or a slot is not finite; then the update is
    searched by `find_nonfinite`, and repeated with each row of its batch alone. If all is finite because the latest
    updates are skipped, as by `skip_nonfinite`, the first of these is explained.

    Args:
        train_step: As given to `train`.
        state: As given to `train`; it is donated.
        batches: As given to `train`, and able to go to a step.
        checkpoint_dir: As given to `train`.
        last_step: The step at which to give up; None for the step after the last one in the record of the run.
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
        >>> train_step, where = jstep.minimize(loss_fn, optimizer), tempfile.mkdtemp()
        >>> state = jstep.train(train_step, make_state(), batches, 2, checkpoint_dir=where)
        >>> found = jstep.explain_nonfinite(train_step, make_state(), batches, where, last_step=9)
        >>> found.step, found.rows
        (2, (2,))
    """
    if last_step is None:
        where = checkpoint_dir.directory if isinstance(checkpoint_dir, Saver) else checkpoint_dir
        starts = find_starts(absolute(location(where, "checkpoint_dir")))
        start = last_trained(starts.get(prefix_of(checkpoint_dir, prefix), ()))
        if start is None or start["step"] is None:
            raise ValueError("last_step=None: the record of the run has no step; give the step at which to give up")
        last_step = start["step"][1] + 1
    end = as_int(last_step, "last_step", 0, "the step at which to give up")
    calls = replayed(
        train_step, _copied(state), batches, checkpoint_dir, end, prefix, 1, batch_sharding, newest=end, is_finite=True
    )
    if (update := _first_nonfinite(calls)) is None:
        return None
    step, leaves, is_skipped = update
    found = replay(train_step, state, batches, checkpoint_dir, step, prefix=prefix, batch_sharding=batch_sharding)
    stage = as_stages(train_step).value_at(step)
    operation = find_nonfinite(stage, found.state, *found.args)
    return NonFiniteUpdate(step=step, leaves=leaves, found=operation, rows=_rows(stage, found), is_skipped=is_skipped)


def _first_nonfinite(calls: Iterator[ReplayedCall]) -> tuple[int, Mapping[str, int], bool] | None:
    """Return the step of the first update whose result is not finite, its leaves, and whether it was skipped.

    If all are finite, it is the first of the latest updates that were skipped; None if there is none.
    """
    before = StateContents(next(calls).state)
    skipped: int | None = None
    for call in calls:
        leaves = StateContents(call.state).worse_since(before)[0]
        if leaves or not _is_finite(call.metrics):
            return call.step - 1, leaves, False
        if not _is_skipped(call.state):
            skipped = None
        elif skipped is None:
            skipped = call.step - 1
    return None if skipped is None else (skipped, {}, True)


def _is_skipped(state: TrainState) -> bool:
    steps = [state.slots[name] for name in roles_in(state).of(Role.LAST_FINITE) if name in state.slots]
    with internal_transfers():
        return any(int(step) < int(state.global_step) for step in steps)


def _copied(state: TrainState) -> TrainState:
    with internal_transfers():
        return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, state)


def _is_finite(metrics: Any) -> bool:
    with internal_transfers():
        parts = [read_value(part) for part in real_parts(losses_in(metrics).values())]
    return all(np.isfinite(part.astype(np.float64)).all() for part in parts)


def _rows(step: Any, found: Replay) -> tuple[int, ...] | None:
    leaves = [leaf for leaf in jax.tree.leaves(found.args) if np.ndim(leaf)]
    sizes = {np.shape(leaf)[0] for leaf in leaves}
    if len(sizes) != 1 or (count := sizes.pop()) > _MAX_ROWS:
        return None
    update = jax.jit(step.__wrapped__ if isinstance(step, TrainStep) else step)
    bad, before = list[int](), StateContents(found.state)
    try:
        for row in range(count):
            args = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1] if np.ndim(leaf) else leaf, found.args)
            state, metrics = update(found.state, *args)
            if StateContents(state).worse_since(before)[0] or not _is_finite(metrics) or _is_skipped(state):
                bad.append(row)
    except Exception:  # a user's step may need whole batches
        return None
    return tuple(bad)

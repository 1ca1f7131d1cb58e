"""How a run finds what it begins from (`find_origin`), and then reads it (`read_state`)."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.opening import OpenedForRun, Reading, open_for_run
from jstep.checkpoint.reading import OpenCheckpoint
from jstep.checkpoint.saver import Saver
from jstep.core import processes, trees
from jstep.core.checks import format_list
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.data.positions import load_own_position
from jstep.hooks.origin import Given, Kind, Lineage, Origin
from jstep.hooks.run_extra import ENDED, LAST_ITERATION, PARENT, RUN_KEY, STOPPED, run_extra
from jstep.metering.numbers import read_value, read_values
from jstep.optimizers.hyperparameters import held_values
from jstep.origin.agreement import check_latest
from jstep.origin.arguments import Options
from jstep.origin.parent import (
    ParentCheckpoint,
    describe_missing,
    find_parent,
    read_checkpoint,
    warn_of_other_parent,
)
from jstep.slots.roles import roles_in
from jstep.state.fingerprints import fingerprint
from jstep.state.global_step import check_alive, state_step
from jstep.state.train_state import TrainState
from jstep.stores import tagged_json


class StateSource(NamedTuple):
    """The source of the state that a run begins with.

    | kind | |
    |---|---|
    | `FRESH` | the state that was passed |
    | `RESUMED` | `checkpoint`, which `read_state` reads during other work |
    | `RESUMED`, nothing left to do | `state`: read early, as another run may delete it (no claim) |
    | `BRANCHED` | `state`: read early, as the other run is not claimed either |

    Attributes:
        problem: Why the run cannot begin; raised once the start is recorded.
    """

    checkpoint: OpenCheckpoint | None = None
    state: TrainState | None = None
    problem: Exception | None = None


# Find the origin: the newest checkpoint of the run, another run's, or the state that was passed.


def open_saver(options: Options) -> Saver | None:
    directory = options.checkpoint_dir
    if directory is None or isinstance(directory, Saver):
        return directory

    def make_saver() -> Saver:
        return Saver(directory, prefix=options.checkpoint_prefix)

    return processes.share_errors(make_saver, "the checkpoints cannot be read")


def find_origin(
    options: Options, state: TrainState, saver: Saver | None, reading: Reading
) -> tuple[Origin, StateSource]:
    """Open the checkpoint that a run begins from, and read what may be gone later."""
    step = step_of_values(state)
    hyperparameters: dict[str, float] = {}
    if step is not None and saver is not None:
        hyperparameters = _hyperparameters_in(state)
    given = Given(step, hyperparameters)
    opened = OpenedForRun()
    if saver is not None:
        is_ended = functools.partial(_is_ended, options.stop_step)
        opened = open_for_run(saver, state, options.stop_step, check_latest, is_ended, reading)
    parent = find_parent(options, saver, opened, step)
    if parent is not None:
        return _begin_branch(options, given, opened, parent, state, reading)
    checkpoint = opened.checkpoint
    problem = opened.problem
    first = 0
    extra: Mapping[str, Any] = {}
    if problem is None:
        try:
            if checkpoint is None:
                first = _step_of_given(state)
            else:
                first = checkpoint.step
                extra = load_extra(checkpoint)
        except Exception as error:
            problem = error
    lineage = Lineage(extra.get(RUN_KEY), extra.get(PARENT))
    if extra and processes.is_process_0():
        warn_of_other_parent(options, lineage.parent)
    origin = Origin(
        kind=Kind.FRESH if checkpoint is None else Kind.RESUMED,
        step=first,
        extra=extra,
        lineage=lineage,
        given=given,
        source=checkpoint_name(options.prefix, first),
        is_claimed=opened.is_claimed,
    )
    return origin, StateSource(checkpoint, opened.state, problem)


def _is_ended(stop_step: int, checkpoint: OpenCheckpoint) -> bool:
    """Whether a run that takes no step from a checkpoint owes no end, and so saves nothing.

    The rule is that of `ending.py`: a checkpoint beyond `stop_step` whose iterations are not over
    is in mid-run.
    """
    extra = run_extra(checkpoint)
    step = checkpoint.step
    if extra.get(ENDED) == step:
        return True
    return extra.get(LAST_ITERATION) != step and step != stop_step


def _begin_branch(
    options: Options,
    given: Given,
    opened: OpenedForRun,
    found: ParentCheckpoint,
    state: TrainState,
    reading: Reading,
) -> tuple[Origin, StateSource]:
    """Read the other run's checkpoint; the state that was passed may replace the checkpoint's."""
    with reading(found.step):
        parent, checkpoint, extra, state = read_checkpoint(options, found, state)
    if processes.is_process_0():
        edited = ", with the state passed" if parent.edited_step else ""
        logger.info(
            "this run begins from %s%s%s",
            parent.reference["path"],
            edited,
            describe_missing(checkpoint),
        )
    # The branch is not stopped by the parent's hook, owes none of its `end`s, and has another name.
    left_out = (STOPPED, LAST_ITERATION, RUN_KEY)
    inherited = {key: value for key, value in extra.items() if key not in left_out}
    origin = Origin(
        kind=Kind.BRANCHED,
        # Not `found.step`: if that checkpoint was replaced, `read_checkpoint` reads an older one.
        step=parent.step,
        extra=inherited,
        lineage=Lineage(None, parent.reference, extra.get(RUN_KEY)),
        given=given,
        source=parent.reference["path"],
        is_claimed=opened.is_claimed,
    )
    return origin, StateSource(state=state)


def load_extra(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Return all that a checkpoint holds beside the state, with this process's position.

    Its files are read when they are used.
    """
    extra = run_extra(checkpoint)

    def load() -> dict[str, Any]:
        found: dict[str, Any] = tagged_json.resolve_files(
            load_own_position(extra, checkpoint.file), tagged_json.FilesOnce(checkpoint.file)
        )
        return found

    # Each process reads a position of its own.
    return processes.share_errors(load, "the checkpoint cannot be read")


def _hyperparameters_in(state: TrainState) -> dict[str, float]:
    """Return the state's hyperparameters: held ones by name, those of Optax by their slots."""
    values: dict[str, Any] = held_values(state.slots)
    for slot in roles_in(state).injected:
        if trees.is_array(state.slots.get(slot)):
            values[slot] = state.slots[slot]
    scalars = {name: value for name, value in values.items() if np.ndim(value) == 0}
    return {name: float(value) for name, value in read_values(scalars).items()}


def step_of_values(state: TrainState) -> int | None:
    """Return the step of a state; None if it has no values, as it is abstract or was donated."""
    leaves = jax.tree.leaves(state)
    if trees.is_donated(state) or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return None
    return state_step(state) if trees.is_array(state.global_step) else None


# Read the state.


def read_state(
    saver: Saver | None, origin: Origin, source: StateSource, state: TrainState
) -> TrainState:
    """Return the state that a run begins with; `state` is the one passed, or the parent's."""
    if origin.kind is Kind.FRESH:
        if saver is not None and processes.is_process_0():
            # The directory may have checkpoints of other prefixes.
            kind = "" if saver.prefix == "model" else f" {saver.prefix}-*"
            logger.info(
                "no checkpoint%s in %s: starts at step %d", kind, saver.directory, origin.step
            )
        return state
    restored = source.state
    if restored is None:
        assert source.checkpoint is not None
        with internal_transfers():
            restored = source.checkpoint.restore(state)
    if origin.kind is Kind.RESUMED:
        logger.info("restored %s", origin.source)
        _warn_of_given(origin, state, restored)
    _warn_of_held_values(origin, restored)
    return restored


def _warn_of_held_values(origin: Origin, restored: TrainState) -> None:
    """Warn of hyperparameters whose values in the program have changed since the run began."""
    if origin.given.step != 0:
        return  # shapes, or a trained state, hold no initial values
    initial = origin.held_values
    current = _hyperparameters_in(restored)
    for hyperparameter, value in origin.given.values.items():
        # Compared with the initial values, not with those of the previous start: this way each
        # start with a changed number warns that it is not used, not only the first one.
        restored_value = current.get(hyperparameter, value)
        if _is_same(value, initial[hyperparameter]) or _is_same(value, restored_value):
            continue
        setting = "call jstep.set_hyperparameter"
        if hyperparameter in roles_in(restored).injected:
            setting = f"return state.replace(slots={{**state.slots, {hyperparameter!r}: …}})"
        logger.warning(
            "state: the hyperparameter %r is created as %g, but was %g when this run began. The "
            "value in %s is used, %g; to change it, %s in a hook.",
            hyperparameter,
            value,
            initial[hyperparameter],
            origin.source,
            current[hyperparameter],
            setting,
        )


def _is_same(a: float, b: float) -> bool:
    return bool(np.float32(a) == np.float32(b))  # one of them may be from a run with 64-bit types


def _step_of_given(state: TrainState) -> int:
    """Return the step of the state passed, which must have values, as there is no checkpoint."""
    for path, leaf in trees.leaves_with_paths(state):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"state: its {path!r} is a shape without values (jax.ShapeDtypeStruct), and there "
                "is no checkpoint to restore; give a state of arrays, as TrainState.create makes, "
                "or the checkpoint_dir of an earlier run"
            )
    check_alive(state)
    return state_step(state)


def _warn_of_given(origin: Origin, state: TrainState, restored: TrainState) -> None:
    """Warn if the state passed is trained, and differs from the checkpoint's."""
    given = origin.given.step
    parent = origin.lineage.parent
    if not given:
        return  # it is not trained, or has no values
    if given == origin.step:
        different = _different_leaves(state, restored)
        if different:
            logger.warning(
                "state: the state passed (step %d) is ignored in favor of %s, which has other "
                "values at %s. To continue from the state passed, give another checkpoint_dir, and "
                "this checkpoint as start_from.",
                given,
                origin.source,
                format_list(list(map(repr, different))),
            )
    elif parent is None or given != parent["step"]:  # the run may have begun with it
        logger.warning(
            "state: the state passed (step %d) is ignored in favor of %s, the newest checkpoint of "
            "checkpoint_dir. To continue from the state passed, give another checkpoint_dir.",
            given,
            origin.source,
        )


def _different_leaves(state: TrainState, restored: TrainState) -> list[str]:
    different: list[str] = []
    with internal_transfers():
        try:
            given = fingerprint(state, per_leaf=True)
            found = fingerprint(restored, per_leaf=True)
        except (TypeError, ValueError):  # a leaf is a number, or two have one path
            return []
        for path in given:
            if not np.array_equal(read_value(given[path]), read_value(found[path])):
                different.append(path)
    return different

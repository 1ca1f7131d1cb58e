"""The origin of a run: the state or the checkpoint that it begins from, opened and restored."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import jax
import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.opening import Claimed, open_for_run
from jstep.checkpoint.saver import Saver
from jstep.core import processes, trees
from jstep.core.checks import format_list
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.data.positions import load_own_position
from jstep.loop.agreement import check_latest
from jstep.loop.arguments import Options
from jstep.loop.parent import ParentCheckpoint, describe_missing, find_parent, read_checkpoint, warn_of_other_parent
from jstep.metering.numbers import read_value, read_values
from jstep.optimizers.hyperparameters import held_values
from jstep.record.schema import Parent, Start
from jstep.record.starts import original_of, read_starts, valid
from jstep.slots.roles import roles_in
from jstep.state.fingerprints import fingerprint
from jstep.state.global_step import check_alive, state_step
from jstep.state.train_state import TrainState
from jstep.stores import tagged_json
from jstep.stores.urls import is_url, join_path, resolve_path

# Keys of what a checkpoint holds beside the state; `contents.py` has the table of all, and those that only it needs.

ENDED: Final = "ended"
"""The step at which the hooks of the run have ended."""
LAST_BODY: Final = "last_body"
"""The step at which the body of the end has run."""
STOPPED: Final = "stopped"
"""The name of the hook that stopped the run."""
HELD_VALUES: Final = "held"
"""The initial values of held hyperparameters."""
PAST: Final = "past"
"""What an observer saves, so that a restart can compare."""
START: Final = "start"
"""Within `PAST`: the number of the start, and when it began."""

# Keys of the record of a start; a checkpoint has the first two of them as well.

RUN_KEY: Final = "run"
"""The name of the run."""
PARENT: Final = "parent"
"""The checkpoint of another run that it began from."""
PARENT_RUN: Final = "parent_run"
"""The name of that run."""


class Lineage(NamedTuple):
    """Where a run comes from.

    Attributes:
        name: The name of the run; None if nothing has named it yet (`RunContext.name`).
        parent: The path and step of the checkpoint that it branched from.
        parent_run: The name of the run that saved that checkpoint, if this is the first start.
        is_copy: Whether this is the first start in a copy of another run's directory.
    """

    name: str | None = None
    parent: Parent | None = None
    parent_run: str | None = None
    is_copy: bool = False


_NEW = Lineage()


@dataclasses.dataclass(frozen=True)
class ResumePlan:
    """What is known before the state is restored.

    Attributes:
        given_step: The step of the state passed; None if it is abstract or was donated.
        given_values: The values of its hyperparameters that are in the state.
        first: The step at which the run begins, as assumed (see the table of `start.py`); None if unknown.
        latest: The step of the checkpoint to restore; None to begin with the state passed.
        is_claimed: Whether the run holds the claim of its checkpoints. It needs none if no step is left to take.
    """

    given_step: int | None = None
    given_values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    first: int | None = None
    latest: int | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lineage: Lineage = _NEW
    parent: ParentCheckpoint | None = None
    is_claimed: bool = False


@dataclasses.dataclass(frozen=True)
class Fresh:
    """A run begins with the state passed, at this step.

    Attributes:
        held_values: Name → value of the hyperparameters that optimizers keep in the state (`jstep.held`), when the run
            began.
    """

    step: int = 0
    held_values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    extra: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    is_at_branch_point: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A run resumes from its own newest checkpoint.

    Attributes:
        is_at_branch_point: Whether the run is still where it branched off, and no hook of its own has stopped it there.
            Then what the checkpoint holds is the parent's: a hook that has stopped the parent does not stop this run.
    """

    step: int
    held_values: Mapping[str, float]
    extra: Mapping[str, Any]
    is_at_branch_point: bool


@dataclasses.dataclass(frozen=True)
class Branched:
    """A run begins with a checkpoint of another run, or with an edited state and the rest of that checkpoint."""

    step: int
    held_values: Mapping[str, float]
    extra: Mapping[str, Any]
    is_at_branch_point: ClassVar[bool] = True


Origin: TypeAlias = Fresh | Resumed | Branched


# Open the checkpoints of the run, or the checkpoint that a branch begins from.


def extra_at(saver: Saver, step: int) -> dict[str, Any]:
    extra = saver.extra(step)
    # Each process reads a position of its own.
    return processes.share_errors(lambda: _load_extra(saver, step, extra), "the checkpoint cannot be read")


def _load_extra(saver: Saver, step: int, extra: Any) -> dict[str, Any]:
    """Return what a checkpoint holds beside the state, with this process's position; files are read when used."""
    if not isinstance(extra, dict):
        return {}

    def read(name: str) -> bytes:
        return saver.read_file(name, step)

    loaded: dict[str, Any] = tagged_json.resolve_files(load_own_position(extra, read), tagged_json.FilesOnce(read))
    return loaded


def open_saver(options: Options) -> Saver | None:
    directory = options.checkpoint_dir
    if directory is None or isinstance(directory, Saver):
        return directory

    def make_saver() -> Saver:
        return Saver(directory, prefix=options.checkpoint_prefix)

    return processes.share_errors(make_saver, "the checkpoints cannot be read")


def plan_start(options: Options, state: TrainState, saver: Saver | None, new_name: str) -> ResumePlan:
    """Decide what the run begins from: its newest checkpoint, another run's, or the state that was passed."""
    given_step = step_of_values(state)
    claimed = Claimed() if saver is None else open_for_run(saver, state, options.stop_step, check_latest)
    parent = find_parent(options, saver, claimed.step, given_step)
    given_values: dict[str, float] = {}
    if given_step is not None and saver is not None:
        given_values = _hyperparameters_in(state)
    plan = ResumePlan(given_step=given_step, given_values=given_values, is_claimed=claimed.is_claimed)
    if parent is not None:
        return dataclasses.replace(plan, first=parent.step, latest=parent.step, parent=parent)

    first = given_step
    latest = claimed.step
    extra: dict[str, Any] = {}
    if saver is not None and latest is not None:
        first = None
        with contextlib.suppress(Exception):  # `restore` reports the error
            extra = _load_extra(saver, latest, claimed.extra)
            if claimed.extra is not None:  # it could be read
                first = latest
        # If one process cannot read its positions, none may use `first`: what is done with it early is collective, and
        # that process would not take part. `restore` reads the positions again, and shares the error.
        if processes.any_process(first is None):
            first = None
    lineage = _find_lineage(options, latest, extra, new_name)
    return dataclasses.replace(plan, first=first, latest=latest, extra=extra, lineage=lineage)


def read_parent(options: Options, plan: ResumePlan, state: TrainState) -> tuple[ResumePlan, TrainState]:
    """Read the checkpoint of the other run: its state, unless the one passed replaces it, and the rest."""
    assert plan.parent is not None
    parent, extra, state = read_checkpoint(options, plan.parent, state)
    missing = describe_missing(parent)  # on all processes, which read the manifest together
    if jax.process_index() == 0:
        edited = ", with the state passed" if parent.edited_step else ""
        logger.info("this run begins from %s%s%s", parent.reference["path"], edited, missing)
    # The step may be another one than planned: `read_checkpoint` reads an older checkpoint if that one was replaced.
    plan = dataclasses.replace(
        plan,
        first=parent.step,
        latest=parent.step,
        extra=extra,
        lineage=Lineage(None, parent.reference, _find_run_name(parent, extra)),
        parent=parent,
    )
    return plan, state


def _find_run_name(parent: ParentCheckpoint, extra: Mapping[str, Any]) -> str | None:
    """Return the name of the run that saved a checkpoint; None if it is not known."""
    name = extra.get(RUN_KEY)
    if isinstance(name, str):
        return name
    directory = parent.saver.directory
    if is_url(directory):
        return None
    # A best checkpoint does not have the name. But the start that kept it is recorded in the directory of its run: that
    # of the checkpoint, or the one above.
    path = parent.reference["path"]
    for run_directory in (directory, os.path.dirname(os.path.abspath(directory))):
        with contextlib.suppress(OSError, ValueError):
            for starts in read_starts(run_directory).values():
                for start in valid(starts)[-1:]:
                    if _has_kept(start, path):
                        return str(start[RUN_KEY])
    return None


def _has_kept(start: Start, path: str) -> bool:
    """Whether a start has kept the checkpoint at this resolved path as a best one."""
    return any(resolve_path(kept_path) == path for _, _, kept_path in start["best"].values())


def _find_lineage(options: Options, step: int | None, extra: Mapping[str, Any], new_name: str) -> Lineage:
    """Return where the run comes from.

    | directory | its lineage |
    |---|---|
    | a copy of another run's, in which this is the first start | a new name, and the original's checkpoint as parent |
    | such a copy, in which earlier starts have saved nothing | as the newest start has recorded it |
    | any other | as the checkpoint says; unknown without one |
    """
    directory = options.directory
    prefix = options.prefix
    lineage = Lineage(_name_in(extra), _parent_in(extra))
    if extra and jax.process_index() == 0:
        warn_of_other_parent(options, lineage.parent)
    if directory is None or is_url(directory):
        return lineage
    try:
        starts = read_starts(directory)[prefix]
        newest = valid(starts)[-1]
        source = original_of(directory, starts)
    except (OSError, ValueError, LookupError):  # no valid start is recorded, or it cannot be read
        return lineage
    saved_by = extra.get(RUN_KEY)
    if source is not None:
        parent: Parent | None = None
        if step is not None:
            parent = {"path": join_path(source, checkpoint_name(prefix, step)), "step": step}
            if jax.process_index() == 0:
                logger.info("%s is a copy: this run is a branch of %s from here on", directory, parent["path"])
        return Lineage(new_name, parent, saved_by, is_copy=True)
    has_own_name = newest[RUN_KEY] != newest[PARENT_RUN]
    if has_own_name and saved_by is not None and saved_by == newest[PARENT_RUN]:
        # The checkpoint is still the original's.
        return Lineage(newest[RUN_KEY], newest[PARENT], saved_by)
    return lineage


def _hyperparameters_in(state: TrainState) -> dict[str, float]:
    """Return the hyperparameters in the state: held ones by their names, those of Optax by their slots."""
    values: dict[str, Any] = held_values(state.slots)
    for slot in roles_in(state).injected:
        if trees.is_array(state.slots.get(slot)):
            values[slot] = state.slots[slot]
    scalars = {name: value for name, value in values.items() if np.ndim(value) == 0}
    return {name: float(value) for name, value in read_values(scalars).items()}


def _name_in(extra: Mapping[str, Any]) -> str | None:
    name = extra.get(RUN_KEY)
    return name if isinstance(name, str) and re.fullmatch(r"[0-9a-f]{8}", name) else None


def _parent_in(extra: Mapping[str, Any]) -> Parent | None:
    parent = extra.get(PARENT)
    is_valid = isinstance(parent, dict) and isinstance(parent.get("path"), str) and type(parent.get("step")) is int
    return parent if is_valid else None


def step_of_values(state: TrainState) -> int | None:
    """Return the step of a state; None if it has no values, as it is abstract or was donated."""
    if trees.is_donated(state) or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        return None
    return state_step(state) if trees.is_array(state.global_step) else None


# Restore the newest checkpoint, or use the given state.


def restore(saver: Saver | None, state: TrainState, plan: ResumePlan) -> tuple[Origin, TrainState]:
    """Return what the run begins from, and its state; that of a branch was read with its parent."""
    if plan.parent is not None:
        # The branch is not stopped by the parent's hook, and has its own name.
        extra = {key: value for key, value in plan.extra.items() if key not in (STOPPED, RUN_KEY)}
        step = plan.parent.step
        path = plan.parent.reference["path"]
        return Branched(step, _initial_values(plan, state, extra, path), extra), state
    restored = None
    if saver is not None:
        with contextlib.suppress(FileNotFoundError), internal_transfers():
            # Without a step: a corrupted newest checkpoint is an error, not a reason to take an older one.
            restored = saver.restore(state)
    if saver is None or restored is None:
        step = _step_of_given(state)
        if saver is not None and jax.process_index() == 0:
            kind = "" if saver.prefix == "model" else f" {saver.prefix}-*"  # other prefixes may exist
            logger.info("no checkpoint%s in %s: starts at step %d", kind, saver.directory, step)
        return Fresh(step, plan.given_values), state
    step = state_step(restored)
    extra = dict(plan.extra) if step == plan.first else extra_at(saver, step)
    name = checkpoint_name(saver.prefix, step)
    parent = plan.lineage.parent
    logger.info("restored %s", name)
    is_at_branch_point = parent is not None and parent["step"] == step and STOPPED not in extra
    _warn_of_given(plan, state, restored, name)
    return Resumed(step, _initial_values(plan, restored, extra, name), extra, is_at_branch_point), restored


def _initial_values(
    plan: ResumePlan, restored: TrainState, extra: Mapping[str, Any], checkpoint: str
) -> Mapping[str, float]:
    """Return the values of the hyperparameters in the state when the run began; warn if the program has others now."""
    saved = extra.get(HELD_VALUES)
    initial = saved if isinstance(saved, dict) else {}
    if plan.given_step != 0:
        return initial  # shapes, or a trained state, hold no initial values
    current = _hyperparameters_in(restored)
    for hyperparameter, value in plan.given_values.items():
        # Compared with the initial values, not with those of the previous start: then each start with a changed number
        # is told that it is not used, not only the first one.
        is_initial = _is_same(value, initial.get(hyperparameter, value))
        if is_initial or _is_same(value, current.get(hyperparameter, value)):
            continue
        setting = "call jstep.set_hyperparameter"
        if hyperparameter in roles_in(restored).injected:
            setting = f"return state.replace(slots={{**state.slots, {hyperparameter!r}: …}})"
        logger.warning(
            "state: the hyperparameter %r is created as %g, but was %g when this run began. The value in %s is used, "
            "%g; to change it, %s in a hook.",
            hyperparameter,
            value,
            initial[hyperparameter],
            checkpoint,
            current[hyperparameter],
            setting,
        )
    return {**plan.given_values, **initial}


def _is_same(a: float, b: float) -> bool:
    return bool(np.float32(a) == np.float32(b))  # one of them may be from a run with 64-bit types


def _step_of_given(state: TrainState) -> int:
    """Return the step of the state passed, which must have values, as there is no checkpoint."""
    for path, leaf in trees.leaves_with_paths(state):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"state: its {path!r} is a shape without values (jax.ShapeDtypeStruct), and there is no checkpoint to "
                "restore; give a state of arrays, as TrainState.create makes, or the checkpoint_dir of an earlier run"
            )
    check_alive(state)
    return state_step(state)


def _warn_of_given(plan: ResumePlan, state: TrainState, restored: TrainState, name: str) -> None:
    """Warn if the state passed is a trained one, and another one than that of the checkpoint."""
    given = plan.given_step
    step = state_step(restored)
    parent = plan.lineage.parent
    if not given:
        return
    if given == step:
        different = _different_leaves(state, restored)
        if different:
            logger.warning(
                "state: the state passed (step %d) is ignored in favor of %s, which has other values at %s. To "
                "continue from the state passed, give another checkpoint_dir, and this checkpoint as start_from.",
                given,
                name,
                format_list(list(map(repr, different))),
            )
    elif parent is None or given != parent["step"]:  # the run may have begun with it
        logger.warning(
            "state: the state passed (step %d) is ignored in favor of %s, the newest checkpoint of checkpoint_dir. To "
            "continue from the state passed, give another checkpoint_dir.",
            given,
            name,
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

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

from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.names import checkpoint_name, latest_checkpoint, open_store
from jstep.checkpoint.opening import Claimed, open_for_run
from jstep.checkpoint.saver import Saver, engine_of
from jstep.checkpoint.store import Store
from jstep.core import processes, trees
from jstep.core.checks import format_list
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.trees import Tree
from jstep.data.positions import load_own_position
from jstep.loop.agreement import check_latest
from jstep.loop.arguments import Options
from jstep.metering.numbers import read_value, read_values
from jstep.optimizers.hyperparameters import held_values
from jstep.record.schema import Parent
from jstep.record.starts import original_of, read_starts, valid
from jstep.slots.roles import roles_in
from jstep.state.fingerprints import fingerprint
from jstep.state.global_step import check_alive, state_step
from jstep.state.train_state import TrainState
from jstep.stores import tagged_json
from jstep.stores.files import is_directory
from jstep.stores.urls import is_url, join_path, resolve_path, split_path

ENDED: Final = "ended"
LAST_BODY: Final = "last_body"
STOPPED: Final = "stopped"
HELD_VALUES: Final = "held"
"""Keys of a checkpoint's `extra`: the steps at which its hooks have ended and at which the body of the end has run, the
name of the hook that stopped it, and the initial values of held hyperparameters."""
PAST: Final = "past"
START: Final = "start"
"""Keys of what an observer saves: what a restart compares; in that, the number and `began` of the start."""
RUN_KEY: Final = "run"
PARENT: Final = "parent"
PARENT_RUN: Final = "parent_run"
"""Keys in `extra` and in starts: the run's name and the checkpoint that it began from; in starts also that one's
run."""
_NAME = re.compile(r"(.+)-(0|[1-9][0-9]*)", re.DOTALL)
_PROBLEM = "start_from cannot be read"


class ParentCheckpoint(NamedTuple):
    """The checkpoint of another run that this one begins from.

    Attributes:
        is_named: Whether `start_from` names the checkpoint itself, not its directory.
        edited: The step of the state passed, if it replaces the checkpoint's, else 0.
    """

    saver: Saver
    step: int
    is_named: bool
    edited: int

    @property
    def reference(self) -> Parent:
        path = join_path(resolve_path(self.saver.directory), checkpoint_name(self.saver.prefix, self.step))
        return {"path": path, "step": self.step}


class Lineage(NamedTuple):
    """Where a run comes from.

    Attributes:
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
        first: The step at which the run begins; None if unknown.
        latest: The step of the checkpoint to restore; None to begin with the state passed.
        is_claimed: Whether the run holds the claim of its checkpoints, needed if there is a step left.
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
        held_values: Name → value of the hyperparameters in the state, when the run began.
    """

    step: int = 0
    held_values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    extra: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    is_at_branch_point: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A run resumes from its own newest checkpoint.

    Attributes:
        is_at_branch_point: Whether it branched off at this step, and its own hook did not stop it there.
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
    return _loaded(saver, step, saver.extra(step))


def _loaded(saver: Saver, step: int, extra: Any) -> dict[str, Any]:
    """Return what a checkpoint holds beside the state, with this process's position, and files that are read later."""
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

    def opened() -> Saver:
        return Saver(directory, prefix=options.checkpoint_prefix)

    return processes.share_errors(opened, "the checkpoints cannot be read")


def plan_start(options: Options, state: TrainState, saver: Saver | None, new_name: str) -> ResumePlan:
    """Decide what the run begins from: its newest checkpoint, another run's, or the state that was passed."""
    given_step = step_of_values(state)
    claimed = Claimed() if saver is None else open_for_run(saver, state, options.stop_step, check_latest)
    parent = _find_parent(options, saver, claimed.step, given_step)
    first = given_step
    latest = claimed.step
    extra = dict[str, Any]()
    if parent is not None:
        first = latest = parent.step
    elif saver is not None and latest is not None:
        first = None
        with contextlib.suppress(Exception):  # `restore` reports the error
            extra = _loaded(saver, latest, claimed.extra)
            first = latest if claimed.extra is not None else None
    return ResumePlan(
        given_step=given_step,
        given_values={} if given_step is None or saver is None else _initial_values(state),
        first=first,
        latest=latest,
        extra=extra,
        lineage=_NEW if parent is not None else _find_lineage(options, latest, extra, new_name),
        parent=parent,
        is_claimed=claimed.is_claimed,
    )


def read_parent(options: Options, plan: ResumePlan, state: TrainState) -> tuple[ResumePlan, TrainState]:
    """Read the checkpoint of the other run: its state, unless the one passed replaces it, and the rest."""
    parent = plan.parent
    assert parent is not None
    read = _read_once(parent, state)
    if read is None and not parent.is_named:  # a temporary one, which its run has replaced
        parent = _newest_permanent(options, parent)
        read = _read_once(parent, state)
    if read is None:
        raise _gone(parent.reference["path"])
    extra, state = read
    lacks = _what_it_lacks(parent)
    if jax.process_index() == 0:
        edited = ", with the state passed" if parent.edited else ""
        logger.info("this run begins from %s%s%s", parent.reference["path"], edited, lacks)
    lineage = Lineage(None, parent.reference, _run_of(parent, extra))
    step = parent.step
    return dataclasses.replace(plan, first=step, latest=step, extra=extra, lineage=lineage, parent=parent), state


def _what_it_lacks(parent: ParentCheckpoint) -> str:
    """Say that a best checkpoint has the state alone: it was saved within an iteration, and nothing resumes from it."""
    record = None
    with contextlib.suppress(FileNotFoundError):  # its run has deleted it since it was read
        record = engine_of(parent.saver).best(parent.step)
    if record is None:
        return ""
    return ", a best checkpoint: positions of loaders and states of hooks are not in it, so these begin anew"


def _find_lineage(options: Options, step: int | None, extra: Mapping[str, Any], new_name: str) -> Lineage:
    directory = options.where
    prefix = options.prefix
    lineage = Lineage(_name_in(extra), _parent_in(extra))
    if extra and jax.process_index() == 0:
        _warn_of_other_parent(options, lineage.parent)
    if directory is None or is_url(directory):
        return lineage
    with contextlib.suppress(OSError, ValueError, LookupError):  # there is no valid start
        starts = read_starts(directory)[prefix]
        saved_by = extra.get(RUN_KEY)
        newest = valid(starts)[-1]
        source = original_of(directory, starts)
        if source is not None:
            parent: Parent | None = None
            if step is not None:
                parent = {"path": join_path(source, checkpoint_name(prefix, step)), "step": step}
                if jax.process_index() == 0:
                    logger.info("%s is a copy: this run is a branch of %s from here on", directory, parent["path"])
            return Lineage(new_name, parent, saved_by, is_copy=True)
        if saved_by is not None and saved_by == newest[PARENT_RUN] != newest[RUN_KEY]:
            # No earlier start of this copy has saved anything.
            return Lineage(newest[RUN_KEY], newest[PARENT], saved_by)
    return lineage


def _initial_values(state: TrainState) -> dict[str, float]:
    """Return the hyperparameters in the state: held ones by their names, those of Optax by their slots."""
    values: dict[str, Any] = held_values(state.slots)
    values |= {slot: state.slots[slot] for slot in roles_in(state).injected if trees.is_array(state.slots.get(slot))}
    values = {name: value for name, value in values.items() if np.ndim(value) == 0}
    return {name: float(value) for name, value in read_values(values).items()}


def _name_in(extra: Mapping[str, Any]) -> str | None:
    name = extra.get(RUN_KEY)
    return name if isinstance(name, str) and re.fullmatch(r"[0-9a-f]{8}", name) else None


def _parent_in(extra: Mapping[str, Any]) -> Parent | None:
    parent = extra.get(PARENT)
    is_one = isinstance(parent, dict) and isinstance(parent.get("path"), str) and type(parent.get("step")) is int
    return parent if is_one else None


def step_of_values(state: TrainState) -> int | None:
    if trees.is_donated(state) or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        return None
    return state_step(state) if trees.is_array(state.global_step) else None


# A branch: the checkpoint of another run, which `start_from` names.


def _find_parent(
    options: Options, saver: Saver | None, latest: int | None, given: int | None
) -> ParentCheckpoint | None:
    if options.start_from is None:
        return None
    path = os.fspath(options.start_from)
    prefix = options.prefix
    places = {"checkpoint_dir": None if saver is None else saver.directory, "logdir": options.logdir}

    def arguments_with_it() -> list[str]:
        return [name for name, value in places.items() if value is not None and _is_in(os.fspath(value), path, prefix)]

    if names := processes.share_errors(arguments_with_it, _PROBLEM):
        raise ValueError(
            f"start_from={path!r}: must be a checkpoint of another run, got the {names[0]} of this one. A run "
            f"resumes from its own by itself: leave start_from out, or give the branch a {names[0]} of its own"
        )
    if latest is not None:
        return None
    if saver is not None:
        with contextlib.suppress(FileNotFoundError):
            saver.extra()  # raises if the run has checkpoints, and the newest one is incomplete or corrupted
    reads, step, is_named = processes.share_errors(lambda: _checkpoint_at(path, prefix), _PROBLEM)
    return _agreed_parent(options, ParentCheckpoint(reads, step, is_named, given or 0))


def _warn_of_other_parent(options: Options, parent: Parent | None) -> None:
    name = None if options.start_from is None else split_path(os.fspath(options.start_from))[1]
    if name is None or (parent and (not _NAME.fullmatch(name) or name == split_path(parent["path"])[1])):
        return
    began = parent["path"] if parent else "no other run's checkpoint"
    logger.warning(
        "start_from=%r: is not read, as checkpoint_dir has checkpoints of this run, which began from %s; for a branch "
        "of that checkpoint, give another checkpoint_dir", options.start_from, began,
    )  # fmt: skip


def _is_in(directory: str, path: str, prefix: str) -> bool:
    above, name = split_path(path)
    match = _NAME.fullmatch(name)
    place = resolve_path(directory)
    if match is None or resolve_path(above) != place:
        return resolve_path(path) == place
    return match[1] == prefix or open_store(above).find_path(match[1], int(match[2])) is not None


def _agreed_parent(options: Options, parent: ParentCheckpoint) -> ParentCheckpoint:
    (step,) = processes.broadcast_ints(parent.step)
    if step >= options.stop_step:
        raise ValueError(
            f"start_from={options.start_from!r}, last_step={options.last_step}: last_step must be above the step of "
            f"that checkpoint, {step}"
        )
    if parent.edited not in (0, step):
        raise ValueError(
            f"start_from={options.start_from!r}: must be a checkpoint at the step of the state passed, "
            f"{parent.edited}, got one at step {step}; to begin with the checkpoint's own state, pass a state at step "
            "0 or an abstract one"
        )
    return parent._replace(step=step)


def _newest_permanent(options: Options, parent: ParentCheckpoint) -> ParentCheckpoint:
    prefix = parent.saver.prefix
    store = open_store(parent.saver.directory)

    def newest() -> int:
        for step, path in store.newest_first(prefix):
            with contextlib.suppress(FileNotFoundError):
                if not store.manifest(path).temporary:
                    return step
        raise _gone(join_path(parent.saver.directory, f"{prefix}-*"))

    return _agreed_parent(options, parent._replace(step=processes.share_errors(newest, _PROBLEM)))


def _gone(path: str) -> CheckpointError:
    return CheckpointError(f"{path} was deleted or replaced while this run began from it; start the run again")


def _read_once(parent: ParentCheckpoint, target: Tree) -> tuple[dict[str, Any], Tree] | None:
    """Return a checkpoint's data beside the state, and its state or the edited one; None if its run has replaced it."""
    saver = parent.saver
    step = parent.step

    def read(name: str) -> bytes:
        try:
            return saver.read_file(name, step)
        except FileNotFoundError:  # as seen below, on all processes
            return b""

    try:
        saved = saver.extra(step)
        with internal_transfers():
            state = target if parent.edited else saver.restore(target, step=step)
        extra = {}
        if isinstance(saved, dict):
            saved_here = load_own_position(saved, read)
            extra = tagged_json.resolve_files(saved_here, lambda name: tagged_json.ExternalBytes(read(name)))
        is_replaced = saver.extra(step) != saved
    except FileNotFoundError:
        return None
    return None if processes.any_process(is_replaced) else (extra, state)


def _checkpoint_at(path: str, prefix: str) -> tuple[Saver, int, bool]:
    """Find a checkpoint, or the newest one of a directory, and whether the path names it."""
    above, name = split_path(path)
    if match := _NAME.fullmatch(name):
        store = open_store(above)
        step = int(match[2])
        if store.find_path(match[1], step) is not None:
            return Saver(above, prefix=match[1]), step, True
        _refuse_damaged(store, match[1], step - 1, only=step)
    if is_directory(path):
        store = open_store(path)
        newest = next((step for step, _ in store.newest_first(prefix)), -1)
        _refuse_damaged(store, prefix, newest)
        if newest >= 0:
            return Saver(path, prefix=prefix), newest, False
    other = latest_checkpoint(path) or latest_checkpoint(above, prefix if match is None else match[1])
    hint = f"the newest checkpoint there is {other}" if other else "there are no checkpoints"
    raise FileNotFoundError(f"start_from={path!r}: must be a checkpoint, or a directory with {prefix}-*; {hint}")


def _run_of(parent: ParentCheckpoint, extra: Mapping[str, Any]) -> str | None:
    """The name of the run that saved a checkpoint, whose directory may be the one above."""
    if isinstance(name := extra.get(RUN_KEY), str):
        return name
    path = parent.reference["path"]
    directory = parent.saver.directory
    for where in () if is_url(directory) else (directory, os.path.dirname(os.path.abspath(directory))):
        with contextlib.suppress(OSError, ValueError):
            for starts in read_starts(where).values():
                for start in valid(starts)[-1:]:
                    if any(resolve_path(best[-1]) == path for best in start["best"].values()):
                        return str(start[RUN_KEY])
    return None


def _refuse_damaged(store: Store, prefix: str, above: int, only: int | None = None) -> None:
    for broken, problem in store.find_broken(prefix, above):
        if only is None or split_path(broken)[1] == checkpoint_name(prefix, only):
            raise CheckpointError(f"start_from: {broken} is corrupted: {problem}; give another checkpoint")


# Restore the newest checkpoint, or use the given state.


def restore(saver: Saver | None, state: TrainState, plan: ResumePlan) -> tuple[Origin, TrainState]:
    if plan.parent is not None:
        # The branch is not stopped by the parent's hook, and has its own name.
        extra = {key: value for key, value in plan.extra.items() if key not in (STOPPED, RUN_KEY)}
        step = plan.parent.step
        path = plan.parent.reference["path"]
        return Branched(step, _held_values(plan, state, extra, path), extra), state
    restored = None
    with contextlib.suppress(FileNotFoundError), internal_transfers():
        # Without a step: a corrupted newest checkpoint is an error, not a reason to take an older one.
        restored = None if saver is None else saver.restore(state)
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
    return Resumed(step, _held_values(plan, restored, extra, name), extra, is_at_branch_point), restored


def _held_values(plan: ResumePlan, restored: TrainState, extra: Mapping[str, Any], name: str) -> Mapping[str, float]:
    """Return the values of the hyperparameters in the state when the run began; warn if the program has others now."""
    saved = extra.get(HELD_VALUES)
    first = saved if isinstance(saved, dict) else {}
    if plan.given_step != 0:
        return first  # shapes, or a trained state, hold no initial values
    current = _initial_values(restored)
    for hyperparameter, value in plan.given_values.items():
        # Not those of the previous start, or only the first start with a new number would be told that it is not used.
        if _is_same(value, first.get(hyperparameter, value)) or _is_same(value, current.get(hyperparameter, value)):
            continue
        setting = "call jstep.set_hyperparameter"
        if hyperparameter in roles_in(restored).injected:
            setting = f"return state.replace(slots={{**state.slots, {hyperparameter!r}: …}})"
        logger.warning(
            "state: the hyperparameter %r is created as %g, but was %g when this run began. The value in %s is used, "
            "%g; to change it, %s in a hook.",
            hyperparameter,
            value,
            first[hyperparameter],
            name,
            current[hyperparameter],
            setting,
        )
    return {**plan.given_values, **first}


def _is_same(a: float, b: float) -> bool:
    return bool(np.float32(a) == np.float32(b))  # one of them may be from a run with 64-bit types


def _step_of_given(state: TrainState) -> int:
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
    with internal_transfers():
        try:
            before = fingerprint(state, per_leaf=True)
            after = fingerprint(restored, per_leaf=True)
        except (TypeError, ValueError):  # a leaf is a number, or two have one path
            return []
        return [path for path in before if not np.array_equal(read_value(before[path]), read_value(after[path]))]

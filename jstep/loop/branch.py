"""Branching with `start_from`: find and validate the checkpoint of another run to begin from."""

import contextlib
import logging
import os
import re
from typing import Any, NamedTuple

import jax

from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.names import checkpoint_name, latest_checkpoint, open_store
from jstep.checkpoint.saver import Saver
from jstep.checkpoint.store import Store
from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.meshes import internal_transfers
from jstep.distributed import processes
from jstep.hooks.hook import state_step
from jstep.loop.arguments import Options
from jstep.record.starts import original_of, read_starts, valid
from jstep.state.train_state import TrainState
from jstep.stores import tagged_json
from jstep.stores.files import is_directory
from jstep.stores.urls import is_url, join_path, resolve_path, split_path

PARENT = "parent"
"""The key, in a checkpoint's `extra` and in starts, of the checkpoint that the run began from."""
RUN_KEY, PARENT_RUN = "run", "parent_run"
"""The keys of the name of the run, also in `extra`, and of that of its parent."""
_NAME = re.compile(r"(.+)-(0|[1-9][0-9]*)", re.DOTALL)
_PROBLEM = "start_from cannot be read"
_logger = logging.getLogger("jstep")


class Trunk(NamedTuple):
    """The checkpoint of another run; a different `extra` later means that it was replaced.

    Attributes:
        is_named: Whether `start_from` names the checkpoint itself, which is never exchanged for another one.
        edited: The step of the state passed, if the run begins with that state in place of the checkpoint's, else 0.
    """

    saver: Saver
    step: int
    extra: Any
    is_named: bool
    edited: int

    @property
    def parent(self) -> dict[str, Any]:
        path = join_path(resolve_path(self.saver.directory), checkpoint_name(self.saver.prefix, self.step))
        return {"path": path, "step": self.step}


def parent_in(extra: dict[str, Any]) -> dict[str, Any] | None:
    """Return the parent that a checkpoint names; None if a user saved something else under the same key."""
    parent = extra.get(PARENT)
    is_one = isinstance(parent, dict) and isinstance(parent.get("path"), str) and type(parent.get("step")) is int
    return parent if is_one else None


def step_of_values(state: TrainState) -> int | None:
    """Return the step of a state; None if it may be only a template: it is abstract, or was donated."""
    if trees.is_donated(state) or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        return None
    return state_step(state) if trees.is_array(state.global_step) else None


def run_of(trunk: Trunk) -> str | None:
    """Return the name of the run that saved a checkpoint; of a best one, that of the run in its directory or above."""
    if isinstance(trunk.extra, dict) and isinstance(name := trunk.extra.get(RUN_KEY), str):
        return name
    path, folder = trunk.parent["path"], trunk.saver.directory
    for where in () if is_url(folder) else (folder, os.path.dirname(os.path.abspath(folder))):
        with contextlib.suppress(OSError, ValueError):
            for starts in read_starts(where).values():
                for start in valid(starts)[-1:]:
                    if any(resolve_path(best[-1]) == path for best in start["best"].values()):
                        return str(start[RUN_KEY])
    return None


def as_copy(where: str, prefix: str, step: int | None, extra: dict[str, Any], new_name: str) -> dict[str, Any] | None:
    """Return the `extra` of a run in a copy of another run's directory, a run of its own; None if it is no copy.

    Its parent is the checkpoint of the original; without a `step`, there is none.
    """
    if is_url(where):
        return None
    with contextlib.suppress(OSError, ValueError, LookupError):  # there is no valid start
        starts = read_starts(where)[prefix]
        own, newest = extra.get(RUN_KEY), valid(starts)[-1]
        if (source := original_of(where, starts)) is not None:
            parent = None if step is None else {"path": join_path(source, checkpoint_name(prefix, step)), "step": step}
            return {**extra, RUN_KEY: new_name, PARENT: parent, PARENT_RUN: own}
        name = newest[RUN_KEY]
        if own is not None and own == newest[PARENT_RUN] != name:  # no earlier start of this copy has saved anything
            return {**extra, RUN_KEY: name, PARENT: newest[PARENT], PARENT_RUN: own}
    return None


def open_trunk(options: Options, saver: Saver | None, latest: int | None, given: int | None) -> Trunk | None:
    """Find the checkpoint to begin from; None if there is none, or the run has its own.

    A state passed at another step than 0 (`given`) was made from that checkpoint, and replaces the checkpoint's state.
    """
    path = options.start_from
    if path is None:
        return None
    prefix = options.checkpoint_prefix if saver is None else saver.prefix
    places = {"checkpoint_dir": None if saver is None else saver.directory, "logdir": options.logdir}

    def find_own() -> list[str]:
        return [key for key, place in places.items() if place is not None and _is_in(os.fspath(place), path, prefix)]

    if own := processes.on_all_processes(find_own, _PROBLEM):
        raise ValueError(
            f"start_from={path!r}: must be a checkpoint of another run, got the {own[0]} of this one. A run "
            f"resumes from its own by itself: leave start_from out, or give the branch a {own[0]} of its own"
        )
    if latest is not None:
        return None
    if saver is not None:
        with contextlib.suppress(FileNotFoundError):
            saver.extra()  # raises if the run has checkpoints, and the newest one is incomplete or corrupted
    reads, step, is_named = processes.on_all_processes(lambda: _trunk_at(path, prefix), _PROBLEM)
    edited = given or 0
    return _trunk(options, reads, step, edited, is_named=is_named) or _newest_of(options, reads, edited)


def warn_of_other_trunk(path: str | None, parent: dict[str, Any] | None) -> None:
    """Warn that `start_from` is not read, if a run that resumes has not begun from the checkpoint that it names."""
    name = None if path is None else split_path(path)[1]
    if name is None or (parent and (not _NAME.fullmatch(name) or name == split_path(parent["path"])[1])):
        return
    began = parent["path"] if parent else "no other run's checkpoint"
    _logger.warning(
        "start_from=%r: is not read, as checkpoint_dir has checkpoints of this run, which began from %s; for a branch "
        "of that checkpoint, give another checkpoint_dir", path, began,
    )  # fmt: skip


def _is_in(directory: str, path: str, prefix: str) -> bool:
    """Return whether a path is this directory or a checkpoint in it, not another directory with a name like exp-1."""
    above, name = split_path(path)
    match, place = _NAME.fullmatch(name), resolve_path(directory)
    if match is None or resolve_path(above) != place:
        return resolve_path(path) == place
    return match[1] == prefix or open_store(above).at(match[1], int(match[2])) is not None


def _trunk(options: Options, reads: Saver, step: int, edited: int, *, is_named: bool) -> Trunk | None:
    """Return a checkpoint; None if it is gone, and was not named."""
    (step,) = processes.broadcast_ints(step)
    if step >= options.stop_step:
        raise ValueError(
            f"start_from={options.start_from!r}, last_step={options.last_step}: last_step must be above the step of "
            f"that checkpoint, {step}"
        )
    if edited not in (0, step):
        raise ValueError(
            f"start_from={options.start_from!r}: must be a checkpoint at the step of the state passed, {edited}, got "
            f"one at step {step}; to begin with the checkpoint's own state, pass a state at step 0 or an abstract one"
        )
    try:
        return Trunk(reads, step, reads.extra(step), is_named, edited)
    except FileNotFoundError:
        if is_named:
            raise
        return None


def _newest_of(options: Options, reads: Saver, edited: int, *, permanent: bool = False) -> Trunk:
    """Return the newest checkpoint of a directory, or the newest permanent one."""
    store = open_store(reads.directory)

    def newest() -> int:
        for step, path in store.newest_first(reads.prefix):
            with contextlib.suppress(FileNotFoundError):
                if not permanent or not store.manifest(path).temporary:
                    return step
        return -1

    step = processes.on_all_processes(newest, _PROBLEM)
    trunk = None if step < 0 else _trunk(options, reads, step, edited, is_named=False)
    if trunk is None:
        raise _gone(join_path(reads.directory, f"{reads.prefix}-*"))
    return trunk


def _gone(path: str) -> CheckpointError:
    return CheckpointError(f"{path} was deleted or replaced while this run began from it; start the run again")


def read_trunk(options: Options, trunk: Trunk, target: Tree) -> tuple[Trunk, Tree, dict[str, Any]]:
    """Return a checkpoint, its state or the edited one, and its `extra` with the files.

    The run there may go on, and replace the checkpoint while it is read. Unless it was named, the newest permanent one
    is taken then.
    """
    read = _read_once(trunk, target)
    if read is None and not trunk.is_named:
        trunk = _newest_of(options, trunk.saver, trunk.edited, permanent=True)
        read = _read_once(trunk, target)
    if read is None:
        raise _gone(trunk.parent["path"])
    return trunk, *read


def _read_once(trunk: Trunk, target: Tree) -> tuple[Tree, dict[str, Any]] | None:
    """Return the state and the `extra` with the files in memory; None if the checkpoint is not as it was found."""
    saver, step = trunk.saver, trunk.step

    def load(name: str) -> tagged_json.LargeBytes:
        try:
            return tagged_json.LargeBytes(saver.read_file(name, step))
        except FileNotFoundError:  # as seen below, on all processes
            return tagged_json.LargeBytes()

    try:
        with internal_transfers():
            state = target if trunk.edited else saver.restore(target, step=step)
        extra = tagged_json.with_files(trunk.extra, load) if isinstance(trunk.extra, dict) else {}
        is_gone = saver.extra(step) != trunk.extra
    except FileNotFoundError:
        return None
    return None if processes.any_process(is_gone) else (state, extra)


def _trunk_at(path: str, prefix: str) -> tuple[Saver, int, bool]:
    """Find a checkpoint, or the newest one of a directory; never fall back to an older one if it is corrupted.

    The last item is whether the path names it.
    """
    above, name = split_path(path)
    if match := _NAME.fullmatch(name):
        store, step = open_store(above), int(match[2])
        if store.at(match[1], step) is not None:
            return Saver(above, prefix=match[1]), step, True
        _refuse_damaged(store, match[1], step - 1, only=step)
    if is_directory(path):
        store = open_store(path)
        newest = next((step for step, _ in store.newest_first(prefix)), -1)
        _refuse_damaged(store, prefix, newest)
        if newest >= 0:
            return Saver(path, prefix=prefix), newest, False
    other = latest_checkpoint(path) or latest_checkpoint(above, prefix if match is None else match[1])
    there = f"the newest checkpoint there is {other}" if other else "there are no checkpoints"
    raise FileNotFoundError(f"start_from={path!r}: must be a checkpoint, or a directory with {prefix}-*; {there}")


def _refuse_damaged(store: Store, prefix: str, above: int, only: int | None = None) -> None:
    for broken, problem in store.broken(prefix, above):
        if only is None or split_path(broken)[1] == checkpoint_name(prefix, only):
            raise CheckpointError(f"start_from: {broken} is corrupted: {problem}; give another checkpoint")

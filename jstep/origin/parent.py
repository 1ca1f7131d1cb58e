"""The checkpoint that a branch begins from: find what `start_from` names, check and read it."""

import os
from typing import Any, NamedTuple

from jstep.array_store.listing import FOUND_NAME
from jstep.array_store.manifest import CheckpointError
from jstep.array_store.store import Store
from jstep.checkpoint.names import checkpoint_name, latest_checkpoint, newest_permanent, open_store
from jstep.checkpoint.opening import OpenedForRun
from jstep.checkpoint.reading import GoneError, OpenCheckpoint
from jstep.checkpoint.saver import Saver, engine_of
from jstep.core import processes
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.tables import printable
from jstep.core.trees import Tree
from jstep.data.positions import load_own_position
from jstep.hooks.run_extra import Parent, run_extra
from jstep.origin.arguments import Options
from jstep.stores import tagged_json
from jstep.stores.files import is_directory
from jstep.stores.urls import join_path, resolve_path, split_path

_PROBLEM = "start_from cannot be read"


class ParentCheckpoint(NamedTuple):
    """The checkpoint of another run that this one begins from.

    Attributes:
        is_named: Whether `start_from` names the checkpoint itself, not its directory.
        edited_step: The step of the state passed, if it replaces the checkpoint's state; 0 if not.
    """

    saver: Saver
    step: int
    is_named: bool
    edited_step: int

    @property
    def reference(self) -> Parent:
        path = join_path(
            resolve_path(self.saver.directory), checkpoint_name(self.saver.prefix, self.step)
        )
        return {"path": path, "step": self.step}


class ReadCheckpoint(NamedTuple):
    """A parent's checkpoint, once it is read.

    Attributes:
        parent: The checkpoint; perhaps an older one than was found.
        extra: All that it holds beside the state.
        state: Its state, or the state passed, if that replaces it.
    """

    parent: ParentCheckpoint
    checkpoint: OpenCheckpoint
    extra: dict[str, Any]
    state: Tree


class _CheckpointPath(NamedTuple):
    directory: str
    prefix: str
    step: int


def _parse_path(path: str) -> _CheckpointPath | None:
    """Split the path of a checkpoint, such as `runs/a/model-100`; None for any other name."""
    directory, name = split_path(path)
    match = FOUND_NAME.fullmatch(name)
    if match is None:
        return None
    return _CheckpointPath(directory, match["prefix"], int(match["step"]))


# Find it.


def find_parent(
    options: Options, saver: Saver | None, opened: OpenedForRun, given_step: int | None
) -> ParentCheckpoint | None:
    """Find the checkpoint at `start_from`; None if the run has checkpoints of its own."""
    if options.start_from is None:
        return None
    path = os.fspath(options.start_from)
    prefix = options.prefix
    _check_not_own(options, saver, path)
    if opened.checkpoint is not None or opened.problem is not None:
        return None
    parent = processes.share_errors(
        lambda: _find_checkpoint(path, prefix, given_step or 0), _PROBLEM
    )
    return _agree_on_parent(options, parent)


def _check_not_own(options: Options, saver: Saver | None, path: str) -> None:
    """Check that a parent is not of this run, which would otherwise be a branch of itself."""
    directories: dict[str, Any] = {}
    if saver is not None:
        directories["checkpoint_dir"] = saver.directory
    if options.logdir is not None:
        directories["logdir"] = options.logdir

    def find_arguments() -> list[str]:
        return [
            name
            for name, value in directories.items()
            if _is_in(os.fspath(value), path, options.prefix)
        ]

    names = processes.share_errors(find_arguments, _PROBLEM)
    if names:
        raise ValueError(
            f"start_from={path!r}: must be a checkpoint of another run, got the {names[0]} of this "
            "one. A run resumes from its own by itself: leave start_from out, or give the branch a "
            f"{names[0]} of its own"
        )


def _is_in(directory: str, path: str, prefix: str) -> bool:
    """Whether a path is this directory, or a checkpoint in it.

    A checkpoint of this prefix counts even if it does not exist: it is the run's own, which has
    deleted it or not saved it yet.
    """
    resolved = resolve_path(directory)
    named = _parse_path(path)
    if named is None or resolve_path(named.directory) != resolved:
        return resolve_path(path) == resolved
    if named.prefix == prefix:
        return True
    return open_store(named.directory).find_path(named.prefix, named.step) is not None


def _find_checkpoint(path: str, prefix: str, edited_step: int) -> ParentCheckpoint:
    """Find the checkpoint that a path names, or the newest one of the directory that it names."""
    named = _parse_path(path)
    if named is not None:
        store = open_store(named.directory)
        if store.find_path(named.prefix, named.step) is not None:
            saver = Saver(named.directory, prefix=named.prefix)
            return ParentCheckpoint(saver, named.step, is_named=True, edited_step=edited_step)
        _check_intact(store, named.prefix, newer_than=named.step - 1, only=named.step)
    if is_directory(path):
        store = open_store(path)
        newest = next((step for step, _ in store.newest_first(prefix)), -1)
        _check_intact(store, prefix, newer_than=newest)
        if newest >= 0:
            return ParentCheckpoint(
                Saver(path, prefix=prefix), newest, is_named=False, edited_step=edited_step
            )
    other_prefix = prefix if named is None else named.prefix
    other = latest_checkpoint(path) or latest_checkpoint(split_path(path)[0], other_prefix)
    hint = "there are no checkpoints"
    if other:
        hint = f"the newest checkpoint there is {printable(other)}"
    raise FileNotFoundError(
        f"start_from={path!r}: must be a checkpoint, or a directory with {prefix}-*; {hint}"
    )


def _check_intact(store: Store, prefix: str, *, newer_than: int, only: int | None = None) -> None:
    """Check that no checkpoint above a step is corrupted; with `only`, check just that step's."""
    for path, problem in store.find_broken(prefix, newer_than):
        if only is None or split_path(path)[1] == checkpoint_name(prefix, only):
            raise CheckpointError(
                f"start_from: {path} is corrupted: {problem}; give another checkpoint"
            )


def _agree_on_parent(options: Options, parent: ParentCheckpoint) -> ParentCheckpoint:
    """Check the step that process 0 has found, and return the parent at that step."""
    (step,) = processes.broadcast_ints(parent.step)
    if step >= options.stop_step:
        raise ValueError(
            f"start_from={options.start_from!r}, last_step={options.last_step}: last_step must be "
            f"above the step of that checkpoint, {step}"
        )
    if parent.edited_step not in (0, step):
        raise ValueError(
            f"start_from={options.start_from!r}: must be a checkpoint at the step of the state "
            f"passed, {parent.edited_step}, got one at step {step}; to begin with the checkpoint's "
            "own state, pass a state at step 0 or an abstract one"
        )
    return parent._replace(step=step)


def warn_of_other_parent(options: Options, parent: Parent | None) -> None:
    """Warn that `start_from` is not read, if it names another checkpoint than the run's parent."""
    if options.start_from is None:
        return
    began = "no other run's checkpoint"
    if parent:
        if _may_name(os.fspath(options.start_from), parent["path"]):
            return
        began = parent["path"]
    logger.warning(
        "start_from=%r: is not read, as checkpoint_dir has checkpoints of this run, which began "
        "from %s; for a branch of that checkpoint, give another checkpoint_dir",
        options.start_from,
        began,
    )


def _may_name(path: str, parent_path: str) -> bool:
    """Whether `start_from` is the path of a parent, or of its directory.

    The parent may have been the newest checkpoint of that directory.
    """
    parent_directory, _ = split_path(parent_path)
    if resolve_path(path) == parent_directory:
        return True
    # Whole paths are compared, as runs usually have checkpoints of the same names. So a parent that
    # was moved counts as another one. Nothing is read there to find out, because a parent may be
    # deleted once its branch has a checkpoint.
    named = _parse_path(path)
    if named is None:
        return False
    return join_path(resolve_path(named.directory), split_path(path)[1]) == parent_path


# Read it, while its run may continue, and replace or delete it.


def read_checkpoint(options: Options, parent: ParentCheckpoint, target: Tree) -> ReadCheckpoint:
    """Read the parent, or the newest permanent checkpoint if it was replaced meanwhile.

    This can happen if `start_from` is a directory, whose newest checkpoint may be temporary.
    """
    read = _read_once(parent, target)
    if read is None and not parent.is_named:
        parent = _find_permanent(options, parent)
        read = _read_once(parent, target)
    if read is None:
        raise _gone(parent.reference["path"])
    return read


def _read_once(parent: ParentCheckpoint, target: Tree) -> ReadCheckpoint | None:
    """Read a checkpoint; None if its run has replaced it meanwhile."""
    try:
        checkpoint = engine_of(parent.saver).open(parent.step)
        state = target
        if not parent.edited_step:
            with internal_transfers():
                state = checkpoint.restore(target)
    except (FileNotFoundError, GoneError):
        return None

    def read_file(name: str) -> bytes:
        try:
            return checkpoint.file(name)
        except FileNotFoundError:  # it was replaced meanwhile, which all processes find out below
            return b""

    files = tagged_json.FilesOnce(read_file)

    def load(name: str) -> tagged_json.ExternalBytes:
        # Read now: a later save may delete the checkpoint.
        return tagged_json.ExternalBytes(files(name).read())

    extra: dict[str, Any] = tagged_json.resolve_files(
        load_own_position(run_extra(checkpoint), read_file), load
    )
    if processes.any_process(checkpoint.is_gone()):
        return None
    return ReadCheckpoint(parent, checkpoint, extra, state)


def _find_permanent(options: Options, parent: ParentCheckpoint) -> ParentCheckpoint:
    prefix = parent.saver.prefix
    store = open_store(parent.saver.directory)

    def find_newest() -> int:
        step = newest_permanent(store, prefix)
        if step is None:
            raise _gone(join_path(parent.saver.directory, f"{prefix}-*"))
        return step

    step = processes.share_errors(find_newest, _PROBLEM)
    return _agree_on_parent(options, parent._replace(step=step))


def _gone(path: str) -> CheckpointError:
    return CheckpointError(
        f"{path} was deleted or replaced while this run began from it; start the run again"
    )


def describe_missing(checkpoint: OpenCheckpoint) -> str:
    """Describe what a best checkpoint, saved within an iteration, lacks; "" for any other one."""
    if checkpoint.best is None:
        return ""
    return (
        ", a best checkpoint: positions of loaders and states of hooks are not in "
        "it, so these begin anew"
    )

"""Branching with `start_from`: find and validate the checkpoint of another run to begin from."""

import functools
import logging
import os
import re
from typing import Any, NamedTuple

import jax

from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.names import checkpoint_name, latest_checkpoint
from jstep.checkpoint.open_store import open_store
from jstep.checkpoint.saver import Saver
from jstep.checkpoint.store import Store
from jstep.distributed import processes
from jstep.loop.arguments import Options
from jstep.stores.files import is_directory
from jstep.stores.urls import join_path, resolve_path, split_path

PARENT = "parent"
"""The key, in a checkpoint's `extra`, in cards and in timelines, of the checkpoint that the run began from."""
_NAME = re.compile(r"(.+)-(0|[1-9][0-9]*)", re.DOTALL)
_logger = logging.getLogger("jstep")


class Trunk(NamedTuple):
    """The checkpoint of another run; a different `extra` later means that it was replaced."""

    saver: Saver
    step: int
    extra: Any

    @property
    def parent(self) -> dict[str, Any]:
        path = join_path(resolve_path(self.saver.directory), checkpoint_name(self.saver.prefix, self.step))
        return {"path": path, "step": self.step}


def parent_in(extra: dict[str, Any]) -> dict[str, Any] | None:
    """Return the parent that a checkpoint names; None if a user saved something else under the same key."""
    parent = extra.get(PARENT)
    is_one = isinstance(parent, dict) and isinstance(parent.get("path"), str) and type(parent.get("step")) is int
    return parent if is_one else None


def open_trunk(options: Options, saver: Saver | None, latest: int | None) -> Trunk | None:
    """Find the checkpoint to begin from; None if there is none, or the run has its own.

    Raises:
        CheckpointError: It is corrupted.
        FileNotFoundError: It does not exist. The message names the newest one.
        ValueError: It belongs to this run, or is not before last_step.
    """
    path = options.start_from
    if path is None:
        return None
    prefix = options.checkpoint_prefix if saver is None else saver.prefix
    above, name = split_path(path)
    places = {resolve_path(path), resolve_path(above)} if _NAME.fullmatch(name) else {resolve_path(path)}
    own = {
        "checkpoint_dir": None if saver is None else saver.directory,
        "logdir": None if options.logdir is None else os.fspath(options.logdir),
    }
    for argument, place in own.items():
        if place is not None and resolve_path(place) in places:
            raise ValueError(
                f"start_from={path!r}: must be a checkpoint of another run, got the {argument} of this one. A run "
                f"resumes from its own by itself: leave start_from out, or give the branch a {argument} of its own"
            )
    if latest is not None:
        return None
    reads, step = processes.on_all_processes(lambda: _trunk_at(path, prefix), "start_from cannot be read")
    (step,) = processes.broadcast_ints(step)
    trunk = Trunk(reads, step, processes.on_all_processes(lambda: reads.extra(step), "start_from cannot be read"))
    if trunk.step >= options.stop_step:
        raise ValueError(
            f"start_from={path!r}, last_step={options.last_step}: last_step must be above the step of that checkpoint, "
            f"{trunk.step}"
        )
    if jax.process_index() == 0:
        _logger.info("this run begins from %s", trunk.parent["path"])
    return trunk


def _trunk_at(path: str, prefix: str) -> tuple[Saver, int]:
    """Find a checkpoint, or the newest one of a directory; never fall back to an older one if it is corrupted."""
    above, name = split_path(path)
    if match := _NAME.fullmatch(name):
        store, step = open_store(above), int(match[2])
        if store.at(match[1], step) is not None:
            return Saver(above, prefix=match[1]), step
        _refuse_damaged(store, match[1], step - 1, only=step)
    if is_directory(path):
        store = open_store(path)
        newest = next((step for step, _ in store.newest_first(prefix)), -1)
        _refuse_damaged(store, prefix, newest)
        if newest >= 0:
            return Saver(path, prefix=prefix), newest
    searches = [functools.partial(latest_checkpoint, path)]
    if match is not None:
        searches += [functools.partial(latest_checkpoint, above, match[1]), functools.partial(latest_checkpoint, above)]
    other = next((latest for search in searches if (latest := search())), None)
    there = f"the newest checkpoint there is {other}" if other else "there are no checkpoints"
    raise FileNotFoundError(f"start_from={path!r}: must be a checkpoint, or a directory with {prefix}-*; {there}")


def _refuse_damaged(store: Store, prefix: str, above: int, only: int | None = None) -> None:
    for broken, problem in store.broken(prefix, above):
        if only is None or split_path(broken)[1] == checkpoint_name(prefix, only):
            raise CheckpointError(f"start_from: {broken} is corrupted: {problem}; give another checkpoint")

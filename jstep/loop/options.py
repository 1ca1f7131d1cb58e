"""The arguments of `train`, validated."""

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core.checks import as_bool, as_int, kind, shown
from jstep.data.prefetch import placement
from jstep.data.sequence import StateBatches
from jstep.hooks.run_hook import cadence_or_never
from jstep.loop.auto_steps import AUTO
from jstep.loop.checks import list_of_hooks
from jstep.loop.compile_cache import cache_directory

LARGEST_STEP = int(np.iinfo(np.int32).max)
_NO_END = "or None if the batches, a hook or a signal end the run"
_CADENCES = ("save_checkpoint_secs", "save_checkpoint_steps", "save_summaries_steps", "log_steps")


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `train`, without the step, the state and the batches; validated when created."""

    last_step: Any
    hooks: Sequence[Any]
    checkpoint_dir: str | os.PathLike[str] | Saver | None
    checkpoint_prefix: str
    save_checkpoint_secs: float | None
    save_checkpoint_steps: int | None
    logdir: str | os.PathLike[str] | None
    save_summaries_steps: int | None
    log_steps: int | None
    steps_per_call: int | str
    progress: bool | None
    batch_sharding: Any
    compile_cache: str | os.PathLike[str] | bool | None

    @property
    def end(self) -> int | None:
        """The step at which the run ends; None if the batches, a hook or a signal end it."""
        return None if self.last_step == LARGEST_STEP else int(self.last_step)

    @property
    def cache_directory(self) -> str | None:
        """The directory of the compilation cache."""
        return cache_directory(self.compile_cache, self.checkpoint_dir)

    def for_batches(self, batches: Any) -> "Options":
        """The options for these batches: those that are made with the state allow one step a call.

        Raises:
            ValueError: `batches` are made with the state, and a call would take several steps.
        """
        steps = as_steps_per_call(self.steps_per_call, batches)
        return self if steps == self.steps_per_call else dataclasses.replace(self, steps_per_call=steps)

    def __post_init__(self) -> None:
        checked = {
            "hooks": list_of_hooks(self.hooks),
            "last_step": LARGEST_STEP if self.last_step is None else as_int(self.last_step, "last_step", 0, _NO_END),
            "steps_per_call": as_steps_per_call(self.steps_per_call),
            "progress": None if self.progress is None else as_bool(self.progress, "progress"),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for name in _CADENCES:
            check_cadence(name, getattr(self, name))
        check_locations(self.checkpoint_dir, self.checkpoint_prefix, self.logdir, self.batch_sharding)
        cache_directory(self.compile_cache, self.checkpoint_dir)


def as_steps_per_call(value: Any, batches: Any = None) -> int | str:
    """Return `steps_per_call`, an integer ≥ 1 or "auto"; refuse anything else.

    Batches that are made with the state allow one step a call, and "auto" means 1 for them.
    """
    if isinstance(value, str):
        if value != AUTO:
            raise ValueError(f"steps_per_call={value!r}: must be an integer ≥ 1, or 'auto'")
        return 1 if isinstance(batches, StateBatches) else AUTO
    steps = as_int(value, "steps_per_call", 1)
    if steps > 1 and isinstance(batches, StateBatches):
        raise ValueError(
            f"steps_per_call={steps}, batches={batches!r}: batches of jstep.from_state are made with the state before "
            "each step; use steps_per_call=1"
        )
    return steps


def check_cadence(name: str, value: Any) -> None:
    """Refuse anything but None or a number of steps, or of seconds if the name ends in `_secs`."""
    steps, secs = (("", None), (name, value)) if name.endswith("_secs") else ((name, value), ("", None))
    cadence_or_never(steps=steps, secs=secs, clock=time.monotonic)


def check_locations(checkpoint_dir: Any, checkpoint_prefix: str, logdir: Any, batch_sharding: Any) -> None:
    """Refuse invalid directories, prefixes and shardings, without opening anything."""
    if not isinstance(checkpoint_dir, Saver | str | os.PathLike | None):
        raise TypeError(
            f"checkpoint_dir={shown(checkpoint_dir)}: must be a directory, a URL or a Saver, got {kind(checkpoint_dir)}"
        )
    if not isinstance(logdir, str | os.PathLike | None):
        raise TypeError(f"logdir={shown(logdir)}: must be a directory or a URL, got {kind(logdir)}")
    for name, place in (("checkpoint_dir", checkpoint_dir), ("logdir", logdir)):
        if isinstance(place, str) and not place.strip():
            raise ValueError(f"{name}={place!r}: must be a directory or a URL, got an empty string; use None for none")
    try:
        checkpoint_name(checkpoint_prefix, 0)
    except (TypeError, ValueError) as error:
        raise type(error)(f"checkpoint_{error}") from None
    if isinstance(checkpoint_dir, Saver) and checkpoint_prefix not in ("model", checkpoint_dir.prefix):
        raise ValueError(
            f"checkpoint_prefix={checkpoint_prefix!r}: checkpoint_dir is a Saver, whose own prefix is "
            f"{checkpoint_dir.prefix!r}; make the Saver with the prefix"
        )
    if batch_sharding is not None:
        try:
            placement(batch_sharding)
        except (TypeError, ValueError) as error:
            raise type(error)(f"batch_{error}") from None

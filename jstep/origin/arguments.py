"""The arguments of `train`, validated before anything is opened."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.compiling.programs import AUTO
from jstep.core.checks import as_bool, as_int, as_number, describe_type, format_value
from jstep.core.placement import check_not_compile_only
from jstep.core.trees import Tree
from jstep.data.batch_placement import make_placer, shardings_of_axes
from jstep.data.loaders import are_made_one_by_one
from jstep.hooks.hook import list_of_hooks
from jstep.hooks.run_hook import sentence_without_step
from jstep.state.global_step import get_global_step
from jstep.state.train_state import TrainState, as_state
from jstep.stores.files import check_no_links
from jstep.stores.urls import absolute, is_url, location

Step: TypeAlias = Callable[..., tuple[TrainState, Any]]

LARGEST_STEP = int(np.iinfo(np.int32).max)
"""The largest step of int32, at which a run without `last_step` ends."""
_LAST_STEP_EXPECTED = "or None if the batches, a hook or a signal end the run"
MAX_SECS = 600.0
"""The longest interval of "auto", in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `Run` and `train`, without the steps, the state and the batches.

    `options_in` makes them as they were given; `validated` returns them as a run uses them.
    """

    last_step: int | None
    hooks: Sequence[Any]
    checkpoint_dir: str | os.PathLike[str] | Saver | None
    checkpoint_prefix: str
    save_checkpoint_secs: float | str | None
    save_checkpoint_steps: int | None
    logdir: str | os.PathLike[str] | None
    save_summaries_steps: int | None
    log_steps: int | None
    steps_per_call: int | str
    progress: bool | None
    batch_sharding: Any
    compile_cache: str | os.PathLike[str] | bool | None
    stop_secs: float | None
    config: Any
    start_from: str | os.PathLike[str] | None

    @property
    def stop_step(self) -> int:
        """The step at which the run ends at the latest: `last_step`, or the largest int32."""
        return LARGEST_STEP if self.last_step is None else self.last_step

    @property
    def prefix(self) -> str:
        """The prefix of the checkpoints: that of the Saver, if one was passed."""
        if isinstance(self.checkpoint_dir, Saver):
            return self.checkpoint_dir.prefix
        return self.checkpoint_prefix

    @property
    def directory(self) -> str | None:
        """The directory of the run: checkpoint_dir, or else logdir; None without either."""
        if isinstance(self.checkpoint_dir, Saver):
            return self.checkpoint_dir.directory
        place = self.logdir if self.checkpoint_dir is None else self.checkpoint_dir
        return None if place is None else os.fspath(place)

    @property
    def directories(self) -> list[str]:
        """The directories that the run writes to: checkpoint_dir and logdir."""
        directories: list[str] = []
        if self.directory is not None:
            directories.append(self.directory)
        if self.logdir is not None:
            directories.append(os.fspath(self.logdir))
        return directories


def options_in(arguments: Mapping[str, Any]) -> Options:
    """Return the options among the arguments of `Run`, as they were given."""
    return Options(**{field.name: arguments[field.name] for field in dataclasses.fields(Options)})


def validated(given: Options, state: TrainState[Any], batches: Tree) -> Options:
    """Return the options with each value as a run uses it; an error names the first invalid one."""
    batch_sharding = shardings_of_axes(given.batch_sharding, state)
    steps_per_call = as_steps_per_call(given.steps_per_call, batches)
    options = dataclasses.replace(
        given,
        batch_sharding=batch_sharding,
        steps_per_call=steps_per_call,
        last_step=_as_last_step(given.last_step),
        hooks=list_of_hooks(given.hooks),
        checkpoint_dir=_as_checkpoint_dir(given),
        start_from=_as_place(given.start_from, "start_from"),
        logdir=_as_place(given.logdir, "logdir"),
        progress=_as_progress(given.progress),
        stop_secs=_as_secs(given.stop_secs, "stop_secs", "a number of seconds or None"),
        save_checkpoint_secs=_as_save_secs(given),
        save_checkpoint_steps=_as_interval(given.save_checkpoint_steps, "save_checkpoint_steps"),
        save_summaries_steps=_as_interval(given.save_summaries_steps, "save_summaries_steps"),
        log_steps=_as_interval(given.log_steps, "log_steps"),
    )
    for directory in options.directories:  # one of them may be below the other
        check_no_links(directory, *options.directories)
    # Only for its error if this is not a sharding; the placer itself is not needed.
    make_placer(batch_sharding, "batch_sharding")
    return options


def _as_last_step(value: object) -> int | None:
    if value is None:
        return None
    last_step = as_int(value, "last_step", 0, _LAST_STEP_EXPECTED)
    # The run ends there without a limit, too. None avoids a warning if the batches end earlier.
    return None if last_step == LARGEST_STEP else last_step


def _as_checkpoint_dir(given: Options) -> str | Saver | None:
    checkpoint_dir = given.checkpoint_dir
    check_checkpoints(checkpoint_dir, given.checkpoint_prefix)
    if isinstance(checkpoint_dir, Saver):
        return checkpoint_dir
    return _as_place(checkpoint_dir, "checkpoint_dir")


def _as_place(value: object, name: str) -> str | None:
    """Return a place as an absolute one, because the program may change its directory."""
    return None if value is None else absolute(location(value, name))


def _as_progress(value: object) -> bool | None:
    return None if value is None else as_bool(value, "progress")


def _as_save_secs(given: Options) -> float | str | None:
    if given.save_checkpoint_secs != AUTO:
        expected = "a number of seconds, 'auto' or None"
        return _as_secs(given.save_checkpoint_secs, "save_checkpoint_secs", expected)
    # With a number of steps, "auto" is only the longest time without a checkpoint.
    return AUTO if given.save_checkpoint_steps is None else MAX_SECS


def _as_interval(value: object, argument: str) -> int | None:
    return None if value is None else as_int(value, argument, 1, "a number of steps")


def _as_secs(value: object, argument: str, expected: str) -> float | None:
    if value is None:
        return None
    return as_number(value, argument, low=0, above=True, expected=expected)


def as_steps_per_call(value: object, batches: Tree = None) -> int | str:
    if isinstance(value, str):
        if value != AUTO:
            raise ValueError(f"steps_per_call={value!r}: must be an integer ≥ 1, or 'auto'")
        return 1 if are_made_one_by_one(batches) else AUTO
    steps = as_int(value, "steps_per_call", 1)
    if steps > 1 and are_made_one_by_one(batches):
        raise ValueError(
            f"steps_per_call={steps}, batches={batches!r}: these batches are made one by one, with "
            "the state or in the body of the loop; use steps_per_call=1"
        )
    return steps


def check_checkpoints(checkpoint_dir: object, checkpoint_prefix: str) -> None:
    """Reject a path that is not a place, an invalid prefix, and one that is not the `Saver`'s."""
    if checkpoint_dir is not None and not isinstance(checkpoint_dir, Saver):
        location(checkpoint_dir, "checkpoint_dir")
    try:
        checkpoint_name(checkpoint_prefix, 0)
    except (TypeError, ValueError) as error:
        raise type(error)(f"checkpoint_{error}") from None
    own_prefix = checkpoint_dir.prefix if isinstance(checkpoint_dir, Saver) else checkpoint_prefix
    if checkpoint_prefix not in ("model", own_prefix):
        raise ValueError(
            f"checkpoint_prefix={checkpoint_prefix!r}: checkpoint_dir is a Saver, whose own prefix "
            f"is {own_prefix!r}; make the Saver with the prefix"
        )


def check_state(state: Tree, last_step: int, hooks: Sequence[Any] = ()) -> None:
    """Reject a state without a scalar global step, or a last_step that its dtype cannot hold."""
    check_not_compile_only(as_state(state), "state")
    if np.ndim(state.global_step):
        raise ValueError(
            f"state: its global_step has shape {np.shape(state.global_step)}, must be a scalar, "
            "which a population shares; see the recipe 'Hyperparameter sweeps with vmap'"
        )
    step = get_global_step(state)
    if step is None:
        # For users who have passed a hook of TensorFlow's, the error begins with its sentence.
        sentences = filter(None, map(sentence_without_step, hooks))
        begin = next(sentences, "")
        raise RuntimeError(
            f"{begin}state: it has no global_step, by which a run counts; give it one: "
            "state.replace(global_step=jstep.create_global_step())"
        )
    last = np.iinfo(step.dtype).max
    if last_step > last:
        raise ValueError(
            f"last_step={last_step}: must be at most {last}, the last step that {step.dtype} can "
            "hold; under jax_enable_x64 steps are int64"
        )


def cache_directory(cache: Any, checkpoint_dir: Any) -> str | None:
    """Return the directory that `compile_cache` names, checked; None for no cache."""
    if cache is None or cache is False:
        return None
    if cache is True:
        directory = checkpoint_dir
        if isinstance(checkpoint_dir, Saver):
            directory = checkpoint_dir.directory
        if directory is None or is_url(directory):
            raise ValueError(
                "compile_cache=True: must have a local checkpoint_dir, got "
                f"{format_value(directory)}; give a directory"
            )
        cache = os.path.join(os.fspath(directory), "compile_cache")
    if not isinstance(cache, str | os.PathLike):
        raise TypeError(
            f"compile_cache={format_value(cache)}: must be a directory, True or None, got "
            f"{describe_type(cache)}"
        )
    if is_url(cache) or not os.fspath(cache).strip():
        raise ValueError(f"compile_cache={format_value(cache)}: must be a local directory")
    return os.path.abspath(os.path.expanduser(os.fspath(cache)))

"""The arguments of `train`, validated before anything is opened."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias

import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core.checks import as_bool, as_int, as_number, describe_type, format_value
from jstep.core.placement import refuse_compile_only
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import P, Tree
from jstep.data.batch_placement import make_placer, over_axes
from jstep.data.loaders import StateBatches
from jstep.data.loop_batches import LoopBatches
from jstep.hooks.hook import list_of_hooks
from jstep.loop.programs import AUTO
from jstep.metering.cadence import make_cadence
from jstep.record.config import as_config
from jstep.state.global_step import get_global_step
from jstep.state.train_state import TrainState, require_state
from jstep.stores.urls import absolute, is_url, location

_A = ParamSpec("_A")
Step: TypeAlias = Callable[..., tuple[TrainState, Any]]

LARGEST_STEP = int(np.iinfo(np.int32).max)
_NO_END = "or None if the batches, a hook or a signal end the run"
MAX_SECS = 600.0
"""The longest interval of "auto", in seconds, and the time after a permanent checkpoint before the next one."""


@dataclasses.dataclass(frozen=True)
class Options(Generic[P]):
    """The arguments of `Run` and `train`, validated when created, without the steps, the state and the batches."""

    train_step: dataclasses.InitVar[Step | Mapping[int, Step]]
    state: dataclasses.InitVar[TrainState[P]]
    batches: dataclasses.InitVar[Callable[[int], Tree] | Tree]
    last_step: int | None
    _: dataclasses.KW_ONLY
    hooks: Sequence[Any] = ()
    checkpoint_dir: str | os.PathLike[str] | Saver | None = None
    checkpoint_prefix: str = "model"
    save_checkpoint_secs: float | str | None = "auto"
    save_checkpoint_steps: int | None = None
    logdir: str | os.PathLike[str] | None = None
    save_summaries_steps: int | None = 100
    log_steps: int | None = 100
    steps_per_call: int | str = 1
    progress: bool | None = None
    batch_sharding: Any = None
    compile_cache: str | os.PathLike[str] | bool | None = None
    stop_secs: float | None = None
    config: Any = None
    start_from: str | os.PathLike[str] | None = None

    @property
    def stop_step(self) -> int:
        """`last_step`, or the largest step."""
        return LARGEST_STEP if self.last_step is None else self.last_step

    @property
    def prefix(self) -> str:
        """The prefix of the checkpoints: that of the Saver, if one was passed."""
        return self.checkpoint_dir.prefix if isinstance(self.checkpoint_dir, Saver) else self.checkpoint_prefix

    @property
    def where(self) -> str | None:
        """The checkpoint_dir, or else the logdir; None without either."""
        if isinstance(self.checkpoint_dir, Saver):
            return self.checkpoint_dir.directory
        places = {"checkpoint_dir": self.checkpoint_dir, "logdir": self.logdir}
        return next((location(place, name) for name, place in places.items() if place is not None), None)

    def __post_init__(self, train_step: object, state: TrainState[P], batches: Tree) -> None:
        self._set(
            batch_sharding=over_axes(self.batch_sharding, state),
            steps_per_call=as_steps_per_call(self.steps_per_call, LoopBatches() if batches is None else batches),
        )
        last_step = None if self.last_step is None else as_int(self.last_step, "last_step", 0, _NO_END)
        start_from = self.start_from
        self._set(
            hooks=list_of_hooks(self.hooks),
            last_step=None if last_step == LARGEST_STEP else last_step,
            config=as_config(self.config),
            start_from=None if start_from is None else absolute(location(start_from, "start_from")),
            progress=None if self.progress is None else as_bool(self.progress, "progress"),
            stop_secs=_as_secs(self.stop_secs, "stop_secs", "a number of seconds or None"),
        )
        if self.save_checkpoint_secs == AUTO and self.save_checkpoint_steps is not None:
            self._set(save_checkpoint_secs=MAX_SECS)
        secs = self.save_checkpoint_secs
        secs = None if secs == AUTO else _as_secs(secs, "save_checkpoint_secs", "a number of seconds, 'auto' or None")
        steps = ("save_checkpoint_steps", self.save_checkpoint_steps)
        make_cadence(steps=steps, secs=("save_checkpoint_secs", secs), required=False)
        for name in ("save_summaries_steps", "log_steps"):
            make_cadence(steps=(name, getattr(self, name)), required=False)
        check_locations(self.checkpoint_dir, self.checkpoint_prefix, self.logdir)
        make_placer(self.batch_sharding, "batch_sharding")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


def takes_options(
    make: Callable[_A, Options[P]],
) -> Callable[[Callable[[Any, Any, Any, Any, Options[P]], None]], Callable[Concatenate[Any, _A], None]]:
    signature = inspect.signature(make)
    parameters = signature.parameters.values()

    def decorate(fn: Callable[[Any, Any, Any, Any, Options[P]], None]) -> Callable[Concatenate[Any, _A], None]:
        @functools.wraps(fn)
        def init(self: Any, /, *args: _A.args, **kwargs: _A.kwargs) -> None:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"Run: {error}") from None
            fn(self, given["train_step"], given["state"], given["batches"], make(*args, **kwargs))

        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # `InitVar[T]` is shown as `T`.
        shown = [
            parameter.replace(annotation=getattr(parameter.annotation, "type", parameter.annotation))
            for parameter in parameters
        ]
        init.__signature__ = inspect.Signature([self_parameter, *shown])  # type: ignore[attr-defined]
        return shortens_tracebacks(init)

    return decorate


def _as_secs(value: object, argument: str, expected: str) -> float | None:
    return None if value is None else as_number(value, argument, low=0, above=True, expected=expected)


def as_steps_per_call(value: object, batches: Tree = None) -> int | str:
    if isinstance(value, str):
        if value != AUTO:
            raise ValueError(f"steps_per_call={value!r}: must be an integer ≥ 1, or 'auto'")
        return 1 if isinstance(batches, StateBatches | LoopBatches) else AUTO
    steps = as_int(value, "steps_per_call", 1)
    if steps > 1 and isinstance(batches, StateBatches | LoopBatches):
        raise ValueError(
            f"steps_per_call={steps}, batches={batches!r}: these batches are made one by one, with the state or in the "
            "body of the loop; use steps_per_call=1"
        )
    return steps


def check_locations(checkpoint_dir: object, checkpoint_prefix: str, logdir: object) -> None:
    for name, place in (("checkpoint_dir", checkpoint_dir), ("logdir", logdir)):
        if place is not None and not isinstance(place, Saver):
            location(place, name)
    try:
        checkpoint_name(checkpoint_prefix, 0)
    except (TypeError, ValueError) as error:
        raise type(error)(f"checkpoint_{error}") from None
    if isinstance(checkpoint_dir, Saver) and checkpoint_prefix not in ("model", checkpoint_dir.prefix):
        raise ValueError(
            f"checkpoint_prefix={checkpoint_prefix!r}: checkpoint_dir is a Saver, whose own prefix is "
            f"{checkpoint_dir.prefix!r}; make the Saver with the prefix"
        )


def check(state: Tree, last_step: int) -> None:
    """Reject a state without a scalar global step, or a last_step that its dtype cannot hold."""
    refuse_compile_only(require_state(state), "state")
    if np.ndim(state.global_step):
        raise ValueError(
            f"state: its global_step has shape {np.shape(state.global_step)}, must be a scalar, which a population "
            "shares; see the recipe 'Hyperparameter sweeps with vmap'"
        )
    step = get_global_step(state)
    if step is None:
        raise RuntimeError(
            "Global step should be created to use StepCounterHook. A run counts steps, and the state has no global "
            "step; give it one: state.replace(global_step=jstep.create_global_step())"
        )
    last = np.iinfo(step.dtype).max
    if last_step > last:
        raise ValueError(
            f"last_step={last_step}: must be at most {last}, the last step that {step.dtype} can hold; under "
            "jax_enable_x64 steps are int64"
        )


def cache_directory(cache: Any, checkpoint_dir: Any) -> str | None:
    if cache is None or cache is False:
        return None
    if cache is True:
        where = checkpoint_dir.directory if isinstance(checkpoint_dir, Saver) else checkpoint_dir
        if where is None or is_url(where):
            raise ValueError(
                f"compile_cache=True: must have a local checkpoint_dir, got {format_value(where)}; give a directory"
            )
        cache = os.path.join(os.fspath(where), "compile_cache")
    if not isinstance(cache, str | os.PathLike):
        raise TypeError(
            f"compile_cache={format_value(cache)}: must be a directory, True or None, got {describe_type(cache)}"
        )
    if is_url(cache) or not os.fspath(cache).strip():
        raise ValueError(f"compile_cache={format_value(cache)}: must be a local directory")
    return os.path.abspath(os.path.expanduser(os.fspath(cache)))

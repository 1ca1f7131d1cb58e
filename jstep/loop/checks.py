"""What `train` is given, looked at before anything is opened."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jstep.core import trees
from jstep.hooks.hook import every
from jstep.hooks.step_counter import StepCounterHook
from jstep.state import TrainState, get_global_step

_METHODS = ("begin", "after_step", "after_call", "end", "close")


def list_of_hooks(hooks: Sequence[Any]) -> list[Any]:
    """The hooks.

    Raises:
        TypeError: They are no sequence of hooks.
    """
    if hasattr(hooks, "after_step"):
        raise TypeError(f"hooks={hooks!r}: must be a sequence of hooks, hooks=[...]")
    try:
        found = list(hooks)
    except TypeError:
        raise TypeError(f"hooks={hooks!r}: must be a sequence of hooks, got {type(hooks).__name__}") from None
    for i, hook in enumerate(found):
        if isinstance(hook, type):
            raise TypeError(f"hooks[{i}]={hook.__name__} is a class; give an instance: {hook.__name__}(...)")
        if not any(hasattr(hook, method) for method in _METHODS):
            raise TypeError(f"hooks[{i}]={hook!r}: has none of {', '.join(_METHODS)}; see jstep.Hook")
    return found


def check(train_step: Any, state: Any, **cadences: Any) -> None:
    """Looks at the arguments of `train`; cadences are numbers of steps or seconds, or None.

    Raises:
        RuntimeError: The state has no global step.
        TypeError: One is of the wrong type.
        ValueError: One is not positive.
    """
    if not callable(train_step):
        raise TypeError(f"train_step={train_step!r}: must be a function (state, *args) -> (state, metrics)")
    if not isinstance(state, TrainState):
        raise TypeError(f"state: must be a TrainState, got {type(state).__name__}; make one with TrainState.create")
    for name, value in cadences.items():
        steps, secs = (("", None), (name, value)) if name.endswith("_secs") else ((name, value), ("", None))
        every(steps=steps, secs=secs, clock=time.monotonic, at_least_one=False)
    if get_global_step(state) is None:
        # The words of StepCounterHook, which every run has.
        StepCounterHook().begin(state)


def check_alive(state: TrainState) -> None:
    """That no earlier step has taken over the memory of a state.

    Raises:
        RuntimeError: One has; names a leaf.
    """
    path = trees.donated_leaf(state)
    if path is not None:
        raise RuntimeError(
            f"the state's {path!r} was donated to an earlier step or run, whose result holds its memory now. Go on "
            "with the state that train or the step returned, or make a new one."
        )


def check_result(result: Any) -> tuple[TrainState, Any]:
    """What a step returned.

    Raises:
        TypeError: It is not a state and metrics.
    """
    what = "train_step must return (state, metrics), a TrainState and a mapping of names to values; it returned"
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{what} {type(result).__name__}{f' of {len(result)}' if isinstance(result, tuple) else ''}")
    state, metrics = result
    if not isinstance(state, TrainState) or not isinstance(metrics, Mapping):
        raise TypeError(f"{what} ({type(state).__name__}, {type(metrics).__name__})")
    return state, metrics

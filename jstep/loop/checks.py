"""Checks of the arguments of `train`, before anything is opened."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jstep.core import trees
from jstep.core.checks import kind, shown
from jstep.core.placement import refuse_compile_only
from jstep.hooks.counters import StepCounterHook
from jstep.state.global_step import get_global_step
from jstep.state.train_state import TrainState, require_state

_METHODS = ("begin", "after_step", "before_step", "end", "next_due", "get_state", "set_state")


def list_of_hooks(hooks: Sequence[Any]) -> list[Any]:
    """Return the hooks as a list; refuse anything but a sequence of hooks."""
    if hasattr(hooks, "after_step"):
        raise TypeError(f"hooks={hooks!r}: must be a sequence of hooks, hooks=[...]")
    try:
        found = list(hooks)
    except TypeError:
        raise TypeError(f"hooks={hooks!r}: must be a sequence of hooks, got {type(hooks).__name__}") from None
    for i, hook in enumerate(found):
        if isinstance(hook, type):
            raise TypeError(f"hooks[{i}]={hook.__name__} is a class; give an instance: {hook.__name__}(...)")
        for method in _METHODS:
            if hasattr(hook, method) and not callable(getattr(hook, method)):
                raise TypeError(f"hooks[{i}].{method}: must be a function, got {kind(getattr(hook, method))}")
        if not any(hasattr(hook, method) for method in _METHODS):
            way = ""
            if callable(hook):
                name = getattr(hook, "__name__", "fn")
                way = f". A function becomes a hook by jstep.every(100, {name}), which calls it every 100 steps"
            raise TypeError(f"hooks[{i}]={shown(hook)}: has none of {', '.join(_METHODS)}; see jstep.Hook{way}")
    return found


def check(state: Any, last_step: int) -> None:
    """Refuse a state without a scalar global step, or a last_step that its dtype cannot hold.

    Raises:
        RuntimeError: The state has no global step.
    """
    refuse_compile_only(require_state(state), "state")
    if np.ndim(state.global_step):
        raise ValueError(
            f"state: its global_step has shape {np.shape(state.global_step)}, must be a scalar: a population "
            "under train shares one step. Map all other leaves: axes = jax.tree.map(lambda _: 0, "
            "jax.eval_shape(create, seed)).replace(global_step=None), states = jax.vmap(create, out_axes=axes)(seeds), "
            "and in jstep.TrainStep the step jax.vmap(step, in_axes=(axes, None), out_axes=(axes, 0)); see the recipe "
            "'Hyperparameter sweeps with vmap'. Members at different steps need a custom loop, and a Saver"
        )
    step = get_global_step(state)
    if step is None:
        # Raises the error of StepCounterHook, which every run has.
        StepCounterHook().begin(state)
        return
    last = np.iinfo(step.dtype).max
    if last_step > last:
        raise ValueError(
            f"last_step={last_step}: must be at most {last}, the last step that {step.dtype} can hold; under "
            "jax_enable_x64 steps are int64"
        )


def check_alive(state: TrainState) -> None:
    """Refuse a state that was donated to an earlier step."""
    path = trees.donated_leaf(state)
    if path is not None:
        raise RuntimeError(
            f"the state's {path!r} was donated to an earlier step or run and deleted. Use the state that train or "
            "the step returned, or make a new one."
        )


def check_result(result: Any) -> tuple[TrainState, Any]:
    """Return the result of a step; refuse anything but a state and metrics."""
    expected = "train_step must return (state, metrics), a TrainState and a mapping of names to values; "
    what = f"{expected}it returned"
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{what} {type(result).__name__}{f' of {len(result)}' if isinstance(result, tuple) else ''}")
    state, metrics = result
    if not isinstance(state, TrainState) or not isinstance(metrics, Mapping):
        raise TypeError(f"{what} ({type(state).__name__}, {type(metrics).__name__})")
    odd = next((name for name in metrics if not isinstance(name, str)), None)
    if odd is not None:
        raise TypeError(f"{expected}the name of a metric must be a string, got {shown(odd)}")
    return state, metrics

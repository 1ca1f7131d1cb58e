"""Callbacks on the results of an evaluation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jstep.core.checks import kind, shown
from jstep.hooks import hook_state
from jstep.hooks.hook import name_of
from jstep.hooks.hook_results import StopWith, check_hook_result
from jstep.state.train_state import TrainState

EvaluationCallback = Callable[[int, TrainState, Mapping[str, Any]], "bool | TrainState | None"]


class Callbacks:
    """Functions `(step, state, results)`, called in order.

    Args:
        functions: The functions.
        argument: The name of the argument, for errors.

    Attributes:
        stopped_by: The key of the callback that stopped the run, or None.

    Raises:
        TypeError: The argument is not a sequence of functions.
    """

    def __init__(self, functions: Sequence[EvaluationCallback], argument: str) -> None:
        self._functions = _checked(functions, argument)
        self._argument, self._where = argument, f"EvaluationHook({argument}=…)"
        self.stopped_by: str | None = None

    def __len__(self) -> int:
        return len(self._functions)

    @property
    def why(self) -> str | None:
        """The `why` of a callback that ends the run before any step, or None."""
        return next((one.why for one in self._functions if isinstance(getattr(one, "why", None), str)), None)

    def begin(self, state: TrainState) -> bool:
        """Call `begin` of the callbacks; return whether one of them ends the run before any step.

        Raises:
            TypeError: A callback has `get_state` without `set_state`.
            ValueError: Two callbacks have the same `key`.
        """
        hook_state.check_owners(self._functions, self._where)
        self.stopped_by = None
        return any(self.each("begin", state))

    def get_state(self) -> Any:
        """Return the states of the callbacks."""
        return hook_state.get_states(self._functions, self._where)

    def set_state(self, value: Any) -> bool:
        """Restore the states; return whether one of the callbacks ends the run."""
        return hook_state.set_states(self._functions, value, self._where)

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any], *, on_cadence: bool) -> Any:
        """Call the callbacks and combine their results: one may stop the run while another replaces the state.

        Args:
            step: The step.
            state: The evaluated state.
            results: The results of the evaluation.
            on_cadence: Whether the evaluation was due; if not, callbacks with a true `on_cadence_only` are skipped.
        """
        given, stop = state, False
        for function in self._functions:
            if not on_cadence and getattr(function, "on_cadence_only", False):
                continue
            result = function(step, given, results)
            stop_now, given = check_hook_result(result, given, step, f"{self._argument}: {name_of(function)}")
            if stop_now and self.stopped_by is None:
                self.stopped_by = hook_state.key_of(function)
            stop = stop or stop_now
        if stop and given is not state:
            return StopWith(given)
        if given is not state:
            return given
        return True if stop else None

    def each(self, method: str, *args: Any) -> list[bool]:
        """Call a method of all callbacks that have it."""
        return [bool(getattr(one, method)(*args)) for one in self._functions if hasattr(one, method)]


def _checked(functions: Any, argument: str) -> tuple[Any, ...]:
    what = f"{argument}: must be a sequence of functions (step, state, results)"
    if callable(functions):
        raise TypeError(f"{what}, got {kind(functions)}; give a list: {argument}=[…]")
    try:
        given = tuple(functions)
    except TypeError:
        raise TypeError(f"{what}, got {kind(functions)}") from None
    for i, function in enumerate(given):
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"{argument}[{i}]={shown(function)}: must be a function (step, state, results)")
    return given

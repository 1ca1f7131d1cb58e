"""The `Hook` protocol: when hooks are called, the hooks that `train` is given, and what they may return."""

import dataclasses
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_int, as_number, kind, shown
from jstep.core.matching import difference
from jstep.core.meshes import internal_transfers
from jstep.core.slot_roles import roles_in
from jstep.distributed import processes
from jstep.state.global_step import global_step
from jstep.state.train_state import TrainState

# The `Hook` protocol.

NEVER = 2**63
"""A step that is never reached."""

Clock = Callable[[], float]
Metrics = Mapping[str, Any]


class Hook:
    """Callbacks around the steps of `train`. Subclass it, or define any of its methods.

    In addition, `train` only calls `get_state` and `set_state`.

    Steps are integers on the host, the number of updates applied: what has step N, a log line, a row of metrics, an
    evaluation, a checkpoint or a fingerprint, is of the update N − 1 → N, which took batch N − 1, or of its state. What
    is about an update that is repeated or yet to come has the step from which it starts, N → N + 1: an audit, a replay,
    `before_step`, the first step of a stage, a line about a stall or a compilation. Reading values of
    `state` or `metrics` waits for the device: do it only when due. A state that a hook stores is donated to the next
    step, which deletes its arrays: copy what the hook needs later.

    A hook keeps its state across restarts if it has both `get_state()` and `set_state(value)`. The value holds numbers,
    strings, bytes, None, lists, tuples, sets, dicts, NumPy arrays, JAX arrays and random generators; it is read once
    after `begin`, so that a value of another type is an error before the first step, and is saved with each checkpoint,
    arrays above 64 kB as files. An object in two places of it is one object again after a restart. `set_state` is
    called with it after `begin`; if it returns True, no step is run. The value is matched to a hook by its attribute
    `key`, a string that no other hook has, whatever its class, or without a `key` by the name of its class and its
    attribute `watches`, such as the name of a metric. The
    position in the list only matters between hooks that share all of these. One object may serve several runs, because
    `begin` starts from scratch.

    `train` does not close hooks, and calls `end` only if no exception was raised. To close what a hook opened, wrap
    `train`, for example in `with contextlib.closing(hook)`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> class Tell(jstep.Hook):
        ...     def after_step(self, step, state, metrics):
        ...         print("after update", step)
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 2, last_step=2, hooks=[Tell()])
        after update 1
        after update 2

    Source: `tf.train.SessionRunHook`.
    """

    def begin(self, state: TrainState) -> bool | None:
        """Called once before the first step, with the restored state; if it returns True, no step is run."""

    def before_step(self, step: int, state: TrainState) -> None:
        """Called before each call of the compiled step, with the step of the state."""

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> "bool | TrainState | None":
        """Called when due, after the update that produced `step`.

        If it returns True, the run stops after this step. If it returns a state, that replaces the state of the run; it
        must have the same step, structure, shapes and dtypes. Later hooks and the checkpoint of this step see it.

        A run that returned True here and is started again resumes: it runs steps until the hook is due and returns True
        again. To keep it stopped, remember the decision by `get_state`, and return it from `set_state`.
        """

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Called once after the last step if no exception was raised; may return a state, like `after_step`.

        The checkpoint of the last step holds the returned state and records that the hooks have ended: a start that
        takes no step does not call them again. If the process is killed before that, the next start calls them. A run
        that is continued to a larger `last_step` calls them at its new end.
        """

    def next_due(self, step: int) -> int | None:
        """Return the first step after `step` at which to call `after_step`; None to call it after every call.

        It must be a pure function of the step. With `steps_per_call`, no call runs past such a step.
        """
        return None


def name_of(hook: Any) -> str:
    """The name of a hook or function for errors: its `name`, or that of its function or class."""
    name = getattr(hook, "name", None)
    return name if isinstance(name, str) else str(getattr(hook, "__qualname__", type(hook).__qualname__))


def step_of(state: TrainState) -> int:
    """The step of a state, whatever transfers the user has forbidden; waits for the device."""
    with internal_transfers():
        return global_step(state)


def check_step(step: int, state: TrainState, first: int | None = None) -> None:
    """Refuse a state whose step differs from the loop's; waits for the device.

    Args:
        step: The step of the loop.
        state: The state.
        first: The step before the call that returned the state; None if other calls may have failed to advance it.
    """
    found = step_of(state)
    if found != step:
        error: Any = ValueError(
            f"the state's global_step is {found} after the update that makes step {step}: train_step must advance it "
            f"by one{_how_to_advance(found, step, first)}"
        )
        error.prevents_saving = True
        raise error


def _how_to_advance(found: int, step: int, first: int | None) -> str:
    """Advice for a step that does not advance the global step by one, as the end of a sentence."""
    one_increment = "end train_step with state = jstep.increment_global_step(state)"
    inside = "pass increment_global_step=False to all of them (minimize, apply_gradients), and " + one_increment
    if first is None:
        return f". If it runs several updates, or none, {inside}"
    by, remainder = divmod(found - first, step - first)
    if by == 0 and remainder == 0:
        return f", and does not advance it. Use increment_global_step=True in its last update, or {one_increment}"
    if by < 1 or remainder:
        return f", and changed it from {first} to {found} in {step - first} step(s): {one_increment}, and nowhere else"
    return (
        f", and advances it by {by}. If it runs several updates, {inside}. If it is {by} steps in one call "
        f"(scan_steps), pass the single step and steps_per_call={by} to train"
    )


# When a hook is called: at multiples of steps, at intervals of seconds, at steps that it names, at the last step.


class _Unset(int):
    """The type of the sentinel for an unspecified number of steps, compared by identity."""


UNSET = _Unset(100)
"""Sentinel: every 100 steps, unless seconds are given."""


def next_multiple(step: int, interval: int) -> int:
    """The first multiple of an interval after a step."""
    return (step // interval + 1) * interval


@dataclasses.dataclass(frozen=True)
class Cadence:
    """A cadence in steps, in seconds of a clock, or both, whichever comes first.

    Steps are due at multiples counted from 0, so that a resumed run keeps its cadence. Seconds count from the begin of
    the run, and then from the end of the last call of the hook, or a hook that takes longer would always be due.

    Attributes:
        steps: The interval in steps, or None.
        secs: The interval in seconds, a function that returns it from now whenever one begins, or None.
        clock: Returns seconds.
        together: Whether all processes must act at the same step, by the clock of one of them.
        ends_calls: Whether no call of several steps runs past a multiple; if not, the hook is due after the first call
            that reaches one.
        at_last: Whether the hook is also due at the last step, whatever ended the run.
        again_at_last: Whether that holds even if it was called at this step already.
    """

    steps: int | None = None
    secs: float | Callable[[], float] | None = None
    clock: Clock = time.monotonic
    together: bool = False
    ends_calls: bool = True
    at_last: bool = False
    again_at_last: bool = False

    def interval(self) -> float:
        """The seconds of an interval that begins now; 0 without seconds."""
        return self.secs() if callable(self.secs) else self.secs or 0.0

    def next_multiple(self, step: int) -> int:
        """The next multiple of `steps`, whatever the clock."""
        return NEVER if self.steps is None else next_multiple(step, self.steps)

    def has_multiple(self, step: int) -> bool:
        """Whether a step is due, whatever the clock."""
        return self.steps is not None and step % self.steps == 0


def cadence(
    *,
    steps: tuple[str, Any],
    secs: tuple[str, Any] | None = None,
    clock: Clock = time.monotonic,
    required: bool = True,
    **more: bool,
) -> Cadence:
    """Make a cadence whose errors name the caller's arguments, given as (name, value).

    Args:
        steps: The interval in steps; `UNSET` ones are used only if no seconds are given.
        secs: That in seconds; None if the caller has no such argument.
        clock: Returns seconds.
        required: Whether one of the two must be given; if not, a hook without both is never due.
        **more: Other fields of `Cadence`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An interval is not positive, or there is none.
    """
    if not callable(clock):
        raise TypeError(f"clock={clock!r}: must be a function that returns seconds, such as time.monotonic")
    (name, number), (secs_name, seconds) = steps, secs or ("", None)
    if number is UNSET:
        number = None if seconds is not None else int(UNSET)
    if required and secs and number is None and seconds is None:
        raise ValueError(f"{name}=None and {secs_name}=None: say how often, with one of them")
    if number is not None or (required and not secs):
        number = as_int(number, name, 1, "a number of steps")
    if seconds is not None:
        seconds = as_number(seconds, secs_name, low=0, above=True, expected="a number of seconds")
    return Cadence(number, seconds, clock, **more)


def cadence_of(hook: Any) -> Cadence | None:
    """The cadence of a stock hook; None if the hook says by itself when it is due."""
    # Not the attribute of another hook that an object delegates to: `train` gives that one no run.
    cadence = getattr(hook, "cadence", None) if hasattr(type(hook), "cadence") else None
    return cadence if isinstance(cadence, Cadence) else None


def next_call(hook: Any, step: int) -> tuple[int, int]:
    """The next step at which a hook is due, and that at which a call of several steps must end for it.

    A stock hook with seconds is due by its cadence, any other hook at the steps of its `next_due`, if it has that
    method and this returns one, or else after every call, which may then run past any step.

    Args:
        hook: The hook.
        step: The step from which on to look.

    Returns:
        Both steps, whatever the clock; `NEVER` for none.

    Raises:
        TypeError: `next_due` returned something else than a step or None.
        ValueError: It returned a step that is not a later one.
    """
    cadence, named = cadence_of(hook), None
    if hasattr(hook, "next_due") and (given := hook.next_due(step)) is not None:
        try:
            named = operator.index(given)
        except TypeError:
            what = f"{name_of(hook)}.next_due({step}) returned {kind(given)}"
            raise TypeError(f"{what}: must be a step, or None") from None
        if named <= step:
            raise ValueError(f"{name_of(hook)}.next_due({step}) returned {given}: must be a later step, or None")
    if cadence is None:
        return (step + 1, NEVER) if named is None else (named, named)
    multiple = cadence.next_multiple(step)
    end = multiple if named is None else named
    due = multiple if cadence.secs is not None else step + 1 if named is None else named
    return due, end if cadence.ends_calls else NEVER


class Due:
    """When one hook of a run is due.

    Args:
        hook: The hook.
        step: The step at which the run begins.
        by_cadence: Whether only the cadence counts, not `next_due`.

    Attributes:
        hook: The hook.
        cadence: Its cadence; that of a hook that says by itself when it is due has neither steps nor seconds.
        next: The next step at which it is due, whatever the clock; the loop asks `now` only from this step on, or from
            the deadline on.
        deadline: The time of its clock at which it is due, whatever the step.
        called: The last step at which it was called, or that of the start.
    """

    def __init__(self, hook: Any, step: int, *, by_cadence: bool = False) -> None:
        self.hook, self.cadence, self._by_cadence = hook, cadence_of(hook) or Cadence(), by_cadence
        self.deadline = math.inf
        self._agreed: processes.AgreedClock | None = None
        if self.cadence.secs is not None and self.cadence.together and not processes.is_single_process():
            self._agreed = processes.AgreedClock(self.cadence.interval(), self.cadence.clock)
        self.done(step)

    def now(self, step: int) -> bool:
        """Whether the hook is due; with a cadence in seconds, every process must ask after every call."""
        if self._agreed is not None:
            # Ask in any case, because all processes must do so at the same steps.
            by_clock = self._agreed.due(step)
            return by_clock or self.cadence.has_multiple(step)
        return step >= self.next or (self.deadline != math.inf and self.cadence.clock() >= self.deadline)

    def at_last(self, step: int) -> bool:
        """Whether the hook is due at the last step, this one, where it may have been called."""
        cadence = self.cadence
        has_acted = self.called == step and (cadence.secs is not None or cadence.has_multiple(step))
        return cadence.at_last and (cadence.again_at_last or not has_acted)

    def done(self, step: int) -> None:
        """Count steps and seconds from here: the hook was called at this step, or the run begins at it."""
        self.called = step
        if self._agreed is not None:
            self._agreed.done(self.cadence.interval())
        elif self.cadence.secs is not None:
            secs = self.cadence.interval()
            self.deadline = self.cadence.clock() + secs
        self.follow(step)

    def follow(self, step: int) -> None:
        """Count steps, but not seconds, from here."""
        if self._agreed is not None:
            self.next = 0  # ask after every call
        elif self._by_cadence:
            self.next = self.cadence.next_multiple(step)
        else:
            self.next, _ = next_call(self.hook, step)


# The hooks that `train` is given, checked before anything is opened.

_METHODS = ("begin", "after_step", "before_step", "end", "next_due", "get_state", "set_state")
_OF_HOOKS = ("after_step", "before_step", "end", "next_due", "cadence")
"""What only hooks have. Callbacks of evaluations, which are called themselves, may have the other methods."""
_OF_EVALUATIONS = "jstep.EvaluationHook(evaluate, every_n_steps=…, callbacks=[…])"


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
                way = (
                    f". A function becomes a hook by jstep.every(100, {name}), which calls it every 100 steps; "
                    f"a callback of evaluations belongs in {_OF_EVALUATIONS}"
                )
            raise TypeError(f"hooks[{i}]={shown(hook)}: has none of {', '.join(_METHODS)}; see jstep.Hook{way}")
        if callable(hook) and not any(hasattr(hook, name) for name in _OF_HOOKS):
            raise TypeError(
                f"hooks[{i}]={shown(hook)}: must be a hook, got a callback of evaluations, which train would never "
                f"call; give it to {_OF_EVALUATIONS}"
            )
    return found


# Return values of hooks: None, a bool, or a state to continue with.


@dataclasses.dataclass(frozen=True)
class StopWith:
    """Combined result of several callbacks: stop after this step, and replace the state."""

    state: TrainState


def check_hook_result(result: Any, state: TrainState, step: int, by: str) -> tuple[bool, TrainState]:
    """Check and interpret the return value of a hook.

    Args:
        result: The return value.
        state: The state that the hook received.
        step: The step of that state.
        by: The hook and its method, for errors.

    Returns:
        Whether to stop after this step, and the state to continue with.

    Raises:
        RuntimeError: The returned state was donated to a step.
        TypeError: The value is not None, a bool or a state.
        ValueError: The returned state differs from the one that the hook received in step, structure, shape or dtype.
    """
    if isinstance(result, bool | np.bool_ | None):
        return bool(result), state
    if isinstance(result, TrainState):
        return False, check_returned_state(result, state, step, by)
    if isinstance(result, StopWith):
        return True, check_returned_state(result.state, state, step, by)
    raise TypeError(
        f"{by} returned {kind(result)}: must be None, True (stop after this step), or a TrainState to continue with"
        + ("; make a bool of it: bool(…)" if trees.is_array(result) else "")
    )


def check_returned_state(given: TrainState, state: TrainState, step: int, by: str) -> TrainState:
    """Check a state that replaces another, and place its leaves like those of the other.

    Raises:
        RuntimeError: The state was donated to a step.
        ValueError: The state differs in step, structure, shape or dtype.
    """
    if given is state:
        return state
    # A hook may make its state by hand; the roles of the slots are those of the run in any case.
    given = TrainState(given.params, given.slots, given.global_step, roles=roles_in(state))
    new, old = trees.leaves_with_paths(given), trees.leaves_with_paths(state)
    if trees.structure(given) != trees.structure(state):
        different = difference(given, state) or "the same paths, in other containers"
        raise ValueError(f"{by} returned a state of another structure: {different}")
    with internal_transfers():
        leaves = [_placed_like(leaf, was, path, by) for (path, leaf), (_, was) in zip(new, old, strict=True)]
        if given.global_step is not state.global_step and int(np.asarray(given.global_step)) != step:
            raise ValueError(
                f"{by} returned a state at step {int(np.asarray(given.global_step))}: must be at step {step}; only the "
                "run counts steps"
            )
        leaves = _without_aliases(leaves)
    return jax.tree.unflatten(trees.structure(state), leaves)


def _placed_like(leaf: Any, was: Any, path: str, by: str) -> Any:
    """Return the leaf as an array with the placement of the leaf that it replaces."""
    if leaf is was:
        return leaf
    if not trees.is_array(leaf) or leaf.shape != was.shape or leaf.dtype != was.dtype:
        want = f"{was.dtype} of shape {was.shape}"
        got = f"{leaf.dtype} of shape {leaf.shape}" if trees.is_array(leaf) else kind(leaf)
        raise ValueError(f"{by} returned a state whose {path!r} is {got}: must be {want}, as before")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise RuntimeError(
            f"{by} returned a state whose {path!r} was donated to a step and deleted. Return the state that the "
            "step returned, or create the step with minimize(..., donate=False)"
        )
    if isinstance(leaf, jax.Array) and not leaf.weak_type and leaf.sharding == was.sharding:
        return leaf
    if isinstance(leaf, jax.Array) and leaf.weak_type:
        leaf = leaf.astype(leaf.dtype)  # otherwise the step would be compiled again
    is_placed = getattr(was, "committed", True) or isinstance(leaf, jax.Array)
    return jax.device_put(trees.owned(leaf), was.sharding if is_placed else None)


def _without_aliases(leaves: list[Any]) -> list[Any]:
    """Copy leaves that occur more than once: an array cannot be donated twice."""
    seen: set[int] = set()
    distinct = []
    for leaf in leaves:
        distinct.append(leaf.copy() if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return distinct

"""The `Hook` protocol: the hooks that `train` is given, and what they may return."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.calls import ShownAsTyped
from jstep.core.checks import kind, shown
from jstep.core.meshes import internal_transfers
from jstep.slots.matching import difference
from jstep.slots.roles import roles_in
from jstep.state.copies import warn_of_copies
from jstep.state.global_step import global_step
from jstep.state.train_state import TrainState

# The `Hook` protocol.

NEVER = 2**63
"""A step that is never reached."""

Clock = Callable[[], float]
Metrics = Mapping[str, Any]


class Hook(ShownAsTyped):
    """Callbacks around the steps of `train`. Subclass it, or define any of its methods.

    In addition, `train` only calls `get_state` and `set_state`. A hook may have any of these methods alone.

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

    `train` calls `end` only if no exception was raised, and `closed` in any case, also where `begin` was not called.

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

    def before_save(self, step: int) -> bool | None:
        """Called before each checkpoint of a step; if it returns True, on any process, nothing is saved.

        All rows of metrics up to it were delivered. An exception prevents the save, too, and ends the run.
        """

    def saved(self, step: int, path: str) -> None:
        """Called on process 0 with a checkpoint that is kept and acknowledged: complete, and on the disk.

        It is called in a thread beside the steps, one call at a time; no step waits for it. The checkpoint is not
        deleted before it returns, and `train` waits for it at its end, also after SIGTERM. What it raises is logged,
        and raised by `train` at its end if it was the last word.
        """

    def failed(self, step: int, error: BaseException) -> None:
        """Called with the exception that ends the run, when all that could be saved is saved."""

    def closed(self) -> None:
        """Called at the very end, after success and failure, last hook first."""

    def next_due(self, step: int) -> int | None:
        """Return the first step after `step` at which to call `after_step`; None to call it after every call.

        It must be a pure function of the step. With `steps_per_call`, no call runs past such a step.
        """
        return None


def defines(hook: object, name: str) -> bool:
    """Whether a hook has one of the methods that `Hook` only documents; data of that name is none."""
    method = getattr(hook, name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(Hook, name)


def name_of(hook: object) -> str:
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


# The hooks that `train` is given, checked before anything is opened.

_METHODS = ("begin", "after_step", "before_step", "end", "next_due", "get_state", "set_state")
_TOLD = ("before_save", "saved", "failed", "closed")
"""Methods of hooks, too; data of that name is none."""
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
        raise TypeError(f"hooks={hooks!r}: must be a sequence of hooks, got {kind(hooks)}") from None
    for i, hook in enumerate(found):
        if isinstance(hook, type):
            raise TypeError(f"hooks[{i}]={hook.__name__} is a class; give an instance: {hook.__name__}(...)")
        for method in _METHODS:
            if hasattr(hook, method) and not callable(getattr(hook, method)):
                raise TypeError(f"hooks[{i}].{method}: must be a function, got {kind(getattr(hook, method))}")
        is_told = any(callable(getattr(hook, method, None)) for method in _TOLD)
        if not is_told and not any(hasattr(hook, method) for method in _METHODS):
            way = ""
            if callable(hook):
                name = getattr(hook, "__name__", "fn")
                way = (
                    f". A function becomes a hook by jstep.every(100, {name}), which calls it every 100 steps; "
                    f"a callback of evaluations belongs in {_OF_EVALUATIONS}"
                )
            raise TypeError(f"hooks[{i}]={shown(hook)}: has none of {', '.join(_METHODS + _TOLD)}; see jstep.Hook{way}")
        if callable(hook) and not is_told and not any(hasattr(hook, name) for name in _OF_HOOKS):
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


def check_hook_result(result: object, state: TrainState, step: int, by: str) -> tuple[bool, TrainState]:
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
    warn_of_copies(state, given.params, given.slots, f"{by} returned a state with other parameters")
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
    leaf = trees.native(leaf, path, by)
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
    return jax.device_put(trees.owned(leaf, by), was.sharding if is_placed else None)


def _without_aliases(leaves: list[Any]) -> list[Any]:
    """Copy leaves that occur more than once: an array cannot be donated twice."""
    seen: set[int] = set()
    distinct = []
    for leaf in leaves:
        distinct.append(leaf.copy() if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return distinct

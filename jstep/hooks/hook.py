"""The `Hook` protocol, the check of `train(hooks=…)`, and the results that hooks may return."""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import describe_type, format_value, hook_name
from jstep.core.exceptions import note
from jstep.core.meshes import internal_transfers
from jstep.core.recorded_calls import ShownAsTyped
from jstep.slots.matching import describe_difference
from jstep.slots.roles import roles_in
from jstep.state.copies import warn_of_copies
from jstep.state.global_step import check_alive
from jstep.state.train_state import TrainState
from jstep.training.metrics import Metrics


class Hook(ShownAsTyped):
    """Callbacks around the steps of `train`.

    Subclass it, or define only the methods that are needed. Besides the methods below, `train`
    calls `get_state`, `set_state`, and `close()` after `closed`. It also calls `flush()` before
    each checkpoint exists, on process 0 in a background thread, so that a log is never older than a
    checkpoint.

    Steps are integers on the host: the number of training steps completed. In log lines, rows,
    checkpoints, fingerprints and exceptions, step N is the update N − 1 → N, which used batch
    N − 1, or the state after it. In `before_step`, `replay(step=N)`, the first step of a stage, and
    lines about stalls or compilations, N is the step of the state before the update N → N + 1.

    Reading values of `state` or `metrics` waits for the device, so do it only when due. The state
    is donated to the next step, so copy what the hook needs later.

    A hook keeps its state across restarts if it has both `get_state()` and `set_state(value)`. The
    value may contain numbers, strings, bytes, None, lists, tuples, dicts, NumPy arrays, JAX arrays
    and random generators. `get_state` is called once after `begin`, so that a wrong value raises an
    error early, and for each checkpoint. After a restart, `set_state` is called with the saved
    value after `begin`; if it returns True, no step is run. The value is matched to a hook by its
    attribute `key`, a string that no other hook has, or else by the name of the class, the
    attribute `watches`, and the position.

    `train` calls `end` only if no exception was raised, and `closed` in any case, even if `begin`
    was not called.

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
        """Called once before the first step, with the restored state.

        If it returns True, no step is run.
        """

    def before_step(self, step: int, state: TrainState) -> None:
        """Called before each call of the compiled step, with the step of the state."""

    def after_step(
        self, step: int, state: TrainState, metrics: Metrics
    ) -> "bool | TrainState | None":
        """Called when due, after the update that produced `step`.

        If it returns True, the run stops after this step. If it returns a state, that state
        replaces the state of the run; it must have the same step, structure, shapes and dtypes.
        Later hooks and the checkpoint of this step see it.

        A run that is started again resumes, until the hook returns True again. To keep it stopped,
        remember the decision in `get_state`, and return it from `set_state`.
        """

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Called once after the last step if no exception was raised.

        It may return a state, like `after_step`. The `end`s of all hooks are one transaction: if
        one of them fails, or the process is killed, a restart calls all of them again, with the
        states that the hooks had before. If all of them succeeded, a restart does not call them
        again, unless the run continues to a larger `last_step`. A restart that runs no step in the
        middle of a run, because of a hook's `begin` or a smaller `last_step`, calls none of them.
        """

    def before_save(self, step: int) -> bool | None:
        """Called before each checkpoint of a step.

        If it returns True, on any process, nothing is saved. All earlier rows of metrics have been
        delivered. An exception also prevents the save, and ends the run.
        """

    def saved(self, step: int, path: str) -> None:
        """Called on process 0 for each permanent checkpoint once it is complete and on disk.

        It is called in a background thread, one call at a time; the checkpoint is not deleted
        before it returns. An exception is logged; `train` raises it at its end unless a later call
        succeeded. To read a checkpoint, open another `Saver`: the run's own may be waiting for this
        call, so it raises a RuntimeError.
        """

    def failed(self, step: int, error: BaseException) -> None:
        """Called with the exception that ends the run, after all that can be saved is saved."""

    def closed(self) -> None:
        """Called at the end, after success and failure, last hook first."""

    def next_due(self, step: int) -> int | None:
        """Return the next step after `step` at which to call `after_step`; None for every call.

        It must be a pure function of the step. With `steps_per_call`, no call runs past such a
        step.
        """
        return None


def defines(hook: object, name: str) -> bool:
    method = getattr(hook, name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(Hook, name, None)


def call_named(hook: object, method: str, *args: Any) -> Any:
    try:
        return getattr(hook, method)(*args)
    except BaseException as error:
        note(error, f"jstep: in {hook_name(hook)}.{method}")
        raise


# The hooks that `train` is given, checked before anything is opened.

_HOOK_METHODS = (
    "after_step",
    "before_step",
    "end",
    "next_due",
    "before_save",
    "saved",
    "failed",
    "closed",
)
_CALLBACK_METHODS = ("begin", "get_state", "set_state")
"""Methods that callbacks of evaluations have, too."""
_FILE_METHODS = ("flush", "close")
"""Methods that files have, too: an object with nothing else is no hook."""
_ALL_METHODS = (*_HOOK_METHODS, *_CALLBACK_METHODS, *_FILE_METHODS)

_NAMES_ELSEWHERE = {
    "on_train_begin": "begin",
    "on_train_start": "begin",
    "on_fit_start": "begin",
    "after_create_session": "begin",
    "setup": "begin",
    "on_train_batch_begin": "before_step",
    "on_train_batch_start": "before_step",
    "on_batch_begin": "before_step",
    "on_step_begin": "before_step",
    "before_run": "before_step",
    "on_train_batch_end": "after_step",
    "on_batch_end": "after_step",
    "on_step_end": "after_step",
    "after_run": "after_step",
    "on_epoch_end": "after_step",
    "on_train_end": "end",
    "on_fit_end": "end",
    "on_save_checkpoint": "get_state",
    "state_dict": "get_state",
    "on_load_checkpoint": "set_state",
    "load_state_dict": "set_state",
    "on_exception": "failed",
    "teardown": "closed",
}
"""Method of a callback of Keras, Lightning, the Hugging Face Trainer or `tf.train` → that of a
hook."""

_SIMILAR = 0.84
"""The least similarity at which a name is taken for a misspelled method. `is_closed`, which is not
one, has 0.8 with `closed`."""


def check_spellings(
    hook: object, argument: str, kind: str, known: Sequence[str] = _ALL_METHODS
) -> None:
    """Reject an object with a method that looks like a hook's, and that nothing would call.

    Args:
        hook: The object.
        argument: What the error calls it.
        kind: What the object should be, with its article.
        known: The methods that are called on such an object.
    """
    missing = [name for name in known if not defines(hook, name)]
    for name in _own_methods(hook):
        if name in _ALL_METHODS:
            continue
        meant = _nearest(name, missing)
        if meant:
            raise TypeError(
                f"{argument}={format_value(hook)}: has a method {name!r}, which a run does not "
                f"call; rename it: {kind} has {meant!r} (or begin its name with an underscore)"
            )


def _own_methods(hook: object) -> list[str]:
    """Return the names of the methods that the user's classes of an object define."""
    classes = type(hook).__mro__[:-1]  # without `object`
    jstep_classes = [cls for cls in classes if cls.__module__.partition(".")[0] == "jstep"]
    # A method that a hook of jstep has, and a subclass overrides, is meant: `save` of a
    # CheckpointSaverHook.
    overridden = {name for cls in jstep_classes for name in vars(cls)}
    names: list[str] = []
    for cls in classes:
        if cls in jstep_classes:
            continue
        for name, value in vars(cls).items():
            is_method = callable(value) and not isinstance(value, type)
            if is_method and not name.startswith("_") and name not in overridden:
                names.append(name)
    return names


def _nearest(name: str, missing: Sequence[str]) -> str:
    """Return the method that a name is a misspelling of; empty if it is not one."""
    if name == "get_stats":  # one letter beside `get_state`, and meant
        return ""
    for known in missing:
        if _letters(name) == _letters(known):
            return known
    similar = difflib.get_close_matches(name, missing, n=1, cutoff=_SIMILAR)
    return similar[0] if similar else ""


def _letters(name: str) -> str:
    """Return the same letters for `after_step`, `afterStep` and `on_after_step`."""
    return name.removeprefix("on_").replace("_", "").casefold()


def list_of_hooks(hooks: Sequence[Any]) -> list[Any]:
    if hasattr(hooks, "after_step") or not isinstance(hooks, Iterable):
        raise TypeError(
            f"hooks={format_value(hooks)}: must be a sequence of hooks, got {describe_type(hooks)}"
        )
    checked = list(hooks)
    first_index: dict[int, int] = {}
    for i, hook in enumerate(checked):
        first = first_index.setdefault(id(hook), i)
        if first != i:
            raise ValueError(
                f"hooks[{i}]={format_value(hook)}: must be another object than "
                f"hooks[{first}], or each step would call it "
                "twice; leave it out, or make a second one"
            )
        if isinstance(hook, type):
            raise TypeError(
                f"hooks[{i}]={hook.__name__} is a class; give an instance: {hook.__name__}(...)"
            )
        check_spellings(hook, f"hooks[{i}]", "a hook")
        if not _is_hook(hook):
            raise TypeError(
                f"hooks[{i}]={format_value(hook)}: must be a hook, with some of the methods of "
                f"jstep.Hook{_name_in_jstep(hook)}. A function becomes one by "
                "jstep.every(100, fn); a callback of evaluations belongs in "
                "jstep.EvaluationHook(evaluate, every_n_steps=…, callbacks=[…])"
            )
    return checked


def _is_hook(hook: object) -> bool:
    if type(hook) is Hook:
        return True
    if isinstance(hook, Hook):
        return any(defines(hook, name) for name in _ALL_METHODS)
    if callable(hook):  # a callback, if it has nothing else than these
        return any(defines(hook, name) for name in _HOOK_METHODS)
    return any(defines(hook, name) for name in (*_HOOK_METHODS, *_CALLBACK_METHODS))


def _name_in_jstep(hook: object) -> str:
    """Name the method of a hook that an object has under another name, for an error message."""
    names = [name for name in _NAMES_ELSEWHERE if callable(getattr(hook, name, None))]
    if names:
        return f": {names[0]} is {_NAMES_ELSEWHERE[names[0]]} here"
    for name, value in getattr(hook, "__dict__", {}).items():  # a namespace of functions
        if name.startswith("_") or not callable(value):
            continue
        meant = _nearest(name, _ALL_METHODS)
        if meant:
            return f": {name} is none, {meant} is one"
    return ""


# Return values of hooks: None, a bool, or a state to continue with.


@dataclasses.dataclass(frozen=True)
class StopWith:
    state: TrainState


def as_hook_result(
    result: object, state: TrainState, step: int, caller: str
) -> tuple[bool, TrainState]:
    """Return whether the run ends after this step, and the state to continue with."""
    if isinstance(result, bool | np.bool_ | None):
        return bool(result), state
    if isinstance(result, TrainState):
        return False, as_returned_state(result, state, step, f"{caller} returned")
    if isinstance(result, StopWith):
        return True, as_returned_state(result.state, state, step, f"{caller} returned")
    hint = "; make a bool of it: bool(…)" if trees.is_array(result) else ""
    raise TypeError(
        f"{caller} returned {describe_type(result)}: must be None, True (stop after this step), or "
        f"a TrainState to continue with{hint}"
    )


def as_returned_state(other: TrainState, state: TrainState, step: int, subject: str) -> TrainState:
    """Return a state that replaces another one, placed like it; errors begin with `subject`."""
    if other is state:
        return state
    # A hook may build its state by hand; its slots keep the roles that they have in the run.
    other = TrainState(other.params, other.slots, other.global_step, roles=roles_in(state))
    new = trees.leaves_with_paths(other)
    old = trees.leaves_with_paths(state)
    if trees.structure(other) != trees.structure(state):
        different = describe_difference(other, state) or "the same paths, in other containers"
        raise ValueError(f"{subject} a state of another structure: {different}")
    check_alive(other)
    warn_of_copies(state, other.params, other.slots, f"{subject} a state with other parameters")
    with internal_transfers():
        leaves: list[Any] = []
        for (path, leaf), (_, old_leaf) in zip(new, old, strict=True):
            leaves.append(_placed_like(leaf, old_leaf, path, subject))
        leaves = _copy_shared(leaves)
        if other.global_step is not state.global_step:
            new_step = int(np.asarray(other.global_step))
            if new_step != step:
                raise ValueError(
                    f"{subject} a state at step {new_step}: must be at "
                    f"step {step}; only the run takes steps: in a loop, by "
                    "run.train_step(*batch) if it is given no batches"
                )
    return jax.tree.unflatten(trees.structure(state), leaves)


def _copy_shared(leaves: list[Any]) -> list[Any]:
    """Copy each array that is there twice, such as parameters that become a target network's.

    The next step donates each leaf, and XLA refuses to donate one buffer twice.
    """
    seen: set[int] = set()
    distinct: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and id(leaf) in seen:
            leaf = jax.numpy.copy(leaf)
        seen.add(id(leaf))
        distinct.append(leaf)
    return distinct


def _placed_like(leaf: Any, old_leaf: Any, path: str, subject: str) -> Any:
    """Return a leaf placed like the one that it replaces, which must be of the same kind."""
    if leaf is old_leaf:
        return leaf
    leaf = trees.native(leaf, path, subject)
    if not trees.is_array(leaf) or leaf.shape != old_leaf.shape or leaf.dtype != old_leaf.dtype:
        want = f"{old_leaf.dtype} of shape {old_leaf.shape}"
        got = describe_type(leaf)
        if trees.is_array(leaf):
            got = f"{leaf.dtype} of shape {leaf.shape}"
        raise ValueError(f"{subject} a state whose {path!r} is {got}: must be {want}, as before")
    if trees.is_weak(leaf):
        leaf = leaf.astype(leaf.dtype)  # otherwise the step would be compiled again
    if isinstance(leaf, jax.Array) and leaf.sharding == old_leaf.sharding:
        return leaf
    # A NumPy array in place of an uncommitted array stays uncommitted, or the step would be
    # compiled again.
    is_placed = getattr(old_leaf, "committed", True) or isinstance(leaf, jax.Array)
    sharding = old_leaf.sharding if is_placed else None
    return jax.device_put(trees.copy_numpy(leaf, subject), sharding)

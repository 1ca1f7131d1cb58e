"""Explanations of JAX errors in calls of a training step, derived from its arguments."""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jstep.core import trees
from jstep.core.checks import explain_jax, note
from jstep.state.train_state import TrainState, require_alive

_ON_ONE_MESH = (
    "The state and the batch, or arrays that the loss closes over, are on different devices or on different meshes. Put"
    " all of them on one mesh object: jstep.shard_state(state, mesh), jstep.shard_batch(batch, mesh)."
)

_CAPTURED = (
    "The state and the batch are on the same devices, so the loss probably closes over an array that is on others, "
    "such as one sharded over a mesh, or uses another mesh. Pass the array to the step as an argument, or keep it in "
    "the state (TrainState.create(..., model_state=...), has_model_state=True), and place both on one mesh: "
    "jstep.shard_state(state, mesh), jstep.shard_batch(batch, mesh)."
)
_OF_DEVICES = re.compile(r"incompatible devices|device assignment|mesh.*should match")
"""What JAX's errors about devices and meshes have in common."""

_A_LIST = (
    "jstep: the batch is a list, which is one argument; a tuple is several: give (x, y). With torch's DataLoader pass "
    "collate_fn=lambda rows: tuple(default_collate(rows)); map(tuple, loader) would lose the loader's position"
)


def explain_a_list(error: BaseException, args: Sequence[Any]) -> None:
    """Add a note to an error of a function of the batch if the batch is a list, such as torch's loader gives.

    Args:
        error: The error that the call raised.
        args: The arguments that the batch stands for.
    """
    if isinstance(error, TypeError | AttributeError) and len(args) == 1 and isinstance(args[0], list):
        note(error, _A_LIST)


_MISSING_ARGUMENT = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)")
_PASSED_WITH = {
    "rng": "rng=key",
    "averages": "use_averages=True",
    "model_state": "has_model_state=True",
}
"""Arguments of a loss → what `minimize` passes them with."""


def _explain_missing_arguments(error: BaseException, state: Any) -> None:
    """Add a note to the error of a loss that lacks an argument which `minimize` passes only on request."""
    found = _MISSING_ARGUMENT.search(str(error)) if isinstance(error, TypeError) else None
    if found is None:
        return
    options = {name: option for name, option in _PASSED_WITH.items() if f"'{name}'" in found[1]}
    if not options and isinstance(state, TrainState) and state.model_state is not None:
        options["model_state"] = _PASSED_WITH["model_state"]
    for name, option in options.items():
        note(error, f"jstep: if this is the loss, minimize(..., {option}) passes {name} to it")


def is_spent(state: Any) -> bool:
    """Return whether a state was donated to an earlier step."""
    step = getattr(state, "global_step", None)
    return isinstance(step, jax.Array) and not trees.is_traced(step) and step.is_deleted()


def explain(error: BaseException, state: Any, args: Any, *, was_spent: bool, donates: bool) -> None:
    """Raise a clearer error if the arguments reveal the cause, or add a note to `error`.

    Args:
        error: The error that JAX or the loss raised.
        state: The state passed to the step.
        args: The batch.
        was_spent: Whether the state was donated before the call; a call that fails while it runs also donates it.
        donates: Whether the step donates its state.

    Raises:
        FloatingPointError: JAX debugged a NaN in a step that had donated its state.
        RuntimeError: A leaf was donated to an earlier step.
        ValueError: Two leaves of the state, or a leaf and an argument, share one buffer.
    """
    if not isinstance(error, RuntimeError | ValueError):
        if type(error).__name__ == "ShardingTypeError" and _is_on_one_device((state, args)):
            note(error, _CAPTURED)
        _explain_missing_arguments(error, state)
        explain_jax(error)
        return
    if was_spent or not is_spent(state):
        require_alive(state, error)
        if donates:
            refuse_shared_buffers(state, args, error)
    elif _is_of_a_nan(error):
        raise FloatingPointError(
            "the step produced a NaN or an infinity, and JAX can no longer locate it, because the state passed to the "
            "step is donated. Set jax_debug_nans before the first step of the run, which then donates nothing, or call "
            "jstep.find_nonfinite(train_step, state, ...)"
        ) from error
    if len(_placements((state, args))) > 1:
        note(error, _ON_ONE_MESH)
    elif _OF_DEVICES.search(str(error)):
        note(error, _CAPTURED)


def _is_of_a_nan(error: BaseException | None) -> bool:
    """Return whether JAX raised the error while debugging a NaN."""
    while error is not None and "FloatingPoint" not in type(error).__name__:
        error = error.__context__
    return error is not None


def refuse_shared_buffers(
    state: Any, args: Any, cause: BaseException | None = None, *, by_identity: bool = False
) -> None:
    """Reject a state that cannot be donated, because one buffer would be donated twice or used elsewhere.

    For arrays on one device, JAX reports this without their names; for arrays on a mesh, the process crashes.

    Args:
        state: The state to be donated.
        args: The other arguments of the step.
        cause: The error that JAX raised, if any.
        by_identity: Whether the leaves of the state are known to share no buffers, so that it suffices to look for
            its arrays among `args`.

    Raises:
        ValueError: Two leaves share one buffer.
    """
    if by_identity:
        given = {id(leaf) for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)}
        if not given or given.isdisjoint(map(id, jax.tree.leaves(state))):
            return
    seen: dict[Any, str] = {}
    for path, leaf in trees.leaves_with_paths(state):
        buffer = _buffer(leaf)
        if buffer is not None and seen.setdefault(buffer, path) != path:
            raise ValueError(
                f"state: {seen[buffer]!r} and {path!r} share one buffer, which a compiled step cannot donate twice; "
                f"copy one of them: jnp.copy(state.{path.split('/')[0]}…)"
            ) from cause
    for path, leaf in trees.leaves_with_paths(args):
        buffer = _buffer(leaf)
        if buffer in seen:
            raise ValueError(
                f"state: {seen[buffer]!r} and the step's argument {path!r} share one buffer, which a compiled step "
                "cannot both donate and read; pass a copy (jnp.copy), or create the step with donate=False"
            ) from cause


def _buffer(leaf: Any) -> Any:
    """Return an identifier of the memory of an array; None if it has none on this process."""
    if not isinstance(leaf, jax.Array) or trees.is_traced(leaf) or leaf.is_deleted() or not leaf.size:
        return None
    leaf = trees.key_data(leaf)
    if not leaf.sharding.addressable_devices:
        return None
    part = leaf.addressable_data(0)
    try:
        return next(iter(part.devices())), part.unsafe_buffer_pointer()
    except Exception:  # a backend without buffer pointers
        return id(leaf)


def _is_on_one_device(tree: Any) -> bool:
    """Return whether no array is on several devices; then none of them can raise an error about shardings."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not trees.is_traced(x)]
    return all(len(array.sharding.device_set) == 1 for array in arrays)


def _placements(tree: Any) -> set[Any]:
    """Return the meshes, or sets of devices, that arrays are committed to."""
    return {
        leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else frozenset(leaf.sharding.device_set)
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not trees.is_traced(leaf) and leaf.committed
    }

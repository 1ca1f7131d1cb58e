"""Explanations of errors of a training step by its arguments, and states that cannot be donated."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.checks import describe_type
from jstep.core.exceptions import explain_jax, note
from jstep.state.global_step import require_alive
from jstep.state.train_state import TrainState

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
"""The pattern of JAX's errors about devices and meshes."""

_A_LIST = (
    "jstep: the batch is a list, which is one argument; a tuple is several: give (x, y). With torch's DataLoader pass "
    "collate_fn=lambda rows: tuple(default_collate(rows)); map(tuple, loader) would lose the loader's position"
)


_A_CONTAINER = (
    "jstep: the batch is {0}, which is one argument; a tuple is several. Let the function take the batch as one and "
    "read {1} from it, or give tuples: ({2})"
)


def explain_one_argument(error: BaseException, args: Sequence[Any]) -> None:
    """Add a note to an error of a function of the batch if the batch is one argument, meant as several."""
    if len(args) != 1 or not isinstance(error, TypeError | AttributeError):
        return
    # A list, such as torch's loader gives, or a dict, a NamedTuple or another container.
    batch = args[0]
    lacks_parts = set(_missing_arguments(error)) - set(_PASSED_WITH) or _TOO_MANY.search(str(error))
    if isinstance(batch, list):
        note(error, _A_LIST)
    elif lacks_parts and not jax.tree_util.all_leaves([batch]):
        if isinstance(batch, Mapping):
            parts = [f"batch[{key!r}]" for key in batch]
        else:
            parts = [f"batch.{key}" for key in getattr(batch, "_fields", ())] or ["its parts"]
        note(error, _A_CONTAINER.format(describe_type(batch), " and ".join(parts[:3]), ", ".join(parts[:3])))


_MISSING_ARGUMENT = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)")


def _missing_arguments(error: BaseException) -> list[str]:
    match = _MISSING_ARGUMENT.search(str(error)) if isinstance(error, TypeError) else None
    return [] if match is None else re.findall(r"'(\w+)'", match[1])


_TOO_MANY = re.compile(r"takes \d+ positional arguments? but \d+ (?:was|were) given")  # others are keyword-only
_PASSED_WITH = {"rng": "rng=key", "averages": "use_averages=True", "model_state": "has_model_state=True"}
"""Arguments of a loss → the argument of `minimize` that passes them."""


def explain(error: BaseException, state: Tree, args: Any, *, donates: bool) -> None:
    """Raise a clearer error if the arguments reveal the cause, or add a note to `error`.

    `state` was not donated before the call; a call that fails while it runs donates it.
    """
    arrays = [x for x in jax.tree.leaves((state, args)) if isinstance(x, jax.Array) and not trees.is_traced(x)]
    if not isinstance(error, RuntimeError | ValueError):
        if type(error).__name__ == "ShardingTypeError" and all(len(x.sharding.device_set) == 1 for x in arrays):
            note(error, _CAPTURED)
        lacking = _missing_arguments(error)
        missing = [name for name in _PASSED_WITH if name in lacking]
        if lacking and not missing and isinstance(state, TrainState) and state.model_state is not None:
            missing = ["model_state"]
        for name in missing:
            note(error, f"jstep: if this is the loss, minimize(..., {_PASSED_WITH[name]}) passes {name} to it")
        if isinstance(error, TypeError):  # from JAX, about a whole module in place of its arrays
            argument, tree = ("params", state.params) if isinstance(state, TrainState) else ("state", state)
            trees.require_arrays(tree, argument, trees.keep_arrays(argument))
        explain_jax(error)
        return
    if not is_spent(state):
        require_alive(state, error)
        if donates:
            refuse_shared_buffers(state, args, error)
    where = {
        leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else frozenset(leaf.sharding.device_set)
        for leaf in arrays
        if leaf.committed
    }
    if len(where) > 1:
        note(error, _ON_ONE_MESH)
    elif _OF_DEVICES.search(str(error)):
        note(error, _CAPTURED)


# Memory that cannot be donated.


def is_spent(state: Tree) -> bool:
    step = getattr(state, "global_step", None)
    return isinstance(step, jax.Array) and not isinstance(step, jax.core.Tracer) and step.is_deleted()


def refuse_what_crashes(state: Tree, args: Any, *, is_known: bool, donates: bool) -> None:
    """Reject states that JAX reports on one device, but that crash the process on a mesh.

    `is_known`: a step returned the state, so that its leaves share no buffers.
    """
    require_alive(state)
    if not donates:
        return
    arrays = [*jax.tree.leaves(state), *(leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))]
    if not is_known or len(set(map(id, arrays))) < len(arrays):
        refuse_shared_buffers(state, args)


def refuse_shared_buffers(state: Tree, args: Any, cause: BaseException | None = None) -> None:
    """Reject a state with a buffer that would be donated twice or is used by another argument."""
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

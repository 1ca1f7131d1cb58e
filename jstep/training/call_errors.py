"""Why JAX refused a call of a step, told from the arrays it was given."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from jstep.core import trees
from jstep.state import require_alive

_ON_ONE_MESH = (
    "The state and the batch, or arrays that the loss closes over, are on different devices or on different meshes. Put"
    " all of them on one mesh object: jstep.shard_state(state, mesh), jstep.shard_batch(batch, mesh)."
)


def is_spent(state: Any) -> bool:
    """Whether a state was donated to an earlier step."""
    step = getattr(state, "global_step", None)
    return isinstance(step, jax.Array) and not trees.is_traced(step) and step.is_deleted()


def explain(error: BaseException, state: Any, args: Any, *, was_spent: bool, donates: bool) -> None:
    """Raises a clearer error if the arguments show what is wrong, or adds a note to `error`.

    Args:
        error: What JAX raised.
        state: The state that the step was given.
        args: The batch.
        was_spent: Whether the state was spent before the call; one that fails while it runs spends it.
        donates: Whether the step donates its state.

    Raises:
        FloatingPointError: JAX looked for the operation that made a NaN, in a step that had donated its state.
        RuntimeError: A leaf was donated to an earlier step.
        ValueError: Two leaves of the state, or one of them and an argument, are one buffer.
    """
    if was_spent or not is_spent(state):
        require_alive(state, error)
        if donates:
            refuse_shared_buffers(state, args, error)
    elif _is_of_a_nan(error):
        raise FloatingPointError(
            "the step made a NaN or an infinity, and JAX cannot say where any more: the state that the step was given "
            "is donated. Set jax_debug_nans before the first step of the run, which then donates nothing, or call "
            "jstep.find_nonfinite(train_step, state, ...)"
        ) from error
    if len(_placements((state, args))) > 1:
        error.add_note(_ON_ONE_MESH)


def _is_of_a_nan(error: BaseException | None) -> bool:
    """Whether JAX raised it while it looked for the operation that made a NaN."""
    while error is not None and "FloatingPoint" not in type(error).__name__:
        error = error.__context__
    return error is not None


def refuse_shared_buffers(
    state: Any, args: Any, cause: BaseException | None = None, *, by_identity: bool = False
) -> None:
    """Refuses a state that cannot be donated, because one buffer would be donated twice or used elsewhere.

    JAX says so of arrays on one device, without their names; of arrays on a mesh, the process crashes.

    Args:
        state: The state that is to be donated.
        args: What the step is given besides.
        cause: What JAX raised, if it did.
        by_identity: Whether the state is known to share nothing within itself, so that it is enough to look for its
            own arrays among `args`.

    Raises:
        ValueError: Two leaves are one buffer.
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
                "cannot both donate and read; pass a copy (jnp.copy), or make the step with donate=False"
            ) from cause


def _buffer(leaf: Any) -> Any:
    """What tells the memory of an array from that of others; None if it has none on this process."""
    if not isinstance(leaf, jax.Array) or trees.is_traced(leaf) or leaf.is_deleted() or not leaf.size:
        return None
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not leaf.sharding.addressable_devices:
        return None
    part = leaf.addressable_data(0)
    try:
        return next(iter(part.devices())), part.unsafe_buffer_pointer()
    except Exception:  # a backend that does not tell
        return id(leaf)


def _placements(tree: Any) -> set[Any]:
    """The meshes, or sets of devices, that arrays are committed to."""
    return {
        leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else frozenset(leaf.sharding.device_set)
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not trees.is_traced(leaf) and leaf.committed
    }

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
        ValueError: Two leaves of the state are one buffer.
    """
    if was_spent or not is_spent(state):
        require_alive(state, error)
        if donates:
            _refuse_shared_buffers(state, error)
    elif _is_of_a_nan(error):
        raise FloatingPointError(
            "the step made a NaN or an infinity, and JAX cannot say where any more: the state that the step was given "
            "is donated. Set jax_debug_nans before the first step of the run, which then donates nothing, or call "
            "jstep.find_nonfinite(train_step, state, ...)"
        ) from error
    if len(_places((state, args))) > 1:
        error.add_note(_ON_ONE_MESH)


def _is_of_a_nan(error: BaseException | None) -> bool:
    """Whether JAX raised it while it looked for the operation that made a NaN."""
    while error is not None and "FloatingPoint" not in type(error).__name__:
        error = error.__context__
    return error is not None


def _refuse_shared_buffers(state: Any, cause: BaseException) -> None:
    seen: dict[tuple[Any, int], str] = {}
    for path, leaf in trees.leaves_with_paths(state):
        if not isinstance(leaf, jax.Array) or trees.is_traced(leaf) or not leaf.addressable_shards:
            continue
        part = leaf.addressable_shards[0].data
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) or not part.size:
            continue
        buffer = part.devices().copy().pop(), part.unsafe_buffer_pointer()
        if seen.setdefault(buffer, path) != path:
            raise ValueError(
                f"state: {seen[buffer]!r} and {path!r} share one buffer, which a compiled step cannot donate twice; "
                f"copy one of them: jnp.copy(state.{path.split('/')[0]}…)"
            ) from cause


def _places(tree: Any) -> set[Any]:
    """The meshes, or sets of devices, that arrays are committed to."""
    return {
        leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else frozenset(leaf.sharding.device_set)
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not trees.is_traced(leaf) and leaf.committed
    }

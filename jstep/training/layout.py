"""The layout of a state, which travels with a state that a step returned, and checks of its memory."""

import weakref
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.meshes import mesh_of
from jstep.state.global_step import require_alive
from jstep.state.train_state import TrainState, keep_roles


class Layout:
    """The places of the leaves of a state, for which its program is compiled. There is one object of each layout.

    Args:
        shardings: The sharding of each leaf of a state on a mesh; None for one on a single device, or a traced one.
        mesh: The mesh, or None.
    """

    def __init__(self, shardings: Any = None, mesh: Any = None) -> None:
        self.shardings, self.mesh = shardings, mesh

    def __reduce__(self) -> Any:
        return type(None), ()  # copies of a state, also in other processes, are inspected


_ON_ONE_DEVICE = Layout()
_LAYOUTS: "weakref.WeakValueDictionary[Any, Layout]" = weakref.WeakValueDictionary()


def layout_of(state: Any) -> Layout:
    """Inspect where a state is."""
    mesh = mesh_of(state)
    if mesh is None:
        return _ON_ONE_DEVICE
    everywhere = NamedSharding(mesh, PartitionSpec())
    leaves, treedef = trees.flatten(state)
    found = (getattr(leaf, "sharding", everywhere) for leaf in leaves)
    shardings = [one if isinstance(one, NamedSharding) else everywhere for one in found]
    return _LAYOUTS.setdefault((treedef, tuple(shardings)), Layout(treedef.unflatten(shardings), mesh))


def known_layout(state: Any) -> Layout | None:
    """The layout of a state that a step returned, so that its leaves are arrays; None for any other."""
    return getattr(state, "_layout", None)


def handed_on(state: Any, new: Any, layout: Layout, *, donated: bool) -> Any:
    """Return the new state of a step, which knows where it is: where the old one was, unless the batch moved it.

    On a mesh, none of its leaves shares memory with another, or with the old state: else the state does not know. It
    keeps the roles of the old one, as the step may have been compiled for a state made by hand.
    """
    if not isinstance(new, TrainState):
        return new
    if getattr(new, "roles", None) is not getattr(state, "roles", None):
        new = keep_roles(state, new)
    step = new.global_step
    if not isinstance(step, jax.Array) or isinstance(step, jax.core.Tracer):
        return new
    if donated if layout.mesh is not None else type(step.sharding) is not NamedSharding:
        object.__setattr__(new, "_layout", layout)  # a TrainState is frozen
    return new


# Memory that cannot be donated.


def is_spent(state: Any) -> bool:
    """Return whether a state was donated to an earlier step."""
    step = getattr(state, "global_step", None)
    return isinstance(step, jax.Array) and not trees.is_traced(step) and step.is_deleted()


def refuse_what_crashes(state: Any, args: Any, *, is_known: bool, donates: bool) -> None:
    """Refuse what JAX reports for a state on one device, but what ends the process for one on a mesh.

    Args:
        state: The state.
        args: The other arguments of the step.
        is_known: Whether a step returned the state, so that its leaves share no buffers.
        donates: Whether the step donates the state.

    Raises:
        RuntimeError: A leaf was donated.
        ValueError: Two leaves, or a leaf and an argument, share one buffer.
    """
    require_alive(state)
    if not donates:
        return
    arrays = [*jax.tree.leaves(state), *(leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))]
    if not is_known or len(set(map(id, arrays))) < len(arrays):
        refuse_shared_buffers(state, args)


def refuse_shared_buffers(state: Any, args: Any, cause: BaseException | None = None) -> None:
    """Refuse a state that cannot be donated, because one buffer would be donated twice or used elsewhere.

    Args:
        state: The state to be donated.
        args: The other arguments of the step.
        cause: The error that JAX raised, if any.

    Raises:
        ValueError: Two leaves share one buffer.
    """
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

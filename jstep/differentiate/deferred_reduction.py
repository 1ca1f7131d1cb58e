"""Reduction of microbatch gradients over the devices once per step instead of once per microbatch.

On Explicit axes, JAX types determine where a reduction takes place. Parameters of type `reduced` over the batch axis
have gradients of type `unreduced`, which are summed on each device and reduced when their type is changed back. JAX
rejects such parameters outside of matrix products, so the gradients of those with other uses are accumulated as usual.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import meshes, trees
from jstep.core.jaxprs import Operation, Subprogram, body_of, evaluate
from jstep.core.trees import Array
from jstep.differentiate import microbatches


def reduced_once(
    run: Callable[[Any, Any], Any], params: Any, parts: Any, loss: Callable[[Any, Any], Array], indices: list[int]
) -> Any:
    """Return `run(params, parts)` with parameters typed such that their gradients are reduced once, if possible.

    Args:
        run: Accumulates the gradients.
        params: The parameters.
        parts: The batch, as `split` returns it.
        loss: `loss(params, part)`, which is traced to see how it uses the parameters.
        indices: The indices of the parameters that are differentiated.
    """
    axes: set[str] = set()  # over which the rows of each part are sharded
    for leaf in jax.tree.leaves(parts):
        if meshes.explicit_mesh(leaf) is not None and meshes.dims_of(meshes.spec_of(leaf)):
            axes |= set(meshes.mesh_axes_of(meshes.dims_of(meshes.spec_of(leaf))[0]))
    leaves, treedef = trees.flatten(params)

    def is_able(leaf: Any) -> bool:
        if not axes or meshes.explicit_mesh(leaf) is None:
            return False
        spec = meshes.spec_of(leaf)
        split = set().union(*map(meshes.mesh_axes_of, meshes.dims_of(spec)))
        return not (split & axes or spec.reduced or spec.unreduced)

    able = [i for i in indices if is_able(leaves[i])]
    if able:
        first = microbatches.microbatch(parts, 0)
        traced = jax.make_jaxpr(lambda some: loss(treedef.unflatten(trees.with_leaves(leaves, able, some)), first))(
            [leaves[i] for i in able]
        )
        others = _other_uses(body_of(traced), [frozenset([i]) for i in able])
        able = [i for i in able if i not in others]
    if able:

        def typed(params: Any, parts: Any) -> Any:
            leaves, some = jax.tree.leaves(params), []
            for i in able:
                sharding: Any = jax.typeof(leaves[i]).sharding
                spec = PartitionSpec(*meshes.dims_of(sharding.spec), reduced=frozenset(axes))
                some.append(jax.sharding.reshard(leaves[i], NamedSharding(sharding.mesh, spec)))
            return run(treedef.unflatten(trees.with_leaves(leaves, able, some)), parts)

        try:
            return meshes.atomic(typed, params, parts)
        except Exception:  # JAX has no rule for an operation of the loss: fall back
            pass
    return run(params, parts)


def zeros_of_gradient(leaf: Array) -> Array:
    """Return zeros to accumulate the gradients of a leaf in: at least float32, with the type of its gradient."""
    dtype = trees.compute_dtype(leaf.dtype)
    mesh = meshes.explicit_mesh(leaf)
    if mesh is None:
        return jnp.zeros_like(leaf, dtype=dtype)
    spec = PartitionSpec(*meshes.dims_of(meshes.spec_of(leaf)), unreduced=meshes.spec_of(leaf).reduced)
    return jax.sharding.reshard(jnp.zeros(leaf.shape, dtype), NamedSharding(mesh, spec))


_SAME_ELEMENTS = frozenset({"convert_element_type", "copy", "copy_p", "reshape", "squeeze", "transpose"})


def _other_uses(body: Subprogram, given: Sequence[frozenset[int]]) -> set[int]:
    """Return which of the given arguments a program does not only use in matrix products.

    Args:
        body: The program.
        given: The arguments that each of its own is, possibly after changes of shape or dtype.
    """
    others: set[int] = set()

    def use(operation: Operation, taken: list[frozenset[int]]) -> list[frozenset[int]]:
        if operation.name in _SAME_ELEMENTS:
            return taken
        if operation.kind == "scan":
            consts, carried = operation.counts
            others.update(*taken[consts : consts + carried])
        if operation.kind in ("call", "scan"):
            others.update(_other_uses(operation.bodies[0], taken))
        elif operation.name != "dot_general":
            others.update(*taken)
        return [frozenset()] * len(operation.eqn.outvars)

    others.update(*evaluate(body, given, use, lambda constant: frozenset()))
    return others

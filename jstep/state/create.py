"""Creation of a state: which parameters it takes, and sharded without any device holding more than its shards."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jstep.core import trees
from jstep.core.meshes import internal_transfers, using_mesh, without_explicit_axes
from jstep.core.placement import compiles_only, is_shape
from jstep.sharding import layout


def is_abstract(mesh: Mesh | None, *given: Any) -> bool:
    """Whether to create an abstract state: from shapes, or for compile-only devices."""
    return any(map(is_shape, jax.tree.leaves(given))) or (compiles_only(mesh) and not _is_tracing())


def made_on(
    mesh: Mesh,
    make: Callable[[Any, Any], Any],
    params: Any,
    model_state: Any,
    shardings: Callable[[Any], Any],
    of_params: Callable[[Any], Any],
) -> Any:
    """Return the state `make(params, model_state)`, sharded over a mesh; shapes only if `is_abstract`.

    Args:
        mesh: The mesh.
        make: Creates the state.
        params: The parameters, or a function that returns them.
        model_state: Non-trained variables.
        shardings: Maps the state's shapes to its shardings.
        of_params: Maps the parameters to their shardings.
    """
    abstract = is_abstract(mesh, params, model_state)
    is_function = trees.is_function(params)

    def placed(tree: Any, shardings: Callable[[Any], Any]) -> Any:
        prepared = _shape_of if abstract else trees.host_leaf
        tree = jax.tree_util.tree_map_with_path(prepared, tree)
        return jax.tree.map(layout.put, tree, shardings(tree))

    with internal_transfers():
        given = None if is_function else placed(params, of_params)
        others = placed(model_state, lambda tree: jax.tree.map(lambda _: layout.everywhere(mesh), tree))

    def whole(given: Any, others: Any) -> Any:
        return make(params if is_function else given, others)

    def split(given: Any, others: Any) -> Any:
        def specs(state: Any) -> Any:
            return jax.tree.map(lambda sharding: sharding.spec, shardings(state))

        return without_explicit_axes(whole, given, others, place=specs, mesh=mesh.abstract_mesh)

    build = layout.planned if abstract else layout.build
    with using_mesh(mesh):
        if AxisType.Explicit in mesh.axis_types:
            # With Auto axes each device generates its own shard of random numbers; with Explicit axes each generates
            # the whole array, unless the function annotates shardings. JAX then rejects it with Auto axes.
            with contextlib.suppress(Exception):
                return build(split, shardings, given, others)
        return build(whole, shardings, given, others)


def _shape_of(keys: Any, leaf: Any) -> Any:
    """Return the shape of a leaf. Numbers and invalid leaves are treated as in an actual creation."""
    if is_shape(leaf) or trees.is_traced(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return jax.eval_shape(lambda: trees.as_leaf(leaf, trees.path_str(keys), copy=False))


def _is_tracing() -> bool:
    try:
        jax.sharding.get_mesh()
    except ValueError:  # get_mesh raises inside a function that JAX is tracing
        return True
    return False


NOT_TRAINED = frozenset({"BatchStat", "Cache", "Intermediate", "Perturbation", "RngState"})
"""Variable types of Flax NNX, by name: jstep does not import neural-network libraries."""


def refuse_untrained(params: Any) -> None:
    """Reject a whole `nnx.Module` as params, because its running statistics and random state would not be updated.

    Raises:
        TypeError: A variable is not trainable; names it, and how to split the model.
    """
    for keys, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable):
        kinds = _kinds(node) & NOT_TRAINED if _is_variable(node) else set()
        if kinds:
            raise TypeError(
                f"params: the variable at {trees.quoted(trees.path_str(keys))} is an nnx.{type(node).__name__}, which "
                "is not trained. Split the model, `graphdef, params, rest = nnx.split(model, nnx.Param, ...)`, call "
                "TrainState.create(params, optimizer, model_state=rest), and in a loss with has_model_state=True merge "
                "it again: `model = nnx.merge(graphdef, params, rest, copy=True)`; return `nnx.state(model, ...)` "
                "without the nnx.Param variables as the new model_state."
            )


def _is_variable(node: Any) -> bool:
    return "Variable" in _kinds(node)


def _kinds(node: Any) -> set[str]:
    return {kind.__name__ for kind in type(node).__mro__ if kind.__module__.startswith("flax.nnx")}

"""The kind of the state that a training step returns: that of the state that it was given."""

from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.trees import Tree
from jstep.slots.matching import describe_difference
from jstep.slots.roles import roles_in
from jstep.state.train_state import TrainState


def keep_kind(name: str, old: Tree, new: Tree) -> Any:
    if not (isinstance(old, TrainState) and isinstance(new, TrainState)):
        return new
    if roles_in(new) is not roles_in(old):
        new = TrainState(new.params, new.slots, new.global_step, roles=roles_in(old))
    has_structure = trees.structure(new) == trees.structure(old)
    if has_structure and any(map(trees.is_weak, jax.tree.leaves(new))):
        new = jax.tree.map(_as_strong, new, old)
    if has_structure and all(map(_is_alike, jax.tree.leaves(new), jax.tree.leaves(old))):
        return new
    trees.require_arrays(new, f"train_step={name}: the state that it returns")
    different = describe_difference(jax.tree.map(jax.typeof, new), jax.tree.map(jax.typeof, old))
    raise TypeError(
        f"train_step={name}: must return a state of the kind that it was given, got one "
        f"{different or _describe_container(new, old)}; cast such a leaf, or create the state as it is "
        "returned: no run could resume from a checkpoint of another kind"
    )


def _describe_container(new: Any, old: Any, path: tuple[Any, ...] = ()) -> str:
    if type(new) is not type(old):
        return f"whose {trees.path_str(path)!r} is of type {type(new).__name__} instead of {type(old).__name__}"
    one_level = [
        jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x, tree=tree: x is not tree) for tree in (new, old)
    ]
    for (keys, child), (_, other) in zip(*one_level, strict=True):
        if trees.structure(child) != trees.structure(other):
            return _describe_container(child, other, (*path, *keys))
    return f"whose {trees.path_str(path)!r} has other static fields"


def _as_strong(new: Any, old: Any) -> Any:
    if not trees.is_weak(new):
        return new
    dtype = jax.typeof(old).dtype
    with jax.numpy_dtype_promotion("standard"):
        promoted = jnp.result_type(new, dtype)
    return jnp.asarray(new, dtype if promoted == dtype else jax.typeof(new).dtype)


def _is_alike(new: Any, old: Any) -> bool:
    if not trees.is_array_or_number(new):
        return False
    a, b = jax.typeof(new), jax.typeof(old)
    return (a.shape, a.dtype) == (b.shape, b.dtype)

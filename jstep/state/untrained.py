"""Rejection of Flax NNX variables that are not trainable."""

from typing import Any

import jax

from jstep.core import trees

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

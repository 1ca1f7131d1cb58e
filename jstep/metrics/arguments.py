"""Validation of the arguments of metrics."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import meshes, trees
from jstep.core.checks import kind
from jstep.core.trees import Array


def scores_and_truth(scores: Any, labels: Any) -> tuple[Array, Array]:
    """Return the scores in float32 or wider, and a mask of the labels that are 1, both flattened.

    Raises:
        TypeError: An argument is not an array of numbers.
        ValueError: The shapes differ.
    """
    given, truth = pair(_numbers(scores, "scores"), _numbers(labels, "labels"), ("scores", "labels"))
    return _at_least_float32(given), truth == jnp.ones((), truth.dtype)


def logits_and_labels(logits: Any, labels: Any) -> tuple[Array, Array]:
    """Return logits `[examples, classes]` in float32 or wider, and labels `[examples]`.

    Raises:
        TypeError: Logits are not numbers, or labels are not integers.
        ValueError: Logits do not have the shape of labels plus one axis.
    """
    given, truth = _numbers(logits, "logits"), indices(labels, "labels")
    if given.ndim == 0 or given.shape[:-1] != truth.shape:
        raise ValueError(
            f"logits has shape {given.shape}, labels has shape {truth.shape}: must be [..., classes] and [...], labels "
            "being the indices of classes"
        )
    return _at_least_float32(given).reshape(math.prod(truth.shape), given.shape[-1]), truth.reshape(-1)


def weights_of(weights: Any, labels: Array) -> Array | None:
    """Return flattened weights, a mask or floating-point numbers of float32 or wider; None if there are none.

    A weight that is negative, infinite or NaN becomes NaN, and with it the metric.

    Args:
        weights: A weight for each label, or None.
        labels: The labels as they were passed, before they are flattened.

    Raises:
        TypeError: Weights are not an array of numbers.
        ValueError: Weights do not have the shape of the labels.
    """
    if weights is None:
        return None
    given = _numbers(weights, "weights")
    if given.shape != np.shape(labels):
        raise ValueError(
            f"weights has shape {given.shape}, labels has shape {np.shape(labels)}: must be equal, one weight for each "
            "label; broadcast weights of whole sequences with jnp.broadcast_to(weights[:, None], labels.shape)"
        )
    given = given.reshape(-1)
    if given.dtype == jnp.bool_:
        return given
    given = _at_least_float32(given)
    return jnp.where((given >= 0) & (given < jnp.inf), given, jnp.full_like(given, jnp.nan))


def pair(first: Array, second: Array, names: tuple[str, str]) -> tuple[Array, Array]:
    """Flatten two arrays of the same shape.

    Raises:
        ValueError: The shapes differ.
    """
    if first.shape != second.shape:
        raise ValueError(
            f"{names[0]} has shape {first.shape}, {names[1]} has shape {second.shape}: must be equal, one of each for "
            "each example"
        )
    return first.reshape(-1), second.reshape(-1)


def indices(value: Any, argument: str) -> Array:
    """Convert to an array of class indices, which can represent those of any number of classes.

    Raises:
        TypeError: The numbers are not integers.
    """
    array = _numbers(value, argument)
    if jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{argument}: must be integers, the indices of classes, got {kind(array)}")
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def _numbers(value: Any, argument: str) -> Array:
    """Convert to an array of real numbers or bools.

    Raises:
        TypeError: The value is something else.
    """
    if not (trees.is_array(value) or isinstance(value, bool | int | float | list | tuple)):
        raise TypeError(f"{argument}: must be an array of numbers, got {kind(value)}")
    array = jnp.asarray(value)
    if not any(jnp.issubdtype(array.dtype, one) for one in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(f"{argument}: must be an array of numbers, got {kind(array)}")
    return array


def _at_least_float32(array: Array) -> Array:
    """Convert an array to float32, or keep it in float64."""
    return array.astype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32)


def whole(vector: Array) -> Array:
    """Replicate a vector on an Explicit mesh, because JAX does not sort or scatter over Explicit axes."""
    mesh = meshes.explicit_mesh(vector)
    return vector if mesh is None else jax.sharding.reshard(vector, NamedSharding(mesh, PartitionSpec()))

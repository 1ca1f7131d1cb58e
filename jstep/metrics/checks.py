"""Checks of what metrics are given."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import kind
from jstep.core.types import Array


def numbers(value: Any, argument: str) -> Array:
    """An array of real numbers or bools.

    Raises:
        TypeError: It is something else.
    """
    if not (trees.is_array(value) or isinstance(value, bool | int | float | list | tuple | np.generic)):
        raise TypeError(f"{argument}: must be an array of numbers, got {kind(value)}")
    array = jnp.asarray(value)
    if not any(jnp.issubdtype(array.dtype, one) for one in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(f"{argument}: must be an array of numbers, got {kind(array)}")
    return array


def indices(value: Any, argument: str) -> Array:
    """An array of the indices of classes.

    Raises:
        TypeError: It has other numbers than integers.
    """
    array = numbers(value, argument)
    if jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{argument}: must be integers, the indices of classes, got {kind(array)}")
    return array.astype(jnp.int32) if array.dtype == jnp.bool_ else array


def pair(first: Array, second: Array, names: tuple[str, str]) -> tuple[Array, Array]:
    """Two arrays of one shape, as vectors.

    Raises:
        ValueError: Their shapes differ.
    """
    if first.shape != second.shape:
        raise ValueError(
            f"{names[0]} has shape {first.shape}, {names[1]} has shape {second.shape}: must be equal, one of each for "
            "each example"
        )
    return first.reshape(-1), second.reshape(-1)


def scores_and_truth(scores: Any, labels: Any) -> tuple[Array, Array]:
    """Scores in float32 at least, and which labels are 1: vectors.

    Raises:
        TypeError: One of them is not an array of numbers.
        ValueError: Their shapes differ.
    """
    given, truth = pair(numbers(scores, "scores"), numbers(labels, "labels"), ("scores", "labels"))
    return at_least_float32(given), truth == jnp.ones((), truth.dtype)


def logits_and_labels(logits: Any, labels: Any) -> tuple[Array, Array]:
    """Logits `[examples, classes]` in float32 at least, and labels `[examples]`.

    Raises:
        TypeError: Logits are not numbers, or labels not integers.
        ValueError: Logits are not of the shape of labels with one axis more.
    """
    given, truth = numbers(logits, "logits"), indices(labels, "labels")
    if given.ndim == 0 or given.shape[:-1] != truth.shape:
        raise ValueError(
            f"logits has shape {given.shape}, labels has shape {truth.shape}: must be [..., classes] and [...], labels "
            "being the indices of classes"
        )
    return at_least_float32(given).reshape(math.prod(truth.shape), given.shape[-1]), truth.reshape(-1)


def at_least_float32(array: Array) -> Array:
    """The array in float32, or in float64 if it is that already."""
    return array.astype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32)


def whole(vector: Array) -> Array:
    """The vector on all devices, if it lies on an Explicit mesh, over whose axes JAX does not sort or scatter."""
    sharding = jax.typeof(vector).sharding
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return vector
    spread: Array = jax.sharding.reshard(vector, NamedSharding(sharding.mesh, PartitionSpec()))
    return spread


def is_class(labels: Array, num_classes: int) -> Array:
    """Which labels are in 0 … num_classes − 1."""
    with jax.numpy_dtype_promotion("standard"):
        return (labels >= 0) & (labels < num_classes)

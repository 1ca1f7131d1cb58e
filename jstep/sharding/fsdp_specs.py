"""Partition specs for fully sharded data parallelism (FSDP)."""

import logging
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jstep.core import trees
from jstep.core.checks import as_int
from jstep.core.meshes import require_mesh
from jstep.core.trees import Params
from jstep.sharding.layout import axis_size, largest_divisible

_logger = logging.getLogger("jstep")

_LARGE = 2**16


def fsdp_specs(params: Params, mesh: Any, axis: Any = "data", min_size: int = 2**16) -> Any:
    """Return specs that split each large parameter over a mesh axis, along its largest divisible dimension.

    If no leaf is split, or one of 2**16 elements or more is not, a warning is logged, with the reason.

    Args:
        params: Arrays, or shapes from `jax.eval_shape`.
        mesh: A `jax.sharding.Mesh`.
        axis: The mesh axis, or a tuple of axes.
        min_size: The minimum number of elements of a split leaf; smaller leaves are replicated.

    Returns:
        A tree of `PartitionSpec`, for `shard_state` and `TrainState.create`.

    Raises:
        ValueError: The mesh has no such axis, or `min_size` is negative.

    Example:
        >>> import jax, jstep
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> specs = jstep.fsdp_specs({"w": jax.ShapeDtypeStruct((256, 512), "float32"), "b": jax.numpy.ones(4)}, mesh)
        >>> tuple(specs["w"]), tuple(specs["b"])
        ((None, 'data'), ())

    Source: Zhao et al., "PyTorch FSDP" (2023); Rajbhandari et al., "ZeRO" (2019), stage 3.
    """
    as_int(min_size, "min_size", 0, "a number of elements")
    size = axis_size(require_mesh(mesh), axis, f"axis={axis!r}")

    def spec(leaf: Any) -> PartitionSpec:
        shape = np.shape(leaf)
        dim = largest_divisible(shape, size) if math.prod(shape) >= min_size else None
        return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axis)

    specs = jax.tree.map(spec, params)
    named = zip(trees.leaves_with_paths(params), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True)
    whole = {path: np.shape(leaf) for (path, leaf), one in named if one == PartitionSpec()}
    if size > 1 and whole:
        _warn(whole, len(jax.tree.leaves(params)), axis, size, min_size)
    return specs


def _warn(whole: dict[str, tuple[int, ...]], leaves: int, axis: Any, size: int, min_size: int) -> None:
    """Warn if no leaf is split, or a large one is not."""
    over = f"over axis={axis!r} ({size} devices)"
    large = {path: shape for path, shape in whole.items() if math.prod(shape) >= max(min_size, _LARGE)}
    if len(whole) == leaves:
        _logger.warning("fsdp_specs: no leaf is split %s: %s", over, _why_none(whole, size, min_size))
    elif large:
        path, shape = max(large.items(), key=lambda one: math.prod(one[1]))
        others = f" and {len(large) - 1} more" if len(large) > 1 else ""
        text = "fsdp_specs: %s of shape %s%s is not split %s, because no dimension is divisible by %d"
        _logger.warning(text, trees.quoted(path), shape, others, over, size)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _why_none(whole: dict[str, tuple[int, ...]], size: int, min_size: int) -> str:
    path, shape = max(whole.items(), key=lambda one: math.prod(one[1]))
    leaf, count = f"the largest leaf, {trees.quoted(path)} of shape {shape},", math.prod(shape)
    if count < min_size:
        return f"{leaf} has {count} elements, fewer than min_size={min_size}; pass a smaller min_size"
    return f"no dimension of {leaf} is divisible by {size}, nor of any other leaf of at least min_size={min_size}"

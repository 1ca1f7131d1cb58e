"""Metric objects with `merge` and `compute`, merged over the batches on the device."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import kind
from jstep.core.contexts import internal_transfers
from jstep.core.meshes import without_explicit_axes
from jstep.core.notes import note
from jstep.hooks.values import host, is_number

_METHODS = ("merge", "compute")


def is_object(name: str, value: Any) -> bool:
    """Return whether a metric is an object with `merge` and `compute`; works while tracing.

    Raises:
        TypeError: The metric has only one of the two methods, or is not a pytree of arrays. The message contains its
            name.
    """
    missing = [method for method in _METHODS if not callable(getattr(value, method, None))]
    if len(missing) == 2:
        return False
    if missing:
        other = next(method for method in _METHODS if method not in missing)
        raise TypeError(
            f"metric_fn: the metric {name!r} is {kind(value)} with {other} and without {missing[0]}: must have both "
            "methods, merge(other) and compute()"
        )
    if isinstance(value, type):
        raise TypeError(f"metric_fn: the metric {name!r} is {kind(value)}: must be an object of it")
    if jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"metric_fn: the metric {name!r} is {kind(value)}, which is not a pytree: register its class, for example "
            "a dataclass by jax.tree_util.register_dataclass"
        )
    _check_leaves(value, f"the metric {name!r} is {kind(value)} that holds")
    return True


def _check_leaves(value: Any, what: str) -> None:
    """Raise an error for a leaf that is not an array or a number; JAX's own error does not name the metric.

    Raises:
        TypeError: There is such a leaf. The message contains its path.
    """
    for path, leaf in trees.leaves_with_paths(value):
        if not (trees.is_array(leaf) or isinstance(leaf, bool | int | float | complex)):
            raise TypeError(
                f"metric_fn: {what} {kind(leaf)} at {trees.quoted(path)}: each leaf must be an array or a number; "
                "register other fields as static (meta_fields of jax.tree_util.register_dataclass)"
            )


class Merger:
    """Merger of metric objects in one compiled program."""

    def __init__(self) -> None:
        self._jitted: dict[Any, Callable[..., dict[str, Any]]] = {}

    def __call__(self, totals: Mapping[str, Any], objects: Mapping[str, Any], mesh: Any) -> dict[str, Any]:
        """Merge the objects of one more batch into the totals.

        Args:
            totals: The merged objects of the previous batches.
            objects: The objects of the batch.
            mesh: The mesh over several processes that they are computed on, or None.

        Raises:
            TypeError: `merge` does not return an object of the same structure. The message contains the metric.
        """
        common = {name: totals[name] for name in objects if name in totals}
        merged: dict[str, Any] = {}
        if common:
            if mesh not in self._jitted:
                everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())

                # One function per evaluator, because JAX confuses classes with the same fields.
                def merged_of(totals: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
                    return without_explicit_axes(_all_merged, totals, objects)

                self._jitted[mesh] = jax.jit(merged_of, out_shardings=everywhere)
            merged = self._jitted[mesh](common, {name: objects[name] for name in common})
        return {**totals, **objects, **merged}


def _all_merged(totals: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
    return {name: _merged(name, total, objects[name]) for name, total in totals.items()}


def _merged(name: str, total: Any, one: Any) -> Any:
    before = trees.structure(total)
    if type(one) is not type(total) or trees.structure(one) != before:
        raise TypeError(
            f"metric_fn: the metric {name!r}: merge of {kind(total)} was given {kind(one)} of another structure: all "
            f"batches must give {before}, got {trees.structure(one)}"
        )
    try:
        merged = total.merge(one)
    except Exception as error:
        note(error, f"metric_fn: in merge of the metric {name!r}{_merge_advice(total, one)}")
        raise
    after = trees.structure(merged)
    if type(merged) is not type(total) or after != before:
        raise TypeError(
            f"metric_fn: the metric {name!r}: merge of {kind(total)} returned {kind(merged)} of another structure: "
            f"must return {before}, got {after}"
        )
    _check_leaves(merged, f"the metric {name!r}: merge of {kind(total)} returned")
    return merged


def _merge_advice(total: Any, one: Any) -> str:
    pairs = zip(trees.leaves_with_paths(total), jax.tree.leaves(one), strict=True)
    differ = [f"{path} {np.shape(a)} and {np.shape(b)}" for (path, a), b in pairs if np.shape(a) != np.shape(b)]
    advice = ", which is compiled: use jax.numpy on the leaves"
    if differ:
        advice += (
            f". Shapes of the merged batches and of the next one differ: {', '.join(differ)}; the last batch may have "
            "fewer rows: sum over the rows, or concatenate them"
        )
    return advice


def numbers_of_objects(totals: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Compute each object: return, for each metric, its numbers by result name, `name` or `name/key`.

    Raises:
        TypeError: `compute` does not return a number or a dict of numbers. The message contains the metric.
    """
    return {name: _numbers(name, _computed(name, total)) for name, total in totals.items()}


def _computed(name: str, total: Any) -> Any:
    def local(leaf: Any) -> Any:
        """Return the local copy of a leaf that is replicated over several processes."""
        is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return leaf.addressable_data(0) if is_global else leaf

    try:
        return jax.tree.map(local, total).compute()
    except Exception as error:
        note(error, f"metric_fn: in compute of the metric {name!r}")
        raise


def _numbers(name: str, computed: Any) -> dict[str, float]:
    values = computed if isinstance(computed, Mapping) else {None: computed}
    found: dict[str, float] = {}
    for key, value in values.items():
        if key is not None and not isinstance(key, str):
            raise TypeError(f"metric_fn: the metric {name!r}: compute returned the key {key!r}: must be a string")
        if not is_number(value):
            at = "" if key is None else f" at {key!r}"
            raise TypeError(
                f"metric_fn: the metric {name!r}: compute returned {kind(value)}{at}: must be a number, or a dict of "
                "numbers"
            )
        with internal_transfers():
            found[name if key is None else f"{name}/{key}"] = float(host(value))
    return found

"""Metric objects with `merge` and `compute`, merged over the batches on the device."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import kind
from jstep.core.contexts import internal_transfers
from jstep.core.exceptions import note
from jstep.core.meshes import without_explicit_axes
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
    what = f"the metric {name!r} is {kind(value)}"
    if missing:
        other = next(method for method in _METHODS if method not in missing)
        raise TypeError(
            f"metric_fn: {what} with {other} and without {missing[0]}: must have both methods, merge(other) and "
            "compute()"
        )
    if isinstance(value, type):
        raise TypeError(f"metric_fn: {what}: must be an object of it")
    if jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"metric_fn: {what}, which is not a pytree: register its class, for example a dataclass by "
            "jax.tree_util.register_dataclass"
        )
    _check_leaves(value, f"{what} that holds")
    return True


def _check_leaves(value: Any, what: str) -> None:
    """Raise an error for a leaf that is not an array or a number; JAX's own error does not name the metric.

    Raises:
        TypeError: There is such a leaf. The message contains its path.
    """
    for path, leaf in trees.leaves_with_paths(value):
        if not trees.is_array_or_number(leaf):
            raise TypeError(
                f"metric_fn: {what} {kind(leaf)} at {trees.quoted(path)}: each leaf must be an array or a number; "
                "register other fields as static (meta_fields of jax.tree_util.register_dataclass)"
            )


def merge_objects(totals: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the objects of one more batch into the totals of the same names; for use in a compiled program.

    Raises:
        TypeError: `merge` does not return an object of the same structure. The message contains the metric.
    """

    def merged(totals: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _merged(name, total, objects[name]) for name, total in totals.items()}

    return without_explicit_axes(merged, totals, objects)


def _merged(name: str, total: Any, one: Any) -> Any:
    what, before = f"the metric {name!r}: merge of {kind(total)}", trees.structure(total)
    if not _is_like(one, total):
        raise TypeError(
            f"metric_fn: {what} was given {kind(one)} of another structure: all batches must give {before}, got "
            f"{trees.structure(one)}"
        )
    try:
        merged = total.merge(one)
    except Exception as error:
        note(error, f"metric_fn: in merge of the metric {name!r}{_merge_advice(total, one)}")
        raise
    if not _is_like(merged, total):
        raise TypeError(
            f"metric_fn: {what} returned {kind(merged)} of another structure: must return {before}, got "
            f"{trees.structure(merged)}"
        )
    _check_leaves(merged, f"{what} returned")
    return merged


def _is_like(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(trees.structure(one) == trees.structure(other))


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


def numbers_of(name: str, total: Any) -> dict[str, float]:
    """Compute the total of a metric; return its numbers by result name, `name` or `name/key`.

    Raises:
        TypeError: `compute` does not return a number or a dict of numbers. The message contains the metric.
    """

    def local(leaf: Any) -> Any:
        """Return the local copy of a leaf that is replicated over several processes."""
        is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return leaf.addressable_data(0) if is_global else leaf

    try:
        computed = jax.tree.map(local, total).compute()
    except Exception as error:
        note(error, f"metric_fn: in compute of the metric {name!r}")
        raise
    values = computed if isinstance(computed, Mapping) else {None: computed}
    numbers: dict[str, float] = {}
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
            numbers[name if key is None else f"{name}/{key}"] = float(host(value))
    return numbers

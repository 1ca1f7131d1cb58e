"""Filling a target from arrays of a checkpoint or files of weights: leaves and their placement."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jstep.core import meshes, placement, trees
from jstep.core.checks import SHOWN, describe_type, format_items
from jstep.core.logs import logger

Source = TypeVar("Source")


@dataclasses.dataclass(frozen=True)
class TargetLeaf(Generic[Source]):
    """A leaf of a target, and the array that was saved for it.

    Attributes:
        shape: The shape of the array to read, like `dtype`: for PRNG keys, those of their data.
        name: The name of its source; None for a leaf without one.
        source: None if there is none, or it does not fit.
        problem: Why its source does not fit, or "".
    """

    path: str
    leaf: Any
    shape: tuple[int, ...]
    dtype: Any
    name: str | None
    source: Source
    problem: str = ""

    @property
    def is_missing(self) -> bool:
        return self.name is not None and self.source is None and not self.problem

    @property
    def is_numpy(self) -> bool:
        return isinstance(self.leaf, np.ndarray | np.generic)

    @functools.cached_property
    def sharding(self) -> Any:
        """The sharding of the leaf; None to leave the placement to JAX."""
        return placement.target_sharding(self.leaf, self.path)

    @property
    def sharding_of_data(self) -> Any:
        """The sharding to read an array with; None to read it into NumPy, for `place_leaf`."""
        if not trees.is_key(self.leaf):
            return self.sharding
        if isinstance(self.sharding, NamedSharding | SingleDeviceSharding):
            return self.sharding
        # The data of a key has more axes than the key, and other shardings may split these.
        return None


_Wanted = TypeVar("_Wanted", bound=TargetLeaf[Any])


@dataclasses.dataclass(frozen=True)
class TargetMatch(Generic[_Wanted]):
    """The result of matching a target to a checkpoint or to files of weights.

    Attributes:
        unused: The names of sources that no leaf uses.
    """

    wanted: list[_Wanted]
    unused: list[str]

    TITLES: ClassVar[tuple[str, str, str]]
    """Titles in a message for missing, unused and differing sources."""
    MAX_SHOWN: ClassVar[int] = SHOWN
    """Entries of a list in a message."""

    def differences(self) -> str:
        """Describe what is missing, unused and differing; empty if there is none."""
        missing: list[str] = []
        differing: list[str] = []
        for want in self.wanted:
            if want.is_missing:
                shown = repr(want.name)
                if want.name != want.path:
                    shown += f" (for {want.path!r})"
                missing.append(shown)
            if want.problem:
                differing.append(want.problem)
        unused = [repr(name) for name in self.unused]
        lists = zip(self.TITLES, (missing, unused, differing), strict=True)
        return "".join([format_items(title, items, self.MAX_SHOWN) for title, items in lists])


def has_value(leaf: object) -> bool:
    return not isinstance(leaf, jax.ShapeDtypeStruct) and not trees.is_donated(leaf)


def check_has_value(wanted: TargetLeaf[Any]) -> None:
    """Raise an error if a leaf that nothing is restored into is a shape, or was deleted."""
    if not has_value(wanted.leaf):
        raise ValueError(
            f"target: {trees.quote_path(wanted.path)} stays as it is, since it was left out of "
            "what was saved or nothing there fits it, and must have a value, got a shape or a "
            "deleted array; pass an array there"
        )


def target_kind(leaf: Any, path: str, advice: str) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype (in native byte order) of a target's leaf.

    An error ends with the advice.
    """
    if trees.is_python_number(leaf):
        return (), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    if isinstance(leaf, jax.ShapeDtypeStruct) or trees.is_array(leaf):
        dtype = leaf.dtype
        if isinstance(dtype, np.dtype):  # not the dtype of a PRNG key
            dtype = dtype.newbyteorder("=")
        return tuple(leaf.shape), dtype
    what = describe_type(leaf) if isinstance(leaf, np.ndarray) else type(leaf).__name__
    raise TypeError(f"target: {trees.quote_path(path)} is {what}; {advice}")


def kind_of_data(leaf: Any, kind: tuple[tuple[int, ...], Any]) -> tuple[tuple[int, ...], Any]:
    """Return shape and dtype to read for a leaf of a kind: for PRNG keys, those of their data."""
    if not trees.is_key(leaf):
        return kind
    data = jax.eval_shape(jax.random.key_data, leaf)
    return data.shape, data.dtype


def place_leaf(wanted: TargetLeaf[Any], value: Any) -> Any:
    """Return a leaf in its own memory, with its sharding.

    Args:
        value: An array of NumPy; its parts in this process; or an array on devices, which nothing
            else uses.
    """
    if wanted.is_numpy and not isinstance(value, jax.Array | Mapping):
        return np.array(_cast(wanted, np.asarray(value)))
    placed = _place_data(wanted, value)
    if trees.is_key(wanted.leaf):
        return _wrap_key_data(wanted, placed)
    if wanted.sharding in (None, placed.sharding):
        return placed
    return jax.device_put(placed, wanted.sharding)


def _place_data(wanted: TargetLeaf[Any], value: Any) -> Any:
    """Return a value of `place_leaf` as an array of the leaf's dtype on devices."""
    sharding = wanted.sharding_of_data
    if isinstance(value, jax.Array):
        if value.dtype == wanted.dtype:
            return value
        # It is cast on the host, which supports all dtypes.
        sharding = value.sharding
        parts = parts_of(value)
    elif isinstance(value, Mapping):
        parts = dict(value)
    elif sharding is None:
        return placement.place_anywhere(_cast(wanted, np.asarray(value)))
    else:
        # A part of a scalar is a NumPy scalar.
        bounds = placement.local_parts(value.shape, sharding)
        parts = {part: np.asarray(value[placement.slices(part)]) for part in bounds}
    cast = {part: _cast(wanted, values) for part, values in parts.items()}
    return placement.place(wanted.shape, wanted.dtype, sharding, cast)


def _wrap_key_data(wanted: TargetLeaf[Any], data: Any) -> Any:
    """Return the PRNG keys whose data are given, of the kind of the target's leaf."""
    impl: list[Any] = []
    # In a traced function, because `key_impl` accepts no shapes.
    jax.eval_shape(lambda keys: impl.append(jax.random.key_impl(keys)), wanted.leaf)
    wrap = functools.partial(jax.random.wrap_key_data, impl=impl[0])
    if wanted.sharding is None:
        return wrap(data)
    return jax.jit(wrap, out_shardings=wanted.sharding)(data)


def parts_of(array: jax.Array) -> dict[placement.ShardBounds, np.ndarray[Any, Any]]:
    """Return this process's shards, one for each region of the array, as NumPy arrays."""
    with meshes.internal_transfers():
        shards = array.addressable_shards
        return {
            placement.bounds(shard.index, array.shape): np.asarray(shard.data) for shard in shards
        }


def _cast(wanted: TargetLeaf[Any], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Cast an array to the leaf's dtype; warn if finite numbers become infinite or NaN."""
    if not wanted.is_numpy and jax.dtypes.canonicalize_dtype(wanted.dtype) != wanted.dtype:
        raise ValueError(
            f"target: {wanted.path!r} is {wanted.dtype}, which JAX supports "
            "only with jax_enable_x64"
        )
    if array.dtype == wanted.dtype:
        return array
    with np.errstate(all="ignore"):
        result = array.astype(wanted.dtype)
    if not trees.is_floating(wanted.dtype):
        changed = array[result != array]
        if changed.size:
            raise ValueError(
                f"target: {wanted.path!r} is {wanted.dtype} and cannot represent {changed[0]}; "
                "enable jax_enable_x64"
            )
        return result
    if _largest(result.dtype) < _largest(array.dtype):
        lost = np.count_nonzero(np.isfinite(array) & ~np.isfinite(result))
        if lost:
            logger.warning(
                "target: %d finite numbers of %r are outside the range of %s",
                lost,
                wanted.path,
                wanted.dtype,
            )
    return result


def _largest(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]

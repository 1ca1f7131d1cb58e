"""Matching of tensors to the leaves of a target, and their placement."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from jstep.checkpoint import targets
from jstep.core import exceptions, meshes, selection, trees
from jstep.core.checks import array_type, describe_type, format_value
from jstep.core.path_matching import match_paths, names_by_path
from jstep.core.trees import Tree
from jstep.state.leaves import PARAMS

# The `names` argument, the tensor that it gives each leaf, and mismatches.

Transform = Callable[[Any], Any]
Entry = str | tuple[str, Transform] | None
Names = Mapping[str, Entry] | Callable[[str], Entry]
"""Path of a leaf → the name of its tensor, a pair (name, function of the tensor), or None for no
tensor."""

_FORM = "must be the name of a tensor, a pair (name, transform), or None"


class Rule(NamedTuple):
    """The name of a leaf's tensor, or None, and the transform between the two."""

    name: str | None
    transform: Transform | None = None


def rules(names: object, tree: Tree, what: str) -> list[Rule]:
    paths = trees.leaf_paths(tree)
    for path, count in Counter(paths).items():
        if count > 1:
            raise ValueError(selection.ambiguous(what, path, count))
    form = f"a mapping from paths of {what} to names of tensors, or a function (path) -> name"
    entries = names_by_path(names, paths, what, form)
    return [_rule(path, entries[path]) if path in entries else Rule(path) for path in paths]


def _rule(path: str, entry: object) -> Rule:
    if entry is None or isinstance(entry, str):
        return Rule(entry)
    if isinstance(entry, tuple) and len(entry) == 2:
        name, transform = entry
        if isinstance(name, str) and callable(transform):
            return Rule(name, transform)
    raise TypeError(
        f"names: for {path!r} it has {format_value(entry)}: {_FORM}, got {describe_type(entry)}"
    )


def call_transform(
    transform: Transform, array: np.ndarray[Any, Any], path: str
) -> np.ndarray[Any, Any]:
    array = array.view()
    array.flags.writeable = False  # it may alias the user's array
    try:
        result = transform(array)
    except Exception as error:
        exceptions.note(error, f"(in the transform of names for {path!r})")
        raise
    if not trees.is_array(result):
        raise TypeError(
            f"names: the transform for {path!r} returned {describe_type(result)}: "
            "must return an array"
        )
    with meshes.internal_transfers():
        return np.asarray(result)


@dataclasses.dataclass(frozen=True)
class WantedTensor(targets.TargetLeaf[Any]):
    """A target's leaf, and its tensor; `casts` is whether another floating dtype fits, too."""

    transform: Transform | None = None
    casts: bool = False

    def difference(self, shape: Sequence[int], dtype: DTypeLike) -> str:
        """Describe why an array of some shape and dtype does not fit; empty if it does."""
        is_same_shape = tuple(shape) == self.shape
        is_cast = self.casts and trees.is_floating(dtype)
        if not is_same_shape or (dtype != self.dtype and not is_cast):
            wanted = array_type(np.shape(self.leaf), getattr(self.leaf, "dtype", self.dtype))
            hint = ""
            if is_same_shape and trees.is_floating(dtype) and trees.is_floating(self.dtype):
                hint = f" (dtype={str(self.dtype)!r} converts floating tensors)"
            return f"{self._named} is {array_type(shape, dtype)}, and {wanted} in target{hint}"
        if not self.is_numpy and jax.dtypes.canonicalize_dtype(self.dtype) != self.dtype:
            return (
                f"{self._named} is {array_type(shape, dtype)}, which JAX supports "
                "only with jax_enable_x64"
            )
        return ""

    @property
    def _named(self) -> str:
        if self.name == self.path:
            return repr(self.path)
        return f"{self.path!r} (tensor {self.name!r})"


@dataclasses.dataclass(frozen=True)
class WeightsMatch(targets.TargetMatch[WantedTensor]):
    TITLES = "missing", "unused", "mismatched"
    MAX_SHOWN = 200  # enough to show the names of a model's layers


def match_tensors(
    target: Tree,
    tensors: Mapping[str, Any],
    rules: Sequence[Rule],
    float_dtype: DTypeLike,
    *,
    is_checkpoint: bool,
) -> WeightsMatch:
    if is_checkpoint:
        rules = _complete_names(rules, tensors)
    matched = match_paths([rule.name for rule in rules], tensors)
    wanted: list[WantedTensor] = []
    used: dict[str, str] = {}
    for (path, leaf), rule, source in zip(
        trees.leaves_with_paths(target), rules, matched.found, strict=True
    ):
        shape, dtype = _kind(leaf, path)
        casts = float_dtype is not None and trees.is_floating(dtype)
        entry = WantedTensor(
            path=path,
            leaf=leaf,
            shape=shape,
            dtype=float_dtype if casts else dtype,
            name=rule.name,
            source=None,
            transform=rule.transform,
            casts=casts,
        )
        if source is None:
            wanted.append(entry)
            continue
        used[path] = source.name
        problem = _problem(entry, source)
        if problem:
            wanted.append(dataclasses.replace(entry, problem=problem))
        else:
            wanted.append(dataclasses.replace(entry, source=source))
    groups = _groups(used) if is_checkpoint else ("",)
    return WeightsMatch(wanted, [name for name in matched.unused if name.startswith(groups)])


def _complete_names(rules: Sequence[Rule], tensors: Mapping[str, Any]) -> list[Rule]:
    """Return rules for a checkpoint, with `params/` before the names that omit it."""
    names = [rule.name for rule in rules if rule.name is not None]
    # The parameters may have a group `params` themselves, so that the name "params/w" may mean that
    # array or "params/params/w". It means the latter if all names are in the checkpoint with
    # `params/` before them, and not all without it.
    is_omitted_everywhere = False
    if not all(name in tensors for name in names):
        is_omitted_everywhere = all(_params_name(name) in tensors for name in names)
    complete: list[Rule] = []
    for rule in rules:
        name = rule.name
        if name is not None and _params_name(name) in tensors:
            if is_omitted_everywhere or name not in tensors:
                rule = rule._replace(name=_params_name(name))
        complete.append(rule)
    return complete


def _params_name(name: str) -> str:
    return f"{PARAMS}/{name}" if name else PARAMS  # the parameters may be a single array


def _groups(used: Mapping[str, str]) -> tuple[str, ...]:
    """Return the beginnings of names of tensors that can count as unused.

    These are in groups from which some tensors are loaded.

    Args:
        used: Path of a leaf → the name of its tensor.
    """
    roots = {name.partition("/")[0] for name in used.values()}
    if PARAMS in roots:
        return tuple(f"{root}/" for root in roots)
    # The beginning of each name before the path of its leaf, if all have the same one.
    groups = {name.removesuffix(path) for path, name in used.items()}
    return tuple(groups) if len(groups) == 1 else ("",)


def transform_of_ones(transform: Any, shape: Sequence[int], dtype: DTypeLike, path: str) -> Any:
    with np.errstate(all="ignore"):
        return call_transform(transform, np.broadcast_to(np.ones((), dtype), tuple(shape)), path)


def _problem(wanted: WantedTensor, tensor: Any) -> str:
    # A checkpoint of jstep records which of its arrays are PRNG keys; one of Orbax does not.
    wanted_code = str(getattr(wanted.leaf, "dtype", ""))
    are_other_keys = tensor.code.startswith("key<") and tensor.code != wanted_code
    if tensor.dtype is None or are_other_keys:
        why = ", which cannot be loaded"
        if trees.is_key(wanted.leaf):
            why = f"; it is {wanted.leaf.dtype} in target"
        return f"{wanted.path!r} (tensor {tensor.name!r}) is {tensor.code}{why}"
    if wanted.transform:
        return ""
    return wanted.difference(tensor.shape, tensor.dtype)


def _kind(leaf: object, path: str) -> tuple[tuple[int, ...], Any]:
    if trees.is_traced(leaf):
        raise TypeError(f"target: {trees.quote_path(path)} is traced; load weights outside of jit")
    return targets.kind_of_data(leaf, targets.target_kind(leaf, path, _NO_KIND))


_NO_KIND = (
    "pass arrays or jax.ShapeDtypeStructs, and remove other leaves, as by "
    "equinox.partition or flax.nnx.split"
)

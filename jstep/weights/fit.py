"""Which tensor goes to which leaf of a target, and everything that does not fit."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.format.match import as_text, listing
from jstep.core import trees
from jstep.weights.dtypes import dtype_of
from jstep.weights.header import Tensor
from jstep.weights.names import Rule, rules, transformed

_SHOWN = 200  # entries of a list in a message: enough to write down the names of a model's layers


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A leaf of a target.

    Attributes:
        path: Its path.
        leaf: The leaf.
        rule: Its tensor.
        tensor: What the file has of that name; None where there is none, or it does not fit.
        dtype: What the leaf will have.
        casts: Whether floating tensors of other dtypes fit.
    """

    path: str
    leaf: Any
    rule: Rule
    tensor: Tensor | None
    dtype: Any
    casts: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return tuple(np.shape(self.leaf))

    @property
    def on_host(self) -> bool:
        """Whether the leaf is a NumPy array."""
        return isinstance(self.leaf, np.ndarray | np.generic)

    def difference(self, shape: Sequence[int], dtype: Any) -> str:
        """What is wrong with an array for this leaf, in words; the empty string if nothing is."""
        cast = self.casts and trees.is_floating(dtype)
        if tuple(shape) != self.shape or (dtype != self.dtype and not cast):
            own = self.leaf.dtype if hasattr(self.leaf, "dtype") else self.dtype
            return f"{self._named} is {as_text(shape, dtype)}, and {as_text(self.shape, own)} in target"
        if not self.on_host and jax.dtypes.canonicalize_dtype(self.dtype) != self.dtype:
            return f"{self._named} is {as_text(shape, dtype)}, which JAX holds under jax_enable_x64 alone"
        return ""

    @property
    def _named(self) -> str:
        return repr(self.path) if self.rule.name == self.path else f"{self.path!r} (tensor {self.rule.name!r})"


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a target finds in files.

    Attributes:
        wanted: The target's leaves, in its order.
        missing: Leaves whose tensor is not there, in words.
        unused: Tensors that no leaf has.
        mismatched: What differs in shape or dtype, in words.
    """

    wanted: list[Wanted]
    missing: list[str]
    unused: list[str]
    mismatched: list[str]

    def problems(self) -> str:
        """All that does not fit, in words; the empty string if everything does."""
        return (
            listing("missing", self.missing, _SHOWN)
            + listing("unused", self.unused, _SHOWN)
            + listing("mismatched", self.mismatched, _SHOWN)
        )


def fit(target: Any, tensors: Mapping[str, Tensor], names: Any, float_dtype: Any) -> Fit:
    """Finds the tensor of each leaf of a target.

    Args:
        target: A tree of arrays, numbers or `jax.ShapeDtypeStruct`.
        tensors: By name.
        names: What the user gave.
        float_dtype: What floating leaves are to have; None for their own.

    Raises:
        TypeError: A leaf of the target has no shape and dtype, or `names` is wrong.
        ValueError: `names` has a path that is not in the target.
    """
    found = Fit([], [], [], [])
    used = set()
    for (path, leaf), rule in zip(trees.leaves_with_paths(target), rules(names, target, "target"), strict=True):
        dtype = _dtype(leaf, path)
        casts = float_dtype is not None and _is_floating(dtype)
        tensor = None if rule.name is None else tensors.get(rule.name)
        wanted = Wanted(path, leaf, rule, tensor, float_dtype if casts else dtype, casts)
        if tensor is not None:
            used.add(tensor.name)
            problem = _problem(wanted, tensor)
            if problem:
                found.mismatched.append(problem)
                wanted = dataclasses.replace(wanted, tensor=None)
        elif rule.name is not None:
            found.missing.append(repr(path) if rule.name == path else f"{rule.name!r} (for {path!r})")
        found.wanted.append(wanted)
    found.unused.extend(repr(name) for name in tensors if name not in used)
    return found


def with_transforms_tried(found: Fit) -> Fit:
    """The same, with what transforms make of shapes: for an error about other leaves that is to be the only one.

    Nothing is read: each transform is called with ones. One that fails with these is left out.
    """
    problems = [_tried(wanted) for wanted in found.wanted]
    return dataclasses.replace(found, mismatched=[*found.mismatched, *filter(None, problems)])


def _tried(wanted: Wanted) -> str:
    if wanted.tensor is None or wanted.rule.transform is None:
        return ""
    found = made_of_ones(wanted.rule.transform, wanted.tensor.shape, dtype_of(wanted.tensor.code), wanted.path)
    return "" if found is None else wanted.difference(found.shape, found.dtype)


def made_of_ones(transform: Any, shape: Sequence[int], dtype: Any, path: str) -> Any:
    """What a transform makes of an array of ones, which takes no memory; None where it fails with that."""
    ones = np.broadcast_to(np.ones((), dtype), tuple(shape))
    try:
        with np.errstate(all="ignore"):
            return transformed(transform, ones, path)
    except Exception:
        return None


def _problem(wanted: Wanted, tensor: Tensor) -> str:
    dtype = dtype_of(tensor.code)
    if dtype is None:
        return f"{wanted.path!r} (tensor {tensor.name!r}) is {tensor.code}, which JAX cannot hold"
    if jnp.issubdtype(wanted.dtype, jax.dtypes.extended):
        return f"{wanted.path!r} is {wanted.dtype} in target, which safetensors does not have; name it None"
    return "" if wanted.rule.transform else wanted.difference(tensor.shape, dtype)


def _is_floating(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and trees.is_floating(dtype)


def _dtype(leaf: Any, path: str) -> Any:
    if trees.is_traced(leaf):
        raise TypeError(f"target: {trees.quoted(path)} is traced; load weights outside of jit")
    if isinstance(leaf, bool | int | float | complex):
        return jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.newbyteorder("=")
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
        return leaf.dtype
    raise TypeError(
        f"target: {trees.quoted(path)} is {type(leaf).__name__}; give an array or a jax.ShapeDtypeStruct for each "
        "leaf, such as jax.eval_shape(init, key), and keep other things out of it, for instance by "
        "equinox.partition(model, equinox.is_array) or flax.nnx.split(model)"
    )

"""Summaries as pytrees.

Arrays are leaves and tags are part of the tree structure, so that a summary can be returned from `jit`, `scan`, `vmap`
and functions with `has_aux`. Leading axes that a transformation adds to a leaf are steps, in order.
"""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_text
from jstep.core.meshes import internal_transfers
from jstep.core.placement import is_on_cpus
from jstep.core.trees import has_tracers, is_traced

_STATIC = {"static": True}


# Not frozen, which would slow down creation: scalars are created on the training thread, in microseconds.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Scalars:
    """Scalars, one per tag. The last `rank` axes of `values` have the shape of the tags."""

    tags: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    rank: int = dataclasses.field(metadata=_STATIC)
    values: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Images:
    """Images as uint8 `[count, height, width, channels]`, one tag each.

    `added` is 1. Microbatches sum the integers that they return, so that `added` becomes their number.
    """

    tags: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    pixels: Any
    added: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Histogram:
    """Bucket counts and moments of the values of an array.

    `sums` are the sums of x·2^−e and of its square, where e = `exponent`, so that they do not overflow float32. `added`
    is as in `Images`.
    """

    tags: tuple[str] = dataclasses.field(metadata=_STATIC)
    counts: Any
    extremes: Any
    sums: Any
    exponent: Any
    non_finite: Any
    added: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Text:
    """Strings. All fields are static, since arrays cannot hold strings."""

    tags: tuple[str] = dataclasses.field(metadata=_STATIC)
    shape: tuple[int, ...] = dataclasses.field(metadata=_STATIC)
    strings: tuple[str, ...] = dataclasses.field(metadata=_STATIC)


Part: TypeAlias = Scalars | Images | Histogram | Text


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Summary:
    """Values with tags, created by `scalar`, `image`, `histogram`, `text` and `merge`.

    A pytree with arrays as leaves and static tags. Return it from a compiled step, scan over it, and pass it to
    `SummaryWriter.add_summary`.

    Example:
        >>> import jax, jstep.summary
        >>> step = jax.jit(lambda x: jstep.summary.scalar("loss", x * x))
        >>> step(3.0)
        Summary('loss')
    """

    parts: tuple[Part, ...]

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags, in the order in which the values are written."""
        return tuple(tag for part in self.parts for tag in part.tags)

    def __repr__(self) -> str:
        return f"Summary({', '.join(map(repr, self.tags))})"


def find_summaries(tree: Any) -> list[Summary]:
    """Return all summaries in a pytree, in JAX's order of leaves."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Summary))
    return [leaf for leaf in leaves if isinstance(leaf, Summary)]


def is_traced_part(part: Part) -> bool:
    """Whether a value of a part is traced; quick for scalars, which are made at every step that is logged."""
    return is_traced(part.values) if type(part) is Scalars else has_tracers(part)


def check_tag(tag: Any, what: str) -> str:
    """Check that a tag is a non-empty string, and return it.

    Raises:
        TypeError: The tag is not a string.
        ValueError: The tag is empty.
    """
    if type(tag) is str and tag:  # quick, as for each logged scalar
        return tag
    return as_text(tag, f"{what}: tag", "give the value a name, such as 'loss'")


_copy = jax.jit(jnp.copy)


def is_here(x: jax.Array) -> bool:
    """Whether x can be read on the host without waiting for the device or copying from it."""
    is_ready = getattr(x, "is_ready", None)
    return is_ready is not None and x.is_fully_addressable and bool(is_ready()) and is_on_cpus(x)


def keep(x: Any) -> Any:
    """Copy x if its value can change or be deleted later; do not wait for the device.

    An array of the training state is deleted when it is donated to the next step, and a NumPy array can be written to.
    Other values are returned unchanged.
    """
    if is_traced(x):
        return x
    if isinstance(x, jax.Array):
        if is_here(x):
            with internal_transfers():
                return np.array(x)
        if not x.is_fully_addressable and x.is_fully_replicated:
            x = x.addressable_data(0)
        return _copy(x)
    return x.copy() if isinstance(x, np.ndarray) else x

"""What a summary is: a pytree of arrays whose tags are static.

The arrays are leaves, the tags belong to the tree's structure, so that a summary is a legal result of `jit`,
`scan`, `vmap` and of a function with `has_aux`. Axes that a transformation puts in front of a leaf are steps,
in their order.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.contexts import internal_transfers
from jstep.core.trees import is_traced

_STATIC = {"static": True}


# Not frozen and without slots' checks: a scalar is made on the training thread, in microseconds.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Scalars:
    """One value a tag; `values` has the shape of the tags, `rank` axes of its own."""

    tags: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    rank: int = dataclasses.field(metadata=_STATIC)
    values: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Images:
    """Pictures as uint8 `[count, height, width, channels]`, one tag each.

    `added` is 1. Microbatches add up the integers among what they return, and so say how many they were.
    """

    tags: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    pixels: Any
    added: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Histogram:
    """What is left of the values: how many lie in each bucket, and their moments.

    `sums` are those of x·2^−e and of its square, e = `exponent`, so that float32 holds them whatever the
    values. `added` is as in `Images`.
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
    """Strings, which no array holds: all of it is static."""

    tags: tuple[str] = dataclasses.field(metadata=_STATIC)
    shape: tuple[int, ...] = dataclasses.field(metadata=_STATIC)
    strings: tuple[str, ...] = dataclasses.field(metadata=_STATIC)


Part: TypeAlias = Scalars | Images | Histogram | Text


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Summary:
    """Values with tags, made by `scalar`, `image`, `histogram`, `text` and `merge`.

    A pytree: its leaves are arrays, its tags are static. Return it from a compiled step, scan over it, and
    give it to `SummaryWriter.add_summary`.

    Example:
        >>> import jax, jstep.summary
        >>> step = jax.jit(lambda x: jstep.summary.scalar("loss", x * x))
        >>> step(3.0)
        Summary('loss')
    """

    parts: tuple[Part, ...]

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags, in the order the values are written."""
        return tuple(tag for part in self.parts for tag in part.tags)

    def __repr__(self) -> str:
        return f"Summary({', '.join(map(repr, self.tags))})"


def is_summary(x: Any) -> bool:
    """Whether x is a summary."""
    return isinstance(x, Summary)


def find_summaries(tree: Any) -> Iterator[Summary]:
    """All summaries in a pytree, in JAX's order."""
    return filter(is_summary, jax.tree.leaves(tree, is_leaf=is_summary))


def has_tracers(part: Part) -> bool:
    """Whether a value of the part is traced."""
    if type(part) is Scalars:
        return is_traced(part.values)
    return any(map(is_traced, jax.tree.leaves(part)))


def check_tag(tag: Any, what: str) -> str:
    """The tag, a string that is not empty.

    Raises:
        TypeError: It is no string.
        ValueError: It is empty.
    """
    if not isinstance(tag, str):
        raise TypeError(f"{what}: the tag must be a str, not {type(tag).__name__} {tag!r}")
    if not tag:
        raise ValueError(f"{what}: the tag is empty; give the value a name, such as 'loss'")
    return tag


@jax.jit
def _copy(x: jax.Array) -> jax.Array:
    return jnp.copy(x)


def is_here(x: jax.Array) -> bool:
    """Whether x can be read on the host now, without waiting for the device or copying from it."""
    is_ready = getattr(x, "is_ready", None)
    return (
        is_ready is not None
        and x.is_fully_addressable
        and bool(is_ready())
        and all(device.platform == "cpu" for device in x.devices())
    )


def keep(x: Any) -> Any:
    """The value of x, safe from what happens to x later; does not wait for the device.

    An array of the training state is deleted when the next step takes its buffer, and one of NumPy's can be
    written to. Other values are returned as they are.
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

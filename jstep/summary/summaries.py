"""Summaries as pytrees, their named collections, and merging.

Arrays are leaves and tags are static. Leading axes that a transformation adds to a leaf are steps,
in order.
"""

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state as _trace

from jstep.core import exceptions, meshes, trees
from jstep.core.checks import as_function, as_string, describe_type, format_value
from jstep.core.placement import is_on_cpus
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Tree, has_tracers, is_traced
from jstep.differentiate.loss_outputs import COLLECTORS, Collector

_STATIC = {"static": True}


# Not frozen, which would slow down creation: scalars are created on the training thread, in
# microseconds.
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
    """Images as uint8 `[count, height, width, channels]`, the sum of `added` microbatches."""

    tags: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    pixels: Any
    added: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Histogram:
    """Bucket counts and moments of the values of an array; `added` is as in `Images`.

    `sums` are the sums of x·2^−e and of its square, where e = `exponent`. `skipped` is 1 if the
    step skipped its update.
    """

    tags: tuple[str] = dataclasses.field(metadata=_STATIC)
    counts: Any
    extremes: Any
    sums: Any
    exponent: Any
    non_finite: Any
    added: Any
    skipped: Any = None


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

    A pytree with arrays as leaves and static tags, for `SummaryWriter.add_summary`.

    Attributes:
        tags: All tags, in the order in which the values are written.
        parts: The values, each with its kind and its tags; their fields may change in a minor
            release.

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

    # Called by `minimize`, which does not import this module (`Collector`).

    def _joined(self, aux: Mapping[str, Any]) -> "tuple[Mapping[str, Any], Summary]":
        return join_returned(aux, self)

    def _merged(self, summaries: "Iterable[Summary]") -> "Summary":
        return merge_parts(part for summary in summaries for part in summary.parts)


def find_summaries(tree: Tree) -> list[Summary]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Summary))
    return [leaf for leaf in leaves if isinstance(leaf, Summary)]


def is_traced_part(part: Part) -> bool:
    return is_traced(part.values) if type(part) is Scalars else has_tracers(part)


def as_tag(tag: object, what: str) -> str:
    if type(tag) is str and tag:
        # Quick, as this is called for each scalar that is logged.
        return tag
    return as_string(tag, f"{what}: tag", "give the value a name, such as 'loss'")


_copy = jax.jit(jnp.copy)


def is_here(x: jax.Array) -> bool:
    """Whether an array can be read without waiting: it is computed, in the memory of this host."""
    if not hasattr(x, "is_ready") or not x.is_fully_addressable:
        return False
    return trees.is_ready(x) and is_on_cpus(x)


def keep(x: object) -> Any:
    """Return a value that does not change until it is written.

    An array of the training state is deleted when it is donated to the next step; a NumPy array can
    be written to.
    """
    if is_traced(x):
        return x
    if isinstance(x, jax.Array):
        if is_here(x):
            with meshes.internal_transfers():
                return np.array(x)
        if not x.is_fully_addressable and x.is_fully_replicated:
            x = x.addressable_data(0)
        return _copy(x)
    if isinstance(x, np.ndarray):
        return x.copy()
    return x


# Named collections of summaries, and merging.

P = ParamSpec("P")
R = TypeVar("R")

SUMMARIES = "summaries"
DEFAULT = (SUMMARIES,)

# Collection → tags → the newest part with those tags, so that a loop that never merges keeps one
# step of summaries.
_eager: dict[str, dict[tuple[str, ...], Part]] = {}
_lock = threading.Lock()


@functools.cache
def _no_trace() -> Any:
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_trace).result()


def register(part: Part, collections: Sequence[str] | None) -> None:
    """Add a part to collections: to each one's innermost `collect`, or else to the eager ones."""
    traced = is_traced_part(part)
    for key in _collection_names(collections):
        collector = _innermost_collector(key)
        if collector is None:
            # A traced part is lost with its trace, unless the function returns it.
            if not traced:
                _add_eager(key, part)
            continue
        collector.unreturned = _unreturned
        if traced and _trace() != collector.trace:
            # Of an inner transformation: its values cannot leave it this way.
            collector.nested[part.tags] = _caller()
        else:
            collector.parts.append(part)


def _innermost_collector(key: str) -> Collector | None:
    for collector in reversed(COLLECTORS.get()):
        if collector.key == key:
            return collector
    return None


def _add_eager(key: str, part: Part) -> None:
    with _lock:
        parts = _eager.setdefault(key, {})
        # Removed first, so that the newest is the last.
        parts.pop(part.tags, None)
        parts[part.tags] = part


def make_summary(part: Part, collections: Sequence[str] | None) -> Summary:
    register(part, collections)
    return Summary((part,))


def _collection_names(collections: object) -> Sequence[str]:
    if collections is DEFAULT or collections is None:
        return DEFAULT
    names = tuple(collections) if isinstance(collections, Iterable) else (None,)
    if isinstance(collections, str) or not all(isinstance(key, str) for key in names):
        raise TypeError(
            f"collections={format_value(collections)}: must be a sequence of names, such as "
            "('summaries',), or None"
        )
    return names


_OWN = ("jstep.summary", "jstep.core.tracebacks")
"""The modules between a function that users call and the line that calls it."""


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def merge_parts(parts: Iterable[Part]) -> Summary:
    parts = tuple(parts)
    seen: set[str] = set()
    for part in parts:
        for tag in part.tags:
            if tag in seen:
                raise ValueError(
                    f"duplicate tag {tag!r}: a merged summary holds one value for each tag"
                )
            seen.add(tag)
    return Summary(parts)


def merge_all(key: str = SUMMARIES) -> Summary | None:
    """Merge the summaries added to a collection since the last call, and empty it.

    Outside `collect`, these are the summaries created eagerly; of several with the same tag, the
    newest is kept.

    Args:
        key: The name of the collection.

    Returns:
        The merged summary, or None if the collection is empty.

    Raises:
        RuntimeError: Called inside a function that JAX is tracing, without a `collect` around it.

    Example:
        >>> import jstep.summary
        >>> a, b = (jstep.summary.scalar(tag, 1.0, ["test"]) for tag in "ab")
        >>> jstep.summary.merge_all("test")
        Summary('a', 'b')
    """
    as_string(key, "key", "the name of a collection")
    collector = _innermost_collector(key)
    expected_trace = _no_trace() if collector is None else collector.trace
    if _trace() != expected_trace:
        what = f"merge_all({key!r}) was called inside a function that JAX is tracing"
        raise RuntimeError(f"{what}; wrap it before: jax.jit(jstep.summary.collect(fn))")
    if collector is not None:
        merged = collector.parts
        collector.parts = []
        return merge_parts(merged) if merged else None
    with _lock:
        parts = list(_eager.pop(key, {}).values())
    newest: list[Part] = []
    seen: set[str] = set()
    for part in reversed(parts):
        if seen.isdisjoint(part.tags):
            newest.append(part)
            seen.update(part.tags)
    return merge_parts(reversed(newest)) if newest else None


def collect(fn: Callable[P, R], key: str = SUMMARIES) -> Callable[P, tuple[R, Summary | None]]:
    """Wrap a function so that it also returns the summaries created inside it.

    The wrapped function can be transformed, as by `jax.jit` and `jax.lax.scan`, which stacks the
    summaries. A function that is transformed *inside* `fn` must return its summaries, and so must
    `fn`.

    Args:
        fn: Any function.
        key: The name of the collection; other summaries pass through to an enclosing `collect`.

    Returns:
        A function of the same arguments that returns `(result, summary)`; the summary is None if
        none was created.

    Raises:
        RuntimeError: When called: a summary was created inside a nested transformation and not
            returned from it.
        ValueError: When called: two summaries have the same tag.

    Example:
        >>> import jax, jax.numpy as jnp, jstep.summary
        >>> def predict(x):
        ...     h = jnp.tanh(x)
        ...     jstep.summary.scalar("saturated", jnp.mean(jnp.abs(h) > 0.99, dtype=jnp.float32))
        ...     return h.sum()
        >>> result, summary = jax.jit(jstep.summary.collect(predict))(jnp.ones(3))
        >>> summary
        Summary('saturated')
    """
    as_function(fn, "fn")
    as_string(key, "key", "the name of a collection")

    @functools.wraps(fn)
    def collected(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Summary | None]:
        collector = Collector(key)
        with exceptions.setting(COLLECTORS, (*COLLECTORS.get(), collector)):
            result = fn(*args, **kwargs)
        parts = [*collector.parts, *_returned(result, collector)]
        return result, merge_parts(parts) if parts else None

    return collected


def _unreturned(collector: Collector, result: object) -> Summary | None:
    """Merge the parts of a collector that are not in what the function has returned."""
    returned: set[str] = set()
    for summary in find_summaries(result):
        returned.update(summary.tags)
    _check_lost(collector, returned)
    parts = [part for part in collector.parts if not returned.issuperset(part.tags)]
    return merge_parts(parts) if parts else None


def join_returned(aux: Mapping[str, Any], created: Summary) -> tuple[Mapping[str, Any], Summary]:
    """Return a loss's other outputs, and the summary among them merged with what it created."""
    returned = aux.get(SUMMARIES)
    if not isinstance(returned, Summary):
        return aux, created
    others = {name: value for name, value in aux.items() if name != SUMMARIES}
    return others, merge_parts((*returned.parts, *created.parts))


def _returned(result: object, collector: Collector) -> list[Part]:
    """Return the parts of inner transformations that a function has returned."""
    collected: set[str] = set()
    for part in collector.parts:
        collected.update(part.tags)
    returned: list[Part] = []
    for summary in find_summaries(result):
        returned += [part for part in summary.parts if collected.isdisjoint(part.tags)]
    _check_lost(collector, collected.union(*(part.tags for part in returned)))
    nested: set[str] = set()
    for tags in collector.nested:
        nested.update(tags)
    return [part for part in returned if not nested.isdisjoint(part.tags)]


_LOST = (
    "nested in the loss, or in the function that collect runs (grad, scan, vmap, jit, remat, …), "
    "and was not returned from it; return it, and add it to the outer ones by "
    "merge([summary], collections=({key!r},))"
)


def _check_lost(collector: Collector, returned: set[str]) -> None:
    """Check that the function has returned all parts of inner transformations."""
    for tags, line in collector.nested.items():
        if not returned.issuperset(tags):
            why = _LOST.format(key=collector.key)
            raise RuntimeError(
                f"summary {tags[0]!r}, made at {line}, comes from a transformation {why}"
            )


@shortens_tracebacks
def merge(summaries: Iterable[Summary | None], collections: Sequence[str] | None = ()) -> Summary:
    """Merge several summaries into one.

    Args:
        summaries: The summaries; None is skipped.
        collections: The collections to add the result to.

    Raises:
        ValueError: Two values have the same tag.

    Example:
        >>> from jstep import summary
        >>> summary.merge([summary.scalar("loss", 0.1), summary.scalar("accuracy", 0.9)])
        Summary('loss', 'accuracy')

    Source: TensorFlow's `merge_summary`.
    """
    if not isinstance(summaries, Iterable):
        raise TypeError(
            f"summaries={format_value(summaries)}: must be a list of summaries, got "
            f"{describe_type(summaries)}"
        )
    some = [summary for summary in summaries if summary is not None]
    for summary in some:
        if not isinstance(summary, Summary):
            raise TypeError(
                f"merge: must be summaries of jstep.summary, not {describe_type(summary)}"
            )
    merged = merge_parts(part for summary in some for part in summary.parts)
    for part in merged.parts:
        register(part, () if collections is None else collections)
    return merged


def summaries_in(tree: Tree) -> Summary | None:
    """Merge all summaries in a pytree, such as a train step's metrics; return None if none.

    Raises:
        ValueError: Two values have the same tag.

    Example:
        >>> from jstep import summary
        >>> summary.summaries_in({"loss": 0.1, "aux": [summary.scalar("accuracy", 0.9)]})
        Summary('accuracy')
    """
    summaries = find_summaries(tree)
    return merge(summaries) if summaries else None


def mark_skipped(summary: Summary, skipped: object) -> Summary:
    """Note in its histograms whether the step that made a summary has skipped its update."""
    parts: list[Part] = []
    for part in summary.parts:
        if type(part) is Histogram:
            part = dataclasses.replace(part, skipped=skipped)
        parts.append(part)
    return Summary(tuple(parts))

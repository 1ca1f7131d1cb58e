"""Named collections: which summaries were made, without handing each of them on.

Eagerly made summaries gather in their collections until `merge_all`; `collect` runs a function and returns
what was made inside it, and so works under `jit`, where a side effect would leak a tracer.
"""

import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from jax.extend.core import get_opaque_trace_state

from jstep.core.checks import as_function, as_text, shown
from jstep.core.summary_collection import note_lost_summary
from jstep.core.summary_collection import register as register_with_steps
from jstep.summary.values import Part, Summary, find_summaries, has_tracers

P = ParamSpec("P")
R = TypeVar("R")

SUMMARIES = "summaries"
DEFAULT = (SUMMARIES,)

# Collection → tags → the newest part with those tags: a loop that never merges holds no more than one step of
# it.
_eager: dict[str, dict[tuple[str, ...], Part]] = {}
_lock = threading.Lock()


def _trace() -> Any:
    """What JAX is tracing now, to be compared; of jax.extend, since jax itself does not tell."""
    return get_opaque_trace_state()


@functools.cache
def _no_trace() -> Any:
    """What a thread sees that traces nothing: a new one, as this one may be tracing when it first asks."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(_trace()))
    thread.start()
    thread.join()
    return seen[0]


class _Collector:
    def __init__(self, key: str) -> None:
        self.key = key
        self.trace = _trace()
        self.parts: list[Part] = []
        self.nested: dict[tuple[str, ...], str] = {}  # tags → where they were made; never the tracers


_active: contextvars.ContextVar[tuple[_Collector, ...]] = contextvars.ContextVar("jstep_collect", default=())


def register(part: Part, collections: Sequence[str] | None) -> None:
    """Puts a new part in its collections; a traced one only where a `collect` is there to return it."""
    if type(collections) is tuple and not collections:
        return
    collectors = _active.get()
    if not any(collector.key == SUMMARIES for collector in collectors):
        note_lost_summary()
    if not collectors:
        names = _checked(collections)
        if not has_tracers(part):
            for key in names:
                _keep_newest(key, part)
        return
    traced = has_tracers(part)
    for key in _checked(collections):
        collector = next((c for c in reversed(collectors) if c.key == key), None)
        if collector is None:
            if not traced:
                _keep_newest(key, part)
        elif traced and _trace() != collector.trace:
            collector.nested[part.tags] = _caller()
        else:
            collector.parts.append(part)


def _keep_newest(key: str, part: Part) -> None:
    with _lock:
        parts = _eager.setdefault(key, {})
        parts.pop(part.tags, None)  # so that the newest is the last
        parts[part.tags] = part


def _checked(collections: Any) -> Sequence[str]:
    if collections is DEFAULT or collections is None:
        return DEFAULT
    names = tuple(collections) if isinstance(collections, Iterable) else (None,)
    if isinstance(collections, str) or not all(isinstance(key, str) for key in names):
        raise TypeError(
            f"collections={shown(collections)}: must be a sequence of names, such as ('summaries',), or None for that"
        )
    return names


def _caller() -> str:
    """File and line of the nearest frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("jstep.summary"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def merge_parts(parts: Iterable[Part]) -> Summary:
    """One summary of all parts.

    Raises:
        ValueError: Two of them have the same tag; names it.
    """
    parts = tuple(parts)
    seen: set[str] = set()
    for part in parts:
        for tag in part.tags:
            if tag in seen:
                raise ValueError(
                    f"duplicate tag {tag!r}: a merged summary holds one value for each tag. Give the values "
                    "tags of their own; values of several steps are stacked, by lax.scan for instance."
                )
            seen.add(tag)
    return Summary(parts)


def merge_all(key: str = SUMMARIES) -> Summary | None:
    """Merges the summaries of a collection that were made since the last call, and empties it.

    Outside of any `collect` these are the ones made eagerly, the newest where a tag was made several times;
    inside a function that `collect` runs, the ones made so far inside it.

    Args:
        key: The collection.

    Returns:
        The merged summary, or None where there was none.

    Raises:
        RuntimeError: Called inside a function that JAX is tracing, with no `collect` around it.

    Example:
        >>> import jstep.summary
        >>> _ = jstep.summary.merge_all()
        >>> a, b = jstep.summary.scalar("a", 1.0), jstep.summary.scalar("b", 2.0)
        >>> jstep.summary.merge_all()
        Summary('a', 'b')
        >>> print(jstep.summary.merge_all())
        None
    """
    as_text(key, "key", "the name of a collection")
    collector = next((c for c in reversed(_active.get()) if c.key == key), None)
    if collector is not None:
        if _trace() != collector.trace:
            raise RuntimeError(_UNDER_TRACE.format(key=key))
        merged, collector.parts = collector.parts, []
        return merge_parts(merged) if merged else None
    if _trace() != _no_trace():
        raise RuntimeError(_UNDER_TRACE.format(key=key))
    with _lock:
        parts = list(_eager.pop(key, {}).values())
    newest: list[Part] = []
    seen: set[str] = set()
    for part in reversed(parts):
        if seen.isdisjoint(part.tags):
            newest.append(part)
            seen.update(part.tags)
    return merge_parts(reversed(newest)) if newest else None


_UNDER_TRACE = (
    "merge_all({key!r}) gathers what was made eagerly, and was called inside a function that JAX is tracing "
    "(jit, grad, scan, vmap). Return the summaries from that function, or wrap it before it is transformed: "
    "jax.jit(jstep.summary.collect(fn)) returns (result, merged summary)."
)


def collect(fn: Callable[P, R], key: str = SUMMARIES) -> Callable[P, tuple[R, Summary | None]]:
    """Makes a function that also returns the summaries made inside it.

    What the function returns may be transformed: `jax.jit(collect(fn))`, `jax.lax.scan(collect(body), …)`
    with the summaries stacked, `jax.value_and_grad(collect(loss_fn), has_aux=True)`. A function that is
    transformed *inside* `fn` is another matter: its summaries have values only in there, and must be returned
    from it. Those of them that `fn` returns as part of its result are in the merged summary as well.

    Args:
        fn: Any function; its summaries with `key` among their collections are taken.
        key: The collection. Others pass through to the `collect` around this one, if any.

    Returns:
        A function of the same arguments that returns `(result, summary)`; the summary is None where none was
        made.

    Raises:
        RuntimeError: When called: a summary was made inside a nested transformation and not returned from it.
            Names the tag and the line, and says how to return it.
        ValueError: When called: a tag was made twice.

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
    as_text(key, "key", "the name of a collection")

    @functools.wraps(fn)
    def collected(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Summary | None]:
        collector = _Collector(key)
        token = _active.set((*_active.get(), collector))
        try:
            result = fn(*args, **kwargs)
        finally:
            _active.reset(token)
        parts = collector.parts
        if collector.nested:
            parts = parts + _returned(result, collector)
        return result, merge_parts(parts) if parts else None

    return collected


def collect_unreturned(fn: Callable[[], R]) -> Callable[[], tuple[R, Summary | None]]:
    """As `collect`, without the summaries that the function returns: what a training step adds to its metrics."""

    def collected() -> tuple[R, Summary | None]:
        collector = _Collector(SUMMARIES)
        token = _active.set((*_active.get(), collector))
        try:
            result = fn()
        finally:
            _active.reset(token)
        back = {tag for summary in find_summaries(result) for part in summary.parts for tag in part.tags}
        _refuse_lost(collector, back, _LOST_IN_A_LOSS)
        parts = [part for part in collector.parts if not back.issuperset(part.tags)]
        return result, merge_parts(parts) if parts else None

    return collected


def _merged(returned: Any, made: Any) -> Summary | None:
    return merge_parts((*returned.parts, *made.parts)) if isinstance(returned, Summary) else None


register_with_steps(collect_unreturned, _merged)


def _returned(result: Any, collector: _Collector) -> list[Part]:
    """The parts in `result` that were made under nested transformations.

    Raises:
        RuntimeError: One that was made there has not come back.
    """
    kept = {tag for part in collector.parts for tag in part.tags}
    back = [part for summary in find_summaries(result) for part in summary.parts if kept.isdisjoint(part.tags)]
    _refuse_lost(collector, kept.union(*(part.tags for part in back)), _LOST)
    nested = {tag for tags in collector.nested for tag in tags}
    return [part for part in back if not nested.isdisjoint(part.tags)]


_LOST = (
    "nested in the function that collect runs (grad, scan, vmap, jit, cond, …) and was not returned from it; it has no "
    "value outside. Return it from the transformed function: jax.value_and_grad(collect(loss_fn), has_aux=True) gives "
    "((loss, summary), grads), jax.lax.scan and jax.vmap over collect(body) give it stacked, jax.jit(collect(fn)) as "
    "it is. Then return it from the outer function as well, or add it to the outer collection with "
    "merge([summary], collections=({key!r},))."
)
_LOST_IN_A_LOSS = (
    "nested in the loss (jit, scan, remat, vmap, cond, grad, …) and was not returned from it; it has no value outside. "
    "Return it from the transformed function and add it to those of the loss: "
    "y, made = jax.jit(jstep.summary.collect(layer))(x); jstep.summary.merge([made], collections=({key!r},)). "
    "jax.checkpoint, jax.lax.scan and jax.vmap over collect(layer) likewise, the latter two give it stacked. Or make "
    "it outside, of what the transformed function returns."
)


def _refuse_lost(collector: _Collector, there: set[str], why: str) -> None:
    for tags, where in collector.nested.items():
        if not there.issuperset(tags):
            way_out = why.format(key=collector.key)
            raise RuntimeError(f"summary {tags[0]!r}, made at {where}, was made inside a transformation {way_out}")

"""Named collections of summaries.

Summaries created eagerly stay in their collections until `merge_all`. `collect` returns the summaries created inside a
function, and so works under `jit`, where a side effect would leak a tracer.
"""

import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from jax.extend.core import get_opaque_trace_state

from jstep.core.checks import as_function, as_text, setting, shown
from jstep.differentiate.engine import note_lost_summary
from jstep.differentiate.engine import register_summaries as register_with_steps
from jstep.summary.values import Part, Summary, find_summaries, has_tracers

P = ParamSpec("P")
R = TypeVar("R")

SUMMARIES = "summaries"
DEFAULT = (SUMMARIES,)

# Collection → tags → the newest part with those tags, so that a loop that never merges keeps one step of summaries.
_eager: dict[str, dict[tuple[str, ...], Part]] = {}
_lock = threading.Lock()


def _trace() -> Any:
    """Return a comparable token of the current trace; only jax.extend exposes it."""
    return get_opaque_trace_state()


@functools.cache
def _no_trace() -> Any:
    """Return the token outside any trace, taken on a new thread because the current one may be tracing."""
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
        self.nested: dict[tuple[str, ...], str] = {}  # tags → source line; tracers are never stored


_active: contextvars.ContextVar[tuple[_Collector, ...]] = contextvars.ContextVar("jstep_collect", default=())


def register(part: Part, collections: Sequence[str] | None) -> None:
    """Add a new part to its collections. A traced part is added only to an active `collect`, which returns it."""
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
            f"collections={shown(collections)}: must be a sequence of names, such as ('summaries',), or None"
        )
    return names


def _caller() -> str:
    """Return file and line of the nearest frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("jstep.summary"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def merge_parts(parts: Iterable[Part]) -> Summary:
    """Combine parts into one summary.

    Raises:
        ValueError: Two parts have the same tag; the message names it.
    """
    parts = tuple(parts)
    seen: set[str] = set()
    for part in parts:
        for tag in part.tags:
            if tag in seen:
                raise ValueError(
                    f"duplicate tag {tag!r}: a merged summary holds one value for each tag. Give each value "
                    "its own tag; values of several steps are stacked, by lax.scan for instance."
                )
            seen.add(tag)
    return Summary(parts)


def merge_all(key: str = SUMMARIES) -> Summary | None:
    """Merge the summaries added to a collection since the last call, and empty it.

    Outside `collect`, these are the summaries created eagerly; of several with the same tag, the newest is kept. Inside
    a function that `collect` runs, they are the summaries that it has created so far.

    Args:
        key: The name of the collection.

    Returns:
        The merged summary, or None if the collection is empty.

    Raises:
        RuntimeError: Called inside a function that JAX is tracing, without a `collect` around it.

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
    "merge_all({key!r}) merges summaries made eagerly, and was called inside a function that JAX is tracing "
    "(jit, grad, scan, vmap). Return the summaries from that function, or wrap it before it is transformed: "
    "jax.jit(jstep.summary.collect(fn)) returns (result, merged summary)."
)


def collect(fn: Callable[P, R], key: str = SUMMARIES) -> Callable[P, tuple[R, Summary | None]]:
    """Wrap a function so that it also returns the summaries created inside it.

    The wrapped function can be transformed: `jax.jit(collect(fn))`, `jax.lax.scan(collect(body), …)`, which stacks the
    summaries, and `jax.value_and_grad(collect(loss_fn), has_aux=True)`. If a function is transformed *inside* `fn`, its
    summaries have no value outside it and must be returned from it. Those that `fn` then returns in its result are in
    the merged summary as well.

    Args:
        fn: Any function. Summaries with `key` among their collections are collected.
        key: The name of the collection. Other summaries pass through to the enclosing `collect`, if any.

    Returns:
        A function of the same arguments that returns `(result, summary)`; the summary is None if none was created.

    Raises:
        RuntimeError: When called: a summary was created inside a nested transformation and not returned from it. The
            message has the tag, the line and how to return it.
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
    as_text(key, "key", "the name of a collection")

    @functools.wraps(fn)
    def collected(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Summary | None]:
        collector = _Collector(key)
        with setting(_active, (*_active.get(), collector)):
            result = fn(*args, **kwargs)
        parts = collector.parts
        if collector.nested:
            parts = parts + _returned(result, collector)
        return result, merge_parts(parts) if parts else None

    return collected


def collect_unreturned(fn: Callable[[], R]) -> Callable[[], tuple[R, Summary | None]]:
    """Variant of `collect` for the loss of a training step: summaries that the function returns are left out."""

    def collected() -> tuple[R, Summary | None]:
        collector = _Collector(SUMMARIES)
        with setting(_active, (*_active.get(), collector)):
            result = fn()
        back = {tag for summary in find_summaries(result) for part in summary.parts for tag in part.tags}
        _refuse_lost(collector, back, _LOST_IN_A_LOSS)
        parts = [part for part in collector.parts if not back.issuperset(part.tags)]
        return result, merge_parts(parts) if parts else None

    return collected


def _merged(returned: Any, made: Any) -> Summary | None:
    return merge_parts((*returned.parts, *made.parts)) if isinstance(returned, Summary) else None


register_with_steps(collect_unreturned, _merged)


def _returned(result: Any, collector: _Collector) -> list[Part]:
    """Return the parts in `result` that were created under nested transformations.

    Raises:
        RuntimeError: A part created there was not returned.
    """
    kept = {tag for part in collector.parts for tag in part.tags}
    back = [part for summary in find_summaries(result) for part in summary.parts if kept.isdisjoint(part.tags)]
    _refuse_lost(collector, kept.union(*(part.tags for part in back)), _LOST)
    nested = {tag for tags in collector.nested for tag in tags}
    return [part for part in back if not nested.isdisjoint(part.tags)]


_LOST = (
    "nested in the function that collect runs (grad, scan, vmap, jit, cond, …) and was not returned from it; it has no "
    "value outside. Return it from the transformed function: jax.value_and_grad(collect(loss_fn), has_aux=True) gives "
    "((loss, summary), grads), jax.lax.scan and jax.vmap over collect(body) give it stacked, jax.jit(collect(fn)) "
    "unchanged. Then return it from the outer function as well, or add it to the outer collection with "
    "merge([summary], collections=({key!r},))."
)
_LOST_IN_A_LOSS = (
    "nested in the loss (jit, scan, remat, vmap, cond, grad, …) and was not returned from it; it has no value outside. "
    "Return it from the transformed function and add it to the summaries of the loss: "
    "y, made = jax.jit(jstep.summary.collect(layer))(x); jstep.summary.merge([made], collections=({key!r},)). "
    "jax.checkpoint, jax.lax.scan and jax.vmap over collect(layer) likewise; the latter two give it stacked. Or make "
    "it outside, from what the transformed function returns."
)


def _refuse_lost(collector: _Collector, there: set[str], why: str) -> None:
    for tags, where in collector.nested.items():
        if not there.issuperset(tags):
            way_out = why.format(key=collector.key)
            raise RuntimeError(f"summary {tags[0]!r}, made at {where}, comes from inside a transformation {way_out}")

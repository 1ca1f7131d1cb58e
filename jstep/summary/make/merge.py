"""Merging of summaries."""

from collections.abc import Iterable, Sequence
from typing import Any

from jstep.core.checks import kind, shown
from jstep.summary.collected import merge_parts, register
from jstep.summary.values import Part, Summary, find_summaries


def merge(summaries: Iterable[Summary | None], collections: Sequence[str] | None = ()) -> Summary:
    """Merge several summaries into one.

    Args:
        summaries: The summaries. None, which `collect` and `merge_all` return if there is no summary, is skipped.
        collections: The collections to add the result to; none by default, since its parts are in their collections
            already. Use it to add a summary returned from a transformed function to the collection of the enclosing
            function.

    Returns:
        A `Summary`.

    Raises:
        ValueError: Two values have the same tag; the message names it.
        TypeError: An entry is not a summary.

    Example:
        >>> from jstep import summary
        >>> summary.merge([summary.scalar("loss", 0.1), summary.scalar("accuracy", 0.9)])
        Summary('loss', 'accuracy')

    Source: TensorFlow's `merge_summary`.
    """
    if isinstance(summaries, Summary):
        raise TypeError("merge: expected a list of summaries, not one Summary; write merge([summary])")
    if not isinstance(summaries, Iterable):
        raise TypeError(f"summaries={shown(summaries)}: must be a list of summaries, got {kind(summaries)}")
    parts: list[Part] = []
    for summary in summaries:
        if summary is None:
            continue
        if not isinstance(summary, Summary):
            raise TypeError(
                f"merge: expected summaries of jstep.summary, not {type(summary).__name__}; write protos "
                "separately with add_summary"
            )
        parts += summary.parts
    merged = merge_parts(parts)
    for part in merged.parts:
        register(part, () if collections is None else collections)
    return merged


def summaries_in(tree: Any) -> Summary | None:
    """Merge all summaries in a pytree, such as the metrics of a train step; return None if it has none.

    Args:
        tree: Any pytree.

    Raises:
        ValueError: Two values have the same tag; the message names it.

    Example:
        >>> from jstep import summary
        >>> summary.summaries_in({"loss": 0.1, "aux": [summary.scalar("accuracy", 0.9)]})
        Summary('accuracy')
    """
    found = list(find_summaries(tree))
    return merge(found) if found else None

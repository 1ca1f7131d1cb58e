"""Create summaries of metrics and states; `jstep.summary` is imported on first use."""

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jstep.core import trees
from jstep.core.checks import shown
from jstep.hooks.hook import Metrics
from jstep.hooks.values import is_ready, read, scalars
from jstep.state.train_state import TrainState

Selection = str | Sequence[str]


def scalar(tag: str, value: Any) -> Any:
    """A scalar summary that is not added to any collection."""
    from jstep import summary

    return summary.scalar(tag, value, collections=())


def scalars_summary(values: Mapping[str, Any]) -> Any:
    """One summary of several scalars."""
    from jstep import summary

    return summary.merge([scalar(name, value) for name, value in values.items()], collections=())


def of_metrics(metrics: Metrics, leave_out: Collection[str]) -> list[Any]:
    """One summary, in a list, of the scalar metrics and the summaries among the metrics; empty without any."""
    from jstep import summary

    values = scalars(metrics, leave_out)
    if is_ready(values):  # numbers of the host are the quickest to write
        values = read(values)
    parts = [scalar(name, value) for name, value in values.items()] + made_in(metrics)
    return [summary.merge(parts, collections=())] if parts else []


def made_in(metrics: Metrics) -> list[Any]:
    """The summaries among the metrics, merged into one, in a list; empty without any."""
    from jstep import summary

    made = summary.summaries_in(dict(metrics))
    return [] if made is None else [made]


def histograms_of(state: TrainState, globs: Sequence[str]) -> Any:
    """One summary with a histogram of each floating leaf of the state whose path matches.

    The values are counted before the state is donated to the next step; only the counts are kept.

    Raises:
        ValueError: A glob matches nothing.
    """
    from jstep import summary

    leaves = [
        (path, leaf)
        for path, leaf in trees.leaves_with_paths({"params": state.params, "slots": state.slots})
        if trees.is_trainable(leaf)
    ]
    chosen: dict[str, Any] = {}
    for glob in globs:
        found = {path: leaf for path, leaf in leaves if fnmatch.fnmatchcase(path, glob)}
        if not found:
            raise ValueError(
                f"histograms: {glob!r} matches nothing{trees.nearest(glob, [path for path, _ in leaves])}; parameters "
                "are 'params/…', slots 'slots/name/…'"
            )
        chosen |= found
    return summary.merge(
        [summary.histogram(path, leaf, collections=()) for path, leaf in chosen.items()], collections=()
    )


def check_writer(summary_writer: Any) -> Any:
    """Return the writer, or None; refuse an object without `add_summary`.

    Raises:
        TypeError: The writer has no method `add_summary`.
    """
    if summary_writer is not None and (
        isinstance(summary_writer, type) or not callable(getattr(summary_writer, "add_summary", None))
    ):
        raise TypeError(
            f"summary_writer={shown(summary_writer)}: must have a method add_summary(summary, global_step), such as a "
            "jstep.summary.SummaryWriter"
        )
    return summary_writer

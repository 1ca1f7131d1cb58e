"""The writer that hooks use: the one that was given, or the writer of the run's event file."""

from typing import Any

from jstep.core.checks import format_value
from jstep.summary.writer import SummaryWriter


def writer_of(run: Any) -> SummaryWriter | None:
    """Return the writer of the run's event file."""
    writer: SummaryWriter | None = run.shared.get(SummaryWriter)
    return writer


def as_writer(summary_writer: object) -> Any:
    if summary_writer is not None and (
        isinstance(summary_writer, type)
        or not callable(getattr(summary_writer, "add_summary", None))
    ):
        raise TypeError(
            f"summary_writer={format_value(summary_writer)}: must have a method "
            "add_summary(summary, global_step), such as a jstep.summary.SummaryWriter"
        )
    return summary_writer

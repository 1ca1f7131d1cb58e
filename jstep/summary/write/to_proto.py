"""Conversion of summaries to `Summary` protos."""

from typing import Any

from jstep.core.contexts import internal_transfers
from jstep.summary.proto import proto
from jstep.summary.values import Summary, has_tracers
from jstep.summary.write.encode import encode


def to_proto(summary: Summary) -> Any:
    """Convert a summary to a `Summary` proto, whose `SerializeToString` gives the same bytes as TensorFlow.

    It waits for the arrays.

    Args:
        summary: A summary of one step.

    Returns:
        A `Summary` of `tensorboard.compat.proto.summary_pb2`.

    Raises:
        TypeError: `summary` is not a summary of jstep, or is traced.
        ValueError: The summary holds several steps, stacked by scan or vmap.
        Exception: A value cannot be encoded; the message has its tag.

    Example:
        >>> from jstep import summary
        >>> summary.to_proto(summary.scalar("loss", 0.5)).value[0].simple_value
        0.5
    """
    if not isinstance(summary, Summary):
        raise TypeError(f"summary={summary!r}: must be a Summary of jstep.summary, got {type(summary).__name__}")
    for part in summary.parts:
        if has_tracers(part):
            raise TypeError(f"summary {part.tags[0]!r} is traced and has no value; return it from the traced function")
    with internal_transfers():
        events, errors = encode(summary, None, 0.0)
    if errors:
        raise errors[0]
    if len(events) > 1:
        raise ValueError(
            f"summary {summary.tags[0]!r} holds {len(events)} steps, and a proto holds one; select one with "
            "jax.tree.map(lambda x: x[i], summary), or give it to SummaryWriter.add_summary"
        )
    return proto("Event").FromString(events[0]).summary if events else proto("Summary")()

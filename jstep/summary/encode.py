"""Encoding of summaries as events, on the writer's thread."""

import io
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jstep.core.checks import describe_type
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.trees import has_tracers
from jstep.stores.event_files import import_extra, proto
from jstep.summary.creation import NumPyArray, bucket_limits, non_finite_error
from jstep.summary.summaries import Histogram, Images, Part, Scalars, Summary, Text, is_here

Values: TypeAlias = list[Any]


def encode_job(what: Any, step: Any, wall_time: float) -> tuple[list[bytes], list[Exception]]:
    """Encode a summary, the fields of an event, or an event that is encoded already."""
    if isinstance(what, bytes):
        return [what], []
    host_step = None if step is None else int(step)
    if host_step is not None and not -(2**63) <= host_step < 2**63:
        raise ValueError(f"global_step {host_step} does not fit into the 64 bits of an event")
    if isinstance(what, Summary):
        return encode(what, host_step, wall_time)
    return [event_bytes(host_step or 0, wall_time, **what)], []


def encode(
    summary: Summary, last_step: int | None, wall_time: float
) -> tuple[list[bytes], list[Exception]]:
    """Return an event for each step of a summary, and the errors of the parts that are not in them.

    Args:
        summary: The summary, with its arrays.
        last_step: The step of its last values; None if its first values are of step 0.
        wall_time: The time of the events.
    """
    parts = summary.parts
    if parts and all(type(part) is Scalars and type(part.values) is float for part in parts):
        # Quick, for the most common summary.
        event = proto("Event")(step=last_step or 0, wall_time=wall_time)
        for part in summary.parts:
            event.summary.value.add(tag=part.tags[0], simple_value=part.values)  # type: ignore[union-attr]
        return [event.SerializeToString()], []
    # All transfers start before the first is waited for.
    for leaf in jax.tree.leaves(summary):
        if not isinstance(leaf, jax.Array) or leaf.is_deleted() or is_here(leaf):
            continue
        if leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    # The age of values is the number of steps between theirs and the last one: parts may hold
    # different numbers of steps, and all end at the last.
    values_of_age: defaultdict[int, Values] = defaultdict(list)
    left_out: defaultdict[int, list[str]] = defaultdict(list)
    errors: list[Exception] = []
    for part in summary.parts:
        try:
            entries = list(_ENCODERS[type(part)](part))
        except Exception as error:
            errors.append(error)
            continue
        for age, values in enumerate(reversed(entries)):
            values_of_age[age] += values
            if type(part) is Histogram and not values:
                left_out[age] += part.tags
    if last_step is None:
        last_step = max(values_of_age, default=0)
    for age, tags in left_out.items():
        logger.info(
            "step %d skipped its update: values of the histogram %s are NaN or infinite, and not "
            "in the summaries",
            last_step - age,
            ", ".join(map(repr, tags)),
        )
    events: list[bytes] = []
    for age in sorted(values_of_age, reverse=True):
        if values_of_age[age]:
            content = proto("Summary")(value=values_of_age[age])
            events.append(event_bytes(last_step - age, wall_time, summary=content))
    return events, errors


def event_bytes(step: int, wall_time: float, **fields: object) -> bytes:
    return proto("Event")(step=step, wall_time=wall_time, **fields).SerializeToString()


def _rows_of_steps(x: object, rank: int, tag: str) -> NumPyArray:
    """Return an array of a rank plus a first axis of steps, its leading axes in their order."""
    if isinstance(x, jax.Array):
        if x.is_deleted():
            raise RuntimeError(
                f"summary {tag!r}: its array was deleted before it was written; make the summary "
                "inside the step"
            )
        if not x.is_fully_addressable and not x.is_fully_replicated:
            raise ValueError(
                f"summary {tag!r}: its array is split over several processes, and only process 0 "
                "writes; reduce it"
            )
    x = np.asarray(x)
    if x.ndim < rank:
        raise ValueError(
            f"summary {tag!r}: must be an array of rank {rank} or more, got shape {x.shape}"
        )
    return x.reshape(-1, *x.shape[x.ndim - rank :])


def _scalars(part: Scalars) -> Iterator[Values]:
    value = proto("Summary").Value
    rows = _rows_of_steps(part.values, part.rank, part.tags[0]).astype(np.float64)
    for row in rows.reshape(len(rows), -1).tolist():
        yield [value(tag=tag, simple_value=x) for tag, x in zip(part.tags, row, strict=True)]


def _images(part: Images) -> Iterator[Values]:
    if not part.tags:
        return
    tag = part.tags[0]
    value = proto("Summary").Value
    batches = _rows_of_steps(part.pixels, 4, tag)
    added = _rows_of_steps(part.added, 0, tag)
    if batches.dtype != np.uint8 or (added != 1).any():
        raise ValueError(
            f"summary {tag!r}: must not be averaged over microbatches; make images outside of the "
            "loss function"
        )
    for batch in batches:
        yield [
            value(tag=tag, image=_png(pixels)) for tag, pixels in zip(part.tags, batch, strict=True)
        ]


def _png(pixels: NumPyArray) -> Any:
    height, width, channels = pixels.shape
    buffer = io.BytesIO()
    pixels = pixels[..., 0] if channels == 1 else pixels
    picture = import_extra("PIL.Image", "an image summary").fromarray(pixels)
    picture.save(buffer, "PNG")
    return proto("Summary").Image(
        height=height, width=width, colorspace=channels, encoded_image_string=buffer.getvalue()
    )


def _histograms(part: Histogram) -> Iterator[Values]:
    (tag,) = part.tags
    ranks = {"counts": 1, "extremes": 1, "sums": 1, "exponent": 0, "non_finite": 0, "added": 0}
    arrays = [_rows_of_steps(getattr(part, name), rank, tag) for name, rank in ranks.items()]
    value = proto("Summary").Value
    rows = zip(*arrays, _are_skipped(part), strict=True)
    for counts, extremes, sums, exponent, non_finite, added, is_skipped in rows:
        if non_finite and is_skipped:
            yield []
            continue
        if non_finite:
            raise non_finite_error(tag, int(non_finite), int(counts.sum()) + int(non_finite))
        if added == 1:
            moments = _exact_moments(extremes, sums, int(exponent))
        else:
            # Several microbatches: their counts add up to the histogram, but their moments were
            # averaged.
            moments = _estimated_moments(counts)
        yield [value(tag=tag, histo=_histogram_proto(counts, moments))]


def _are_skipped(part: Histogram) -> list[bool]:
    """Return for each row whether the update of its step was skipped."""
    skipped = np.asarray(part.skipped) == 1
    shape = np.shape(part.added)
    if skipped.shape != shape[: skipped.ndim]:  # a histogram of several members of an ensemble
        skipped = skipped.any()
    while skipped.ndim < len(shape):  # several histograms in each step
        skipped = skipped[..., np.newaxis]
    return np.broadcast_to(skipped, shape).ravel().tolist()


class _Moments(NamedTuple):
    """The extremes, the sum and the sum of squares of the values of a histogram."""

    low: float
    high: float
    total: float
    squares: float


def _exact_moments(extremes: NumPyArray, sums: NumPyArray, exponent: int) -> _Moments:
    low, high = extremes
    total, squares = sums
    with np.errstate(over="ignore"):
        return _Moments(
            low=float(low),
            high=float(high),
            total=float(np.ldexp(float(total), exponent)),
            squares=float(np.ldexp(float(squares), 2 * exponent)),
        )


def _estimated_moments(counts: NumPyArray) -> _Moments:
    """Estimate the moments from the buckets, within 10 %."""
    (filled,) = np.nonzero(counts)
    if not filled.size:
        return _Moments(0.0, 0.0, 0.0, 0.0)
    limits = bucket_limits().clip(-1e20, 1e20)
    lefts = np.append(limits[:1], limits[:-1])
    middles = (lefts + limits) / 2
    return _Moments(
        low=float(lefts[filled[0]]),
        high=float(limits[filled[-1]]),
        total=counts @ middles,
        squares=counts @ middles**2,
    )


def _histogram_proto(counts: NumPyArray, moments: _Moments) -> Any:
    limits = bucket_limits()
    (filled,) = np.nonzero(counts)
    # TensorFlow also writes the empty buckets at either end. They are omitted here: TensorBoard
    # replaces their limits by the extremes, which gives buckets that end before they begin. A
    # bucket begins where the one before it ends, so the empty bucket before a filled one is
    # written.
    ends = np.union1d(filled, filled[1:] - 1) if filled.size else np.array([-1])
    return proto("HistogramProto")(
        min=moments.low,
        max=moments.high,
        num=float(counts.sum(dtype=np.float64)),
        sum=moments.total,
        sum_squares=moments.squares,
        bucket_limit=limits[ends].tolist(),
        bucket=counts[ends].astype(np.float64).tolist(),
    )


def _texts(part: Text) -> Iterator[Values]:
    shape = proto("TensorShapeProto")(dim=[{"size": n} for n in part.shape])
    tensor = proto("TensorProto")(
        dtype=proto("DataType").DT_STRING,
        tensor_shape=shape,
        string_val=[s.encode() for s in part.strings],
    )
    metadata = proto("SummaryMetadata")(plugin_data={"plugin_name": "text"})
    yield [proto("Summary").Value(tag=part.tags[0], metadata=metadata, tensor=tensor)]


_ENCODERS: dict[type[Part], Callable[[Any], Iterator[Values]]] = {
    Scalars: _scalars,
    Images: _images,
    Histogram: _histograms,
    Text: _texts,
}


def to_proto(summary: Summary) -> Any:
    """Convert a summary to tensorboard's `Summary` proto, with the same bytes as TensorFlow's.

    It waits for the arrays.

    Raises:
        ValueError: The summary holds several steps, stacked by scan or vmap.

    Example:
        >>> from jstep import summary
        >>> summary.to_proto(summary.scalar("loss", 0.5)).value[0].simple_value
        0.5
    """
    if not isinstance(summary, Summary):
        raise TypeError(
            f"summary={summary!r}: must be a Summary of jstep.summary, got {describe_type(summary)}"
        )
    for part in summary.parts:
        if has_tracers(part):
            raise TypeError(
                f"summary {part.tags[0]!r} is traced and has no value; return it from the traced "
                "function"
            )
    with internal_transfers():
        events, errors = encode(summary, None, 0.0)
    if errors:
        raise errors[0]
    if len(events) > 1:
        raise ValueError(
            f"summary {summary.tags[0]!r} holds {len(events)} steps; use "
            "jax.tree.map(lambda x: x[i], summary)"
        )
    if not events:
        return proto("Summary")()
    return proto("Event").FromString(events[0]).summary

"""Event files: histograms, the encoding of events, and the files that hold them."""

import contextlib
import functools
import io
import itertools
import logging
import math
import operator
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.meshes import internal_transfers, on_any_mesh
from jstep.core.trees import Array, has_tracers, is_traced
from jstep.stores.event_files import frame, imported, is_event_file, proto
from jstep.stores.files import ObjectAppender, make_folders, sync, sync_folder
from jstep.stores.objects import STARTING, Objects, is_url
from jstep.summary.named_collections import DEFAULT, summary_of
from jstep.summary.summaries import Histogram, Images, Part, Scalars, Summary, Text, check_tag, is_here

# Histogram summaries, counted on the device into TensorFlow's exponential buckets.
#
# For float32 and narrower floats, each value costs two reads of small tables instead of a binary search. A cell of 2^18
# neighbouring floats (a sign, an exponent and 5 bits of the mantissa) is narrower than any bucket, so that it contains
# at most one limit. The tables hold the number of limits below the cell and the limit inside it; one comparison
# decides. Counts are exact: the limits, which are doubles, are rounded up to the dtype of the values, and v ≥ limit
# holds for the rounded limit if and only if it holds for the double.

NumPyArray: TypeAlias = np.ndarray[Any, Any]

_CELL_BITS = 18
_READ_AT_ONCE = 2**16
"""Largest array on the device that is checked eagerly for non-finite values, if it is ready."""


@functools.cache
def bucket_limits() -> NumPyArray:
    """Return TensorFlow's limits as doubles, `[1551]`: 0, ±1e-12·1.1^i up to 1e20, and ±the largest double."""
    growing = itertools.accumulate(itertools.repeat(1.1), operator.mul, initial=1e-12)
    positive = [*itertools.takewhile(lambda v: v < 1e20, growing), float(np.finfo(np.float64).max)]
    return np.array([*(-v for v in reversed(positive)), 0.0, *positive])


def histogram(tag: str, values: Any, collections: Sequence[str] | None = DEFAULT) -> Summary:
    """Return a summary of the distribution of the values of an array.

    Values are counted on the device, into buckets whose limits grow by 10 % from 1e-12 to 1e20 on both sides of zero;
    bucket i holds limit[i−1] ≤ x < limit[i]. Only the counts, 6 kB for any array, are transferred to the host.

    Args:
        tag: The tag.
        values: An array of real numbers of any shape. An eager call reads it before a later step can reuse its buffer.
        collections: The collections to add the summary to; None for the default one, () for none.

    Returns:
        A `Summary`.

    Raises:
        TypeError: The values are not an array of real numbers.
        ValueError: A value is NaN or infinite. Values on the host, and small arrays on the device that are ready, are
            checked at once. Others are checked by the writer, which raises at its next call.

    Example:
        >>> import jax.numpy as jnp, jstep.summary
        >>> jstep.summary.histogram("weights", jnp.linspace(-1.0, 1.0, 1000))
        Summary('weights')

    Source: TensorFlow's `histogram_summary` and `histogram::Histogram`.
    """
    check_tag(tag, "histogram")
    if not is_traced(values):
        with internal_transfers():
            values = _eager(tag, values)
    if not (
        jnp.issubdtype(values.dtype, jnp.floating) or jnp.issubdtype(values.dtype, jnp.integer) or values.dtype == bool
    ):
        raise TypeError(f"histogram {tag!r}: values must be real numbers, not {values.dtype}")
    is_wide = isinstance(values, np.ndarray) and values.dtype != jax.dtypes.canonicalize_dtype(values.dtype)
    with internal_transfers():
        part = Histogram((tag,), **(_count_on_host(values) if is_wide else _count(values)))
    return summary_of(part, collections)


def _eager(tag: str, values: Any) -> Any:
    """Convert concrete values to an array; check them if that does not wait for the device."""
    if not isinstance(values, jax.Array):
        given = values
        try:
            values = np.asarray(values)
        except (ValueError, TypeError) as error:
            raise TypeError(
                f"histogram {tag!r}: values must be an array, not {type(values).__name__}: {error}"
            ) from error
        if values.dtype.kind not in "biufV":
            kind = type(given).__name__ if values.dtype == object else values.dtype
            raise TypeError(f"histogram {tag!r}: values must be an array of real numbers, not {kind}")
        # A dtype of the device: without `jax_enable_x64`, integers that exceed 32 bits become floats.
        dtype = jax.dtypes.canonicalize_dtype(values.dtype)
        if dtype != values.dtype and values.dtype.kind in "iu" and values.size:
            info = np.iinfo(dtype)
            if values.min() < info.min or values.max() > info.max:
                dtype = np.dtype(np.float32)
        with np.errstate(over="ignore"):
            narrow = values.astype(dtype)
        # Finite doubles that overflow float32 stay doubles.
        if values.dtype != np.float64 or not np.isfinite(values[~np.isfinite(narrow)]).any():
            values = narrow
    elif values.size > _READ_AT_ONCE or not is_here(values):
        return values
    if jnp.issubdtype(values.dtype, jnp.floating):
        bad = values.size - int(np.count_nonzero(np.isfinite(np.asarray(values).astype(np.float64))))
        if bad:
            raise non_finite_error(tag, bad, values.size)
    return values


def non_finite_error(tag: str, count: int, size: int) -> ValueError:
    """Return the error for non-finite values, which fit no bucket."""
    return ValueError(
        f"histogram {tag!r}: {count} of {size} values are NaN or infinite. The run has probably diverged: "
        "look at the loss and the gradients of earlier steps (NanLossHook stops at the first such step), "
        "or leave them out with jnp.where or jnp.nan_to_num."
    )


@jax.jit
@on_any_mesh()
def _count(x: Array) -> dict[str, Array]:
    """Return the fields of a `Histogram`. Axes are summed separately, which keeps float32 sums accurate."""
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= 4:
        finite = jnp.ones(x.shape, bool)
    else:
        x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)  # exact: all other dtypes are narrower
        finite = jnp.isfinite(x)
        x = jnp.where(finite, x, jnp.zeros((), x.dtype))
    counts = jnp.zeros(bucket_limits().size + 1, jnp.int32).at[_bucket(x)].add(finite.astype(jnp.int32))
    extremes = jnp.stack([x.min(), x.max()]) if x.size else jnp.zeros(2, x.dtype)
    y = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.integer) else x
    _, exponent = jnp.frexp(jnp.max(jnp.abs(y), initial=0))
    half = exponent // 2
    y = y * _power_of_two(-half, y.dtype) * _power_of_two(half - exponent, y.dtype)
    return {
        "counts": counts[:-1],  # no value is below -DBL_MAX: TensorFlow's bucket i is the one that ends at limit i
        "extremes": extremes,
        "sums": jnp.stack([_sum(y), _sum(y * y)]),
        "exponent": exponent,
        "non_finite": jnp.sum(~finite, dtype=jnp.int32),
        "added": jnp.ones((), jnp.int32),
    }


def _count_on_host(x: NumPyArray) -> dict[str, Any]:
    """Return what `_count` does, for finite doubles that devices cannot hold while 64-bit types are off."""
    last = bucket_limits().size - 1
    buckets = np.minimum(np.searchsorted(bucket_limits(), x.ravel(), side="right"), last)
    _, exponent = np.frexp(np.abs(x).max())
    y = np.ldexp(x, -exponent)
    return {
        "counts": np.bincount(buckets, minlength=last + 1).astype(np.int32),
        "extremes": np.stack([x.min(), x.max()]),
        "sums": np.stack([y.sum(), (y * y).sum()]),
        "exponent": exponent,
        "non_finite": np.int32(0),
        "added": np.int32(1),
    }


def _power_of_two(exponent: Array, dtype: Any) -> Array:
    return jnp.ldexp(jnp.ones((), dtype), exponent)


def _sum(x: Array) -> Array:
    """Sum in parts of a few thousand elements, to limit rounding errors."""
    if x.ndim == 1 and x.size > 4096:
        whole = x.size // 1024 * 1024
        return x[:whole].reshape(-1, 1024).sum(axis=1).sum() + x[whole:].sum()
    while x.ndim:
        x = x.sum(axis=-1)
    return x


def _bucket(x: Array) -> Array:
    """Return the number of limits ≤ x, elementwise."""
    limits = _limits_as(x.dtype)
    if x.dtype != jnp.float32:
        below_all = float(np.iinfo(x.dtype).min) if x.dtype.kind in "iu" else -np.inf
        start = int(np.searchsorted(bucket_limits(), below_all))
        found = jnp.searchsorted(jnp.asarray(limits), x, side="right").astype(jnp.int32) + start
        return jnp.minimum(found, bucket_limits().size - 1)  # the largest double belongs to the last bucket
    below, inside = _cells()
    key = _sortable(jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.where)
    cell = (key >> np.uint32(_CELL_BITS)).astype(jnp.int32)
    return jnp.asarray(below)[cell] + (key >= jnp.asarray(inside)[cell]).astype(jnp.int32)


def _sortable(bits: Any, where: Any) -> Any:
    """Map bits of float32 to uint32 in the order of the floats, subnormals included, which devices flush to 0."""
    sign = np.uint32(2**31)
    return where(bits >= sign, ~bits, bits | sign)


def _limits_as(dtype: Any) -> NumPyArray:
    """Return the limits in the dtype of the values, rounded up so that comparisons give the same as with doubles.

    Limits outside the range of an integer dtype are left out.
    """
    limits = bucket_limits()
    if dtype == np.float64:
        return limits
    if dtype == np.float32:
        with np.errstate(over="ignore"):
            rounded = limits.astype(np.float32)
        return np.where(rounded < limits, np.nextafter(rounded, np.float32(np.inf)), rounded)
    info = np.iinfo(dtype)
    inside = limits[(limits >= float(info.min)) & (limits <= float(info.max))]
    # Computed with Python integers: the largest int64 is not representable as a double.
    return np.array([min(int(np.ceil(v)), info.max) for v in inside.tolist()], dtype)


@functools.cache
def _cells() -> tuple[NumPyArray, NumPyArray]:
    """Return, for each cell of float32, the number of limits ≤ its smallest value and the key of the next limit."""
    limits = _limits_as(np.dtype(np.float32))
    limit_keys = _sortable(limits.view(np.uint32), np.where)
    limit_keys[limits == 0] -= 1  # -0 comes just before 0 in this order, but belongs to the same bucket
    smallest = np.arange(2 ** (32 - _CELL_BITS), dtype=np.uint32) << _CELL_BITS
    below = np.searchsorted(limit_keys, smallest, side="right").astype(np.int32)
    inside = np.append(limit_keys, np.uint32(2**32 - 1))[below]
    return below, inside


# Encoding of summaries as events, on the writer's thread.

Values: TypeAlias = list[Any]
"""Protos `Summary.Value`."""


def event_bytes(step: int, wall_time: float, **fields: Any) -> bytes:
    """Return a serialized Event."""
    return proto("Event")(step=step, wall_time=wall_time, **fields).SerializeToString()


def encode_job(what: Any, step: Any, wall_time: float) -> tuple[list[bytes], list[Exception]]:
    """Encode a job of the thread: a summary, the fields of an event, or an event that is already serialized."""
    if isinstance(what, bytes):
        return [what], []
    host_step = None if step is None else int(step)
    if host_step is not None and not -(2**63) <= host_step < 2**63:
        raise ValueError(f"global_step {host_step} does not fit into the 64 bits of an event")
    if isinstance(what, Summary):
        return encode(what, host_step, wall_time)
    return [event_bytes(host_step or 0, wall_time, **what)], []


def encode(summary: Summary, last_step: int | None, wall_time: float) -> tuple[list[bytes], list[Exception]]:
    """Return the serialized events of a summary, and the errors; wait for its arrays.

    Leading axes, added by scan and vmap, are steps in order, and the last one is `last_step`; without a step they are
    numbered from 0. If a part cannot be encoded, the others still are.
    """
    if summary.parts and all(type(part) is Scalars and type(part.values) is float for part in summary.parts):
        event = proto("Event")(step=last_step or 0, wall_time=wall_time)
        for part in summary.parts:
            event.summary.value.add(tag=part.tags[0], simple_value=part.values)  # type: ignore[union-attr]
        return [event.SerializeToString()], []
    for leaf in jax.tree.leaves(summary):
        if isinstance(leaf, jax.Array) and not (leaf.is_deleted() or is_here(leaf)) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()  # start all transfers before waiting for the first
    by_age: defaultdict[int, Values] = defaultdict(list)  # steps before the last one → values
    errors: list[Exception] = []
    for part in summary.parts:
        try:
            entries = list(_ENCODERS[type(part)](part))
        except Exception as error:
            errors.append(error)
            continue
        for age, values in enumerate(reversed(entries)):
            by_age[age] += values
    if last_step is None:
        last_step = max(by_age, default=0)
    events = [
        event_bytes(last_step - age, wall_time, summary=proto("Summary")(value=by_age[age]))
        for age in sorted(by_age, reverse=True)
        if by_age[age]
    ]
    return events, errors


def _stacked(x: Any, rank: int, tag: str) -> NumPyArray:
    """Return `x` on the host, reshaped to one leading axis, the steps."""
    if isinstance(x, jax.Array):
        if x.is_deleted():
            raise RuntimeError(
                f"summary {tag!r}: its array was deleted before it was written: it was donated to a "
                "step. Make the summary inside the step, or before the next one."
            )
        if not x.is_fully_addressable and not x.is_fully_replicated:
            raise ValueError(
                f"summary {tag!r}: its array is split over several processes ({x.sharding}), and "
                "only process 0 writes. Reduce it, or replicate it with jax.lax.with_sharding_constraint."
            )
    x = np.asarray(x)
    if x.ndim < rank:
        raise ValueError(f"summary {tag!r}: must be an array of rank {rank} or more, got shape {x.shape}")
    return x.reshape(-1, *x.shape[x.ndim - rank :])


def _scalars(part: Scalars) -> Iterator[Values]:
    value = proto("Summary").Value
    rows = _stacked(part.values, part.rank, part.tags[0]).astype(np.float64)
    for row in rows.reshape(len(rows), -1).tolist():
        yield [value(tag=tag, simple_value=x) for tag, x in zip(part.tags, row, strict=True)]


def _images(part: Images) -> Iterator[Values]:
    if not part.tags:
        return
    tag = part.tags[0]
    value = proto("Summary").Value
    batches, added = _stacked(part.pixels, 4, tag), _stacked(part.added, 0, tag)
    if batches.dtype != np.uint8 or (added != 1).any():
        raise ValueError(
            f"summary {tag!r}: pictures that were added up or averaged, as num_microbatches does with what "
            "the loss function returns, cannot be written. Make them outside of the loss function."
        )
    for batch in batches:
        yield [value(tag=tag, image=_png(pixels)) for tag, pixels in zip(part.tags, batch, strict=True)]


def _png(pixels: NumPyArray) -> Any:
    height, width, channels = pixels.shape
    buffer = io.BytesIO()
    imported("PIL.Image", "an image summary").fromarray(pixels[..., 0] if channels == 1 else pixels).save(buffer, "PNG")
    return proto("Summary").Image(
        height=height, width=width, colorspace=channels, encoded_image_string=buffer.getvalue()
    )


def _histograms(part: Histogram) -> Iterator[Values]:
    (tag,) = part.tags
    ranks = {"counts": 1, "extremes": 1, "sums": 1, "exponent": 0, "non_finite": 0, "added": 0}
    arrays = [_stacked(getattr(part, name), rank, tag) for name, rank in ranks.items()]
    value = proto("Summary").Value
    for counts, extremes, sums, exponent, non_finite, added in zip(*arrays, strict=True):
        if non_finite:
            raise non_finite_error(tag, int(non_finite), int(counts.sum()) + int(non_finite))
        with np.errstate(over="ignore"):
            moments = [float(np.ldexp(float(s), k * int(exponent))) for k, s in enumerate(sums, start=1)]
        low, high = extremes
        if added != 1:
            low, high, *moments = _from_buckets(counts)
        yield [value(tag=tag, histo=_histogram_proto(counts, float(low), float(high), *moments))]


def _from_buckets(counts: NumPyArray) -> tuple[float, float, float, float]:
    """Estimate smallest and largest value, sum and sum of squares from the buckets, within 10 %.

    Used for several microbatches: their counts add up to the histogram, but their moments were averaged.
    """
    limits = bucket_limits().clip(-1e20, 1e20)
    lefts = np.append(limits[:1], limits[:-1])
    (filled,) = np.nonzero(counts)
    if not filled.size:
        return 0.0, 0.0, 0.0, 0.0
    middles = (lefts + limits) / 2
    return lefts[filled[0]], limits[filled[-1]], counts @ middles, counts @ middles**2


def _histogram_proto(counts: NumPyArray, low: float, high: float, total: float, squares: float) -> Any:
    """Return the proto of a histogram. Runs of empty buckets between filled ones are merged, as in TensorFlow.

    TensorFlow also writes the empty buckets at either end. They are left out here: TensorBoard replaces their limits by
    the extremes, which gives buckets that end before they begin.
    """
    limits = bucket_limits()
    (filled,) = np.nonzero(counts)
    before = filled[1:] - 1  # the last empty bucket of each run, or a filled one
    ends = np.union1d(filled, before) if filled.size else np.array([-1])
    return proto("HistogramProto")(
        min=low,
        max=high,
        num=float(counts.sum(dtype=np.float64)),
        sum=total,
        sum_squares=squares,
        bucket_limit=limits[ends].tolist(),
        bucket=counts[ends].astype(np.float64).tolist(),
    )


def _texts(part: Text) -> Iterator[Values]:
    shape = proto("TensorShapeProto")(dim=[{"size": n} for n in part.shape])
    tensor = proto("TensorProto")(
        dtype=proto("DataType").DT_STRING, tensor_shape=shape, string_val=[s.encode() for s in part.strings]
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


# Event files: location, name and first record, on a disk and below a URL.

_logger = logging.getLogger("jstep")


class LocalFile:
    """A local file.

    Args:
        logdir: Its directory, which is created if necessary.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, logdir: str) -> None:
        self._logdir = logdir
        self._open()

    def _open(self) -> None:
        make_folders(self._logdir)
        there = filter(is_event_file, os.listdir(self._logdir))
        self.path, self._is_named = os.path.join(self._logdir, _file_name(there)), False
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115  closed by `close`
        try:
            self._append(_first_record())
        except BaseException:
            self._file.close()
            os.unlink(self.path)
            raise

    def write(self, data: bytes) -> None:
        """Append records atomically: on an error, none of them is written.

        If the file or its directory was removed meanwhile, a new file is created in the same place, so that later
        records are not lost silently.
        """
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                removed = self.path
                self._file.close()
                self._open()
                _logger.warning(
                    "%s was removed while a SummaryWriter wrote to it, and its events are lost; continuing in %s",
                    removed,
                    self.path,
                )
            self._append(data)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self.path) from error

    def _append(self, data: bytes) -> None:
        start = self._file.tell()
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            try:
                self._file.truncate(start)  # leave no incomplete record
            except OSError:
                _logger.warning("%s: its last record may be incomplete", self.path)
            raise

    def sync(self) -> None:
        """Flush the records to disk, and the name of a new file.

        Raises:
            OSError: The system could not write them.
        """
        sync(self._file.fileno(), self.path, data_only=True)
        if not self._is_named:
            with contextlib.suppress(FileNotFoundError):  # the directory was renamed
                sync_folder(os.path.dirname(self.path))
            self._is_named = True

    def due(self) -> float:
        """Return the time for the next `sync`, by the monotonic clock; infinity if nothing is pending."""
        return math.inf

    def close(self) -> None:
        """Flush the records to disk, and close the file."""
        try:
            self.sync()
        finally:
            self._file.close()


Sink: TypeAlias = LocalFile | ObjectAppender
"""A destination for records."""

FILE_VERSION = "brain.Event:2"
"""From this version on, TensorBoard uses session logs to determine which events a restart has replaced."""

_PREFIX = "events.out.tfevents."

_counter = itertools.count()


def open_event_file(logdir: str, flush_secs: float) -> Sink:
    """Create a file in `logdir`, or an object below it, with its first event.

    Raises:
        OSError: The directory or the file cannot be written; the message has the directory.
    """
    if is_url(logdir):
        return _objects(logdir, flush_secs)
    try:
        return LocalFile(logdir)
    except OSError as error:
        raise type(error)(error.errno, f"SummaryWriter cannot write to its logdir: {error.strerror}", logdir) from error


def _first_record() -> bytes:
    source = {"writer": "jstep.summary"}
    return frame(event_bytes(0, time.time(), file_version=FILE_VERSION, source_metadata=source))


def _objects(logdir: str, flush_secs: float) -> ObjectAppender:
    """Create objects, each with the first record of an event file; the first is written before this returns."""
    objects = Objects(logdir)
    with objects.within(STARTING):
        name = _file_name(objects.list(_PREFIX, _PREFIX + "~"))
        stem = name.rpartition(".")[0]
        later = (f"{stem}.{next(_counter):06d}" for _ in itertools.count())
        return ObjectAppender(objects, itertools.chain([name], later).__next__, _first_record(), flush_secs)


def _file_name(there: Iterable[str]) -> str:
    """Return a name that sorts after all others in the directory, since TensorBoard reads files in that order.

    Process id and counter distinguish writers of the same second. If an existing file still sorts later, because it is
    of the same second or of a host whose clock is ahead, the time in the name is moved forward.
    """
    rest = f"{socket.gethostname()}.{os.getpid()}.{next(_counter):06d}"
    name = f"{_PREFIX}{int(time.time()):010d}.{rest}"
    newest = max(there, default="")
    if newest >= name:
        stamp = newest.removeprefix(_PREFIX).partition(".")[0]
        if stamp.isdecimal() and len(stamp) == 10:
            name = f"{_PREFIX}{int(stamp) + 1:010d}.{rest}"
    return name

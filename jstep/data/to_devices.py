"""Batches on their way to devices: copies, placement, the rows of each process, and a thread that moves them ahead."""

import contextlib
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jstep.core import trees
from jstep.core.checks import as_function, as_int, kind, shown
from jstep.core.exceptions import note
from jstep.core.meshes import dims_of, internal_transfers, mesh_axes_of, mesh_of, parts_along, require_mesh
from jstep.core.placement import compiles_only, is_shape, refuse_compile_only
from jstep.core.threads import MAKING, Thread, doing
from jstep.core.tracebacks import shortens_tracebacks
from jstep.data.sequence import BatchIterator
from jstep.queues.queues import until_end
from jstep.state.sharding import axis_size

# Placement of host data on devices by a sharding, on one process or several.


def placement(sharding: Any, argument: str = "sharding") -> Callable[[Any], Any]:
    """Return a function that places an item from `copied` as `sharding` specifies; None means the default device.

    Raises:
        TypeError: `sharding` contains something other than shardings. The message contains its path.
        ValueError: `sharding` contains a PartitionSpec and no mesh is set.
    """
    if sharding is None:
        return _place_on_default_device

    def as_sharding(keys: Any, leaf: Any) -> Sharding | jax.Device:
        if isinstance(leaf, Sharding | jax.Device):
            return leaf
        what = f"{argument}: {leaf!r} at {trees.quoted(trees.path_str(keys))}"
        if not isinstance(leaf, PartitionSpec):
            raise TypeError(
                f"{what} is not a jax.sharding.Sharding; make one from a mesh and a spec: "
                'NamedSharding(mesh, PartitionSpec("data"))'
            )
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ValueError(
                f"{what} needs a mesh: give NamedSharding(mesh, {leaf!r}), or set the mesh with jax.set_mesh(mesh)"
            )
        return NamedSharding(mesh, leaf)

    sharding = jax.tree_util.tree_map_with_path(
        as_sharding, sharding, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    refuse_compile_only(sharding, argument)
    local = all(getattr(s, "is_fully_addressable", True) for s in jax.tree.leaves(sharding))

    def place(item: Any) -> Any:
        try:
            with internal_transfers():
                if local:
                    return jax.device_put(item, sharding)
                return jax.tree.map(place_rows, item, jax.tree.broadcast(sharding, item))
        except ValueError as error:
            _explain(item, sharding, error)
            raise

    return place


def _place_on_default_device(item: Any) -> Any:
    # A JAX array keeps its placement, which may span other processes.
    others, filled = trees.arrays_of(item, lambda leaf: not isinstance(leaf, jax.Array))
    with internal_transfers():
        # One call for all: most of its time is spent in Python, which keeps the loop from running.
        return filled(jax.device_put(others))


def _explain(item: Any, sharding: Any, error: ValueError) -> None:
    """Raise an error that names the leaf whose shape does not divide by its sharding."""
    try:
        each = jax.tree.leaves(jax.tree.broadcast(sharding, item))
    except ValueError:
        return  # the structures differ, as the original error reports
    for (path, leaf), one in zip(trees.leaves_with_paths(item), each, strict=True):
        if not isinstance(one, NamedSharding):
            continue
        parts = 1 if one.is_fully_addressable else jax.process_count()
        for dim, axis in enumerate(one.spec):
            count = parts_along(one.mesh, axis)
            here = max(1, count // parts) if isinstance(leaf, np.ndarray) else count
            if dim >= np.ndim(leaf) or np.shape(leaf)[dim] % here:
                raise ValueError(
                    f"sharding: {one.spec} splits dimension {dim} into {count} parts (axis {axis!r}), {here} of them "
                    f"here, and {trees.leaf_at(path)} has shape {np.shape(leaf)} on this process; choose a batch "
                    f"of a multiple of {here} rows"
                ) from error


def _as_known(keys: Any, leaf: Any) -> Any:
    """Convert an array of another library, such as a PyTorch tensor, to a NumPy array; reject other leaves."""
    if trees.is_array_or_number(leaf):
        return leaf
    array = leaf if isinstance(leaf, np.ndarray | np.generic) else _taken_over(leaf)
    if trees.is_array_or_number(array):
        return array
    where = f"the leaf at {trees.path_str(keys)!r}" if keys else "the item"
    what = kind(leaf) if array is None else f"{kind(leaf)} ({array.dtype})"
    raise TypeError(
        f"item: {where} must be a number or an array of numbers, got {shown(leaf, 60)}, {what}; remove from the "
        "item what a device cannot hold"
    )


def _taken_over(leaf: Any) -> Any:
    """Convert an array of another library to NumPy, without a copy if possible, or to JAX; None for other types."""
    ways: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("numpy", lambda: leaf.numpy()),
        ("__dlpack__", lambda: np.from_dlpack(leaf)),
        ("__dlpack__", lambda: jnp.copy(jnp.from_dlpack(leaf))),  # bfloat16, other devices
        ("__array__", lambda: np.asarray(leaf)),
    )
    for method, way in ways:
        try:
            found = way() if hasattr(leaf, method) else None
        except Exception:
            continue
        if isinstance(found, np.ndarray | np.generic | jax.Array):
            return found
    return None


def copied(item: Any, *, fresh: bool = False) -> Any:
    """Copy a batch into arrays that the loader cannot overwrite.

    Args:
        item: A batch from a loader, which may reuse its buffers for the next batch. Arrays of other libraries become
            NumPy arrays.
        fresh: Whether the arrays are already new, so that no copy is needed.

    Raises:
        OverflowError: An integer does not fit its dtype on a device. The message contains the path of its leaf.
    """
    leaves, treedef = trees.flatten(item)
    if not all(map(trees.is_array_or_number, leaves)):
        item = jax.tree_util.tree_map_with_path(_as_known, item)
        leaves = jax.tree.leaves(item)
    trees.refuse_wide(item, "batch")
    if fresh:
        return item
    return treedef.unflatten([_copy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves])


_LARGE = 2**18
"""The bytes from which a copy is aligned."""
_ALIGNMENT = 64
"""On a CPU a program uses an array that begins at a multiple of so many bytes where it is, and copies others again."""


def _copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy an array, a large one to where a program on a CPU can use it without another copy."""
    if array.nbytes < _LARGE:
        return np.array(array, order="C")
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, memory, start)
    copy[...] = array
    return copy


# Shardings of batches, and global batches from the rows of each process.


def shard_batch(local_batch: Any, mesh: Any, axis: Any = "data") -> Any:
    """Assemble a global batch, sharded over a mesh axis, from the local rows of each process.

    Args:
        local_batch: A tree of arrays with the same number of rows, on all processes; with one process, the whole batch.
        mesh: A `jax.sharding.Mesh`.
        axis: The mesh axis (or a tuple of axes) over which rows are split.

    Returns:
        A tree of global arrays of shape (rows of all processes, …). For shapes, and on a mesh from `jstep.topology`, a
        tree of shapes with shardings.

    Raises:
        ValueError: The mesh has no such axis, or the rows do not divide over it (names the leaf).
        OverflowError: An integer does not fit its dtype on a device (names the leaf).

    Example:
        >>> import jax, jstep, numpy as np
        >>> tuple(jstep.shard_batch({"x": np.ones((8, 2))}, jax.make_mesh((1,), ("data",)))["x"].sharding.spec)
        ('data',)
    """
    mesh = require_mesh(mesh)
    parts = axis_size(mesh, axis, f"axis={axis!r}")
    trees.refuse_wide(local_batch, "local_batch")
    sharding = NamedSharding(mesh, PartitionSpec(axis))

    sizes = trees.leading_sizes(local_batch)
    if len(sizes) > 1:
        raise ValueError(f"local_batch: all leaves must have the same number of rows; got {', '.join(sizes.values())}")

    def leaf(keys: Any, rows: Any) -> Any:
        named = trees.leaf_at(trees.path_str(keys))
        if np.ndim(rows) == 0:
            raise ValueError(f"local_batch: {named} is a scalar and has no rows; close over it in the loss")
        if isinstance(rows, jax.Array) and not rows.is_fully_addressable:
            return jax.device_put(rows, sharding)
        here = np.shape(rows)[0]
        # With compile-only devices there are no other processes: the rows are the whole batch.
        processes = 1 if compiles_only(mesh) else len(owners_of(sharding))
        local_parts = max(1, parts // processes)
        if here % local_parts:
            raise ValueError(
                f"local_batch: {named} has {here} rows on this process, which do not split over the "
                f"{local_parts} parts that axis {axis!r} ({parts} in all) has here; use a multiple of {local_parts}"
            )
        if compiles_only(mesh) or is_shape(rows):
            dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(rows))
            return jax.ShapeDtypeStruct((here * processes, *np.shape(rows)[1:]), dtype, sharding=sharding)
        return place_rows(rows, sharding)

    return jax.tree_util.tree_map_with_path(leaf, local_batch)


def owners_of(sharding: NamedSharding) -> list[int]:
    """Return one process for each part of the rows, in order; processes that hold the same rows count once."""
    rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    places: Any = rows.devices_indices_map((int(sharding.mesh.devices.size),))
    parts: dict[int, set[int]] = {}
    for device, (index,) in places.items():
        parts.setdefault(device.process_index, set()).add(index.start or 0)
    first_of: dict[tuple[int, ...], int] = {}
    for process, starts in sorted(parts.items()):
        first_of.setdefault(tuple(sorted(starts)), process)
    return [process for _, process in sorted(first_of.items())]


def place_rows(rows: Any, sharding: Any) -> jax.Array:
    """Assemble a global array with a sharding from the local rows of each process.

    Args:
        rows: The rows of this process, or a global array, which is resharded.
        sharding: Any sharding. If all its devices belong to this process, the rows are the whole array.
    """
    is_global = isinstance(rows, jax.Array) and not rows.is_fully_addressable
    if is_global or getattr(sharding, "is_fully_addressable", True):
        return jax.device_put(rows, sharding)
    # Also for an array on a device of this process: device_put would assume the same whole array on all processes.
    return jax.make_array_from_process_local_data(sharding, np.asarray(rows))


def as_shardings(sharding: Any, *, stacked: bool = False) -> Any:
    """Convert a tree of shardings or specs to a tree of shardings; specs refer to the current mesh.

    Args:
        sharding: The user's value.
        stacked: Whether batches are stacked, with the steps on the leading axis.
    """

    def leaf(one: Any) -> Any:
        spec = one.spec if isinstance(one, NamedSharding) else one
        if not isinstance(spec, PartitionSpec):
            return one
        spec = PartitionSpec(None, *spec) if stacked else spec
        mesh = one.mesh if isinstance(one, NamedSharding) else jax.sharding.get_mesh()
        return spec if mesh.empty else NamedSharding(mesh, spec)

    return jax.tree.map(leaf, sharding, is_leaf=lambda x: isinstance(x, PartitionSpec))


def is_axes(value: Any) -> bool:
    """Whether a value is the name of a mesh axis, or a tuple of names, and not a spec."""
    names = value if trees.is_plain_tuple(value) and not isinstance(value, PartitionSpec) else (value,)
    return bool(names) and all(isinstance(name, str) for name in names)


def over_axes(sharding: Any, state: Any) -> Any:
    """Replace each name of a mesh axis, and tuple of names, in a tree of shardings by a sharding over the state's mesh.

    Args:
        sharding: The user's `batch_sharding`.
        state: The state, or its shapes.

    Raises:
        ValueError: The state is on no mesh, or its mesh has no such axis.
    """

    def leaf(axes: Any) -> Any:
        if not is_axes(axes):
            return axes
        mesh, what = mesh_of(state), f"batch_sharding={axes!r}"
        if mesh is None:
            names = mesh_axes_of(axes)
            sizes = ", ".join(["jax.device_count()", *["1"] * (len(names) - 1)]) + ("," if len(names) == 1 else "")
            raise ValueError(
                f"{what}: must be an axis of the mesh of the state, which is on no mesh; put it on one: "
                f"mesh = jax.make_mesh(({sizes}), {names!r}); state = jstep.shard_state(state, mesh)"
            )
        axis_size(mesh, axes, what)
        return NamedSharding(mesh, PartitionSpec(axes))

    return jax.tree.map(leaf, sharding, is_leaf=lambda x: isinstance(x, PartitionSpec) or is_axes(x))


def fitting(sharding: Any, shape: tuple[int, ...]) -> Any:
    """Drop from a sharding the axes that do not divide an array of this shape: it is replicated over them."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, fitting_spec(sharding.mesh, sharding.spec, shape))


def fitting_spec(mesh: Any, spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """Drop from a spec the mesh axes that do not divide an array of this shape."""
    each = zip(shape, dims_of(spec), strict=False)
    return PartitionSpec(*(axis if size % parts_along(mesh, axis) == 0 else None for size, axis in each))


def mesh_without_batch(state: Any, args: Any) -> Mesh | None:
    """Return the mesh of a state if it has several devices and no array of the batch is on it, although it has rows."""
    mesh = mesh_of(state)
    if mesh is None or mesh.size == 1 or mesh_of(args) is not None:
        return None
    has_rows = any(np.ndim(leaf) > 0 and not trees.is_key(leaf) for leaf in jax.tree.leaves(args))
    return mesh if has_rows else None


# Prefetching to devices: a background thread reads and transfers batches ahead of the loop.

# How long `close` waits for the thread; a thread that is blocked in a slow source ends later.
_END_SECS = 0.5
# The loop waits in intervals of this length, so that Ctrl-C works on every platform.
_POLL_SECS = 0.5


def prefetch_to_device(
    iterator: Iterable[Any],
    size: int = 2,
    sharding: Any = None,
    *,
    state_fn: Callable[[], Any] | None = None,
) -> "PrefetchIterator":
    """Iterate over `iterator` in a background thread that transfers items to the device ahead of use.

    While the device computes on one item, the thread reads the next ones and transfers them. The order
    is preserved. An exception raised by `iterator` or by the transfer is raised by `next` in place of
    its item. The thread starts at once. It ends when `iterator` is exhausted, when `close` is called, or
    when the result is garbage-collected, for example after a `break` out of a `for` loop. It does not
    keep the process alive.

    The thread runs in a copy of the caller's context: context variables and JAX settings
    (`jax.enable_x64`, `jax.set_mesh`, `jax.transfer_guard`, …). A transfer guard applies to the source,
    but not to the transfer itself. The source may reuse its buffers for the next item: items are copied
    before the transfer.

    Args:
        iterator: Any iterable: a list, a generator, `jstep.batches`, or a Grain, PyTorch or tf.data
            loader. An item is a pytree of numbers and arrays. Arrays of other libraries (PyTorch
            tensors) are accepted if they have `numpy()`, `__dlpack__` or `__array__`.
        size: The maximum number of items held ahead of the loop, in device memory; at least 1.
        sharding: Placement of the items: None for the default device, a `jax.sharding.Sharding`, or a
            tree of shardings that is a prefix of the item. A PartitionSpec refers to the mesh of
            `jax.set_mesh`. If a sharding spans processes, each process passes its own rows, which
            become its part of one global array.
        state_fn: A function whose value is stored with each item, such as `iterator.get_state` of a
            loader with a position. The thread calls it right after reading the item. See
            `PrefetchIterator.state`.

    Returns:
        An iterator over the same items as JAX arrays.

    Raises:
        TypeError: `iterator` is not iterable, `size` is not an integer, `state_fn` is not a function, or
            `sharding` contains something else. From `next`: a leaf cannot be placed on a device, such as
            a string.
        ValueError: `size` is not positive.

    Example:
        >>> import numpy as np, jstep
        >>> host = ({"x": np.full(2, i)} for i in range(3))
        >>> for batch in jstep.prefetch_to_device(host):
        ...     print(type(batch["x"]).__name__, batch["x"])
        ArrayImpl [0 0]
        ArrayImpl [1 1]
        ArrayImpl [2 2]
    """
    try:
        source = iter(iterator)
    except TypeError:
        raise TypeError(
            f"iterator={shown(iterator)}: must be iterable; give a loader, a generator or `jstep.batches(...)`"
        ) from None
    size = as_int(size, "size", 1, "the number of items read ahead")
    as_function(state_fn, "state_fn", "() -> state", optional=True)
    place, fresh = placement(sharding), isinstance(source, BatchIterator)
    return PrefetchIterator(source, size, lambda item: place(copied(item, fresh=fresh)), state_fn)


class PrefetchIterator(Iterator[Any]):
    """An iterator over items on the device, as returned by `prefetch_to_device`.

    It is also a context manager, which calls `close` on exit.

    Attributes:
        handed_out: The number of items that `next` has returned. More may have been read ahead.
        state: The value of `state_fn` for the last item that `next` has returned. Before the first item, it is the
            value from before anything was read; without a `state_fn` it is None. Save it with a checkpoint and restore
            it in a new source to resume with the next item.

    Example:
        A position that counts the items the loop has received, not those read ahead:

        >>> import jstep
        >>> class Loader:
        ...     position = 0
        ...     def __iter__(self):
        ...         return self
        ...     def __next__(self):
        ...         self.position += 1
        ...         return self.position
        ...     def get_state(self):
        ...         return {"position": self.position}
        >>> loader = Loader()
        >>> with jstep.prefetch_to_device(loader, size=2, state_fn=loader.get_state) as items:
        ...     print(next(items), items.handed_out, items.state)
        1 1 {'position': 1}
    """

    def __init__(
        self, source: Iterator[Any], size: int, place: Callable[[Any], Any], state_fn: Callable[[], Any] | None
    ) -> None:
        self.handed_out = 0
        self.state = state_fn() if state_fn else None
        self._reader = Reader(functools.partial(_read, source, place, state_fn))
        self._reader.request(size)

    @shortens_tracebacks
    def __next__(self) -> Any:
        item, self.state = self._reader.take()
        self._reader.request()  # only now: at most `size` items are ahead of the loop
        self.handed_out += 1
        return item

    def close(self) -> None:
        """End the thread and drop the items read ahead; `next` raises StopIteration from then on.

        Returns within half a second. A thread that is blocked in its source ends as soon as the source
        returns.
        """
        self._reader.close()

    def __enter__(self) -> "PrefetchIterator":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Reader:
    """A thread that calls a function once for each request and hands the results over, in order.

    The thread starts with the first request, in the contexts of its caller. It is idle when it has served all requests;
    other code may call the function then. It ends after the first exception, when `close` is called, or when the reader
    is garbage-collected.

    Args:
        read: The function. Its exceptions, such as StopIteration, are raised by `take` in place of a result.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._shared = _Shared(SimpleQueue(), SimpleQueue(), threading.Event())
        self._thread = Thread(target=serve, args=(read, self._shared), name="jstep-prefetch", daemon=True)
        # Also runs at process exit, which a thread inside of JAX must not outlive.
        self._end = weakref.finalize(self, _end, self._shared, self._thread)

    def request(self, count: int = 1) -> None:
        """Have the thread call the function that many more times."""
        if self._thread.ident is None:
            self._thread.start()
        self._shared.requests.put(count)

    def take(self) -> Any:
        """Wait for the next result; raise StopIteration after an exception was raised, and once this is closed."""
        _, results, over = self._shared
        while not over.is_set():
            try:
                result, error = results.get(timeout=_POLL_SECS)
            except Empty:
                continue
            if error is None:
                return result
            over.set()
            try:
                raise error
            finally:
                del error  # breaks the reference cycle with this frame, which its traceback holds
        raise StopIteration

    def close(self) -> None:
        """End the thread, without waiting for a call that takes long, and drop the results."""
        self._end()


class _Shared(NamedTuple):
    """The objects that a reader shares with its thread, which must not keep the reader alive.

    The queues are of a kind that `_end` may use wherever garbage collection runs it, even inside their own methods.
    """

    requests: "SimpleQueue[int]"
    results: "SimpleQueue[tuple[Any, BaseException | None]]"
    over: threading.Event


def serve(read: Callable[[], Any], shared: _Shared) -> None:
    """Serve the requests of a reader; all that its thread does."""
    requests, results, over = shared
    while True:
        for _ in range(requests.get()):
            if over.is_set():
                return
            try:
                with doing(MAKING):
                    result = read()
            except BaseException as error:
                results.put((None, error))
                return
            if over.is_set():
                return
            results.put((result, None))
            del result  # otherwise it would stay alive until the next one is read


def _end(shared: _Shared, thread: threading.Thread) -> None:
    requests, results, over = shared
    over.set()
    requests.put(1)  # wakes the thread
    with contextlib.suppress(Empty):
        while True:
            results.get_nowait()
    results.put((None, StopIteration()))  # wakes a thread that waits in `take`
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(_END_SECS)


def _read(source: Iterator[Any], place: Callable[[Any], Any], state_fn: Callable[[], Any] | None) -> tuple[Any, Any]:
    """Return the next item, placed, and the state after it."""
    item = next(source)
    state = state_fn() if state_fn else None
    try:
        return place(item), state
    except Exception as error:
        leaves = trees.leaves_with_paths(item)[:20]
        kinds = (f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}" for _, leaf in leaves)
        which = ", ".join(f"{trees.quoted(path)}: {kind}" for (path, _), kind in zip(leaves, kinds, strict=True))
        note(error, f"raised by prefetch_to_device for the item {which}")
        raise


# Batches of an iterable without a position, which a restart reads again up to where the run was.

_logger = logging.getLogger("jstep")

_COUNT = "batches"


def replayed(make: Callable[[], Iterable[Any]]) -> "ReplayedBatches":
    """Return batches for `train` that a restart reads again from their beginning, without those that were used.

    After a restart `make()` is called anew and the batches that the run has used are dropped, with one log line. This
    is exact if `make` returns the same batches each time; nothing detects it if it does not. It takes the time that
    reading those batches takes: a loader with a position, or `jstep.batches`, resumes at once.

    Args:
        make: `make()` returns an iterable of batches: a generator, or a shuffling loader with a fixed seed. Each of
            several processes reads, and drops, its own.

    Returns:
        An iterable of batches, whose iterators have `get_state` and `set_state`; each run reads it from its beginning.

    Raises:
        TypeError: `make` is not a function without arguments.
        ValueError: After a restart, there are fewer batches than the run had used.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> def make():
        ...     for n in range(100):
        ...         yield jnp.float32(n)
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> directory = tempfile.mkdtemp()
        >>> for last_step in (3, 6):  # the second run is a restart
        ...     state = jstep.TrainState.create({"w": 0.0}, optimizer)
        ...     state = jstep.train(train_step, state, jstep.replayed(make), last_step, checkpoint_dir=directory)
        >>> print(state.params["w"])
        4.03125
    """
    return ReplayedBatches(as_function(make, "make", "() -> an iterable of batches", takes=0))


class ReplayedBatches(Iterable[Any]):
    """The batches of `replayed`.

    Attributes:
        make: `make()` returns an iterable of batches.
    """

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make

    def __iter__(self) -> "ReplayedIterator":
        return ReplayedIterator(self.make)

    def __repr__(self) -> str:
        return f"<jstep.replayed({getattr(self.make, '__qualname__', type(self.make).__qualname__)})>"


class ReplayedIterator(Iterator[Any]):
    """An iterator over the batches of `replayed`.

    Args:
        make: `make()` returns an iterable of batches.
    """

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make
        self._items: Iterator[Any] | None = None
        self._count = 0

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._begin()
        item = next(self._items)
        self._count += 1
        return item

    def _begin(self) -> Iterator[Any]:
        made = self._make()
        if not isinstance(made, Iterable):
            raise TypeError(f"replayed: make() must return an iterable of batches, got {kind(made)}")
        items, used = until_end(made), self._count
        if not used:
            return items
        began = time.perf_counter()
        dropped = sum(1 for _ in itertools.islice(items, used))
        if dropped < used:
            raise ValueError(
                f"replayed: make() returned {dropped} batches, and the run has used {used}: it must return the same "
                "batches after a restart"
            )
        _logger.info("replayed: %d batches were read again in %.1f s", used, time.perf_counter() - began)
        return items

    def get_state(self) -> dict[str, int]:
        """Return the number of batches that were used."""
        return {_COUNT: self._count}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue after so many batches."""
        if not (isinstance(state, dict) and isinstance(state.get(_COUNT), int)):
            raise ValueError(
                f"state={shown(state)}: must be a position of jstep.replayed, a dict with the number of {_COUNT!r}; it "
                "is that of another loader"
            )
        self._count, self._items = state[_COUNT], None

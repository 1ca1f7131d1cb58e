"""Writing of named arrays to a folder with Orbax.

It is all that uses more than Orbax's public API.

Orbax writes to a temporary folder, all processes together, and would rename it at the end. Here the
folder is passed to `publish` instead, which adds the manifest and renames it.
"""

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jstep.checkpoint.store import checksums, tensors
from jstep.checkpoint.store.listing import IN_FLIGHT, TEMPORARY
from jstep.core.meshes import in_background


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _is_not_jsteps(record: logging.LogRecord) -> bool:
    """Return whether an asyncio record is unrelated to jstep; Orbax leaves failed futures to garbage collection."""
    return TEMPORARY not in record.getMessage()


_FILTERS = {"absl": _is_not_orbax, "asyncio": _is_not_jsteps}
_lock = threading.Lock()
_writers = 0


def silence() -> None:
    """Drop Orbax's log lines from all threads, until `unsilence` was called as often."""
    global _writers
    with _lock:
        _writers += 1
        for name, one in _FILTERS.items():
            logging.getLogger(name).addFilter(one)  # adding it again has no effect


def unsilence() -> None:
    """Undo one call of `silence`."""
    global _writers
    with _lock:
        _writers -= 1
        if not _writers:
            for name, one in _FILTERS.items():
                logging.getLogger(name).removeFilter(one)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """A context manager or decorator that drops Orbax's log lines."""
    silence()
    try:
        yield
    finally:
        unsilence()


class _OneTransaction:
    """Mixin of an Orbax handler that writes all arrays of a process in one transaction.

    Orbax reads them as its own. It would open each array twice and write a file for every second one, which takes more
    than twice the CPU time of this.

    Args:
        begun: The list to append every started write to.
        options: Options of the handler.
    """

    def __init__(self, begun: list[Any], **options: Any) -> None:
        super().__init__(**options)
        self._begun = begun

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Start to write in the background; return when all values are on the host."""
        del args  # all of them the defaults
        spec_of = functools.cache(functools.partial(ocp.type_handlers.get_json_tspec_write, infos[0], True))
        specs: list[dict[str, Any]] = []
        moving: list[list[tensors.Part]] = []
        for value, info in zip(values, infos, strict=True):
            shape, parts = tensors.own_parts(value, info.enable_pinned_host_transfer)
            spec = spec_of(value.shape, shape, value.dtype, jax.process_index())  # slow: once for equal arrays
            specs.append({**spec, "kvstore": {**spec["kvstore"], "path": info.name}})
            moving.append(parts)
        parts_of = [[(index, np.asarray(values)) for index, values in parts] for parts in moving]
        write = functools.partial(tensors.write, specs, parts_of, infos[0].ts_context)
        self._begun.append(in_background(write, name="jstep-write"))
        return self._begun[-1:]


_TIMEOUT = 2 * 3600  # seconds within which a write must end, on the slowest disk
_ERRORS = 16  # a save writes its metadata twice, and each write may fail

_logger = logging.getLogger("jstep")


class _Failure:
    """The error of this process while several processes write together.

    A process that gave up alone would leave the others waiting for hours. So each one continues to the end, and
    raises its error at `wait`; nothing is published without the parts of all processes.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A context whose error is raised at `wait`, or immediately if there is one process."""
        try:
            yield
        except Exception as error:
            if jax.process_count() == 1:
                raise
            self.error = self.error or error


class _Written:
    """A future for all writes of this process, whether they succeed or fail."""

    def __init__(self, futures: Sequence[Any], temporary: str, failure: _Failure) -> None:
        self._futures, self._temporary, self._failure = futures, temporary, failure

    def result(self, timeout: float | None = None) -> None:
        with self._failure.deferred():
            self._end(timeout)

    def _end(self, timeout: float | None) -> None:
        errors = _ended(self._futures, timeout)
        if errors:  # raised when all have ended, so that no thread writes into a folder that is being removed
            raise errors[0]
        if jax.process_count() > 1:
            checksums.write_part(self._temporary, jax.process_index())

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()


def _ended(futures: Sequence[Any], timeout: float | None = None) -> list[Exception]:
    """Wait for all futures, and return their errors."""
    errors = []
    for future in futures:
        try:
            future.result(timeout=timeout)
        except Exception as error:
            errors.append(error)
    return errors


class _Arrays(_OneTransaction, ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Writer of `jax.Array`s."""


class _NumpyArrays(_OneTransaction, ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
    """Writer of NumPy arrays."""


class Handler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Writer of arrays, compressed or not; on several processes it also writes the checksums of each one's files."""

    def __init__(self, failure: _Failure, begun: list[Any], **options: Any) -> None:
        self._failure, self._begun = failure, begun
        self._handlers = {flag: ocp.PyTreeCheckpointHandler(use_compression=flag, **options) for flag in (False, True)}

    async def async_save(self, directory: Any, args: "SaveArgs") -> list[Any]:
        """Start to write in the background."""
        arrays = ocp.args.PyTreeSave(args.arrays)
        try:
            futures = await self._handlers[args.compress].async_save(directory, args=arrays)
            return [_Written([*(futures or []), *self._begun], str(directory), self._failure)]
        except Exception:
            _ended(self._begun)
            raise
        finally:
            self._begun.clear()

    def save(self, directory: Any, args: "SaveArgs") -> None:
        """Unused: `AsyncCheckpointer` calls `async_save`."""
        raise NotImplementedError

    def restore(self, directory: Any, args: Any) -> Any:
        """Unused: `tensors` reads."""
        raise NotImplementedError

    def finalize(self, directory: Any) -> None:
        """Merge the files of all processes, on the first one."""
        with self._failure.deferred():
            if self._failure.error is None:
                self._handlers[False].finalize(directory)


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class SaveArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """The arrays to write, by name."""

    arrays: dict[str, Any]
    compress: bool


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class RestoreArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Empty: Orbax accepts a handler only if it has both kinds of arguments."""


class _TemporaryPath(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
    """A temporary folder that `publish` renames in place of Orbax, after Orbax has written its metadata."""

    publish: Callable[[str, str], None]

    @classmethod
    def from_final(cls, final_path: Any, *, checkpoint_metadata_store: Any = None, **options: Any) -> Any:
        made = super().from_final(final_path, checkpoint_metadata_store=checkpoint_metadata_store, **options)
        made.metadata_store = checkpoint_metadata_store
        return made

    async def finalize(self) -> None:
        if self.metadata_store is not None:
            self.metadata_store.wait_until_finished()
        type(self).publish(str(self.get()), str(self.get_final()))


class Checkpointer:
    """Writer of named arrays to a folder with Orbax, all processes together."""

    @silenced()
    def __init__(self, prefix: str) -> None:
        begun: list[Any] = []
        registry = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, _Arrays(begun, enable_write_sharding_file=False)),
            (np.ndarray, _NumpyArrays(begun, deepcopy_host_arrays=False)),
        )
        processes = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=f"jstep-{prefix}")
        self._pid = os.getpid()
        self._publish: Callable[[str, str], None] = _nothing
        self._failure = _Failure()
        self._async = ocp.AsyncCheckpointer(
            Handler(self._failure, begun, type_handler_registry=registry, multiprocessing_options=processes),
            # Directories are created within `save`, so that it raises their errors immediately.
            async_options=ocp.options.AsyncOptions(timeout_secs=_TIMEOUT, create_directories_asynchronously=False),
            multiprocessing_options=processes,
            # `publish` replaces an existing checkpoint of the step once the new one is complete.
            file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
            temporary_path_class=type("_OwnPath", (_TemporaryPath,), {"publish": staticmethod(self._end)}),
        )

    @silenced()
    def save(self, path: str, arrays: Mapping[str, Any], compress: bool, publish: Callable[[str, str], None]) -> None:
        """Start to write; return when the arrays may be donated. `publish(temporary, final)` ends the write."""
        self._publish = publish
        if path + TEMPORARY not in IN_FLIGHT:
            silence()
        IN_FLIGHT[path + TEMPORARY] = self
        _finish_at_exit()
        try:
            self._async.save(path, args=SaveArgs(dict(arrays), compress))
        except Exception:
            self._drop_errors()
            raise

    def _end(self, temporary: str, final: str) -> None:
        publish, self._publish = self._publish, _nothing  # do not keep the function, and what it references, alive
        with self._failure.deferred():
            if self._failure.error is None:
                publish(temporary, final)

    def wait(self) -> None:
        """Wait for the write to end, and raise its error if it failed."""
        if self._pid != os.getpid():
            return  # a fork does not have the threads
        try:
            with silenced():
                try:
                    self._async.wait_until_finished()
                except Exception:
                    self._drop_errors()
                    raise
            if self._failure.error is not None:
                raise self._failure.error
        finally:
            self._failure.error = None
            self._forget()

    def _drop_errors(self) -> None:
        """Drop the other errors of a failed save: Orbax keeps one for each write, and raises it at the next save."""
        for _ in range(_ERRORS):
            try:
                self._async.wait_until_finished()
            except Exception:
                continue
            return

    def _forget(self) -> None:
        for path in [path for path, checkpointer in IN_FLIGHT.items() if checkpointer is self]:
            del IN_FLIGHT[path]
            unsilence()

    @silenced()
    def close(self) -> None:
        """End the threads."""
        self._async.close()


def _nothing(temporary: str, final: str) -> None:
    pass


@functools.cache
def _finish_at_exit() -> None:
    """Register the writes in progress to be finished when the interpreter exits; Orbax would lose them."""
    # Executors refuse work once threading shuts down, which happens before atexit functions run.
    with contextlib.suppress(RuntimeError):  # it is shutting down already
        getattr(threading, "_register_atexit", atexit.register)(_finish)


def _finish() -> None:
    with _submitted_work_done_here():
        for path, checkpointer in list(IN_FLIGHT.items()):
            try:
                checkpointer.wait()
            except Exception:
                _logger.exception("%s was not saved", path.removesuffix(TEMPORARY))


@contextlib.contextmanager
def _submitted_work_done_here() -> Iterator[None]:
    """A context whose thread pools work in the calling thread if no thread can be started.

    Python 3.12.0 and 3.12.1 start no threads once the interpreter exits; to end a write, Orbax and `checksums` use
    pools, and asyncio's pool.
    """
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        submit = ThreadPoolExecutor.submit
        ThreadPoolExecutor.submit = _done_here  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
    else:
        yield


def _done_here(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **kwargs))
    except BaseException as error:
        future.set_exception(error)
    return future

"""Orbax, as far as it is needed: named arrays into a folder. The only module that imports it.

Orbax writes into a temporary folder, all processes together, and would rename it in the end. Here the
folder is handed to `publish` instead, which adds the manifest and renames.
"""

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jstep.checkpoint.store import checksums, orbax_logs
from jstep.checkpoint.store.in_flight import IN_FLIGHT
from jstep.checkpoint.store.listing import TEMPORARY
from jstep.checkpoint.store.orbax_writes import TrackedWrites

_TIMEOUT = 2 * 3600  # seconds in which a write has to end, on the slowest disk

_logger = logging.getLogger("jstep")


class _Failure:
    """What went wrong on this process while several write together.

    A process that gave up alone would leave the others waiting for it for hours. So each goes on to the end, and says
    at `wait` what happened to it; nothing is put in its place without the parts of all of them.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A block whose failure is raised at `wait`; where there is one process, at once."""
        try:
            yield
        except Exception as error:
            if jax.process_count() == 1:
                raise
            self.error = self.error or error


class _Written:
    """The end of a process's writes, whether they succeed or not."""

    def __init__(self, futures: Sequence[Any], temporary: str, failure: _Failure) -> None:
        self._futures, self._temporary, self._failure = futures, temporary, failure

    def result(self, timeout: float | None = None) -> None:
        with self._failure.kept():
            self._end(timeout)

    def _end(self, timeout: float | None) -> None:
        errors = _ended(self._futures, timeout)
        if errors:  # raised when all have ended, so that nobody writes into a folder that is cleared away
            raise errors[0]
        if jax.process_count() > 1:
            checksums.write_part(self._temporary, jax.process_index())

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()


def _ended(futures: Sequence[Any], timeout: float | None = None) -> list[Exception]:
    """What went wrong, when all of them have ended."""
    errors = []
    for future in futures:
        try:
            future.result(timeout=timeout)
        except Exception as error:
            errors.append(error)
    return errors


class _Arrays(TrackedWrites, ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Writes `jax.Array`s."""


class _NumpyArrays(TrackedWrites, ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
    """Writes NumPy arrays."""


class Handler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Writes arrays, compressed or not, and on several processes the checksums of what each one wrote."""

    def __init__(self, failure: _Failure, begun: list[Any], **options: Any) -> None:
        self._failure, self._begun = failure, begun
        self._handlers = {flag: ocp.PyTreeCheckpointHandler(use_compression=flag, **options) for flag in (False, True)}

    async def async_save(self, directory: Any, args: "SaveArgs") -> list[Any]:
        """Starts to write, in the background."""
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
        """Not used: `AsyncCheckpointer` calls `async_save`."""
        raise NotImplementedError

    def restore(self, directory: Any, args: Any) -> Any:
        """Not used: `tensors` reads."""
        raise NotImplementedError

    def finalize(self, directory: Any) -> None:
        """Joins what the processes wrote, on the first."""
        with self._failure.kept():
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
    """Nothing: orbax takes a handler only where it has both."""


class _TemporaryPath(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
    """A folder that `publish` renames, in place of orbax, which adds files to it just before."""

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
    """Orbax, as far as it is needed: named arrays into a folder, by all processes together."""

    @orbax_logs.silenced()
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
            # Directories are made within `save`, so that it says at once what is wrong with them.
            async_options=ocp.options.AsyncOptions(timeout_secs=_TIMEOUT, create_directories_asynchronously=False),
            multiprocessing_options=processes,
            # An existing checkpoint of the step is replaced once the new one is whole, by `publish`.
            file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
            temporary_path_class=type("_OwnPath", (_TemporaryPath,), {"publish": staticmethod(self._end)}),
        )

    @orbax_logs.silenced()
    def save(self, path: str, arrays: Mapping[str, Any], compress: bool, publish: Callable[[str, str], None]) -> None:
        """Starts to write; returns when the arrays may be donated. `publish(temporary, final)` ends the write."""
        self._publish = publish
        if path + TEMPORARY not in IN_FLIGHT:
            orbax_logs.silence()
        IN_FLIGHT[path + TEMPORARY] = self
        _finish_at_exit()
        self._async.save(path, args=SaveArgs(dict(arrays), compress))

    def _end(self, temporary: str, final: str) -> None:
        publish, self._publish = self._publish, _nothing  # held no longer than the write takes, with all it holds
        with self._failure.kept():
            if self._failure.error is None:
                publish(temporary, final)

    def wait(self) -> None:
        """Waits for the write to end, and raises what went wrong."""
        if self._pid != os.getpid():
            return  # a fork has none of the threads
        try:
            with orbax_logs.silenced():
                self._async.wait_until_finished()
            if self._failure.error is not None:
                raise self._failure.error
        finally:
            self._failure.error = None
            self._forget()

    def _forget(self) -> None:
        for path in [path for path, checkpointer in IN_FLIGHT.items() if checkpointer is self]:
            del IN_FLIGHT[path]
            orbax_logs.unsilence()

    @orbax_logs.silenced()
    def close(self) -> None:
        """Ends its threads."""
        self._async.close()


def _nothing(temporary: str, final: str) -> None:
    pass


@functools.cache
def _finish_at_exit() -> None:
    """What is in flight when the interpreter ends is finished; orbax by itself would lose it."""
    # Executors refuse work once threading shuts down, which is before atexit's turn.
    with contextlib.suppress(RuntimeError):  # it is shutting down already
        getattr(threading, "_register_atexit", atexit.register)(_finish)


def _finish() -> None:
    for path, checkpointer in list(IN_FLIGHT.items()):
        try:
            checkpointer.wait()
        except Exception:
            _logger.exception("%s was not saved", path.removesuffix(TEMPORARY))

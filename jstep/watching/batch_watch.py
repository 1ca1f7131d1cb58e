"""The observer that checks whether a restart reads the batch that was read before it.

A background thread hashes the batch that follows each checkpoint, once its step is dispatched. The
hashes are in the file of the start, or of the process. A start that resumes hashes its first batch,
and compares it.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jstep.compiling.chunks import Chunk
from jstep.core import trees
from jstep.core.jaxprs import hash_strings
from jstep.core.logs import logger
from jstep.core.threads import SerialTasks
from jstep.core.trees import Tree
from jstep.data.batch_placement import copy_batch, hash_batch
from jstep.data.sequence import BatchSequence
from jstep.hooks.run_extra import PAST, START
from jstep.loop.observer import Observer
from jstep.loop.run_context import RunContext
from jstep.record.run_record import earlier_starts, file_of, process_file_of
from jstep.watching.start_setup import describe_batches

_KEPT = 20
"""The number of newest hashes that are kept."""
_END_SECS = 5.0
"""The seconds to wait for the last hash at the end."""
_OTHER_BATCH = (
    "batch %d does not match the one read before the restart%s: "
    "the loader's state is incomplete, or the dataset changed"
)


class BatchWatch(Observer):
    """The observer that hashes the batch after each checkpoint, and the first after a restart."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        # The step of the batch that is to be hashed, once that step is dispatched.
        self._step: int | None = None
        self._tasks = SerialTasks("jstep-batch-hash", _not_hashed, daemon=True)
        # Step → hashes of layout, content and settings. Only tasks change it, which run one after
        # the other, and they replace it: the loop reads it meanwhile.
        self._hashes: dict[str, Any] = {}
        self._settings_hash = ""

    def on_restored(self, start_number: int) -> None:
        run = self._run
        if run.saver is None:
            return
        if (
            run.origin.is_restored
            and not run.origin.is_at_branch_point
            and run.components.batches.source.is_seekable
        ):
            self._tasks.add(self._read_hashes)
            self._watch(run.course.first)

    def on_save(self, step: int) -> dict[str, Any]:
        run = self._run
        if run.saver is None or (step <= run.course.first and run.origin.is_restored):
            return {}
        if any(int(known) >= step for known in list(self._hashes)):
            # Those of a start whose steps are run again.
            self._tasks.add(functools.partial(self._drop_hashes_from, step))
        self._watch(step)
        return {}

    def on_close(self) -> None:
        """Hash the batch after the last checkpoint, if reading it changes nothing.

        Its step will not run, so that `_after_call` would not see it.
        """
        batches = self._run.components.batches.source.given if self._run.is_open else None
        step = self._step
        if (
            step is not None
            and isinstance(batches, BatchSequence | list | tuple)
            and jax.process_count() == 1
        ):
            self._tasks.add(
                lambda: self._add_hash(step, trees.batch_to_args(copy_batch(batches[step])))
            )

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._run.signals.received_twice:
            self._tasks.wait(_END_SECS)

    def _watch(self, step: int) -> None:
        if self._step is None:
            self._run.components.dispatch.add_listener(self._after_call)
        self._step = step

    def _after_call(self, chunk: Chunk, state: Tree) -> None:
        self._run.components.dispatch.remove_listener(self._after_call)
        if chunk.first == self._step:
            args = chunk.args
            is_stacked = chunk.program.is_stacked
            self._tasks.add(lambda: self._add_hash(chunk.first, args, is_stacked=is_stacked))
        self._step = None

    # In background threads, in order.

    def _read_hashes(self) -> None:
        run = self._run
        known: dict[str, Any] = {}
        process_file = process_file_of(run)
        if process_file is not None:
            known = process_file.fields["batches"]
        else:
            # Of the start that saved the checkpoint, and of later ones, which may have read the
            # batch after it, too.
            saved_by = run.origin.extra.get(PAST, {}).get(START)
            first_number = saved_by[0] if saved_by else math.inf
            for start in earlier_starts(run):
                if start["number"] >= first_number:
                    known |= start["batches"]
        numbered = {step: entry for step, entry in known.items() if step.isdecimal()}
        self._hashes = {**self._hashes, **numbered}

    def _drop_hashes_from(self, step: int) -> None:
        self._hashes = {known: entry for known, entry in self._hashes.items() if int(known) < step}
        self._write_hashes()

    def _add_hash(self, step: int, args: Sequence[Any], *, is_stacked: bool = False) -> None:
        entry = [*hash_batch(args, is_stacked=is_stacked), self._hash_settings()]
        hashes = dict(self._hashes)
        earlier = hashes.pop(str(step), None)
        if earlier is not None and step == self._run.course.first:
            self._compare(step, earlier, entry)
        hashes[str(step)] = entry
        self._hashes = dict(list(hashes.items())[-_KEPT:])
        self._write_hashes()

    def _write_hashes(self) -> None:
        file = process_file_of(self._run) or file_of(self._run)
        if file is not None:
            file.update({"batches": self._hashes})
            file.due.set()

    def _hash_settings(self) -> str:
        """Return a hash of the config and of the batches' definition, whose change is intended."""
        if not self._settings_hash:
            described = describe_batches(self._run.components.batches.source.given)
            definition = {name: part for name, part in described.items() if name not in _LENGTHS}
            digest = hash_strings(repr(self._run.options.config), repr(definition))
            self._settings_hash = digest[:16]
        return self._settings_hash

    def _compare(self, step: int, earlier: Sequence[str], entry: Sequence[str]) -> None:
        old_layout, old_content, old_settings = earlier
        layout, content, settings = entry
        # Another layout gives another content, and other shapes are reported with the program.
        if layout != old_layout:
            return
        self._record({"compared_batch": True})
        if content == old_content:
            return
        level = logging.WARNING if settings == old_settings else logging.INFO
        where = f" by process {jax.process_index()}" if jax.process_count() > 1 else ""
        logger.log(level, _OTHER_BATCH, step, where)
        self._record({"other_batch": step})

    def _record(self, fields: Mapping[str, Any]) -> None:
        file = file_of(self._run)
        if file is not None:
            file.update(fields)


def _not_hashed(error: Exception) -> None:
    logger.debug("a batch was not hashed: %s: %s", type(error).__name__, error)


_LENGTHS = ("hash", "num_epochs")
"""The parts of a definition that differ if a sequence is only longer."""

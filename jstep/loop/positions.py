"""Saving and restoring the position of a data loader, on each process."""

import base64
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jstep.core import tagged_json
from jstep.core.checks import kind
from jstep.core.tagged_json import as_json
from jstep.distributed import processes

POSITION, POSITIONS = "batches", "batches_of_processes"
"""Keys of a checkpoint's `extra`: the position of process 0, and those of all processes if there are several."""
_PROCESSES = "processes"
_BYTES = "base64"
"""The key of a position that is nothing but bytes."""


class SavedPosition(NamedTuple):
    """The position of this process's loader in a checkpoint.

    Attributes:
        value: The position, from `encode_position`; None if there is no position.
        error: Why the position is not available; "" if it is.
        warning: A warning to log when the position is used; "" for no warning.
    """

    value: Any
    error: str = ""
    warning: str = ""


class LivePosition:
    """The position of batches that are made one at a time, after the hooks of the step before: those of `from_state`.

    Hooks tell the object that makes them what a step found, so its position is taken when a checkpoint is written. If a
    batch could not be made, or its step failed, it is the position before that batch, which a restart makes again.

    Args:
        ask: Returns the current position, from `copied_position`.
        begin: Returns the position before the first batch, if the object does not know it yet; None if nothing does.

    Attributes:
        before: The position before the latest batch, and after what hooks changed before that.
    """

    def __init__(self, ask: Callable[[], Any], begin: Callable[[], Any] | None) -> None:
        self._ask = ask
        self.before = None if begin is None else begin()
        self._is_fixed = self._is_known = False
        self._at_end: Any = None

    def before_batch(self) -> None:
        """Take the position before a batch; a signal may interrupt this, or the making of the batch."""
        # An object may not know its position before its first batch.
        with contextlib.nullcontext() if self._is_known else contextlib.suppress(Exception):
            self.before = self._ask()
            self._is_known = True
        self._is_fixed = True

    def check(self) -> None:
        """Refuse a position that cannot be kept, once, after the first batch."""
        if not self._is_known:
            self._ask()
            self._is_known = True

    def after_batch(self) -> None:
        """The batch was made, and no signal interrupts the loop before its step and hooks are over."""
        self._is_fixed = False

    def no_batch(self) -> None:
        """There is no further batch; the search for one may have changed the object."""
        if self._is_known:
            self._at_end, self._is_fixed = self._ask(), False

    def fix(self) -> None:
        """Take the position now, without what is changed later."""
        self.before, self._is_fixed = self.now(), True

    def now(self) -> Any:
        """The position for a checkpoint of the latest state."""
        if self._is_fixed or not self._is_known:
            return self.before
        position = self._ask()
        return self.before if self._at_end is not None and position == self._at_end else position


def encode_position(position: Any, owner: str) -> Any:
    """Encode a position for JSON: `as_json(copied_position(position, owner))`."""
    return as_json(copied_position(position, owner))


def copied_position(position: Any, owner: str, without: str = "(batch for batch in batches)") -> Any:
    """Copy a position for `as_json`, because loaders may return a dict that they keep changing.

    There is a copy for each batch, and JSON only for a checkpoint: the text of a replay buffer takes much longer.

    Args:
        position: The position that the loader returned.
        owner: The name of the loader's class, for the error.
        without: What to pass to `train` instead if no position has to be kept, for the error.

    Raises:
        TypeError: The position holds a value of an unsupported type; names the loader, the path and the type.
    """
    if isinstance(position, bytes):
        return {_BYTES: position}
    try:
        return {"value": tagged_json.copied(position)}
    except tagged_json.UnsupportedError as error:
        raise TypeError(
            f"batches: the state of the {owner} cannot be kept with a checkpoint: state{error.path} {error.what}, and "
            f"a position may hold only {tagged_json.SUPPORTED}. Convert that value where the state is returned "
            "(state_dict or get_state) and back where it is taken (load_state_dict or set_state), in a subclass of "
            f"the {owner} or a class around it; or pass {without}, which has no position to keep"
        ) from None


def decode_position(kept: Any, owner: str) -> Any:
    """Decode a position from `encode_position`, without running any code that the checkpoint brings.

    Raises:
        ValueError: The position cannot be decoded, or was pickled by an older version of jstep; names the loader.
    """
    what = f"batches: the checkpoint's position for the {owner}"
    if not isinstance(kept, Mapping):
        raise ValueError(f"{what} must be a position, got {kind(kept)}")
    if "pickle" in kept:
        raise ValueError(
            f"{what} was pickled by an older version of jstep, and nothing in a checkpoint is unpickled, because that "
            f"could run code of whoever wrote it. To continue from its state, with a {owner} that starts from its "
            "current position: state = jstep.Saver(old_directory).restore(state), and jstep.train(…, "
            "checkpoint_dir=new_directory)"
        )
    try:
        if _BYTES in kept:
            return base64.b64decode(kept[_BYTES], validate=True)
        return tagged_json.decode(kept["value"])
    except KeyError as error:
        raise ValueError(f"{what} is not a position (it has no {error})") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be decoded ({error}); it was not saved by jstep, or was changed") from None


def saved_position(extra: Mapping[str, Any]) -> SavedPosition | None:
    """The position of this process's loader in a checkpoint's `extra`; None if there is no position."""
    of_all, first, count = extra.get(POSITIONS), extra.get(POSITION), jax.process_count()
    if of_all is None and first is None:
        return None
    if of_all is not None:
        before, positions = of_all[_PROCESSES], of_all["positions"]
        if len(positions) == 1:  # they were all equal
            return SavedPosition(positions[0])
    else:
        only_one = (
            f"The checkpoint has one position of a loader for {count} processes: it was saved by one process, or by a "
            "version of jstep that saved only the position of process 0. Every process resumes from it, which is wrong "
            "if their loaders do not advance together."
        )
        return SavedPosition(first, warning=only_one if count > 1 else "")
    if before == count:
        mine = positions[jax.process_index()]
        return None if mine is None else SavedPosition(mine)
    return SavedPosition(
        None,
        f"the checkpoint was saved by {before} processes, whose loaders had different positions, and this run has "
        f"{count}: the position of one process does not determine the share of another. Start the run with {before} "
        "processes; or give batches whose position is the step (jstep.batches, a function of the step); or resume with "
        "the loader as it is now: restore the state with Saver.restore, and train it with another checkpoint_dir",
    )


def gather_positions(position: Any) -> dict[str, Any]:
    """Gather the positions of all processes, for a checkpoint's `extra`. Must be called on every process.

    Args:
        position: The position of this process, from `copied_position` or `encode_position`; None if not known.
    """
    position = as_json(position)
    if jax.process_count() == 1:
        return {} if position is None else {POSITION: position}
    positions = [json.loads(text) for text in processes.gather_texts(json.dumps(position))]
    if all(one is None for one in positions):
        return {}
    first = {} if positions[0] is None else {POSITION: positions[0]}
    distinct = positions[:1] if all(one == positions[0] for one in positions) else positions
    return first | {POSITIONS: {_PROCESSES: len(positions), "positions": distinct}}

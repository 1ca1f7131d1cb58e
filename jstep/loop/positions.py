"""Saving and restoring the position of a data loader, on each process."""

import base64
import binascii
import json
import math
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jstep.checkpoint import processes
from jstep.core.checks import kind

POSITION, POSITIONS = "batches", "batches_of_processes"
"""Keys of a checkpoint's `extra`: the position of process 0, and those of all processes if there are several."""
_PROCESSES = "processes"

_DEEPEST = 50  # levels of nesting that are saved as JSON; a checkpoint accepts 100
_LONGEST = 4096  # bits of an integer: Python refuses to write much longer ones


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


def encode_position(position: Any, owner: str) -> Any:
    """Encode a position for JSON. The result is a copy, because loaders may return a dict that they keep changing.

    Values that JSON would change (tuples, keys that are not strings, arrays, random generators) are pickled.

    Args:
        position: The position that the loader returned.
        owner: The name of the loader's class, for the error.

    Raises:
        TypeError: The position cannot be pickled; names the loader.
    """
    if type(position) is bytes:
        return {"base64": base64.b64encode(position).decode()}
    if _is_json(position, 0):
        return {"value": _copy(position)}
    try:
        return {"pickle": base64.b64encode(pickle.dumps(position)).decode()}
    except Exception as error:  # whatever the objects in it raise
        raise TypeError(
            f"batches: the state of the {owner} cannot be kept with a checkpoint ({type(error).__name__}: {error}); "
            "its state_dict() or get_state() must return a value that JSON or pickle can hold: numbers, strings, "
            "bytes, arrays, and dicts, lists and tuples of them"
        ) from error


def _is_json(value: Any, depth: int) -> bool:
    """Whether a value survives a round trip through JSON, types included."""
    of = type(value)
    if of is dict:
        return depth < _DEEPEST and all(type(key) is str and _is_json(item, depth + 1) for key, item in value.items())
    if of is list:
        return depth < _DEEPEST and all(_is_json(item, depth + 1) for item in value)
    if of is float:
        return math.isfinite(value)
    return of in (str, bool, type(None)) or (of is int and value.bit_length() <= _LONGEST)


def _copy(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if type(value) is list else value


def decode_position(kept: Any, owner: str) -> Any:
    """Decode a position from `encode_position`. Unpickling can run arbitrary code, so the checkpoint must be trusted.

    Raises:
        ValueError: The position cannot be decoded, for example because a class in it no longer exists; names the
            loader.
    """
    if not isinstance(kept, Mapping):
        raise ValueError(f"batches: the checkpoint's position for the {owner} must be a position, got {kind(kept)}")
    if "value" in kept:
        return kept["value"]
    try:
        if "base64" in kept:
            return base64.b64decode(kept["base64"], validate=True)
        return pickle.loads(base64.b64decode(kept["pickle"], validate=True))
    except (KeyError, binascii.Error) as error:
        raise ValueError(f"batches: the checkpoint's position for the {owner} is not a position ({error})") from None
    except Exception as error:
        raise ValueError(
            f"batches: the checkpoint's position for the {owner} cannot be unpickled ({type(error).__name__}: "
            f"{error}); its classes must be importable as they were when it was saved"
        ) from error


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
        position: The position of this process, from `encode_position`; None if not known.
    """
    if jax.process_count() == 1:
        return {} if position is None else {POSITION: position}
    positions = [json.loads(text) for text in processes.gather_texts(json.dumps(position))]
    if all(one is None for one in positions):
        return {}
    first = {} if positions[0] is None else {POSITION: positions[0]}
    distinct = positions[:1] if all(one == positions[0] for one in positions) else positions
    return first | {POSITIONS: {_PROCESSES: len(positions), "positions": distinct}}

"""Communication between the processes of a run: requests to stop, numbers, strings and errors.

All functions that exchange something block, and all processes must call them; with a single process
there is no communication. `post` waits for nobody. `jstep.distributed` starts the processes;
`agreed_clock` decides when a period is over for all of them.
"""

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jstep.core.meshes import internal_transfers
from jstep.core.threads import AGREEING, doing

_HEAD = 1024
"""The bytes of the message that each exchange begins with."""
_KIND = 64
"""The bytes of that message that name the kind of exchange. The size of the data follows, in eight
bytes, and then the first bytes of the data."""
_T = TypeVar("_T")


def is_single_process() -> bool:
    return jax.process_count() == 1


def is_process_0() -> bool:
    """Whether this is the process that writes logs, records and whole files, for all processes."""
    return jax.process_index() == 0


# JAX's preemption service, which stops all processes at the same call.

# JAX counts calls of its synchronization point over the lifetime of a process: this is global, too.
_calls = itertools.count(1)
_has_stopped = threading.Event()
"""Set once the preemption service has stopped a run, or was asked to but too late. It stops only
one."""


def should_stop() -> bool:
    """Return whether all processes must stop after this call, because one of them received SIGTERM.

    All must call this after each call of the train step. It queries JAX's preemption service,
    without device work.
    """
    try:
        with doing(AGREEING):
            is_reached = bool(multihost_utils.reached_preemption_sync_point(next(_calls)))
    except RuntimeError:  # the service is off: jax_enable_preemption_service
        return False
    if is_reached:
        _has_stopped.set()
    return is_reached


def note_late_stop() -> None:
    """Note that the service was asked to stop a run that has ended: it would stop the next."""
    _has_stopped.set()


def check_no_other_run() -> None:
    """Reject a run that no signal could stop, because one has stopped an earlier run."""
    if _has_stopped.is_set():
        raise RuntimeError(
            "train: a signal stopped an earlier run, and JAX stops only one; let processes exit on "
            "jstep.Preempted"
        )


def request_stop() -> None:
    """Send SIGTERM to this process: JAX's preemption service then stops all processes."""
    os.kill(os.getpid(), signal.SIGTERM)


# Texts that one process posts, and any other may read: no exchange, so that any thread may call
# these at any time.


def _service() -> Any:
    """Return the client of JAX's coordination service; None if there is none.

    This reads a private attribute, an exception to our rule, as JAX has no public function for it.
    Without a client (another JAX, or processes that were not started by `jax.distributed`), the
    callers find another way.
    """
    distributed = getattr(multihost_utils, "distributed", None)
    return getattr(getattr(distributed, "global_state", None), "client", None)


def post(key: str, text: str) -> bool:
    """Post a text for all processes, unless the key has one; return whether one is there."""
    try:
        # The service lists a key's subtree, and raises an error for a key that it lacks.
        _service().key_value_set_bytes(f"{key}/text", text.encode(errors="replace"))
    except (AttributeError, RuntimeError):
        # There is no service, it has a text already, or it does not respond.
        return posted(key) is not None
    return True


def posted(key: str) -> str | None:
    """Return the text that was posted under a key."""
    try:
        found = _service().key_value_dir_get_bytes(f"{key}/")
    except (AttributeError, RuntimeError):
        return None
    return found[0][1].decode() if found else None


# Exchanges of values, exempt from the caller's transfer guards.


def any_process(is_true: bool) -> bool:
    """Return whether it is true on any process."""
    if is_single_process():
        return is_true
    return bool(max_over_processes(np.array([is_true]))[0])


def max_over_processes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if is_single_process():
        return values
    return _gathered(values).max(axis=0)


def ints_of_all(*numbers: int) -> list[list[int]]:
    """Return the integers of each process, of up to 62 bits."""
    if is_single_process():
        return [list(numbers)]
    return [_joined(row) for row in _gathered(_halves(numbers))]


def _halves(numbers: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return integers as pairs of 31 bits, as JAX has only integers of 32 bits by default."""
    return np.array([divmod(number, 2**31) for number in numbers], np.int32)


def _joined(halves: np.ndarray[Any, Any]) -> list[int]:
    return [int(high) * 2**31 + int(low) for high, low in halves]


def gather_texts(text: str) -> list[str]:
    """Return the text of each process."""
    if is_single_process():
        return [text]
    return [data.decode() for data in _exchange("texts", text.encode())]


def share_errors(fn: Callable[[], _T], problem: str, kind: type[Exception] = RuntimeError) -> _T:
    """Return `fn()`, which must not communicate; an error on one process is raised on all.

    Otherwise the other processes would wait forever, in what they do next. They raise a `kind`,
    whose message begins with `problem` and names the process.
    """
    if is_single_process():
        return fn()
    error: Exception | None = None
    try:
        result = fn()
    except Exception as caught:
        error = caught
    if any_process(error is not None):
        _raise_on_all(error, problem, kind)
    return result


def _raise_on_all(error: Exception | None, problem: str, kind: type[Exception]) -> NoReturn:
    texts = gather_texts("" if error is None else f"{type(error).__name__}: {error}")
    process = next(i for i, text in enumerate(texts) if text)
    raise error or kind(f"{problem}: process {process}: {texts[process]}")


def text_from_first(fn: Callable[[], str], kinds: Sequence[type[Exception]] = ()) -> str:
    """Return the text that `fn` returns on process 0; an error there is raised on all processes.

    The others raise one of `kinds` if it has the name of that error, or else the last of them, with
    its message.
    """
    if is_single_process():
        return fn()
    error: Exception | None = None
    outcome = ["", ""]  # the name of an error, and its message or the text
    if is_process_0():
        try:
            outcome = ["", fn()]
        except Exception as caught:
            error = caught
            outcome = [type(caught).__name__, str(caught)]
    name, text = json.loads(broadcast_bytes(json.dumps(outcome).encode()))
    if not name:
        return str(text)
    if error is not None:
        raise error
    fallback = kinds[-1] if kinds else RuntimeError
    named_kinds = {kind.__name__: kind for kind in kinds}
    raise named_kinds.get(name, fallback)(text)


def first_ints_on_all(
    fn: Callable[[], tuple[int, ...]],
    count: int,
    problem: str,
    kind: type[Exception] = RuntimeError,
) -> list[int]:
    """Return the `count` integers of `fn` on process 0; an error is raised on all processes."""
    error: Exception | None = None
    numbers: tuple[int, ...] = (0,) * count
    try:
        numbers = fn()
    except Exception as caught:
        error = caught
    rows = ints_of_all(error is not None, *numbers)
    if any(has_failed for has_failed, *_ in rows):
        _raise_on_all(error, problem, kind)
    return rows[0][1:]


def broadcast_bytes(data: bytes) -> bytes:
    """Return the bytes of process 0."""
    if is_single_process():
        return data
    (size,) = broadcast_ints(len(data))
    if size == 0:
        return b""
    # The data of the other processes is ignored, and needs only the same shape.
    padded = np.frombuffer(data[:size].ljust(size, b"\0"), np.uint8)
    with internal_transfers(), doing(AGREEING):
        return np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes()


def broadcast_ints(*numbers: int) -> list[int]:
    """Return the integers of process 0, of up to 62 bits."""
    if is_single_process():
        return list(numbers)
    return _joined(_gathered(_halves(numbers), "numbers of process 0")[0])


def _gathered(values: np.ndarray[Any, Any], what: str = "numbers") -> np.ndarray[Any, Any]:
    rows = _exchange(f"{what}, {values.dtype}{list(values.shape)}", values.tobytes())
    return np.stack([np.frombuffer(row, values.dtype).reshape(values.shape) for row in rows])


def _exchange(kind: str, data: bytes) -> list[bytes]:
    """Return the data of each process.

    The first message has one shape for all kinds of exchanges, and names its kind. So processes
    that have reached different exchanges get an error, and do not wait forever in collectives that
    do not match.

    Raises:
        RuntimeError: Another process exchanges something else.
    """
    message = kind.encode()[:_KIND].ljust(_KIND) + len(data).to_bytes(8, "little") + data
    rows = _gather_bytes(message[:_HEAD].ljust(_HEAD, b"\0"))
    kinds = [row[:_KIND].decode(errors="replace").rstrip() for row in rows]
    if len(set(kinds)) > 1:
        found = "; ".join(f"{name} on process {process}" for process, name in enumerate(kinds))
        raise RuntimeError(
            "the processes of this run must run the same iterations, got different exchanges: "
            f"{found}. Branch only on values that are equal on all processes, such as the step or "
            "metrics"
        )
    begin = _KIND + 8
    sizes = [int.from_bytes(row[_KIND:begin], "little") for row in rows]
    parts = [row[begin:] for row in rows]
    longest = max(sizes) - (_HEAD - begin)
    if longest > 0:
        # Few sizes: data that grows by a byte must not compile another program.
        length = max(_HEAD, 1 << (longest - 1).bit_length())
        tails = _gather_bytes(message[_HEAD:].ljust(length, b"\0"))
        parts = [part + tail for part, tail in zip(parts, tails, strict=True)]
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of each process; all must pass the same number of bytes."""
    with internal_transfers(), doing(AGREEING):
        rows = np.asarray(multihost_utils.process_allgather(np.frombuffer(data, np.uint8)))
    return [row.tobytes() for row in rows]

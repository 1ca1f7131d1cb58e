"""The processes of a run: initialization, and agreement on values, times and when to stop."""

import itertools
import json
import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jstep.core import trees
from jstep.core.checks import array_type, as_int
from jstep.core.meshes import internal_transfers
from jstep.core.threads import AGREEING, AGREEING_ON_SHAPES, doing

# Agreement of the processes of a run: when to stop, when to save, and on values.

# JAX counts calls of its synchronization point over the lifetime of the process, so this counter is global, too.
_calls = itertools.count(1)
_has_stopped = threading.Event()
"""Set when the preemption service has stopped a run, which it can do only once."""
_SMALLEST = 1024  # minimum number of bytes to exchange
_T = TypeVar("_T")


def should_stop() -> bool:
    """Whether all processes must stop after this call; all must ask after each call of the training step."""
    try:
        with doing(AGREEING):
            is_reached = bool(multihost_utils.reached_preemption_sync_point(next(_calls)))
    except RuntimeError:  # the service is off: jax_enable_preemption_service
        return False
    if is_reached:
        _has_stopped.set()
    return is_reached


def refuse_another_run() -> None:
    """Reject a run that no signal could stop, because one has stopped an earlier run."""
    if _has_stopped.is_set():
        raise RuntimeError(
            "train: a signal stopped an earlier run, and JAX stops only one; let processes exit on jstep.Preempted"
        )


def request_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class _Exchange(NamedTuple):
    """A step at which the processes agreed on the time, and the time when they began to."""

    step: int
    at: float


_LONGEST_GAP, _SHORTEST_GAP = 2.0, 1.0
"""Seconds between two exchanges, early in a period and at its end; at most a tenth of the period at its end."""
_SLOWER = 10
"""By this factor may steps become slower without ending the period late, but for the shortest gap."""


class AgreedClock:
    """A timer whose period ends for all processes at the same step, by the clock of process 0.

    At an exchange, process 0 says whether the period is over, and after how many steps the next exchange follows. It
    plans by the time that the newest steps took. A mean of the whole run would plan the last exchange of a long period
    hours too late if steps have become slower.
    """

    def __init__(self, secs: float, clock: Callable[[], float]) -> None:
        self._secs = secs
        self._clock = clock
        self._began = clock()
        self._next_exchange = 0
        self._latest: _Exchange | None = None

    def due(self, step: int) -> bool:
        """Return whether the period is over; all processes must ask after each call."""
        if step < self._next_exchange:
            return False
        exchange = _Exchange(step, self._clock())
        left = self._secs - (exchange.at - self._began)
        is_over, gap = broadcast_ints(left <= 0, self._steps_to_next(exchange, left))
        self._next_exchange = step + gap
        self._latest = exchange
        return bool(is_over)

    def done(self, secs: float | None = None) -> None:
        """Start another period, of the same length or of `secs` on process 0."""
        if secs is not None:
            self._secs = secs
        self._began = self._clock()
        self._next_exchange = 0

    def _steps_to_next(self, exchange: _Exchange, left: float) -> int:
        if left <= 0 or self._latest is None:
            return 1
        # The host runs ahead of the device, but each exchange waits for it. So the seconds since the latest exchange
        # began are those of as many steps, even if the newest of them are still running.
        steps = max(1, exchange.step - self._latest.step)
        secs_per_step = (exchange.at - self._latest.at) / steps
        shortest = min(_SHORTEST_GAP, self._secs / 10)
        gap = min(left, max(shortest, min(_LONGEST_GAP, left / _SLOWER)))
        # Not more than twice as many steps as were timed: the first ones are a poor sample.
        if gap >= 2 * steps * secs_per_step:
            return 2 * steps
        return max(1, int(gap / secs_per_step))


def is_single_process() -> bool:
    return jax.process_count() == 1


# Collectives, exempt from the caller's transfer guards. They block, and all processes must call them; with a single
# process there is no communication.


def any_process(true: bool) -> bool:
    return bool(max_over_processes(np.array([true]))[0])


def max_over_processes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return _gathered(values).max(axis=0)


def ints_of_all(*numbers: int) -> list[list[int]]:
    """Return the integers of each process, of up to 62 bits."""
    if is_single_process():
        return [list(numbers)]
    return [_joined(row) for row in _gathered(_halves(numbers))]


def _halves(numbers: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.array([divmod(number, 2**31) for number in numbers], np.int32)


def _joined(halves: np.ndarray[Any, Any]) -> list[int]:
    return [int(high) * 2**31 + int(low) for high, low in halves]


def gather_texts(text: str) -> list[str]:
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = _gathered(np.array([data.size], np.int32))[:, 0]
    # Few sizes: a string that grows by one digit must not compile another program.
    room = max(_SMALLEST, 1 << (int(sizes.max()) - 1).bit_length())
    rows = _gathered(np.pad(data, (0, room - data.size)))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def on_all_processes(fn: Callable[[], _T], problem: str, kind: type[Exception] = RuntimeError) -> _T:
    """Return `fn()`, which must not communicate; an error on one process is raised on all."""
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

    The others raise one of `kinds` if it has the name of that error, or else the last of them, with its message.
    """
    if is_single_process():
        return fn()
    error: Exception | None = None
    outcome = ["", ""]
    if jax.process_index() == 0:
        try:
            outcome = ["", fn()]
        except Exception as caught:
            error, outcome = caught, [type(caught).__name__, str(caught)]
    name, text = json.loads(broadcast_bytes(json.dumps(outcome).encode()))
    if name:
        last = kinds[-1] if kinds else RuntimeError
        raise error or next((kind for kind in kinds if kind.__name__ == name), last)(text)
    return str(text)


def first_ints_on_all(
    fn: Callable[[], tuple[int, ...]], count: int, problem: str, kind: type[Exception] = RuntimeError
) -> list[int]:
    """Return the `count` integers that `fn` returns on process 0; an error is raised on all processes."""
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


class AgreedShapes:
    def __init__(self) -> None:
        self._known: set[Any] = set()

    def check(self, state: trees.Tree, args: tuple[Any, ...], shapes: Hashable = None) -> None:
        """Compare new shapes of a batch with the other processes, if its arrays span them; all must call it."""
        if shapes is None:
            leaves, treedef = trees.flatten(args)
            shapes = treedef, *((leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf) for leaf in leaves)
        if shapes in self._known:
            return
        if not any(map(_spans_processes, (*jax.tree.leaves(args), getattr(state, "global_step", None)))):
            return  # not recorded either: one process may run steps by itself
        with doing(AGREEING_ON_SHAPES):
            batches = gather_texts(_described(args))
        for process, batch in enumerate(batches):
            if batch != batches[0]:
                raise ValueError(
                    f"batch: must be alike on all processes, got {batches[0]} on process 0, {batch} on {process}"
                )
        self._known.add(shapes)


def _spans_processes(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and not trees.is_traced(leaf) and not leaf.is_fully_addressable


def _described(args: tuple[Any, ...]) -> str:
    named = trees.leaves_with_paths(trees.args_to_batch(args))
    types = [array_type(np.shape(leaf), np.dtype(jax.dtypes.result_type(leaf)).name) for _, leaf in named]
    return ", ".join(kind + (f" at {path!r}" if path else "") for kind, (path, _) in zip(types, named, strict=True))


def broadcast_bytes(data: bytes) -> bytes:
    (size,) = broadcast_ints(len(data))
    padded = np.frombuffer(data[:size].ljust(size, b"\0"), np.uint8)
    return _broadcast_from_0(padded).astype(np.uint8).tobytes() if size else b""


def broadcast_ints(*numbers: int) -> list[int]:
    return _joined(_broadcast_from_0(_halves(numbers)))


def _gathered(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with internal_transfers(), doing(AGREEING):
        return np.asarray(multihost_utils.process_allgather(values))


def _broadcast_from_0(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with internal_transfers(), doing(AGREEING):
        return np.asarray(multihost_utils.broadcast_one_to_all(values))


# Initialization of multi-process training, from arguments and the environment variables of launchers.

ADDRESS, COUNT, INDEX = FIELDS = ("coordinator_address", "num_processes", "process_id")
_JAX = {ADDRESS: "JAX_COORDINATOR_ADDRESS", COUNT: "JAX_NUM_PROCESSES", INDEX: "JAX_PROCESS_ID"}
_SKYPILOT = {ADDRESS: "SKYPILOT_NODE_IPS", COUNT: "SKYPILOT_NUM_NODES", INDEX: "SKYPILOT_NODE_RANK"}
_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "TPU_WORKER_HOSTNAMES")
"""Variables of launchers that indicate several processes."""


class Setting(NamedTuple):
    value: Any
    name: str

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}"


def launcher_of_several() -> str | None:
    texts = ((name, os.environ.get(name, "")) for name in _SIZES)
    return next((f"{name}={text}" for name, text in texts if "," in text or (text.isdigit() and int(text) > 1)), None)


def check_range(settings: Mapping[str, Setting]) -> None:
    count, index = settings.get(COUNT), settings.get(INDEX)
    for setting, low in ((count, 1), (index, 0)):
        if setting is not None and setting.value < low:
            raise ValueError(f"{setting}: must be ≥ {low}")
    if count is not None and index is not None and index.value >= count.value:
        raise ValueError(f"{index}: must be < {count}")


def _numbers(names: Mapping[str, str]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for field, name in names.items():
        if text := os.environ.get(name, "").strip():
            try:
                settings[field] = Setting(text if field == ADDRESS else int(text), name)
            except ValueError:
                raise ValueError(f"{name}={text!r}: must be an integer") from None
    return settings


def _read_skypilot() -> dict[str, Setting]:
    """Read SkyPilot's variables: one process for each node, process 0 on the first."""
    settings = _numbers(_SKYPILOT)
    if ADDRESS in settings:
        # JAX's variable for the port, or one derived from the task, above Linux's ephemeral ports.
        task = os.environ.get("SKYPILOT_TASK_ID", "")
        port = os.environ.get("JAX_COORDINATOR_PORT") or str(61440 + zlib.crc32(task.encode()) % 4096)
        settings[ADDRESS] = Setting(f"{settings[ADDRESS].value.split()[0]}:{port}", _SKYPILOT[ADDRESS])
    return settings


_LOOPBACK = {"localhost", "127.0.0.1", "::1", "[::1]"}


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    initialization_timeout_secs: int = 300,
    heartbeat_timeout_secs: int = 100,
    shutdown_timeout_secs: int = 300,
) -> None:
    """Initialize JAX for several processes; must be called before JAX uses a device. A no-op with one process.

    Without arguments it uses the launcher's settings: the variables `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`; SkyPilot's variables (one process for each node); otherwise JAX's own detection of SLURM, Open
    MPI, Cloud TPU and GKE. It does nothing if JAX is initialized already.

    Args:
        coordinator_address: `"host:port"` of process 0.
        num_processes: The number of processes.
        process_id: The index of this process, 0 ≤ process_id < num_processes.
        initialization_timeout_secs: How long to wait for the other processes.
        heartbeat_timeout_secs: How long a process may be silent before it counts as dead; the others then exit with an
            error.
        shutdown_timeout_secs: How long an exiting process waits for the others, which then exit with an error.

    Raises:
        ValueError: An argument or a variable is out of range or missing, or two disagree; names them.
        TimeoutError: The coordinator cannot be reached; names its address.
        RuntimeError: JAX is already in use, or is initialized with other processes than the arguments specify.

    Example:
        >>> import jstep
        >>> jstep.distributed.initialize(num_processes=1)

    Source: `jax.distributed.initialize`. A coordinator with a loopback address listens only on it. Under SLURM, each
    task gets the GPU of its `SLURM_LOCALID`, unless `JAX_LOCAL_DEVICE_IDS` is set.
    """
    values = {ADDRESS: coordinator_address, COUNT: num_processes, INDEX: process_id}
    arguments = {name: Setting(value, name) for name, value in values.items() if value is not None}
    for name in (COUNT, INDEX):
        if name in arguments:
            as_int(values[name], name)
    as_int(initialization_timeout_secs, "initialization_timeout_secs", 1)
    as_int(heartbeat_timeout_secs, "heartbeat_timeout_secs", 1)
    as_int(shutdown_timeout_secs, "shutdown_timeout_secs", 1)
    if coordinator_address is not None and not isinstance(coordinator_address, str):
        raise TypeError(f"coordinator_address={coordinator_address!r}: must be 'host:port'")
    check_range(arguments)
    if jax.distributed.is_initialized():
        for name, wanted, ask in ((COUNT, num_processes, jax.process_count), (INDEX, process_id, jax.process_index)):
            if wanted is not None and wanted != (joined := ask()):
                raise RuntimeError(
                    f"{name}={wanted}: JAX is already initialized with {name}={joined}; initialize only once"
                )
        return
    if num_processes == 1:
        return
    config = _numbers(_JAX) | arguments
    if not config.keys() >= set(FIELDS):
        config = _read_skypilot() | config
    check_range(config)
    address, count, index = (config[name].value if name in config else None for name in FIELDS)
    if count == 1 or (count is None and os.environ.get("SLURM_NTASKS") == "1"):
        return
    complete = config.keys() >= set(FIELDS)  # all that JAX needs
    bind = None
    if address is not None:
        host, port = _host_and_port(config[ADDRESS])
        bind = f"{host}:{port}" if host in _LOOPBACK and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ else None
        if complete and index:
            # JAX's own client exits the process on a timeout, without an exception.
            _wait_for(host, port, config[ADDRESS], initialization_timeout_secs)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            # JAX queries metadata servers and Kubernetes even for arguments that are given.
            cluster_detection_method="deactivate" if complete else None,
            initialization_timeout=initialization_timeout_secs,
            heartbeat_timeout_seconds=heartbeat_timeout_secs,
            shutdown_timeout_seconds=shutdown_timeout_secs,
            coordinator_bind_address=bind,
        )
    except RuntimeError:
        # JAX is already in use. That is harmless with one process; with several, each would train separately.
        if config or launcher_of_several():
            raise
    except ValueError as error:
        several = launcher_of_several()
        if not config and not several and "should be defined" in str(error):
            return  # no cluster detected: one process
        raise ValueError(
            f"{', '.join(map(str, config.values())) or several}: {error} Set {', '.join(_JAX.values())}, all three, or "
            "start the processes with srun; or pass num_processes=1 to train with a single process"
        ) from error


def _host_and_port(address: Setting) -> tuple[str, int]:
    host, colon, port = address.value.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address}: must be 'host:port', such as '10.0.0.1:1234'")
    return host, int(port)


def _wait_for(host: str, port: int, address: Setting, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        try:
            left = max(0.1, end - time.monotonic())
            with socket.create_connection((host.strip("[]"), port), timeout=left):
                return
        except OSError as error:
            if time.monotonic() >= end:
                raise TimeoutError(f"{address} could not be reached within {timeout} s ({error})") from error
            time.sleep(0.1)

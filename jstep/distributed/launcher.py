"""Initialization of multi-process training, from arguments and launchers' environment variables."""

import os
import socket
import time
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jstep.core.checks import as_int

_ADDRESS = "coordinator_address"
_COUNT = "num_processes"
_INDEX = "process_id"
_FIELDS = (_ADDRESS, _COUNT, _INDEX)
_JAX = {_ADDRESS: "JAX_COORDINATOR_ADDRESS", _COUNT: "JAX_NUM_PROCESSES", _INDEX: "JAX_PROCESS_ID"}
_SKYPILOT = {
    _ADDRESS: "SKYPILOT_NODE_IPS",
    _COUNT: "SKYPILOT_NUM_NODES",
    _INDEX: "SKYPILOT_NODE_RANK",
}
_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "TPU_WORKER_HOSTNAMES")
"""Variables of launchers that indicate several processes, by a number or by a list with commas."""
_LOOPBACK = {"localhost", "127.0.0.1", "::1", "[::1]"}


class _Setting(NamedTuple):
    """A value and the name of its source, an argument or a variable."""

    value: Any
    name: str

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}"


_Settings = dict[str, _Setting]
"""Settings by argument of `initialize`."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    initialization_timeout_secs: int = 300,
    heartbeat_timeout_secs: int = 100,
    shutdown_timeout_secs: int = 300,
) -> None:
    """Initialize JAX for several processes; must be called before JAX uses a device.

    With one process, it does nothing. Without arguments it uses the launcher's settings: the
    variables `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`; SkyPilot's
    variables (one process for each node); otherwise JAX's own detection of SLURM, Open MPI, Cloud
    TPU and GKE. It does nothing if JAX is initialized already, as by Ray Train on GPUs and TPUs.

    Args:
        coordinator_address: `"host:port"` of process 0.
        num_processes: The number of processes.
        process_id: The index of this process, 0 ≤ process_id < num_processes.
        initialization_timeout_secs: How long to wait for the other processes.
        heartbeat_timeout_secs: How long a process may be silent before it counts as dead; the
            others then exit with an error.
        shutdown_timeout_secs: How long an exiting process waits for the others, which then exit
            with an error.

    Raises:
        ValueError: An argument or a variable is out of range or missing, or two disagree; names
            them.
        TimeoutError: The coordinator cannot be reached; names its address.
        RuntimeError: JAX is already in use, or is initialized with other processes than the
            arguments specify.

    Example:
        >>> import jstep
        >>> jstep.distributed.initialize(num_processes=1)

    Source: `jax.distributed.initialize`. On CPUs, collectives use gloo. A coordinator with a
    loopback address listens only on it; JAX's default is all interfaces. Under SLURM, each task
    gets the GPU of its `SLURM_LOCALID`, unless `JAX_LOCAL_DEVICE_IDS` is set.
    """
    arguments = _check_arguments(coordinator_address, num_processes, process_id)
    initialization_timeout_secs = as_int(
        initialization_timeout_secs, "initialization_timeout_secs", 1
    )
    heartbeat_timeout_secs = as_int(heartbeat_timeout_secs, "heartbeat_timeout_secs", 1)
    shutdown_timeout_secs = as_int(shutdown_timeout_secs, "shutdown_timeout_secs", 1)
    if jax.distributed.is_initialized():
        _check_same(_COUNT, num_processes, jax.process_count())
        _check_same(_INDEX, process_id, jax.process_index())
        return
    if num_processes == 1:
        return
    settings = _find_settings(arguments)
    address = settings[_ADDRESS].value if _ADDRESS in settings else None
    count = settings[_COUNT].value if _COUNT in settings else None
    index = settings[_INDEX].value if _INDEX in settings else None
    if count == 1 or (count is None and os.environ.get("SLURM_NTASKS") == "1"):
        return
    is_complete = len(settings) == len(_FIELDS)  # all that JAX needs
    bind_address = None
    if address is not None:
        host, port = _host_and_port(settings[_ADDRESS])
        if host in _LOOPBACK and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
            bind_address = f"{host}:{port}"
        if is_complete and index:
            # JAX's own client exits the process on a timeout, without an exception.
            _wait_for(host, port, settings[_ADDRESS], initialization_timeout_secs)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            # JAX queries metadata servers and Kubernetes even for arguments that are given.
            cluster_detection_method="deactivate" if is_complete else None,
            initialization_timeout=initialization_timeout_secs,
            heartbeat_timeout_seconds=heartbeat_timeout_secs,
            shutdown_timeout_seconds=shutdown_timeout_secs,
            coordinator_bind_address=bind_address,
        )
    except RuntimeError:
        # JAX is already in use. That is harmless with one process; several would train separately.
        if settings or _launcher_of_several():
            raise
    except ValueError as error:
        launcher = _launcher_of_several()
        if not settings and not launcher and "should be defined" in str(error):
            return  # no cluster detected: one process
        raise ValueError(
            f"{', '.join(map(str, settings.values())) or launcher}: {error} Set "
            f"{', '.join(_JAX.values())}, all three, or start the processes with srun; or pass "
            "num_processes=1 to train with a single process"
        ) from error


def _check_arguments(address: str | None, count: int | None, index: int | None) -> _Settings:
    """Return the arguments that are not None."""
    settings: _Settings = {}
    if count is not None:
        settings[_COUNT] = _Setting(as_int(count, _COUNT), _COUNT)
    if index is not None:
        settings[_INDEX] = _Setting(as_int(index, _INDEX), _INDEX)
    if address is not None:
        if not isinstance(address, str):
            raise TypeError(f"coordinator_address={address!r}: must be 'host:port'")
        settings[_ADDRESS] = _Setting(address, _ADDRESS)
    _check_range(settings)
    return settings


def _check_range(settings: Mapping[str, _Setting]) -> None:
    count = settings.get(_COUNT)
    index = settings.get(_INDEX)
    if count is not None and count.value < 1:
        raise ValueError(f"{count}: must be ≥ 1")
    if index is not None and index.value < 0:
        raise ValueError(f"{index}: must be ≥ 0")
    if count is not None and index is not None and index.value >= count.value:
        raise ValueError(f"{index}: must be < {count}")


def _check_same(name: str, wanted: int | None, current: int) -> None:
    if wanted is not None and wanted != current:
        raise RuntimeError(
            f"{name}={wanted}: JAX is already initialized with {name}={current}; "
            "initialize only once"
        )


def _find_settings(arguments: _Settings) -> _Settings:
    """Complete the arguments by JAX's variables and, if some are still missing, by SkyPilot's."""
    settings = _read_variables(_JAX) | arguments
    if len(settings) < len(_FIELDS):
        settings = _read_skypilot() | settings
    _check_range(settings)
    return settings


def _read_variables(names: Mapping[str, str]) -> _Settings:
    """Read variables; an empty one is unset."""
    settings: _Settings = {}
    for field, name in names.items():
        text = os.environ.get(name, "").strip()
        if not text:
            continue
        try:
            settings[field] = _Setting(text if field == _ADDRESS else int(text), name)
        except ValueError:
            raise ValueError(f"{name}={text!r}: must be an integer") from None
    return settings


def _read_skypilot() -> _Settings:
    """Read SkyPilot's variables: one process for each node, process 0 on the first."""
    settings = _read_variables(_SKYPILOT)
    if _ADDRESS in settings:
        # JAX's variable for the port, or one derived from the task, above Linux's ephemeral ports.
        task = os.environ.get("SKYPILOT_TASK_ID", "")
        default_port = 61440 + zlib.crc32(task.encode()) % 4096
        port = os.environ.get("JAX_COORDINATOR_PORT") or str(default_port)
        first_node = settings[_ADDRESS].value.split()[0]
        settings[_ADDRESS] = _Setting(f"{first_node}:{port}", _SKYPILOT[_ADDRESS])
    return settings


def _launcher_of_several() -> str | None:
    """Return the variable of a launcher that started several processes, as `NAME=value`."""
    for name in _SIZES:
        text = os.environ.get(name, "")
        if "," in text or (text.isdigit() and int(text) > 1):
            return f"{name}={text}"
    return None


def _host_and_port(address: _Setting) -> tuple[str, int]:
    host, colon, port = address.value.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address}: must be 'host:port', such as '10.0.0.1:1234'")
    return host, int(port)


def _wait_for(host: str, port: int, address: _Setting, timeout: float) -> None:
    """Wait until process 0 listens."""
    end = time.monotonic() + timeout
    while True:
        try:
            left = max(0.1, end - time.monotonic())
            with socket.create_connection((host.strip("[]"), port), timeout=left):
                return
        except OSError as error:
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"{address} could not be reached within {timeout} s ({error})"
                ) from error
            time.sleep(0.1)

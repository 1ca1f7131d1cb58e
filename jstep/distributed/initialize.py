"""Initialization of multi-process training."""

import os
import socket
import time

import jax

from jstep.core.checks import as_int
from jstep.distributed import environment
from jstep.distributed.environment import ADDRESS, COUNT, INDEX, Setting

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
    MPI, Cloud TPU and GKE. It does nothing if JAX is already initialized, as by Ray Train on GPUs and TPUs.

    Args:
        coordinator_address: `"host:port"` of process 0.
        num_processes: The number of processes.
        process_id: The index of this process, 0 ≤ process_id < num_processes.
        initialization_timeout_secs: How long to wait for the other processes.
        heartbeat_timeout_secs: How long a process may be silent before it counts as dead; the others then exit with an
            error.
        shutdown_timeout_secs: How long an exiting process waits for the others to exit. If one of them raised an
            exception, the others exit with an error after this time.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument or a variable is out of range or missing, or two disagree; names them.
        TimeoutError: The coordinator cannot be reached; names its address.
        RuntimeError: JAX is already in use, or is initialized with other processes than the arguments specify.

    Example:
        >>> import jstep
        >>> jstep.distributed.initialize(num_processes=1)

    Source: `jax.distributed.initialize`. On the CPU collectives use gloo. A coordinator with a loopback address listens
    only on this address; JAX's default is all interfaces. Under SLURM JAX assigns to each task the GPU of its
    `SLURM_LOCALID`; to assign others, set `JAX_LOCAL_DEVICE_IDS` or all three `JAX_*` variables.
    """
    for name, value in (
        ("num_processes", num_processes),
        ("process_id", process_id),
        ("initialization_timeout_secs", initialization_timeout_secs),
        ("heartbeat_timeout_secs", heartbeat_timeout_secs),
        ("shutdown_timeout_secs", shutdown_timeout_secs),
    ):
        if value is not None or name not in (COUNT, INDEX):
            as_int(value, name, None if name in (COUNT, INDEX) else 1)
    if coordinator_address is not None and not isinstance(coordinator_address, str):
        raise TypeError(f"coordinator_address={coordinator_address!r}: must be 'host:port'")
    given = {ADDRESS: coordinator_address, COUNT: num_processes, INDEX: process_id}
    arguments = {name: Setting(value, name) for name, value in given.items() if value is not None}
    environment.check_range(arguments)
    if jax.distributed.is_initialized():
        _check_joined(num_processes, process_id)
        return
    if num_processes == 1:
        return
    found = environment.known(arguments)
    if environment.is_alone(found):
        return
    address, count, index = (found[name].value if name in found else None for name in (ADDRESS, COUNT, INDEX))
    is_complete = environment.is_complete(found)
    bind = None
    if address is not None:
        host, port = _host_and_port(found[ADDRESS])
        bind = f"{host}:{port}" if host in _LOOPBACK and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ else None
        if is_complete and index:
            # JAX's own client exits the process on a timeout, without an exception.
            _wait_for(host, port, found[ADDRESS], initialization_timeout_secs)
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
            coordinator_bind_address=bind,
        )
    except RuntimeError:
        # JAX is already in use. That is harmless with one process; with several, each would train separately.
        if found or environment.several():
            raise
    except ValueError as error:
        several = environment.several()
        if not found and not several and "should be defined" in str(error):
            return  # no cluster detected: one process
        settings = ", ".join(str(found.get(name, Setting(None, name))) for name in (ADDRESS, COUNT, INDEX))
        raise ValueError(
            f"{settings if found or not several else several}: {error} Missing: {environment.missing(found)}. Give all "
            "three as arguments or variables, or start the processes under SLURM (srun), Open MPI or on a TPU slice, "
            "where they are detected; num_processes=1 trains with a single process."
        ) from error


def _check_joined(num_processes: int | None, process_id: int | None) -> None:
    """Compare the arguments with an earlier initialization, by this function or a launcher.

    Raises:
        RuntimeError: JAX was initialized with other processes than the arguments specify.
    """
    for name, wanted, ask in ((COUNT, num_processes, jax.process_count), (INDEX, process_id, jax.process_index)):
        if wanted is not None and wanted != (found := ask()):
            raise RuntimeError(f"{name}={wanted}: JAX is already initialized with {name}={found}; initialize only once")


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
                raise TimeoutError(
                    f"{address} could not be reached within {timeout} s ({error}). Is process 0 "
                    "running there, and is the port open?"
                ) from error
            time.sleep(0.1)

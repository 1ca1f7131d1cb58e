"""Several processes, one program: joining them."""

import os
import socket
import time

import jax

from jstep.distributed import environment
from jstep.distributed.environment import ADDRESS, COUNT, INDEX, Said

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
    """Joins the processes of a run; to be called before anything asks JAX for a device. A no-op on one process.

    Without arguments it follows the launcher: the variables `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`; SkyPilot's (one process for each node); else what JAX finds by itself, under SLURM, Open MPI, on
    Cloud TPU and GKE. It does nothing if JAX is initialized already, as Ray Train does it on GPUs and TPUs.

    Args:
        coordinator_address: `"host:port"` of process 0.
        num_processes: How many there are.
        process_id: Which one this is, 0 ≤ process_id < num_processes.
        initialization_timeout_secs: How long to wait for the others.
        heartbeat_timeout_secs: After how long a process that is not heard of counts as dead; the others then end
            with an error.
        shutdown_timeout_secs: How long a process that ends waits for the others to end. Where one of them raised an
            exception, the others learn of it, and end with an error, when this time is over.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument or a variable is out of range or missing, or two disagree; names them.
        TimeoutError: The coordinator cannot be reached; names its address.
        RuntimeError: JAX has been used already, or is initialized with other processes than the arguments say.

    Example:
        >>> import jstep
        >>> jstep.distributed.initialize(num_processes=1)

    Source: `jax.distributed.initialize`. On the CPU collectives go through gloo. A coordinator on a loopback address
    listens there alone; JAX's own default is every interface. Under SLURM JAX gives each task the GPU of its
    `SLURM_LOCALID`; `JAX_LOCAL_DEVICE_IDS` gives it others, as does setting all three `JAX_*` variables.
    """
    for name, value in (
        ("num_processes", num_processes),
        ("process_id", process_id),
        ("initialization_timeout_secs", initialization_timeout_secs),
        ("heartbeat_timeout_secs", heartbeat_timeout_secs),
        ("shutdown_timeout_secs", shutdown_timeout_secs),
    ):
        if value is None and name in (COUNT, INDEX):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: must be an integer, got {type(value).__name__}")
        if name not in (COUNT, INDEX) and value < 1:
            raise ValueError(f"{name}={value}: must be ≥ 1")
    if coordinator_address is not None and not isinstance(coordinator_address, str):
        raise TypeError(f"coordinator_address={coordinator_address!r}: must be 'host:port'")
    given = {ADDRESS: coordinator_address, COUNT: num_processes, INDEX: process_id}
    arguments = {name: Said(value, name) for name, value in given.items() if value is not None}
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
            # JAX's own client ends the process when it gives up, without an exception.
            _wait_for(host, port, found[ADDRESS], initialization_timeout_secs)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            # JAX asks metadata servers and Kubernetes even for what it was given.
            cluster_detection_method="deactivate" if is_complete else None,
            initialization_timeout=initialization_timeout_secs,
            heartbeat_timeout_seconds=heartbeat_timeout_secs,
            shutdown_timeout_seconds=shutdown_timeout_secs,
            coordinator_bind_address=bind,
        )
    except RuntimeError:
        # JAX was used already. Alone that does no harm; with others each process would train by itself.
        if found or environment.several():
            raise
    except ValueError as error:
        several = environment.several()
        if not found and not several and "should be defined" in str(error):
            return  # no cluster is found: one process
        said = ", ".join(str(found.get(name, Said(None, name))) for name in (ADDRESS, COUNT, INDEX))
        raise ValueError(
            f"{said if found or not several else several}: {error} Missing: {environment.missing(found)}. Give all "
            "three as arguments or variables, or start the processes under SLURM (srun), Open MPI or on a TPU slice, "
            "where they are found; num_processes=1 trains alone."
        ) from error


def _check_joined(num_processes: int | None, process_id: int | None) -> None:
    """JAX was initialized before, by this function or a launcher.

    Raises:
        RuntimeError: With other processes than the arguments say.
    """
    for name, wanted, ask in ((COUNT, num_processes, jax.process_count), (INDEX, process_id, jax.process_index)):
        if wanted is not None and wanted != (found := ask()):
            raise RuntimeError(f"{name}={wanted}: JAX is initialized already, with {name}={found}; call it only once")


def _host_and_port(address: Said) -> tuple[str, int]:
    host, colon, port = address.value.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address}: must be 'host:port', such as '10.0.0.1:1234'")
    return host, int(port)


def _wait_for(host: str, port: int, address: Said, timeout: float) -> None:
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

"""Several processes, one program: joining them."""

import os
import socket
import time

import jax

_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JAX_NUM_PROCESSES")
_TPU_HOSTS = "TPU_WORKER_HOSTNAMES"
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

    Args:
        coordinator_address: `"host:port"` of process 0. Under SLURM, Open MPI, on Cloud TPU and GKE it is found, as
            are the others; `JAX_COORDINATOR_ADDRESS` sets it as well.
        num_processes: How many there are.
        process_id: Which one this is, 0 ≤ process_id < num_processes.
        initialization_timeout_secs: How long to wait for the others.
        heartbeat_timeout_secs: After how long a process that is not heard of counts as dead; the others then end
            with an error.
        shutdown_timeout_secs: How long a process that ends waits for the others to end. Where one of them raised an
            exception, the others learn of it, and end with an error, when this time is over.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range or missing.
        TimeoutError: The coordinator cannot be reached; names its address.
        RuntimeError: JAX has been used already.

    Example:
        >>> import jstep
        >>> jstep.distributed.initialize(num_processes=1)

    Source: `jax.distributed.initialize`. On the CPU collectives go through gloo. A coordinator on a loopback address
    listens there alone; JAX's own default is every interface.
    """
    for name, value, low in (
        ("num_processes", num_processes, 1),
        ("process_id", process_id, 0),
        ("initialization_timeout_secs", initialization_timeout_secs, 1),
        ("heartbeat_timeout_secs", heartbeat_timeout_secs, 1),
        ("shutdown_timeout_secs", shutdown_timeout_secs, 1),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: must be an integer, got {type(value).__name__}")
        if value < low:
            raise ValueError(f"{name}={value}: must be ≥ {low}")
    if num_processes is not None and process_id is not None and process_id >= num_processes:
        raise ValueError(f"process_id={process_id}: must be < num_processes={num_processes}")
    if coordinator_address is not None and not isinstance(coordinator_address, str):
        raise TypeError(f"coordinator_address={coordinator_address!r}: must be 'host:port'")
    if num_processes == 1:
        return
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    given = address is not None or num_processes is not None or process_id is not None
    bind = None
    if address is not None:
        host, port = _host_and_port(address)
        bind = f"{host}:{port}" if host in _LOOPBACK and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ else None
        if process_id:
            # JAX's own client ends the process when it gives up, without an exception.
            _wait_for(host, port, address, initialization_timeout_secs)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address,
            num_processes,
            process_id,
            initialization_timeout=initialization_timeout_secs,
            heartbeat_timeout_seconds=heartbeat_timeout_secs,
            shutdown_timeout_seconds=shutdown_timeout_secs,
            coordinator_bind_address=bind,
        )
    except RuntimeError:
        # JAX was used already. Alone that does no harm; with others each process would train by itself.
        if (
            given
            or any(int(os.environ.get(name, "1") or 1) > 1 for name in _SIZES)
            or "," in os.environ.get(_TPU_HOSTS, "")
        ):
            raise
    except ValueError as error:
        if not given and "should be defined" in str(error):
            return  # no cluster is found: one process
        raise ValueError(
            f"coordinator_address={address!r}, num_processes={num_processes}, process_id={process_id}: {error} Give "
            "all three, or start the processes under SLURM, Open MPI or on a TPU slice, where they are found."
        ) from error


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"coordinator_address={address!r}: must be 'host:port', such as '10.0.0.1:1234'")
    return host, int(port)


def _wait_for(host: str, port: int, address: str, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        try:
            left = max(0.1, end - time.monotonic())
            with socket.create_connection((host.strip("[]"), port), timeout=left):
                return
        except OSError as error:
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"coordinator_address={address!r} could not be reached within {timeout} s ({error}). Is process 0 "
                    "running there, and is the port open?"
                ) from error
            time.sleep(0.1)

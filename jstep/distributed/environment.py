"""Launcher environment variables: process index, number of processes, and coordinator address."""

import os
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

ADDRESS, COUNT, INDEX = FIELDS = ("coordinator_address", "num_processes", "process_id")
_JAX = {ADDRESS: "JAX_COORDINATOR_ADDRESS", COUNT: "JAX_NUM_PROCESSES", INDEX: "JAX_PROCESS_ID"}
_SKYPILOT = {ADDRESS: "SKYPILOT_NODE_IPS", COUNT: "SKYPILOT_NUM_NODES", INDEX: "SKYPILOT_NODE_RANK"}
_SLURM = {COUNT: "SLURM_NTASKS", INDEX: "SLURM_PROCID"}
_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""The variables that JAX needs under SLURM; `srun` sets all of them."""
_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_TPU_HOSTS = "TPU_WORKER_HOSTNAMES"


class Setting(NamedTuple):
    """A value and the name of its source, an argument or a variable."""

    value: Any
    name: str

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}"


Known = Mapping[str, Setting]
"""The known values of `FIELDS`."""


def known(arguments: Known) -> Known:
    """Combine arguments and variables: arguments take precedence over `JAX_*`, and these over SkyPilot's.

    JAX itself reads SLURM's variables. Here they are only compared with the others, if those are incomplete.

    Raises:
        ValueError: A variable is not a number or is out of range, or two disagree; names them.
    """
    found: dict[str, Setting] = {**_numbers(_JAX), **arguments}
    check_range(found)
    for launcher, is_read_here in ((_of_skypilot, True), (_of_slurm, False)):
        if is_complete(found):
            break
        other = launcher()
        _refuse_contradictions(found, other)
        check_range({**other, **found})
        found = {**other, **found} if is_read_here else found
    return found


def is_complete(found: Known) -> bool:
    """Whether all fields that JAX needs are known."""
    return all(field in found for field in FIELDS)


def is_alone(found: Known) -> bool:
    """Whether there is a single process, according to the known fields or the current SLURM step."""
    count = found.get(COUNT) or _of_slurm().get(COUNT)
    return count is not None and count.value == 1


def several() -> str | None:
    """Return a variable that indicates several processes, as `NAME=value`, or None."""
    for name in _SIZES:
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 1:
            return f"{name}={text}"
    hosts = os.environ.get(_TPU_HOSTS, "")
    return f"{_TPU_HOSTS}={hosts}" if "," in hosts else None


def check_range(found: Known) -> None:
    """Validate the number of processes and the process index; errors name their sources.

    Raises:
        ValueError: The number of processes is below 1, or the process index is out of range.
    """
    count, index = found.get(COUNT), found.get(INDEX)
    for one, low in ((count, 1), (index, 0)):
        if one is not None and one.value < low:
            raise ValueError(f"{one}: must be ≥ {low}")
    if count is not None and index is not None and index.value >= count.value:
        raise ValueError(f"{index}: must be < {count}")


def missing(found: Known) -> str:
    """List the unknown fields and the variables that would set them, for an error."""
    absent = [field for field in FIELDS if field not in found]
    text = ", ".join(f"{field} ({_JAX[field]})" for field in absent)
    step = [name for name in _SLURM_STEP if not os.environ.get(name)]
    if 0 < len(step) < len(_SLURM_STEP):
        text += f"; of what srun sets: {', '.join(step)}"
    return text


def _numbers(names: Mapping[str, str]) -> dict[str, Setting]:
    """Read the variables that are set, and parse numbers; an empty variable counts as unset."""
    found: dict[str, Setting] = {}
    for field, name in names.items():
        text = os.environ.get(name, "").strip()
        if not text:
            continue
        if field != ADDRESS:
            try:
                found[field] = Setting(int(text), name)
            except ValueError:
                raise ValueError(f"{name}={text!r}: must be an integer") from None
        else:
            found[field] = Setting(text, name)
    return found


def _of_skypilot() -> dict[str, Setting]:
    """Read SkyPilot's variables: one process for each node, process 0 on the first node.

    Raises:
        ValueError: One of the variables is missing, or they disagree.
    """
    found = _numbers(_SKYPILOT)
    check_range(found)
    if COUNT in found and found[COUNT].value == 1 and ADDRESS not in found:
        return found
    absent = [name for field, name in _SKYPILOT.items() if field not in found]
    if absent and found:
        names = ", ".join(map(str, found.values()))
        raise ValueError(f"{names}: {', '.join(absent)} must be set as well, as SkyPilot sets all of them")
    if not found:
        return {}
    nodes = found[ADDRESS].value.split()
    if len(nodes) != found[COUNT].value:
        raise ValueError(f"{found[COUNT]}: must be the number of addresses in {found[ADDRESS]}, which is {len(nodes)}")
    host = f"[{nodes[0]}]" if ":" in nodes[0] else nodes[0]
    return {**found, ADDRESS: Setting(f"{host}:{_port()}", _SKYPILOT[ADDRESS])}


def _port() -> str:
    """Return JAX's variable for the port, or a port derived from the task, above Linux's ephemeral ports."""
    task = os.environ.get("SKYPILOT_TASK_ID", "")
    return os.environ.get("JAX_COORDINATOR_PORT") or str(61440 + zlib.crc32(task.encode()) % 4096)


def _of_slurm() -> dict[str, Setting]:
    """Read the variables of `srun`, if it started this process."""
    return _numbers(_SLURM) if all(os.environ.get(name) for name in _SLURM_STEP) else {}


def _refuse_contradictions(found: Known, other: Known) -> None:
    for field in (COUNT, INDEX):
        if field in found and field in other and found[field].value != other[field].value:
            raise ValueError(
                f"{found[field]}, {other[field]}: they disagree; set {', '.join(_JAX.values())}, all three, or none"
            )

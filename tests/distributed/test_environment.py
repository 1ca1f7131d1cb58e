"""`initialize()` without arguments: environment variables that launchers set for their processes."""

import os
import textwrap

import forked
import jax
import pytest
from processes import free_address, wait_for

import jstep

KINDS = ("JAX_", "SLURM_", "SKYPILOT_", "OMPI_", "PMI_", "TPU_", "KUBERNETES_")
FULL = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "gpu[001-002]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"}


@pytest.fixture
def calls(monkeypatch):
    """The calls of `jax.distributed.initialize`, with the launchers' variables removed from the environment."""
    for name in list(os.environ):
        if name.startswith(KINDS) and name != "JAX_PLATFORMS":
            monkeypatch.delenv(name)
    recorded = []

    def initialize(address, count, index, **kwargs):
        recorded.append((address, count, index, kwargs["cluster_detection_method"]))

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    return recorded


def with_environment(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "arguments", "want"),
    [
        (FULL, {}, ("10.0.0.1:1234", 2, 0, "deactivate")),
        (FULL | {"JAX_NUM_PROCESSES": " 2 "}, {}, ("10.0.0.1:1234", 2, 0, "deactivate")),
        (FULL, {"num_processes": 3}, ("10.0.0.1:1234", 3, 0, "deactivate")),
        (FULL, {"coordinator_address": "h:1"}, ("h:1", 2, 0, "deactivate")),
        ({}, {"coordinator_address": "h:1", "num_processes": 2, "process_id": 0}, ("h:1", 2, 0, "deactivate")),
        # Complete settings override an outer launcher: Ray on SLURM, several processes per SkyPilot node.
        (FULL | SLURM | {"SLURM_NTASKS": "7"}, {}, ("10.0.0.1:1234", 2, 0, "deactivate")),
        (FULL | SKY | {"SKYPILOT_NUM_NODES": "7"}, {}, ("10.0.0.1:1234", 2, 0, "deactivate")),
        (SKY | SLURM | {"SLURM_NTASKS": "7", "JAX_COORDINATOR_PORT": "9"}, {}, ("10.0.0.1:9", 2, 0, "deactivate")),
        # JAX reads the variables of SLURM itself.
        (SLURM, {}, (None, None, None, None)),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "h:1"}, {}, ("h:1", None, None, None)),
        (SLURM | {"JAX_NUM_PROCESSES": "2"}, {}, (None, 2, None, None)),
        (SKY | {"JAX_COORDINATOR_PORT": "99"}, {}, ("10.0.0.1:99", 2, 0, "deactivate")),
        (SKY | {"JAX_COORDINATOR_ADDRESS": "h:1"}, {}, ("h:1", 2, 0, "deactivate")),
        (SKY | {"SKYPILOT_NODE_IPS": "::1 ::2", "JAX_COORDINATOR_PORT": "9"}, {}, ("[::1]:9", 2, 0, "deactivate")),
        ({}, {}, (None, None, None, None)),
        ({"JAX_COORDINATOR_ADDRESS": "", "JAX_NUM_PROCESSES": ""}, {}, (None, None, None, None)),
    ],
)  # fmt: skip
def test_arguments_for_jax(calls, monkeypatch, variables, arguments, want):
    with_environment(monkeypatch, variables)
    jstep.distributed.initialize(**arguments)
    assert calls == [want]


def test_each_skypilot_task_has_its_own_port(calls, monkeypatch):
    for task in ("sky-1", "sky-2", "sky-1"):
        with_environment(monkeypatch, SKY | {"SKYPILOT_TASK_ID": task})
        jstep.distributed.initialize()
    first, second, third = (int(address.removeprefix("10.0.0.1:")) for address, *_ in calls)
    assert first == third != second
    assert all(61440 <= port < 65536 for port in (first, second))


@pytest.mark.parametrize(
    "variables",
    [
        {"JAX_NUM_PROCESSES": "1"},
        {**FULL, "JAX_NUM_PROCESSES": "1"},
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SKYPILOT_NUM_NODES": "1"},
        {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"},
    ],
)
def test_one_process_does_not_initialize_jax(calls, monkeypatch, variables):
    with_environment(monkeypatch, variables)
    jstep.distributed.initialize()
    assert calls == []


def test_num_processes_1_overrides_the_environment(calls, monkeypatch):
    with_environment(monkeypatch, {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"} | FULL)
    jstep.distributed.initialize(num_processes=1)
    assert calls == []


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def no_cluster_detected(monkeypatch):
    """Replace JAX's function by one that raises like JAX when it detects no cluster."""

    def initialize(address, count, index, **kwargs):
        for value, words in ((address, "coordinator_address should be"), (count, "Number of processes must be")):
            if value is None:
                raise ValueError(f"{words} defined.")
        raise ValueError("The process id of the current process must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (without(FULL, "JAX_PROCESS_ID"), ["JAX_COORDINATOR_ADDRESS='10", "JAX_NUM_PROCESSES=2", "JAX_PROCESS_ID"]),
        (without(FULL, "JAX_NUM_PROCESSES"), ["JAX_COORDINATOR_ADDRESS=", "JAX_PROCESS_ID=0", "JAX_NUM_PROCESSES"]),
        (without(FULL, "JAX_COORDINATOR_ADDRESS"), ["JAX_NUM_PROCESSES=2", "JAX_PROCESS_ID=0", "JAX_COORD"]),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, ["JAX_COORDINATOR_ADDRESS='h:1'", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]),
        ({"JAX_NUM_PROCESSES": "2"}, ["JAX_NUM_PROCESSES=2", "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"]),
        ({"JAX_PROCESS_ID": "0"}, ["JAX_PROCESS_ID=0", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"]),
        (FULL | {"JAX_PROCESS_ID": "2"}, ["JAX_PROCESS_ID=2: must be < JAX_NUM_PROCESSES=2"]),
        (FULL | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "1"}, ["JAX_PROCESS_ID=1: must be < JAX_NUM_PROCESSES=1"]),
        (FULL | {"JAX_PROCESS_ID": "-1"}, ["JAX_PROCESS_ID=-1: must be ≥ 0"]),
        (FULL | {"JAX_NUM_PROCESSES": "0"}, ["JAX_NUM_PROCESSES=0: must be ≥ 1"]),
        (FULL | {"JAX_NUM_PROCESSES": "two"}, ["JAX_NUM_PROCESSES='two': must be an integer"]),
        (FULL | {"JAX_PROCESS_ID": "0.0"}, ["JAX_PROCESS_ID='0.0': must be an integer"]),
        (FULL | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, ["JAX_COORDINATOR_ADDRESS='10.0.0.1': must be 'host:port'"]),
        (FULL | {"JAX_COORDINATOR_ADDRESS": "h:0"}, ["JAX_COORDINATOR_ADDRESS='h:0': must be 'host:port'"]),
        (SLURM | {"JAX_NUM_PROCESSES": "4"}, ["JAX_NUM_PROCESSES=4", "SLURM_NTASKS=2"]),
        (SLURM | {"JAX_PROCESS_ID": "0"}, ["JAX_PROCESS_ID=0", "SLURM_PROCID=1"]),
        (SLURM | {"SLURM_PROCID": "2"}, ["SLURM_PROCID=2: must be < SLURM_NTASKS=2"]),
        (SLURM | {"SLURM_NTASKS": "many"}, ["SLURM_NTASKS='many': must be an integer"]),
        (without(SLURM, "SLURM_STEP_NODELIST"), ["SLURM_NTASKS=2", "SLURM_STEP_NODELIST", "srun"]),
        (without(SLURM, "SLURM_PROCID", "SLURM_LOCALID"), ["SLURM_NTASKS=2", "SLURM_PROCID, SLURM_LOCALID"]),
        (without(SKY, "SKYPILOT_NODE_RANK"), ["SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES=2"]),
        (without(SKY, "SKYPILOT_NODE_IPS"), ["SKYPILOT_NODE_IPS must be set", "SKYPILOT_NODE_RANK=0"]),
        (without(SKY, "SKYPILOT_NUM_NODES"), ["SKYPILOT_NUM_NODES must be set"]),
        (SKY | {"SKYPILOT_NODE_RANK": "2"}, ["SKYPILOT_NODE_RANK=2: must be < SKYPILOT_NUM_NODES=2"]),
        (SKY | {"SKYPILOT_NUM_NODES": "3"}, ["SKYPILOT_NUM_NODES=3", "SKYPILOT_NODE_IPS", "2"]),
        (SKY | {"SKYPILOT_NODE_RANK": "first"}, ["SKYPILOT_NODE_RANK='first': must be an integer"]),
        (SKY | {"JAX_NUM_PROCESSES": "4"}, ["JAX_NUM_PROCESSES=4", "SKYPILOT_NUM_NODES=2"]),
        (SKY | {"JAX_PROCESS_ID": "1"}, ["JAX_PROCESS_ID=1", "SKYPILOT_NODE_RANK=0"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE=2", "JAX_NUM_PROCESSES"]),
        ({"PMI_SIZE": "2"}, ["PMI_SIZE=2"]),
    ],
)  # fmt: skip
def test_incomplete_or_contradictory_variables_raise(calls, monkeypatch, variables, words):
    """The error names all variables; no process trains alone by mistake or waits for a time-out."""
    no_cluster_detected(monkeypatch)
    with_environment(monkeypatch, variables)
    with pytest.raises(ValueError) as raised:
        jstep.distributed.initialize()
    for word in words:
        assert word in str(raised.value)


def test_an_argument_is_checked_against_a_variable(calls, monkeypatch):
    with_environment(monkeypatch, FULL)
    with pytest.raises(ValueError, match="process_id=2: must be < JAX_NUM_PROCESSES=2"):
        jstep.distributed.initialize(process_id=2)


# --- real processes ------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
import jstep
jstep.distributed.initialize(initialization_timeout_secs=60)
jstep.distributed.initialize()  # has no effect, since JAX is initialized
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
total = multihost_utils.process_allgather(jnp.float32(1 + jax.process_index())).sum()
print("process", jax.process_index(), jax.process_count(), float(total))
for bad in ({"num_processes": 3}, {"process_id": 1 - jax.process_index()}):
    try:
        jstep.distributed.initialize(**bad)
    except RuntimeError as error:
        print(error)
jstep.distributed.initialize(num_processes=2, process_id=jax.process_index())
"""


def variables_of(launcher, i, address):
    """The variables that a launcher sets for process i."""
    full = FULL | {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": f"{i}"}
    port = {"JAX_COORDINATOR_PORT": address.split(":")[1]}
    slurm = {"SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": f"{i}", "SLURM_LOCALID": f"{i}"}
    task = {"SKYPILOT_TASK_ID": "sky-2026-11-21-08-00-00-000000_test_1"}
    # JAX must not query Kubernetes.
    kubernetes = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": "1",
        "JOB_COMPLETION_INDEX": f"{i}",
    }
    return {
        "SLURM": SLURM | slurm | port,
        "JobSet": full | kubernetes,  # those of `jobset.yaml`
        "SkyPilot": SKY | {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NODE_RANK": f"{i}"} | task | port,
        "Ray, on SLURM": SLURM | full | {"SLURM_STEP_NODELIST": "nowhere", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    }[launcher]


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["SLURM", "JobSet", "SkyPilot", "Ray, on SLURM"])
def test_two_processes_connect(launcher):
    address = free_address()
    environments = [variables_of(launcher, i, address) for i in range(2)]
    ended = wait_for([forked.start(textwrap.dedent(PROGRAM), env=one) for one in environments])
    for i, one in enumerate(ended):
        assert one.code == 0, one.err[-3000:]
        first, *refused = [line for line in one.out.splitlines() if not line.startswith("[Gloo]")]
        assert first == f"process {i} 2 3.0"
        assert [line.split(":")[0] for line in refused] == ["num_processes=3", f"process_id={1 - i}"]
        assert "kubernetes" not in one.err  # JAX would warn that the kubernetes package is missing

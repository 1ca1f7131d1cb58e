"""`initialize()` without arguments: environment variables that launchers set for their
processes."""

import os

import jax
import pytest

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
SKY = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "0",
}


@pytest.fixture
def calls(monkeypatch):
    """The calls of `jax.distributed.initialize`, with the launchers' variables removed from the
    environment."""
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
        (FULL, {"num_processes": 3}, ("10.0.0.1:1234", 3, 0, "deactivate")),
        ({}, {"coordinator_address": "h:1", "num_processes": 2, "process_id": 0},
         ("h:1", 2, 0, "deactivate")),
        # Complete settings override an outer launcher: Ray on SLURM, or several processes on a
        # node of SkyPilot.
        (FULL | SLURM | {"SLURM_NTASKS": "7"}, {}, ("10.0.0.1:1234", 2, 0, "deactivate")),
        (FULL | SKY | {"SKYPILOT_NUM_NODES": "7"}, {}, ("10.0.0.1:1234", 2, 0, "deactivate")),
        (SKY | SLURM | {"SLURM_NTASKS": "7", "JAX_COORDINATOR_PORT": "9"}, {},
         ("10.0.0.1:9", 2, 0, "deactivate")),
        # JAX reads the variables of SLURM itself.
        (SLURM, {}, (None, None, None, None)),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "h:1"}, {}, ("h:1", None, None, None)),
        (SKY | {"JAX_COORDINATOR_PORT": "99"}, {}, ("10.0.0.1:99", 2, 0, "deactivate")),
        (SKY | {"JAX_COORDINATOR_ADDRESS": "h:1"}, {}, ("h:1", 2, 0, "deactivate")),
        ({}, {}, (None, None, None, None)),
        ({"JAX_COORDINATOR_ADDRESS": "", "JAX_NUM_PROCESSES": ""}, {}, (None, None, None, None)),
    ],
)  # fmt: skip
def test_arguments_for_jax(calls, monkeypatch, variables, arguments, want):
    with_environment(monkeypatch, variables)
    jstep.distributed.initialize(**arguments)
    assert calls == [want]


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({"JAX_NUM_PROCESSES": "1"}, {}),
        ({**FULL, "JAX_NUM_PROCESSES": "1"}, {}),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {}),
        ({"SKYPILOT_NUM_NODES": "1"}, {}),
        (
            {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"},
            {},
        ),
        (SLURM | FULL, {"num_processes": 1}),
    ],
)
def test_one_process_does_not_initialize_jax(calls, monkeypatch, variables, arguments):
    with_environment(monkeypatch, variables)
    jstep.distributed.initialize(**arguments)
    assert calls == []


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def no_cluster_detected(monkeypatch):
    """Replace JAX's function by one that raises like JAX when it detects no cluster."""

    def initialize(address, count, index, **kwargs):
        for value, words in (
            (address, "coordinator_address should be"),
            (count, "Number of processes must be"),
        ):
            if value is None:
                raise ValueError(f"{words} defined.")
        raise ValueError("The process id of the current process must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (without(FULL, "JAX_PROCESS_ID"),
         ["JAX_COORDINATOR_ADDRESS='10", "JAX_NUM_PROCESSES=2", "JAX_PROCESS_ID"]),
        (without(FULL, "JAX_NUM_PROCESSES"),
         ["JAX_COORDINATOR_ADDRESS=", "JAX_PROCESS_ID=0", "JAX_NUM_PROCESSES"]),
        (without(FULL, "JAX_COORDINATOR_ADDRESS"),
         ["JAX_NUM_PROCESSES=2", "JAX_PROCESS_ID=0", "JAX_COORD"]),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"},
         ["JAX_COORDINATOR_ADDRESS='h:1'", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]),
        ({"JAX_NUM_PROCESSES": "2"},
         ["JAX_NUM_PROCESSES=2", "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"]),
        (FULL | {"JAX_PROCESS_ID": "2"}, ["JAX_PROCESS_ID=2: must be < JAX_NUM_PROCESSES=2"]),
        (FULL | {"JAX_PROCESS_ID": "-1"}, ["JAX_PROCESS_ID=-1: must be ≥ 0"]),
        (FULL | {"JAX_NUM_PROCESSES": "0"}, ["JAX_NUM_PROCESSES=0: must be ≥ 1"]),
        (FULL | {"JAX_NUM_PROCESSES": "two"}, ["JAX_NUM_PROCESSES='two': must be an integer"]),
        (FULL | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1"},
         ["JAX_COORDINATOR_ADDRESS='10.0.0.1': must be 'host:port'"]),
        (without(SLURM, "SLURM_STEP_NODELIST"), ["SLURM_NTASKS=2", "srun"]),
        (without(SKY, "SKYPILOT_NODE_RANK"), ["SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES=2"]),
        (without(SKY, "SKYPILOT_NODE_IPS"), ["SKYPILOT_NUM_NODES=2", "SKYPILOT_NODE_RANK=0"]),
        (SKY | {"SKYPILOT_NODE_RANK": "2"},
         ["SKYPILOT_NODE_RANK=2: must be < SKYPILOT_NUM_NODES=2"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE=2", "JAX_NUM_PROCESSES"]),
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

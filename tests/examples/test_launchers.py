"""examples/launchers: the launchers' files are valid, and the program that they start trains and
resumes."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import free_address, wait_for
from programs import ROOT, start

import jstep

HERE = ROOT / "examples" / "launchers"


def loaded(name):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((HERE / name).read_text())


def test_fields_of_the_jobset():
    job_set = loaded("jobset.yaml")
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 2
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] > 0
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 120
    (container,) = pod["containers"]
    assert container["command"][:2] == ["python", "train.py"]
    assert re.fullmatch(r"\S+/\S+:\S+", container["image"])
    variables = {one["name"]: one for one in container["env"]}
    assert set(variables) == {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
    # Values are strings: Kubernetes rejects numbers. The first pod is called <set>-<job>-0-0, in
    # the domain of the set.
    assert variables["JAX_NUM_PROCESSES"]["value"] == str(job["completions"])
    name = f"{job_set['metadata']['name']}-{replicated['name']}-0-0.{job_set['metadata']['name']}"
    assert re.fullmatch(rf"{name}:\d+", variables["JAX_COORDINATOR_ADDRESS"]["value"])
    field = variables["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_fields_of_the_skypilot_task():
    task = loaded("sky.yaml")
    assert task["num_nodes"] == 2
    assert task["run"].split()[:2] == ["python", "train.py"]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [143, 138, 75]
    assert "jstep" in task["setup"]


# --- SLURM ---------------------------------------------------------------------------------------


def options():
    lines = re.findall(r"^#SBATCH --(\S+)$", (HERE / "slurm.sh").read_text(), re.MULTILINE)
    return dict(line.partition("=")[::2] for line in lines)


def test_slurm_options_of_the_script():
    sbatch = options()
    # With the prefix B:, only the batch shell would get the signal.
    assert sbatch["signal"] == "TERM@120"
    assert {"requeue", "time", "nodes", "ntasks-per-node"} <= set(sbatch)
    assert sbatch["open-mode"] == "append"
    # JAX assigns one GPU to each task.
    assert sbatch["ntasks-per-node"] == sbatch["gpus-per-node"]


@pytest.mark.parametrize("code", [143, 138, 75, 0, 1, 2, 15, 137])
def test_only_jobs_that_were_preempted_or_hung_are_requeued(tmp_path, code):
    """Run the script with fakes of scontrol and of srun, which exits with the exit code of the
    tasks."""
    log = tmp_path / "log"
    for name, exit_code in (("srun", code), ("scontrol", 0)):
        (tmp_path / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> {shlex.quote(str(log))}\nexit {exit_code}\n'
        )
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "77"}
    script = shutil.copy(HERE / "slurm.sh", tmp_path / "slurm_script")  # SLURM runs a copy
    done = subprocess.run(
        ["bash", script, "--steps", "7"], env=environment, timeout=60, check=False
    )
    assert done.returncode == code
    first, *others = log.read_text().splitlines()
    assert first.endswith("python train.py --steps 7")
    assert others == (["scontrol requeue 77"] if code in (143, 138, 75) else [])


# --- the program ---------------------------------------------------------------------------------


@pytest.mark.thorough
def test_it_trains_on_one_process(tmp_path):
    (one,) = wait_for([start("launchers/train.py", "--steps", 20, "--checkpoint-dir", tmp_path)])
    assert one.code == 0, one.err
    assert "trained 20 steps on 1 processes" in one.out


def slurm(i, address):
    port = address.split(":")[1]
    names = {"JOB_ID": 1, "STEP_NODELIST": "localhost", "NTASKS": 2, "PROCID": i, "LOCALID": i}
    return {f"SLURM_{name}": str(value) for name, value in names.items()} | {
        "JAX_COORDINATOR_PORT": port
    }


def jobset(i, address):
    """Return the variables of the manifest with the address of this machine."""
    (replicated,) = loaded("jobset.yaml")["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value", str(i)) for one in container["env"]}
    return variables | {"JAX_COORDINATOR_ADDRESS": address, "KUBERNETES_SERVICE_HOST": "127.0.0.1"}


def skypilot(i, address):
    port = address.split(":")[1]
    names = {"NODE_IPS": "127.0.0.1\n127.0.0.1", "NODE_RANK": i, "NUM_NODES": 2}
    return {f"SKYPILOT_{name}": str(value) for name, value in names.items()} | {
        "JAX_COORDINATOR_PORT": port
    }


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", [slurm, jobset, skypilot])
def test_a_stopped_run_resumes(tmp_path, launcher):
    """One of two processes gets SIGTERM; the same command then resumes from the saved step."""

    def run(last, stop_after=None):
        address = free_address()
        arguments = (
            "launchers/train.py", "--steps", last, "--checkpoint-dir", tmp_path, "--save-secs", 0.5,
        )  # fmt: skip
        both = [start(*arguments, env=launcher(i, address)) for i in range(2)]
        until = time.monotonic() + 120
        while stop_after is not None and time.monotonic() < until:
            if (jstep.Saver(tmp_path).latest_step() or 0) >= stop_after:
                both[1].terminate()
                break
            time.sleep(0.1)
        return wait_for(both)

    stopped = run(10**7, stop_after=1)
    assert [one.code for one in stopped] == [143, 143], stopped[0].err[-3000:]
    last = jstep.Saver(tmp_path).latest_step()
    assert re.search(
        rf"SIGTERM .*process 1 of 2.* stopped the run after step {last}, which is saved",
        stopped[0].err,
    )
    resumed = run(last + 10)
    assert [one.code for one in resumed] == [0, 0], resumed[0].err[-3000:]
    assert f"restored model-{last}" in resumed[0].err
    assert f"trained {last + 10} steps on 2 processes" in resumed[0].out
    assert "trained" not in resumed[1].out


# --- Ray -----------------------------------------------------------------------------------------


def workers_of(pid):
    """Return the process IDs of the Ray Train workers among the descendants of a process."""
    children = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(
                (int(entry.name), (entry / "cmdline").read_bytes())
            )
        except OSError:  # the process has ended
            continue
    todo, found = [pid], []
    while todo:
        for child, command in children.get(todo.pop(), []):
            todo.append(child)
            found += [child] if command.startswith(b"ray::RayTrainWorker") else []
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="Ray's workers are found through /proc")
def test_ray_restarts_a_killed_worker(tmp_path):
    pytest.importorskip("ray.train")
    last = 3000
    command = [sys.executable, HERE / "ray_train.py", "--steps", str(last), "--save-secs", "1"]
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "PYTHONPATH": str(ROOT),
    }
    log = tmp_path / "out.txt"
    checkpoints = tmp_path / "runs" / "launched"
    with log.open("w") as out:
        program = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    killed = None
    try:
        until = time.monotonic() + 300
        while program.poll() is None and time.monotonic() < until:
            if killed is None and jstep.latest_checkpoint(checkpoints):
                killed = workers_of(program.pid)[-1]
                os.kill(killed, signal.SIGKILL)
            time.sleep(0.1)
        assert program.poll() == 0, log.read_text()[-5000:]
    finally:
        if program.poll() is None:
            program.terminate()  # Ray ends its workers
            program.wait(60)
    assert killed is not None
    assert jstep.Saver(checkpoints).latest_step() == last
    text = log.read_text()
    assert f"trained {last} steps on 2 processes" in text
    (restored,) = set(re.findall(r"restored model-(\d+)", text))
    assert 0 < int(restored) < last

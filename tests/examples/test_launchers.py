"""examples/launchers: files that say what their launchers need, and the program that all of them start."""

import ast
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
from processes import end, free_address
from programs import ROOT, start

import jstep

HERE = ROOT / "examples" / "launchers"


def substance(path):
    """The lines that are neither empty nor a comment, nor a docstring."""
    text = path.read_text()
    lines = dict(enumerate(text.splitlines(), 1))
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
                for i in range(node.body[0].lineno, node.body[0].end_lineno + 1):
                    del lines[i]
    comment = "#(?!SBATCH)"
    return [line for line in lines.values() if line.strip() and not re.match(rf"\s*{comment}", line)]


@pytest.mark.parametrize("name", ["slurm.sh", "jobset.yaml", "sky.yaml", "ray_train.py"])
def test_each_is_short(name):
    assert len(substance(HERE / name)) <= 25


def loaded(name):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((HERE / name).read_text())


def test_the_job_set():
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
    # Text: Kubernetes refuses numbers. The name of the first pod is <set>-<job>-0-0, its domain that of the set.
    assert variables["JAX_NUM_PROCESSES"]["value"] == str(job["completions"])
    name = f"{job_set['metadata']['name']}-{replicated['name']}-0-0.{job_set['metadata']['name']}"
    assert re.fullmatch(rf"{name}:\d+", variables["JAX_COORDINATOR_ADDRESS"]["value"])
    field = variables["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_the_job_of_the_set_is_one_that_kubernetes_knows():
    """Each field, down to the container, is one of the published schema, and of its type."""
    client = pytest.importorskip("kubernetes.client")

    def check(value, kind, path):
        if kind.lower().startswith("list["):
            assert isinstance(value, list), path
            for i, one in enumerate(value):
                check(one, kind[5:-1], f"{path}[{i}]")
        elif kind.lower().startswith("dict"):
            assert isinstance(value, dict), path
        elif hasattr(client, kind):
            model = getattr(client, kind)
            names = {written: name for name, written in model.attribute_map.items()}
            for key, one in value.items():
                assert key in names, f"{path}.{key} is not a field of {kind}"
                check(one, model.openapi_types[names[key]], f"{path}.{key}")
        else:
            assert type(value).__name__ == kind, f"{path}={value!r}: {kind} expected"

    job_set = loaded("jobset.yaml")
    check(job_set["metadata"], "V1ObjectMeta", "metadata")
    for job in job_set["spec"]["replicatedJobs"]:
        check(job["template"], "V1JobTemplateSpec", job["name"])


def test_the_task_of_skypilot():
    task = loaded("sky.yaml")
    assert task["num_nodes"] == 2
    assert task["run"].split()[:2] == ["python", "train.py"]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [143]
    assert "jstep" in task["setup"]


def test_skypilot_takes_the_task(tmp_path, monkeypatch):
    sky = pytest.importorskip("sky")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(HERE)
    task = sky.Task.from_yaml("sky.yaml")
    assert (task.name, task.num_nodes) == ("jstep", 2)
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 8}


# --- SLURM ----------------------------------------------------------------------------------------------------------


def options():
    lines = re.findall(r"^#SBATCH --(\S+)$", (HERE / "slurm.sh").read_text(), re.MULTILINE)
    return dict(line.partition("=")[::2] for line in lines)


def test_what_the_script_asks_of_slurm():
    asked = options()
    assert asked["signal"] == "TERM@120"  # B: would reach the batch shell alone
    assert {"requeue", "time", "nodes", "ntasks-per-node"} <= set(asked)
    assert asked["open-mode"] == "append"
    # JAX gives each task one GPU.
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


@pytest.mark.parametrize("code", [143, 0, 1, 2, 15, 137])
def test_only_what_was_preempted_is_queued_again(tmp_path, code):
    """The script, with stand-ins for srun, which leaves with the exit code of the tasks, and for scontrol."""
    said = tmp_path / "said"
    for name, ends in (("srun", code), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {shlex.quote(str(said))}\nexit {ends}\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "77"}
    script = shutil.copy(HERE / "slurm.sh", tmp_path / "slurm_script")  # SLURM runs a copy
    done = subprocess.run(["bash", script, "--steps", "7"], env=environment, timeout=60, check=False)
    assert done.returncode == code
    first, *others = said.read_text().splitlines()
    assert first.endswith("python train.py --steps 7")
    assert others == (["scontrol requeue 77"] if code == 143 else [])


# --- the program ----------------------------------------------------------------------------------------------------


def steps(out):
    return [int(step) for step in re.findall(r"^step (\d+) ", out, re.MULTILINE)]


def test_it_trains_alone(tmp_path):
    (one,) = end([start("launchers/train.py", "--steps", 20, "--checkpoint-dir", tmp_path)])
    assert one.code == 0, one.err
    assert "trained 20 steps on 1 processes" in one.out


def of_slurm(i, address):
    port = address.split(":")[1]
    names = {"JOB_ID": 1, "STEP_NODELIST": "localhost", "NTASKS": 2, "PROCID": i, "LOCALID": i}
    return {f"SLURM_{name}": str(value) for name, value in names.items()} | {"JAX_COORDINATOR_PORT": port}


def of_jobset(i, address):
    """The variables of the manifest, with the address of this machine."""
    (replicated,) = loaded("jobset.yaml")["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one.get("value", str(i)) for one in container["env"]}
    return given | {"JAX_COORDINATOR_ADDRESS": address, "KUBERNETES_SERVICE_HOST": "127.0.0.1"}


def of_skypilot(i, address):
    port = address.split(":")[1]
    names = {"NODE_IPS": "127.0.0.1\n127.0.0.1", "NODE_RANK": i, "NUM_NODES": 2}
    return {f"SKYPILOT_{name}": str(value) for name, value in names.items()} | {"JAX_COORDINATOR_PORT": port}


@pytest.mark.parametrize("launcher", [of_slurm, of_jobset, of_skypilot])
def test_a_run_that_is_stopped_resumes_under(tmp_path, launcher):
    """Two processes, one of which is sent SIGTERM; the same command again goes on from the step that was saved."""

    def run(last, stop_after=None):
        address = free_address()
        arguments = ("launchers/train.py", "--steps", last, "--checkpoint-dir", tmp_path, "--save-secs", 0.5)
        both = [start(*arguments, env=launcher(i, address)) for i in range(2)]
        until = time.monotonic() + 120
        while stop_after is not None and time.monotonic() < until:
            if (jstep.Saver(tmp_path).latest_step() or 0) >= stop_after:
                both[1].terminate()
                break
            time.sleep(0.1)
        return end(both)

    stopped = run(10**7, stop_after=1)
    assert [one.code for one in stopped] == [143, 143], stopped[0].err[-3000:]
    last = jstep.Saver(tmp_path).latest_step()
    assert f"SIGTERM stopped the run after step {last}, which is saved" in stopped[0].err
    resumed = run(last + 10)
    assert [one.code for one in resumed] == [0, 0], resumed[0].err[-3000:]
    assert f"restored model-{last}" in resumed[0].err
    assert f"trained {last + 10} steps on 2 processes" in resumed[0].out
    assert "trained" not in resumed[1].out


# --- Ray ------------------------------------------------------------------------------------------------------------


def workers_of(pid):
    """The workers of Ray Train among the processes that a process has started, and those have started."""
    children = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append((int(entry.name), (entry / "cmdline").read_bytes()))
        except OSError:  # it has ended
            continue
    todo, found = [pid], []
    while todo:
        for child, command in children.get(todo.pop(), []):
            todo.append(child)
            found += [child] if command.startswith(b"ray::RayTrainWorker") else []
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds Ray's workers in /proc")
def test_ray_starts_a_worker_that_was_killed_again(tmp_path):
    pytest.importorskip("ray.train")
    last = 3000
    command = [sys.executable, HERE / "ray_train.py", "--steps", str(last), "--save-secs", "1"]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT)}
    log = tmp_path / "out.txt"
    checkpoints = tmp_path / "runs" / "launched"
    with log.open("w") as out:
        program = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
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
            program.terminate()  # Ray ends what it has started
            program.wait(60)
    assert killed is not None
    assert jstep.Saver(checkpoints).latest_step() == last
    text = log.read_text()
    assert f"trained {last} steps on 2 processes" in text
    (restored,) = set(re.findall(r"restored model-(\d+)", text))
    assert 0 < int(restored) < last

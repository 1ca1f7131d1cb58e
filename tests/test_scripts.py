"""The shell scripts of the tests: they parse, and the nightly script reports failures."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


STEPS = ("benchmarks", "newest", "lowest", "optimized", "soak", "accelerator", "compilers", "launchers", "slurm")


def test_scripts_parse() -> None:
    for script in HERE.glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)


def nightly(directory: Path, failing: str = "", steps: str = "") -> subprocess.CompletedProcess[str]:
    """Run the nightly script with stubs in place of its steps, one of which fails."""
    (directory / "tests").mkdir()
    shutil.copy(HERE / "nightly.sh", directory / "tests")
    stubs = {
        "tests/versions.sh": f'[ "$1" != "{failing}" ]',
        "tests/accelerator.sh": f'[ accelerator != "{failing}" ]',
        "tests/compilers.sh": f'[ compilers != "{failing}" ]',
        "tests/launchers.sh": f'[ launchers != "{failing}" ]',
        "tests/slurm.sh": f'[ slurm != "{failing}" ]',
        "sbatch": "",  # installed
        "chromium": "",  # installed: the script would install it, on the machine that runs the tests
        "python": "case $1 in tests/soak.py) step=soak ;; tests/benchmarks/*) step=benchmarks ;; "
        "*) step=optimized ;; esac; "
        f'[ "$step" != "{failing}" ]',
    }
    for path, command in stubs.items():
        (directory / path).write_text(
            f"#!/bin/sh\necho flags=$XLA_FLAGS. python=$PYTHON.; echo '7 passed in 1.00s'\n{command}\n"
        )
        (directory / path).chmod(0o755)
    environment = os.environ | {"PYTHON": str(directory / "python"), "XLA_FLAGS": "--some"}
    environment["PATH"] = f"{directory}:{environment['PATH']}"
    if steps:
        environment["STEPS"] = steps
    command = [directory / "tests/nightly.sh", "-k", "x"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("failing", ["", *STEPS])
def test_the_nightly_script_reports_each_step(tmp_path: Path, failing: str) -> None:
    done = nightly(tmp_path, failing)
    summary = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()[-len(STEPS) :]}
    assert summary == {name: "FAILED" if name == failing else "passed" for name in STEPS}
    assert done.returncode == bool(failing)
    assert "flags=. " in (tmp_path / ".nightly/optimized.log").read_text()


def test_the_nightly_script_runs_in_parts(tmp_path: Path) -> None:
    done = nightly(tmp_path, steps="soak slurm")
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("==")] == ["soak", "slurm"]


def test_the_newest_step_takes_the_newest_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyenv, commands = tmp_path / "pyenv/versions", tmp_path / "commands"
    pythons = {
        commands / "python3.99": "exit 127",  # a shim of pyenv whose version is not selected
        commands / "python3.95": "",
        commands / "python3.98-config": "",
        pyenv / "3.98.9/bin/python3": "",
        pyenv / "3.98.10/bin/python3": "",
        pyenv / "3.98.11rc1/bin/python3": "",
        pyenv / "3.98.12t/bin/python3": "",
    }
    for path, command in pythons.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    for root, python in ((pyenv, pyenv / "3.98.10/bin/python3"), (tmp_path / "none", commands / "python3.95")):
        monkeypatch.setenv("PYENV_ROOT", str(root.parent))
        directory = tmp_path / f"run_{python.parent.name}"
        directory.mkdir()
        nightly(directory, steps="newest")
        assert f"python={python}." in (directory / ".nightly/newest.log").read_text()


def test_slurm_is_skipped_if_it_is_not_installed(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    done = subprocess.run(
        [bash, HERE / "slurm.sh"],
        # The script adds /usr/sbin, which does not contain sbatch.
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("skipped: ")


def test_an_accelerator_is_not_replaced_by_the_cpu(tmp_path: Path) -> None:
    """One sentence and exit code 2, not a run on the CPU that looks like a result."""
    environment = os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    for arguments, message in (([], "JAX finds no accelerator here"), (["nope"], "PART=nope: must be one of bits,")):
        command = [HERE / "accelerator.sh", *arguments, "--out", tmp_path / "out"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert message in line
    assert not (tmp_path / "out").exists()


def test_the_first_step_and_leaf_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE / "accelerator")
    from bits_on_device import first_difference

    a = {str(step): {"params/v": "0", "params/w": "1"} for step in (1, 2, 9, 10)}
    assert first_difference(a, a) is None
    assert (
        first_difference(a, a | {"10": {"params/v": "0", "params/w": "2"}, "9": {"params/w": "1"}})
        == "step 9: params/v"
    )
    assert first_difference(a, {"10": {"params/v": "0", "params/w": "2"}}) == "step 10: params/w"
    assert first_difference({"3": {}}, a) is None

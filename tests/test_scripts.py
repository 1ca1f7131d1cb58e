"""The shell scripts of the tests: they parse, and the nightly script reports failures."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("script", sorted(path.name for path in HERE.glob("*.sh")))
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(HERE / script)], check=True, timeout=60)


@pytest.mark.parametrize("failing", ["", "newest", "lowest", "optimized", "soak", "compilers", "slurm"])
def test_the_nightly_script_reports_each_step(tmp_path: Path, failing: str) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(HERE / "nightly.sh", tmp_path / "tests")
    stubs = {
        "tests/versions.sh": f'[ "$1" != "{failing}" ]',
        "tests/compilers.sh": f'[ compilers != "{failing}" ]',
        "tests/slurm.sh": f'[ slurm != "{failing}" ]',
        "sbatch": "",  # installed
        "python": f'[ "$1" = tests/soak.py ] && step=soak || step=optimized; [ "$step" != "{failing}" ]',
    }
    for path, command in stubs.items():
        (tmp_path / path).write_text(f"#!/bin/sh\necho flags=$XLA_FLAGS.; echo '7 passed in 1.00s'\n{command}\n")
        (tmp_path / path).chmod(0o755)
    environment = os.environ | {"PYTHON": str(tmp_path / "python"), "XLA_FLAGS": "--some"}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(
        [tmp_path / "tests/nightly.sh", "-k", "x"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    summary = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()[-6:]}
    assert summary == {
        name: "FAILED" if name == failing else "passed"
        for name in ("newest", "lowest", "optimized", "soak", "compilers", "slurm")
    }
    assert done.returncode == bool(failing)
    assert "flags=." in (tmp_path / ".nightly/optimized.log").read_text()


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

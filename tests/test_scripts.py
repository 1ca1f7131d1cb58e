"""The shell scripts of the tests: that they parse, and that the nightly one reports what failed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("script", sorted(path.name for path in HERE.glob("*.sh")))
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(HERE / script)], check=True, timeout=60)


@pytest.mark.parametrize("failing", ["", "newest", "lowest", "optimized", "soak", "compilers"])
def test_the_nightly_script_reports_each_step(tmp_path: Path, failing: str) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(HERE / "nightly.sh", tmp_path / "tests")
    stubs = {
        "tests/versions.sh": f'[ "$1" != "{failing}" ]',
        "tests/compilers.sh": f'[ compilers != "{failing}" ]',
        "python": f'[ "$1" = tests/soak.py ] && was=soak || was=optimized; [ "$was" != "{failing}" ]',
    }
    for path, ends in stubs.items():
        (tmp_path / path).write_text(f"#!/bin/sh\necho flags=$XLA_FLAGS.; echo '7 passed in 1.00s'\n{ends}\n")
        (tmp_path / path).chmod(0o755)
    environment = os.environ | {"PYTHON": str(tmp_path / "python"), "XLA_FLAGS": "--some"}
    done = subprocess.run(
        [tmp_path / "tests/nightly.sh", "-k", "x"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    summary = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()[-5:]}
    assert summary == {
        name: "FAILED" if name == failing else "passed"
        for name in ("newest", "lowest", "optimized", "soak", "compilers")
    }
    assert done.returncode == bool(failing)
    assert "flags=." in (tmp_path / ".nightly/optimized.log").read_text()

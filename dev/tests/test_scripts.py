"""The shell scripts of the tests: they parse, and the nightly script reports failures."""

import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

DEV = Path(__file__).parents[1]
ROOT = DEV.parent


STEPS = (
    "benchmarks",
    "tools",
    "newest",
    "lowest",
    "optimized",
    "soak",
    "strangers",
    "accelerator",
    "types",
    "workflows",
    "compilers",
    "peers",
    "launchers",
    "slurm",
)


def test_scripts_parse() -> None:
    for script in [*DEV.glob("*.sh"), *(ROOT / "benchmarks").glob("*.sh")]:
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)


def nightly(
    directory: Path, failing: str = "", steps: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the nightly script with stubs in place of its steps, one of which fails."""
    for folder in ("dev", "benchmarks"):
        (directory / folder).mkdir(exist_ok=True)
    shutil.copy(DEV / "nightly.sh", directory / "dev")
    stubs = {
        "dev/versions.sh": f'[ "$1" != "{failing}" ]',
        ".venv-lowest/bin/python": "",
        "benchmarks/accelerator.sh": f'[ accelerator != "{failing}" ]',
        "dev/compilers.sh": f'[ compilers != "{failing}" ]',
        "dev/peers.sh": f'[ peers != "{failing}" ]',
        "dev/launchers.sh": f'[ launchers != "{failing}" ]',
        "dev/slurm.sh": f'[ slurm != "{failing}" ]',
        "sbatch": "",  # installed
        # Installed: the script would install it, on the machine that runs the tests.
        "chromium": "",
        "python": 'case "$*" in dev/soak.py*) step=soak ;; dev/strangers.py*) step=strangers ;; '
        "benchmarks/*) step=benchmarks ;; *check_jsonschema*|*actionlint*) step=workflows ;; "
        "*typed*) step=types ;; *dev/tests*) step=tools ;; "
        "*pip*) step=pip ;; *) step=optimized ;; esac; "
        f'[ "$step" != "{failing}" ]',
    }
    (directory / ".venv-lowest/bin").mkdir(parents=True, exist_ok=True)
    for path, command in stubs.items():
        (directory / path).write_text(
            '#!/bin/sh\necho flags=$XLA_FLAGS. python=$PYTHON. skipped=$SKIPPED. "$0 $@"; '
            f"echo '7 passed in 1.00s'\n{command}\n"
        )
        (directory / path).chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("STEPS", "NIGHTLY_LOGS")
    }
    environment |= {"PYTHON": str(directory / "python"), "XLA_FLAGS": "--some"} | variables
    environment["PATH"] = f"{directory}:{environment['PATH']}"
    if steps:
        environment["STEPS"] = steps
    command = [directory / "dev/nightly.sh", "-k", "x"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("failing", ["", *STEPS])
def test_the_nightly_script_reports_each_step(tmp_path: Path, failing: str) -> None:
    done = nightly(tmp_path, failing)
    summary = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()[-len(STEPS) :]}
    assert summary == {name: "FAILED" if name == failing else "passed" for name in STEPS}
    assert done.returncode == bool(failing)
    assert "flags=. " in (tmp_path / ".nightly/optimized.log").read_text()


def peers(directory: Path, written: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the peers with a stub for pytest, which skips the tests of these lines."""
    for folder in ("dev", "tests", ".peers/bin"):
        (directory / folder).mkdir(parents=True)
    shutil.copy(DEV / "peers.sh", directory / "dev")
    (directory / "tests/test_a.py").write_text('torch = pytest.importorskip("torch")')
    (directory / "tests/test_b.py").write_text("")
    (directory / "written").write_text(written)
    for name, command in {
        "pip": "",
        "uv": "",
        "python": 'echo "$@"\ncp written .peers/skipped',
    }.items():
        (directory / ".peers/bin" / name).write_text(f"#!/bin/sh\n{command}\n")
        (directory / ".peers/bin" / name).chmod(0o755)
    return subprocess.run(
        [directory / "dev/peers.sh", "-x"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("could not import 'torch': No module named 'torch'\ttests/a/test_a.py\n", 1),
        ("needs keras\ttests/a/test_a.py::test_compiler[x]\n", 1),
        ("libtpu is not installed: pip install 'jstep[tpu]'\ttests/a/test_a.py::test_a\n", 0),
        ("a combination that does not exist\ttests/a/test_a.py::test_needs it\n", 0),
        ("", 0),
    ],
)
def test_tests_that_need_packages_may_not_be_skipped_by_night(
    tmp_path: Path, line: str, code: int
) -> None:
    done = peers(tmp_path, line, SKIPPED="")
    assert done.returncode == code, done.stderr
    assert " -rs tests/test_a.py -x\n" in done.stdout


def test_with_a_list_only_the_tests_run_that_were_skipped_for_want_of_a_package(
    tmp_path: Path,
) -> None:
    skipped = tmp_path / "skipped"
    skipped.write_text(
        "could not import 'torch': No module named 'torch'\ttests/c/test_c.py\n"
        "needs keras\ttests/b/test_b.py::test_b[a b-<lambda>::]\n"
        "datasets is not installed\ttests/b/test_b.py::test_b[1]\n"
        "an older JAX\ttests/b/test_b.py::test_other\n"
        "ray is not installed\ttests/examples/test_launchers.py::test_ray\n"
    )
    done = peers(tmp_path, "", SKIPPED=str(skipped))
    assert done.returncode == 0, done.stderr
    assert " --only-ids=.peers/ids tests/b/test_b.py tests/c/test_c.py -x\n" in done.stdout, (
        done.stdout
    )
    assert (tmp_path / ".peers/ids").read_text().splitlines() == [
        "tests/b/test_b.py::test_b[1]",
        "tests/b/test_b.py::test_b[a b-<lambda>::]",
        "tests/c/test_c.py",
    ]


def test_the_nightly_script_runs_in_parts(tmp_path: Path) -> None:
    done = nightly(tmp_path, steps="soak slurm")
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("==")] == [
        "soak",
        "slurm",
    ]


def test_the_newest_versions_are_those_for_the_newest_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyenv, commands = tmp_path / "pyenv/versions", tmp_path / "commands"
    pythons = {
        commands / "python3.99": "exit 127",  # a shim of pyenv whose version is not selected
        commands / "python3.95": "",
        commands / "python3": "",
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
    (tmp_path / "dev").mkdir()
    shutil.copy(DEV / "versions.sh", tmp_path / "dev")

    def taken(which: str, root: Path) -> str:
        monkeypatch.setenv("PYENV_ROOT", str(root.parent))
        # The script then finds that no environment was made.
        command = [tmp_path / "dev/versions.sh", which]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode
        return done.stdout.splitlines()[0]

    monkeypatch.delenv("PYTHON", raising=False)
    assert taken("newest", pyenv) == f"newest:  ({pyenv}/3.98.10/bin/python3)"
    assert taken("newest", tmp_path / "none") == f"newest:  ({commands}/python3.95)"
    assert taken("lowest", pyenv) == f"lowest:  ({commands}/python3)"
    monkeypatch.setenv("PYTHON", str(commands / "python3.95"))
    assert taken("newest", pyenv) == f"newest:  ({commands}/python3.95)"


def test_the_nightly_script_asks_for_the_newest_python(tmp_path: Path) -> None:
    nightly(tmp_path, steps="newest")
    assert "python=." in (tmp_path / ".nightly/newest.log").read_text()


def test_the_nightly_script_judges_the_benchmarks_of_the_page_and_a_release_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from bounds import BOUNDS
    from report import NOT_SHOWN

    shown = re.findall(r"check\.py(.*)", (DEV / "nightly.sh").read_text())
    others = re.findall(r"`benchmarks/check\.py( --.*?)`", (DEV / "README.md").read_text())
    for found, wanted in ((shown, BOUNDS.keys() - NOT_SHOWN), (others, BOUNDS.keys() & NOT_SHOWN)):
        (words,) = found
        assert words.split() == [word for name in sorted(wanted) for word in ("--only", name)]


def test_newest_and_optimized_share_the_tests_with_the_newest_versions(tmp_path: Path) -> None:
    """What one of the two steps leaves out, the other one runs with the same versions."""
    python = tmp_path / ".venv-newest/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "newest: $@"\n')
    python.chmod(0o755)
    newest_log = tmp_path / ".nightly/newest.log"
    optimized_log = tmp_path / ".nightly/optimized.log"

    def words(log: Path, option: str) -> set[str]:
        last_line = [line for line in log.read_text().splitlines() if " -m " in line][-1]
        found = [word for word in last_line.split() if word.startswith(option)]
        return {word.removeprefix(option) for word in found}

    nightly(tmp_path, steps="newest optimized")
    assert optimized_log.read_text().splitlines()[-1].startswith("newest: -m pytest ")
    folders = {f"tests/{folder}" for folder in words(optimized_log, "tests/")}
    run_when_quick = words(optimized_log, "--quick-only=")
    assert words(newest_log, "--ignore=") == folders - run_when_quick
    assert words(newest_log, "--thorough-only=") == run_when_quick
    assert all((ROOT / folder).is_dir() for folder in folders)

    # Nothing is left out if no run of the step follows.
    nightly(tmp_path, steps="newest")
    assert not words(newest_log, "--ignore=") | words(newest_log, "--thorough-only=")
    nightly(tmp_path, steps="optimized")
    nightly(tmp_path, steps="newest optimized", CONTINUE="1")
    assert not words(newest_log, "--ignore=") | words(newest_log, "--thorough-only=")


def test_peers_gets_a_list_if_both_steps_with_the_newest_versions_have_written_one(
    tmp_path: Path,
) -> None:
    log = tmp_path / ".nightly/peers.log"
    for steps in ("newest peers", "optimized peers"):
        nightly(tmp_path, steps=steps, CONTINUE="1")
        assert "skipped=." in log.read_text()
        (tmp_path / ".nightly/passed-here").unlink()
    for name in ("newest", "optimized"):
        (tmp_path / f".nightly/skipped-here-{name}").write_text(f"{name}\n")
    nightly(tmp_path, steps="peers", CONTINUE="1")
    assert "skipped=.nightly/skipped-here-both." in log.read_text()
    assert (tmp_path / ".nightly/skipped-here-both").read_text() == "newest\noptimized\n"
    nightly(tmp_path, steps="peers")
    assert "skipped=." in log.read_text()


def test_slurm_is_skipped_if_it_is_not_installed(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    done = subprocess.run(
        [bash, DEV / "slurm.sh"],
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
    for arguments, message in (
        ([], "JAX finds no accelerator here"),
        (["nope"], "PART=nope: must be one of bits,"),
    ):
        command = [ROOT / "benchmarks" / "accelerator.sh", *arguments, "--out", tmp_path / "out"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert message in line
    assert not (tmp_path / "out").exists()


def test_the_first_step_and_leaf_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "accelerator")
    from bits_on_device import first_difference

    a = {str(step): {"params/v": "0", "params/w": "1"} for step in (1, 2, 9, 10)}
    assert first_difference(a, a) is None
    assert (
        first_difference(a, a | {"10": {"params/v": "0", "params/w": "2"}, "9": {"params/w": "1"}})
        == "step 9: params/v"
    )
    assert first_difference(a, {"10": {"params/v": "0", "params/w": "2"}}) == "step 10: params/w"
    assert first_difference({"3": {}}, a) is None


# The parts of benchmarks/accelerator.sh.

KEEPS_A_LOCK = """
import fcntl, subprocess, sys, time
file = open({path!r}, "w")
fcntl.flock(file, fcntl.LOCK_EX)
child = subprocess.Popen(["sleep", "60"], pass_fds=[file.fileno()])  # with the lock and this output
print(child.pid, flush=True)
file.write(str(child.pid))
file.flush()
{end}
"""
"""A part that leaves a process behind, which holds a lock."""


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module run_parts, with a device that nobody has."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "accelerator")
    device = {"backend": "gpu", "kind": "None", "count": 1, "jax": "0", "driver": "none"}
    monkeypatch.setenv("ACCELERATOR_OUT", str(tmp_path))
    monkeypatch.setenv("ACCELERATOR_DEVICE", json.dumps(device))
    import run_parts

    monkeypatch.setattr(run_parts, "probe", lambda variables: device)
    return run_parts


@pytest.mark.thorough(except_for=["exit"])
@pytest.mark.parametrize(
    ("end", "limit", "code"),
    [("sys.exit(3)", 60, 3), ("time.sleep(60)", 5, None)],
    ids=["exit", "limit"],
)
def test_what_a_part_started_ends_with_it(
    parts: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    end: str,
    limit: int,
    code: int | None,
) -> None:
    lock = tmp_path / "lock"
    (tmp_path / "part.py").write_text(KEEPS_A_LOCK.format(path=str(lock), end=end))
    monkeypatch.setattr(parts, "PARTS", {"part": str(tmp_path / "part.py")})
    monkeypatch.setattr(parts, "LIMIT", limit)
    assert parts.run_part("part", dict(os.environ)) == code
    wait_until(lambda: not is_locked(lock))
    assert not list(tmp_path.glob("scratch-*"))


@pytest.mark.thorough
def test_a_child_at_its_limit_is_not_waited_for_with_what_it_started(
    parts: Any, tmp_path: Path
) -> None:
    from part_report import run_child

    lock = tmp_path / "lock"
    script = KEEPS_A_LOCK.format(path=str(lock), end="time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        run_child([sys.executable, "-c", script], dict(os.environ), 5)
    assert is_locked(lock)
    os.kill(int(lock.read_text()), signal.SIGKILL)


def test_a_part_that_fails_does_not_end_the_others(
    parts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for codes, want in (((1, 0), 1), ((None, 0), 1), ((0, 2), 2), ((0, 0), 0), ((-9, 0), 1)):
        left = list(codes)
        monkeypatch.setattr(parts, "run_part", lambda part, variables, left=left: left.pop(0))
        monkeypatch.setattr(
            sys, "argv", ["run_parts", "bits", "speed:loop", "--out", str(tmp_path / "out")]
        )
        assert (parts.main(), left) == (want, [])


def test_a_folder_that_cannot_be_written_is_refused(
    parts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["run_parts", "bits", "--out", str(tmp_path / "file" / "out")])
    assert parts.main() == 2
    assert capsys.readouterr().err.startswith(
        f"accelerator: --out {tmp_path / 'file' / 'out'}: must be a folder"
    )


@pytest.mark.parametrize("part", ["bits", "memory"])
def test_an_unknown_row_of_a_part_is_an_argument_that_is_wrong(
    parts: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    module = importlib.import_module(f"{part}_on_device")
    monkeypatch.setattr(sys, "argv", [part, "nope"])
    assert module.main() == 2


def test_rows_are_in_the_file_after_each_and_those_of_an_earlier_run_are_not(
    parts: Any, tmp_path: Path
) -> None:
    from part_report import PartReport

    (tmp_path / "part.json").write_text('{"rows": [1]}')
    report = PartReport("part")
    for count in range(3):
        found = json.loads((tmp_path / "part.json").read_text())
        assert (len(found["rows"]), found["device"]["backend"]) == (count, "gpu")
        report.row(f"row {count}", ms=1.0)

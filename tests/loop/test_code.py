"""The commit and the edits of a run. git is real; where it is slow or absent, it is faked by a program on the path."""

import collections
import contextlib
import logging
import os
import pathlib
import signal
import subprocess
import threading
import time

import jax.numpy as jnp
import pytest
from jstep.hooks.cards import read_starts
from processes import python
from repositories import at, git
from waiting import wait_until

import jstep
from jstep.stores import repository as code

optimizer = jstep.gradient_descent(0.1)
train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)


def train(last_step, **options):
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    options = {"log_steps": None} | options
    return jstep.train(train_step, state, lambda step: jnp.float32(1.0), last_step, **options)


def test_a_clean_repository_has_no_edits(repository):
    (repository / "log.txt").write_text("data and logs are no edits")
    index = (repository / ".git" / "index").read_bytes()
    assert code.code_version() == {"commit": git(repository, "rev-parse", "HEAD"), "edits": None}
    assert (repository / ".git" / "index").read_bytes() == index


def test_edits_are_hashed_alike_in_each_clone(repository, tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    found = []
    for folder, is_staged in ((repository, False), (clone, True)):
        (folder / "src" / "a b\n.py").write_text("2")
        (folder / "new.py").write_text("3")
        if is_staged:
            git(folder, "add", ".")
        at(folder, monkeypatch)
        found.append(code.code_version())
    assert found[0] == found[1]
    assert len(found[0]["edits"]) == 16
    (clone / "new.py").write_text("4")
    assert code.code_version() != found[0]
    os.unlink(clone / "src" / "a b\n.py")
    assert code.code_version()["edits"] not in (None, found[0]["edits"])


def test_the_repository_is_that_of_the_program(repository, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    at(tmp_path / "elsewhere", monkeypatch, str(repository / "src" / "train.py"))
    assert code.code_version()["commit"] == git(repository, "rev-parse", "HEAD")
    at(tmp_path / "elsewhere", monkeypatch)
    assert code.code_version() is None


def test_git_of_another_repository_is_not_followed(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert code.code_version()["commit"] == git(repository, "rev-parse", "HEAD")


def test_no_commit_and_no_git_say_nothing(repository, tmp_path, monkeypatch, caplog):
    (tmp_path / "new").mkdir()
    git(tmp_path / "new", "init", "-q")
    at(tmp_path / "new", monkeypatch)
    with caplog.at_level(logging.INFO, "jstep"):
        assert code.code_version() is None
        at(repository, monkeypatch)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert code.code_version() is None
    assert caplog.text == ""


def test_a_repository_that_git_refuses_says_why(repository, monkeypatch, caplog):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    with caplog.at_level(logging.INFO, "jstep"):
        assert code.code_version() is None
    assert "dubious ownership" in caplog.text


def test_the_commit_is_with_the_run_and_its_checkpoints(repository, tmp_path, caplog):
    steps = collections.Counter()

    def slowly(step):
        steps[step] += 1
        time.sleep(0.05)
        return jnp.float32(1.0)

    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    jstep.train(train_step, state, slowly, 20, checkpoint_dir=tmp_path / "run", log_steps=None)
    head = git(repository, "rev-parse", "HEAD")
    assert jstep.Saver(tmp_path / "run").extra(20)["code"] == {"commit": head, "edits": None}
    assert read_starts(str(tmp_path / "run"))[-1].card["code"] == {"commit": head, "edits": None}
    (repository / "src" / "a b\n.py").write_text("2")
    with caplog.at_level(logging.INFO, "jstep"):
        train(25, checkpoint_dir=tmp_path / "run")
    assert f"code: commit {head[:8]} before, commit {head[:8]} with edits" in caplog.text


# A git that is slow, or not git.

SCRIPTS = {
    "rev-parse hangs": ("rev-parse", "sleep 60 & echo $! >> $PIDS; wait", None),
    "status hangs": ("status", "sleep 60 & echo $! >> $PIDS; wait", "unknown"),
    "status ignores signals": ("status", "trap '' TERM INT HUP; while true; do sleep 1; done", "unknown"),
    "a child keeps the pipes": ("status", "sleep 60 & echo $! >> $PIDS", None),
    "a child without pipes": ("status", "sleep 60 > /dev/null 2>&1 & echo $! >> $PIDS", None),
    "status writes without end": ("status", "exec yes", "unknown"),
    "status warns without end": ("status", "exec yes >&2", "unknown"),
    "a child writes without end": ("status", "yes & echo $! >> $PIDS", "unknown"),
    "status is nonsense": ("status", "echo nonsense", "unknown"),
    "status is bytes": ("status", "printf '1 \\377 a\\0\\0u '", "unknown"),
    "the root is nonsense": ("--show-toplevel", "echo nonsense", "unknown"),
    "the commit is nonsense": ("--verify", "echo nonsense", None),
    "the commit is empty": ("--verify", "true", None),
    "config is nonsense": ("config", "echo nonsense", None),
    "files are nonsense": ("ls-files", "echo 160000 nonsense", "unknown"),
    "git does not run": ("", "exit 1", None),
}
ONE_LINE = {
    "rev-parse hangs": "took longer than",
    "the commit is nonsense": "returned b'nonsense",
    "the commit is empty": "returned b''",
}
QUICK = ["status ignores signals", "a child keeps the pipes", "status writes without end", "the commit is nonsense"]


def none_is_left(tmp_path):
    def lives(pid):
        with contextlib.suppress(OSError):
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False

    pids = (tmp_path / "pids").read_text().split()
    wait_until(lambda: not any(map(lives, pids)))
    return bool(pids)


@pytest.mark.thorough(except_for=QUICK)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_git_that_is_no_git(name, repository, fake_git, tmp_path, monkeypatch, caplog):
    word, script, edits = SCRIPTS[name]
    is_known = word not in ("", "--verify", "rev-parse")
    head = git(repository, "rev-parse", "HEAD")
    fake_git(word, script)
    monkeypatch.setattr(code, "GIT_TIMEOUT_SECS", 1.0 if "hangs" in name or "signals" in name else 20.0)
    monkeypatch.setattr(code, "_MAX_BYTES", 2**20)
    began = time.monotonic()
    with caplog.at_level(logging.INFO, "jstep"):
        assert code.code_version() == ({"commit": head, "edits": edits} if is_known else None)
    assert time.monotonic() - began < 15
    assert ONE_LINE.get(name, "") in caplog.text
    assert (caplog.text == "") is (name not in ONE_LINE)
    assert none_is_left(tmp_path)


PROGRAM = """
import signal, sys, time
import jax.numpy as jnp
import jstep
from jstep.loop import card

optimizer = jstep.gradient_descent(0.1)
step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)

def batch(at):
    if at == 2:
        END
    return jnp.float32(1.0)

state = jstep.TrainState.create({"w": 0.0}, optimizer)
jstep.train(step, state, batch, 5, checkpoint_dir=sys.argv[1], log_steps=None, progress=False)
"""
ENDS = {
    "normal": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an error": ("1 / 0", 1),
    "SIGTERM": ("signal.raise_signal(signal.SIGTERM)", 143),
}


def test_a_run_that_ends_before_git(repository, fake_git, tmp_path):
    head = git(repository, "rev-parse", "HEAD")
    fake_git("status", "sleep 30 & echo $! >> $PIDS; wait")
    train(1, checkpoint_dir=tmp_path / "run")
    assert none_is_left(tmp_path)
    assert read_starts(str(tmp_path / "run"))[-1].card["code"] == {"commit": head, "edits": "unknown"}


@pytest.mark.thorough
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_before_git(end, repository, fake_git, tmp_path):
    head = git(repository, "rev-parse", "HEAD")
    fake_git("status", "sleep 30 & echo $! >> $PIDS; wait")
    what, exit_code = ENDS[end]
    program = repository / "src" / "train.py"
    program.write_text(PROGRAM.replace("END", what))
    python(program, tmp_path / "run", code=exit_code, timeout=120)
    assert read_starts(str(tmp_path / "run"))[-1].card["code"] == {"commit": head, "edits": "unknown"}
    assert none_is_left(tmp_path)


def test_a_program_that_does_not_wait_for_git(repository, fake_git, tmp_path):
    fake_git("status", "sleep 30 & echo $! >> $PIDS; wait")
    program = (
        "import os, threading, time\nfrom jstep.stores import repository as code\ncode.GIT_TIMEOUT_SECS = 20.0\n"
        "threading.Thread(target=code.code_version, daemon=True).start()\n"
        f"pids = {str(tmp_path / 'pids')!r}\n"
        "while not (os.path.exists(pids) and os.path.getsize(pids)):\n    time.sleep(0.01)\n"
    )
    python("-c", program, timeout=120)
    assert none_is_left(tmp_path)


def test_a_fork_does_not_end_the_git_of_its_parent(monkeypatch):
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    monkeypatch.setattr(code, "_starting", threading.Lock())
    monkeypatch.setattr(code, "_running", {process: os.getpid() + 1})
    code._end_all()
    assert process.poll() is None
    monkeypatch.setattr(code, "_starting", threading.Lock())
    code._running[process] = os.getpid()
    code._end_all()
    assert process.wait(10) == -signal.SIGKILL

"""The commit and the edits of a run. git is real; where it is slow or absent, it is faked by a program on the path."""

import collections
import logging
import os
import pathlib
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import pytest
from waiting import wait_until

import jstep
from jstep.hooks.card_differences import read_starts
from jstep.loop import code

optimizer = jstep.gradient_descent(0.1)
train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)


def train(last_step, **options):
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    options = {"log_steps": None} | options
    return jstep.train(train_step, state, lambda step: jnp.float32(1.0), last_step, **options)


def git(folder, *words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    command = ["git", "-c", "protocol.file.allow=always", "-C", str(folder), *words]
    result = subprocess.run(command, env=environment | names, capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    root = tmp_path / "repository"
    (root / "src").mkdir(parents=True)
    git(root, "init", "-q")
    (root / "src" / "a b\n.py").write_text("1")
    (root / "data.txt").write_text("1")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    at(root / "src", monkeypatch)
    return root


def at(folder, monkeypatch, program=None):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(**({"__file__": program} if program else {})))


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


@pytest.mark.parametrize(("slow", "expected"), [("rev-parse", False), ("status", True)])
def test_a_slow_git_is_ended_with_its_children(slow, expected, repository, tmp_path, monkeypatch, caplog):
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "git"
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    hang = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *{slow}*) {hang};; esac\nexec {real} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(code, "GIT_TIMEOUT_SECS", 1.0)
    with caplog.at_level(logging.INFO, "jstep"):
        found = code.code_version()
    assert found == ({"commit": git(repository, "rev-parse", "HEAD"), "edits": "unknown"} if expected else None)
    assert ("took longer than" in caplog.text) is not expected
    child = int((tmp_path / "child").read_text())
    state = pathlib.Path(f"/proc/{child}/stat")
    wait_until(lambda: not state.exists() or state.read_text().split(")")[1].split()[0] in "ZX")


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

"""Repositories of git for tests, a program in one of them, and a git that is not git."""

import os
import subprocess
import sys
import types

import pytest


def git(folder, *words, users=False):
    """Run git; as its user would, that is, with the global config of the test, and whatever it
    returns."""
    environment = {
        name: value for name, value in os.environ.items() if users or not name.startswith("GIT_")
    }
    names = {
        f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    command = ["git", "-c", "protocol.file.allow=always", "-C", str(folder), *words]
    result = subprocess.run(
        command,
        env=environment | names,
        capture_output=True,
        text=True,
        check=not users,
        timeout=60,
    )
    return result.stdout.strip()


def at(folder, monkeypatch, program=None):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(
        sys.modules, "__main__", types.SimpleNamespace(**({"__file__": program} if program else {}))
    )


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


@pytest.fixture
def fake_git(tmp_path, monkeypatch):
    """Return a function that puts a git on the path, which runs a shell script if its words contain
    one of them."""

    def fake(word, script):
        folder = tmp_path / "bin"
        folder.mkdir()
        real = subprocess.run(
            ["which", "git"], capture_output=True, text=True, check=True
        ).stdout.strip()
        script = f"PIDS={tmp_path}/pids; echo $$ >> $PIDS; {script}; exit"
        text = f'#!/bin/sh\ncase "$*" in *{word}*) {script};; esac\nexec {real} "$@"\n'
        (folder / "git").write_text(text)
        (folder / "git").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return fake

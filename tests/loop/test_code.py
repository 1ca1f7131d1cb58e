"""The commit and the edits of a run. git is real; where it is slow or absent, it is faked by a
program on the path."""

import collections
import logging
import os
import time

import jax.numpy as jnp
import pytest
from points import number
from repositories import at, git

import jstep
from jstep.record import code
from jstep.record.starts import read_starts

optimizer, train_step = number()


@pytest.fixture(autouse=True, scope="module")
def git_is_asked_once():
    """Each run asks git."""


def train(last_step, **options):
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    options = {"log_steps": None} | options
    return jstep.train(train_step, state, lambda step: jnp.float32(1.0), last_step, **options)


def recorded(where):
    start = read_starts(str(where))["model"][-1]
    return start["commit"], start["edits"]


def test_a_clean_repository_has_no_edits(repository):
    (repository / "log.txt").write_text("data and logs are no edits")
    index = (repository / ".git" / "index").read_bytes()
    assert code.code_version() == {"commit": git(repository, "rev-parse", "HEAD"), "edits": None}
    assert (repository / ".git" / "index").read_bytes() == index


def test_edits_are_hashed_alike_in_each_clone(repository, tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    found = []
    for folder in (repository, clone):
        (folder / "src" / "a b\n.py").write_text("2")
        (folder / "new.py").write_text("3")
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


def test_the_variables_of_a_hook_of_git_name_no_other_repository(repository, tmp_path, monkeypatch):
    expected = code.code_version()
    (tmp_path / "other").mkdir()
    git(tmp_path / "other", "init", "-q")
    for name, place in {
        "GIT_DIR": ".git",
        "GIT_WORK_TREE": ".",
        "GIT_INDEX_FILE": ".git/index",
    }.items():
        monkeypatch.setenv(name, str(tmp_path / "other" / place))
    assert code.code_version() == expected


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


def test_a_git_in_the_current_directory_is_not_run(repository, monkeypatch):
    """An empty entry of PATH is the current directory."""
    expected = code.code_version()
    monkeypatch.chdir(repository)
    program = repository / "git"
    program.write_text("#!/bin/sh\ntouch was-run\n")
    program.chmod(0o755)
    path = os.environ["PATH"]
    for entry in ("", "."):
        monkeypatch.setenv("PATH", f"{entry}{os.pathsep}{path}")
        assert code.code_version() == expected
    assert not (repository / "was-run").exists()


def test_git_has_no_pipe_that_a_forked_worker_would_keep_open(repository, monkeypatch):
    """A worker of a loader that is forked meanwhile kept the pipe of a `subprocess`, which waited
    for its end."""

    def pipe():
        raise AssertionError("a pipe was opened")

    (repository / "new.py").write_text("3")
    before = code.code_version()
    monkeypatch.setattr(os, "pipe", pipe)
    assert code.code_version() == before
    assert len(before["edits"]) == 16


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
    assert recorded(tmp_path / "run") == (head, None)
    (repository / "src" / "a b\n.py").write_text("2")
    with caplog.at_level(logging.INFO, "jstep"):
        train(25, checkpoint_dir=tmp_path / "run")
    assert f"code: commit {head[:8]} before, commit {head[:8]} with edits" in caplog.text


# A git that is slow, or not git.

SCRIPTS = {
    "rev-parse hangs": ("rev-parse", "sleep 60", None),
    "diff hangs": ("--binary", "sleep 60", "unknown"),
    "diff ignores signals": ("--binary", "trap '' TERM INT HUP; sleep 60", "unknown"),
    "diff fails": ("--binary", "exit 1", "unknown"),
    "files are nonsense": ("ls-files", "echo nonsense.py", None),
    "git does not run": ("", "exit 1", None),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_git_that_is_no_git(name, repository, fake_git, monkeypatch):
    word, script, edits = SCRIPTS[name]
    head = git(repository, "rev-parse", "HEAD")
    fake_git(word, script)
    monkeypatch.setattr(
        code, "GIT_TIMEOUT_SECS", 0.5 if "hangs" in name or "signals" in name else 20.0
    )
    began = time.monotonic()
    found = code.code_version()
    assert time.monotonic() - began < 15
    assert found == ({"commit": head, "edits": edits} if word == "--binary" else found)
    assert (found is None) is (word in ("", "rev-parse"))


def test_a_run_that_ends_before_git(repository, fake_git, tmp_path):
    head = git(repository, "rev-parse", "HEAD")
    fake_git("--binary", "sleep 30")
    began = time.monotonic()
    train(1, checkpoint_dir=tmp_path / "run")
    assert time.monotonic() - began < 10
    assert recorded(tmp_path / "run") == (head, "unknown")


@pytest.mark.parametrize(
    "key",
    ["core.fsmonitor", "filter.x.clean", "filter.x.process", "diff.x.textconv", "diff.external"],
)
def test_no_program_of_the_config_of_a_repository_is_run(repository, tmp_path, key):
    mark = tmp_path / "was-run"
    (repository / ".gitattributes").write_text("*.txt filter=x diff=x\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "attributes")
    git(repository, "config", key, f"touch {mark}; cat")
    (repository / "data.txt").write_text("2")
    found = code.code_version()
    assert not mark.exists()
    assert found["commit"] == git(repository, "-c", "core.fsmonitor=false", "rev-parse", "HEAD")
    # With a filter off, each file would look edited.
    assert (found["edits"] == "unknown") == key.startswith("filter")
    git(repository, "config", "--unset", key)
    assert code.code_version()["edits"] not in ("unknown", None)


@pytest.mark.parametrize("scope", ["repository", "user", "system", "environment"])
@pytest.mark.parametrize("name", ["x", "a.b", "a=b", ""])
def test_no_filter_of_any_config_is_run(repository, tmp_path, monkeypatch, scope, name):
    """`git diff` would run that of the user in the repository, where `python -m` imports what is
    there."""
    mark = tmp_path / "was-run"
    (repository / ".gitattributes").write_text(f"*.txt filter={name}\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "attributes")
    (repository / "data.txt").write_text("2")
    config = tmp_path / "config"
    files = {
        "repository": repository / ".git/config",
        "user": config,
        "system": config,
        "environment": config,
    }
    for setting, value in {"clean": f"touch {mark}; cat", "required": "true"}.items():
        git(repository, "config", "--file", str(files[scope]), f"filter.{name}.{setting}", value)
    if scope in ("user", "system"):
        monkeypatch.setenv(
            {"user": "GIT_CONFIG_GLOBAL", "system": "GIT_CONFIG_SYSTEM"}[scope], str(config)
        )
    if scope == "environment":
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"filter.{name}.clean")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"touch {mark}; cat")
    found = code.code_version()
    assert found == {"commit": git(repository, "rev-parse", "HEAD"), "edits": "unknown"}
    assert not mark.exists()


def test_a_filter_of_files_that_have_not_changed_is_no_reason_not_to_know_the_edits(
    repository, tmp_path, monkeypatch
):
    (tmp_path / "config").write_text('[filter "x"]\n\tclean = tr a-z A-Z\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    assert code.code_version()["edits"] is None
    (repository / ".gitattributes").write_text("*.txt filter=x\n")
    (repository / "src" / "a b\n.py").write_text("2")
    assert code.code_version()["edits"] not in (None, "unknown")
    (repository / "data.txt").write_text("2")
    assert code.code_version()["edits"] == "unknown"

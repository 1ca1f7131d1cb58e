"""The commit and the edits in a repository of somebody else, whose settings name a program."""

import dataclasses
import os
import pathlib
import shutil
import time

import pytest
from repositories import at, git

from jstep.stores import repository as code


@dataclasses.dataclass
class Place:
    """A repository, and a program that its settings may name.

    Attributes:
        marker: A program that leaves a trace.
    """

    root: pathlib.Path
    marker: pathlib.Path
    at: pathlib.Path

    def config(self, *words, at=None):
        git(at or self.root, "config", *words)

    def attributes(self, text="* filter=bad\n", name=".git/info/attributes"):
        (self.root / name).parent.mkdir(exist_ok=True)
        (self.root / name).write_text(text)

    def touch(self):
        os.utime(self.root / "data.txt", (2, 2))

    def has_run(self):
        trace = self.at / "trace"
        found = trace.exists()
        trace.unlink(missing_ok=True)
        return found


@pytest.fixture
def place(repository, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    marker.write_text(f"#!/bin/sh\ntouch {tmp_path}/trace\nexec timeout 2 cat\n")
    marker.chmod(0o755)
    os.utime(repository / "data.txt", (1, 1))  # long before the index
    git(repository, "update-index", "--refresh")
    (tmp_path / "gitconfig").touch()
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setattr(code, "GIT_TIMEOUT_SECS", 20.0)
    return Place(repository, marker, tmp_path)


def clean(place):
    place.config("filter.bad.clean", str(place.marker))
    place.attributes()


def process(place):
    place.config("filter.bad.process", str(place.marker))
    place.config("filter.bad.required", "true")
    place.attributes()


def without_a_name(place):
    place.config("filter..clean", str(place.marker))
    place.attributes("* filter=\n")


def with_an_odd_name(place):
    place.config("filter.a=b.C.clean", str(place.marker))
    place.attributes("* filter=a=b.C\n")


def by_gitattributes(place):
    place.config("filter.bad.clean", str(place.marker))
    place.attributes(name=".gitattributes")


def by_a_file_of_attributes(place):
    place.config("filter.bad.clean", str(place.marker))
    place.config("core.attributesFile", str(place.root / "src" / "names"))
    place.attributes(name="src/names")


def included(place):
    (place.root / "more").write_text(f"[filter.bad]\nclean = {place.marker}\n")
    place.config("include.path", "../more")
    place.attributes()


def included_if(place):
    """The condition holds by another file than that of the inclusion."""
    (place.root / "more").write_text(f"[filter.bad]\nclean = {place.marker}\n")
    place.config("extensions.worktreeConfig", "true")
    place.config("--worktree", "remote.x.url", "here")
    place.config("includeIf.hasconfig:remote.*.url:here.path", "../more")
    place.attributes()


def of_a_worktree(place):
    place.config("extensions.worktreeConfig", "true")
    place.config("--worktree", "filter.bad.clean", str(place.marker))
    place.attributes()


def hides_the_users(place):
    (place.at / "gitconfig").write_text("[filter.bad]\nclean = cat\n")
    clean(place)


def of_lfs(place):
    """git-lfs of the user runs the programs of a repository."""
    (place.at / "gitconfig").write_text(f"[filter.lfs]\nclean = {place.marker}\n")
    place.config("lfs.extension.x.clean", "x")
    place.attributes("* filter=lfs\n")


def by_a_file_that_points_elsewhere(place):
    clean(place)
    (place.root / ".git").rename(place.at / "elsewhere")
    (place.root / ".git").write_text(f"gitdir: {place.at / 'elsewhere'}\n")


FILTERS = [clean, process, without_a_name, with_an_odd_name, by_gitattributes, by_a_file_of_attributes, included]
FILTERS += [included_if, of_a_worktree, hides_the_users, of_lfs, by_a_file_that_points_elsewhere]


@pytest.mark.thorough(except_for=["clean", "included_if", "of_lfs"])
@pytest.mark.parametrize("make", FILTERS, ids=lambda make: make.__name__)
def test_no_filter_of_the_repository_runs(make, place):
    make(place)
    place.touch()
    head = git(place.root, "rev-parse", "HEAD")
    assert not place.has_run()
    assert code.code_version() == {"commit": head, "edits": "unknown"}
    assert not place.has_run()
    if make is not hides_the_users:
        git(place.root, "-c", "core.hooksPath=/", "status", users=True)
        assert place.has_run()


def test_files_without_the_filter_or_with_their_old_stat_are_known(place):
    clean(place)
    place.attributes("data.txt filter=bad\n")
    assert code.code_version()["edits"] is None
    (place.root / "src" / "a b\n.py").write_text("2")
    edits = code.code_version()["edits"]
    assert edits not in (None, "unknown")
    place.config("--unset", "filter.bad.clean")
    assert code.code_version()["edits"] == edits
    assert not place.has_run()


def test_filters_of_the_user_run(place, fake_git):
    (place.at / "gitconfig").write_text(f"[filter.good]\nclean = {place.marker}\n")
    place.attributes("* filter=good\n")
    place.touch()
    assert code.code_version()["edits"] is None
    assert place.has_run()
    fake_git("--show-scope", "exit 129")  # before git 2.26
    assert code.code_version()["edits"] == "unknown"
    assert not place.has_run()


def test_filters_of_a_linked_worktree(place, monkeypatch):
    clean(place)
    git(place.root, "worktree", "add", "-q", str(place.at / "linked"))
    place.has_run()
    os.utime(place.at / "linked" / "data.txt", (2, 2))
    at(place.at / "linked", monkeypatch)
    assert code.code_version() == {"commit": git(place.root, "rev-parse", "HEAD"), "edits": "unknown"}
    assert not place.has_run()


@pytest.fixture
def submodule(place, tmp_path):
    inner = tmp_path / "inner"
    git(tmp_path, "clone", "-q", str(place.root), str(inner))
    git(place.root, "submodule", "add", "-q", str(inner), "sub/inner")
    git(place.root, "commit", "-q", "-m", "second")
    return place.root / "sub" / "inner"


def test_a_submodule(place, submodule):
    head = git(place.root, "rev-parse", "HEAD")
    (submodule / "log.txt").touch()
    assert code.code_version() == {"commit": head, "edits": None}
    (submodule / "data.txt").write_text("2")
    edited = code.code_version()["edits"]
    assert len(edited) == 16
    git(submodule, "commit", "-aqm", "third")
    moved = code.code_version()["edits"]
    assert moved not in (None, edited)
    git(place.root, "add", "sub/inner")
    assert code.code_version()["edits"] == moved  # as for files, it does not matter that it is staged
    git(submodule, "checkout", "-q", "HEAD~1")
    git(place.root, "add", "sub/inner")
    assert code.code_version()["edits"] is None
    shutil.rmtree(submodule)
    submodule.mkdir()
    assert code.code_version()["edits"] is None


def test_filters_of_a_submodule(place, submodule):
    place.config("filter.bad.clean", str(place.marker), at=submodule)
    place.attributes("* filter=bad\n", ".git/modules/sub/inner/info/attributes")
    assert code.code_version()["edits"] in (None, "unknown")
    os.utime(submodule / "data.txt", (2, 2))
    assert code.code_version()["edits"] == "unknown"
    assert not place.has_run()
    git(place.root, "status", users=True)
    assert place.has_run()


def test_a_submodule_that_is_a_link_to_its_parent(place, submodule):
    shutil.rmtree(place.root / "sub")
    shutil.rmtree(place.at / "inner")
    (place.root / "sub").symlink_to("..")
    place.root.rename(place.root.with_name("inner"))
    began = time.monotonic()
    assert code._code_in(str(place.at / "inner"), began + 20)["edits"] == "unknown"
    assert time.monotonic() - began < 10


def fsmonitor(place):
    place.config("core.fsmonitor", str(place.marker))


def lazy_fetch(place):
    """A partial clone that lacks the tree of its commit."""
    for name, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{place.marker}",
        "protocol.ext.allow": "always",
        "protocol.allow": "always",
    }.items():
        place.config(name, value)
    tree = git(place.root, "rev-parse", "HEAD^{tree}")
    (place.root / ".git" / "objects" / tree[:2] / tree[2:]).unlink()


def lazy_fetch_by_ssh(place):
    lazy_fetch(place)
    place.config("remote.origin.url", "ssh://nobody@localhost/x")
    place.config("core.sshCommand", str(place.marker))


def lazy_fetch_by_upload_pack(place):
    lazy_fetch(place)
    place.config("remote.origin.url", f"file://{place.root}")
    place.config("remote.origin.uploadpack", str(place.marker))


@pytest.mark.thorough(except_for=["False-lazy_fetch"])
@pytest.mark.parametrize("make", [fsmonitor, lazy_fetch, lazy_fetch_by_ssh, lazy_fetch_by_upload_pack])
@pytest.mark.parametrize("is_old", [False, True])
def test_no_other_program_of_the_repository_runs(make, is_old, place, monkeypatch):
    make(place)
    if is_old:
        monkeypatch.delitem(code._ENVIRONMENT, "GIT_NO_LAZY_FETCH")
    edits = None if make is fsmonitor else "unknown"
    assert code.code_version() == {"commit": git(place.root, "rev-parse", "HEAD"), "edits": edits}
    assert not place.has_run()
    git(place.root, "status", users=True)
    assert place.has_run()


@pytest.mark.thorough
def test_settings_that_git_does_not_use_here(place):
    for name in [
        "core.pager",
        "pager.status",
        "pager.config",
        "core.editor",
        "core.askPass",
        "gpg.program",
        "diff.external",
    ]:
        place.config(name, str(place.marker))
    for name in ["diff.bad.textconv", "diff.bad.command", "merge.bad.driver", "credential.helper", "core.gitProxy"]:
        place.config(name, str(place.marker))
    for name in ("status", "rev-parse", "config", "ls-files"):
        place.config(f"alias.{name}", f"!{place.marker}")
    for name in ("post-index-change", "reference-transaction", "pre-auto-gc", "post-checkout"):
        (place.root / ".git" / "hooks" / name).write_text(place.marker.read_text())
        (place.root / ".git" / "hooks" / name).chmod(0o755)
    place.attributes("* diff=bad merge=bad\n")
    place.touch()
    assert code.code_version() == {"commit": git(place.root, "rev-parse", "HEAD"), "edits": None}
    assert not place.has_run()


def test_a_working_tree_elsewhere(place):
    place.config("core.worktree", str(place.at))
    assert code.code_version() == {"commit": git(place.root, "rev-parse", "HEAD"), "edits": "unknown"}


def test_a_fifo_instead_of_a_file(place):
    (place.root / "data.txt").unlink()
    os.mkfifo(place.root / "data.txt")
    assert len(code.code_version()["edits"]) == 16

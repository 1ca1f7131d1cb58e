"""Entries of JAX's compilation cache: what a disk that cannot be flushed means."""

import errno

import pytest

from jstep.stores import compile_cache


@pytest.mark.parametrize("name", ["sync_files", "sync_folder"])
def test_a_cache_that_cannot_be_flushed_is_a_warning(name, monkeypatch, caplog):
    flushed, errors = [], [FileNotFoundError(2, "gone"), OSError(errno.EIO, "broken")]

    def fail(what):
        flushed.append(what)
        raise errors[-1]

    for one in ("sync_files", "sync_folder"):
        monkeypatch.setattr(compile_cache, one, flushed.append)
    compile_cache._sync("folder", {"folder/a-cache"})
    assert flushed == [{"folder/a-cache"}, "folder"]
    monkeypatch.setattr(compile_cache, name, fail)
    compile_cache._sync("folder", set())
    del errors[-1]
    compile_cache._sync("folder", set())
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "compile_cache=folder: [Errno 5] broken; after a power cut its programs may be compiled again",
        )
    ]

"""Entries of JAX's compilation cache: which are whole, and what a disk that cannot be flushed means."""

import errno
import logging
import sys
import types
import zlib

import pytest

from jstep.stores import compile_cache

ZSTD = b"\x28\xb5\x2f\xfd"


def test_incomplete_entries_of_either_compression_are_removed(tmp_path, monkeypatch, caplog):
    def decompress(data):
        if data != ZSTD + b"whole":
            raise EOFError("torn")

    monkeypatch.setitem(sys.modules, "zstandard", types.SimpleNamespace(decompress=decompress))
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    whole, torn = zlib.compress(b"program"), zlib.compress(b"program")[:-1]
    a, b, c, d = (f"jit_f-{digit * 64}-cache" for digit in "abcd")
    entries = {a: whole, b: torn, c: ZSTD + b"whole", d: ZSTD, "other": torn, "my-cache": torn}
    for name, data in entries.items():
        (tmp_path / name).write_bytes(data)
    caplog.set_level(logging.INFO, "jstep")
    compile_cache._remove_incomplete(compile_cache._entries(str(tmp_path)) | {str(tmp_path / "gone-cache")})
    assert sorted(path.name for path in tmp_path.iterdir()) == [a, c, "my-cache", "other"]
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"{tmp_path / name} is incomplete, as after a power cut, and was removed: its program is compiled"
        for name in (b, d)
    ]
    monkeypatch.setitem(sys.modules, "zstandard", None)  # nothing can tell
    assert compile_cache._is_whole(ZSTD)
    assert compile_cache._entries(str(tmp_path / "none")) == set()


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

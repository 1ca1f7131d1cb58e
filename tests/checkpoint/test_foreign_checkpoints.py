"""Checkpoints and claims that somebody else made, beside an intact one: each is an error that names
it, or is read.

One field of the manifest at a time is another value, or random bytes of it and of other files are;
all checksums of the manifest itself are right. Nothing beside the checkpoint changes, and neither
time nor memory depend on its numbers.
"""

import copy
import json
import os
import resource
import shutil
import time

import jax.numpy as jnp
import pytest
from checkpoint_states import edit_manifest, save_all, state_at
from foreign_files import contents

import jstep
from jstep.array_store.manifest import CheckpointError
from jstep.checkpoint.saver import Saver
from jstep.look.cli import main

ODD = [
    None,
    -1,
    10**400,
    float("nan"),
    "",
    "/etc/passwd",
    "../model-1",
    "\0",
    "\x1b[31m",
    "\ud800",
    "x" * 100_000,
    [],
    {},
    {"x": 1},
    [2**40, 2**40],
]
"""Values for any field."""
EXPECTED = (CheckpointError, ValueError, OSError, TypeError)


def places(value, path=()):
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def replaced(data, path, value):
    inner = data = copy.deepcopy(data)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return data


def raised_by(call):
    try:
        call()
    except EXPECTED as error:
        return error
    return None


class Directory:
    """A directory with an intact checkpoint 1 and a malicious checkpoint 2."""

    def __init__(self, path):
        self.run, self.path, self.whole = path / "run", path / "run" / "model-2", path / "whole"
        with Saver(self.run) as saver:
            save_all(saver, [1, 2])
        shutil.copytree(self.path, self.whole)
        with open(self.path / "manifest.json") as file:
            self.manifest = json.load(file)
        del self.manifest["crc32"]
        self.beside = contents(self.run / "model-1")
        self.begun, self.memory = (
            time.monotonic(),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
        self.cases = 0

    def write(self, manifest):
        edit_manifest(str(self.path), lambda data: manifest)

    def check(self):
        self.cases += 1
        with Saver(self.run) as saver:
            calls = [
                lambda: saver.restore(state_at(0)),
                lambda: saver.restore(),
                lambda: saver.restore_params({"w": jnp.zeros((3, 2))}),
                lambda: saver.extra(2),
                lambda: jstep.load_weights(self.path, {"w": jnp.zeros((3, 2))}),
            ]
            for call in calls:
                error = raised_by(call)
                assert not isinstance(error, UnicodeError | RecursionError), error
                assert "\x1b" not in str(error)
            assert int(saver.restore(state_at(0), step=1).global_step) == 1
        assert main(["inspect", str(self.run)]) in (0, 1, 2)
        assert contents(self.run / "model-1") == self.beside
        assert sorted(os.listdir(self.run)) == ["model-1", "model-2"]

    def restore_files(self):
        shutil.rmtree(self.path)
        shutil.copytree(self.whole, self.path)

    def end(self, most_secs, most_bytes):
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.memory)
        seconds = time.monotonic() - self.begun
        print(f"{self.cases} cases, {seconds:.0f} s, {grown / 1e6:.0f} MB")
        assert seconds < most_secs
        assert grown < most_bytes


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path)


def test_a_checkpoint_whose_shape_is_huge(directory):
    edit_manifest(
        str(directory.path),
        lambda data: data["leaves"][0].update(shape=[2**40, 2**40], bytes=2**60),
    )
    directory.check()
    directory.end(60, 2**29)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_one_field_at_a_time(directory, part):
    paths = list(places(directory.manifest))
    cases = [(path, odd) for path in paths for odd in ODD]
    for path, odd in cases[part::16]:
        directory.write(replaced(directory.manifest, path, odd))
        directory.check()
    directory.end(600, 2**29)


@pytest.mark.parametrize("name", ["fifo", "folder", "sparse"])
def test_what_is_no_manifest(directory, name):
    path = directory.path / "manifest.json"
    path.unlink()
    if name == "fifo":
        os.mkfifo(path)
    elif name == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(2**40)
    with (
        Saver(directory.run) as saver,
        pytest.raises((OSError, CheckpointError), match=r"manifest\.json"),
    ):
        saver.restore(state_at(0))
    directory.check()
    directory.end(30, 2**28)

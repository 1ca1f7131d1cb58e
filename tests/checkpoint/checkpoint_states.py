"""States to save, failing and held saves, and helpers that inspect or corrupt the files of a
checkpoint."""

import glob
import json
import os
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from file_operations import before, disk_is_full, held

import jstep
from jstep.array_store.listing import ORBAX_COMMIT_FILE, ORBAX_ONLY


def state_at(step, value=0.0):
    params = {"w": jnp.full((3, 2), value, jnp.float32)}
    return jstep.TrainState.create(params, jstep.momentum(0.1, 0.9), global_step=step)


NO_SLOTS = jstep.gradient_descent(0.1)


def save_all(saver, steps):
    for step in steps:
        saver.save(state_at(step, step))
    saver.wait()


def as_bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert as_bits(x) == as_bits(y)


def listing(directory):
    """Return the entries of a directory, without the claim file of its writer."""
    return sorted(name for name in os.listdir(directory) if not name.endswith(".jstep-writer"))


def files_of(path):
    return sorted(p for p in glob.glob(f"{path}/**", recursive=True) if os.path.isfile(p))


def read_files_of(path):
    """Return the files of a checkpoint that are read: all but those that only Orbax reads."""
    return [
        file
        for file in files_of(path)
        if os.path.basename(file) not in {*ORBAX_ONLY, ORBAX_COMMIT_FILE}
    ]


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


def edit_manifest(path, change):
    """Change the content of a manifest and recompute its checksum."""
    file = f"{path}/manifest.json"
    with open(file) as opened:
        data = json.load(opened)
    del data["crc32"]
    changed = change(data)
    body = json.dumps(data if changed is None else changed).encode()[:-1]
    with open(file, "wb") as opened:
        opened.write(body + b',\n "crc32": "' + f'{zlib.crc32(body):08x}"\n}}\n'.encode())


def failing_saves(directory):
    """Return a context in which the disk is full when a save below a directory writes its last
    file, the manifest."""
    return before("open", f"{directory}/*/manifest.json*", disk_is_full, mode="w")


def held_saves(directory):
    """Return a context whose saves below a directory write their last file when the event is set,
    or at its end."""
    return held("open", f"{directory}/*/manifest.json*", mode="w")

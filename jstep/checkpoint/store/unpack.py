"""Assembly of arrays from the blocks of an object store, onto any sharding; each process reads what it needs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.format import leaves as _leaves
from jstep.checkpoint.format.manifest import Manifest
from jstep.checkpoint.store import packs
from jstep.checkpoint.store.blocks import overlap
from jstep.checkpoint.store.packs import Stored
from jstep.checkpoint.store.protocol import CorruptedError
from jstep.core.placing import lengths, parts_of, place
from jstep.stores import ReadResult, TruncatedError


class ReadableObjects(Protocol):
    """Objects by key: those below a URL (`jstep.stores.Objects`), or files."""

    def start_read(self, key: str, start: int = 0, stop: int | None = None) -> Any:
        """Start to read an object, or a range of its bytes. The result has `url` and `give_up()`."""

    def read_result(self, pending: Any) -> ReadResult:
        """Return the result of a read."""


_AT_ONCE = 8
"""Concurrent reads: 256 MB at most."""


def check(manifest: Manifest, blocks: Sequence[Stored], names: Sequence[str]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of arrays, after comparing them with the blocks before any block is read.

    Raises:
        CorruptedError: They do not match, or blocks are missing.
    """
    wanted = set(names)
    kinds = {leaf.array: _leaves.stored_kind(leaf) for leaf in manifest.leaves if leaf.array in wanted}
    there = dict.fromkeys(wanted, 0)
    problems = []
    for block in blocks:
        if block.array not in wanted:
            continue
        shape, dtype = kinds[block.array]
        inside = len(block.start) == len(shape) and all(
            begin + size <= whole for begin, size, whole in zip(block.start, block.shape, shape, strict=True)
        )
        if block.dtype != dtype or not inside:
            problems.append(
                f"{block.array!r} is {dtype} of shape {shape}, but the stored block is {block.dtype}, "
                f"{block.shape} at {block.start}"
            )
        there[block.array] += math.prod(block.shape)
    for name in names:
        if there[name] != math.prod(kinds[name][0]) and not problems:
            problems.append(f"{name!r}: {there[name]} of {math.prod(kinds[name][0])} elements are stored")
    if problems:
        raise CorruptedError(problems)
    return {name: (kinds[name][0], jnp.dtype(kinds[name][1])) for name in names}


def arrays(
    objects: ReadableObjects, folder: str, manifest: Manifest, blocks: Sequence[Stored], shardings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arrays by name, with their shardings (None for NumPy arrays). They share no memory with anything.

    Raises:
        CorruptedError: An object is missing or corrupted.
        OSError: The store cannot be read.
    """
    kinds = check(manifest, blocks, list(shardings))
    parts = {
        name: {part: np.empty(lengths(part), kinds[name][1]) for part in parts_of(kinds[name][0], sharding)}
        for name, sharding in shardings.items()
    }
    needed = [
        block for block in blocks if any(overlap(part, block.start, block.shape) for part in parts.get(block.array, {}))
    ]

    def fill(block: Stored, body: bytes) -> None:
        values = packs.decoded(block, body, kinds[block.array][1])
        for part, filled in parts[block.array].items():
            if (both := overlap(part, block.start, block.shape)) is not None:
                filled[both[0]] = values[both[1]]

    read(objects, folder, needed, fill)
    out: dict[str, Any] = {}
    for name, sharding in shardings.items():
        mine = parts.pop(name)
        out[name] = next(iter(mine.values())) if sharding is None else place(*kinds[name], sharding, mine)
    return out


def read(objects: ReadableObjects, folder: str, blocks: Sequence[Stored], use: Any) -> None:
    """Read blocks, and call `use(block, bytes)` with each.

    Raises:
        CorruptedError: An object is missing, or `use` raised ValueError.
        OSError: The store cannot be read.
    """
    problems: dict[str, None] = {}
    reading: list[tuple[list[Stored], Any]] = []

    def end_one() -> None:
        run, pending = reading.pop(0)
        try:
            found = objects.read_result(pending)
            if found.data is None:
                raise ValueError("missing")
            for block in run:
                at = block.offset - run[0].offset
                use(block, found.data[at : at + block.nbytes])
        except (ValueError, TruncatedError) as error:
            text = str(error)
            problems[text if pending.url in text else f"{pending.url}: {text}"] = None

    try:
        for run in packs.runs(blocks):
            if len(reading) == _AT_ONCE:
                end_one()
            last = run[-1].offset + run[-1].nbytes
            reading.append((run, objects.start_read(f"{folder}/{run[0].pack}", run[0].offset, last)))
        while reading:
            end_one()
    except BaseException:
        for _, pending in reading:
            pending.give_up()
        raise
    if problems:
        raise CorruptedError(list(problems))

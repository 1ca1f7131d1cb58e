"""The blocks of arrays and files in packs: how they are split, grouped, read together and verified."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jstep.checkpoint import packs
from jstep.checkpoint.packs import FILE, Block, Stored
from jstep.stores.tagged_json import LargeBytes


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: Any) -> None:
    monkeypatch.setattr(packs, "PACK", 8)


def block(size: int, name: str = "a") -> Block:
    return Block(name, (0,), np.zeros(size, np.uint8))


@pytest.mark.parametrize(
    ("shape", "most", "expected"),
    [
        ((), 4, [()]),
        ((2, 1), 8, [((0, 2), (0, 1))]),
        ((3,), 8, [((0, 2),), ((2, 3),)]),
        ((1, 3), 4, [((0, 1), (0, 1)), ((0, 1), (1, 2)), ((0, 1), (2, 3))]),
        ((3, 2), 8, [((0, 1), (0, 2)), ((1, 2), (0, 2)), ((2, 3), (0, 2))]),
        ((3, 2), 16, [((0, 2), (0, 2)), ((2, 3), (0, 2))]),
        ((2, 3), 8, [((0, 1), (0, 2)), ((0, 1), (2, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3))]),
    ],
    ids=str,
)
def test_boxes_of_an_array(shape: Any, most: int, expected: Any) -> None:
    found = [tuple((part.start, part.stop) for part in box) for box in packs.boxes(shape, 4, most)]
    assert found == expected


def test_blocks_are_those_of_the_first_replicas() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    split = jax.device_put(values, NamedSharding(mesh, PartitionSpec("a")))
    found = packs.own_blocks({"split": split, "one": jnp.int8(3), "host": values[0]})
    assert [(one.array, one.start, one.data.tolist(), one.dtype) for one in found] == [
        ("split", (0, 0), [[0, 1]], ""),
        ("split", (1, 0), [[2, 3]], ""),
        ("split", (2, 0), [[4, 5]], ""),
        ("split", (3, 0), [[6, 7]], ""),
        ("one", (), 3, ""),
        ("host", (0,), [0, 1], ""),
    ]


def test_blocks_of_files_release_them() -> None:
    files = {"x": LargeBytes(bytes(range(17))), "y": LargeBytes(bytes(8))}
    found = [(one.array, one.start, one.data.tobytes(), one.dtype) for one in packs.file_blocks(files)]
    x = bytes(range(17))
    assert found == [
        ("x", (0,), x[:8], FILE),
        ("x", (8,), x[8:16], FILE),
        ("x", (16,), x[16:], FILE),
        ("y", (0,), bytes(8), FILE),
    ]
    assert [one.nbytes for one in files.values()] == [0, 0]


def test_groups_hold_as_much_as_a_pack() -> None:
    sizes = [3, 5, 1, 8, 9, 2, 2, 4, 1]
    found = [[len(body) for _, body in group] for group in packs._groups(map(block, sizes), False)]
    assert found == [[3, 5], [1], [8], [9], [2, 2, 4], [1]]
    assert list(packs._groups([], False)) == []
    ((_, body),) = next(packs._groups([block(100)], True))
    assert zlib.decompress(body) == bytes(100)


def stored(offset: int, nbytes: int, pack: str = "p", zipped: int = 0) -> Stored:
    return Stored("a", "|u1", (0,), (nbytes,), pack, offset, nbytes, "", zipped)


def test_adjacent_blocks_are_read_together() -> None:
    places = [(0, 4), (4, 4), (8, 1), (9, 1), (11, 1), (12, 7)]
    found = [[one.offset for one in run] for run in packs.runs(stored(*place) for place in reversed(places))]
    assert found == [[0, 4, 8], [9], [11, 12]]
    assert [len(run) for run in packs.runs([stored(0, 1), stored(1, 1, "q")])] == [1, 1]
    assert list(packs.runs([])) == []


def test_a_block_is_verified() -> None:
    dtype, data = np.dtype(np.int16), np.arange(3, dtype=np.int16)
    plain, zipped = data.tobytes(), zlib.compress(data.tobytes())

    def of(body: bytes, **changes: Any) -> Stored:
        one = Stored("a", "<i2", (0,), (3,), "p", 10, len(body), f"{zlib.crc32(body):08x}", int(body != plain))
        return one._replace(**changes)

    for body in (plain, zipped):
        assert packs.decoded(of(body), body, dtype).tolist() == [0, 1, 2]
    longer = zlib.compress(plain + b"x")
    for one, body, problem in (
        (of(plain), plain[:-1], "the checksum of bytes [10, 16) differs"),
        (of(plain), plain[:-1] + b"x", "the checksum of bytes [10, 16) differs"),
        (of(plain, shape=(2,)), plain, "6 bytes of 'a' instead of 4"),
        (of(plain, zipped=1), plain, "'a' cannot be decompressed: "),
        (of(longer), longer, "7 bytes of 'a' instead of 6"),
    ):
        with pytest.raises(ValueError) as caught:
            packs.decoded(one, body, dtype)
        assert str(caught.value).startswith(problem)


def test_what_is_no_index() -> None:
    assert packs.read_index(b'{"packs": {"p": {"bytes": 1}}, "blocks": []}') == ({"p": {"bytes": 1}}, [])
    for data in (b"[]", b"{}", b'{"packs": {}}', b'{"packs": 3, "blocks": []}', b'{"packs": {}, "blocks": [1]}'):
        with pytest.raises(ValueError, match="it is not an index: "):
            packs.read_index(data)


def test_the_overlap_of_a_part_and_a_block() -> None:
    assert packs.overlap(((2, 6),), (0,), (2,)) is None
    assert packs.overlap(((2, 6),), (6,), (2,)) is None
    found = packs.overlap(((2, 6), (0, 3)), (1, 2), (3, 4))
    assert found == ((slice(0, 2), slice(2, 3)), (slice(1, 3), slice(0, 1)))

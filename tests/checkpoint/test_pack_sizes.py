"""The blocks of arrays and files in packs: how they are split, grouped, read together and verified."""

import zlib
from typing import Any

import numpy as np
import pytest

from jstep.checkpoint import packs
from jstep.checkpoint.packs import FILE, Block, BlockPosition
from jstep.stores.tagged_json import LargeBytes


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: Any) -> None:
    monkeypatch.setattr(packs, "PACK", 8)


def block(size: int, name: str = "a") -> Block:
    return Block(name, (0,), np.zeros(size, np.uint8))


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


def stored(offset: int, nbytes: int, pack: str = "p", zipped: int = 0) -> BlockPosition:
    return BlockPosition("a", "|u1", (0,), (nbytes,), pack, offset, nbytes, "", zipped)


def test_a_block_is_verified() -> None:
    dtype, data = np.dtype(np.int16), np.arange(3, dtype=np.int16)
    plain, zipped = data.tobytes(), zlib.compress(data.tobytes())

    def of(body: bytes, **changes: Any) -> BlockPosition:
        one = BlockPosition("a", "<i2", (0,), (3,), "p", 10, len(body), f"{zlib.crc32(body):08x}", int(body != plain))
        return one._replace(**changes)

    for body in (plain, zipped):
        assert packs.decode_block(of(body), body, dtype).tolist() == [0, 1, 2]
    longer = zlib.compress(plain + b"x")
    for one, body, problem in (
        (of(plain), plain[:-1], "the checksum of bytes [10, 16) differs"),
        (of(plain), plain[:-1] + b"x", "the checksum of bytes [10, 16) differs"),
        (of(plain, shape=(2,)), plain, "6 bytes of 'a' instead of 4"),
        (of(plain, zipped=1), plain, "'a' cannot be decompressed: "),
        (of(longer), longer, "7 bytes of 'a' instead of 6"),
    ):
        with pytest.raises(ValueError) as caught:
            packs.decode_block(one, body, dtype)
        assert str(caught.value).startswith(problem)

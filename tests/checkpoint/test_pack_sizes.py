"""The blocks of arrays and files in packs: how they are split, grouped, read together and verified."""

import zlib

import numpy as np
import pytest

from jstep.checkpoint import packs
from jstep.checkpoint.packs import BlockPosition


@pytest.fixture(autouse=True)
def small_packs(monkeypatch):
    monkeypatch.setattr(packs, "PACK", 8)


def test_a_block_is_verified():
    dtype, data = np.dtype(np.int16), np.arange(3, dtype=np.int16)
    plain, zipped = data.tobytes(), zlib.compress(data.tobytes())

    def of(body, **changes):
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

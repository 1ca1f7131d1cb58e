"""Who owns a claim and whether that process is alive, and claims in a store whose objects change by themselves."""

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from jstep.checkpoint import claims
from jstep.checkpoint.claims import ObjectClaim
from jstep.checkpoint.manifest import CheckpointError
from jstep.stores import owners
from jstep.stores.objects import ABSENT, ReadResult

OWNER = {"host": "here", "space": "boot", "pid": 7, "started": "100"}
KEY = "~claims/model"


@pytest.mark.parametrize(
    ("change", "alive"),
    [
        ({}, True),
        ({"started": "99"}, False),
        ({"pid": 8, "started": "100"}, False),
        ({"pid": "7"}, False),
        ({"pid": 0}, False),
        ({"host": "elsewhere"}, None),
        ({"space": "container"}, None),
    ],
)
def test_whether_an_owner_is_alive(change: Any, alive: bool | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(owners, "space", lambda: "boot")
    monkeypatch.setattr(owners, "start_time", {7: "100", 0: "100", -7: "100"}.get)
    assert owners.is_alive(OWNER | change) is alive
    without_space = {key: value for key, value in OWNER.items() if key != "space"}
    assert owners.is_alive(without_space) is True
    assert owners.this_process() == {"host": "here", "space": "boot", "pid": os.getpid(), "started": None}


def test_the_error_of_a_second_writer_names_the_first() -> None:
    once = (
        "one writer at a time, or one run would destroy the other's checkpoints. Give this run its own directory or "
        "prefix, or "
    )
    mine = owners.this_process()
    wait, this = f"{once}wait for that process or end it.", f"process {os.getpid()} on {socket.gethostname()}"
    cases = [
        (mine, f"{this}, which is this one: {once}close the other Saver first."),
        (mine | {"space": "container"}, f"{this}: {wait}"),
        (OWNER, f"process 7 on here: {wait}"),
        ({}, f"process unknown on unknown: {wait}"),
    ]
    for owner, text in cases:
        assert str(claims.refusal("runs", "model", owner)) == f"model-* in runs is being written by {text}"


class Objects(dict[str, tuple[bytes, bytes]]):
    """Objects by key, with their stamps."""

    url = "gs://bkt/run"
    writes = 0

    def read(self, key: str) -> ReadResult:
        return ReadResult(*self.get(key, (None, ABSENT)))

    def put(self, key: str, data: bytes) -> bytes:
        self.writes += 1
        self[key] = data, b"%d" % self.writes
        return self[key][1]

    def write_if(self, key: str, data: bytes, stamp: bytes) -> bytes | None:
        return self.put(key, data) if self.read(key).stamp == stamp else None

    def delete(self, key: str, stamp: bytes) -> bool:
        return self.read(key).stamp == stamp and self.pop(key, None) is not None

    def within(self, seconds: float) -> Any:
        return claims.contextlib.nullcontext()


@pytest.fixture
def held() -> Iterator[tuple[Any, ObjectClaim]]:
    objects: Any = Objects()
    claim = ObjectClaim(objects, "model")
    yield objects, claim
    claim.release()


def test_a_claim_that_was_deleted_is_written_again(held: Any) -> None:
    objects, claim = held
    objects.clear()
    claim.check()
    claim.check()
    assert objects.writes == 2
    assert owners.owner_in(objects[KEY][0]) == owners.this_process() | {"id": claim.id, "beat": 0}
    claim.renew()
    assert json.loads(objects[KEY][0])["beat"] == 1
    objects.put(KEY, objects[KEY][0])  # a rule of the bucket has copied it
    claim.check()
    claim.renew()
    assert json.loads(objects[KEY][0])["beat"] == 2
    assert claim.is_held()
    claim.release()
    assert not claim.is_held()
    assert objects == {}


@pytest.mark.parametrize("deleted_first", [False, True])
def test_a_claim_that_another_writer_has_taken_is_lost(held: Any, deleted_first: bool) -> None:
    objects, claim = held
    other = json.dumps({"id": "x", "host": "elsewhere", "pid": 12}).encode()
    if deleted_first:
        objects.clear()

        def write_if(key: str, data: bytes, stamp: bytes) -> None:
            objects.put(key, other)  # just before

        objects.write_if = write_if
    else:
        objects.put(KEY, other)
    with pytest.raises(
        CheckpointError, match=r"model-\* in gs://bkt/run is being written by process 12 on elsewhere: "
    ):
        claim.check()
    assert not claim.is_held()
    claim.renew()
    claim.release()
    assert objects[KEY][0] == other

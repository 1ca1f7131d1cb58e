"""Who owns a claim and whether that process is alive, and claims in a store whose objects change by themselves."""

import os
import socket
from typing import Any

import pytest

from jstep.checkpoint import claims
from jstep.stores import owners

OWNER = {"host": "here", "space": "boot", "pid": 7, "started": "100"}


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

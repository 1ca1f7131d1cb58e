"""`events` of files that are empty or not event files, and differences of infinities."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("text", ["hi\n", "a longer text than the header of a record is, much longer\n", ""])
def test_a_file_without_events_is_an_error(tmp_path: Path, cli: Callable[..., Any], text: str) -> None:
    (tmp_path / "notes.txt").write_text(text)
    assert "notes.txt" in (message := cli("events", tmp_path / "notes.txt", code=2).err)
    assert "not an event file" in message


def test_an_empty_event_file_is_valid(tmp_path: Path, cli: Callable[..., Any]) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    cli("events", tmp_path / "events.out.tfevents.1")
    assert cli("events", tmp_path).err == ""

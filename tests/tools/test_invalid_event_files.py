"""`events` of files that are empty or not event files, and differences of infinities."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jstep.tools.cli_compare import array_difference


@pytest.mark.parametrize("text", ["hi\n", "a longer text than the header of a record is, much longer\n", ""])
def test_a_file_without_events_is_an_error(tmp_path: Path, cli: Callable[..., Any], text: str) -> None:
    (tmp_path / "notes.txt").write_text(text)
    assert "notes.txt" in (message := cli("events", tmp_path / "notes.txt", code=2).err)
    assert "not an event file" in message


def test_an_empty_event_file_is_valid(tmp_path: Path, cli: Callable[..., Any]) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    cli("events", tmp_path / "events.out.tfevents.1")
    assert cli("events", tmp_path).err == ""


def test_infinities_of_opposite_signs_have_no_distance() -> None:
    a, b = np.float32([1, np.inf, -np.inf]), np.float32([1, -np.inf, np.inf])
    assert (result := array_difference("w", a, b)) is not None
    assert (result.detail, result.max_ulps, result.max_abs) == (
        "2 of 3 differ with 2 infinite of opposite sign",
        None,
        None,
    )
    b[0] = np.nextafter(np.float32(1), np.float32(2))
    assert (result := array_difference("w", a, b)) is not None
    assert result.detail == "3 of 3 differ by up to 1.19209e-07 (1 ULP) with 2 infinite of opposite sign"

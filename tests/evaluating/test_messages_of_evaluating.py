"""The messages about wrong arguments of evaluating, whole; see tests/messages.py, which writes them anew."""

import messages
import pytest

MAKERS = messages.makers("evaluating")


@pytest.mark.parametrize("name", MAKERS)
def test_the_messages(name: str) -> None:
    assert messages.messages_of(MAKERS[name]) == messages.stored("evaluating").get(name, {})

"""The messages about wrong arguments of differentiate, whole; see tests/messages.py, which writes them anew."""

import messages
import pytest

MAKERS = messages.makers("differentiate")


@pytest.mark.parametrize("name", MAKERS)
def test_the_messages(name: str) -> None:
    assert messages.messages_of(MAKERS[name]) == messages.stored("differentiate").get(name, {})

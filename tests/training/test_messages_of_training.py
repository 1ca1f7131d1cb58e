"""The messages about wrong arguments of training, whole; see tests/messages.py, which writes them anew."""

import messages
import pytest

MAKERS = messages.makers("training")


@pytest.mark.parametrize("name", MAKERS)
def test_the_messages(name: str) -> None:
    assert messages.messages_of(MAKERS[name]) == messages.stored("training").get(name, {})

"""The messages about wrong arguments of optimizers, whole; see tests/messages.py, which writes them anew."""

import messages
import pytest

MAKERS = messages.makers("optimizers")


@pytest.mark.parametrize("name", MAKERS)
def test_the_messages(name: str) -> None:
    assert messages.messages_of(MAKERS[name]) == messages.stored("optimizers").get(name, {})

"""Texts of somebody else: what is logged is printable, and to look for secrets takes linear
time."""

import logging

import pytest

import jstep
from jstep.core.logs import logger
from jstep.core.secret_text import NOT_RECORDED, error_text

LETTERS = [
    "a", "a.", "a-", "=", "a=", '"', "a='", "Basic ", "Bearer ", "sk-", "://", "a://", "@", "hf_a1",
    "\n", " ",
]  # fmt: skip


@pytest.mark.parametrize("letters", LETTERS)
def test_a_long_message_is_searched_in_linear_time(letters):
    """The time of 20 such messages, were it quadratic, would be that of a test that hangs."""
    for _ in range(20):
        error_text(ValueError(letters * (20_000 // len(letters))))


def test_a_secret_in_a_message_is_found_whatever_is_before_it():
    assert (
        error_text(ValueError("x" * 100 + " password=hunter2, a.b=c"))
        == f"{'x' * 100} password={NOT_RECORDED}, a.b=c"
    )
    assert error_text(ValueError("user-password=hunter2")) == f"user-password={NOT_RECORDED}"


def test_control_characters_of_names_are_escaped_in_the_log(caplog):
    with caplog.at_level(logging.INFO, "jstep"):
        logger.info("process %s on %s\n\tis next", "\x1b[31m7", "\x1b]0;owned\x07\x9b")
        logger.info("wrong %d arguments", 1)
        logger.warning("\x1b[2J%s")
    assert caplog.messages[0] == "process \\x1b[31m7 on \\x1b]0;owned\\x07\\x9b\n\tis next"
    assert caplog.messages[1:] == ["wrong 1 arguments", "\\x1b[2J%s"]


def test_a_line_of_the_user_keeps_its_colors(caplog):
    with caplog.at_level(logging.INFO, "jstep"):
        jstep.log_every_n("INFO", "\x1b[31m%d", 1, 7)
    assert caplog.messages == ["\x1b[31m7"]

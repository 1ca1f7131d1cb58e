"""Removal of secrets from configs, command lines, environment variables and messages."""

import contextlib
import re

from jstep.core.checks import truncate
from jstep.core.tables import printable

NOT_RECORDED = "(not recorded)"
_ALWAYS = re.compile(
    r"secret|passw|passphrase|credential|private[_-]?key|authorization", re.IGNORECASE
)
_IF_RANDOM = re.compile(r"(?:key|token|auth)s?$", re.IGNORECASE)
# Also in quotes or brackets.
_RANDOM = re.compile(r"[^\w+=-]*+(?=.*\d)(?=.*[A-Za-z])[\w+=-]{16,}+[^\w+=-]*+")
_TOKEN = re.compile(
    r"-----BEGIN[\s\S]*|\bBearer\s+\S{8,}|\bAKIA[A-Z\d]{12,}"
    r"|\b(?:sk-|hf_|gh[po]_|github_pat_|xoxb-|glpat-)(?=[\w-]{0,64}?(?:\d[A-Za-z]|[a-z][A-Z]))[\w-]{16,}"
    r"|\bBasic\s+(?=[a-zA-Z/+]{0,64}(?:\d|[a-z][A-Z]|=))(?=[\w/+=]{8})"
    r"(?:[\w/+]{4})+(?:[\w/+]{2}==|[\w/+]{3}=)?(?![\w/+=])"
)
"""The forms of well-known tokens."""
# The name begins where a word does and gives nothing back: otherwise the time for a text without
# "=" is quadratic.
_PAIR = re.compile(r"""(?<![\w.-])([\w.-]++)=("[^"]*"|'[^']*'|[^\s,;&]+)""")
_LOGIN = re.compile(r"(\w://)[^\s/]*@")


def hide(name: str, text: str) -> str:
    """Return the text of an option, a variable or a message (`name=""`) without secrets."""
    if _ALWAYS.search(name) or (_IF_RANDOM.search(name) and _RANDOM.fullmatch(text)):
        return NOT_RECORDED
    return _TOKEN.sub(NOT_RECORDED, _LOGIN.sub(r"\1", text))


def error_text(error: BaseException | None) -> str:
    """Return the message of an error without secrets; "" for none."""
    with contextlib.suppress(Exception):
        text = "" if error is None else str(error)[:20_000]
        return hide("", _PAIR.sub(lambda pair: f"{pair[1]}={hide(pair[1], pair[2])}", text))
    return ""


def describe_error(error: BaseException) -> str:
    """Return, in short, an OS error's reason and file, or the kind and text of another error."""
    text = f"{type(error).__name__}: {error_text(error)}"
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        if error.filename:
            text += f": {printable(error.filename)}"
    return truncate(text, 500)

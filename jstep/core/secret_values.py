"""Secrets: the one rule for what must not be recorded of values, command lines, environment variables and texts."""

import contextlib
import re

NOT_RECORDED = "(not recorded)"
"""The placeholder for a secret."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SECRET = re.compile(
    r"secret(?!ar)|passw(?:or)?d|passphrase|(?:^|_)pass_(?:phrase|word|wd)|pwd|credential|authori[sz]ation|private_?key"
)
"""In the name of a value or of a parent: the value is always a secret."""
_NO_KEYS = "monkey|donkey|turkey|hockey|jockey|whiskey|lackey|hickey|mickey"
_IF_LONG = re.compile(rf"(?:^|_)(?!(?:{_NO_KEYS})s?(?:_|$))[a-z]*(?:key|token|auth|authentication)s?(?:_|$)")
"""In the name of a value: a long word is a secret, unlike `num_tokens=1024` and `image_key="image"`."""
_PARENT_IF_LONG = re.compile(r"(?:^|_)[a-z]*auth(?:_|$)|(?:api|access|auth)_?(?:key|token)")
"""The same in the name of a parent: the `image` of `fopen_keys` is no secret."""
_LONG_WORD = re.compile(r"[^\s'\"\[\](){},]{16,}")
_PARTS = re.compile(r"[/.]")

_KNOWN = (
    r"(?:(?<![\w/.\\-])|(?<=\\[nrt]))(?=[A-Za-z0-9_-]{16})"
    r"(?:sk-|hf_|gh[po]_|github_pat_|AKIA|xoxb-|glpat-)[A-Za-z0-9_-]+"
)
_WHOLE = re.compile(
    rf"\s*(?:(?i:bearer)\s+\S|Basic\s+\S|(?i:basic)\s+(?=\S*[A-Z\d=+/])\S)|[\s\S]*?(?:-----BEGIN|{_KNOWN})"
)
"""A value that is a secret whatever its name."""
_IN_TEXT = re.compile(
    rf"-----BEGIN[\s\S]*?(?:-----END[^-]*-----|\Z)|{_KNOWN}"
    r"|(?i:\bbearer\s+)(?:\S{16,}|(?=\S*[\d._=-])\S+)|(?i:\bbasic\s+)(?=\S*[\d=+/])[A-Za-z0-9+/=]{6,}"
)
_MAYBE = re.compile(r"[:=@]|--\w|-----BEGIN|(?i:bearer|basic)\s|sk-|hf_|gh[po]_|github_pat_|AKIA|xoxb-|glpat-")
_MAYBE_NAME = re.compile(r"(?i:key|token|auth|secret|pass|pwd|credential)")
"""What every text with a secret contains, and every name of one; most do not, which is quickly found."""

_LOGIN, _QUERY = re.compile(r"(\w://)[^\s?#]*@"), re.compile(r"(\w://)([^\s?#]*)([?#]\S*)")
_LOGIN_ALONE = re.compile(r"(?<![\w@/.:%+-])[\w.+-]++:[^\s@'\"/\\:=,][^\s'\"]*@(?!sha256:)(?=[\w\[])")
_PAIR = re.compile(
    r"(?<![\w.-])((--)?+[\w.-]++)"
    r"((\\*['\"]?)\s*+(?:[=:]{1,2}>?)\s*+|(?(2)(?:\\*['\"],?)?\s++(?=(\\*+['\"]?+)[^\s-])|(?!)))"
)
"""The name of a pair and what is between it and its value: `--name value` and `'--name', 'value'` are pairs, too."""
_QUOTED = re.compile(r"[bBrRuUfF]{0,2}(\\*['\"])[\s\S]*?(?<!\\)\1")
_BRACKET = re.compile(r"(\\*['\"])(?:[\s\S]*?)(?<!\\)\1|[\[({]|[\])}]")
_BARE, _BARE_LINE = re.compile(r"(?:(?i:bearer|basic|token|digest)\s+)?\S*"), re.compile(r"[^\n,;'\"\[\](){}]*|\S*")
_PLAIN, _NUMBER = re.compile(r"\W*|None|null|[Tt]rue|[Ff]alse"), re.compile(r"[+-]?[\d_.]+(?:e[+-]?\d+)?")
_CLOSING = ",;)]}>'\"`"
MAX_SEARCHED, _MAX_BRACKET = 20_000, 4000
"""The characters of a text that are searched for secrets, of which fewer are shown, and for a closing bracket."""


def is_secret(name: str, value: object, *, in_text: bool = False) -> bool:
    """Whether a value must not be recorded, by the words of its name and of its parents', and by its long words.

    Args:
        in_text: Whether the pair was found in a text, where `keys:` may be followed by paths and names of classes.
    """
    if value is None or isinstance(value, bool):
        return False
    parents, _, own = re.sub(r"(?:/\d+)+$", "", name).rpartition("/")
    above, words = _words(parents), _words(own)
    if _SECRET.search(above) or _SECRET.search(words):
        return True
    return bool(_IF_LONG.search(words) or _PARENT_IF_LONG.search(above)) and _has_long_word(value, in_text)


def _words(name: str) -> str:
    return "_".join(map(str.lower, _WORD.findall(name)))


def _has_long_word(value: object, in_text: bool) -> bool:
    if isinstance(value, list):
        return any(_has_long_word(item, in_text) for item in value)
    words = _LONG_WORD.findall(value) if isinstance(value, str) else ()
    return any(not in_text or max(map(len, _PARTS.split(word))) >= 16 for word in words)


def may_hold_secrets(text: str) -> bool:
    """Whether a text may hold a secret; of most texts it is quickly known that they do not."""
    return _MAYBE.search(text) is not None


def hide_value(name: str, text: str) -> str:
    """Return the text of a value without secrets; NOT_RECORDED if it is one."""
    return NOT_RECORDED if is_secret(name, text) or _WHOLE.match(text, 0, MAX_SEARCHED) else hide(text)


def hide(text: str) -> str:
    """Remove secrets from a text: parts of URLs, values of pairs with such a name, and what looks like a token."""
    if not may_hold_secrets(text):
        return text
    text = without_login(text) if "://" in text else text
    text = _LOGIN_ALONE.sub("", text) if "@" in text else text
    shown, at = list[str](), 0
    for pair in _PAIR.finditer(text):
        name, _, between, *quotes = pair.groups("")
        if not _MAYBE_NAME.search(name):
            continue
        words = _words(name)
        is_always = bool(_SECRET.search(words))
        if pair.start() < at or not (is_always or _IF_LONG.search(words)):
            continue
        end = _end_of_value(text, pair.end(), is_line=":" in between and is_always)
        value = text[pair.end() : end]
        if _PLAIN.fullmatch(value) or (_NUMBER.fullmatch(value) and not is_always):
            continue
        if is_secret(name, value, in_text=True):
            quote = "".join(quotes)
            shown += [text[at : pair.end()], quote, NOT_RECORDED, quote]
            at = end
    return _IN_TEXT.sub(NOT_RECORDED, "".join([*shown, text[at:]]))


def _end_of_value(text: str, at: int, *, is_line: bool) -> int:
    """Return the end of the value of a pair in a text: of a string, of what is in brackets, of a word or a line."""
    if quoted := _QUOTED.match(text, at):
        return quoted.end()
    if text[at : at + 1] in tuple("[({"):
        depth = 0
        for part in _BRACKET.finditer(text, at, at + _MAX_BRACKET):
            depth += (part[0] in "[({") - (part[0] in "])}")
            if not depth:
                return part.end()
        return len(text)
    if text[at : at + 1] in tuple("'\""):
        return len(text)
    found = (_BARE_LINE if is_line else _BARE).match(text, at)
    return at if found is None else at + len(found[0].rstrip(_CLOSING))


def without_login(text: str) -> str:
    """Strip the login, the query and the fragment from all URLs in a text."""

    def without_query(url: re.Match[str]) -> str:
        scheme, place, query = url.groups()
        ending = query[len(query.rstrip(_CLOSING)) :]
        _, colon, port = place.partition("/")[0].rpartition(":")
        is_login = "@" in query and colon and not port.isdecimal()  # its password contains ? or #
        return f"{scheme}{'' if is_login else place}{ending}"

    return _QUERY.sub(without_query, _LOGIN.sub(r"\1", text))


def error_text(error: BaseException | None) -> str:
    """Return the text of an exception without secrets; it may be user-defined and raise."""
    with contextlib.suppress(Exception):
        return hide(str(error)[:MAX_SEARCHED])
    return ""

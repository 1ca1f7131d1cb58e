"""The printed programs of a start, kept beside its card, and the first lines in which two of them differ."""

import contextlib
import difflib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jstep.core.checks import truncate
from jstep.stores.files import read_small

_MAX_BYTES, _MAX_CHARACTERS = 2**16, 2**20
"""The maximum size of the file, and of what is compressed."""
_MAX_LINES, _COMPARED, _MAX_SHOWN = 5, 400, 60
_BOUND = re.compile(r"\b([a-z]+):(?=[a-z]+\d*(?:<\w+>)?\[)")
_WORD = re.compile(r"(= )?\b([a-z]{1,4})\b(?![=<\[])(:)?")
_KEY = re.compile(r"\bkey<\w+>")


def compressed(programs: Mapping[str, str]) -> bytes:
    text = "\f".join(f"{stage}\n{program}" for stage, program in programs.items())[:_MAX_CHARACTERS]
    while len(data := zlib.compress(text.encode(), 9)) > _MAX_BYTES:
        text = text[: len(text) // 2]
    return data


def read_programs(path: str) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError, zlib.error):
        reader = zlib.decompressobj()
        text = reader.decompress(read_small(path, _MAX_BYTES), 4 * _MAX_CHARACTERS).decode("utf-8", "replace")
        pages = (page.partition("\n") for page in text.split("\f"))
        return {stage: program for stage, _, program in pages}
    return {}


def differing_lines(before: str, after: str, *, any_keys: bool = False) -> list[str]:
    """Return the first lines in which two programs differ, without the names of their variables.

    With `any_keys`, PRNG keys of all implementations are equal.
    """
    old, new = (_without_names(_KEY.sub("key", text) if any_keys else text) for text in (before, after))
    same = next((i for i, pair in enumerate(zip(old, new, strict=False)) if len({*pair}) > 1), min(len(old), len(new)))
    old, new = old[same : same + _COMPARED], new[same : same + _COMPARED]
    return list(dict.fromkeys(_replaced(old, new)))[:_MAX_LINES]


def _replaced(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            for x, y in zip([*old[a:b], *[""] * (d - c)], [*new[c:d], *[""] * (b - a)], strict=False):
                if x or y:
                    yield f"{truncate(x, _MAX_SHOWN) or 'nothing'} → {truncate(y, _MAX_SHOWN) or 'nothing'}"


def _without_names(text: str) -> list[str]:
    names = set(_BOUND.findall(text))

    def without(word: Any) -> str:
        return word[0] if word[1] or word[2] not in names else ""

    return [" ".join(_WORD.sub(without, line).split()) for line in text.split("\n")]

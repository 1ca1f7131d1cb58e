"""The cards of runs, found beside their checkpoints or logs and compared."""

import json
from typing import Any

from jstep.loop.card_difference import card_difference
from jstep.stores import join, names_in, opened

_MOST = 40


def last_cards(where: str) -> dict[str, dict[str, Any]]:
    """The card of the last start of each run in a directory or below a URL, by the prefix of its checkpoints.

    Lines that are damaged, or of kinds that this version does not know, are skipped.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        names = [name for name in names_in(where) if name.startswith("timeline.") and name.endswith(".jsonl")]
        for name in names:  # those of objects begin with the time
            with opened(join(where, name)) as file:
                for raw in file:
                    _add(found, raw)
    except OSError:
        return found  # a directory that cannot be read: what is compared says so
    return found


def _add(found: dict[str, dict[str, Any]], raw: bytes) -> None:
    if b'"card"' not in raw:
        return
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if not isinstance(line, dict) or line.get("kind") != "card" or not isinstance(line.get("prefix", "model"), str):
        return
    prefix, programs = line.get("prefix", "model"), line.get("programs")
    if "card" in line:
        found[prefix] = line
    elif prefix in found and isinstance(programs, list) and isinstance(found[prefix].get("programs"), list):
        found[prefix]["programs"] = [*found[prefix]["programs"], *programs]


def differences(a: str, b: str, prefixes: tuple[str | None, str | None]) -> list[str] | None:
    """What differs in the cards of the last starts of two runs, in words; None if one of them has no card.

    Args:
        a: Where the first run is.
        b: Where the second one is.
        prefixes: Those of the checkpoints that are compared, if they are two.
    """
    of_a, of_b = (_of(last_cards(where), prefix) for where, prefix in zip((a, b), prefixes, strict=True))
    pairs = [(prefix, prefix) for prefix in sorted(of_a.keys() & of_b.keys())]
    if not pairs and len(of_a) == len(of_b) == 1:
        pairs = list(zip(of_a, of_b, strict=True))
    if not pairs:
        return None
    return [
        f"{one}: {line}" if len(pairs) > 1 else line
        for one, other in pairs
        for line in card_difference(of_a[one], of_b[other])
    ]


def _of(cards: dict[str, dict[str, Any]], prefix: str | None) -> dict[str, dict[str, Any]]:
    """Only that of a prefix; of all where it is none of a run, such as that of the best checkpoints."""
    return {prefix: cards[prefix]} if prefix in cards and prefix is not None else cards


def text(found: list[str] | None) -> list[str]:
    """The lines that say it; none if there is nothing to say."""
    if found is None:
        return []
    if not found:
        return ["the cards of the last starts do not differ"]
    more = [f"  and {len(found) - _MOST} more (--json lists all)"] if len(found) > _MOST else []
    return ["the cards of the last starts differ:", *(f"  {line}" for line in found[:_MOST]), *more]

"""Reading and comparing the run cards that are stored next to checkpoints or logs."""

from typing import Any

from jstep.hooks.timeline import fields_with

_MOST = 40


def last_cards(where: str) -> dict[str, dict[str, Any]]:
    """Return the card of the last start of each run in a directory or below a URL, by checkpoint prefix.

    Corrupted lines, and lines of a kind that this version does not know, are skipped.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        for line in fields_with(where, "card"):
            _add(found, line)
    except OSError:
        return found  # a directory that cannot be read is reported by the comparison itself
    return found


def _add(found: dict[str, dict[str, Any]], line: dict[str, Any]) -> None:
    if line.get("kind") != "card" or not isinstance(line.get("prefix", "model"), str):
        return
    prefix, programs = line.get("prefix", "model"), line.get("programs")
    if "card" in line:
        found[prefix] = line
    elif prefix in found and isinstance(programs, list) and isinstance(found[prefix].get("programs"), list):
        found[prefix]["programs"] = [*found[prefix]["programs"], *programs]


def differences(a: str, b: str, prefixes: tuple[str | None, str | None]) -> list[str] | None:
    """Return descriptions of the differences between the cards of two runs' last starts; None if a card is missing.

    Args:
        a: The directory of the first run.
        b: The directory of the second run.
        prefixes: The prefixes of the two checkpoints, if two checkpoints are compared.
    """
    of_a, of_b = (_of(last_cards(where), prefix) for where, prefix in zip((a, b), prefixes, strict=True))
    pairs = [(prefix, prefix) for prefix in sorted(of_a.keys() & of_b.keys())]
    if not pairs and len(of_a) == len(of_b) == 1:
        pairs = list(zip(of_a, of_b, strict=True))
    if not pairs:
        return None
    from jstep.loop.card import card_difference  # imports JAX, which is not needed without cards

    return [
        f"{one}: {line}" if len(pairs) > 1 else line
        for one, other in pairs
        for line in card_difference(of_a[one], of_b[other])
    ]


def _of(cards: dict[str, dict[str, Any]], prefix: str | None) -> dict[str, dict[str, Any]]:
    """Return the card of a prefix only; all cards if no run has that prefix, such as that of the best checkpoints."""
    return {prefix: cards[prefix]} if prefix in cards and prefix is not None else cards


def text(found: list[str] | None) -> list[str]:
    """Return the lines to print; empty if a card is missing."""
    if found is None:
        return []
    if not found:
        return ["the cards of the last starts do not differ"]
    more = [f"  and {len(found) - _MOST} more (--json lists all)"] if len(found) > _MOST else []
    return ["the cards of the last starts differ:", *(f"  {line}" for line in found[:_MOST]), *more]

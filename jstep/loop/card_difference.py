"""Describe the differences between the cards of two runs."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jstep.loop.card import PLACES

_SECTIONS = {
    "versions": "",
    "settings": "",
    "environment": "",
    "devices": "devices: ",
    "state": "state: ",
    "batches": "batches: ",
    "stages": "",
    "arguments": "train: ",
}
"""The sections that are compared value by value, and the prefix of their lines."""

_HASHES = {
    "state": {
        "hash": "paths, shapes or dtypes of its leaves differ",
        "sharding": "its leaves are sharded differently",
    },
    "batches": {"hash": "the definition differs"},
}
"""The values that only tell whether a section differs, and the line for each."""

_ABSENT = object()
_MOST = 6
_LONGEST = 80
_PLACE = re.compile(r"/|\\|^\[?[\w.:-]+\]?:\d+$")
_NAME_OF_PLACE = re.compile(r"(DIR|PATH|FILE|ADDRESS|ADDR|HOST|URL)$")


def card_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two cards, one per line. Paths and addresses are not compared.

    Args:
        a: The card of a run, from `jstep.loop.cards`.
        b: The card of another run.

    Returns:
        The differences; empty if the cards are equal.

    Example:
        >>> from jstep.loop.card_difference import card_difference
        >>> card_difference({"batches": {"seed": 0, "rows": 100}}, {"batches": {"seed": 1, "rows": 100}})
        ['batches: seed: 0 in A, 1 in B']
    """
    found: list[str] = []
    for section, begins in _SECTIONS.items():
        one, other = _values(a, section), _values(b, section)
        if section == "environment":
            one, other = _without_places(one, other)
        lines = list(differences("", one, other))
        one, other = _section(a, section), _section(b, section)
        for name, line in _HASHES.get(section, {}).items():
            # A hash adds to other lines only if it is that of the sharding, and the leaves are otherwise the same.
            adds = one.get("hash") == other.get("hash") if name == "sharding" else not lines
            if adds and one.get(name) != other.get(name):
                lines.append(line)
        found += [begins + line for line in lines]
    return [*found, *differences("lanes", a.get("lanes"), b.get("lanes")), *_programs(a, b)]


def _section(card: Mapping[str, Any], section: str) -> dict[str, Any]:
    found = card.get(section)
    return dict(found) if isinstance(found, Mapping) else {}


def _values(card: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The values of a section that are compared one by one."""
    found = _section(card, section)
    if section == "stages":
        return {f"the stage from step {first}": name for first, name in found.items()}
    if section == "environment":  # each XLA flag is separate; its last value counts
        flags = (word.partition("=") for word in str(found.pop("XLA_FLAGS", "")).split())
        return {f"XLA_FLAGS {name}": value or "set" for name, _, value in flags} | found
    left_out = PLACES if section == "arguments" else _HASHES.get(section, ())
    return {name: value for name, value in found.items() if name not in left_out}


def _without_places(*runs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The environment variables of two runs, sorted, without those that hold a path or an address in either."""
    places = {name for of in runs for name in of if _NAME_OF_PLACE.search(name) or _PLACE.search(str(of[name]))}
    for of in runs:
        yield {name: of[name] for name in sorted(of) if name not in places}


def _names(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names in either; in the order of the first if both have the same names, else sorted."""
    return list(a) if a.keys() == b.keys() else sorted({*a, *b})


def differences(name: str, a: Any, b: Any, runs: tuple[str, str] = ("in A", "in B")) -> Iterator[str]:
    """Describe the differences between two JSON values, one per line.

    Args:
        name: The name of the values; empty for dicts whose keys are the names.
        a: The value of a run.
        b: The value of another run.
        runs: How the lines refer to the runs.
    """
    if type(a) is type(b) and a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() == b.keys() == {"0"}:  # one value from step 0 on
            yield from differences(name, a["0"], b["0"], runs)
            return
        for key in _names(a, b):
            yield from differences(f"{name}[{key}]" if name else key, a.get(key, _ABSENT), b.get(key, _ABSENT), runs)
    elif isinstance(a, list) and isinstance(b, list) and all(isinstance(x, str) for x in [*a, *b]):
        only = [[x for x in one if x not in other] for one, other in ((a, b), (b, a))]
        texts = [f"{', '.join(some)} only {run}" for some, run in zip(only, runs, strict=True) if some]
        if texts:
            yield f"{name}: {'; '.join(texts)}"
        else:
            yield f"{name}: another order, {_shown(a)} {runs[0]}, {_shown(b)} {runs[1]}"
    else:
        yield f"{name}: {_shown(a)} {runs[0]}, {_shown(b)} {runs[1]}"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _programs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Compare the programs that both runs have."""
    in_a, in_b = _by_call(a), _by_call(b)
    same_batches = _section(a, "batches") == _section(b, "batches")
    for key in sorted(in_a.keys() & in_b.keys()):
        one, other = in_a[key], in_b[key]
        same_shapes = one.get("batch") == other.get("batch")
        if not same_shapes:
            if same_batches and "rows" in _section(a, "batches"):
                continue  # one run began at a step with another batch size
            yield from differences("batch", one.get("batch"), other.get("batch"))
        if None not in (one.get("optimizer"), other.get("optimizer")):
            yield from differences("step: optimizer", one["optimizer"], other["optimizer"])
        rates = differences("", _section(one, "hyperparameters"), _section(other, "hyperparameters"))
        yield from (f"step: {line}" for line in rates)
        if None not in (one.get("hash"), other.get("hash")) and one["hash"] != other["hash"]:
            stage, steps = key
            name = _section(a, "stages").get(str(stage), "train_step")
            call = f", {steps} steps a call" if steps > 1 else ""
            traced = f"step: the traced {name} (stage from step {stage}{call})"
            if same_shapes:
                yield f"{traced} differs: {_why(one, other)}"
            elif operations := _counts("operations", one, other):
                yield f"{traced} differs, on batches of different shapes: {operations}"
            else:
                yield f"{traced} has the same operations; its numbers were not compared, as the batches differ in shape"


def _by_call(card: Mapping[str, Any]) -> dict[tuple[int, int], Mapping[str, Any]]:
    programs = card.get("programs")
    return {
        (one["stage"], one["steps"]): one
        for one in (programs if isinstance(programs, list) else ())
        if isinstance(one, Mapping) and type(one.get("stage")) is int and type(one.get("steps")) is int
    }


def _why(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    parts = [part for what in ("numbers", "operations") if (part := _counts(what, a, b))]
    return "; ".join(parts) or "the same numbers and operations, in another order or on other shapes and constants"


def _counts(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The numbers or operations that the programs have in different counts; empty if there are none."""
    one, other = _section(a, what), _section(b, what)
    changed = [name for name in _names(one, other) if one.get(name, 0) != other.get(name, 0)]
    some = ", ".join(f"{name} ({one.get(name, 0)} in A, {other.get(name, 0)} in B)" for name in changed[:_MOST])
    more = f" and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
    return f"{what} {some}{more}" if changed else ""

"""The cards of a timeline: what each start of a run ran on, and with."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from jstep.core.checks import format_value
from jstep.stores.timeline import CODE, CONFIG, START, fields_with, is_seconds, is_step

VERSION = 1
"""The version of the cards."""

PLACES = ("checkpoint_dir", "logdir", "compile_cache", "start_from")
"""Arguments that name the directories of a run: recorded, never compared."""

NOT_READY = "(not ready)"
"""The placeholder for an option that a thread still converts."""
SETTINGS: Mapping[str, object] = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_numpy_dtype_promotion": "standard",
    "jax_explicit_x64_dtypes": "1",
    "jax_random_seed_offset": "0",
    "jax_high_dynamic_range_gumbel": False,
    "jax_softmax_custom_jvp": False,
    "jax_allow_f16_reductions": True,
    "jax_disable_jit": False,
    "jax_disable_most_optimizations": None,
    "jax_optimization_level": "UNKNOWN",
    "jax_exec_time_optimization_effort": "0.0",
}
"""Settings of JAX that change numerical results, wherever they were set, and their defaults as cards have them."""

SECTIONS = {
    "versions": "",
    "settings": "",
    "environment": "",
    "devices": "devices: ",
    "state": "state: ",
    "batches": "batches: ",
    "stages": "",
    "arguments": "train: ",
    CONFIG: "config: ",
}
"""The sections that are compared value by value, and the prefix of their lines."""

# The cards of a timeline.


@dataclasses.dataclass
class Start:
    """One start of a run.

    Attributes:
        card: The card with all of its programs; None if the start wrote none, or if its line is torn or invalid.
        problem: Why its card is invalid, as a sentence, or "".
    """

    id: str
    prefix: str
    time: float | None = None
    card: dict[str, Any] | None = None
    problem: str = ""


def read_starts(where: str, start: str = "") -> list[Start]:
    """Return all starts below a directory or URL, in order. Corrupted and unknown lines are skipped.

    If only `start` is needed, others may be left out.
    """
    starts: list[Start] = []
    latest: dict[tuple[str, str], Start] = {}
    later: dict[int, dict[str, Any]] = {}  # the sections that have lines of their own
    for line in fields_with(where, "card", "version", CODE, CONFIG, start=start):
        kind, prefix, programs = line.get("kind"), line.get("prefix", "model"), line.get("programs")
        if kind not in (START, "card", CODE, CONFIG) or not isinstance(prefix, str):
            continue
        key = prefix, str(line.get("start"))
        entry = latest.get(key)
        if entry is None or ("card" in line and entry.card is not None):
            entry = latest[key] = Start(key[1], prefix)
            starts.append(entry)
        if kind == START:
            entry.time = line["time"] if is_seconds(line.get("time")) else None
        elif kind == CODE:
            code = {name: line.get(name) for name in ("commit", "edits")}
            code = {name: text if isinstance(text, str) else None for name, text in code.items()}
            later.setdefault(id(entry), {})[CODE] = code
        elif kind == CONFIG:
            later.setdefault(id(entry), {})[CONFIG] = line.get(CONFIG)
        elif "card" in line:
            entry.card = line
        elif entry.card is not None and isinstance(programs, list) and isinstance(entry.card.get("programs"), list):
            entry.card["programs"] += programs
    for entry in starts:
        if entry.card is not None:
            entry.card |= later.get(id(entry), {})
            if invalid := _invalid(entry.card):
                is_newer = is_step(version := entry.card["card"]) and version > VERSION
                why = f"of a newer version ({version})" if is_newer else f"invalid: {', '.join(invalid[:3])}"
                entry.card, entry.problem = None, f"its card is {why}"
    return starts


def start_with_card(starts: Sequence[Start], prefix: str, trained: str | None) -> Start | None:
    """Return the start whose card is that of a run: the newest one, up to the one that was trained, that has a card.

    Its card may be invalid: then `problem` says why, and an older card does not replace it.

    Args:
        starts: The starts of all runs of a directory, in order.
        prefix: The prefix of the run.
        trained: The name of the start that was trained; if it is not among the starts, the newest one counts as that.
    """
    own = [start for start in starts if start.prefix == prefix]
    last = next((i for i, start in enumerate(own) if start.id == trained), len(own) - 1)
    return next((start for start in reversed(own[: last + 1]) if start.card or start.problem), None)


def _invalid(card: Mapping[str, Any]) -> list[str]:
    """Return the values of a card that functions of this file could not take; they are checked nowhere else."""
    found = _wrong(
        "", card, {"card": is_step, "step": is_step, "lanes": _is_lanes, "programs": _is_list, "stages": _is_stages}
    )
    found += _wrong("", card, dict.fromkeys(SECTIONS, _is_dict))
    for program in card.get("programs") or () if not found else ():
        found += (
            _wrong("programs: ", program, _OF_PROGRAM) if _is_dict(program) else [f"programs={format_value(program)}"]
        )
    return found


def _wrong(begins: str, values: Mapping[str, Any], checks: Mapping[str, Callable[[Any], bool]]) -> list[str]:
    found = {
        name: values[name]
        for name, is_valid in checks.items()
        if values.get(name) is not None and not is_valid(values[name])
    }
    return [f"{begins}{name}={format_value(value, 40)}" for name, value in found.items()]


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_stages(value: Any) -> bool:
    """Whether the keys are steps."""
    return isinstance(value, dict) and all(len(key) < 20 and key.isdecimal() for key in value)


def _is_lanes(value: Any) -> bool:
    return _is_stages(value) if isinstance(value, dict) else is_step(value)


_OF_PROGRAM: dict[str, Callable[[Any], bool]] = {
    "stage": is_step,
    "optimizer": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "elements": lambda value: isinstance(value, dict) and all(map(_is_dict, value.values())),
    "hash": lambda value: isinstance(value, str),
    **dict.fromkeys(("hyperparameters", "operations", "numbers", "gradients"), _is_dict),
}


def is_whole(card: object) -> TypeGuard[dict[str, Any]]:
    """Whether a card is of this version and complete."""
    return (
        isinstance(card, dict)
        and card.get("card") == VERSION
        and all(isinstance(card.get(name), dict) for name in SECTIONS if name != CONFIG)
        and isinstance(card.get("programs"), list)
    )

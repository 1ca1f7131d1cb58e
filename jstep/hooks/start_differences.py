"""The differences of two starts, name by name, and which of these change the bits of a resumed run."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from jstep.core.checks import truncate
from jstep.core.plain import NOT_RECORDED

SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion", "jax_explicit_x64_dtypes", "jax_random_seed_offset",
    "jax_high_dynamic_range_gumbel", "jax_softmax_custom_jvp", "jax_allow_f16_reductions", "jax_disable_jit",
    "jax_disable_most_optimizations", "jax_optimization_level", "jax_exec_time_optimization_effort",
)  # fmt: skip
"""Settings of JAX that change numerical results, wherever they were set."""
PLACES = ("checkpoint_dir", "logdir", "compile_cache", "start_from")
"""Arguments that name the directories of a run: recorded, never compared."""
SECTIONS = {
    "versions": "", "settings": "", "environment": "", "devices": "devices: ", "state": "state: ",
    "batches": "batches: ", "stages": "stages: ", "arguments": "train: ", "lanes": "", "programs": "",
    "config": "config: ", "code": "",
}  # fmt: skip
"""The sections that are compared, and how the names of their values begin."""
_BITS = ("settings", "state", "batches", "lanes", "programs", "config")
_PLACE = ("versions", "devices", "code", "state: sharding", "train: batch_sharding")
"""Sections and values whose differences change the bits, or only the place; others are on purpose."""
_TRACED = {"settings", "versions", "devices", "state", "lanes", "programs"}
"""Sections that enter the trace of a step."""
_HARMLESS_FLAG = re.compile("dump|log|profil|path|dir$|device_count")
_PATH = re.compile(r"(~|\.{0,2})[/\\]|[A-Za-z]:[\\/]|\w+://")
_ABSENT = object()
IN_A_AND_B, BEFORE_AND_NOW = ("in A", "in B"), ("before", "now")


def values_of(start: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the values of a start that are compared, by name, each with its section."""
    card = start.get("card") or {}
    named: dict[str, tuple[str, Any]] = {}
    code = " ".join(filter(None, (start.get("commit"), start.get("edits") and f"with edits {start['edits'][:8]}")))
    parts = {
        **card,
        "config": start.get("config"),
        "code": {"code": code or None},
        "lanes": {"lanes": card.get("lanes")},
    }
    parts["programs"] = {key: of for program in card.get("programs") or () for key, of in _program(program).items()}
    for section, begins in SECTIONS.items():
        for name, value in _flat("", parts.get(section) or {}).items():
            if not (name in PLACES or (section in ("config", "environment") and _is_place(value))):
                named[f"{begins}{name}"] = section, value
    return named


def _program(program: Mapping[str, Any]) -> dict[str, Any]:
    stage, elements = f"[{program['stage']}]" if program.get("stage") else "", program.get("optimizer") or {}
    if elements:  # these have the hyperparameters
        often = Counter(name for of in elements.values() for name in of)
        pairs = [
            (name if often[name] == 1 else f"{element}.{name}", of[name])
            for element, of in elements.items()
            for name in of
        ]
        values = {"optimizer": ", ".join(elements), **dict(pairs)}
    else:
        values = program.get("hyperparameters") or {}
    values = {**values, "batch": program.get("batch"), "the traced step": program.get("hash")}
    return {f"{name}{stage}": value for name, value in values.items()}


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and bool(_PATH.match(value) or value == NOT_RECORDED or os.path.isabs(value))


def _flat(begins: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, dict) or not value:
            flat[f"{begins}{name}"] = value
        else:
            flat |= _flat(f"{begins}{name}", {f"[{key}]": entry for key, entry in value.items()})
    return flat


class Changes(NamedTuple):
    """Differences that change the bits, and differences of versions, devices and layout."""

    bits: list[str]
    place: list[str]
    others: list[str]

    @property
    def lines(self) -> list[str]:
        return [*self.bits, *self.place, *self.others]


def changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    words: tuple[str, str] = BEFORE_AND_NOW,
    leave_out: tuple[str, ...] = (),
) -> Changes:
    """Describe the differences of two starts, each in a line.

    Example:
        >>> from jstep.hooks.start_differences import changes
        >>> changes({"card": {"batches": {"seed": 0}}}, {"card": {"batches": {"seed": 1}}}).bits
        ['batches: seed: 0 before, 1 now']
    """
    a, b = values_of(before), values_of(now)
    found = Changes([], [], [])
    differ = [name for name in a | b if not same(a.get(name, (0, _ABSENT))[1], b.get(name, (0, _ABSENT))[1])]
    sections = {(a.get(name) or b[name])[0] for name in differ if not _is_hash(name)}
    for name in differ:
        section = (a.get(name) or b[name])[0]
        one, other = (of[name][1] if name in of else _ABSENT for of in (a, b))
        # A version that does not record a setting, and a start without a program, say nothing about it.
        is_unknown = any(x is _ABSENT or (x is None and section != "settings") for x in (one, other))
        if section in leave_out or (section in ("settings", "programs", "code") and is_unknown):
            continue
        if name.startswith("the traced step") and sections & _TRACED:
            continue  # they say why
        if _is_hash(name):
            if section in sections:
                continue  # its other values say why
            line = f"{name.removesuffix(': hash')} differ{'s' if name.startswith('the traced') else ''}"
        else:
            line = f"{name}: {_shown(one, other)} {words[0]}, {_shown(other, one)} {words[1]}"
        is_flag = name.startswith("XLA_FLAGS") and not _HARMLESS_FLAG.search(f"{one} {other}")
        effect = (
            found.place if section in _PLACE or name in _PLACE else found.bits if section in _BITS else found.others
        )
        (found.bits if is_flag else effect).append(line)
    return found


def _is_hash(name: str) -> bool:
    return name.endswith(": hash") or name.startswith("the traced step")


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: 1 is not true."""
    return one is other or (
        _ABSENT not in (one, other) and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    )


def _shown(value: Any, other: Any) -> str:
    if value is _ABSENT:
        return "absent"
    is_plain = isinstance(value, str) and value and str(other) != value
    return truncate(value if is_plain else json.dumps(value), 80)

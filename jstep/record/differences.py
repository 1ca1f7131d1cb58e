"""The differences of two starts, name by name, and which of these change the bits of a resumed run."""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.core.checks import in_own_digits, truncate
from jstep.core.secret_text import NOT_RECORDED
from jstep.record.starts import read_programs

SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion", "jax_explicit_x64_dtypes", "jax_random_seed_offset",
    "jax_high_dynamic_range_gumbel", "jax_softmax_custom_jvp", "jax_allow_f16_reductions", "jax_disable_jit",
    "jax_disable_most_optimizations", "jax_optimization_level", "jax_exec_time_optimization_effort",
)  # fmt: skip
"""Settings of JAX that change numerical results, wherever they were set."""
_PRNG = "jax_default_prng_impl"
SECTIONS = {
    "versions": "", "settings": "", "environment": "", "devices": "devices: ", "state": "state: ",
    "batches": "batches: ", "stages": "the stage from step ", "arguments": "train: ", "lanes": "", "programs": "",
    "config": "config: ", "code": "",
}  # fmt: skip
"""The sections that are compared, and how the names of their values begin."""
HASHES = {
    "state: hash": "state: paths, shapes or dtypes of its leaves differ",
    "state: sharding": "state: its leaves are sharded differently",
    "batches: hash": "batches: the definition differs",
    "the traced step": "the traced step differs",
}
"""Values that only tell whether something differs, and the line for each."""
IN_A_AND_B, BEFORE_AND_NOW = ("in A", "in B"), ("before", "now")

# Sections whose differences change the bits, and sections about where the same run is computed; others are intended.

_BITS = {"settings", "state", "batches", "lanes", "programs", "config"}
_PLACE = {"versions", "devices", "code"}
_EFFECTS = {"state: sharding": _PLACE, "train: batch_sharding": _PLACE, "batch": set[str]()}
"""Values with another effect than their section."""
_HARMLESS_FLAG = re.compile("dump|log|profil|path|dir|device_count")
_PATH_OPTIONS = ("checkpoint_dir", "logdir", "compile_cache", "start_from")
_NAMES = dict.fromkeys(("steps", "num_steps", "max_steps", "total_steps", "train_steps"), "last_step")
"""Name of an option → the argument of `train` with the same meaning."""
_ADDRESS = re.compile("COORDINATOR|ADDRESS|PORT$|PROCESS_ID")
_PATH = re.compile(r"(~|\.{0,2})[/\\]|[A-Za-z]:[\\/]|\w+://")
_TRACED = {"versions", "devices", "train: batch_sharding"}
"""Sections and values that may change the trace of a step without changing its bits."""
_ABSENT = object()


def values_of(start: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    card = start.get("card") or {}
    commit = start.get("commit")
    edits = start.get("edits")
    arguments = card.get("arguments") or {}
    run_paths = [path for name in _PATH_OPTIONS if isinstance(path := arguments.get(name), str)]
    code = None if commit is None else f"commit {commit[:8]}{f' with edits {edits} not committed' if edits else ''}"
    environ = card.get("environment") or {}
    flags = (word.partition("=") for word in str(environ.get("XLA_FLAGS", "")).split())
    variables = {name: value for name, value in environ.items() if name != "XLA_FLAGS" and not _ADDRESS.search(name)}
    parts: dict[str, Any] = {
        **card,
        "environment": {**{f"XLA_FLAGS {name}": value or "set" for name, _, value in flags}, **variables},
        "config": start.get("config"),
        "code": {} if code is None else {"code": code},
        "lanes": {"lanes": card.get("lanes")} if "lanes" in card else {},
        "programs": {
            (f"{name}[{program['stage']}]" if program.get("stage") else name): value
            for program in card.get("programs") or ()
            for name, value in {
                **(program.get("hyperparameters") or {}),
                "batch": program.get("batch"),
                "the traced step": program.get("hash"),
            }.items()
        },
    }
    return {
        name: (section, value)
        for section, begins in SECTIONS.items()
        for name, value in _flat(begins, parts.get(section) or {})
        if name.removeprefix("train: ").removeprefix("config: ") not in _PATH_OPTIONS
        and not (section in ("config", "environment") and isinstance(value, str) and _is_path(value, run_paths))
    }


def _is_path(value: str, run_paths: Collection[str]) -> bool:
    is_of_run = "/" in value and any(f"{value}/".startswith(f"{path}/") for path in run_paths)
    return is_of_run or _PATH.match(value) is not None


def _flat(begins: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            # The key of step 0 is omitted, as for the first program.
            yield from _flat(
                f"{begins}{name}", {"" if key == "0" else f"[{key}]": entry for key, entry in value.items()}
            )
        else:
            yield f"{begins}{name}", value


class Changes(NamedTuple):
    bits: list[str]
    place: list[str]
    others: list[str]

    @property
    def lines(self) -> list[str]:
        return [*self.bits, *self.place, *self.others]


def changes(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    words: tuple[str, str] = BEFORE_AND_NOW,
    leave_out: Collection[str] = (),
) -> Changes:
    a, b = values_of(before), values_of(after)
    found = Changes([], [], [])
    sections = {section for section, _ in a.values()} & {section for section, _ in b.values()} - {*leave_out}
    differ = dict[str, tuple[str, Any, Any]]()
    for name in dict.fromkeys([*a, *b]):
        section = (a.get(name) or b[name])[0]
        old, new = (values.get(name, ("", _ABSENT))[1] for values in (a, b))
        is_known = _ABSENT not in (old, new) or section not in ("settings", "programs")
        is_known = is_known and not is_setting(name, section, a)  # which has a line of its own
        if section in sections and is_known and not same(old, new) and NOT_RECORDED not in (old, new):
            differ[name] = (section, old, new)
    # The sections and the values that are named as different; a hash names none.
    named = {word for name in differ.keys() - HASHES.keys() for word in (differ[name][0], _stem(name))}
    # Batches of other shapes, and other devices of lanes, are traced differently by every step.
    is_comparable = "batch" not in named and not ("devices" in named and (after.get("card") or {}).get("lanes"))
    for name, (section, old, new) in differ.items():
        option = name.removeprefix("config: ").rpartition("/")[2]
        of_train = differ.get(f"train: {_NAMES.get(option, option)}", (None,))[1:]  # such as last_step
        if (section == "config" and (old, new) == of_train) or (section == "state" and "jax_enable_x64" in differ):
            continue
        if (stem := _stem(name)) in HASHES:
            text = HASHES[stem] + (_how_programs_differ(name, (before, after), words) if section == "programs" else "")
            is_program = section == "programs"
            lines = found.place if is_program and _TRACED & named else _list_of(found, stem, section)
            is_shown = is_comparable if is_program else not {section, "devices"} & named
            if is_shown and not any(line.startswith(HASHES[stem]) for line in lines):
                lines.append(text)
        elif not (stem == "train: batch_sharding" and "devices" in named):  # its meshes are those of the devices
            line = f"{name}: {_shown(old, new)} {words[0]}, {_shown(new, old)} {words[1]}"
            _list_of(found, stem, section).append(line)
    return found


def is_setting(name: str, section: str, values: Collection[str]) -> bool:
    """Whether an environment variable sets one of the values."""
    return section == "environment" and name.startswith("JAX_") and name.lower() in values


def _how_programs_differ(name: str, starts: Sequence[Mapping[str, Any]], words: tuple[str, str]) -> str:
    stage = name.partition("[")[2].rstrip("]") or "0"
    pair = [_program_at(stage, start) for start in starts]
    parts = {"gradients": "loss and gradients", "update": "update"}
    known = {key: part for key, part in parts.items() if all(program.get(key) for program in pair)}
    differ = [part for key, part in known.items() if len({program[key] for program in pair}) > 1]
    clauses = [f"in its {' and its '.join(differ)}"] if differ else []
    optimizers = [program.get("optimizer") for program in pair]
    are_named = _differ_in_hyperparameters(*pair)
    if None not in optimizers and optimizers[0] != optimizers[1] and not are_named:
        clauses.append(f"{optimizers[0]} {words[0]}, {optimizers[1]} {words[1]}")
    if are_named and differ == ["update"]:  # its lines would only repeat them
        return f" ({clauses[0]})"
    texts = [read_programs(str(start.get("programs", ""))).get(stage, "") for start in starts]
    impls = {str(((start.get("card") or {}).get("settings") or {}).get(_PRNG)) for start in starts}
    clauses += differing_lines(*texts, any_keys=len(impls) > 1) if all(texts) else []
    return f" ({'; '.join(clauses)})" if clauses else ""


def _differ_in_hyperparameters(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    old, new = (program.get("hyperparameters") or {} for program in (before, after))
    texts = [program.get("optimizer") or "" for program in (before, after)]
    for name in old.keys() & new.keys():
        values = [in_own_digits(value) if isinstance(value, float) else value for value in (old[name], new[name])]
        key = name.rpartition("/")[2]  # of several parts, perhaps with equal values
        pattern = rf"\b{re.escape(key)}=({'|'.join(re.escape(str(value)) for value in values)})(?=[,)])"
        texts = [re.sub(pattern, f"{key}=", text) for text in texts]
    return old != new and texts[0] == texts[1]


def _program_at(stage: str, start: Mapping[str, Any]) -> Mapping[str, Any]:
    programs = (start.get("card") or {}).get("programs") or ()
    return next((program for program in programs if str(program.get("stage") or 0) == stage), {})


def _stem(name: str) -> str:
    return name.partition("[")[0]


def _list_of(found: Changes, name: str, section: str) -> list[str]:
    effect = _EFFECTS.get(name, {section})
    is_flag = name.startswith("XLA_FLAGS ") and not _HARMLESS_FLAG.search(name)
    return found.bits if is_flag or effect & _BITS else found.place if effect & _PLACE else found.others


def same(a: Any, b: Any) -> bool:
    if a is _ABSENT or b is _ABSENT:
        return a is b
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _shown(value: Any, other: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, float) and isinstance(other, float) and in_own_digits(value) != in_own_digits(other):
        value = in_own_digits(value)
    is_plain = isinstance(value, str) and value and str(other) != value
    return truncate(value if is_plain else json.dumps(value), 80)


# The first lines in which two printed programs differ.

_MAX_LINES, _COMPARED, _MAX_SHOWN = 5, 400, 60
_BOUND = re.compile(r"\b([a-z]+):(?=[a-z]+\d*(?:<\w+>)?\[)")
_WORD = re.compile(r"(= )?\b([a-z]{1,4})\b(?![=<\[])(:)?")
_KEY = re.compile(r"\bkey<\w+>")


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

"""The differences of two starts, name by name, and which of them change a resumed run's bits."""

import difflib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.core.checks import shortest_digits, truncate
from jstep.core.secret_text import NOT_RECORDED
from jstep.record.starts import read_programs

SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_numpy_dtype_promotion", "jax_explicit_x64_dtypes",
    "jax_random_seed_offset", "jax_high_dynamic_range_gumbel", "jax_softmax_custom_jvp",
    "jax_allow_f16_reductions", "jax_disable_jit", "jax_disable_most_optimizations",
    "jax_optimization_level", "jax_exec_time_optimization_effort",
)  # fmt: skip
"""Settings of JAX that change numerical results, wherever they were set."""
_PRNG = "jax_default_prng_impl"
SECTIONS = {
    "versions": "", "settings": "", "environment": "", "devices": "devices: ", "state": "state: ",
    "batches": "batches: ", "stages": "the stage from step ", "arguments": "train: ", "lanes": "",
    "programs": "", "config": "config: ", "code": "",
}  # fmt: skip
"""The sections that are compared, and how the names of their values begin."""
_TRACED_STEP = "the traced step"
HASHES = {
    "state: hash": "state: paths, shapes or dtypes of its leaves differ",
    "state: sharding": "state: its leaves are sharded differently",
    "batches: hash": "batches: the definition differs",
    _TRACED_STEP: "the traced step differs",
}
"""Values that only tell whether something differs, and the line for each."""
PAIR_WORDS = ("in A", "in B")
RESTART_WORDS = ("before", "now")
"""What the lines call two starts."""

# Sections whose differences change the bits, and sections about where the same run is computed;
# others are intended.

_BITS = {"settings", "state", "batches", "lanes", "programs", "config"}
_PLACE = {"versions", "devices", "code"}
_EFFECTS = {"state: sharding": _PLACE, "train: batch_sharding": _PLACE, "batch": set[str]()}
"""Values with another effect than their section."""
_HARMLESS_FLAG = re.compile("dump|log|profil|path|dir|device_count")
PATH_OPTIONS = ("checkpoint_dir", "logdir", "compile_cache", "start_from")
"""The arguments of `train` that are places."""
_NAMES = dict.fromkeys(
    ("steps", "num_steps", "max_steps", "total_steps", "train_steps"), "last_step"
)
"""Name of an option → the argument of `train` with the same meaning."""
_ADDRESS = re.compile("COORDINATOR|ADDRESS|PORT$|PROCESS_ID")
_PATH = re.compile(r"(~|\.{0,2})[/\\]|[A-Za-z]:[\\/]|\w+://")
_TRACED = {"versions", "devices", "train: batch_sharding"}
"""Sections and values that may change the trace of a step without changing its bits."""
_ABSENT = object()


class RecordedValue(NamedTuple):
    section: str
    value: Any


def values_of(start: Mapping[str, Any]) -> dict[str, RecordedValue]:
    """Return what a start was given, as name → (section, value).

    Paths are left out: a run that moved is the same.
    """
    setup = start.get("setup") or {}
    arguments = setup.get("arguments") or {}
    run_paths: list[str] = []
    for name in PATH_OPTIONS:
        path = arguments.get(name)
        if isinstance(path, str):
            run_paths.append(path)
    parts: dict[str, Any] = {
        **setup,
        "environment": _environment(setup.get("environment") or {}),
        "config": start.get("config"),
        "code": _code(start),
        "lanes": {"lanes": setup.get("lanes")} if "lanes" in setup else {},
        "programs": _programs(setup.get("programs") or ()),
    }
    values: dict[str, RecordedValue] = {}
    for section, begins in SECTIONS.items():
        for name, value in _flat(begins, parts.get(section) or {}):
            if name.removeprefix("train: ").removeprefix("config: ") in PATH_OPTIONS:
                continue
            # Also without a name that says so: an option, or a variable, may be a path in the
            # directory of the run.
            if (
                section in ("config", "environment")
                and isinstance(value, str)
                and _is_path(value, run_paths)
            ):
                continue
            values[name] = RecordedValue(section, value)
    return values


def _environment(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, and each flag of XLA by itself."""
    values: dict[str, Any] = {}
    for word in str(variables.get("XLA_FLAGS", "")).split():
        name, _, value = word.partition("=")
        values[f"XLA_FLAGS {name}"] = value or "set"
    for name, value in variables.items():
        # Addresses and ports are others in each start of several processes.
        if name != "XLA_FLAGS" and not _ADDRESS.search(name):
            values[name] = value
    return values


def _code(start: Mapping[str, Any]) -> dict[str, str]:
    commit = start.get("commit")
    if commit is None:
        return {}
    edits = start.get("edits")
    suffix = f" with edits {edits} not committed" if edits else ""
    return {"code": f"commit {commit[:8]}{suffix}"}


def _programs(programs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What each program was compiled for; the names of stage 0 have no number."""
    values: dict[str, Any] = {}
    for program in programs:
        stage = program.get("stage")
        suffix = f"[{stage}]" if stage else ""
        for name, value in (program.get("hyperparameters") or {}).items():
            values[f"{name}{suffix}"] = value
        values[f"batch{suffix}"] = program.get("batch")
        values[f"{_TRACED_STEP}{suffix}"] = program.get("hash")
    return values


def _is_path(value: str, run_paths: Collection[str]) -> bool:
    if _PATH.match(value):
        return True
    # A relative path such as "runs/a/plots" looks like any other option with a slash, unless the
    # run is there.
    return "/" in value and any(f"{value}/".startswith(f"{path}/") for path in run_paths)


def _flat(begins: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            # The key of step 0 is omitted, as for the first program.
            inner = {"" if key == "0" else f"[{key}]": entry for key, entry in value.items()}
            yield from _flat(f"{begins}{name}", inner)
        else:
            yield f"{begins}{name}", value


class Changes(NamedTuple):
    """The lines about two starts.

    Attributes:
        bits: What changes the bits of a run that is resumed.
        place: What says where it is computed, which may change them.
        others: What is intended, such as a later last step.
    """

    bits: list[str]
    place: list[str]
    others: list[str]

    @property
    def lines(self) -> list[str]:
        return [*self.bits, *self.place, *self.others]

    def list_of(self, name: str, section: str) -> list[str]:
        """Return the list in which a value has its line."""
        effect = _EFFECTS.get(name, {section})
        is_xla_flag = name.startswith("XLA_FLAGS ") and not _HARMLESS_FLAG.search(name)
        if is_xla_flag or effect & _BITS:
            return self.bits
        if effect & _PLACE:
            return self.place
        return self.others


class _Difference(NamedTuple):
    """A value that differs; `old` or `new` is `_ABSENT` if one of the starts does not have it."""

    section: str
    old: Any
    new: Any


def changes(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    words: tuple[str, str] = RESTART_WORDS,
    leave_out: Collection[str] = (),
) -> Changes:
    """Describe what differs between two starts, in sections that both of them have.

    Args:
        words: What the lines call the two.
        leave_out: Sections that are not compared.
    """
    differing = _differing_values(values_of(first), values_of(second), leave_out)
    # A hash says only that something differs. So we first collect what differs by name, the
    # sections and the values, and show a hash only if nothing that has a name explains it.
    named: set[str] = set()
    for name, difference in differing.items():
        if name not in HASHES:
            named |= {difference.section, _stem(name)}
    # Batches of other shapes, and other devices of lanes, are traced differently by every step.
    has_lanes = bool((second.get("setup") or {}).get("lanes"))
    is_comparable = "batch" not in named and not ("devices" in named and has_lanes)
    found = Changes([], [], [])
    shown: set[str] = set()  # the hashes that have a line: that of the first program stands for all
    for name, difference in differing.items():
        section, old, new = difference
        stem = _stem(name)
        if stem in shown or _has_another_line(name, difference, differing, named):
            continue
        lines = found.list_of(stem, section)
        if stem not in HASHES:
            lines.append(f"{name}: {_shown(old, new)} {words[0]}, {_shown(new, old)} {words[1]}")
        elif stem == _TRACED_STEP:
            if not is_comparable:
                continue
            shown.add(stem)
            if _TRACED & named:
                lines = found.place
            lines.append(HASHES[stem] + _how_programs_differ(name, (first, second), words))
        elif not {section, "devices"} & named:  # other devices have other shardings
            shown.add(stem)
            lines.append(HASHES[stem])
    return found


def _has_another_line(
    name: str, difference: _Difference, differing: Mapping[str, _Difference], named: Collection[str]
) -> bool:
    """Whether the line of another value says what differs."""
    if difference.section == "config":
        return _is_argument(name, difference.old, difference.new, differing)
    if difference.section == "state":
        return "jax_enable_x64" in differing
    # The meshes of a sharding are those of the devices.
    return _stem(name) == "train: batch_sharding" and "devices" in named


def _differing_values(
    first: Mapping[str, RecordedValue],
    second: Mapping[str, RecordedValue],
    leave_out: Collection[str],
) -> dict[str, _Difference]:
    sections_of_first = {value.section for value in first.values()}
    sections_of_second = {value.section for value in second.values()}
    sections = (sections_of_first & sections_of_second) - {*leave_out}
    differing: dict[str, _Difference] = {}
    for name in dict.fromkeys([*first, *second]):
        section = (first.get(name) or second[name]).section
        # A setting has a line of its own, wherever it was set.
        if section not in sections or is_setting(name, section, first):
            continue
        old = first[name].value if name in first else _ABSENT
        new = second[name].value if name in second else _ABSENT
        is_in_both = old is not _ABSENT and new is not _ABSENT
        if not is_in_both and section in ("settings", "programs"):
            continue  # another version of JAX has other settings, and another stage other programs
        if NOT_RECORDED in (old, new) or same(old, new):
            continue
        differing[name] = _Difference(section, old, new)
    return differing


def _is_argument(name: str, old: Any, new: Any, differing: Mapping[str, _Difference]) -> bool:
    """Return whether an option is an argument of `train`, such as last_step, with its own line."""
    option = name.removeprefix("config: ").rpartition("/")[2]
    argument = differing.get(f"train: {_NAMES.get(option, option)}")
    return argument is not None and (argument.old, argument.new) == (old, new)


def is_setting(name: str, section: str, values: Collection[str]) -> bool:
    """Whether an environment variable sets one of the values."""
    return section == "environment" and name.startswith("JAX_") and name.lower() in values


def _how_programs_differ(
    name: str, starts: Sequence[Mapping[str, Any]], words: tuple[str, str]
) -> str:
    """Say in which part two programs differ, by which optimizers, and in which lines.

    It is "" if that is not known.
    """
    stage = name.partition("[")[2].rstrip("]") or "0"
    first, second = (_program_at(stage, start) for start in starts)
    parts: list[str] = []
    for key, part in _PARTS.items():
        if first.get(key) and second.get(key) and first[key] != second[key]:
            parts.append(part)
    clauses = [f"in its {' and its '.join(parts)}"] if parts else []
    optimizer = first.get("optimizer")
    other = second.get("optimizer")
    # Values of hyperparameters have lines of their own.
    are_named = _differ_in_hyperparameters(first, second)
    if None not in (optimizer, other) and optimizer != other and not are_named:
        clauses.append(f"{optimizer} {words[0]}, {other} {words[1]}")
    if are_named and parts == [_PARTS["update"]]:
        return f" ({clauses[0]})"  # the lines of the programs would only repeat them
    texts = [read_programs(str(start.get("programs", ""))).get(stage, "") for start in starts]
    if all(texts):
        settings = [(start.get("setup") or {}).get("settings") or {} for start in starts]
        implementations = {str(values.get(_PRNG)) for values in settings}
        clauses += differing_lines(*texts, any_keys=len(implementations) > 1)
    return f" ({'; '.join(clauses)})" if clauses else ""


_PARTS = {"gradients": "loss and gradients", "update": "update"}
"""The hashes of a program's parts, and what these are."""


def _differ_in_hyperparameters(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two programs have one optimizer with other values of its hyperparameters."""
    old = first.get("hyperparameters") or {}
    new = second.get("hyperparameters") or {}
    values: dict[str, set[str]] = {}
    for name in old.keys() & new.keys():
        # Of several optimizers, each of which has one, perhaps with equal values, the last part of
        # the path is shown.
        shown = values.setdefault(name.rpartition("/")[2], set())
        shown.add(_value_text(old[name]))
        shown.add(_value_text(new[name]))

    def erase_value(match: re.Match[str]) -> str:
        return f"{match[1]}=" if match[2] in values.get(match[1], ()) else match[0]

    # In one pass, not in one for each name: somebody else's setup may have ten thousand names.
    old_text = _ARGUMENT.sub(erase_value, first.get("optimizer") or "")
    new_text = _ARGUMENT.sub(erase_value, second.get("optimizer") or "")
    return old != new and old_text == new_text


_ARGUMENT = re.compile(r"\b(\w++)=([^,()=]++)(?=[,)])")
"""An argument in the text of an optimizer."""


def _value_text(value: object) -> str:
    return str(shortest_digits(value) if isinstance(value, float) else value)


def _program_at(stage: str, start: Mapping[str, Any]) -> Mapping[str, Any]:
    for program in (start.get("setup") or {}).get("programs") or ():
        if str(program.get("stage") or 0) == stage:
            found: Mapping[str, Any] = program
            return found
    return {}


def _stem(name: str) -> str:
    return name.partition("[")[0]


def same(a: Any, b: Any) -> bool:
    if a is _ABSENT or b is _ABSENT:
        return a is b
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _shown(value: Any, other: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if (
        isinstance(value, float)
        and isinstance(other, float)
        and shortest_digits(value) != shortest_digits(other)
    ):
        value = shortest_digits(value)
    is_plain = isinstance(value, str) and value and str(other) != value
    return truncate(value if is_plain else json.dumps(value), 80)


# The first lines in which two printed programs differ.

_MAX_LINES = 5
"""How many lines are shown."""
_COMPARED = 400
"""How many lines are compared, from the first one on that differs."""
_MAX_SHOWN = 60
"""How many characters of a line are shown."""
_BOUND = re.compile(r"\b([a-z]+):(?=[a-z]+\d*(?:<\w+>)?\[)")
_WORD = re.compile(r"(= )?\b([a-z]{1,4})\b(?![=<\[])(:)?")
_KEY = re.compile(r"\bkey<\w+>")


def differing_lines(old_program: str, new_program: str, *, any_keys: bool = False) -> list[str]:
    """Return the first lines in which two programs differ, without the names of their variables.

    With `any_keys`, PRNG keys of all implementations are equal.
    """
    if any_keys:
        old_program = _KEY.sub("key", old_program)
        new_program = _KEY.sub("key", new_program)
    old = _erase_names(old_program)
    new = _erase_names(new_program)
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    # Not all that follows: difflib takes quadratic time.
    replaced = _replaced(old[first : first + _COMPARED], new[first : first + _COMPARED])
    return list(dict.fromkeys(replaced))[:_MAX_LINES]


def _replaced(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, old_start, old_stop, new_start, new_stop in matcher.get_opcodes():
        if kind == "equal":
            continue
        pairs = itertools.zip_longest(
            old[old_start:old_stop], new[new_start:new_stop], fillvalue=""
        )
        for old_line, new_line in pairs:
            if old_line or new_line:
                yield (
                    f"{truncate(old_line, _MAX_SHOWN) or 'nothing'} → "
                    f"{truncate(new_line, _MAX_SHOWN) or 'nothing'}"
                )


def _erase_names(text: str) -> list[str]:
    names = set(_BOUND.findall(text))

    def erase(word: Any) -> str:
        return word[0] if word[1] or word[2] not in names else ""

    return [" ".join(_WORD.sub(erase, line).split()) for line in text.split("\n")]
